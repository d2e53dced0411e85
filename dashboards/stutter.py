"""The stutter: whose prompt stopped whose stream, token by token?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "stutter"
ORDER = 40

_KINDS = {"prefill": "prompt computed", "token": "token", "stall": "stall"}
_COLOURS = {"prefill": _theme.PREFILL, "token": _theme.DECODE, "stall": _theme.LOST}


def chart(rows: pl.DataFrame) -> Any:
    """Tokens as ticks, stalls between them as bars, the prompts behind as bands over all streams."""
    rows = _known(rows)
    if rows.is_empty():
        return _theme.empty("no stream was held up by a prefill")
    named = _theme.timed(rows).with_columns(what=pl.col("kind").replace_strict(_KINDS))
    lines = rows.sort("place")["request"].unique(maintain_order=True).to_list()
    kinds = [kind for kind in _KINDS if kind in set(rows["kind"])]
    colour = alt.Color(
        "what:N",
        scale=alt.Scale(domain=[_KINDS[k] for k in kinds], range=[_COLOURS[k] for k in kinds]),
        legend=alt.Legend(title=None),
    )
    base = alt.Chart(named)
    title = "time (to the millisecond)"
    stretch = _theme.time_axis("start_time", title, form=_theme.CLOCK_MS, scale=_stretch(rows))
    time = alt.X("start_time:T", title=title)  # the domain is said once
    line = alt.Y("request:N", sort=lines, title="request", axis=alt.Axis(labelLimit=170))
    bands = (
        base.transform_filter("datum.kind == 'prefill' && datum.role == 'culprit'")
        .mark_rect(color=_theme.PREFILL, opacity=0.14, clip=True)
        .encode(x=stretch, x2="end_time:T")
    )
    bars = base.transform_filter("datum.kind != 'token'").encode(
        x=time, x2="end_time:T", y=line, color=colour
    )
    prefills = bars.transform_filter("datum.kind == 'prefill'").mark_bar(height=13, clip=True).encode(
        tooltip=[
            alt.Tooltip("request:N", title="prompt of"),
            _theme.tip("prompt_tokens", "prompt tokens", _theme.COUNT),
            _theme.tip("duration_ms", "computed for (ms)"),
            _theme.tip("lost_ms", "took from others here (ms)"),
            _theme.instant("start_time", "start"),
        ]
    )  # fmt: skip
    stalls = bars.transform_filter("datum.kind == 'stall'").mark_bar(height=4, clip=True).encode(
        tooltip=[
            alt.Tooltip("request:N", title="held up"),
            _theme.tip("duration_ms", "no token for (ms)"),
            _theme.tip("lost_ms", "of it lost to prompts (ms)"),
            alt.Tooltip("culprit:N", title="prompt of"),
            _theme.instant("start_time", "start"),
        ]
    )  # fmt: skip
    tokens = (
        base.transform_filter("datum.kind == 'token'")
        .mark_tick(thickness=1.3, height=17, clip=True)
        .encode(x=time, y=line, color=colour, tooltip=["request:N", _theme.instant("start_time", "token at")])
    )  # fmt: skip
    sizes = (
        base.transform_filter(f"datum.kind == 'prefill' && datum.role == 'culprit' && datum.duration_ms > {_wide(rows)}")
        .transform_filter("isValid(datum.prompt_tokens)")
        .transform_calculate(size="format(datum.prompt_tokens, ',') + ' tokens'")
        .mark_text(align="right", dx=-5, color="#111", fontSize=10, clip=True)
        .encode(x=alt.X("end_time:T", title=title), y=line, text="size:N")
    )  # fmt: skip
    height = max(120, _theme.ROW * len(lines))
    return (bands + stalls + tokens + prefills + sizes).properties(
        width=_theme.WIDTH, height=height
    )


def sentence(rows: pl.DataFrame) -> str | None:
    """The worst of the stretch, and who took it."""
    rows = _known(rows)
    stalls = rows.filter(pl.col("kind") == "stall").sort("lost_ms", descending=True)
    if stalls.is_empty():
        return None
    worst = stalls.row(0, named=True)
    takers = rows.filter(kind="prefill", role="culprit").sort("lost_ms", descending=True)
    said = (
        f"in the worst {_span(worst)} on {worst['worker_name'] or worst['worker'] or 'one worker'}, prompts of others "
        f"took {numbers.seconds(worst['stretch_lost_s'])} from {numbers.plural(worst['victims'] or 0, 'stream')}"
    )
    if takers.height:
        taker = takers.row(0, named=True)
        size = (
            f" ({numbers.count(taker['prompt_tokens'])} tokens)" if taker["prompt_tokens"] else ""
        )
        said += (
            f", {taker['request']}{size} more than any other ({numbers.duration(taker['lost_ms'])})"
        )
    said += (
        f"; {worst['request']} stood still for {numbers.duration(worst['duration_ms'])}, where a token "
        f"ordinarily comes after {numbers.duration(worst['baseline_ms'])}."
    )
    thin = rows["kept_one_in"].max()
    return said + (f" One token in {thin} is drawn." if isinstance(thin, int) and thin > 1 else "")


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(
        pl.col("kind").is_in(list(_KINDS)),
        pl.all_horizontal(pl.col("request", "start_ns", "end_ns").is_not_null()),
    )


def _stretch(rows: pl.DataFrame) -> alt.Scale:
    """The stretch as the domain of the axis, where the rows name it."""
    ends = rows.select(pl.col("stretch_start_ns").min() / 1e6, pl.col("stretch_end_ns").max() / 1e6)
    low, high = ends.row(0)
    if low is None or high is None:
        return alt.Scale()
    return alt.Scale(domainMin=alt.ExprRef(f"{low:.3f}"), domainMax=alt.ExprRef(f"{high:.3f}"))


def _wide(rows: pl.DataFrame) -> float:
    """How long a prompt must have been computed for its size to have room in its bar (ms)."""
    low, high = _theme.ends(rows, "start_ns", "end_ns")
    return (high - low) / 1e6 / 8


def _span(row: dict[str, Any]) -> str:
    if row["stretch_start_ns"] is None or row["stretch_end_ns"] is None:
        return "stretch"
    return numbers.duration((row["stretch_end_ns"] - row["stretch_start_ns"]) / 1e6)
