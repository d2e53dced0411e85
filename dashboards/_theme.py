"""How pictures look: the colours of the phases, light and dark, sizes, axes of time, formats of numbers."""

from __future__ import annotations

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
CLOCK = "%H:%M:%S"  # shown in the reader's zone, or UTC where asked
INSTANT = "%Y-%m-%d %H:%M:%S.%L"
# A label of milliseconds in the unit that people say.
DURATION_LABEL = (
    "datum.value >= 60000 ? format(datum.value / 60000, ',~r') + ' min' : "
    "datum.value >= 1000 ? format(datum.value / 1000, ',~r') + ' s' : format(datum.value, ',~r') + ' ms'"
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
        "titleFontWeight": "normal", "labelLimit": 160, "symbolStrokeWidth": 2,
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


def time_axis(column: str, title: str | None = "time", **more: Any) -> alt.X:
    """An axis of instants (`x_time` of `timed`), in the reader's zone."""
    return alt.X(f"{column}:T", title=title, axis=alt.Axis(format=CLOCK, tickCount=6), **more)


def duration_axis(**more: Any) -> alt.Axis:
    """An axis of milliseconds that says seconds and minutes where these are shorter."""
    return alt.Axis(labelExpr=DURATION_LABEL, **more)


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
