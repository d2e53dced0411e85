"""Warm-up: the first values of a quantity, where they stand out as no other stretch does; used by `changes`."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdtrace.methods._change_levels import Series, median, row_of
from pdtrace.methods.statistics import Floats

WARM_FACTOR, WARM_FEWEST, WARM_P = 1.5, 100, 0.002
WARM_AHEAD = (
    1.5  # times as far above the typical value as any other stretch: every run has a first one
)
WARM_SIZES = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987)


def warm_up(series: Series) -> tuple[int, dict[str, Any]] | None:
    """(values that belong to the warm-up, its row), where the first stand out as no others do."""
    values = series.values
    if len(values) < WARM_FEWEST or values.min() < 0:
        return None
    logs = np.log(np.maximum(values, 1e-6))
    logs = logs - np.median(logs)
    sizes = [k for k in WARM_SIZES if k <= len(values) // 10]
    sums = np.concatenate([[0.0], np.cumsum(logs)])
    count = len(values) - sizes[-1] + 1
    # how far each stretch of k lies above the typical value, in the measure of chance
    scores = np.stack([(sums[k : k + count] - sums[:count]) / np.sqrt(k) for k in sizes])
    best = int(scores[:, 0].argmax())
    size = sizes[best]
    # This size was chosen for the first stretch: every other one is taken at its own best, too.
    others = scores.max(axis=0)[size:]
    as_slow = float((others >= scores[best, 0]).sum() + 1) / (len(others) + 1)
    if not len(others) or scores[best, 0] < WARM_AHEAD * others.max():
        return None
    first, rest = values[:size], values[size:]
    if size == sizes[-1]:  # a tenth of the run or more is a part of it, not its beginning
        return None
    slow = float(np.median(first)) >= WARM_FACTOR * float(np.median(rest))
    if as_slow > max(WARM_P, 1 / (len(others) + 1)) or not slow or not _apart(first, rest):
        return None
    before, after = median(first, 1.0), median(rest, 1.0)
    row = row_of(series, "warm_up", size, 0, len(values), before, after)
    each = series.requests_each
    row |= {
        "p_value": as_slow, "p99_ms": float(np.quantile(values, 0.99)),
        "p99_without_ms": float(np.quantile(rest, 0.99)),
        "at_low_ns": row["at_ns"], "at_high_ns": row["at_ns"],
        "cost_s": float((first - np.median(rest)).sum() * each / 1e3)
        if series.metric == "ttft" else None,
    }  # fmt: skip
    return size, row


def _apart(first: Floats, rest: Floats) -> bool:
    """Whether the first stand out by themselves: heavy tails put a large value there now and then."""
    if len(first) == 1:
        return bool(first[0] > 2 * rest.max())
    high = np.quantile(rest, 0.95)
    return bool(np.median(first) > high if len(first) >= 5 else first.min() > high)
