"""What counters, gauges and engine steps say where no request is known."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pdtrace._words import Row
from pdtrace.numbers import UNKNOWN, count, duration, share

SHOWN = 16  # metrics in the text; JSON and `pdtrace query metric_summary` have all
# What people look for first, in this order.
_FIRST = tuple(
    re.compile(pattern)
    for pattern in (
        r"first_token|ttft", r"inter_token|per_output_token|itl|tpot", r"e2e|request_latency|request_duration",
        r"queue", r"prefill", r"decode", r"transfer|xfer|log:kv_", r"running|inflight", r"waiting", r"usage",
        r"(prompt|generation|gen)_throughput", r"hit_rate", r"accept", r"tokens",
    )
)  # fmt: skip


METRIC_HEADS = ("metric", "mean", "least", "most", "n", "over", "level")
STEP_HEADS = ("steps", "n", "p50", "p99", "of step time", "level")


def step_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Classes of engine steps under STEP_HEADS."""
    return [
        [
            row["name"].replace("_", " "), count(row["count"]), duration(row["p50"]), duration(row["p99"]),
            share(row["share"]), row["level"],
        ]
        for row in rows
        if row["kind"] == "steps"
    ]  # fmt: skip


def metric_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Metrics under METRIC_HEADS, those first that people look for first; at most SHOWN."""
    metrics = [row for row in rows if row["kind"] != "steps"]
    chosen = sorted(metrics, key=lambda r: (_place(r["name"]), r["name"]))[:SHOWN]
    return [
        [
            row["name"], _value(row["mean"], row["unit"]),
            *("" if row["kind"] == "mean" else _value(row[key], row["unit"]) for key in ("low", "high")),
            count(row["count"]), _over(row), row["level"],
        ]
        for row in chosen
    ]  # fmt: skip


def _over(row: Row) -> str:
    if row["kind"] == "range":
        return "samples"
    return "values since the start" if row["since_start"] else "values in the period"


def _place(name: str) -> int:
    return next((n for n, pattern in enumerate(_FIRST) if pattern.search(name)), len(_FIRST))


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return UNKNOWN
    if unit == "s":
        return duration(value * 1000)
    if unit == "ms":
        return duration(value)
    if unit == "1":
        return share(value)
    text = count(value) if abs(value) >= 100 or float(value).is_integer() else f"{value:.3g}"
    return f"{text} {unit}".strip()
