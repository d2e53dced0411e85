"""The exact partition: every nanosecond of a request's window belongs to one phase.

`cut` is the pure core (windows and intervals in, phases and checks out); `partition` feeds it batch
by batch from a store. Where intervals overlap, the order of model.PHASE_DETAILS decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from pdtrace import _phases_texts as texts
from pdtrace._phases_input import BATCH_REQUESTS, Batch, batches
from pdtrace._phases_kinds import number_kinds
from pdtrace._phases_sums import summed
from pdtrace._phases_sweep import NOBODY, Intervals, Ints, Pieces, Windows, sweep
from pdtrace.errors import SchemaMismatch
from pdtrace.model import PHASE_DETAILS

if TYPE_CHECKING:
    from pdtrace.store import Store

MAKES = frozenset({"phases", "phase_sums", "partition_checks"})
_ON_KV = ("kv_load", "kv_transfer", "bridge_wait", "kv_space_wait")
_AT_MOST = {name: f"{name}_at_most" for name in _ON_KV}
_MAY_BE_HIDDEN = "inside a prefill known as wall time only: part of it may be hidden behind that"
_SPELLED = {"stream_out_first": "stream_out"} | {own: name for name, own in _AT_MOST.items()}
_AXIS_LIMIT = 2.0**61  # windows laid end to end must stay inside 64-bit nanoseconds


def partition(store: Store, *, batch_requests: int = BATCH_REQUESTS) -> None:
    """Fill the tables of MAKES from requests, legs and intervals."""
    for table in MAKES:
        store.clear(table)
    parts = batches(store, batch_requests)
    with store.as_one():
        for found in _cuts(parts):
            store.append("phases", found.phases)
            store.append("phase_sums", found.sums)
            store.append("partition_checks", found.checks)


class Cut(NamedTuple):
    """Rows of the tables phases, phase_sums and partition_checks."""

    phases: pa.Table
    sums: pa.Table
    checks: pl.DataFrame


def _cuts(parts: Iterator[Batch]) -> Iterator[Cut]:
    """The batches cut, in their order: while one is cut in another thread, the next is read."""
    with ThreadPoolExecutor(1, "pdtrace-cut") as pool:
        before: Future[Cut] | None = None
        for windows, intervals in parts:
            following = pool.submit(cut, windows, intervals)
            if before is not None:
                yield before.result()
            before = following
        if before is not None:
            yield before.result()


def cut(windows: pl.DataFrame, intervals: pl.DataFrame) -> Cut:
    """Partition the windows of requests by their intervals.

    windows: number, request, start_ns, end_ns, first_token_ns, negative_ns (magnitude of reported
    negative remainders). intervals: number (of the window), detail, start_ns, end_ns, worker,
    basis, semantics. Those without both instants have no position and are left out; reversed
    ones are counted in negative_ns and left out.
    """
    if windows.height > 1 and _axis(windows) > _AXIS_LIMIT:
        return _in_halves(windows, intervals)
    _check_details(intervals)
    windows = windows.with_columns(pl.col("negative_ns").fill_null(0))
    cuttable = windows.filter(pl.col("end_ns") > pl.col("start_ns"))
    placed = _placed(cuttable, intervals.drop_nulls(["start_ns", "end_ns"]))
    forwards = placed.filter(pl.col("end_ns") > pl.col("start_ns"))
    forwards = _bounded_in_walls(cuttable, _split_at_first_token(cuttable, forwards))
    kinds, numbers = number_kinds(forwards)
    pieces = sweep(_windows(cuttable), _intervals(forwards, kinds, numbers)).owned_by(
        kinds.height - 1
    )
    kinds = kinds.with_columns(pl.col("detail").replace(_SPELLED))
    return Cut(
        _phases(cuttable, pieces, kinds),
        summed(cuttable, pieces, kinds),
        _checks(windows, cuttable, placed, pieces),
    )


def _axis(windows: pl.DataFrame) -> float:
    length = windows["end_ns"].cast(pl.Float64) - windows["start_ns"].cast(pl.Float64)
    return float(length.clip(lower_bound=0).sum())


def _in_halves(windows: pl.DataFrame, intervals: pl.DataFrame) -> Cut:
    """Absurdly long windows (a garbage start stamp) must not overflow the axis of their batch."""
    middle = windows.height // 2
    one, other = (
        cut(half, intervals.join(half.select("number"), on="number", how="semi"))
        for half in (windows[:middle], windows[middle:])
    )
    return Cut(
        pa.concat_tables([one.phases, other.phases]),
        pa.concat_tables([one.sums, other.sums]),
        pl.concat([one.checks, other.checks]),
    )


def _check_details(intervals: pl.DataFrame) -> None:
    unknown = set(intervals["detail"].unique()) - set(PHASE_DETAILS)
    if unknown:
        names = ", ".join(sorted(repr(name) for name in unknown))
        raise SchemaMismatch(
            f"intervals.detail holds {names}, which is no phase detail",
            "A collector must use the names of pdtrace.model.PHASE_DETAILS.",
        )


def _placed(cuttable: pl.DataFrame, intervals: pl.DataFrame) -> pl.DataFrame:
    """The intervals that have a window, with its index."""
    number = cuttable["number"].to_numpy()
    if cuttable.is_empty() or intervals.is_empty():
        return intervals.clear().with_columns(pl.lit(0, pl.Int64).alias("window"))
    low, high = int(number.min()), int(number.max())
    window_of = np.full(high - low + 1, NOBODY, dtype=np.int64)
    window_of[number - low] = np.arange(len(number))
    inside = intervals.filter(pl.col("number").is_between(low, high))
    placed = inside.with_columns(pl.Series("window", window_of[inside["number"].to_numpy() - low]))
    return placed.filter(pl.col("window") != NOBODY)


def _split_at_first_token(cuttable: pl.DataFrame, forwards: pl.DataFrame) -> pl.DataFrame:
    """Until the first token reaches the user, its way out (stream_out) outranks decode."""
    leaving = pl.col("detail") == "stream_out"
    way_out = forwards.filter(leaving)
    if way_out.is_empty():
        return forwards
    first = pl.col("first_token_ns")
    forwards = forwards.with_columns(pl.col("detail").cast(pl.String))
    way_out = way_out.with_columns(
        pl.col("detail").cast(pl.String), cuttable["first_token_ns"].gather(way_out["window"])
    )
    before = way_out.filter(pl.col("start_ns") < first).with_columns(
        pl.lit("stream_out_first").alias("detail"),
        pl.min_horizontal("end_ns", first).alias("end_ns"),
    )
    after = way_out.filter(first.is_null() | (pl.col("end_ns") > first)).with_columns(
        pl.max_horizontal("start_ns", first).alias("start_ns")
    )
    parts = pl.concat([before, after]).drop("first_token_ns")
    return pl.concat([forwards.filter(leaving.not_()), parts])


def _bounded_in_walls(cuttable: pl.DataFrame, forwards: pl.DataFrame) -> pl.DataFrame:
    """Inside a prefill known as wall time only, KV that moves held the request up at most so long."""
    detail = pl.col("detail")
    moves = forwards.filter(detail.is_in(list(_AT_MOST)))
    if moves.is_empty():
        return forwards
    walls = forwards.filter(detail == "prefill_wall")
    inside = moves.join(walls.select("window", wall_ns="start_ns", until_ns="end_ns"), on="window")
    opens, closes = (cuttable[end].gather(inside["window"]) for end in ("start_ns", "end_ns"))
    inside = inside.with_columns(
        start_ns=pl.max_horizontal("start_ns", "wall_ns", opens),
        end_ns=pl.min_horizontal("end_ns", "until_ns", closes),
    ).filter(pl.col("end_ns") > pl.col("start_ns"))
    if inside.is_empty():
        return forwards
    named = pl.col("detail", "basis", "semantics").cast(pl.String)
    bounded = inside.select(forwards.columns).with_columns(
        detail.cast(pl.String).replace(_AT_MOST),
        basis=pl.lit("upper_bound"),
        semantics=pl.lit(_MAY_BE_HIDDEN),
    )
    return pl.concat([forwards.with_columns(named), bounded])


def _windows(cuttable: pl.DataFrame) -> Windows:
    return Windows(cuttable["start_ns"].to_numpy(), cuttable["end_ns"].to_numpy())


def _intervals(placed: pl.DataFrame, kinds: pl.DataFrame, numbers: Ints) -> Intervals:
    return Intervals(
        placed["window"].to_numpy(),
        placed["start_ns"].to_numpy(),
        placed["end_ns"].to_numpy(),
        kinds["rank"].to_numpy()[numbers],
        numbers,
    )


def _phases(cuttable: pl.DataFrame, pieces: Pieces, kinds: pl.DataFrame) -> pa.Table:
    of_kind = ("phase", "detail", "worker", "basis", "semantics")
    return texts.table(
        {
            "request": (cuttable["request"], pieces.window),
            **{name: (kinds[name], pieces.kind) for name in of_kind},
        },
        {"start_ns": pieces.start, "end_ns": pieces.end},
    )


def _checks(
    windows: pl.DataFrame, cuttable: pl.DataFrame, placed: pl.DataFrame, pieces: Pieces
) -> pl.DataFrame:
    """What had to be cut, for every request with both ends; a reversed window is negative time."""
    backwards = (
        placed.filter(pl.col("end_ns") < pl.col("start_ns"))
        .group_by("number")
        .agg((pl.col("start_ns") - pl.col("end_ns")).sum().alias("reversed_ns"))
    )
    swept = cuttable.select("number").with_columns(
        pl.Series("clip_ns", pieces.clip), pl.Series("overlap_ns", pieces.overlap)
    )
    window = pl.col("end_ns") - pl.col("start_ns")
    return (
        windows.join(swept, on="number", how="left", maintain_order="left")
        .join(backwards, on="number", how="left", maintain_order="left")
        .select(
            "request",
            window.alias("window_ns"),
            pl.col("clip_ns").fill_null(0),
            pl.col("overlap_ns").fill_null(0),
            pl.col("negative_ns")
            + pl.col("reversed_ns").fill_null(0)
            + (-window).clip(lower_bound=0),
        )
    )
