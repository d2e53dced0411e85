"""Goodput under other limits: how many requests would have met other limits on first token and pace?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "goodput_surface"
ORDER = 90
LEVEL = "C"  # latencies of requests; no capacity is in it

_CELL = 44


def chart(rows: pl.DataFrame) -> Any:
    """A table of attainment by limit on the first token and on the time per token; the limits given are framed."""
    rows = _known(rows)
    if rows.is_empty():
        return _theme.empty("no limits were given (--slo)")
    classes = rows.sort("position")["class"].unique(maintain_order=True).to_list()
    tables = [_table(rows.filter(pl.col("class") == name), name, len(classes) > 1) for name in classes]  # fmt: skip
    return tables[0] if len(tables) == 1 else alt.vconcat(*tables, spacing=24)


def _table(rows: pl.DataFrame, name: str, titled: bool) -> Any:
    named = rows.with_columns(
        ttft=_limit("ttft_limit_ms"), tpot=_limit("tpot_limit_ms"),
        text=pl.col("attainment").map_elements(numbers.share, return_dtype=pl.String),
    )  # fmt: skip
    down, across = (_order(rows, column) for column in ("ttft_limit_ms", "tpot_limit_ms"))
    base = alt.Chart(named).encode(
        y=alt.Y("ttft:N", sort=down, title="limit on the first token"),
        x=alt.X("tpot:N", sort=across, title="limit on the time per output token", axis=alt.Axis(labelAngle=0)),
        tooltip=[
            alt.Tooltip("ttft:N", title="first token"), alt.Tooltip("tpot:N", title="per token"),
            _theme.tip("attainment", "attainment", ".1%"), _theme.tip("low", "95 % interval from", ".1%"), _theme.tip("high", "to", ".1%"),
            _theme.tip("good", "good requests", _theme.COUNT), _theme.tip("unknown", "unknown", _theme.COUNT), _theme.tip("good_per_s", "good requests per second"),
        ],
    )  # fmt: skip
    heat = base.mark_rect().encode(
        color=alt.Color("attainment:Q", scale=alt.Scale(domain=[0, 1], range=["#f3ead7", "#7fb7d6", "#1f5f99"]), legend=alt.Legend(title="attainment", format="%")),
    )  # fmt: skip
    frame = base.transform_filter("datum.given").mark_rect(fill=None, stroke=_theme.PREFILL, strokeWidth=3)  # fmt: skip
    text = base.mark_text(fontSize=13).encode(
        text="text:N", color=alt.condition("datum.attainment > 0.6", alt.value("#ffffff"), alt.value("#1f2328"))
    )  # fmt: skip
    more = {"title": f"class {name}"} if titled else {}
    return (heat + frame + text).properties(width=_theme.WIDTH, height=_CELL * max(len(down), 1), **more)  # fmt: skip


def _limit(column: str) -> pl.Expr:
    return pl.col(column).map_elements(_words, return_dtype=pl.String, skip_nulls=False)


def _words(limit: float | None) -> str:
    return "any" if limit is None else f"≤ {numbers.duration(limit)}"


def _order(rows: pl.DataFrame, column: str) -> list[str]:
    """The limits from tight to loose."""
    return [_words(value) for value in rows[column].unique().sort(nulls_last=True)]


def sentence(rows: pl.DataFrame) -> str | None:
    """What the limits given attain, and which single one would help most if it were doubled."""
    rows = _known(rows)
    if rows.is_empty():
        return None
    classes = rows.sort("position")["class"].unique(maintain_order=True).to_list()
    parts = [_of_class(rows.filter(pl.col("class") == name), name, len(classes) > 1) for name in classes]  # fmt: skip
    return "; ".join(parts) + ". At this load only; what another load would attain is not in it."


def _of_class(rows: pl.DataFrame, name: str, named: bool) -> str:
    given = rows.filter("given")
    if given.is_empty():
        return f"class {name}: the limits given are not in the grid"
    row = given.row(0, named=True)
    limits = " and ".join(
        f"{what} {_words(row[column])}"
        for what, column in (("TTFT", "ttft_limit_ms"), ("TPOT", "tpot_limit_ms"))
        if row[column] is not None
    )
    rate = f", {row['good_per_s']:.3g} good requests a second" if row["good_per_s"] is not None else ""  # fmt: skip
    before = f"class {name}: " if named else ""
    least = "at least " if row["unknown"] else ""
    return f"{before}{least}{numbers.share(row['attainment'])} of {numbers.plural(row['arrivals'] or 0, 'request')} meet {limits or 'the limits'}{_open(row)}{rate}{_eased(rows, row)}"


def _open(row: dict[str, Any]) -> str:
    """Requests that may have met the limits or not: they count as missed."""
    return f", of {row['unknown']:,} it is unknown" if row["unknown"] else ""


def _eased(rows: pl.DataFrame, row: dict[str, Any]) -> str:
    """What each limit alone holds back: attainment without it."""
    parts = []
    for what, mine, other in (("TTFT", "ttft_limit_ms", "tpot_limit_ms"), ("TPOT", "tpot_limit_ms", "ttft_limit_ms")):  # fmt: skip
        found = rows.filter(pl.col(mine).is_null(), pl.col(other).eq_missing(pl.lit(row[other], dtype=pl.Float64)))  # fmt: skip
        if row[mine] is not None and row[other] is not None and found.height:
            parts.append(f"{numbers.share(found['attainment'][0])} without the {what} limit")
    return f" ({', '.join(parts)})" if parts else ""


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("attainment").is_finite(), pl.col("class").is_not_null(), pl.col("given").is_not_null())  # fmt: skip
