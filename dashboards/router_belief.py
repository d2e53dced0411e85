"""Router belief and engine truth: was as much of each prompt cached as the router took for granted?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "belief_points"
ORDER = 81

_KINDS = {"as believed": _theme.QUIET, "fewer found": _theme.LOST, "more found": _theme.DECODE}


def chart(rows: pl.DataFrame) -> Any:
    """One point for equal choices: believed against found; on the line the router was right."""
    rows = _known(rows)
    if rows.is_empty() or not _any(rows):
        return _theme.empty("no router choice with belief and truth")
    kinds = [kind for kind in _KINDS if kind in set(rows["kind"])]
    top = max(int(rows[c].max() or 0) for c in ("believed_tokens", "cached_tokens"))  # type: ignore[arg-type]
    scale = alt.Scale(domain=[0, max(top, 1)])
    points = (
        alt.Chart(rows)
        .mark_point(opacity=0.65)
        .encode(
            x=alt.X("believed_tokens:Q", title="prompt tokens that the router took for cached", scale=scale, axis=alt.Axis(tickCount=6)),
            y=alt.Y("cached_tokens:Q", title="tokens found cached", scale=scale, axis=alt.Axis(tickCount=6)),
            size=alt.Size("choices:Q", legend=None, scale=alt.Scale(rangeMin=24, rangeMax=500)),
            color=alt.Color("kind:N", scale=alt.Scale(domain=kinds, range=[_KINDS[k] for k in kinds]), legend=alt.Legend(title=None)),
            tooltip=[
                _theme.tip("believed_tokens", "believed (tokens)", _theme.COUNT), _theme.tip("cached_tokens", "found (tokens)", _theme.COUNT),
                _theme.tip("choices", "choices", _theme.COUNT), alt.Tooltip("cached_basis:N", title="who says what was found"),
            ],
        )
    )  # fmt: skip
    line = alt.Chart(pl.DataFrame({"believed_tokens": [0, max(top, 1)], "cached_tokens": [0, max(top, 1)]})).mark_line(strokeDash=[4, 3], strokeWidth=1, color=_theme.QUIET).encode(x="believed_tokens:Q", y="cached_tokens:Q")  # fmt: skip
    return (line + points).properties(width=_theme.WIDTH, height=_theme.HEIGHT)


def sentence(rows: pl.DataFrame) -> str | None:
    """Tokens believed and found, and how often fewer were there."""
    rows = _known(rows)
    if rows.is_empty():
        return None
    total = int(rows["total"].max() or 0)  # type: ignore[arg-type]
    if not _any(rows):
        return f"in all {numbers.plural(total, 'choice')} the router took nothing for cached, and nothing was."
    first = rows.row(0, named=True)
    shown = int(rows["choices"].sum())
    said = (
        f"the router took {numbers.count(first['believed_sum_tokens'])} prompt tokens for cached, {numbers.count(first['cached_sum_tokens'])} were; "
        f"fewer than believed in {numbers.share((first['fewer'] or 0) / total if total else None)} of {numbers.plural(total, 'choice')}"
    )
    answers = rows["cached_basis"].eq_missing("answer")
    part = "" if answers.all() else " in part"
    doubt = f"; what was found is told{part} by the answers, which may repeat the router's own estimate" if answers.any() else ""  # fmt: skip
    sampled = f"; {shown:,} choices shown" if shown < total else ""
    return f"{said}{doubt}{sampled}."


def _any(rows: pl.DataFrame) -> bool:
    return bool((rows["believed_tokens"] != 0).any() or (rows["cached_tokens"] != 0).any())


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("kind").is_in(list(_KINDS)), pl.col("believed_tokens").is_not_null(), pl.col("cached_tokens").is_not_null(), pl.col("choices") > 0)  # fmt: skip
