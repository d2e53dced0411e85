"""Load spread: did each worker get its even share of requests, tokens and work?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from . import _theme

QUERY = "worker_shares"
ORDER = 80

_MEASURES = {"requests": "requests", "tokens": "tokens to work on", "seconds": "seconds of work"}
_SIDES = ("prefill", "decode")
_EVEN = 1.05  # times the even share: nobody feels less


def chart(rows: pl.DataFrame) -> Any:
    """One panel a measure, one bar a worker; the line is the even share."""
    rows = _known(rows)
    if rows.is_empty():
        return _theme.empty("fewer than two workers, or nobody says which worker served")
    parts = [
        (part, side, measure)
        for side in _SIDES
        for measure in _MEASURES
        if (part := rows.filter(pl.col("side") == side, pl.col("measure") == measure)).height
    ]
    panels = [_panel(*part, last=part is parts[-1]) for part in parts]
    return alt.vconcat(*panels, spacing=8).resolve_scale(x="shared")


def _panel(rows: pl.DataFrame, side: str, measure: str, *, last: bool) -> Any:
    colour = _theme.PHASE_COLOURS[side]
    base = alt.Chart(rows).encode(
        y=alt.Y("label:N", title=None),
        tooltip=[
            alt.Tooltip("label:N", title="worker"), _theme.tip("share_ratio", "share", ".1%"), _theme.tip("even_ratio", "even share", ".1%"),
            _theme.tip("amount", measure),
        ],
    )  # fmt: skip
    bars = base.mark_bar(color=colour, height={"band": 0.7}).encode(
        x=alt.X(
            "share_ratio:Q", title="share (%); dashed: the even share" if last else None,
            axis=alt.Axis(format="%", tickCount=5, labels=last, ticks=last), scale=alt.Scale(zero=True),
        )
    )  # fmt: skip
    even = alt.Chart(rows.head(1)).mark_rule(strokeDash=[4, 3], strokeWidth=1.5).encode(x="even_ratio:Q")  # fmt: skip
    title = f"{'all work' if rows['unsplit'][0] else side}: {_MEASURES[measure]}"
    return (bars + even).properties(width=_theme.WIDTH, height=max(18 * rows.height, 36), title=title)  # fmt: skip


def sentence(rows: pl.DataFrame) -> str | None:
    """Who got how many times the even share, by measure; or that chance alone may give as much."""
    rows = _known(rows)
    parts = []
    for side in _SIDES:
        mine = rows.filter(pl.col("side") == side, pl.col("over_mean").is_finite())
        if mine.height:
            parts.append(("" if mine["unsplit"][0] else f"{side}: ") + _side(mine))
    return "; ".join(parts) + "." if parts else None


def _side(rows: pl.DataFrame) -> str:
    """The greatest worker of each measure; measures that chance explains are one remark."""
    tops = [
        part.sort("share_ratio", "label", descending=[True, False]).row(0, named=True)
        for name in _MEASURES
        if (part := rows.filter(pl.col("measure") == name)).height
    ]
    uneven = [
        row for row in tops if row["over_mean_low"] is not None and row["over_mean_low"] > _EVEN
    ]
    even = [row for row in tops if row not in uneven]
    said = []
    for label in dict.fromkeys(row["label"] for row in uneven):
        amounts = [
            f"{row['over_mean']:.2f} of {_MEASURES[row['measure']]}"
            for row in uneven
            if row["label"] == label
        ]
        said.append(f"the worker {label} got so many times its even share: {', '.join(amounts)}")
    if even:
        most = max(row["over_mean"] for row in even)
        names = ", ".join(_MEASURES[row["measure"]] for row in even)
        said.append(
            f"{names} no more uneven than chance may make them (at most {most:.2f} times the even share)"
        )
    return "; ".join(said)


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(
        pl.col("side").is_in(_SIDES), pl.col("measure").is_in(list(_MEASURES)), pl.col("share_ratio").is_finite(), pl.col("label").is_not_null()
    )  # fmt: skip
