"""The exact partition: every nanosecond of a request's window belongs to one phase.

`cut` is the pure core (windows and intervals in, phases and checks out); `partition` feeds it batch by
batch from a store. The rules are those of docs/architecture.md; the order of precedence where intervals
overlap is the order of model.PHASE_DETAILS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from pdtrace._phases_input import Batches
from pdtrace._phases_sweep import Intervals, Pieces, Windows, sweep
from pdtrace.errors import SchemaMismatch
from pdtrace.model import PHASE_DETAILS

if TYPE_CHECKING:
    from pdtrace.store import Store

_KIND = ("detail", "worker", "basis", "semantics")  # what a winning interval hands to its phase
_UNATTRIBUTED = {"detail": "unattributed", "worker": None, "basis": "inferred", "semantics": None}
_RANKS = pl.DataFrame(
    {
        "detail": list(PHASE_DETAILS),
        "phase": list(PHASE_DETAILS.values()),
        "rank": range(len(PHASE_DETAILS)),
    },
    schema_overrides={"rank": pl.Int64},
)
_AXIS_LIMIT = 2.0**61  # windows laid end to end must stay inside 64-bit nanoseconds


def partition(store: Store, *, batch_requests: int = 100_000) -> None:
    """Fill the tables phases and partition_checks from requests, legs and intervals."""
    store.execute("DELETE FROM phases")
    store.execute("DELETE FROM partition_checks")
    for windows, intervals in Batches(store, batch_requests):
        phases, checks = cut(windows, intervals)
        store.append("phases", phases)
        store.append("partition_checks", checks)


def cut(windows: pl.DataFrame, intervals: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Partition the windows of requests by their intervals; returns (phases, partition_checks).

    windows: request, start_ns, end_ns, first_token_ns, negative_ns (of reported remainders, >= 0).
    intervals: request, detail, start_ns, end_ns, worker, basis, semantics. Intervals without both
    instants have no position and are left out; reversed ones are counted in negative_ns and left out.
    """
    if windows.height > 1 and _axis(windows) > _AXIS_LIMIT:
        return _in_halves(windows, intervals)
    _check_details(intervals)
    windows = windows.with_columns(pl.col("negative_ns").fill_null(0))
    cuttable = windows.filter(pl.col("end_ns") > pl.col("start_ns")).with_row_index("window")
    placed = _split_at_first_token(
        intervals.drop_nulls(["request", "start_ns", "end_ns"]).join(
            cuttable.select("request", "window", "first_token_ns"), on="request"
        )
    )
    forwards = placed.filter(pl.col("end_ns") > pl.col("start_ns"))
    kinds = _kinds(forwards)
    pieces = sweep(_windows(cuttable), _intervals(forwards, kinds))
    return _phases(cuttable, pieces, kinds), _checks(windows, cuttable, placed, pieces)


def _axis(windows: pl.DataFrame) -> float:
    length = windows["end_ns"].cast(pl.Float64) - windows["start_ns"].cast(pl.Float64)
    return float(length.clip(lower_bound=0).sum())


def _in_halves(
    windows: pl.DataFrame, intervals: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Absurdly long windows (a garbage start stamp) must not overflow the axis of their batch."""
    middle = windows.height // 2
    (phases_a, checks_a), (phases_b, checks_b) = (
        cut(half, intervals.join(half.select("request"), on="request", how="semi"))
        for half in (windows[:middle], windows[middle:])
    )
    return pl.concat([phases_a, phases_b]), pl.concat([checks_a, checks_b])


def _check_details(intervals: pl.DataFrame) -> None:
    unknown = set(intervals["detail"].unique()) - set(PHASE_DETAILS)
    if unknown:
        names = ", ".join(sorted(repr(name) for name in unknown))
        raise SchemaMismatch(
            f"intervals.detail holds {names}, which is no phase detail",
            "A collector must use the names of pdtrace.model.PHASE_DETAILS.",
        )


def _split_at_first_token(placed: pl.DataFrame) -> pl.DataFrame:
    """Before the first token reaches the user, the way out of it (stream_out) is not decode time."""
    first = pl.col("first_token_ns")
    splits = (pl.col("detail") == "stream_out") & first.is_not_null()
    way_out = placed.filter(splits & (pl.col("end_ns") > pl.col("start_ns")))
    if way_out.is_empty():
        return placed
    before = way_out.filter(pl.col("start_ns") < first).with_columns(
        pl.lit("stream_out_first").alias("detail"), pl.min_horizontal("end_ns", first).alias("end_ns")
    )
    after = way_out.filter(pl.col("end_ns") > first).with_columns(
        pl.max_horizontal("start_ns", first).alias("start_ns")
    )
    rest = placed.filter((splits & (pl.col("end_ns") > pl.col("start_ns"))).not_())
    return pl.concat([rest, before, after])


def _kinds(intervals: pl.DataFrame) -> pl.DataFrame:
    """The distinct (detail, worker, basis, semantics), numbered in an order that no reading order changes."""
    distinct = intervals.select(_KIND).unique().sort(_KIND, nulls_last=True)
    return distinct.join(_RANKS, on="detail", maintain_order="left").with_row_index("kind")


def _windows(cuttable: pl.DataFrame) -> Windows:
    return Windows(cuttable["start_ns"].to_numpy(), cuttable["end_ns"].to_numpy())


def _intervals(forwards: pl.DataFrame, kinds: pl.DataFrame) -> Intervals:
    numbered = forwards.join(kinds, on=_KIND, nulls_equal=True)
    return Intervals(
        numbered["window"].cast(pl.Int64).to_numpy(),
        numbered["start_ns"].to_numpy(),
        numbered["end_ns"].to_numpy(),
        numbered["rank"].to_numpy(),
        numbered["kind"].cast(pl.Int64).to_numpy(),
    )


def _phases(cuttable: pl.DataFrame, pieces: Pieces, kinds: pl.DataFrame) -> pl.DataFrame:
    nobody = pl.DataFrame([_UNATTRIBUTED], schema=kinds.select(_KIND).schema)
    named = pl.concat(
        [kinds.select("phase", *_KIND), nobody.join(_RANKS, on="detail").select("phase", *_KIND)]
    )
    kind = np.where(pieces.kind < 0, kinds.height, pieces.kind)
    owners = named[kind]
    return pl.DataFrame(
        {
            "request": cuttable["request"][pieces.window],
            "phase": owners["phase"],
            "detail": owners["detail"],
            "start_ns": pieces.start,
            "end_ns": pieces.end,
            "worker": owners["worker"],
            "basis": owners["basis"],
            "semantics": owners["semantics"],
        }
    )


def _checks(
    windows: pl.DataFrame, cuttable: pl.DataFrame, placed: pl.DataFrame, pieces: Pieces
) -> pl.DataFrame:
    """What had to be cut, for every request with both ends; a reversed window counts as negative time."""
    backwards = (
        placed.filter(pl.col("end_ns") < pl.col("start_ns"))
        .group_by("request")
        .agg((pl.col("start_ns") - pl.col("end_ns")).sum().alias("reversed_ns"))
    )
    swept = cuttable.select("request").with_columns(
        pl.Series("clip_ns", pieces.clip), pl.Series("overlap_ns", pieces.overlap)
    )
    window = pl.col("end_ns") - pl.col("start_ns")
    return (
        windows.join(swept, on="request", how="left", maintain_order="left")
        .join(backwards, on="request", how="left", maintain_order="left")
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
