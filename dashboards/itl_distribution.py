"""Gaps between tokens: how long are they, and how much of the long ones do prompts of others explain?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "itl_distribution"
ORDER = 41

_ALL, _EXPLAINED = "time in such gaps", "of it by prompts of others"


def chart(rows: pl.DataFrame) -> Any:
    """Stream time by length of gap; over it the part that prefills explain."""
    rows = _known(rows)
    if rows.is_empty():
        return _theme.empty("no gaps between tokens are known")
    low, high = _theme.ends(rows, "low_ms", "high_ms")
    ticks = _theme.decades(low, high)
    colour = alt.Scale(domain=[_ALL, _EXPLAINED], range=[_theme.DECODE, _theme.PREFILL])
    base = alt.Chart(rows).encode(
        x=alt.X(
            "low_ms:Q",
            bin="binned",
            title="length of the gap",
            scale=alt.Scale(type="log", domain=[low, high], nice=False),
            axis=_theme.duration_axis(ticks),
        ),
        x2="high_ms:Q",
        tooltip=[
            _theme.tip("low_ms", "gaps from (ms)"),
            _theme.tip("high_ms", "to (ms)"),
            _theme.tip("gaps", "gaps", _theme.COUNT),
            _theme.tip("total_s", "time in them (s)"),
            _theme.tip("explained_gaps", "of them made by a prompt", _theme.COUNT),
            _theme.tip("explained_s", "time that prompts explain (s)"),
        ],
    )
    legend = alt.Legend(title=None)
    every = base.mark_bar(binSpacing=1).encode(
        y=alt.Y("total_s:Q", title="stream time (s)", stack=None),
        color=alt.datum(_ALL, scale=colour, legend=legend, type="nominal"),
    )
    explained = base.mark_bar(binSpacing=1).encode(
        y=alt.Y("explained_s:Q", stack=None), color=alt.datum(_EXPLAINED, type="nominal")
    )
    shown = every + explained if rows["judged"].any() else every
    return shown.properties(width=_theme.WIDTH, height=210)


def sentence(rows: pl.DataFrame) -> str | None:
    """Typical and long gaps, and what prefills explain of them."""
    rows = _known(rows)
    if rows.is_empty():
        return None
    row = rows.row(0, named=True)
    what = f"{row['emission']}s" if row["emission"] else "emissions"
    said = (
        f"half of the {numbers.count(row['all_gaps'])} gaps between {what} are at most "
        f"{numbers.duration(row['p50_ms'])}, p99 {numbers.duration(row['p99_ms'])}, "
        f"the longest {numbers.duration(row['max_ms'])}"
    )
    return f"{said}; {_explained(rows, row)}."


def _explained(rows: pl.DataFrame, row: dict[str, Any]) -> str:
    if not row["judged"]:
        return "whether prompts of others explain them cannot be told here"
    lost = _theme.total(rows, "explained_s")
    unknown = row["unjudged_s"] or 0.0
    rest = (
        f"; of {numbers.seconds(unknown)} on workers that could not be judged it cannot be told"
        if unknown
        else ""
    )
    told = row["all_s"] - unknown
    if not lost:
        where = f" in {numbers.seconds(told)} of stream time" if unknown else ""
        return f"no gap is explained by prompts of others{where}{rest}"
    part = f" ({numbers.share(lost / told)})" if told > 0 else ""
    said = f"prompts of others explain {numbers.seconds(lost)} of {numbers.seconds(told)} stream time{part}{rest}"
    tail = row["tail_explained_ratio"]
    return (
        said
        if tail is None
        else f"{said}; on the worker that lost most, {numbers.share(tail)} of what the longest hundredth lasts beyond the ordinary"
    )


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    needed = pl.all_horizontal(pl.col("low_ms", "high_ms", "gaps", "total_s").is_not_null())
    return rows.filter(needed, pl.col("low_ms") > 0, pl.col("high_ms") > pl.col("low_ms")).sort(
        "low_ms"
    )
