"""Deployments: worker instances that exchange requests. Folders are the last hint, and said."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from pathlib import PurePosixPath

import numpy as np
import polars as pl

from pdtrace import _identity_segments as segments
from pdtrace._graph import Ints, components
from pdtrace._identity_edges import untimed_servers
from pdtrace._identity_legs import CLIENT, ENGINE, weak
from pdtrace._worker_names import folder, plain, rename
from pdtrace.model import DATED_FROM_NS
from pdtrace.records import dataclass
from pdtrace.store import Store

_LEVELS = 3  # folders that are climbed to find the deployment of a file without requests
HOME = 0.9  # share of a client file's requests in one deployment that makes it the file's
_HOUR_NS = 3600 * 10**9


@dataclass(frozen=True)
class Community:
    """What belongs to one deployment as far as requests and names tell, by label."""

    legs: Ints  # label of every leg
    workers: dict[str, int]  # label of every strong worker


def communities(legs: pl.DataFrame, label: Ints, links: list[tuple[str, str]]) -> Community:
    """Connect requests through the workers that saw them, and workers through `links`.

    Clients connect nothing: one load generator may drive two deployments. Names that several
    processes may bear (a bare service.name) count as one process only inside one source (or the pieces
    of one recording), and behind a long pause only where no other processes serve.
    """
    group = np.where(label >= 0, label, np.arange(legs.height))
    frame = legs.select(
        "worker", "source", "part", "lo", "hi", "obs", "leg", "row_index", weak().alias("weak")
    ).with_columns(pl.Series("group", group))
    serving = frame.filter(pl.col("obs") > CLIENT)
    strong = serving.filter(~pl.col("weak"))
    names = sorted({*strong["worker"].unique(), *(w for link in links for w in link)})
    number = {name: legs.height + n for n, name in enumerate(names)}
    node = pl.col("worker").replace_strict(number, return_dtype=pl.Int64) if number else pl.lit(0)
    edges = [strong.select("group", node=node)]
    base = legs.height + len(names)
    cut = segments.segments(serving.filter(pl.col("weak") & pl.col("worker").is_not_null()))
    edges.append(cut.select("group", node=pl.col("segment") + base))
    edges += [_told(legs, group), _one_writer(legs, group)]
    total = base + cut["segment"].n_unique()
    a = np.concatenate(
        [e["group"].to_numpy() for e in edges] + [np.array([number[x] for x, _ in links], np.int64)]
    )
    b = np.concatenate(
        [e["node"].to_numpy() for e in edges] + [np.array([number[y] for _, y in links], np.int64)]
    )
    joined = components(total, a, b)
    on = segments.resumed(cut, joined[base:], np.unique(joined[legs.height : base]))
    if on.height:
        more_a, more_b = on["before"].to_numpy() + base, on["after"].to_numpy() + base
        joined = components(total, np.concatenate([a, more_a]), np.concatenate([b, more_b]))
    mine = joined[group]
    return Community(
        _files(frame, mine, joined), {name: int(joined[n]) for name, n in number.items()}
    )


def _told(legs: pl.DataFrame, group: Ints) -> pl.DataFrame:
    """Requests of which only a table tells who served them: one table, one deployment.

    As (group, node) where node is the group of the table's first such request. Where records of
    servers tell of a request, they decide.
    """
    told = untimed_servers(legs)
    rows = legs.select("source", "obs").with_columns(told.alias("told"), pl.Series("group", group))
    other = rows.filter((pl.col("obs") > CLIENT) & ~pl.col("told"))["group"].unique()
    alone = rows.filter(pl.col("told") & ~pl.col("group").is_in(other.implode()))
    return alone.select("group", node=pl.col("group").min().over("source"))


def _one_writer(legs: pl.DataFrame, group: Ints) -> pl.DataFrame:
    """Requests that a nameless front end and an engine are told of in one record: its file is that front end's.

    As (group, node) where node is the group of the file's first such request.
    """
    none = pl.DataFrame(schema={"group": pl.Int64, "node": pl.Int64})
    if "record" not in legs.columns:
        return none
    rows = legs.select("source", "record", "obs", "worker").with_columns(pl.Series("group", group))
    front = pl.col("worker").is_null() & (pl.col("obs") > CLIENT) & (pl.col("obs") < ENGINE)
    fronts = rows.filter(front, pl.col("source").is_not_null(), pl.col("record").is_not_null())
    if fronts.height == 0:
        return none
    engines = rows.filter(pl.col("obs") == ENGINE)
    both = fronts.join(engines, on=["source", "record"], how="semi")
    return both.select("group", node=pl.col("group").min().over("source"))


def _files(frame: pl.DataFrame, mine: Ints, joined: Ints) -> Ints:
    """Requests that no serving component saw: with the rest of their file if that is in one place, else apart.

    Runs that a load generator wrote into one file are clients of their own (`file:` names): kept apart,
    so that the latencies of two loads are never one figure.
    """
    rows = frame.with_columns(pl.Series("mine", mine), pl.Series("n", np.arange(frame.height)))
    served = rows.filter((pl.col("obs") > CLIENT) & pl.col("worker").is_not_null())["mine"].unique()
    lost = ~rows["mine"].is_in(served.implode())
    if not lost.any():
        return mine
    clients = rows.filter(pl.col("obs") == CLIENT).filter(pl.col("mine").is_in(served.implode()))
    # Where the file's other requests lie in several deployments, nothing says whose these were.
    home = (
        clients.group_by("source", "mine")
        .len()
        .filter(pl.col("len") >= HOME * pl.col("len").sum().over("source"))
        .select("source", home="mine")
    )
    alone = rows.filter(lost).join(home, on="source", how="left")
    run = pl.when(pl.col("worker").str.starts_with("file:")).then("worker")
    own = pl.col("mine").min().over("source", run)
    placed = alone.with_columns(pl.coalesce("home", own).alias("home"))
    result = mine.copy()
    # A request of several such legs (two client files of one run) keeps together.
    result[placed["n"].to_numpy()] = placed["home"].to_numpy()
    pairs = components(joined.size, mine[placed["n"].to_numpy()], placed["home"].to_numpy())
    return pairs[result]


def links(store: Store, filled: frozenset[str]) -> list[tuple[str, str]]:
    """Pairs of strong workers that name each other: KV engine ids, router choices, KV movements."""
    if not filled & {"facts", "decisions", "transfers"}:
        return []
    weak_name = "NOT regexp_matches({0}, '^(service|address|unknown):')"
    found = store.connection.execute(
        f"""WITH engine AS (
              SELECT worker, value FROM worker_aliases WHERE kind = 'engine_id'
              UNION SELECT worker, value FROM facts
              WHERE key = 'kv_engine_id' AND worker IS NOT NULL
            ), pairs AS (
              SELECT f.worker AS a, e.worker AS b FROM facts f JOIN engine e USING (value)
              WHERE f.key IN ('kv_engine_id', 'remote_engine_id') AND f.worker IS NOT NULL
              UNION SELECT router, worker FROM decisions
              WHERE router IS NOT NULL AND worker IS NOT NULL
              UNION SELECT source_worker, destination_worker FROM transfers
              WHERE source_worker IS NOT NULL AND destination_worker IS NOT NULL
            )
            SELECT DISTINCT least(a, b), greatest(a, b) FROM pairs
            WHERE a <> b AND {weak_name.format("a")} AND {weak_name.format("b")}"""
    ).fetchall()
    return sorted(found)


@dataclass
class Deployment:
    """One deployment while its parts are gathered."""

    key: str
    folders: Counter[str]
    sources: set[int]
    basis: list[str]
    window: tuple[int, int] | None
    services: set[str]

    @property
    def id(self) -> str:
        """Short hash of the smallest worker or source key."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:10]


def gather(
    legs: pl.DataFrame, label: Ints, community: Community, paths: dict[int, str]
) -> dict[int, Deployment]:
    """The deployments that have requests, by community label."""
    rows = legs.select(
        "worker", "source", "lo", "hi", "obs", "container", weak().alias("weak")
    ).with_columns(pl.Series("community", community.legs), pl.Series("label", label))
    parts = rows.group_by("community", "source", "worker").agg(
        pl.len().alias("legs"),
        pl.col("lo").min(),
        pl.col("hi").max(),
        pl.col("obs").max(),
        pl.col("weak").first(),
        ((pl.col("label") >= 0) & ~pl.col("container")).any().alias("real"),
    )
    found: dict[int, Deployment] = {}
    strong: dict[int, list[str]] = defaultdict(list)
    for worker, root in community.workers.items():
        strong[root].append(worker)
    for (root,), part in parts.sort("community", "source", "worker").group_by(
        ["community"], maintain_order=True
    ):
        if not part["real"].any():
            continue
        assert isinstance(root, int)
        names = strong.get(root, [])
        # Files lie elsewhere tomorrow: processes come first.
        lasting = [name for name in names if not name.startswith(("file:", "pid:"))]
        keys = (
            lasting
            or names
            or [
                f"{paths.get(source, source)}|{plain(worker or '')}|{low if hard else ''}"
                for source, worker, low, hard in part.select(
                    "source", "worker", "lo", pl.col("obs") > CLIENT
                ).iter_rows()
            ]
        )
        folders: Counter[str] = Counter()
        for source, count in part.select("source", "legs").iter_rows():
            if source in paths:
                folders[folder(paths[source])] += count
        low, high = part["lo"].min(), part["hi"].max()
        found[root] = Deployment(
            key=min(keys),
            folders=folders,
            sources={s for s in part["source"] if s is not None},
            basis=[
                "requests" if len(names) > 1 or part.height > 1 else "worker" if names else "file"
            ],
            window=_window(low, high),
            services={
                plain(w).partition(":")[2] for w in part["worker"] if w and w.startswith("service:")
            },
        )
    return found


def _window(low: object, high: object) -> tuple[int, int] | None:
    """From the first to the last instant, where they have a date."""
    known = isinstance(low, int) and isinstance(high, int) and low >= DATED_FROM_NS
    return (low, high) if known else None  # type: ignore[return-value]


@dataclass(frozen=True)
class Silent:
    """A worker without requests: where its records stand and when."""

    worker: str
    sources: frozenset[int]
    window: tuple[int, int] | None
    telling: bool = False  # it has samples, steps or events


def silent_workers(store: Store, placed: set[str]) -> list[Silent]:
    """Workers that no leg names, with sources and time range of what is known of them."""
    known = """SELECT worker, min(start_ns) AS start_ns, max(end_ns) AS end_ns
               FROM workers GROUP BY worker"""
    if all(worker in placed for worker, *_ in store.rows(known)):
        return []
    parts = " UNION ALL ".join(
        f"SELECT worker, source, min({first}) AS low, max({last}) AS high,"
        f" '{table}' NOT IN ('worker_aliases', 'facts') AS telling FROM {table} GROUP BY ALL"
        for table, first, last in (
            ("worker_aliases", "NULL::BIGINT", "NULL::BIGINT"),
            ("facts", "NULL::BIGINT", "NULL::BIGINT"),
            ("samples", "time_ns", "time_ns"),
            ("events", "time_ns", "time_ns"),
            ("steps", "coalesce(start_ns, start_lower_ns)", "coalesce(start_ns, start_upper_ns)"),
        )
    )
    rows = store.connection.execute(
        f"""SELECT w.worker, list(DISTINCT p.source) FILTER (p.source IS NOT NULL),
                   min(coalesce(p.low, w.start_ns)), max(coalesce(p.high, w.end_ns)),
                   coalesce(bool_or(p.telling), false)
            FROM ({known}) w
            LEFT JOIN ({parts}) p USING (worker) GROUP BY w.worker ORDER BY 1"""
    ).fetchall()
    return [
        Silent(worker, frozenset(sources or ()), None if low is None else (low, high), telling)
        for worker, sources, low, high, telling in rows
        if worker not in placed
    ]


def by_folder(
    silent: list[Silent], deployments: dict[int, Deployment], paths: dict[int, str]
) -> dict[str, int]:
    """The deployment of each silent worker by the folder of its sources, where there is just one.

    Adds a deployment for each folder that tells of workers and is near no requests.
    """
    found: dict[str, int] = {}
    lost: dict[str, list[Silent]] = defaultdict(list)
    for worker in silent:
        places = sorted({folder(paths[s]) for s in worker.sources if s in paths})
        near = [_near(place, worker, deployments) for place in places]
        choices = {root for fitting, _ in near for root in fitting}
        if len(choices) == 1:
            found[worker.worker] = choices.pop()
        elif not any(inside for _, inside in near) and worker.telling and places:
            lost[places[0]].append(worker)
    for number, place in enumerate(sorted(lost), start=1):
        deployments[-number] = _of_folder(place, lost[place])
        found |= {worker.worker: -number for worker in lost[place]}
    return found


def _of_folder(place: str, members: list[Silent]) -> Deployment:
    """A deployment without requests: what lies in one folder."""
    windows = [w.window for w in members if w.window]
    return Deployment(
        key=min(w.worker for w in members),
        folders=Counter({place: 1}),
        sources={s for w in members for s in w.sources},
        basis=[],
        window=(min(w[0] for w in windows), max(w[1] for w in windows)) if windows else None,
        services=set(),
    )


def _near(
    place: str, worker: Silent, deployments: dict[int, Deployment]
) -> tuple[list[int], list[int]]:
    """Deployments with sources in this folder, or below its nearest ancestor that has any.

    Those that fit in time (when just one does), and all.
    """
    above = [PurePosixPath(place), *PurePosixPath(place).parents]
    for level, ancestor in enumerate(above[:_LEVELS]):
        if level and str(ancestor) in {".", "/"}:
            break
        inside = [
            root
            for root, d in deployments.items()
            if any(
                f == str(ancestor) or (level and f.startswith(f"{ancestor}/")) for f in d.folders
            )
        ]
        fitting = [root for root in inside if _in_time(worker.window, deployments[root].window)]
        if inside:
            return (fitting if len(fitting) == 1 else []), inside
    return [], []


def _in_time(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
    """Whether two windows overlap, with an hour for start-up and idle time; unknown ones may."""
    return a is None or b is None or (a[0] <= b[1] + _HOUR_NS and b[0] <= a[1] + _HOUR_NS)


def names(deployments: dict[int, Deployment]) -> dict[int, str]:
    """A name for people, unique: the folder that most requests came from, else the services."""
    order = sorted(deployments, key=lambda r: (deployments[r].window or (0, 0), deployments[r].key))
    short = {root: _name(deployments[root], 1) for root in order}
    longer = {root: _name(deployments[root], 2) for root in order}
    counts = Counter(short.values())
    chosen = {root: short[root] if counts[short[root]] == 1 else longer[root] for root in order}
    taken: Counter[str] = Counter()
    unique = {}
    for root in order:
        taken[chosen[root]] += 1
        place = taken[chosen[root]]
        unique[root] = chosen[root] if place == 1 else f"{chosen[root]} #{place}"
    return unique


def _name(d: Deployment, parts: int) -> str:
    """The last parts of the folder that most legs came from; the services where there is none.

    A file that joins nothing is named by itself: its folder says nothing of it.
    """
    if d.basis == ["file"] and (path := PurePosixPath(d.key.partition("|")[0])).name:
        if str(path) == "-":
            return "standard input"
        return "/".join(path.parts[-parts:])
    best = min(d.folders, key=lambda f: (-d.folders[f], f)) if d.folders else ""
    folders = [part for part in PurePosixPath(best).parts if part not in {"/", "."}]
    return "/".join(folders[-parts:]) or ", ".join(sorted(d.services)) or "deployment"


def split_weak(legs: pl.DataFrame, ids: pl.Series, weak_legs: pl.Series) -> pl.DataFrame:
    """Which weak worker of which source is which deployment's: (worker, source, deployment, id)."""
    seen = (
        legs.select("worker", "source")
        .with_columns(ids.alias("deployment"))
        .filter(weak_legs & pl.col("worker").is_not_null() & pl.col("deployment").is_not_null())
        .unique()
    )
    many = pl.col("deployment").n_unique().over("worker") > 1
    service = pl.col("worker").str.starts_with("service:")
    return seen.with_columns(
        pl.when(service | many)
        .then(pl.col("worker") + "@" + pl.col("deployment"))
        .otherwise("worker")
        .alias("id")
    )


def restore_weak(store: Store) -> None:
    """Take back the split of an earlier run, so that identity can run again."""
    old = [w for (w,) in store.rows("SELECT DISTINCT worker FROM workers") if w]
    back = {w: plain(w) for w in old if plain(w) != w}
    if back:
        rename(store, back, skip=())
