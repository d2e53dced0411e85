"""The legs of requests, and what their rules make of the intervals that hang on them.

Which detail an interval has on the decode leg of a P/D pair, whose time it is, and that decode
never starts before its leg's first token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from pdtrace._identity_legs import narrow
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

_OF_REQUESTS = (
    "request", "start_ns", "end_ns", "first_token_ns", "prefill_worker", "decode_worker", "deployment", "mode",
    "outcome",
)  # fmt: skip
_OF_LEGS = (
    "leg", "request", "worker", "first_token_ns", "role", "observer", "container", "resolution_ns",
    "first_token_delivered", "attempt", "status",
)  # fmt: skip


def requests(store: Store) -> pl.DataFrame:
    """The requests that have a window, by their number: that of their row."""
    found = store.take_filling("requests")
    if found is None:
        found = store.sql(f"SELECT rowid AS number, {', '.join(_OF_REQUESTS)} FROM requests")
        found = found.sort("number")
    else:
        found = found.select(pl.int_range(pl.len()).alias("number"), *_OF_REQUESTS)
    mode, outcome = pl.col("mode"), pl.col("outcome")
    completed = (outcome == "completed").fill_null(value=False)
    # `counted` as in the view request_values, which joins what is not asked here.
    none_completed = completed.any().over("deployment").not_()
    unknown = outcome.fill_null("unknown") == "unknown"
    return (
        found.with_columns(_categories("prefill_worker", "decode_worker", "deployment"))
        .with_columns(
            split=(mode == "disaggregated").fill_null(value=False),
            of_unknown_mode=(mode == "unknown").fill_null(value=False),
            mode=mode.fill_null("unknown").cast(pl.Categorical),
            counted=completed | (none_completed & unknown),
        )
        .filter(pl.col("start_ns").is_not_null() & pl.col("end_ns").is_not_null())
        .drop("outcome")
    )


def legs(store: Store, of: pl.DataFrame) -> pl.DataFrame:
    """The legs of these requests with what the rules below ask of them."""
    found = _judged(narrow(store, _OF_LEGS, of_requests=True, hops=True))
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


def _judged(legs: pl.DataFrame) -> pl.DataFrame:
    """What is asked of each leg alone; `again`: its request may have been tried more than once (as AGAIN)."""
    role, observer = pl.col("role"), pl.col("observer")
    real = pl.col("container").fill_null(value=False).not_()
    fine = pl.col("resolution_ns").fill_null(1) < _COARSE_NS
    failed = (pl.col("status") == "failed") & (observer == "engine") & real
    tried = (pl.col("attempt") > 0).fill_null(value=False) | failed.fill_null(value=False)
    return legs.select(
        "leg", "request", _categories("worker"), "first_token_ns",
        prefills=(role == "prefill").fill_null(value=False),
        decodes=(role == "decode").fill_null(value=False),
        outside=observer.is_in(["frontend", "router"]).fill_null(value=False),
        delivers=real & fine & pl.coalesce("first_token_delivered", role.ne_missing("prefill")),
        again=tried,
    )  # fmt: skip


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
