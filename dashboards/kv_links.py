"""Bandwidth of KV links: what did each link give while it was busy, and what could it?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "link_bandwidth"
ORDER = 71
LEVEL = "B"


def chart(rows: pl.DataFrame) -> Any:
    """One bar a link: bytes over busy time; the mark is the fitted bandwidth with its interval."""
    rows = _known(rows)
    if rows.is_empty():
        return _theme.empty("no link with a known bandwidth")
    order = rows["link"].to_list()
    base = alt.Chart(rows).encode(
        y=alt.Y("link:N", title=None, sort=order, axis=alt.Axis(labelLimit=260)),
        tooltip=[
            alt.Tooltip("link:N"), _theme.tip("transfers", "movements", _theme.COUNT),
            _theme.tip("bytes", "bytes", _theme.COUNT), alt.Tooltip("bytes_basis:N", title="bytes known by"),
            _theme.tip("busy_s", "busy (s)"), _theme.tip("gave_bytes_per_second", "gave while busy (B/s)", ".3~s"),
            _theme.tip("median_bytes_per_second", "one movement, median (B/s)", ".3~s"),
            _theme.tip("fitted_bytes_per_second", "fitted (B/s)", ".3~s"), _theme.tip("most_at_once", "most at once", _theme.COUNT),
        ],
    )  # fmt: skip
    title = "bytes a second: bar while busy, tick one movement, diamond fitted, with 95 % interval"
    axis = _theme.bytes_axis(rate=True, tickCount=6)
    bars = base.mark_bar(color=_theme.PHASE_COLOURS["kv_transfer"], height={"band": 0.55}).encode(
        x=alt.X("gave_bytes_per_second:Q", title=title, axis=axis)
    )
    ticks = base.mark_tick(color=_theme.QUIET, thickness=3).encode(x="median_bytes_per_second:Q")
    fitted = base.transform_filter("isValid(datum.fitted_bytes_per_second)")
    spans = fitted.mark_rule(strokeWidth=2, color=_theme.PREFILL).encode(x="fitted_low:Q", x2="fitted_high:Q")  # fmt: skip
    points = fitted.mark_point(shape="diamond", size=70, color=_theme.PREFILL).encode(x="fitted_bytes_per_second:Q")  # fmt: skip
    return (bars + ticks + spans + points).properties(width=_theme.WIDTH, height=_theme.ROW * max(rows.height, 2))  # fmt: skip


def sentence(rows: pl.DataFrame) -> str | None:
    """The slowest and the fastest link."""
    rows = _known(rows)
    if rows.is_empty():
        return None
    rate = pl.coalesce("gave_bytes_per_second", "median_bytes_per_second")
    found = rows.sort(rate, "link")
    low, high = found.row(0, named=True), found.row(-1, named=True)
    text = f"the link {low['link']} gave {_gave(low)}"
    if rows.height > 1:
        text = f"from {_gave(low)} ({low['link']}) to {_gave(high)} ({high['link']})"
    links = int(rows["links"].max() or 0)  # type: ignore[arg-type]
    more = f"; the {rows.height} that carried most of {links:,} links" if links > rows.height else ""  # fmt: skip
    return f"{text}{_fitted(rows)}{_shared(rows)}{_basis(rows)}{more}."


def _gave(row: dict[str, Any]) -> str:
    """What a link gave; of one movement where the whole is not known."""
    if row["gave_bytes_per_second"] is not None:
        return f"{numbers.rate(row['gave_bytes_per_second'])} while busy"
    return f"{numbers.rate(row['median_bytes_per_second'])} to one movement"


def _fitted(rows: pl.DataFrame) -> str:
    """What the links could give to large movements, as fitted."""
    rates = rows["fitted_bytes_per_second"].drop_nulls()
    if rates.is_empty():
        return "; too few, or too alike, for a fit of what it could"
    low, high = numbers.rate(rates.min()), numbers.rate(rates.max())  # type: ignore[arg-type]
    return (
        f"; as fitted, large movements alone would get {low if low == high else f'{low} to {high}'}"
    )


def _shared(rows: pl.DataFrame) -> str:
    """Whether movements take longer beside others; as sure as the interval of the fit."""
    told = rows.filter(
        pl.all_horizontal(pl.col("contention_ratio", "contention_low_ratio", "contention_high_ratio").is_not_null())
    ).sort("contention_ratio", "link")  # fmt: skip
    if told.is_empty():
        return ""
    sure = told.filter(pl.col("contention_low_ratio") > 0)
    if sure.height:
        row = sure.row(-1, named=True)
        return f"; each other movement under way adds {numbers.share(row['contention_ratio'])} to the time of one ({row['link']})"
    high = max(0.0, *told["contention_high_ratio"].to_list())
    return f"; movements at the same time do not surely slow each other (each adds at most {numbers.share(high)})"


def _basis(rows: pl.DataFrame) -> str:
    """That bytes were not measured."""
    bases = set(rows["bytes_basis"].drop_nulls()) - {"measured"}
    return "; bytes from prompt lengths and the KV size of a token, not measured" if bases else ""


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("link").is_not_null(), pl.col("median_bytes_per_second").is_finite())
