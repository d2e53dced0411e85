"""KV movements by size: how long does a movement of so many bytes take, and which link is slow?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "transfer_points"
ORDER = 70

_WIDE = 50  # times the least
_MOST_LINKS = len(_theme.SERIES)


def chart(rows: pl.DataFrame) -> Any:
    """One point a movement, one colour a link; the line is what the fit of the link says."""
    rows = _known(rows)
    if rows.is_empty():
        return _theme.empty("no KV movement with size and time")
    links = rows["link"].value_counts(sort=True)["link"].to_list()
    named = _theme.timed(rows).with_columns(
        link=pl.when(pl.col("link").is_in(links[:_MOST_LINKS])).then("link").otherwise(pl.lit("other links")),
    )  # fmt: skip
    colours = [*_theme.SERIES[: min(len(links), _MOST_LINKS)], _theme.QUIET]
    domain = [*sorted(links[:_MOST_LINKS]), "other links"][: len(links) if len(links) <= _MOST_LINKS else None]  # fmt: skip
    base = alt.Chart(named).encode(
        x=alt.X("bytes:Q", title="bytes moved", scale=_scale(rows["bytes"]), axis=_theme.bytes_axis(tickCount=6)),
        color=alt.Color("link:N", scale=alt.Scale(domain=domain, range=colours[: len(domain)]),
                        legend=alt.Legend(title=None, columns=3)),
    )  # fmt: skip
    points = base.mark_point(opacity=0.55).encode(
        y=alt.Y("duration_ms:Q", title="time it took (ms)", axis=_theme.duration_axis(tickCount=6), scale=_scale(rows["duration_ms"])),
        shape=alt.Shape("outcome:N", scale=alt.Scale(domain=["completed", "failed", "expired"], range=["circle", "cross", "triangle"]), legend=None),
        tooltip=[
            alt.Tooltip("link:N"), alt.Tooltip("request:N"), _theme.tip("bytes", "bytes", _theme.COUNT),
            _theme.tip("duration_ms", "took (ms)"), _theme.tip("fitted_ms", "fit of the link (ms)"),
            alt.Tooltip("bytes_basis:N", title="bytes known by"), alt.Tooltip("outcome:N"), _theme.instant("start_time", "start"),
        ],
    )  # fmt: skip
    fit = base.transform_filter("isValid(datum.fitted_ms) && datum.link != 'other links'").mark_line(strokeWidth=1.5).encode(y="fitted_ms:Q")  # fmt: skip
    return (points + fit).properties(width=_theme.WIDTH, height=_theme.HEIGHT)


def _scale(values: pl.Series) -> alt.Scale:
    """Logarithmic where the greatest would press the rest into a corner."""
    low, high = float(values.min() or 0), float(values.max() or 0)  # type: ignore[arg-type]
    return alt.Scale(type="log", nice=False, padding=8) if 0 < _WIDE * low < high else alt.Scale()


def sentence(rows: pl.DataFrame) -> str | None:
    """How many, how long, and what the fit says of the slowest link."""
    rows = _known(rows)
    if rows.is_empty():
        return None
    total, shown = int(rows["total"].max() or rows.height), rows.height  # type: ignore[arg-type]
    first = rows.row(0, named=True)
    links = int(first["links"] or rows["link"].n_unique())
    text = (
        f"{numbers.plural(total, 'movement')} over {numbers.plural(links, 'link')}, in the middle "
        f"{numbers.size(first['p50_bytes'])} in {numbers.duration(first['p50_ms'])}, "
        f"at most {numbers.duration(first['max_ms'])}"
    )
    return text + _fit(rows, links) + _remarks(rows, shown, total) + "."


def _fit(rows: pl.DataFrame, links: int) -> str:
    fitted = rows.filter(pl.col("bytes_per_second").is_not_null()).sort("bytes_per_second", "link").unique("link", keep="first", maintain_order=True)  # fmt: skip
    if fitted.is_empty():
        return "; too few, or too alike, for a fit of time against size"
    row = fitted.row(0, named=True)
    slowest = "the slowest link," if fitted.height > 1 else "the link"
    which = (
        "the link" if links == 1 else f"{slowest} {row['link']}{',' if fitted.height > 1 else ''}"
    )
    return f"; {which} takes {numbers.duration(row['setup_ms'])} + size over {numbers.rate(row['bytes_per_second'])}, as fitted"


def _remarks(rows: pl.DataFrame, shown: int, total: int) -> str:
    sampled = f"; {shown:,} of them shown, an even sample" if shown < total else ""
    bases = set(rows["bytes_basis"].drop_nulls()) - {"measured"}
    guessed = "; bytes from prompt lengths and the KV size of a token, not measured" if bases else ""  # fmt: skip
    return sampled + guessed


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("bytes").is_not_null(), pl.col("duration_ms").is_finite(), pl.col("link").is_not_null())  # fmt: skip
