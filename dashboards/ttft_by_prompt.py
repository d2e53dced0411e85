"""First token against prompt: do long prompts make the first token late, and does the cache help?"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from pdtrace import numbers

from . import _theme

QUERY = "ttft_by_prompt"
ORDER = 20

_CACHE = {
    "unknown": _theme.QUIET,
    "none": _theme.PREFILL,
    "below half": _theme.PHASE_COLOURS["queue"],
    "half and more": _theme.PHASE_COLOURS["kv_load"],
}


def chart(rows: pl.DataFrame) -> Any:
    """A point per request, coloured by how much of its prompt was found in a cache."""
    rows = _known(rows)
    if rows.is_empty():
        return _theme.empty("no request with both a prompt length and a first token")
    across, marks = _theme.amount(rows, "prompt_tokens")
    up, ticks = _theme.amount(rows, "ttft_ms")
    there = [name for name in _CACHE if name in set(rows["cache"])]
    return (
        alt.Chart(_theme.timed(rows))
        .mark_point(filled=True, opacity=0.55, size=30)
        .encode(
            x=alt.X(
                "prompt_tokens:Q",
                title="prompt (tokens)",
                scale=across,
                axis=_theme.count_axis(marks),
            ),
            y=alt.Y(
                "ttft_ms:Q",
                title="time to first token",
                scale=up,
                axis=_theme.duration_axis(ticks),
            ),
            color=alt.Color(
                "cache:N",
                scale=alt.Scale(domain=there, range=[_CACHE[name] for name in there]),
                legend=alt.Legend(title="found in a cache"),
            ),
            tooltip=[
                "request:N",
                _theme.tip("ttft_ms", "time to first token (ms)"),
                _theme.tip("prompt_tokens", "prompt tokens", _theme.COUNT),
                _theme.tip("cached_tokens", "of them cached", _theme.COUNT),
                _theme.instant("start_time", "start"),
            ],
        )
        .properties(width=_theme.WIDTH, height=_theme.HEIGHT)
    )


def sentence(rows: pl.DataFrame) -> str | None:
    """Whether first tokens follow the prompt, how much, and what is known of the cache."""
    rows = _known(rows)
    if rows.is_empty():
        return None
    row = rows.row(0, named=True)
    said = f"{_follows(row)}; {_cache(row)}"
    thin = row["kept_one_in"] or 1
    return said + (f" One request in {thin} is drawn, and the slowest." if thin > 1 else "")


def _follows(row: dict[str, Any]) -> str:
    if row["rho"] is None:
        return "whether first tokens follow the prompt cannot be told (fewer than 10 requests, or all alike)"
    found = f"rank correlation {row['rho']:.2f}"
    if row["rho_low"] is not None and row["rho_high"] is not None:
        found += f", {row['rho_low']:.2f} to {row['rho_high']:.2f}"
    slope = row["slope_ms"]
    if row["follows"]:
        each = f": {numbers.duration(slope)} for each 1,000 tokens" if slope is not None else ""
        return f"first tokens come later with longer prompts (tokens known as cached left out){each} ({found})"
    if row["follows"] is None:
        return f"whether first tokens follow the prompt cannot be told ({found})"
    return f"first tokens follow the length of the prompt little or not at all ({found})"


def _cache(row: dict[str, Any]) -> str:
    if not row["cache_known"]:
        return "how much of the prompts was cached is unknown."
    part = numbers.share((row["cache_hits"] or 0) / row["cache_known"])
    known = numbers.plural(row["cache_known"], "request")
    return f"{part} of {known} found a part of their prompt in a cache."


def _known(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(
        pl.col("prompt_tokens").is_not_null(), pl.col("ttft_ms").is_not_null(), pl.col("cache").is_in(list(_CACHE))
    )  # fmt: skip
