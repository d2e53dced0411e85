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

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from pdtrace.methods._change_cuts import NEAR, Beside, level_changes
from pdtrace.methods._change_levels import FEWEST, quantities, turns
from pdtrace.methods._change_warm_up import warm_up

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

# Without one of these no worker began anew, and legs are not looked through.
ANY_SIGN = (
    "SELECT 1 FROM events WHERE kind IN ('restart', 'started') LIMIT 1",
    "SELECT 1 FROM samples WHERE kind = 'counter' LIMIT 1",
)

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

ONE_RESTART_NS = 60 * 10**9  # signs closer than this tell of one restart
METRICS = ("arrival_rate", "ttft", "turn", "tpot", "failures")

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
    every = sorted(quantities(requests, start), key=lambda s: last.get(s.metric, 0))
    turn = next((s for s in every if s.metric == "turn"), None)
    for series in every:
        skip = 0
        if series.metric in {"ttft", "tpot"} and (warm := warm_up(series)):
            skip, row = warm
            rows.append(row)
        later = replace(series, values=series.values[skip:], times=series.times[skip:])
        beside = Beside(requests, start, tuple(rows), turn)
        found = level_changes(later, beside)
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
