"""When it was lost: when did prompts hold streams up, and on which worker?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "interference_time"
ORDER = 43


def chart(rows: pl.DataFrame) -> Any:
    """Seconds lost in each stretch of time, workers on top of each other."""
    rows = _known(rows)
    if rows.is_empty():
        return _theme.empty("no loss has an instant")
    named = _theme.timed(rows).with_columns(name=pl.coalesce("worker_name", "worker"))
    tips = [
        alt.Tooltip("name:N", title="worker"),
        _theme.tip("lost_s", "lost (s)"),
        _theme.tip("losses", "steps or stalls", _theme.COUNT),
        _theme.tip("length_s", "in a stretch of (s)"),
        _theme.instant("start_time", "start"),
    ]
    base = alt.Chart(named).encode(x=_theme.time_axis("start_time"), tooltip=tips)
    title = "decode seconds lost (s)"
    if named["name"].n_unique() == 1:
        drawn = base.mark_bar(color=_theme.LOST).encode(
            x2="end_time:T", y=alt.Y("lost_s:Q", title=title), y2=alt.datum(0)
        )
    else:
        drawn = base.mark_area(interpolate="step-after").encode(
            y=alt.Y("lost_s:Q", stack="zero", title=title),
            color=alt.Color("name:N", legend=alt.Legend(title="worker")),
        )
    return drawn.properties(width=_theme.WIDTH, height=170)


def sentence(rows: pl.DataFrame) -> str | None:
    """How concentrated the loss is in time, and where it was greatest."""
    rows = _known(rows)
    placed = _theme.total(rows, "lost_s")
    if rows.is_empty() or placed <= 0:
        return None
    stretches = (
        rows.group_by("start_ns").agg(pl.col("lost_s").sum()).sort("lost_s", descending=True)
    )
    busy = stretches.with_columns(so_far=pl.col("lost_s").cum_sum() - pl.col("lost_s")).filter(
        pl.col("so_far") < placed / 2
    )
    part = numbers.share(busy.height / stretches.height)
    lost = rows.unique("worker").sort("worker_lost_s", descending=True)
    first = lost.row(0, named=True)
    said = f"half of the {numbers.seconds(placed)} that have an instant were lost in {part} of the time"
    if lost.height > 1:
        said += f"; most on {first['worker_name'] or first['worker']} ({numbers.seconds(first['worker_lost_s'])})"
    called = lost.filter(pl.col("level") == "B", pl.col("total_lost_s").is_not_null())
    if called.height:
        where = (
            "" if called.height == lost.height else f" on {called.height} of {lost.height} workers"
        )
        said += f"; only stalls that can be called have an instant{where}, of {numbers.seconds(_theme.total(called, 'total_lost_s'))} in all there"
    return said + "."


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(
        pl.all_horizontal(pl.col("worker", "start_ns", "end_ns", "lost_s").is_not_null())
    )
