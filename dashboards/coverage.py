"""What the data hold: which information is there, for how many, and what does its lack hide?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "coverage_items"
ORDER = 120
LEVEL = "D"

_THERE, _PART, _MISSING = "there", "in part", "missing"


def chart(rows: pl.DataFrame) -> Any:
    """One bar an item: for which part of the requests (workers, clocks) it is there."""
    rows = _known(rows)
    if rows.is_empty():
        return _theme.empty("nothing was counted")
    named = rows.with_columns(
        name=pl.col("item").str.replace_all("_", " "), state=_state(),
        note=pl.format("{} of {} {}", "present", "expected", pl.col("unit").fill_null("")),
    )  # fmt: skip
    states = {_THERE: _theme.PHASE_COLOURS["stream_out"], _PART: _theme.PHASE_COLOURS["queue"], _MISSING: _theme.LOST}  # fmt: skip
    colour = alt.Color("state:N", scale=alt.Scale(domain=list(states), range=list(states.values())), legend=alt.Legend(title=None))  # fmt: skip
    base = alt.Chart(named).encode(
        y=alt.Y("name:N", title=None, sort=named["name"].to_list()),
        tooltip=[alt.Tooltip("name:N", title="item"), alt.Tooltip("note:N", title="there for"), alt.Tooltip("evidence:N", title="looked for in"), alt.Tooltip("enables:N", title="lets one see")],
    )  # fmt: skip
    bars = base.mark_bar(height={"band": 0.7}).encode(
        x=alt.X("present_ratio:Q", title="there for (%)", axis=alt.Axis(format="%", tickCount=5), scale=alt.Scale(domain=[0, 1])), color=colour
    )  # fmt: skip
    missing = base.transform_filter(f"datum.state == '{_MISSING}'").mark_text(align="left", dx=4).encode(x=alt.value(0), text=alt.value("missing"), color=colour)  # fmt: skip
    return (bars + missing).properties(width=_theme.WIDTH, height=18 * rows.height)


def sentence(rows: pl.DataFrame) -> str | None:
    """How many items are there, and which are missing."""
    rows = _known(rows)
    if rows.is_empty():
        return None
    states = rows.select(pl.col("item"), _state().alias("state"))
    missing = states.filter(pl.col("state") == _MISSING)["item"].to_list()
    part = states.filter(pl.col("state") == _PART)["item"].to_list()
    whole = rows.height - len(missing) - len(part)
    lists = [
        f"{word}: {', '.join(name.replace('_', ' ') for name in names)}"
        for word, names in (("in part", part), ("missing", missing))
        if names
    ]
    said = f"{whole} of {numbers.plural(rows.height, 'item')} that such a run can have are there for all"
    return "; ".join([said, *lists]) + ". `pdtrace coverage` names the switch that adds each."


def _state() -> pl.Expr:
    return (
        pl.when(pl.col("present_ratio") <= 0).then(pl.lit(_MISSING))
        .when(pl.col("present_ratio") >= 1).then(pl.lit(_THERE))
        .otherwise(pl.lit(_PART))
    )  # fmt: skip


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    """Items that such a deployment can have and that were counted."""
    return rows.filter(
        pl.col("item").is_not_null(), pl.col("applies").fill_null(value=True), pl.col("present_ratio").is_finite()
    )  # fmt: skip
