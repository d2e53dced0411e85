"""Which legs are one request: call trees are cut where one call holds several, then ids join trees.

Prefill and decode legs, attempts and streams below one router or server leg are one request.
Different ids below it are several: prompts of one batched call, or the calls of an agent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from pdtrace._graph import Ints, climb, components
from pdtrace._identity_edges import EDGE, STREAM_NS, no_edges
from pdtrace._identity_legs import CLIENT, ENGINE
from pdtrace.records import dataclass

Flags = npt.NDArray[np.bool_]
_SECOND = 10**9


@dataclass(frozen=True)
class Groups:
    """A label per leg (-1: belongs to no single request) and the edges that made them."""

    label: Ints
    edges: pl.DataFrame


def group(legs: pl.DataFrame, parent: Ints, ids: pl.DataFrame) -> Groups:
    """Join legs to requests from their trees (`parent`) and from edges by id."""
    container = legs["container"].to_numpy()
    if not ids.height and (parent < 0).all():  # nothing joins any two of them
        return Groups(np.where(container, -1, np.arange(legs.height)), no_edges())
    outer = climb(parent, ~container)
    callers = np.zeros(legs.height, dtype=np.bool_)
    tree = components(legs.height, np.flatnonzero(parent >= 0), parent[parent >= 0])
    inside, between = _by_tree(ids, tree, outer)
    joins = [between, *_chains(legs, parent, outer)]
    children = _children(legs, parent, outer)
    notes = no_edges()
    if children.height:
        joined, notes, agents = _families(children, inside)
        joins.append(joined)
        callers = _callers(outer, container, agents)
    kept = pl.concat(joins).unique(["a", "b"], keep="first", maintain_order=True)
    a, b = kept["a"].to_numpy(), kept["b"].to_numpy()
    alive = ~(callers[a] | callers[b])
    label = components(legs.height, a[alive], b[alive])
    label[callers] = -1
    label[~np.isin(label, label[~container])] = -1  # hops alone are no request
    edges = pl.concat([kept.filter(pl.Series(alive)), notes])
    return Groups(label, edges)


def _by_tree(ids: pl.DataFrame, tree: Ints, outer: Ints) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Edges inside one call tree, whose shape decides, and edges between trees."""
    if ids.height == 0:
        return ids, ids
    a, b = ids["a"].to_numpy(), ids["b"].to_numpy()
    same = tree[a] == tree[b]
    siblings = same & (outer[a] == outer[b]) & (outer[a] >= 0)
    return ids.filter(pl.Series(siblings)), ids.filter(pl.Series(~same))


def _edges(a: Ints, b: Ints, rule: pl.Expr, key: pl.Series) -> pl.DataFrame:
    return pl.DataFrame({"a": a, "b": b, "key": key}).select("a", "b", rule=rule, key="key")


def _chains(legs: pl.DataFrame, parent: Ints, outer: Ints) -> list[pl.DataFrame]:
    """Joins that need no judgement: the only child of an outer leg; hops and what they carry."""
    container = legs["container"].to_numpy()
    nodes = np.arange(legs.height)
    joins = []
    real = (outer >= 0) & ~container
    brood = np.bincount(outer[real], minlength=legs.height)
    only = np.flatnonzero(real & (brood[np.maximum(outer, 0)] == 1))
    router = legs["obs"].gather(outer[only]).is_between(CLIENT + 1, ENGINE - 1)
    via_hop = pl.Series(container[np.maximum(parent[only], 0)])
    rule = (
        pl.when(router & ~via_hop).then(pl.lit("router_parent")).otherwise(pl.lit("direct_parent"))
    )
    joins.append(_edges(outer[only], only, rule, legs["parent_span_id"].gather(only)))
    # A hop goes with the first leg it carries, else with the leg that sent it.
    carried = np.flatnonzero((parent >= 0) & container[np.maximum(parent, 0)])
    first = (
        pl.DataFrame({"hop": parent[carried], "child": carried})
        .with_columns(legs["lo"].gather(carried), legs["leg"].gather(carried))
        .sort("hop", "lo", "leg", nulls_last=True)
        .unique("hop", keep="first", maintain_order=True)
    )
    direct = pl.lit("direct_parent")
    child = first["child"].to_numpy()
    joins.append(
        _edges(first["hop"].to_numpy(), child, direct, legs["parent_span_id"].gather(child))
    )
    idle = container & (outer >= 0)
    idle[first["hop"].to_numpy()] = False
    lonely = nodes[idle]
    joins.append(_edges(outer[lonely], lonely, direct, legs["parent_span_id"].gather(lonely)))
    return joins


def _children(legs: pl.DataFrame, parent: Ints, outer: Ints) -> pl.DataFrame:
    """Legs that have siblings under the same outer leg, one family per outer leg."""
    hop_attempt = legs["attempt"].gather(np.maximum(parent, 0))
    frame = legs.select(
        "n", "leg", "obs", "worker", "lo", "hi", "plike", "failed", "role", "stream",
        "prompt_tokens", "container", "parent_span_id",
        own=pl.coalesce("external_id", "request_id"),
        attempt=pl.coalesce(pl.col("attempt"), hop_attempt),
    ).with_columns(
        pl.Series("family", outer), pl.Series("hop", np.where(parent == outer, -1, parent))
    )  # fmt: skip
    brood = np.bincount(outer[(outer >= 0) & ~legs["container"].to_numpy()], minlength=legs.height)
    frame = _fronts(frame, pl.Series(brood[np.maximum(outer, 0)] > 1))
    engine = (pl.col("obs") == ENGINE) | pl.col("fronts")
    return frame.with_columns(
        (engine & pl.col("plike")).alias("prefill"), (engine & ~pl.col("plike")).alias("decode")
    ).sort("family", "lo", "leg", nulls_last=True)


def _fronts(frame: pl.DataFrame, several: pl.Series) -> pl.DataFrame:
    """The rows that have siblings, with a column `fronts`.

    Legs that lead to one engine's leg only (its API server) stand for it: its role, its part.
    """
    real = (frame["family"] >= 0) & ~frame["container"]
    siblings = frame.filter(real & several)
    if siblings.height == 0:
        return siblings.with_columns(pl.lit(value=False).alias("fronts"))
    below = (
        frame.filter(real)
        .join(siblings.select(pl.col("n").alias("family")), on="family", how="semi")
        .group_by("family")
        .agg(
            (pl.len() == 1).alias("fronts"),
            (pl.col("obs") == ENGINE).all().alias("engines"),
            pl.col("plike").first().alias("plike_below"),
            pl.col("role").first().alias("role_below"),
        )
        .filter(pl.col("fronts") & pl.col("engines"))
        .select(pl.col("family").alias("n"), "fronts", "plike_below", "role_below")
    )
    return (
        siblings.join(below, on="n", how="left", maintain_order="left")
        .with_columns(
            pl.col("fronts").fill_null(value=False),
            pl.coalesce("plike_below", "plike").alias("plike"),
            pl.coalesce("role_below", "role").alias("role"),
        )
        .drop("plike_below", "role_below")
    )


def _families(
    children: pl.DataFrame, inside: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame, Ints]:
    """Joins inside families, remarks on batched calls (same_call), and the outer legs of agents."""
    grouped = _by_own_id(children, inside)
    grouped = _attempts(grouped)
    grouped = _pairs(grouped)
    grouped = _helpers(grouped)
    heads_of = grouped.with_columns(
        pl.col("n").first().over("family", "group").alias("a"), _inner_rule().alias("rule")
    )
    within = heads_of.filter(pl.col("n") != pl.col("a")).select(
        "a", "rule", b="n", key=pl.coalesce("own", "parent_span_id")
    )
    within = within.select("a", "b", "rule", "key")
    families = grouped.group_by("family").agg(
        pl.col("group").n_unique().alias("requests"),
        pl.col("hop").max().alias("hops"),
        (_shares_hop()).alias("shared_hop"),
        _overlapping().alias("overlap"),
    )
    batched = pl.col("shared_hop") | ((pl.col("hops") < 0) & pl.col("overlap"))
    kinds = families.with_columns(((pl.col("requests") == 1) | batched).alias("one_call"))
    heads = grouped.unique(["family", "group"], keep="first", maintain_order=True).join(
        kinds.select("family", "one_call"), on="family"
    )
    called = heads.filter("one_call").select(
        a="family", b="n", rule=pl.lit("router_parent"), key="parent_span_id"
    )
    leading = called.unique("a", keep="first", maintain_order=True)
    others = called.join(leading, on=["a", "b"], how="anti")
    agents = kinds.filter(~pl.col("one_call"))["family"].to_numpy()
    kinds_of = pl.Schema(EDGE)
    joined = pl.concat([leading.cast(kinds_of), within.cast(kinds_of)])
    notes = others.with_columns(pl.lit("same_call").alias("rule")).cast(kinds_of)
    return joined, notes, agents


def _inner_rule() -> pl.Expr:
    first = pl.col("own").first().over("family", "group")
    return (
        pl.when(pl.col("own") == first)
        .then(pl.lit("engine_request_id"))
        .otherwise(pl.lit("router_parent"))
    )


def _shares_hop() -> pl.Expr:
    """Whether one hop carried several requests: then they came in one call."""
    several = pl.col("group").n_unique().over("family", "hop") > 1
    return (several & (pl.col("hop") >= 0)).any()


def _overlapping() -> pl.Expr:
    """Whether a group starts before an earlier one has ended."""
    until = pl.col("hi").cum_max().shift().over("family")
    new = pl.col("group") != pl.col("group").shift().over("family")
    return ((pl.col("lo") < until) & new).any().fill_null(value=False)


def _by_own_id(children: pl.DataFrame, inside: pl.DataFrame) -> pl.DataFrame:
    """Column `group`: legs of a family with one id; repeats of the same work stay apart."""
    work = ("family", "own", "obs", "plike")
    near = pl.col("lo") - pl.col("lo").shift().over(work)
    again = ~(
        (near == 0)
        | ((near <= STREAM_NS) & pl.col("stream").ne_missing(pl.col("stream").shift().over(work)))
        | pl.col("failed").any().over("family", "own")
        | (pl.col("attempt") > 0).fill_null(value=False)
    ).fill_null(value=False)
    begun = near.is_not_null() & again
    occurrence = begun.cum_sum().over(work)
    named = children.with_columns(
        pl.when(pl.col("own").is_null()).then(pl.col("n")).otherwise(-1 - occurrence).alias("place")
    )
    code = named.select(pl.struct("family", "own", "place").rank("dense")).to_series().to_numpy()
    if inside.height == 0:
        return named.with_columns(pl.Series("group", code).cast(pl.Int64))
    # Named references between siblings join their groups.
    of = pl.DataFrame({"n": named["n"], "code": code})
    pairs = inside.filter(
        pl.col("rule").is_in(["remote_reference", "bootstrap_room", "transfer_id"])
    )
    pairs = pairs.join(of, left_on="a", right_on="n").join(
        of, left_on="b", right_on="n", suffix="_b"
    )
    label = components(int(code.max()) + 1, pairs["code"].to_numpy(), pairs["code_b"].to_numpy())
    return named.with_columns(pl.Series("group", label[code]))


def _relabel(grouped: pl.DataFrame, moves: pl.DataFrame) -> pl.DataFrame:
    """Put groups (family, group) under another one (into)."""
    if moves.height == 0:
        return grouped
    return (
        grouped.join(moves.select("family", "group", "into"), on=["family", "group"], how="left")
        .with_columns(pl.coalesce("into", "group").alias("group"))
        .drop("into")
        .sort("family", "lo", "leg", nulls_last=True)
    )


def _summary(grouped: pl.DataFrame) -> pl.DataFrame:
    return (
        grouped.group_by("family", "group", maintain_order=True)
        .agg(
            pl.col("prefill").any(),
            pl.col("decode").any(),
            (pl.col("failed") | (pl.col("prefill") & ~pl.col("decode"))).all().alias("unfinished"),
            pl.col("failed").any(),
            pl.col("lo").min(),
            pl.col("hi").max(),
            pl.col("worker").first(),
            pl.col("role").drop_nulls().first(),
            pl.col("prompt_tokens").max(),
            pl.col("attempt").max(),
            (pl.col("obs") == ENGINE).any().alias("engine"),
        )
        .filter(pl.len().over("family") > 1)
    )


def _attempts(grouped: pl.DataFrame) -> pl.DataFrame:
    """Failed groups join the one that followed; counted attempts join the first."""
    groups = _summary(grouped)
    if groups.height == 0:
        return grouped
    counted = (
        (pl.col("attempt").max().over("family") > 0)
        & (pl.col("attempt").n_unique().over("family") == pl.len().over("family"))
        & pl.col("attempt").is_not_null().all().over("family")
    )
    failed = pl.col("failed") & pl.col("unfinished")
    alive = groups.filter(~failed & pl.col("engine"))
    alone = alive.filter(pl.len().over("family") == 1).select("family", target="group", begin="lo")
    retried = (
        groups.filter(failed)
        .join(alone, on="family")
        .filter((pl.col("hi") <= pl.col("begin") + _SECOND).fill_null(value=True))
        .select("family", "group", into="target")
    )
    migrated = groups.filter(counted).select(
        "family", "group", into=pl.col("group").first().over("family")
    )
    moves = pl.concat([migrated, retried]).unique(
        ["family", "group"], keep="first", maintain_order=True
    )
    return _relabel(grouped, moves)


def _pairs(grouped: pl.DataFrame) -> pl.DataFrame:
    """The only lone prefill and the only lone decode of a family are a pair."""
    groups = _summary(grouped)
    if groups.height == 0:
        return grouped
    prefill = groups.filter(pl.col("prefill") & ~pl.col("decode"))
    decode = groups.filter(pl.col("decode") & ~pl.col("prefill"))
    prefill = prefill.filter(pl.len().over("family") == 1)
    decode = decode.filter(pl.len().over("family") == 1)
    both = prefill.join(decode, on="family", suffix="_d")
    told = (pl.col("role") == "prefill") & (pl.col("role_d") == "decode")
    elsewhere = pl.col("worker").ne_missing(pl.col("worker_d"))
    same_prompt = (
        (pl.col("prompt_tokens") - pl.col("prompt_tokens_d")).abs()
        <= 2 + pl.col("prompt_tokens_d") // 100
    ).fill_null(value=True)
    in_order = (pl.col("lo") <= pl.col("hi_d")).fill_null(value=True)
    moves = both.filter(told.fill_null(value=False) | (elsewhere & same_prompt & in_order)).select(
        "family", "group", into="group_d"
    )
    return _relabel(grouped, moves)


def _helpers(grouped: pl.DataFrame) -> pl.DataFrame:
    """Legs of routers and pickers beside the only group that an engine worked on belong to it."""
    groups = _summary(grouped)
    if groups.height == 0:
        return grouped
    worked = groups.filter("engine").filter(pl.len().over("family") == 1)
    moves = (
        groups.filter(~pl.col("engine"))
        .join(worked.select("family", into="group"), on="family")
        .select("family", "group", "into")
    )
    return _relabel(grouped, moves)


def _callers(outer: Ints, container: Flags, agents: Ints) -> Flags:
    """Legs that made several separate calls (agents), and legs above that only led to such."""
    callers = np.zeros(outer.size, dtype=np.bool_)
    callers[agents] = True
    if agents.size == 0:
        return callers
    real = (outer >= 0) & ~container
    for _ in range(16):
        sons = np.bincount(outer[real], minlength=outer.size)
        leading = np.bincount(outer[real & callers], minlength=outer.size)
        more = (sons > 0) & (sons == leading) & ~callers
        if not more.any():
            break
        callers[more] = True
    # Hops towards a caller go with it.
    carried = np.flatnonzero(container)
    callers[carried] = False
    return callers
