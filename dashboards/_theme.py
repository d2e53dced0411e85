"""How pictures look: the colours of the phases, light and dark, sizes, axes of time, formats of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import altair as alt
import polars as pl

from pdtrace.model import PHASES

Mode = Literal["light", "dark", "page"]

# One colour a phase, everywhere. Apart from each other for people with protanopia, deuteranopia and
# tritanopia too, and visible on white and on the dark background (tests/test_theme.py measures it).
PHASE_COLOURS: dict[str, str] = {
    "network": "#56636f",
    "frontend": "#bfc7b7",
    "router": "#ad489e",
    "queue": "#d8c772",
    "kv_load": "#1d8466",
    "prefill": "#e07b39",
    "kv_wait": "#c8a3ec",
    "kv_transfer": "#8044af",
    "decode_queue": "#a0cee1",
    "decode": "#2b8ee1",
    "stream_out": "#42b071",
    "retry": "#c42f4a",
    "unattributed": "#969696",
}
PREFILL, DECODE = PHASE_COLOURS["prefill"], PHASE_COLOURS["decode"]
LOST = PHASE_COLOURS["retry"]  # time lost, limits missed, failures
INK = "currentColor"  # of the text around; black where there is none
QUIET = PHASE_COLOURS["unattributed"]  # what is ordinary, unknown or beside the point
# Things without a colour of their own (workers, sessions, runs), in this order.
SERIES: tuple[str, ...] = tuple(
    PHASE_COLOURS[name]
    for name in ("decode", "prefill", "kv_load", "router", "queue", "kv_transfer", "stream_out", "network")
)  # fmt: skip
LOW_TO_HIGH: tuple[str, ...] = (
    "#fde8c8",
    "#f4a259",
    "#d1495b",
    "#5b1647",
)  # of an amount; dark is much

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
WIDTH: Any = "container"  # the reporter puts the width that there is
HEIGHT, ROW = 260, 26  # a picture; a row of bars in it
MOST_ROWS = 5000  # of a chart: what has more is summed or sampled by its query

# Formats of axes and tooltips (d3). Text goes through pdtrace.numbers.
COUNT, SHARE, DECIMAL = ",.0f", ".0%", ",.3~f"
CLOCK_MS = "%H:%M:%S.%L"
CLOCK = "%H:%M:%S"  # shown in the reader's zone, or UTC where asked
INSTANT = "%Y-%m-%d %H:%M:%S.%L"
# A label of milliseconds in the unit that people say.
DURATION_LABEL = (
    "datum.value >= 60000 ? format(datum.value / 60000, ',~r') + ' min' : "
    "datum.value >= 1000 ? format(datum.value / 1000, ',~r') + ' s' : format(datum.value, ',~r') + ' ms'"
)

# Bytes, powers of ten as pdtrace.numbers writes them.
BYTES_LABEL = (
    "datum.value >= 1e9 ? format(datum.value / 1e9, ',~r') + ' GB' : "
    "datum.value >= 1e6 ? format(datum.value / 1e6, ',~r') + ' MB' : "
    "datum.value >= 1e3 ? format(datum.value / 1e3, ',~r') + ' kB' : format(datum.value, ',~r') + ' B'"
)

_INK = {"light": "#1f2328", "dark": "#e6e8eb", "page": "currentColor"}
_BACKGROUND = {"light": "#ffffff", "dark": "#14171c", "page": "transparent"}
_GRID_OPACITY = 0.13


def config(mode: Mode) -> dict[str, Any]:
    """The Vega-Lite configuration: light, dark, or in the colour of the page's own text (SVG only)."""
    ink = _INK[mode]
    axis = {
        "labelColor": ink, "titleColor": ink, "domainColor": ink, "tickColor": ink, "gridColor": ink,
        "gridOpacity": _GRID_OPACITY, "domainOpacity": 0.4, "tickOpacity": 0.4, "labelFontSize": 11,
        "titleFontSize": 12, "titleFontWeight": "normal", "labelLimit": 150, "titlePadding": 8,
        "labelOverlap": True,
    }  # fmt: skip
    legend = {
        "labelColor": ink, "titleColor": ink, "orient": "top", "labelFontSize": 11, "titleFontSize": 11,
        "titleFontWeight": "normal", "labelLimit": 260, "symbolStrokeWidth": 2,
    }  # fmt: skip
    return {
        "background": _BACKGROUND[mode],
        "font": FONT,
        "view": {"stroke": None},
        "axis": axis,
        "legend": legend,
        "header": {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12},
        "title": {"color": ink, "fontSize": 13, "anchor": "start"},
        "text": {"color": ink, "fontSize": 11},
        "rule": {"color": ink},
        "point": {"filled": True, "size": 34},
        "range": {"category": list(SERIES)},
    }


def phase_scale(phases: Sequence[str]) -> alt.Scale:
    """The colours of those phases that are there, in the order in which a request meets them."""
    there = [phase for phase in PHASES if phase in set(phases)]
    return alt.Scale(domain=there, range=[PHASE_COLOURS[phase] for phase in there])


def phase_colour(rows: pl.DataFrame, column: str = "phase", **legend: Any) -> alt.Color:
    """Colour by phase, with a legend of the phases that occur."""
    return alt.Color(
        f"{column}:N",
        scale=phase_scale(rows[column].drop_nulls().unique().to_list()),
        legend=alt.Legend(title=None, **legend),
    )


def phase_place(column: str = "phase") -> pl.Expr:
    """The place of a phase in a request, to stack bars in the order of time."""
    places = {phase: place for place, phase in enumerate(PHASES)}
    return pl.col(column).replace_strict(places, default=len(PHASES), return_dtype=pl.Int64)


def timed(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows with every instant `x_ns` also as `x_time`, which axes of time draw."""
    instants = [
        name for name, kind in rows.schema.items() if name.endswith("_ns") and kind.is_integer()
    ]
    return rows.with_columns(
        pl.col(name).cast(pl.Datetime("ns", "UTC")).alias(name.removesuffix("_ns") + "_time")
        for name in instants
    )


def time_axis(column: str, title: str | None = "time", form: str = CLOCK, **more: Any) -> alt.X:
    """An axis of instants (`x_time` of `timed`), in the reader's zone."""
    return alt.X(f"{column}:T", title=title, axis=alt.Axis(format=form, tickCount=5), **more)


def duration_axis(ticks: list[float] | None = None, **more: Any) -> alt.Axis:
    """An axis of milliseconds that says seconds and minutes where these are shorter."""
    given = {"tickCount": 6} if ticks is None else {"values": ticks}
    return alt.Axis(labelExpr=DURATION_LABEL, **{**given, **more})


def count_axis(ticks: list[float] | None = None) -> alt.Axis:
    """An axis of counts."""
    return (
        alt.Axis(format=COUNT, tickCount=6)
        if ticks is None
        else alt.Axis(format=COUNT, values=ticks)
    )


def total(rows: pl.DataFrame, column: str) -> float:
    """The sum of a column."""
    return float(rows.select(pl.col(column).cast(pl.Float64).sum()).item())


def ends(rows: pl.DataFrame, low: str, high: str) -> list[float]:
    """The smallest of one column and the largest of another: the domain of an axis."""
    found = rows.select(
        pl.col(low).cast(pl.Float64).min().alias("low"),
        pl.col(high).cast(pl.Float64).max().alias("high"),
    )
    return [float(value) for value in found.row(0)]


def decades(low: float, high: float) -> list[float]:
    """1 and 3 of every power of ten between, for the ticks of a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1.0, 3.0) if len(powers) < 6 else (1.0,)
    return [
        step * 10.0**power
        for power in powers
        for step in steps
        if low <= step * 10.0**power <= high
    ]


def amount(
    rows: pl.DataFrame, column: str, wide: float = 30
) -> tuple[alt.Scale, list[float] | None]:
    """Scale and ticks of positive amounts: logarithmic where the largest is `wide` times the smallest."""
    low, high = rows.select(
        pl.col(column).min().alias("low"), pl.col(column).max().alias("high")
    ).row(0)
    if low is None or low <= 0 or high <= wide * low:
        return alt.Scale(zero=True, nice=True), None
    low, high = low * 0.8, high * 1.25
    return alt.Scale(type="log", domain=[low, high], nice=False), decades(low, high)


def bytes_axis(*, rate: bool = False, **more: Any) -> alt.Axis:
    """An axis of bytes, or of bytes per second, that says kB, MB and GB."""
    return alt.Axis(labelExpr=f"({BYTES_LABEL})" + (" + '/s'" if rate else ""), **more)


def instant(column: str, title: str) -> alt.Tooltip:
    """An instant in a tooltip, to the millisecond."""
    return alt.Tooltip(f"{column}:T", title=title, format=INSTANT)


def tip(column: str, title: str, form: str = DECIMAL) -> alt.Tooltip:
    """A number in a tooltip; its title names the unit."""
    return alt.Tooltip(f"{column}:Q", title=title, format=form)


def empty(text: str = "no data") -> Any:
    """What is drawn where there is nothing to draw."""
    return (
        alt.Chart(pl.DataFrame({"text": [text]}))
        .mark_text(opacity=0.6)
        .encode(text="text:N")
        .properties(width=WIDTH, height=60)
    )
