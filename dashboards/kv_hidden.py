"""KV transfer, hidden or waited for: how much KV transfer did requests wait for, and how much went on behind their prefill?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "transfer_exposure"
ORDER = 72

_PARTS = {"exposed": "waited for (exposed)", "hidden": "hidden behind prefill"}
_COLOURS = [_theme.PHASE_COLOURS["kv_transfer"], _theme.QUIET]


def chart(rows: pl.DataFrame) -> Any:
    """Mean time per request, in fifths by prompt length: what was waited for and what was hidden."""
    rows = _known(rows)
    if rows.is_empty():
        return _theme.empty("no KV movement with start and end")
    named = rows.with_columns(kind=pl.col("part").replace_strict(_PARTS, default=None)).sort("place", "part")  # fmt: skip
    order = named.sort("place")["prompts"].unique(maintain_order=True).to_list()
    parts = [text for part, text in _PARTS.items() if part in set(rows["part"])]
    return (
        alt.Chart(named)
        .mark_bar()
        .encode(
            y=alt.Y("prompts:N", title="prompt length", sort=order),
            x=alt.X("mean_ms:Q", stack="zero", title="mean time per request (ms)", axis=_theme.duration_axis(tickCount=6)),
            color=alt.Color("kind:N", scale=alt.Scale(domain=parts, range=_COLOURS[-len(parts):] if parts == [_PARTS["hidden"]] else _COLOURS[: len(parts)]), legend=alt.Legend(title=None)),
            order=alt.Order("part:N"),
            tooltip=[
                alt.Tooltip("prompts:N"), alt.Tooltip("kind:N", title="what"), _theme.tip("mean_ms", "mean (ms)"), _theme.tip("total_s", "sum (s)"),
                _theme.tip("bound_s", "of it an upper bound (s)"),
                _theme.tip("known", "requests of which it is known", _theme.COUNT), _theme.tip("requests", "requests", _theme.COUNT),
            ],
        )
        .properties(width=_theme.WIDTH, height=_theme.ROW * max(len(order), 2))
    )  # fmt: skip


def sentence(rows: pl.DataFrame) -> str | None:
    """Seconds waited for and hidden, and of how many requests."""
    every, rows = rows, _known(rows)
    if rows.is_empty():
        return None
    sums = {part: rows.filter(pl.col("part") == part) for part in _PARTS}
    # also those of lengths at which it is known of nobody
    of = {part: int(every.filter(pl.col("part") == part)["requests"].sum()) for part in _PARTS}
    parts = [_said(part, mine, of[part]) for part, mine in sums.items() if mine.height]
    if sums["hidden"].is_empty():
        parts.append("how much was hidden is unknown: prefill is known as wall time only")
    return "; ".join(parts) + "."


def _said(part: str, mine: pl.DataFrame, of: int) -> str:
    known = int(mine["known"].sum())
    total = float(mine["total_s"].sum())
    mean = numbers.duration(1000 * total / known) if known else numbers.UNKNOWN
    which = f" of {numbers.plural(of, 'request')}" if known == of else f" of {known:,} of {of:,} requests of which it is known"  # fmt: skip
    bound = float(mine["bound_s"].sum())
    most = (
        f" (at most: {numbers.seconds(bound)} of it lie inside prefills known as wall time only)"
        if bound
        else ""
    )
    return f"{_PARTS[part]}: {numbers.seconds(total)}{which}, {mean} each{most}"


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("part").is_in(list(_PARTS)), pl.col("mean_ms").is_finite(), pl.col("known") > 0,
                       pl.col("prompts").is_not_null(), pl.col("total_s").is_finite())  # fmt: skip
