"""Instants and durations of the rows of a request table, completed from each other."""

from __future__ import annotations

import polars as pl

from ._table_plan import Plan

ZERO_TTFT = "zero_ttft"
FILLED_TTFT = "ttft_equals_total"
PACE_FROM_RATE = "pace_from_rate"
COARSE_MS = 10  # stamps of a resolution as this or worse are coarser than a logged duration


def with_times(plan: Plan, values: pl.DataFrame, path: str, counts: dict[str, int]) -> pl.DataFrame:
    """Durations from instants and instants from durations; instants win where both are there, unless
    they are coarse and the durations lie within what they leave open."""
    wall = plan.wall()
    first_at = pl.col("first_at_raw")
    if plan.dialect == "litellm":  # LiteLLM fills a missing first-token time with the end
        first_at = pl.when(first_at < pl.col("end_raw")).then(first_at)
    values = values.with_columns(
        start_raw=pl.coalesce(
            "start_raw",
            pl.col("end_raw") - (pl.col("e2e_ms") * 1e6).round().cast(pl.Int64, strict=False),
        ),
        first_raw=pl.coalesce(first_at, "chunk_first"),
        end_raw=pl.col("end_raw"),
        not_streamed=pl.col("streaming")
        .str.to_lowercase()
        .is_in(["false", "0", "no"])
        .fill_null(value=False),
    )
    use_instants = pl.lit(plan.dialect != "litellm")
    values = values.with_columns(
        ttft_stated=pl.col("ttft_ms"),
        ttft_ms=pl.coalesce(
            *_between(plan, "first_raw", "ttft_ms"), pl.when(use_instants).then("ttft_ms")
        ),
        e2e_ms=pl.coalesce(*_between(plan, "end_raw", "e2e_ms"), "e2e_ms"),
    )
    values = values.with_columns(
        e2e_ms=pl.coalesce("e2e_ms", (pl.col("chunk_last") - pl.col("start_raw")) / 1e6),
        output_tokens=pl.coalesce(
            "output_tokens", pl.col("total_tokens") - pl.col("prompt_tokens")
        ),
        prompt_tokens=pl.coalesce(
            "prompt_tokens", pl.col("total_tokens") - pl.col("output_tokens")
        ),
    )
    values = _without_false_ttft(values, counts)
    n = pl.col("output_tokens")
    decode_ms = pl.coalesce(
        (pl.col("chunk_last") - pl.col("chunk_first")) / 1e6, pl.col("e2e_ms") - pl.col("ttft_ms")
    )
    computed = pl.when((n > 1) & pl.col("ttft_ms").is_not_null() & (decode_ms >= 0)).then(
        decode_ms / (n - 1)
    )
    stated = pl.col("tpot_ms")
    # Where the durations give the mean, a stated one that differs is only reported.
    fits = pl.when(computed.is_not_null()).then(computed).otherwise(stated)
    values = values.with_columns(
        tpot_stated=stated, tpot_ms=pl.when(stated.is_null()).then(computed).otherwise(fits)
    )
    if (
        plan.dialect == "llmperf"
    ):  # llmperf's inter-token latency is e2e over output tokens, TTFT included
        values = values.with_columns(tpot_ms=computed)
    values = _pace_from_rate(values, counts)
    start, ns = pl.col("start_raw"), pl.Int64
    return values.with_columns(
        clock=pl.when(start.is_not_null() | pl.col("first_raw").is_not_null()).then(
            pl.lit("wall" if wall else f"perf:{path}")
        ),
        start_ns=start if wall else pl.lit(None, dtype=ns),
        clock_start_ns=pl.lit(None, dtype=ns) if wall or wall is None else start,
        first_token_ns=pl.coalesce(
            "first_raw", start + (pl.col("ttft_ms") * 1e6).round().cast(ns, strict=False)
        )
        if wall
        else pl.lit(None, dtype=ns),
        last_token_ns=pl.col("chunk_last") if wall else pl.lit(None, dtype=ns),
        end_ns=pl.coalesce(
            "end_raw", start + (pl.col("e2e_ms") * 1e6).round().cast(ns, strict=False), "chunk_last"
        )
        if wall
        else pl.lit(None, dtype=ns),
    ).with_columns(first_token_ns=pl.when(pl.col("ttft_ms").is_not_null()).then("first_token_ns"))


def _between(plan: Plan, end: str, stated: str) -> tuple[pl.Expr, ...]:
    """From the start to this instant; a stated duration that coarse stamps do not contradict comes first."""
    stamps = (pl.col(end) - pl.col("start_raw")) / 1e6
    step_ms = max((rule.resolution_ns for rule in plan.rules.values()), default=1) / 1e6
    if step_ms < COARSE_MS or plan.dialect == "litellm":
        return (stamps,)
    return pl.when((stamps - pl.col(stated)).abs() <= step_ms).then(stated), stamps


def _pace_from_rate(values: pl.DataFrame, counts: dict[str, int]) -> pl.DataFrame:
    """Where a row states tokens per second and no duration, their inverse is the time per token."""
    only = pl.col("tpot_ms").is_null() & pl.col("e2e_ms").is_null() & (pl.col("tps") > 0)
    if n := int(values.select(only.sum()).item() or 0):
        counts[PACE_FROM_RATE] = n
        values = values.with_columns(
            tpot_ms=pl.when(only).then(1e3 / pl.col("tps")).otherwise("tpot_ms")
        )
    return values


def _without_false_ttft(values: pl.DataFrame, counts: dict[str, int]) -> pl.DataFrame:
    """A first-token time of zero, or one that only repeats the total, is none."""
    zero = (pl.col("ttft_ms") == 0) & (
        pl.col("status").is_in(["failed", "aborted", "unknown"])
        | pl.col("not_streamed")
        | (pl.col("e2e_ms") > 0)
        | (pl.col("output_tokens") == 0)
    )
    many = pl.col("output_tokens") > 1
    same = (pl.col("ttft_ms") > 0) & (pl.col("ttft_ms") == pl.col("e2e_ms"))
    share = values.select(
        (same & many).sum() / (many & pl.col("ttft_ms").is_not_null()).sum()
    ).item()
    filled = same & (pl.col("not_streamed") | (many & pl.lit(bool(share and share > 0.5))))
    marks = values.select(zero=zero.fill_null(value=False), filled=filled.fill_null(value=False))
    for name, key in (("zero", ZERO_TTFT), ("filled", FILLED_TTFT)):
        if n := int(marks[name].sum()):
            counts[key] = n
    false = marks["zero"] | marks["filled"]
    return values.with_columns(
        ttft_ms=pl.when(~false).then("ttft_ms"), first_raw=pl.when(~false).then("first_raw")
    )
