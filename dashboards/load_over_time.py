"""Load over time: did requests queue, how many ran at once, and how full was the KV cache, worker by worker?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "load_over_time"
ORDER = 60

_PANELS = {
    "waiting": "requests waiting", "running": "requests running", "batch": "requests in the step",
    "kv_usage": "KV cache in use (%)",
}  # fmt: skip
_HOW = {"A": "engine steps", "B": "the requests' own times", "D": "metrics or log lines"}


def chart(rows: pl.DataFrame) -> Any:
    """One panel a quantity that moves, one line a worker: mean of each stretch, with its range."""
    rows = _known(rows)
    shown = [name for name in _PANELS if _moves(rows, name)]
    if not shown:
        return None if rows.height else _theme.empty("no load is known over time")
    order = sorted(rows["label"].unique().to_list())
    panels = [
        _panel(_theme.timed(rows.filter(pl.col("quantity") == name)), name, order, last=name == shown[-1])
        for name in shown
    ]  # fmt: skip
    return alt.vconcat(*panels, spacing=14).resolve_scale(x="shared", color="shared")


def _panel(rows: pl.DataFrame, name: str, order: list[str], *, last: bool) -> Any:
    percent = name == "kv_usage"
    top = 1.0 if percent and (rows["high"].max() or 0) > 0.5 else None  # type: ignore[operator]
    scale = alt.Scale(domain=[0, top]) if top else alt.Scale(zero=True)
    axis = alt.Axis(format="%", tickCount=4) if percent else alt.Axis(tickCount=4, tickMinStep=1)
    base = alt.Chart(rows).encode(
        x=_theme.time_axis("start_time", "time" if last else None),
        color=alt.Color("label:N", scale=alt.Scale(domain=order, range=list(_theme.SERIES)), legend=alt.Legend(title=None, symbolOpacity=1) if len(order) > 1 else None),
        tooltip=[
            alt.Tooltip("label:N", title="worker"), _theme.instant("start_time", "from"),
            *(_theme.tip(column, title, ".1%" if percent else _theme.DECIMAL)
              for column, title in (("mean", "mean"), ("low", "least"), ("high", "greatest"))),
        ],
    )  # fmt: skip
    band = base.mark_area(opacity=0.18, interpolate="step-after").encode(
        y=alt.Y("low:Q", title=_PANELS[name], scale=scale, axis=axis), y2="high:Q"
    )
    line = base.mark_line(interpolate="step-after", strokeWidth=1.6).encode(
        y=alt.Y("mean:Q", title=_PANELS[name], scale=scale, axis=axis)
    )
    return (band + line).properties(width=_theme.WIDTH, height=110)


def sentence(rows: pl.DataFrame) -> str | None:
    """Peaks and means of what moves, and in words what never does."""
    rows = _known(rows)
    seen = set(rows.filter(pl.col("high").is_not_null(), pl.col("mean").is_not_null())["quantity"])
    parts = [_said(rows, name) for name in _PANELS if name in seen]  # fmt: skip
    if not parts:
        return None
    return "; ".join(parts) + _left_out(rows) + f". From {_sources(rows)}."


def _said(rows: pl.DataFrame, name: str) -> str:
    mine = rows.filter(pl.col("quantity") == name)
    what = _PANELS[name].removesuffix(" (%)")
    write = numbers.share if name == "kv_usage" else numbers.count
    top = mine.sort("high", descending=True, nulls_last=True, maintain_order=True).row(
        0, named=True
    )
    if mine["low"].min() == mine["high"].max():
        value = "none" if not top["high"] else write(top["high"])
        whole = mine["high"].null_count() == 0
        return f"{what}: {value}, {'all the time' if whole else 'as far as it is known'}"
    own = float(mine.filter(pl.col("label") == top["label"])["mean"].mean() or 0)  # type: ignore[arg-type]
    mean = (
        numbers.share(own)
        if name == "kv_usage"
        else (f"{own:.2g}" if own < 10 else numbers.count(own))
    )
    who = f" on {top['label']}" if rows["label"].n_unique() > 1 else ""
    return f"{what}: at most {write(top['high'])}{who} (mean {mean})"


def _sources(rows: pl.DataFrame) -> str:
    """Where each quantity is known from."""
    named = rows.group_by("level").agg(pl.col("quantity").unique()).sort("level")
    parts = [
        f"{_HOW.get(level, level)} ({', '.join(name for name in _PANELS if name in quantities)})"
        for level, quantities in named.iter_rows()
    ]
    coarse = int(rows["resolution_ns"].max() or 0)  # type: ignore[arg-type]
    told = f", instants to {numbers.short(coarse / 1e6)}" if coarse >= 10_000_000 else ""
    return " and ".join(parts).replace("kv_usage", "KV cache") + told


def _left_out(rows: pl.DataFrame) -> str:
    workers, shown = int(rows["workers"].max() or 0), rows["worker"].n_unique()  # type: ignore[arg-type]
    return f"; the {shown} busiest of {workers:,} workers" if workers > shown else ""


def _moves(rows: pl.DataFrame, name: str) -> bool:
    mine = rows.filter(pl.col("quantity") == name)
    return mine.height > 1 and mine["low"].min() != mine["high"].max()


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(
        pl.col("quantity").is_in(list(_PANELS)), pl.col("mean").is_null() | pl.col("mean").is_finite(),
        pl.col("label").is_not_null(), pl.col("start_ns").is_not_null(),
    )  # fmt: skip
