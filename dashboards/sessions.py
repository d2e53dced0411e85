"""Sessions: how do prompts, first tokens, reuse and the choice of worker change from turn to turn?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "session_growth"
ORDER = 52

_SHARES = {"reuse_ratio": "prompt found in a cache", "moved_ratio": "went to another worker"}


def chart(rows: pl.DataFrame) -> Any:
    """By turn: median prompt, median first token, and the shares that were reused and that moved."""
    rows = _known(rows)
    if rows.height < 2:
        return _theme.empty("no sessions with several turns")
    x = alt.X("turn:N", title="turn of its session", sort=rows["turn"].to_list(), axis=alt.Axis(labelAngle=0))  # fmt: skip
    panels = []
    if rows["prompt_p50_tokens"].drop_nulls().len():
        panels.append(_line(rows, x, "prompt_p50_tokens", "median prompt (tokens)", _theme.PREFILL, alt.Axis(tickCount=4)))  # fmt: skip
    if rows["ttft_p50_ms"].drop_nulls().len():
        panels.append(_line(rows, x, "ttft_p50_ms", "median TTFT (ms)", _theme.PHASE_COLOURS["queue"], _theme.duration_axis(tickCount=4)))  # fmt: skip
    if shares := [name for name in _SHARES if rows[name].drop_nulls().len()]:
        panels.append(_shares(rows, x, shares))
    return alt.vconcat(*panels, spacing=14) if panels else _theme.empty("nothing is known of the turns")  # fmt: skip


def _line(rows: pl.DataFrame, x: alt.X, column: str, title: str, colour: str, axis: alt.Axis) -> Any:  # fmt: skip
    return (
        alt.Chart(rows)
        .mark_line(point={"filled": True, "color": colour}, color=colour)
        .encode(x=x, y=alt.Y(f"{column}:Q", title=title, axis=axis, scale=alt.Scale(zero=True)),
                tooltip=[alt.Tooltip("turn:N"), _theme.tip(column, title), _theme.tip("requests", "requests", _theme.COUNT)])
        .properties(width=_theme.WIDTH, height=90)
    )  # fmt: skip


def _shares(rows: pl.DataFrame, x: alt.X, names: list[str]) -> Any:
    long = rows.select("turn", "place", "requests", *names).unpivot(names, index=["turn", "place", "requests"], variable_name="name", value_name="share")  # fmt: skip
    long = long.with_columns(what=pl.col("name").replace_strict(_SHARES)).drop_nulls("share")
    colours = {"reuse_ratio": _theme.PHASE_COLOURS["kv_load"], "moved_ratio": _theme.PHASE_COLOURS["router"]}  # fmt: skip
    return (
        alt.Chart(long)
        .mark_line(point=True)
        .encode(
            x=x, y=alt.Y("share:Q", title="share (%)", axis=alt.Axis(format="%", tickCount=4), scale=alt.Scale(domain=[0, 1])),
            color=alt.Color("what:N", scale=alt.Scale(domain=[_SHARES[n] for n in names], range=[colours[n] for n in names]), legend=alt.Legend(title=None, orient="bottom")),
            tooltip=[alt.Tooltip("turn:N"), alt.Tooltip("what:N"), _theme.tip("share", "share", ".1%"), _theme.tip("requests", "requests", _theme.COUNT)],
        )
        .properties(width=_theme.WIDTH, height=90)
    )  # fmt: skip


def sentence(rows: pl.DataFrame) -> str | None:
    """From the first turn to the last."""
    rows = _known(rows)
    if rows.height < 2:
        return None
    first, last = rows.row(0, named=True), rows.row(-1, named=True)
    parts = [f"{numbers.plural(first['sessions'] or 0, 'session')}"]
    for column, name, write in (
        ("prompt_p50_tokens", "median prompt", lambda v: f"{numbers.count(v)} tokens"),
        ("ttft_p50_ms", "median TTFT", numbers.duration), ("reuse_ratio", "found in a cache", numbers.share),
    ):  # fmt: skip
        if first[column] is not None and last[column] is not None:
            parts.append(
                f"{name} {write(first[column])} in turn {first['turn']}, {write(last[column])} in turn {last['turn']}"
            )
    later = rows.filter(pl.col("moved_ratio").is_not_null(), pl.col("moves_known") > 0)
    if later.height:
        moved = float((later["moved_ratio"] * later["moves_known"]).sum()) / float(later["moves_known"].sum())  # fmt: skip
        parts.append(f"{numbers.share(moved)} of later turns went to another worker than the turn before")  # fmt: skip
    return "; ".join(parts) + "."


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("turn").is_not_null(), pl.col("place").is_not_null()).sort("place")
