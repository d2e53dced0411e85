"""Whose legs are one request and which workers are one deployment: the rules in order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import polars as pl

from pdtrace import _identity_deployments as deployments
from pdtrace import _identity_edges as edges
from pdtrace import _identity_files as files
from pdtrace import _identity_groups as groups
from pdtrace import _identity_latency as latency
from pdtrace import _identity_names as bare_names
from pdtrace import _identity_rooms as rooms
from pdtrace._graph import Ints, components
from pdtrace._identity_legs import numbered, read, weak
from pdtrace._lookup import repeated
from pdtrace._worker_union import unite
from pdtrace.records import dataclass
from pdtrace.store import Store

_EDGE_TABLE = {"leg_a": pl.String, "leg_b": pl.String, "rule": pl.String, "key": pl.String}


@dataclass(frozen=True)
class _Joined:
    """Legs, their requests and what these connect, before files that know no server are looked at."""

    legs: pl.DataFrame
    grouped: groups.Groups
    community: deployments.Community
    names: pl.Series


class Begun:
    """The rules that need only legs, applied by another thread: of use while legs and links stay as they are."""

    def __init__(self, store: Store, kept: pl.DataFrame) -> None:
        self._kept: pl.DataFrame | None = kept
        self._links = deployments.links(store, store.filled())
        pool = ThreadPoolExecutor(1, "pdtrace-identity")
        self._joined = pool.submit(_without_spans, read(store), _paths(store), self._links)
        pool.shutdown(wait=False)

    def take(self, kept: pl.DataFrame | None, links: list[tuple[str, str]]) -> _Joined | None:
        """What follows from these legs, if they are the same; it is let go here."""
        before, self._kept = self._kept, None
        if kept is None or kept is not before or links != self._links:
            return None
        found = self._joined.result()
        del self._joined
        return found


def begin(store: Store) -> Begun | None:
    """Begin with legs that are kept aside, while copies are sought and records counted: hardly ever that changes them."""
    kept = store.kept_aside("legs")
    return None if kept is None else Begun(store, kept)


def _without_spans(
    rows: pl.DataFrame, paths: dict[int, str], links: list[tuple[str, str]]
) -> _Joined | None:
    """None where spans between the legs must be looked at."""
    legs = numbered(rows, paths)
    if legs["traced"].any():
        return None
    return _joined(legs, np.full(legs.height, -1, dtype=np.int64), links)


def _joined(legs: pl.DataFrame, parent: Ints, links: list[tuple[str, str]]) -> _Joined:
    grouped = joined(legs, parent, links)
    community = deployments.communities(legs, grouped.label, links)
    return _Joined(legs, grouped, community, request_names(legs, grouped.label))


def _paths(store: Store) -> dict[int, str]:
    return dict(store.rows("SELECT source, path FROM sources"))


def link(store: Store, begun: Begun | None = None) -> None:
    """Fill deployments, identity_edges, legs.deployment, legs.request and workers.deployment. `begun`: what begin() gave."""
    deployments.restore_weak(store)
    paths = _paths(store)
    links = deployments.links(store, store.filled())
    first = begun and begun.take(store.kept_aside("legs"), links)
    if not first:
        legs = numbered(read(store), paths)
        first = _joined(legs, edges.parents(legs, _spans(store)), links)
    legs = first.legs
    grouped, community = _with_files(store, legs, first.grouped, first.community, links)
    names = first.names
    if grouped is not first.grouped:
        names = request_names(legs, grouped.label)
    found = deployments.gather(legs, grouped.label, community, paths)
    silent = deployments.silent_workers(store, _placed(legs, community, found))
    hinted = deployments.by_folder(silent, found, paths)
    ids = {root: d.id for root, d in found.items()}
    of_leg = pl.Series(community.legs).replace_strict(ids, default=None, return_dtype=pl.String)
    _write_legs(store, legs, of_leg, names)
    _write_edges(store, legs, grouped.edges)
    telling = {w.worker for w in silent if w.telling}
    _write_workers(store, legs, community, of_leg, ids, hinted, telling)
    _write_deployments(store, found, ids, hinted)
    unite(store)
    bare_names.resolve(store)
    rooms.unite(store)


def joined(legs: pl.DataFrame, parent: Ints, links: list[tuple[str, str]]) -> groups.Groups:
    """Requests from trees, references and shared ids. Pure: frames in, labels and edges out."""
    named = pl.concat([edges.references(legs), edges.same_span(legs), edges.same_row(legs)])
    tree = components(legs.height, np.flatnonzero(parent >= 0), parent[parent >= 0])
    keys = edges.between_trees(edges.id_keys(legs), tree)
    if keys.height:
        first = groups.group(legs, parent, named)
        known = deployments.communities(legs, first.label, links)
        named = pl.concat([named, edges.shared_ids(legs, keys, known.legs)])
        return groups.group(legs, parent, named)
    return groups.group(legs, parent, named)


def _spans(store: Store) -> edges.Spans:
    def between(traces: pl.DataFrame) -> pl.DataFrame:
        store.connection.register("_traces", traces.to_arrow())
        found = store.sql(
            """SELECT trace_id, span_id, parent_span_id FROM spans
               SEMI JOIN _traces USING (trace_id) ORDER BY start_ns"""
        )
        store.connection.unregister("_traces")
        return found

    return between


def _with_files(
    store: Store,
    legs: pl.DataFrame,
    grouped: groups.Groups,
    community: deployments.Community,
    links: list[tuple[str, str]],
) -> tuple[groups.Groups, deployments.Community]:
    """Join rows of bench files and tables, which need to know the deployments."""
    if not legs.select(pl.col("lo").is_null().any()).item():
        return grouped, community
    servers = files.server_side(legs, grouped.label, community.legs)
    windows = store.sql(
        """PIVOT (SELECT worker, key, TRY_CAST(value AS BIGINT) AS value FROM facts
                  WHERE worker IS NOT NULL)
           ON key IN ('window_start_ns', 'window_end_ns') USING max(value) GROUP BY worker"""
    )
    more = pl.concat([files.bench_rows(legs, servers, windows), files.rows_by_id(legs, servers)])
    more = more.unique("a", keep="first", maintain_order=True)
    if more.height == 0:
        return grouped, community
    label = grouped.label.copy()
    real = label >= 0
    merged = components(
        legs.height, grouped.label[more["a"].to_numpy()], grouped.label[more["b"].to_numpy()]
    )
    label[real] = merged[label[real]]
    grouped = groups.Groups(label, pl.concat([grouped.edges, more]))
    links = [*links, *files.sharing(legs, more)]
    return grouped, deployments.communities(legs, label, links)


def request_names(legs: pl.DataFrame, label: Ints) -> pl.Series:
    """The unique name of every leg's request: the id that travelled, else the outermost leg's."""
    rows = legs.select(
        "n", "leg", "obs", "lo", "external_id", "container",
        name=pl.coalesce("external_id", "request_id", "trace_id", "leg"),
        own=pl.col("external_id").eq_missing(pl.col("request_id")),
    ).with_columns(pl.Series("label", label))  # fmt: skip
    real = rows.filter((pl.col("label") >= 0) & ~pl.col("container"))
    shared = repeated(real["label"])
    single = real.filter(~shared).select("label", "name", "lo", "leg")
    several = _outermost(real.filter(shared)).select("label", "name", "lo", "leg")
    named = pl.concat([single, several])
    again = repeated(named["name"].hash())
    if again.any():
        again = named["name"].is_duplicated()
    if not again.any() and named.height == rows.height:
        return rows["name"]  # every leg is a request of its own
    twice = named.filter(again).sort("name", "lo", "leg", nulls_last=True)
    place = pl.int_range(pl.len()).over("name")
    twice = twice.with_columns(
        pl.when(place == 0)
        .then("name")
        .otherwise(pl.format("{}#{}", "name", place + 1))
        .alias("name")
    )
    named = pl.concat([named.filter(~again), twice])
    return rows.join(
        named.select("label", request="name"), on="label", how="left", maintain_order="left"
    )["request"]


def _outermost(rows: pl.DataFrame) -> pl.DataFrame:
    """The leg of each label that names it: with an id that travelled, outermost, named by its caller, earliest, smallest id.

    Of several records of the outermost component (span, log, request trace) some may know only the id that it made itself.
    """
    order = ["label", "bare", "obs", "own", "lo"]
    rows = rows.with_columns(pl.col("external_id").is_null().alias("bare"))
    ordered = rows.select(*order, at=pl.int_range(pl.len())).sort(order, nulls_last=True)
    new = pl.col("label").ne_missing(pl.col("label").shift())
    other = pl.any_horizontal(pl.col(c).ne_missing(pl.col(c).shift()) for c in order)
    marked = ordered.select("at", new.alias("new"), other.cum_sum().alias("place"))
    leading = pl.when("new").then("place").forward_fill()  # of those alike that stand first
    first = marked.filter(pl.col("place") == leading)
    best = rows[first["at"]]
    if first.height > marked["new"].sum():  # texts are compared only where nothing else decides
        best = best.sort("label", "leg").unique("label", keep="first", maintain_order=True)
    return best


def _placed(
    legs: pl.DataFrame, community: deployments.Community, found: dict[int, deployments.Deployment]
) -> set[str]:
    """Workers whose deployment follows from requests."""
    linked = {name for name, root in community.workers.items() if root in found}
    return linked | set(legs["worker"].drop_nulls().unique())


def _write_legs(store: Store, legs: pl.DataFrame, of_leg: pl.Series, request: pl.Series) -> None:
    named = (of_leg.alias("deployment"), request.alias("request"))
    if (kept := store.kept_aside("legs")) is not None:
        store.keep_aside("legs", kept.with_columns(named))
        return
    frame = legs.select("row").with_columns(named)
    store.connection.register("_joined", frame.to_arrow())
    store.execute(
        """UPDATE legs SET deployment = j.deployment, request = j.request
           FROM _joined j WHERE legs.rowid = j.row"""
    )
    store.connection.unregister("_joined")


def _write_edges(store: Store, legs: pl.DataFrame, found: pl.DataFrame) -> None:
    leg = legs["leg"]
    pair = found["a"] * legs.height + found["b"]  # legs are still numbers
    if (again := repeated(pair)).any():
        found = pl.concat([found.filter(~again), found.filter(again).unique()])
    frame = pl.DataFrame(
        {
            "leg_a": leg.gather(found["a"]),
            "leg_b": leg.gather(found["b"]),
            "rule": found["rule"],
            "key": found["key"],
        },
        schema=_EDGE_TABLE,
    )
    store.replace("identity_edges", frame)


def _write_workers(
    store: Store,
    legs: pl.DataFrame,
    community: deployments.Community,
    of_leg: pl.Series,
    ids: dict[int, str],
    hinted: dict[str, int],
    telling: set[str],
) -> None:
    """workers.deployment; names that several processes bear are split, in every table.

    Bare service names that nothing hangs on are left out.
    """
    known = {name: ids[root] for name, root in community.workers.items() if root in ids}
    known |= {name: ids[root] for name, root in hinted.items()}
    clients = legs.select("worker").with_columns(of_leg.alias("deployment"), weak().alias("weak"))
    for worker, deployment in (
        clients.filter(~pl.col("weak") & pl.col("deployment").is_not_null())
        .group_by("worker", "deployment")
        .len()
        .sort("len", "deployment")
        .select("worker", "deployment")
        .iter_rows()
    ):
        known.setdefault(worker, deployment)
    split = deployments.split_weak(legs, of_leg, clients["weak"])
    rows = store.short("SELECT * FROM workers").unique("worker", keep="first", maintain_order=True)
    rows = rows.with_columns(
        pl.col("worker")
        .replace_strict(known, default=None, return_dtype=pl.String)
        .alias("deployment")
    )
    if split.height:
        rows = _split_rows(rows, split)
        _split_tables(store, split)
    used = pl.col("deployment").is_not_null() | ~weak() | pl.col("worker").is_in(list(telling))
    store.replace("workers", rows.filter(used))


def _split_rows(rows: pl.DataFrame, split: pl.DataFrame) -> pl.DataFrame:
    """Rows of workers with one row per deployment for each weak name."""
    names = split.select("worker", "id", of="deployment").unique().sort("worker", "id")
    parts = names.join(rows, on="worker", how="left").with_columns(
        pl.col("of").alias("deployment"), pl.col("id").alias("worker")
    )
    return pl.concat([rows.join(names, on="worker", how="anti"), parts.select(rows.columns)])


def _split_tables(store: Store, split: pl.DataFrame) -> None:
    """Give the rows of every table the split names: legs by deployment, others by source."""
    store.connection.register("_split", split.filter(pl.col("worker") != pl.col("id")).to_arrow())
    store.execute(
        """UPDATE legs SET worker = s.id FROM (SELECT DISTINCT worker, deployment, id FROM _split) s
           WHERE legs.worker = s.worker AND legs.deployment = s.deployment"""
    )
    store.execute(
        """UPDATE decisions SET router = s.id
           FROM legs l, (SELECT DISTINCT deployment, id, worker FROM _split) s
           WHERE decisions.leg = l.leg AND l.deployment = s.deployment
             AND decisions.router = s.worker"""
    )
    # A name that means one deployment in a source, or in all sources, is that one's.
    by_source = """SELECT worker, source, min(id) AS id FROM _split
                   GROUP BY ALL HAVING count(DISTINCT id) = 1"""
    anywhere = (
        """SELECT worker, min(id) AS id FROM _split GROUP BY ALL HAVING count(DISTINCT id) = 1"""
    )
    for table, column in (
        ("samples", "worker"), ("events", "worker"), ("steps", "worker"),
        ("step_members", "worker"), ("facts", "worker"), ("worker_aliases", "worker"),
        ("decisions", "router"), ("decisions", "worker"),
        ("transfers", "source_worker"), ("transfers", "destination_worker"),
    ):  # fmt: skip
        store.execute(
            f"""UPDATE {table} SET {column} = s.id FROM ({by_source}) s
                WHERE {table}.{column} = s.worker AND {table}.source = s.source"""
        )
        store.execute(
            f"""UPDATE {table} SET {column} = s.id FROM ({anywhere}) s
                WHERE {table}.{column} = s.worker"""
        )
    store.connection.unregister("_split")


def _write_deployments(
    store: Store,
    found: dict[int, deployments.Deployment],
    ids: dict[int, str],
    hinted: dict[str, int],
) -> None:
    names = deployments.names(found)
    by_hint = set(hinted.values())
    rows = [
        {
            "deployment": ids[root],
            "name": names[root],
            "name_basis": ", ".join([*d.basis, *(["folder"] if root in by_hint else [])]),
            "mode": "unknown",
            "start_ns": d.window[0] if d.window else None,
            "end_ns": d.window[1] if d.window else None,
        }
        for root, d in sorted(found.items(), key=lambda item: item[1].key)
    ]
    store.replace("deployments", rows)


def build_requests(store: Store) -> None:
    """Fill requests and observations, roles, mode and headline of deployments."""
    latency.build(store)


__all__ = ["build_requests", "joined", "link", "request_names"]
