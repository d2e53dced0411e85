"""Pictures of two runs on the same axes: latency by share of requests, differences with intervals, time by phase."""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from . import _theme

RUNS = ("A", "B")
_METRICS = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "e2e_ms": "whole request",
}
_KINDS = {
    "lower in B": _theme.SERIES[0], "higher in B": _theme.SERIES[1], "no difference shown": _theme.QUIET,
}  # fmt: skip
_WIDE = 20  # greatest over least: from here on the axis is logarithmic


def _run(legend: bool = True) -> alt.Color:
    return alt.Color(
        "run:N", scale=alt.Scale(domain=list(RUNS), range=list(_theme.SERIES[:2])), legend=alt.Legend(title=None) if legend else None
    )  # fmt: skip


def curves(rows: pl.DataFrame) -> Any:
    """One panel a metric: the time that each share of the requests stayed below, one line a run."""
    panels = [
        _curve(part, name, title)
        for name, title in _METRICS.items()
        if (part := rows.filter(pl.col("metric") == name)).height
    ]
    return alt.vconcat(*panels, spacing=16) if panels else _theme.empty("no latency is known")


def _curve(rows: pl.DataFrame, name: str, title: str) -> Any:
    low, high = float(rows["value_ms"].min() or 0), float(rows["value_ms"].max() or 0)  # type: ignore[arg-type]
    scale = alt.Scale(type="log", nice=False) if 0 < _WIDE * low < high else alt.Scale(zero=True)
    return (
        alt.Chart(rows)
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("share_ratio:Q", title="share of the requests (%)", axis=alt.Axis(format="%", tickCount=10), scale=alt.Scale(domain=[0, 1])),
            y=alt.Y("value_ms:Q", title=f"{title} (ms)", axis=_theme.duration_axis(tickCount=5), scale=scale),
            color=_run(),
            tooltip=[alt.Tooltip("run:N"), _theme.tip("share_ratio", "share of the requests", ".0%"), _theme.tip("value_ms", "stayed at or below (ms)"), _theme.tip("requests", "requests", _theme.COUNT)],
        )
        .properties(width=_theme.WIDTH, height=150)
    )  # fmt: skip


def ratios(rows: pl.DataFrame) -> Any:
    """One line a figure: B over A with its 95 % interval; at 1 there is no difference."""
    if rows.is_empty():
        return _theme.empty("no figure is known on both sides")
    kinds = [kind for kind in _KINDS if kind in set(rows["kind"])]
    base = alt.Chart(rows).encode(
        y=alt.Y("figure:N", title=None, sort=rows["figure"].to_list()),
        color=alt.Color("kind:N", scale=alt.Scale(domain=kinds, range=[_KINDS[k] for k in kinds]), legend=alt.Legend(title=None)),
        tooltip=[
            alt.Tooltip("figure:N"), alt.Tooltip("a:N", title="A"), alt.Tooltip("b:N", title="B"), _theme.tip("ratio", "B / A"),
            _theme.tip("low", "95 % interval from"), _theme.tip("high", "to"), alt.Tooltip("level:N", title="evidence"),
        ],
    )  # fmt: skip
    spread = float(rows.select(pl.max_horizontal("ratio", "high").max()).item() or 1), float(rows.select(pl.min_horizontal("ratio", "low").min()).item() or 0)  # fmt: skip
    scale = alt.Scale(type="log") if spread[1] > 0 and spread[0] > 4 * spread[1] else alt.Scale(zero=False)  # fmt: skip
    x = alt.X("ratio:Q", title="B over A (1: no difference)", scale=scale, axis=alt.Axis(format=".2~f", tickCount=7))  # fmt: skip
    one = alt.Chart(pl.DataFrame({"ratio": [1.0]})).mark_rule(strokeDash=[4, 3]).encode(x="ratio:Q")
    spans = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q")  # fmt: skip
    points = base.mark_point(size=60).encode(x=x)
    return (one + spans + points).properties(width=_theme.WIDTH, height=_theme.ROW * max(rows.height, 2))  # fmt: skip


def phases(rows: pl.DataFrame) -> Any:
    """Two bars a phase: mean time per request in A and in B, with the numbers."""
    if rows.is_empty():
        return _theme.empty("no phases are known on both sides")
    base = alt.Chart(rows).encode(
        y=alt.Y("phase:N", title=None, sort=rows["phase"].unique(maintain_order=True).to_list()),
        yOffset=alt.YOffset("run:N", sort=list(RUNS)),
        tooltip=[
            alt.Tooltip("phase:N"), alt.Tooltip("run:N"), _theme.tip("mean_ms", "mean per request (ms)"),
            alt.Tooltip("upper_bound:N", title="an upper bound"),
        ],
    )  # fmt: skip
    bars = base.mark_bar().encode(
        x=alt.X("mean_ms:Q", title="mean time per request (ms)", axis=_theme.duration_axis(tickCount=6)), color=_run()
    )  # fmt: skip
    text = base.mark_text(align="left", dx=4).encode(x="mean_ms:Q", text="text:N")
    height = 36 * max(rows["phase"].n_unique(), 2)
    return (bars + text).properties(width=_theme.WIDTH, height=height)
