"""When things changed over a run: warm-up, changes of level, drift, restarts; by deployment and worker.

Of arrivals, first tokens, time per output token and failures, each in the order of arrival. A
change of level is found and judged in `_segments` (circular binary segmentation on ranks, guarded
against queues' memory), and counts only where it is large and its intervals do not overlap. First
tokens that depend on each other come from a waiting line, whose long episodes look like changes:
there a change counts only where something else changed with it (arrivals, pace, prompts, what a
request takes once its turn has come), or where the line emptied again and again in the slower part
though requests took longer at their turn. What a request takes at its turn (`turns` in
`_change_levels`) has none of the line's memory; where it changed and arrivals and prompts did not, it
is told itself, unless first tokens tell the same. Warm-up
is told apart: the first requests are slower than any other stretch of as many requests was. What
changed along with it (arrivals, requests in flight, prompts) stands beside each change; that is no
proof of a cause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    level,
    median,
    turns,
)
from pdtrace.methods.statistics import Floats, ranks

REQUESTS = """
SELECT request, decode_worker AS worker, coalesce(prefill_worker, decode_worker) AS line, start_ns, prompt_tokens,
  CASE WHEN counted THEN ttft_ms END AS ttft_ms, CASE WHEN counted THEN pace_ms END AS tpot_ms,
  coalesce(e2e_ms, (end_ns - start_ns) / 1e6) AS e2e_ms,
  CASE outcome WHEN 'failed' THEN 1.0 WHEN 'completed' THEN 0.0 END AS failed
FROM request_values
WHERE deployment IS NOT DISTINCT FROM $deployment AND start_ns IS NOT NULL
"""

DEPLOYMENTS = """
SELECT deployment FROM requests WHERE start_ns IS NOT NULL GROUP BY 1 HAVING count(*) >= 60 ORDER BY 1
"""

# Signs that a worker began anew while it was in use: it said so, or counters fell.
RESTARTS = """
WITH sign AS (
  SELECT worker, time_ns AS from_ns, time_ns, 'it said so' AS sign
  FROM events
  WHERE kind IN ('restart', 'started') AND time_ns IS NOT NULL
  UNION ALL
  SELECT worker, before_ns, time_ns, 'counters fell'
  FROM (
    SELECT worker, time_ns, value, lag(value) OVER series AS before,
      lag(time_ns) OVER series AS before_ns
    FROM samples
    WHERE kind = 'counter' AND time_ns IS NOT NULL
    WINDOW series AS (PARTITION BY worker, metric, labels ORDER BY time_ns)
  )
  WHERE value < 0.9 * before AND before_ns < time_ns
),
first_use AS (
  SELECT worker, min(start_ns) AS first_ns
  FROM legs
  WHERE coalesce(clock, 'wall') = 'wall'
  GROUP BY worker
)
SELECT w.deployment, s.worker, s.from_ns, s.time_ns, s.sign
FROM sign AS s
JOIN workers AS w ON w.worker = s.worker
LEFT JOIN first_use AS f ON f.worker = s.worker
WHERE s.sign = 'counters fell' OR s.time_ns > f.first_ns
ORDER BY s.worker, s.time_ns
"""

FEWEST = 60  # requests; of fewer nothing is said
LOOKED_AT = 50_000  # requests that are looked at, every k-th of more
BACKLOG = 10  # a slow stretch lasts this many of its waits at least, or it is one backlog
EPISODE_PARTS = 8  # parts of a slower stretch; in half of them the line must have emptied
SURE_Z = 2.58  # of the turns on both sides: chance makes them differ by a quarter, too
WAITS = 1.2  # first tokens over turns in the mean, above which there was a line to wait in
NEAR = 0.1  # of the run: changes so near each other came together
WARM_FACTOR, WARM_FEWEST, WARM_P = 1.5, 100, 0.002
WARM_SIZES = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987)
ONE_RESTART_NS = 60 * 10**9  # signs closer than this tell of one restart
METRICS = ("arrival_rate", "ttft", "turn", "tpot", "failures")
UNITS = {
    "arrival_rate": "requests/s",
    "ttft": "ms",
    "turn": "ms",
    "tpot": "ms",
    "failures": "1",
    "prompts": "tokens",
}

RESULT_SCHEMA: dict[str, type[pl.DataType]] = {
    "deployment": pl.String, "worker": pl.String, "kind": pl.String, "metric": pl.String,
    "at_ns": pl.Int64, "at_low_ns": pl.Int64, "at_high_ns": pl.Int64, "from_ns": pl.Int64,
    "until_ns": pl.Int64, "level_before": pl.Float64, "before_low": pl.Float64,
    "before_high": pl.Float64, "level_after": pl.Float64, "after_low": pl.Float64,
    "after_high": pl.Float64, "unit": pl.String, "requests_before": pl.Int64,
    "requests_after": pl.Int64, "p_value": pl.Float64, "cost_s": pl.Float64,
    "arrival_rate_before": pl.Float64, "arrival_rate_after": pl.Float64,
    "in_flight_before": pl.Float64, "in_flight_after": pl.Float64,
    "prompt_tokens_before": pl.Float64, "prompt_tokens_after": pl.Float64,
    "p99_ms": pl.Float64, "p99_without_ms": pl.Float64, "note": pl.String,
}  # fmt: skip


def ordered(requests: pl.DataFrame) -> pl.DataFrame:
    """By start, and by request where several started at once; texts are compared only there."""
    at_once = requests["start_ns"].is_duplicated().any()
    return requests.sort("start_ns", "request") if at_once else requests.sort("start_ns")


def changes(requests: pl.DataFrame, deployment: str | None) -> pl.DataFrame:
    """All changes of one deployment's requests (ordered by start): of the whole, then of workers.

    A worker's change is told only where the whole does not show it.
    """
    requests = _with_turns(requests)
    whole = _changes(requests)
    rows = [{**row, "worker": None} for row in whole]
    workers = requests["worker"].drop_nulls().unique().sort().to_list()
    if len(workers) > 1:
        for worker in workers:
            mine = _changes(requests.filter(pl.col("worker") == worker))
            rows += [{**row, "worker": worker} for row in mine if not _known(row, whole, requests)]
    return pl.DataFrame([{**row, "deployment": deployment} for row in rows], schema=RESULT_SCHEMA)


def _with_turns(requests: pl.DataFrame) -> pl.DataFrame:
    """The requests with `turn_ms`, what each took once its turn came; NULL where its first token is not known."""
    lines = pl.col("line").cast(pl.String).fill_null("").rank("dense").cast(pl.Float64)
    known = pl.col("ttft_ms").is_not_null() & pl.col("ttft_ms").is_finite()
    numbered = requests.with_row_index("n")
    table = numbered.filter(known).select(
        "n",
        start=(pl.col("start_ns") - pl.col("start_ns").min()).cast(pl.Float64),
        ttft=pl.col("ttft_ms").cast(pl.Float64),
        line=lines,
    )
    if table.is_empty():
        return requests.with_columns(turn_ms=pl.lit(None, pl.Float64))
    took = turns(table["start"].to_numpy(), table["ttft"].to_numpy(), table["line"].to_numpy())
    each = table.select("n").with_columns(turn_ms=pl.Series(took))
    return numbered.join(each, on="n", how="left", maintain_order="left").drop("n")


def _known(row: dict[str, Any], whole: list[dict[str, Any]], requests: pl.DataFrame) -> bool:
    """Whether the whole deployment shows this change too."""
    start = requests["start_ns"].to_numpy()
    near = NEAR * (int(start[-1]) - int(start[0]))
    return any(
        (row["kind"], row["metric"]) == (other["kind"], other["metric"])
        and abs(row["at_ns"] - other["at_ns"]) <= near
        and (row["level_after"] > row["level_before"])
        == (other["level_after"] > other["level_before"])
        for other in whole
    )


def _changes(requests: pl.DataFrame) -> list[dict[str, Any]]:
    if requests.height < FEWEST:
        return []
    start = requests["start_ns"].to_numpy().astype(np.int64)
    if start[0] == start[-1]:
        return []
    rows: list[dict[str, Any]] = []
    # turns and then first tokens last: what else changed tells a change from an episode of the waiting line
    last = {"turn": 1, "ttft": 2}
    every = sorted(_series(requests, start), key=lambda s: last.get(s.metric, 0))
    turn = next((s for s in every if s.metric == "turn"), None)
    for series in every:
        skip = 0
        if series.metric in {"ttft", "tpot"} and (warm := _warm_up(series)):
            skip, row = warm
            rows.append(row)
        later = replace(series, values=series.values[skip:], times=series.times[skip:])
        beside = _Beside(requests, start, tuple(rows), turn)
        found = _levels(later, beside)
        if series.metric == "turn":  # more or longer requests take longer turns, too
            found = [
                row for row in found if row["kind"] == "change" and not beside.changed(row["at_ns"])
            ]
        rows += found
    rows = [
        row
        for row in rows
        if row["metric"] != "turn" or not _told_by_first_tokens(row, rows, start)
    ]
    rows.sort(key=lambda row: METRICS.index(row["metric"]))
    return [{**row, **_along(requests, start, row)} for row in rows]


def _told_by_first_tokens(turn: dict[str, Any], rows: list[dict[str, Any]], start: Any) -> bool:
    """Whether a change of first tokens says the same as one of turns."""
    near = NEAR * (int(start[-1]) - int(start[0]))
    return any(
        row["metric"] == "ttft"
        and row["kind"] == "change"
        and abs(row["at_ns"] - turn["at_ns"]) <= near
        for row in rows
    )


@dataclass(frozen=True)
class _Beside:
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
        prompts = _known_values(self.requests, self.start, "prompt_tokens", "prompts")
        return [row["at_ns"] for row in _levels(prompts)] if prompts else []


def _rank_sum(one: Floats, other: Floats) -> float:
    """How surely values of the one are larger: z of the rank-sum test (Mann & Whitney 1947)."""
    n, m = len(one), len(other)
    above = ranks(np.concatenate([one, other]))[:n].sum() - n * (n + 1) / 2
    return float((above - n * m / 2) / np.sqrt(n * m * (n + m + 1) / 12))


def _series(requests: pl.DataFrame, start: Any) -> list[Series]:
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
        if series := _known_values(requests, start, column, metric):
            found.append(series)
    return found


def _known_values(requests: pl.DataFrame, start: Any, column: str, metric: str) -> Series | None:
    """A quantity where it is known; every k-th request of many, None of too few."""
    values = requests[column].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < FEWEST:
        return None
    every = max(1, -(-len(known) // LOOKED_AT))
    known = known[::every]
    since = (start[known] - int(start[0])).astype(np.float64)
    return Series(metric, values[known], since, int(start[0]), float(every))


# -- warm-up -----------------------------------------------------------------------------------------


def _warm_up(series: Series) -> tuple[int, dict[str, Any]] | None:
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
    as_slow = float((scores[best] >= scores[best, 0]).mean())
    first, rest = values[:size], values[size:]
    if size == sizes[-1]:  # a tenth of the run or more is a part of it, not its beginning
        return None
    slow = float(np.median(first)) >= WARM_FACTOR * float(np.median(rest))
    if as_slow > max(WARM_P, 1 / count) or not slow or not _apart(first, rest):
        return None
    before, after = median(first, 1.0), median(rest, 1.0)
    row = _row(series, "warm_up", size, 0, len(values), before, after)
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


# -- changes of level --------------------------------------------------------------------------------


def _levels(series: Series, beside: _Beside | None = None) -> list[dict[str, Any]]:
    """Rows of drift or of changes of level that are large enough to be told."""
    course = _segments.course(series.values)
    count = len(series.values)
    if course.drift_p is not None:
        fifth = count // 5
        before = level(series, 0, fifth, course.per_block)
        after = level(series, count - fifth, count, course.per_block)
        if not clear(series.metric, before, after):
            return []
        row = _row(series, "drift", count // 2, 0, count, before, after)
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
    row = _row(series, "change", cut.at, begin, end, before, after)
    row["p_value"] = cut.p_value
    row["at_low_ns"], row["at_high_ns"] = (instant(series, n) for n in (cut.low, cut.high))
    if series.metric == "ttft":
        left, right = series.values[begin : cut.at], series.values[cut.at : end]
        worse, better = (right, left) if right.mean() > left.mean() else (left, right)
        row["cost_s"] = (
            float((worse.mean() - better.mean()) * len(worse) * series.requests_each) / 1e3
        )
    return row


def _row(
    series: Series, kind: str, at: int, begin: int, end: int, before: Level, after: Level
) -> dict[str, Any]:
    each = series.requests_each
    return {
        "kind": kind, "metric": series.metric, "unit": UNITS[series.metric],
        "at_ns": instant(series, at), "from_ns": instant(series, begin),
        "until_ns": instant(series, end),
        "level_before": before.value, "before_low": before.low, "before_high": before.high,
        "level_after": after.value, "after_low": after.low, "after_high": after.high,
        "requests_before": round((at - begin) * each), "requests_after": round((end - at) * each),
    }  # fmt: skip


def _one_backlog(series: Series, levels: list[Level], edges: list[int]) -> bool:
    """Whether the slower side lasts no longer than a few of its own waits: one backlog that drains."""
    if series.metric != "ttft":
        return False
    worse = 0 if levels[0].value > levels[1].value else 1
    begin, end = (instant(series, edges[n]) for n in (worse, worse + 1))
    return end - begin < BACKLOG * levels[worse].value * 1e6


def _one_episode(
    series: Series, per_block: float, levels: list[Level], edges: list[int], beside: _Beside | None
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


# -- what changed along with it ------------------------------------------------------------------------


def _along(requests: pl.DataFrame, start: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Arrivals, requests in flight and prompts before and after a change."""
    places = np.searchsorted(start, [row["from_ns"], row["at_ns"], row["until_ns"]])
    found: dict[str, Any] = {}
    sides = (("before", places[0], places[1]), ("after", places[1], places[2] + 1))
    for side, begin, end in sides:
        part = requests.slice(int(begin), int(end - begin))
        seconds = (start[min(end, len(start) - 1)] - start[begin]) / 1e9
        found[f"prompt_tokens_{side}"] = part["prompt_tokens"].cast(pl.Float64).median()
        if seconds > 0 and part.height > 1:
            found[f"arrival_rate_{side}"] = part.height / seconds
            if part["e2e_ms"].null_count() == 0:
                found[f"in_flight_{side}"] = float(part["e2e_ms"].sum()) / 1e3 / seconds
    return found


def restarts(signs: pl.DataFrame) -> pl.DataFrame:
    """One row per restart of a worker while it was in use, from the signs of it."""
    if signs.is_empty():
        return pl.DataFrame(schema=RESULT_SCHEMA)
    apart = pl.col("time_ns") - pl.col("time_ns").shift().over("worker") > ONE_RESTART_NS
    grouped = (
        signs.sort("worker", "time_ns")
        .with_columns(apart.fill_null(value=True).cum_sum().over("worker").alias("restart"))
        .group_by("deployment", "worker", "restart", maintain_order=True)
        .agg(
            pl.col("from_ns").min().alias("at_low_ns"),
            pl.col("time_ns").max().alias("at_high_ns"),
            pl.col("time_ns").min().alias("at_ns"),
            pl.col("sign").unique().sort().str.join(", ").alias("note"),
        )
    )
    return pl.concat(
        [
            pl.DataFrame(schema=RESULT_SCHEMA),
            grouped.with_columns(kind=pl.lit("restart")).drop("restart"),
        ],
        how="diagonal",
    ).select(list(RESULT_SCHEMA))
