"""Shared beginnings of prompts: which shared beginnings hold the most tokens, and do their prompts stay on one worker?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "hot_prefixes"
ORDER = 51
LEVEL = "C"

_SHOWN = 12
_NAMED = 16  # workers that a row names at most: shares are of theirs


def chart(rows: pl.DataFrame) -> Any:
    """One bar a beginning: tokens that an endless cache could have shared; dark where one worker got all of it."""
    rows = _known(rows).head(_SHOWN)
    if rows.is_empty():
        return _theme.empty("no hashes of prompt blocks")
    named = rows.with_columns(name=_name(), holders=pl.col("workers").list.len())
    return (
        alt.Chart(named)
        .mark_bar()
        .encode(
            y=alt.Y("name:N", title=None, sort=named["name"].to_list(), axis=alt.Axis(labelLimit=260)),
            x=alt.X("shared_tokens:Q", title="tokens that could have been shared", axis=alt.Axis(format="~s", tickCount=6)),
            color=alt.Color("first_ratio:Q", title="share of its requests on one worker", scale=alt.Scale(domain=[0, 1], range=["#d9c8ee", "#4b1f73"]), legend=alt.Legend(format="%")),
            tooltip=[
                alt.Tooltip("prefix:N", title="hash"), _theme.tip("prefix_tokens", "length (tokens)", _theme.COUNT), _theme.tip("requests", "requests", _theme.COUNT),
                _theme.tip("shared_tokens", "could be shared (tokens)", _theme.COUNT), _theme.tip("holders", "workers", _theme.COUNT), _theme.tip("first_ratio", "on the first of them", ".0%"),
            ],
        )
        .properties(width=_theme.WIDTH, height=_theme.ROW * max(rows.height, 2))
    )  # fmt: skip


def sentence(rows: pl.DataFrame) -> str | None:
    """The beginning with most to share."""
    rows = _known(rows)
    if rows.is_empty():
        return None
    row = rows.row(0, named=True)
    workers = len(row["workers"] or [])
    where = ""
    if workers >= _NAMED:
        where = f", on {workers} workers or more"
    elif workers and row["first_ratio"] is not None:
        where = (
            f", on {numbers.plural(workers, 'worker')} ({numbers.share(row['first_ratio'])} on one)"
        )
    return (
        f"{numbers.plural(rows.height, 'shared beginning')}{' or more' if rows.height >= 100 else ''}; the greatest is {numbers.count(row['prefix_tokens'])} tokens long, in "
        f"{numbers.plural(row['requests'] or 0, 'request')}{where}: {numbers.count(row['shared_tokens'])} tokens that an endless cache could have shared."
    )


def _name() -> pl.Expr:
    """Length and number of requests; the hash tells equal ones apart."""
    return pl.format("{} tokens, {} requests · {}", pl.col("prefix_tokens"), pl.col("requests"), pl.col("prefix").str.slice(0, 6))  # fmt: skip


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(
        pl.col("shared_tokens").is_not_null(), pl.col("prefix_tokens").is_not_null(), pl.col("requests").is_not_null(), pl.col("prefix").is_not_null()
    ).sort("place", nulls_last=True)  # fmt: skip
