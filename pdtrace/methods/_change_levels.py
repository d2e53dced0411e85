"""A quantity in the order of arrival, and what a stretch of it was like; used by `changes`."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from pdtrace.methods import _segments
from pdtrace.methods.statistics import Z95, Floats, wilson_interval
from pdtrace.records import dataclass

FEWEST = 60  # requests; of fewer nothing is said
LOOKED_AT = 50_000  # requests that are looked at, every k-th of more
UNITS = {
    "arrival_rate": "requests/s",
    "ttft": "ms",
    "turn": "ms",
    "tpot": "ms",
    "failures": "1",
    "prompts": "tokens",
}
FACTOR = 1.25  # smaller changes of a rate or median are not told
POINTS = 0.02  # likewise of a share
AT_ONCE_NS, AT_ONCE_SHARE = (
    1e6,
    0.05,
)  # first tokens nearer than both (the share of a median TTFT) came from one step

OVERTAKEN = 0.002  # of the requests, those that may be overtaken by more: not every line is strict


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
    """What each request took once its turn came, ms: without the wait that makes first tokens depend on each other.

    Lindley's recursion turned round, and Kiefer and Wolfowitz's where several servers stand behind one name: where a
    line is served first come, first served, it is the time that the request was served. `line` numbers the
    names; how many are served at once under one, `_at_once` says.
    """
    first = start_ns + 1e6 * ttft_ms
    together = min(AT_ONCE_NS, AT_ONCE_SHARE * 1e6 * float(np.median(ttft_ms)))
    found = np.empty(len(first))
    for name in np.unique(line):
        mine = np.flatnonzero(line == name)
        order = mine[np.lexsort((first[mine], start_ns[mine]))]
        servers = _at_once(first[order], together)
        if servers == 1:
            found[mine] = _of_one(start_ns[mine], first[mine], together)
            continue
        # the turn of a request came when all but so many of those before it had their first token
        free = np.append(np.full(servers, -np.inf), np.sort(first[order])[:-servers])
        took = first[order] - np.maximum(start_ns[order], free)
        found[order] = np.maximum(took, 0.0)
    return found / 1e6


def _at_once(first: Floats, together: float) -> int:
    """How many requests of a line are served at once; `first` tokens in the order of arrival.

    With so many servers, first come, first served, a request is overtaken by no more than one fewer.
    """
    made = np.searchsorted(np.sort(first), first + together, side="right") - 1
    overtaken = np.arange(len(first)) - made
    most = int(np.quantile(overtaken, 1 - OVERTAKEN, method="higher"))
    return 1 + min(max(most, 0), len(first) // 4)


def _of_one(start_ns: Floats, first: Floats, together: float) -> Floats:
    """Turns, ns, of one server: from its arrival or the first token before its own, whichever is later; a step is shared."""
    order = np.argsort(first, kind="stable")
    begun, made = start_ns[order], first[order]
    fresh = np.append(True, np.diff(made) > together)
    step = np.cumsum(fresh) - 1
    heads = np.flatnonzero(fresh)
    before = np.append(-np.inf, made[np.append(heads[1:] - 1, len(made) - 1)][:-1])
    # the earliest of a step's requests was served first
    arrived = np.minimum.reduceat(begun, heads)
    ends = np.maximum.reduceat(made, heads)
    each = (ends - np.maximum(arrived, before)) / np.bincount(step)
    found = np.empty(len(first))
    found[order] = each[step]
    return found


def quantities(requests: pl.DataFrame, start: Any) -> list[Series]:
    """The four quantities, as far as they are known; every k-th request of many."""
    origin = int(start[0])
    every = max(1, -(-len(start) // LOOKED_AT))
    thin = start[::every]
    since = (thin - origin).astype(np.float64)
    found = [Series("arrival_rate", np.diff(since) / every, since[1:], origin, float(every))]
    columns = (
        ("ttft", "ttft_ms"),
        ("turn", "turn_ms"),
        ("tpot", "tpot_ms"),
        ("failures", "failed"),
    )
    for metric, column in columns:
        if series := known_values(requests, start, column, metric):
            found.append(series)
    return found


def known_values(requests: pl.DataFrame, start: Any, column: str, metric: str) -> Series | None:
    """A quantity where it is known; every k-th request of many, None of too few."""
    values = requests[column].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < FEWEST:
        return None
    every = max(1, -(-len(known) // LOOKED_AT))
    known = known[::every]
    since = (start[known] - int(start[0])).astype(np.float64)
    return Series(metric, values[known], since, int(start[0]), float(every))


def row_of(
    series: Series, kind: str, at: int, begin: int, end: int, before: Level, after: Level
) -> dict[str, Any]:
    """A row of the result: what changed where, and the levels on both sides."""
    each = series.requests_each
    return {
        "kind": kind, "metric": series.metric, "unit": UNITS[series.metric],
        "at_ns": instant(series, at), "from_ns": instant(series, begin),
        "until_ns": instant(series, end),
        "level_before": before.value, "before_low": before.low, "before_high": before.high,
        "level_after": after.value, "after_low": after.low, "after_high": after.high,
        "requests_before": round((at - begin) * each), "requests_after": round((end - at) * each),
    }  # fmt: skip
