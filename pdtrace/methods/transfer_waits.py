"""What requests waited for before their KV began to move: a busy link, or something else.

Each wait between prefill and transfer is held against the time during which the worker that sends, or
the one that receives, was already moving other KV (greater of the two). A wait that a busy link fills
may be a wait for the link; one beside an idle link is not: hand-over, or KV space on the decode side.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

MOVES = """
SELECT deployment, request, source_worker, destination_worker, start_ns, end_ns
FROM transfer_times
WHERE end_ns > start_ns AND direction IN ('prefill_to_decode', 'decode_to_prefill')
"""
# An upper bound is no wait that was seen; requests without a movement have no transfer to wait for.
WAITS = """
SELECT r.deployment, p.request, r.prefill_worker, r.decode_worker, p.start_ns, p.end_ns
FROM phases AS p
JOIN requests AS r ON r.request = p.request
WHERE p.detail IN ('bridge_wait', 'kv_space_wait') AND p.basis != 'upper_bound'
  AND p.request IN (
    SELECT request FROM transfer_times
    WHERE end_ns > start_ns AND direction IN ('prefill_to_decode', 'decode_to_prefill')
  )
"""
SCHEMA = {
    "deployment": pl.String,
    "request": pl.String,
    "wait_ms": pl.Float64,
    "busy_ms": pl.Float64,
}

Instants = NDArray[np.int64]


def waits(moves: pl.DataFrame, intervals: pl.DataFrame) -> pl.DataFrame:
    """A row of `transfer_waits` for each request that waited."""
    if intervals.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    ends = pl.concat(
        [
            moves.select("deployment", "start_ns", "end_ns", worker=end).drop_nulls()
            for end in ("source_worker", "destination_worker")
        ]
    )
    busy = {key: (g["start_ns"], g["end_ns"]) for key, g in ends.group_by("deployment", "worker")}
    seen = [
        intervals.select(
            "deployment", "request", "start_ns", "end_ns", worker=side, row=pl.int_range(pl.len())
        )
        for side in ("prefill_worker", "decode_worker")
    ]
    parts = []
    for key, mine in pl.concat(seen).group_by("deployment", "worker"):
        overlap = np.zeros(mine.height)
        if key in busy:
            starts, stops = (series.to_numpy() for series in busy[key])
            overlap = covered(starts, stops, mine["start_ns"].to_numpy(), mine["end_ns"].to_numpy())
        parts.append(mine.select("row", busy_ns=pl.Series(overlap)))
    greater = pl.concat(parts).group_by("row").agg(pl.col("busy_ns").max())
    return (
        intervals.with_row_index("row")
        .with_columns(pl.col("row").cast(pl.Int64))
        .join(greater, on="row")
        .group_by("deployment", "request")
        .agg(
            wait_ms=(pl.col("end_ns") - pl.col("start_ns")).sum() / 1e6,
            busy_ms=pl.col("busy_ns").sum() / 1e6,
        )
        .sort("deployment", "request")
    )


def covered(
    starts: Instants, stops: Instants, begin: Instants, end: Instants
) -> NDArray[np.float64]:
    """How much of each interval [begin, end) the union of [starts, stops) covers, in nanoseconds."""
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    reach = np.maximum.accumulate(stops)
    first = np.concatenate([[True], starts[1:] > reach[:-1]])  # begins a new stretch
    left = starts[first]
    right = reach[np.concatenate([np.flatnonzero(first)[1:] - 1, [len(starts) - 1]])]
    before = np.concatenate([[0], np.cumsum(right - left)])

    def until(instants: Instants) -> Instants:
        at = np.searchsorted(left, instants, side="right") - 1
        inside = np.minimum(instants, right[at]) - left[at]
        total: Instants = np.where(at < 0, 0, before[at] + inside)
        return total

    length: NDArray[np.float64] = (until(end) - until(begin)).astype(np.float64)
    return length
