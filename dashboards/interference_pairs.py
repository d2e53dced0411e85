"""Who took it from whom: which prompts held which streams up, and for how long?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "interference_pairs"
ORDER = 42

_OTHERS = "all others"


def chart(rows: pl.DataFrame) -> Any:
    """A square per pair, the fuller the more seconds; culprits down, victims across."""
    rows = _drawn(_known(rows))
    if rows.is_empty():
        return _theme.empty("no pair of requests is named")
    culprits = rows.sort("culprit_place")["culprit"].unique(maintain_order=True).to_list()
    victims = rows.sort("victim_place")["victim"].unique(maintain_order=True).to_list()
    base = alt.Chart(rows).encode(
        x=alt.X(
            "victim:N",
            sort=victims,
            title="stream held up by them, worst first",
            axis=alt.Axis(labelAngle=-45, labelLimit=90),
        ),
        y=alt.Y("culprit:N", sort=culprits, title="prompt, greatest taker first"),
        tooltip=[
            alt.Tooltip("culprit:N", title="prompt of"),
            _theme.tip("culprit_tokens", "its tokens", _theme.COUNT),
            alt.Tooltip("victim:N", title="held up"),
            _theme.tip("lost_s", "lost (s)"),
            _theme.tip("culprit_lost_s", "taken by the prompt in all (s)"),
            _theme.tip("victim_lost_s", "lost by the stream in all (s)"),
        ],
    )
    named = f"datum.culprit != '{_OTHERS}' && datum.victim != '{_OTHERS}'"
    squares = (
        base.transform_filter(named)
        .mark_rect(stroke="white", strokeWidth=0.5, color=_theme.LOST)
        .encode(
            opacity=alt.Opacity(
                "lost_s:Q",
                title="seconds lost",
                scale=alt.Scale(range=[0.12, 1], domainMin=0),
                legend=alt.Legend(format=_theme.DECIMAL, tickCount=4, symbolType="square"),
            )
        )
    )
    # Sums over many requests are not on the scale of single pairs: grey, or written.
    rest = base.transform_filter(f"datum.culprit == '{_OTHERS}' && datum.victim != '{_OTHERS}'").mark_square(
        color=_theme.QUIET, size=18
    )  # fmt: skip
    sums = (
        base.transform_filter(f"datum.victim == '{_OTHERS}'")
        .mark_text(fontSize=10)
        .encode(text=alt.Text("lost_s:Q", format=".2~f"))
    )
    return (squares + rest + sums).properties(
        width=_theme.WIDTH, height=max(60, 22 * len(culprits))
    )


def sentence(rows: pl.DataFrame) -> str | None:
    """How much of all the greatest takers took, and who lost most."""
    rows = _known(rows)
    if rows.is_empty():
        return None
    takers = rows.filter(pl.col("culprit").is_not_null()).unique("culprit").sort("culprit_place")
    total = rows["total_lost_s"][0]
    if not takers.height or not total:
        return f"prompts of others took {numbers.seconds(total)}; no pair is named."
    first = takers.row(0, named=True)
    three = takers.head(3)
    size = f" ({numbers.count(first['culprit_tokens'])} tokens)" if first["culprit_tokens"] else ""
    return (
        f"{_the(three.height)} took {numbers.share(three['culprit_lost_s'].sum() / total)} of "
        f"{numbers.seconds(total)}, {first['culprit']}{size} most ({numbers.seconds(first['culprit_lost_s'])})"
        + (
            f"; {first['worst_victim']} lost most ({numbers.seconds(first['worst_lost_s'])})."
            if first["worst_victim"]
            else "."
        )
    )


def _the(n: int) -> str:
    return {1: "one prompt", 2: "two prompts", 3: "three prompts"}[n]


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("lost_s").is_not_null())


def _drawn(rows: pl.DataFrame) -> pl.DataFrame:
    """Names for the axes: that of all others belongs to no request."""
    names = [
        pl.when(pl.col(name) == _OTHERS)
        .then(pl.lit(f"request {_OTHERS}"))
        .otherwise(name)
        .fill_null(_OTHERS)
        .alias(name)
        for name in ("culprit", "victim")
    ]
    return rows.with_columns(names)
