"""Cache reuse: which share of the prompt tokens was found in a cache, by worker and by turn?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "reuse_by_key"
ORDER = 50

_PANELS = {
    "worker": "by the worker that computed the prompt",
    "turn": "by turn of the session (1 the first)",
}


def chart(rows: pl.DataFrame) -> Any:
    """One bar a worker and one a turn, with the 95 % interval; no picture where nothing was ever found."""
    rows = _known(rows)
    whole = rows.filter(pl.col("by") == "all")
    if rows.is_empty():
        return _theme.empty("cached tokens are not known")
    if whole.height and not whole["cached_tokens"].sum():
        return None
    panels = [
        _panel(part, name) for name in _PANELS if (part := rows.filter(pl.col("by") == name)).height
    ] or [_panel(whole.with_columns(label=pl.lit("all requests")), "all")]
    return alt.vconcat(*panels, spacing=16).resolve_scale(x="shared")


def _panel(rows: pl.DataFrame, name: str) -> Any:
    base = alt.Chart(rows).encode(
        y=alt.Y("label:N", title=None, sort=rows.sort("place")["label"].to_list()),
        tooltip=[
            alt.Tooltip("label:N", title=name), _theme.tip("reuse_ratio", "found in a cache", ".1%"), _theme.tip("low_ratio", "95 % interval from", ".1%"),
            _theme.tip("high_ratio", "to", ".1%"), _theme.tip("prompt_tokens", "prompt tokens", _theme.COUNT), _theme.tip("requests", "requests", _theme.COUNT),
            _theme.tip("unknown", "requests of which it is unknown", _theme.COUNT),
        ],
    )  # fmt: skip
    share = alt.X(
        "reuse_ratio:Q",
        title="prompt tokens found in a cache (%)",
        axis=alt.Axis(format="%", tickCount=5),
        scale=alt.Scale(domain=[0, 1]),
    )
    bars = base.mark_bar(color=_theme.PHASE_COLOURS["kv_load"], height={"band": 0.7}).encode(x=share)  # fmt: skip
    spans = base.transform_filter("isValid(datum.low_ratio)").mark_rule(strokeWidth=1.5).encode(x="low_ratio:Q", x2="high_ratio:Q")  # fmt: skip
    return (bars + spans).properties(width=_theme.WIDTH, height=max(20 * rows.height, 40), title=_PANELS.get(name, "in all"))  # fmt: skip


def sentence(rows: pl.DataFrame) -> str | None:
    """The share in all, and between which workers and turns it lies."""
    rows = _known(rows)
    whole = rows.filter(pl.col("by") == "all")
    if whole.is_empty():
        return None
    row = whole.row(0, named=True)
    if not row["cached_tokens"]:
        return f"none of the {numbers.count(row['prompt_tokens'])} prompt tokens of {numbers.plural(row['requests'] or 0, 'request')} was found in a cache{_unknown(row)}."
    text = f"{numbers.share(row['reuse_ratio'])} of {numbers.count(row['prompt_tokens'])} prompt tokens were found in a cache"
    return f"{text}{_between(rows, 'worker')}{_between(rows, 'turn')}{_unknown(row)}."


def _between(rows: pl.DataFrame, name: str) -> str:
    mine = rows.filter(pl.col("by") == name)
    if mine.height < 2:
        return ""
    if name == "turn":
        first, *_, last = mine.sort("place").iter_rows(named=True)
        return f"; {numbers.share(first['reuse_ratio'])} in first turns, {numbers.share(last['reuse_ratio'])} in turn {last['label']}"
    low, *_, high = mine.sort("reuse_ratio", "label").iter_rows(named=True)
    return f"; from {numbers.share(low['reuse_ratio'])} on {low['label']} to {numbers.share(high['reuse_ratio'])} on {high['label']}"


def _unknown(row: dict[str, Any]) -> str:
    n = row["unknown"]
    return f"; of {numbers.plural(n, 'more request')} it is unknown" if n else ""


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(
        pl.col("by").is_in(["all", *_PANELS]), pl.col("label").is_not_null(), pl.col("reuse_ratio").is_finite()
    )  # fmt: skip
