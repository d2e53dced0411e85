"""Evidence that two legs belong together: parents through spans, shared ids, named references.

Legs come as _identity_legs.described() gives them; edges are frames (a, b, rule, key) over their
numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from pdtrace._graph import Ints
from pdtrace._identity_legs import CLIENT, ENGINE, NEAR_NS, loose
from pdtrace._lookup import repeated

TIGHT_NS = 2 * 10**9  # gap between legs of one request when clocks agree
STREAM_NS = 5 * 10**6  # streams of one request start this close
LARGEST_KEY = 64  # a value that more legs share is no request id
_RECORD_KIND = r"^([a-z]+_[a-z_]+)/"  # of leg ids that say it, as dynamo_log/<request id>
_HEX8 = r"-[0-9a-f]{8}$"  # vLLM >= 0.14 puts 8 random hex digits behind its internal request id

EDGE = {"a": pl.Int64, "b": pl.Int64, "rule": pl.String, "key": pl.String}
Spans = Callable[[pl.DataFrame], pl.DataFrame]


def no_edges() -> pl.DataFrame:
    """A frame of edges without rows."""
    return pl.DataFrame(schema=EDGE)


def parents(legs: pl.DataFrame, spans: Spans) -> Ints:
    """Number of the nearest ancestor leg of every leg, -1 where there is none.

    `spans(traces)` gives trace_id, span_id, parent_span_id of the spans of these traces; spans
    that are no legs are climbed over.
    """
    parent = np.full(legs.height, -1, dtype=np.int64)
    several = legs.filter("traced")
    if several.height == 0:
        return parent
    targets = several.filter(pl.col("span_id").is_not_null()).select(
        "trace_id", pl.col("span_id").alias("up"), t="n", t_lo="lo", t_hi="hi", t_leg="leg"
    )
    front = several.filter(pl.col("parent_span_id").is_not_null()).select(
        "n", "trace_id", "lo", up="parent_span_id"
    )
    between: pl.DataFrame | None = None
    for _ in range(64):
        hits = _nearest(front.join(targets, on=["trace_id", "up"]))
        parent[hits["n"].to_numpy()] = hits["t"].to_numpy()
        front = front.join(hits, on="n", how="anti")
        if front.height == 0:
            break
        if between is None:
            between = spans(front.select("trace_id").unique()).unique(["trace_id", "span_id"])
        front = (
            front.join(between, left_on=["trace_id", "up"], right_on=["trace_id", "span_id"])
            .drop("up")
            .rename({"parent_span_id": "up"})
            .filter(pl.col("up").is_not_null())
        )
        if front.height == 0:
            break
    return parent


def _nearest(pairs: pl.DataFrame) -> pl.DataFrame:
    """Of the candidate parents of a leg, the one nearest in time; far ones are another run's."""
    fits = (
        pl.col("lo").is_null()
        | pl.col("t_lo").is_null()
        | (
            (pl.col("lo") >= pl.col("t_lo") - NEAR_NS)
            & (pl.col("lo") <= pl.coalesce("t_hi", "t_lo") + NEAR_NS)
        )
    )
    pairs = pairs.filter(fits & (pl.col("n") != pl.col("t")))
    if not pairs["n"].is_duplicated().any():
        return pairs
    return (
        pairs.with_columns((pl.col("lo") - pl.col("t_lo")).abs().alias("away"))
        .sort("n", "away", "t_leg", nulls_last=True)
        .unique("n", keep="first")
    )


def same_span(legs: pl.DataFrame) -> pl.DataFrame:
    """Legs that two sources made of one and the same span."""
    spans = legs.filter(
        pl.col("traced") & pl.col("span_id").is_not_null() & pl.col("lo").is_not_null()
    )
    if spans.height == 0:
        return no_edges()
    # By hashes first: hardly any span is there twice.
    twins = spans.filter(repeated(spans["trace_id"].hash(1) ^ spans["span_id"].hash()))
    if twins.height == 0:
        return no_edges()
    twins = twins.filter(pl.len().over("trace_id", "span_id") > 1).sort(
        "trace_id", "span_id", "lo", "leg"
    )
    span = ("trace_id", "span_id")
    twins = twins.with_columns(
        pl.col("n").first().over(span).alias("a"),
        (pl.col("lo") - pl.col("lo").first().over(span)).alias("away"),
    )
    # Another run under the same seed has the same ids, at another time.
    twins = twins.filter(
        (pl.col("away") <= TIGHT_NS + pl.col("res")) & (pl.col("n") != pl.col("a"))
    )
    return twins.select("a", b="n", rule=pl.lit("direct_parent"), key="span_id")


def references(legs: pl.DataFrame) -> pl.DataFrame:
    """remote_id: a leg names the request id that another component uses."""
    naming = legs.filter(pl.col("remote_id").is_not_null() & ~pl.col("container"))
    if naming.height == 0:
        return no_edges()
    bare = pl.col("remote_id").str.replace(_HEX8, "")
    wanted = naming.select(
        "n", "lo", "hi", "worker", "remote_id", name=pl.concat_list("remote_id", bare)
    )
    wanted = wanted.explode("name").unique(["n", "name"])
    named = pl.concat(
        [
            legs.filter(~pl.col("container") & pl.col(column).is_not_null()).select(
                m="n", m_lo="lo", m_hi="hi", m_worker="worker", m_leg="leg", name=column
            )
            for column in ("request_id", "external_id")
        ]
    ).unique(["m", "name"])
    gap = pl.max_horizontal("lo", "m_lo") - pl.min_horizontal(
        pl.coalesce("hi", "lo"), pl.coalesce("m_hi", "m_lo")
    )
    return (
        wanted.join(named, on="name")
        .filter(
            (pl.col("n") != pl.col("m"))
            & pl.col("worker").ne_missing(pl.col("m_worker"))
            & (gap <= NEAR_NS).fill_null(value=True)
        )
        .with_columns((pl.col("lo") - pl.col("m_lo")).abs().alias("away"))
        .sort("n", "away", "m_leg", nulls_last=True)
        .unique("n", keep="first")
        .select(a="m", b="n", rule=pl.lit("remote_reference"), key="remote_id")
    )


def same_row(legs: pl.DataFrame) -> pl.DataFrame:
    """A row of a table that names its worker made two legs: what was seen, and who served it."""
    if not untimed_servers(legs).any():
        return no_edges()
    row = ["source", "record"]
    servers = legs.filter(untimed_servers(legs)).select(*row, b="n", key="external_id")
    seen = legs.filter((pl.col("obs") < ENGINE) & ~pl.col("container")).select(
        *row, a="n", key="external_id"
    )
    pairs = servers.join(seen, on=[*row, "key"])
    return pairs.select("a", "b", rule=pl.lit("same_row"), key="key")


def untimed_servers(legs: pl.DataFrame) -> pl.Series:
    """Legs of engines, made by a row of a table, that no instant is known of."""
    if "record" not in legs.columns:
        return pl.repeat(value=False, n=legs.height, eager=True)
    timeless = (pl.col("obs") == ENGINE) & pl.col("lo").is_null() & ~pl.col("container")
    return legs.select(
        timeless & pl.all_horizontal(pl.col("record", "external_id", "worker").is_not_null())
    ).to_series()


def id_keys(legs: pl.DataFrame) -> pl.DataFrame:
    """(n, kind, key) of values that several legs with instants share; hops are left to trees."""
    able = legs.filter(~pl.col("container") & pl.col("lo").is_not_null())
    parts = []
    for column, kind, seed in (
        ("external_id", "id", 0),
        ("request_id", "id", 0),
        ("bootstrap_room", "bootstrap_room", 1),
        ("transfer_id", "transfer_id", 2),
    ):
        have = pl.col(column).is_not_null()
        if column == "request_id":
            have = have & pl.col("request_id").ne_missing(pl.col("external_id"))
        if able[column].null_count() < able.height:
            hashed = pl.col(column).hash(seed)
            parts.append(able.filter(have).select("n", kind=pl.lit(kind), key=column, k=hashed))
    if not parts:
        return pl.DataFrame(
            schema={"n": pl.Int64, "kind": pl.String, "key": pl.String, "k": pl.UInt64}
        )
    keys = pl.concat(parts)
    again = repeated(keys["k"])
    if not again.any():
        return keys.clear()
    keys = keys.filter(again)
    return keys.filter(pl.len().over("k").is_between(2, LARGEST_KEY))


def between_trees(keys: pl.DataFrame, tree: Ints) -> pl.DataFrame:
    """Without the ids that only legs of one call tree bear: the tree has joined what they could join."""
    trees = keys.select("k", (pl.col("kind") != "id").alias("named")).with_columns(
        pl.Series("tree", tree[keys["n"].to_numpy()])
    )
    several = (
        trees.group_by("k")
        .agg(
            pl.col("tree").min().alias("low"),
            pl.col("tree").max().alias("high"),
            pl.col("named").any(),
        )
        .filter((pl.col("low") < pl.col("high")) | pl.col("named"))
    )
    if several.height == 0:
        return keys.clear()
    return keys.join(several.select("k"), on="k", how="semi", maintain_order="left")


def shared_ids(legs: pl.DataFrame, keys: pl.DataFrame, community: Ints) -> pl.DataFrame:
    """Edges between legs that share an id, near in time, and complement each other.

    Where several legs of one kind bear an id at the same time (two deployments under the same
    seeded load, an id used for a whole session), `community` (a label per leg of what is known to
    belong together) and containment decide; what stays ambiguous is not joined.
    """
    if keys.height == 0:
        return no_edges()
    atoms, members = _atoms(legs, keys, community)
    tight = _cluster(atoms, TIGHT_NS)
    good, bad = _sound(tight)
    # Skewed clocks: one leg of each kind in all, further apart than the tight gap.
    wide, _ = _sound(_cluster(atoms, NEAR_NS))
    # Joined, not filtered by windows, which take many times as long over so many small groups.
    repeated = wide.group_by("k", "kind_of").len().filter(pl.col("len") > 1)
    single = wide.join(repeated.select("k"), on="k", how="anti", maintain_order="left")
    alone = atoms.with_columns(pl.col("atom").alias("cluster"))
    edges = [_chain(alone, members), _chain(good, members), _chain(single, members)]
    if bad.height:
        by_community, rest = _sound(
            bad.with_columns(pl.struct("cluster", "community").rank("dense").alias("cluster"))
        )
        edges += [_chain(by_community, members), _contained(rest, members)]
    return pl.concat(edges).unique(["a", "b"])


def _atoms(
    legs: pl.DataFrame, keys: pl.DataFrame, community: Ints
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """One atom per (id, component, sighting), with span, log line and streams; and its legs."""
    labels = pl.DataFrame({"n": np.arange(legs.height), "community": community})
    seen = (
        keys.join(
            legs.select(
                "n", "leg", "source", "worker", "obs", "stream", "attempt", "lo", "hi", "res",
                "plike", "failed", loose().alias("weak"), "role",
                record_kind=pl.col("leg").str.extract(_RECORD_KIND),
                spanned=pl.col("span_id").is_not_null(),
            ),
            on="n",
        )
        .join(labels, on="n")
        .sort("k", "obs", "worker", "lo", "leg")
    )  # fmt: skip
    # Sorted: the row before is the one before of the same id and worker, or of another.
    same = pl.all_horizontal(
        pl.col(c).eq_missing(pl.col(c).shift()) for c in ("k", "obs", "worker")
    )
    before = {
        c: pl.when(same).then(pl.col(c).shift())
        for c in ("lo", "hi", "res", "source", "stream", "record_kind", "spanned")
    }
    gap = pl.col("lo") - before["lo"]
    # One source may tell a request in two kinds of records (log lines and a request trace).
    other_record = pl.col("source").ne_missing(before["source"]) | (
        pl.col("record_kind") != before["record_kind"]
    ).fill_null(value=False)
    # Spans of two sources under a name that several processes may bear are two processes'.
    two_spans = (pl.col("weak") & pl.col("spanned") & before["spanned"]).fill_null(value=False)
    near = gap <= TIGHT_NS + pl.max_horizontal("res", before["res"])
    twin = other_record & near & ~two_spans
    stream = (gap == 0) | ((gap <= STREAM_NS) & pl.col("stream").ne_missing(before["stream"]))
    seen = seen.with_columns((~(twin | stream).fill_null(value=False)).cum_sum().alias("atom"))
    atoms = seen.group_by("atom").agg(
        pl.col("k", "kind", "key", "obs", "worker", "community").first(),
        pl.col("lo").min(),
        pl.col("hi").max(),
        pl.col("res").max(),
        (pl.col("plike").any() & ~(pl.col("role") == "decode").any()).alias("plike"),
        pl.col("failed").all(),
        pl.col("weak", "spanned").any(),
        pl.col("source").min(),
        pl.col("attempt").max(),
    )
    kind_of = pl.when(pl.col("plike") & (pl.col("obs") == ENGINE)).then(ENGINE + 1).otherwise("obs")
    return atoms.with_columns(kind_of.alias("kind_of")), seen.select(
        "atom", "n", "leg", "obs", "lo"
    )


def _cluster(atoms: pl.DataFrame, gap_ns: int) -> pl.DataFrame:
    """Atoms of one id, cut where nothing happened for longer than the gap; several at least."""
    ordered = atoms.sort("k", "lo", "atom").with_columns(
        pl.col("hi").cum_max().shift().over("k").alias("until")
    )
    new = (pl.col("lo") > pl.col("until") + gap_ns + pl.col("res")).fill_null(value=True)
    return ordered.with_columns(new.cum_sum().alias("cluster")).filter(pl.len().over("cluster") > 1)


def _sound(clusters: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Clusters where each kind of component occurs once or repeats with reason; and the others."""
    count = pl.len()
    # A second span under one bare name is another process: a record beside a span may be the same one.
    spans = clusters["spanned"].any()
    name = pl.col("worker").cast(pl.Categorical).to_physical()
    one_span = (
        (pl.col("spanned").sum() <= 1) | (name.n_unique() == count) if spans else pl.lit(value=True)
    )
    reason = (
        (count == 1)
        | (pl.col("failed").sum() >= count - 1)
        | (pl.col("attempt").max() > 0).fill_null(value=False)
        | (pl.col("weak").any() & (pl.col("source").n_unique() == count) & one_span)
    )
    # Grouped and joined back: windows over so many small groups take many times as long.
    kinds = clusters.group_by("cluster", "kind_of").agg(count.alias("atoms"), reason.alias("sound"))
    judged = clusters.join(
        kinds.group_by("cluster").agg(pl.col("atoms").sum(), pl.col("sound").all()),
        on="cluster",
        maintain_order="left",
    )
    several = judged.filter(pl.col("sound") & (pl.col("atoms") > 1))
    return several.drop("sound", "atoms"), judged.filter(~pl.col("sound")).drop("sound", "atoms")


def _chain(clusters: pl.DataFrame, members: pl.DataFrame) -> pl.DataFrame:
    """Edges from the outermost leg of a cluster to each other leg."""
    if clusters.height == 0:
        return no_edges()
    inside = clusters.select("cluster", "atom", "kind", "key").join(members, on="atom")
    inside = inside.sort("cluster", "obs", "lo", "leg")
    head = pl.col("n").first().over("cluster")
    pair = inside.with_columns(
        head.alias("a"), pl.col("obs").first().over("cluster").alias("outer")
    )
    return pair.filter(pl.col("a") != pl.col("n")).select("a", b="n", rule=_rule(), key="key")


def _rule() -> pl.Expr:
    return (
        pl.when(pl.col("kind") != "id")
        .then("kind")
        .when(pl.col("outer") == CLIENT)
        .then(pl.lit("http_request_id"))
        .otherwise(pl.lit("engine_request_id"))
    )


def _contained(clusters: pl.DataFrame, members: pl.DataFrame) -> pl.DataFrame:
    """In ambiguous clusters an inner leg joins the only outer leg that contains it, if mutual."""
    if clusters.height == 0:
        return no_edges()
    rows = clusters.select("cluster", "atom", "kind", "key", "obs", "kind_of", "lo", "hi", "res")
    pairs = rows.join(rows, on="cluster", suffix="_in").filter(pl.col("obs") < pl.col("obs_in"))
    slack = 10**7 + pl.max_horizontal("res", "res_in")
    pairs = pairs.filter(
        (pl.col("lo_in") >= pl.col("lo") - slack) & (pl.col("hi_in") <= pl.col("hi") + slack)
    )
    pairs = pairs.filter(
        (pl.len().over("atom_in", "obs") == 1) & (pl.len().over("atom", "kind_of_in") == 1)
    )
    legs = members.unique("atom", keep="first", maintain_order=True).select("atom", "n")
    return (
        pairs.join(legs, on="atom")
        .join(legs, left_on="atom_in", right_on="atom", suffix="_in")
        .with_columns(pl.col("obs").alias("outer"))
        .select(a="n", b="n_in", rule=_rule(), key="key")
    )
