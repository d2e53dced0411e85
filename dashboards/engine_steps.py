"""Engine steps: what makes a step long, decoding requests or prompts computed in it?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "step_batches"
ORDER = 45

_CLASSES = {
    "decode_only": ("decodes only", _theme.DECODE),
    "mixed": ("decodes and prompts", _theme.LOST),
    "prefill_only": ("prompts only", _theme.PREFILL),
}


def chart(rows: pl.DataFrame) -> Any:
    """A circle per kind of batch: across what decodes in it, up its duration, large where much time went."""
    rows = _known(rows)
    if rows.is_empty():
        return _theme.empty("no engine steps are known")
    names = {name: words for name, (words, _) in _CLASSES.items()}
    there = [name for name in _CLASSES if name in set(rows["class"])]
    up, ticks = _theme.amount(rows, "p50_ms")
    tips = [
        alt.Tooltip("kind:N", title="steps with"),
        alt.Tooltip("worker_name:N", title="worker"),
        _theme.tip("decode_requests", "decoding requests (mean)"),
        _theme.tip("prefill_tokens", "prompt tokens (mean)"),
        _theme.tip("p50_ms", "median duration (ms)"),
        _theme.tip("p90_ms", "90th percentile (ms)"),
        _theme.tip("max_ms", "longest (ms)"),
        _theme.tip("steps", "steps", _theme.COUNT),
        _theme.tip("total_s", "all of them (s)"),
    ]
    return (
        alt.Chart(rows.with_columns(kind=pl.col("class").replace_strict(names)))
        .mark_circle(opacity=0.6)
        .encode(
            x=alt.X("decode_requests:Q", title="requests decoding in the step", axis=_theme.count_axis()),
            y=alt.Y("p50_ms:Q", title="duration of a step (median)", scale=up, axis=_theme.duration_axis(ticks)),
            color=alt.Color(
                "kind:N",
                title=None,
                scale=alt.Scale(domain=[names[n] for n in there], range=[_CLASSES[n][1] for n in there]),
            ),
            size=alt.Size(
                "total_s:Q", title="time in such steps (s)", scale=alt.Scale(range=[12, 700]),
                legend=alt.Legend(format=_theme.DECIMAL, tickCount=3, symbolFillColor=_theme.QUIET),
            ),
            tooltip=tips,
        )
        .properties(width=_theme.WIDTH, height=_theme.HEIGHT)
    )  # fmt: skip


def sentence(rows: pl.DataFrame) -> str | None:
    """What a step of each class takes, and how much of the time they make."""
    rows = _known(rows)
    if rows.is_empty():
        return None
    busiest = (
        rows.group_by("worker")
        .agg(pl.col("total_s").sum())
        .sort("total_s", "worker", descending=[True, False])
    )
    mine = rows.filter(pl.col("worker").eq_missing(busiest["worker"][0]))
    parts = []
    for name, (words, _) in _CLASSES.items():
        of_class = mine.filter(pl.col("class") == name)
        if of_class.height:
            first = of_class.row(0, named=True)
            part = _theme.total(of_class, "total_s") / max(_theme.total(mine, "total_s"), 1e-12)
            parts.append(
                f"a step with {words} takes {numbers.duration(first['class_p50_ms'])} (median of "
                f"{numbers.count(first['class_steps'])}; {numbers.share(part)} of the time)"
            )
    many = busiest.height > 1
    where = (
        f"on {mine['worker_name'][0] or mine['worker'][0]}, the busiest of {busiest.height} workers, "
        if many
        else ""
    )
    sampled = "; only a sample of the steps is known" if "sampled" in set(mine["capture"]) else ""
    return where + ", ".join(parts) + sampled + "."


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    needed = pl.all_horizontal(pl.col("decode_requests", "p50_ms", "total_s").is_not_null())
    return rows.filter(needed, pl.col("class").is_in(list(_CLASSES)))
