"""The slowest requests: where did their time go, step by step?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "request_waterfall"
ORDER = 30


def chart(rows: pl.DataFrame) -> Any:
    """A row per request above; below, one of them over the workers that it met."""
    rows = _known(rows)
    if rows.is_empty():
        return _theme.empty("no request was cut into phases")
    requests = rows.sort("place")["request"].unique(maintain_order=True).to_list()
    chosen = alt.selection_point(
        name="shown",
        fields=["request"],
        value=[{"request": requests[0]}],
        empty=False,
        bind=alt.binding_select(options=requests, name="request below "),
    )
    base = alt.Chart(_theme.timed(rows))
    colour = _theme.phase_colour(rows)
    time = alt.X(
        "from_ms:Q",
        title="time from the start of the request",
        axis=_theme.duration_axis(),
    )
    bar = base.mark_bar(height=13).encode(x=time, x2="to_ms:Q", color=colour, tooltip=_TIPS)
    first = base.mark_tick(color=_theme.INK, thickness=2, height=20).encode(
        x="ttft_ms:Q", tooltip=[_theme.tip("ttft_ms", "first token after (ms)")]
    )
    line = alt.Y("request:N", sort=requests, title="request")
    every = (bar.encode(y=line) + first.encode(y=line)).properties(
        width=_theme.WIDTH, height=_theme.ROW * len(requests)
    )
    lane = alt.Y("lane:N", sort=alt.EncodingSortField("from_ms", op="min"), title=None)
    one = (
        bar.transform_filter(chosen)
        .encode(y=lane)
        .properties(
            width=_theme.WIDTH,
            height=_theme.ROW * max(2, rows["lane"].n_unique()),
            title=alt.TitleParams(
                alt.ExprRef("'the request ' + (shown.request ? shown.request[0] : '') + ', by who had it'"),
                fontSize=12, fontWeight="normal",
            ),
        )
    )  # fmt: skip
    if len(requests) == 1:
        return (bar.encode(y=lane) + first.encode(y=lane)).properties(
            width=_theme.WIDTH, height=_theme.ROW * max(2, rows["lane"].n_unique())
        )
    return alt.vconcat(every.add_params(chosen), one, spacing=14)


def sentence(rows: pl.DataFrame) -> str | None:
    """The longest request and the latest first token, and what held them."""
    rows = _known(rows)
    if rows.is_empty():
        return None
    longest = rows.sort("place")["request"][0]
    mine = rows.filter(request=longest)
    named = mine["chosen_by"][0] == "name"
    who = f"request {longest}" if named else f"the longest request, {longest},"
    said = f"{who} took {numbers.duration(mine['e2e_ms'][0])}{_of(mine)}"
    late = rows.filter(pl.col("ttft_ms").is_not_null()).sort("ttft_ms", descending=True)
    if late.height and late["request"][0] != longest:
        row = late.row(0, named=True)
        part = rows.filter(pl.col("request") == row["request"], pl.col("to_ms") <= row["ttft_ms"])
        said += (
            f"; the first token of {row['request']} came latest, after "
            f"{numbers.duration(row['ttft_ms'])}{_of(part)}"
        )
    left = rows["left_out_ms"].max()
    if isinstance(left, float) and left > 0:
        said += f". Pieces that are too many to draw: up to {numbers.duration(left)} of a request"
    return said + "."


def _of(pieces: pl.DataFrame) -> str:
    """The two phases that hold most of these pieces, without what is next to nothing."""
    sums = (
        pieces.group_by("phase")
        .agg(pl.col("duration_ms").sum(), bound=(pl.col("basis") == "upper_bound").any())
        .sort("duration_ms", "phase", descending=[True, False])
        .filter(pl.col("duration_ms") >= 0.05 * pl.col("duration_ms").sum())
        .head(2)
        .to_dicts()
    )
    words = [
        f"{'up to ' if row['bound'] else ''}{numbers.duration(row['duration_ms'])} {row['phase']}"
        for row in sums
    ]
    return f" ({', '.join(words)})" if words else ""


_TIPS = [
    alt.Tooltip("request:N"),
    alt.Tooltip("phase:N"),
    alt.Tooltip("detail:N"),
    alt.Tooltip("lane:N", title="at"),
    _theme.tip("duration_ms", "length (ms)"),
    _theme.tip("from_ms", "from (ms)"),
    _theme.tip("to_ms", "to (ms)"),
    alt.Tooltip("basis:N", title="how known"),
    _theme.instant("start_time", "start"),
]


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    needed = ("request", "phase", "lane", "from_ms", "to_ms", "duration_ms")
    return rows.filter(pl.all_horizontal(pl.col(*needed).is_not_null()))
