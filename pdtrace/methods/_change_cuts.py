"""Changes of level and drift that are large enough to be told, and no long episode of a waiting line; used by `changes`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from pdtrace.methods import _segments
from pdtrace.methods._change_levels import (
    FACTOR,
    Level,
    Series,
    clear,
    factor,
    instant,
    known_values,
    level,
    row_of,
)
from pdtrace.methods.statistics import Floats, ranks
from pdtrace.records import dataclass

BACKLOG = 10  # a slow stretch lasts this many of its waits at least, or it is one backlog
EPISODE_PARTS = 8  # parts of a slower stretch; in half of them the line must have emptied
SURE_Z = 2.58  # of the turns on both sides: chance makes them differ by a quarter, too
WAITS = 1.2  # first tokens over turns in the mean, above which there was a line to wait in
NEAR = 0.1  # of the run: changes so near each other came together


@dataclass(frozen=True)
class Beside:
    """What else is known of the run: its requests, what each took at its turn, and what changed in other quantities."""

    requests: pl.DataFrame
    start: Any
    rows: tuple[dict[str, Any], ...]
    turns: Series | None = None

    def served_alike(self, edges: tuple[int, int, int], worse: int) -> bool:
        """Whether requests took about as long at their turn on both sides (instants of begin, cut and end)."""
        if self.turns is None:
            return False
        begin, cut, end = np.searchsorted(
            self.turns.times, [at - self.turns.origin for at in edges]
        )
        sides = self.turns.values[begin:cut], self.turns.values[cut : end + 1]
        if not len(sides[0]) or not len(sides[1]):
            return False
        slow, fast = sides[worse], sides[1 - worse]
        larger = float(np.median(slow)) >= FACTOR * float(np.median(fast))
        return not larger or _rank_sum(slow, fast) < SURE_Z

    def waited(self, series: Series) -> bool:
        """Whether first tokens hold waits: then they depend on each other, whether or not that is seen."""
        if self.turns is None:
            return False
        return float(series.values.mean()) > WAITS * float(self.turns.values.mean())

    def changed(self, at_ns: int) -> bool:
        """Whether arrivals, pace or prompts changed about then."""
        near = NEAR * (int(self.start[-1]) - int(self.start[0]))
        told = [row["at_ns"] for row in self.rows if row["kind"] == "change"]
        return any(abs(at - at_ns) <= near for at in (*told, *self._prompts()))

    def _prompts(self) -> list[int]:
        prompts = known_values(self.requests, self.start, "prompt_tokens", "prompts")
        return [row["at_ns"] for row in level_changes(prompts)] if prompts else []


def _rank_sum(one: Floats, other: Floats) -> float:
    """How surely values of the one are larger: z of the rank-sum test (Mann & Whitney 1947)."""
    n, m = len(one), len(other)
    above = ranks(np.concatenate([one, other]))[:n].sum() - n * (n + 1) / 2
    return float((above - n * m / 2) / np.sqrt(n * m * (n + m + 1) / 12))


def level_changes(series: Series, beside: Beside | None = None) -> list[dict[str, Any]]:
    """Rows of drift or of changes of level that are large enough to be told."""
    course = _segments.course(series.values)
    count = len(series.values)
    if course.drift_p is not None:
        fifth = count // 5
        before = level(series, 0, fifth, course.per_block)
        after = level(series, count - fifth, count, course.per_block)
        if not clear(series.metric, before, after):
            return []
        row = row_of(series, "drift", count // 2, 0, count, before, after)
        span = {"at_low_ns": row["from_ns"], "at_high_ns": row["until_ns"]}
        return [{**row, **span, "p_value": course.drift_p}]
    cuts = list(course.cuts)
    while cuts:
        edges = [0, *(cut.at for cut in cuts), count]
        levels = [level(series, a, b, course.per_block) for a, b in pairwise(edges)]
        unclear = [
            n
            for n in range(len(cuts))
            if not clear(series.metric, levels[n], levels[n + 1])
            or _one_backlog(series, levels[n : n + 2], edges[n : n + 3])
            or _one_episode(series, course.per_block, levels[n : n + 2], edges[n : n + 3], beside)
        ]
        if not unclear:
            return [
                _cut_row(series, cut, edges[n], edges[n + 2], levels[n], levels[n + 1])
                for n, cut in enumerate(cuts)
            ]
        del cuts[min(unclear, key=lambda n: factor(levels[n], levels[n + 1]))]
    return []


def _cut_row(
    series: Series, cut: _segments.Cut, begin: int, end: int, before: Level, after: Level
) -> dict[str, Any]:
    row = row_of(series, "change", cut.at, begin, end, before, after)
    row["p_value"] = cut.p_value
    row["at_low_ns"], row["at_high_ns"] = (instant(series, n) for n in (cut.low, cut.high))
    if series.metric == "ttft":
        left, right = series.values[begin : cut.at], series.values[cut.at : end]
        worse, better = (right, left) if right.mean() > left.mean() else (left, right)
        row["cost_s"] = (
            float((worse.mean() - better.mean()) * len(worse) * series.requests_each) / 1e3
        )
    return row


def _one_backlog(series: Series, levels: list[Level], edges: list[int]) -> bool:
    """Whether the slower side lasts no longer than a few of its own waits: one backlog that drains."""
    if series.metric != "ttft":
        return False
    worse = 0 if levels[0].value > levels[1].value else 1
    begin, end = (instant(series, edges[n]) for n in (worse, worse + 1))
    return end - begin < BACKLOG * levels[worse].value * 1e6


def _one_episode(
    series: Series, per_block: float, levels: list[Level], edges: list[int], beside: Beside | None
) -> bool:
    """Whether the slower side may be one long episode of a waiting line: nothing else changed, it never emptied or served as fast.

    Only of first tokens that depend on each other. Emptied: as fast as the better side is in the median.
    """
    independent = max(_segments.PER_BLOCK, len(series.values) / _segments.BLOCKS)
    if series.metric != "ttft" or beside is None:
        return False
    if per_block <= 1.05 * independent and not beside.waited(series):
        return False
    worse = 0 if levels[0].value > levels[1].value else 1
    fast = series.values[edges[worse] : edges[worse + 1]] <= levels[1 - worse].value
    emptied = sum(bool(part.any()) for part in np.array_split(fast, EPISODE_PARTS))
    begin, cut, end = (instant(series, edge) for edge in edges)
    episode = 2 * emptied < EPISODE_PARTS or beside.served_alike((begin, cut, end), worse)
    return episode and not beside.changed(cut)
