"""The legs of requests, and what their rules make of the intervals that hang on them.

Which detail an interval has on the decode leg of a P/D pair, whose time it is, and that decode
never starts before its leg's first token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from pdtrace._lookup import NOWHERE, places

if TYPE_CHECKING:
    from pdtrace.store import Store

NAMES = ("detail", "worker", "basis", "semantics")  # they repeat millions of times: categories
INTERVALS = (
    "leg", "detail", "decode_detail", "start_ns", "end_ns", "duration_ns", "basis", "semantics",
)  # fmt: skip

# Log lines of whole seconds say nothing about the way of a token.
_COARSE_NS = 100_000_000
_ON_ITS_WAY = "first token made to first token seen"
_PREFILL = ("prefill_exec", "prefill_gap", "prefill_wall", "prefill_queue")
_DECODE = (
    "decode_exec", "decode_wall", "decode_queue", "kv_transfer", "bridge_wait", "kv_space_wait",
    "kv_wait_upper_bound",
)  # fmt: skip

# Of legs: their request may have been tried more than once.
AGAIN = "(attempt > 0 OR (status = 'failed' AND observer = 'engine' AND container IS NOT TRUE))"

# `counted` as in the view request_values, which joins what is not asked here.
_REQUESTS = """
WITH known AS (
  SELECT deployment, count(*) FILTER (outcome = 'completed') = 0 AS none_completed
  FROM requests
  GROUP BY deployment
)
SELECT r.rowid AS number, request, start_ns, end_ns, first_token_ns, prefill_worker, decode_worker,
       coalesce(mode = 'disaggregated', false) AS split, coalesce(mode = 'unknown', false) AS of_unknown_mode,
       r.deployment, coalesce(mode, 'unknown') AS mode,
       coalesce(outcome = 'completed', false)
         OR (none_completed AND coalesce(outcome, 'unknown') = 'unknown') AS counted
FROM requests r
JOIN known k ON k.deployment IS NOT DISTINCT FROM r.deployment
WHERE start_ns IS NOT NULL AND end_ns IS NOT NULL
"""

_LEGS = f"""
SELECT leg, request, worker, first_token_ns, coalesce(role = 'prefill', false) AS prefills,
       coalesce(role = 'decode', false) AS decodes,
       coalesce(observer IN ('frontend', 'router'), false) AS outside,
       container IS NOT TRUE AND coalesce(resolution_ns, 1) < {_COARSE_NS}
         AND coalesce(first_token_delivered, role IS DISTINCT FROM 'prefill') AS delivers,
       coalesce({AGAIN}, false) AS again
FROM legs
WHERE request IS NOT NULL
"""


def requests(store: Store) -> pl.DataFrame:
    """The requests that have a window, by their number: that of their row."""
    names = _categories("prefill_worker", "decode_worker", "deployment", "mode")
    found = store.sql(_REQUESTS).with_columns(names)
    return found.sort("number")


def legs(store: Store, of: pl.DataFrame) -> pl.DataFrame:
    """The legs of these requests with what the rules below ask of them."""
    found = store.sql(_LEGS).with_columns(_categories("worker"))
    place = places(found["request"], of["request"])
    known = place != NOWHERE
    if not known.all():
        found, place = found.filter(pl.Series(known)), place[known]
    asked = of.select(
        "number", "prefill_worker", "decode_worker", "split", "of_unknown_mode",
        seen_ns="first_token_ns",
    )[place]  # fmt: skip
    found = found.drop("request").hstack(asked)
    # What a front end or router saw of the work of engines is the engines' time.
    worker = pl.col("worker")
    engine = {
        name: pl.when("outside").then(pl.coalesce(name, worker)).otherwise(worker)
        for name in ("prefill_worker", "decode_worker")
    }
    return _paired(found).with_columns(**engine)


def _paired(legs: pl.DataFrame) -> pl.DataFrame:
    """Adds pair_decode: the decode leg of a P/D pair, and lone_decode.

    Of a pair a prefill leg of the same request ran elsewhere; one whose workers are not both known
    counts as two workers, since two roles were told apart. A lone one is the decode side of a pair
    whose other leg is not on record: its wait may hold the transfer.
    """
    if not legs["decodes"].any():
        never = pl.lit(value=False)
        return legs.with_columns(pair_decode=never, lone_decode=never)
    worker = pl.col("worker")
    prefills = (
        legs.filter("prefills")
        .group_by("number")
        .agg(
            prefilled_by=worker.drop_nulls().first(),
            told_apart=worker.has_nulls() | (worker.drop_nulls().n_unique() > 1),
        )
    )
    legs = legs.join(prefills, on="number", how="left", maintain_order="left")
    elsewhere = pl.col("told_apart") | worker.is_null() | (pl.col("prefilled_by") != worker)
    alone = pl.col("told_apart").is_null()
    pair = pl.col("split") | (alone.not_() & elsewhere.fill_null(value=True))
    return legs.with_columns(
        pair_decode=pl.col("decodes") & pair,
        lone_decode=pl.col("decodes") & pl.col("of_unknown_mode") & alone,
    )


def named(intervals: pl.DataFrame, legs: pl.DataFrame) -> pl.DataFrame:
    """The intervals of these legs: number of the request, NAMES, start_ns, end_ns.

    `leg` of the intervals is a place in `legs`.
    """
    place = intervals["leg"].to_numpy()
    known = place != NOWHERE
    rows = intervals.drop("leg").with_columns(
        _categories("detail", "decode_detail", "basis", "semantics")
    )
    if not known.all():
        rows, place = rows.filter(pl.Series(known)), place[known]
    of_leg = (
        "number", "worker", "prefill_worker", "decode_worker", "first_token_ns", "pair_decode",
        "lone_decode",
    )  # fmt: skip
    rows = rows.hstack(legs.select(of_leg)[place])
    detail, instead = pl.col("detail"), pl.col("decode_detail")
    on_decode = pl.col("pair_decode") | (pl.col("lone_decode") & (detail == "prefill_queue"))
    start = pl.coalesce("start_ns", pl.col("end_ns") - pl.col("duration_ns"))
    end = pl.coalesce("end_ns", pl.col("start_ns") + pl.col("duration_ns"))
    rows = rows.select(
        "number",
        "semantics",
        "first_token_ns",
        pl.when(detail.is_in(_PREFILL)).then("prefill_worker")
        .when(detail.is_in(_DECODE)).then("decode_worker")
        .otherwise("worker").alias("worker"),
        pl.when(on_decode).then(pl.coalesce(instead, detail)).otherwise(detail).alias("detail"),
        (pl.col("pair_decode") & (instead != detail).fill_null(value=False)).alias("renamed"),
        # However well its instants are known, such a wait contains other things.
        pl.when(on_decode & (instead == "kv_wait_upper_bound"))
        .then(pl.lit("upper_bound", pl.Categorical)).otherwise("basis").alias("basis"),
        start.alias("start_ns"),
        end.alias("end_ns"),
    ).drop_nulls(["start_ns", "end_ns"])  # fmt: skip
    return rows.select("number", *NAMES, _begin(), "end_ns")


def _begin() -> pl.Expr:
    """Where an interval starts: decode not before its leg's first token."""
    start, end, first = pl.col("start_ns"), pl.col("end_ns"), pl.col("first_token_ns")
    detail = pl.col("detail")
    # The first decode step of a pulled request makes its first token, hence starts before it; one
    # that was stamped to end with that token made it: an engine's own record of the same step.
    own = (detail == "decode_exec") & (pl.col("basis") == "measured") & (end == first)
    late = (
        detail.is_in(["decode_exec", "decode_stall", "decode_wall"])
        & pl.col("renamed").not_()
        & (end >= start)
        & own.fill_null(value=False).not_()
    )
    return (
        pl.when(late.fill_null(value=False))
        .then(pl.min_horizontal(pl.max_horizontal(start, first), end))
        .otherwise(start)
        .alias("start_ns")
    )


def ways_out(legs: pl.DataFrame) -> pl.DataFrame:
    """From the first token as its maker saw it to the first token as the user's side saw it.

    A proxy that buffers is not decoding.
    """
    made = legs.filter(pl.col("delivers") & (pl.col("first_token_ns") < pl.col("seen_ns")))
    ways = made.group_by("number").agg(
        start_ns=pl.col("first_token_ns").min(), end_ns=pl.col("seen_ns").first()
    )
    constant = {
        "detail": "stream_out", "worker": None, "basis": "inferred", "semantics": _ON_ITS_WAY,
    }  # fmt: skip
    names = (pl.lit(value, pl.Categorical).alias(name) for name, value in constant.items())
    return ways.with_columns(*names).select("number", *NAMES, "start_ns", "end_ns")


def _categories(*names: str) -> pl.Expr:
    return pl.col(*names).cast(pl.Categorical)
