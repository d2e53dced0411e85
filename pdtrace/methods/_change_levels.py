"""A quantity in the order of arrival, and what a stretch of it was like; used by `changes`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdtrace.methods import _segments
from pdtrace.methods.statistics import Z95, Floats, wilson_interval

FACTOR = 1.25  # smaller changes of a rate or median are not told
POINTS = 0.02  # likewise of a share
AT_ONCE_NS, AT_ONCE_SHARE = (
    1e6,
    0.05,
)  # first tokens nearer than both (the share of a median TTFT) came from one step


@dataclass(frozen=True)
class Series:
    """One quantity in the order of arrival: its values and when each was."""

    metric: str
    values: Floats
    times: Floats  # ns since `origin`
    origin: int
    requests_each: float  # how many requests one value stands for (every k-th is looked at)


@dataclass(frozen=True)
class Level:
    """What a stretch of a series was like, with its 95 % interval."""

    value: float
    low: float
    high: float


def instant(series: Series, number: int) -> int:
    return series.origin + int(series.times[min(number, len(series.times) - 1)])


def level(series: Series, begin: int, end: int, per_block: float) -> Level:
    """The level of a stretch; fewer values count as independent where they depend on each other."""
    values = series.values[begin:end]
    widened = max(1.0, per_block / _segments.PER_BLOCK) if per_block else 1.0
    if series.metric == "failures":
        low, high = wilson_interval(
            round(values.sum() / widened), max(1, round(len(values) / widened))
        )
        return Level(float(values.mean()), low, high)
    if series.metric == "arrival_rate":
        mean = float(values.mean()) / 1e9
        if mean <= 0:
            return Level(float("inf"), 0.0, float("inf"))
        half = Z95 * float(values.std()) / 1e9 / mean / float(np.sqrt(len(values) / widened))
        return Level(1 / mean, 1 / mean / (1 + half), 1 / mean / max(1 - half, 1e-3))
    return median(values, widened)


def median(values: Floats, widened: float) -> Level:
    """Median with the interval that order statistics give it."""
    ordered = np.sort(values)
    count = len(ordered)
    half = Z95 * 0.5 * np.sqrt(widened / count)
    low, high = (int(np.clip(round((0.5 + s * half) * count), 0, count - 1)) for s in (-1, 1))
    return Level(float(np.median(ordered)), float(ordered[low]), float(ordered[high]))


def clear(metric: str, before: Level, after: Level) -> bool:
    """Whether a change is worth telling: large, and intervals apart."""
    apart = before.high < after.low or after.high < before.low
    if metric == "failures":
        return apart and abs(after.value - before.value) >= POINTS
    return apart and factor(before, after) >= FACTOR


def factor(before: Level, after: Level) -> float:
    small, large = sorted((before.value, after.value))
    return large / small if small > 0 else float("inf")


def turns(start_ns: Floats, ttft_ms: Floats, line: Floats) -> Floats:
    """What each request took once its turn came, ms: from its arrival or the first token before its own, whichever is later.

    Lindley's recursion turned round: where a worker serves first come, first served, this is the time it served the
    request, without the wait that makes first tokens depend on each other near saturation. First tokens of one step share it.
    `line` numbers the workers; requests of one line are in front of each other.
    """
    first = start_ns + 1e6 * ttft_ms
    order = np.lexsort((first, line))
    begun, made, where = start_ns[order], first[order], line[order]
    together = min(AT_ONCE_NS, AT_ONCE_SHARE * 1e6 * float(np.median(ttft_ms)))
    fresh = np.append(True, (np.diff(made) > together) | (np.diff(where) != 0))
    step = np.cumsum(fresh) - 1
    heads = np.flatnonzero(fresh)
    before = np.append(-np.inf, made[np.append(heads[1:] - 1, len(made) - 1)][:-1])
    before[np.append(True, np.diff(where[heads]) != 0)] = -np.inf
    # the earliest of a step's requests was served first
    arrived = np.minimum.reduceat(begun, heads)
    ends = np.maximum.reduceat(made, heads)
    each = (ends - np.maximum(arrived, before)) / np.bincount(step)
    found = np.empty(len(first))
    found[order] = each[step] / 1e6
    return found
