"""Where latency lives: which phase holds the time of a request?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "phase_shares"
ORDER = 10

_NAMES = {"first_token": "time to first token", "whole": "whole request"}
_LABELLED = 0.07  # a part smaller than this has no room for its number


def chart(rows: pl.DataFrame) -> Any:
    """The parts of the time to first token and of the whole request, as two bars of 100 %."""
    rows = _known(rows)
    if rows.is_empty():
        return _theme.empty("no request was cut into phases")
    named = rows.with_columns(
        _theme.phase_place().alias("place"),
        pl.struct("window", "window_mean_ms")
        .map_elements(_label, return_dtype=pl.String)
        .alias("bar"),
    )
    order = [_label(row) for row in _windows(rows)]
    base = alt.Chart(named).encode(
        y=alt.Y(
            "bar:N", title=None, sort=order, axis=alt.Axis(labelExpr="split(datum.label, '|')")
        ),
        order=alt.Order("place:Q"),
        tooltip=[
            alt.Tooltip("phase:N"),
            _theme.tip("share", "share", form=".1%"),
            _theme.tip("mean_ms", "mean per request (ms)"),
            _theme.tip("requests", "requests with it", form=_theme.COUNT),
            alt.Tooltip("basis:N", title="how known"),
        ],
    )
    share = alt.X(
        "share:Q",
        stack="zero",
        title="share of the summed time (%)",
        axis=alt.Axis(format="%", tickCount=5),
        scale=alt.Scale(domain=[0, 1], nice=False),
    )
    bars = base.mark_bar(stroke="white", strokeWidth=0.6).encode(
        x=share, color=_theme.phase_colour(rows)
    )
    numbers_in = base.mark_text(color="#111", fontWeight="bold").encode(
        x=alt.X("share:Q", stack="zero", bandPosition=0.5),
        # Small parts stay in the stack without a number: left out they would move the others' numbers.
        text=alt.condition(
            f"datum.share >= {_LABELLED}", alt.Text("share:Q", format=".0%"), alt.value("")
        ),
        detail="phase:N",
    )
    return (bars + numbers_in).properties(width=_theme.WIDTH, height=64 * len(order))


def sentence(rows: pl.DataFrame) -> str | None:
    """Which phase holds most of each window."""
    parts = [_part(rows, row) for row in _windows(rows)]
    return "; ".join(parts) + "." if parts else None


def _part(rows: pl.DataFrame, window: dict[str, Any]) -> str:
    inside = rows.filter(pl.col("window") == window["window"]).sort("share", descending=True)
    first, *others = inside.head(2).to_dicts()
    more = f", then {others[0]['phase']} ({_amount(others[0])})" if others else ""
    return (
        f"of the {_NAMES[window['window']]} (mean {numbers.duration(window['window_mean_ms'])}) "
        f"{first['phase']} holds {_amount(first)}{more}"
    )


def _amount(row: dict[str, Any]) -> str:
    bound = "up to " if row["basis"] == "upper_bound" else ""
    return bound + numbers.share(row["share"])


def _windows(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """The windows that are there, the first token first."""
    found = _known(rows).group_by("window").agg(pl.col("window_mean_ms").first()).to_dicts()
    return sorted(found, key=lambda row: list(_NAMES).index(row["window"]))


def _label(row: dict[str, Any]) -> str:
    return f"{_NAMES[row['window']]}|mean {numbers.duration(row['window_mean_ms'])}"


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("window").is_in(list(_NAMES)), pl.col("phase").is_not_null())
