"""Streams, phase durations, stated values and serving workers of the rows of a request table."""

from __future__ import annotations

import re

import polars as pl

from ._table_columns import chunk_instants, number_column
from ._table_headers import words_of
from ._table_plan import Plan, column_ms

_PHASES = {  # column meaning -> phase detail
    "queue_time": "prefill_queue",
    "prefill_time": "prefill_wall",
    "kv_transfer_time": "kv_transfer",
    "decode_time": "decode_wall",
}

# What a row says of its request whoever saw it: the leg of the worker that served it has it too.
SAID_OF_THE_REQUEST = (
    "request_id", "external_id", "model", "prompt_tokens", "cached_tokens", "output_tokens", "status",
)  # fmt: skip


def intervals(plan: Plan, frame: pl.DataFrame, values: pl.DataFrame) -> list[pl.DataFrame]:
    """Phase durations that a column states; where they lie in the request is not known."""
    found = []
    for meaning, detail in _PHASES.items():
        column, ms = plan.first(meaning), column_ms(plan, frame, meaning)
        if column is None or ms is None:
            continue
        rows = pl.DataFrame({"leg": values["leg"], "ms": ms}).filter(pl.col("ms") >= 0)
        found.append(
            rows.select(
                "leg",
                pl.lit(detail).alias("detail"),
                (pl.col("ms") * 1e6).round().cast(pl.Int64, strict=False).alias("duration_ns"),
                pl.lit("reported").alias("basis"),
                pl.lit(f"column {column.name}").alias("semantics"),
            )
        )
    return found


def streams(
    plan: Plan, frame: pl.DataFrame, values: pl.DataFrame, observer: str
) -> pl.DataFrame | None:
    chunks = chunk_instants(plan, frame)
    column = plan.first("gaps")
    if chunks is not None:
        gaps, first, scale = chunks.list.diff(null_behavior="drop"), chunks.list.first(), 1e-3
        emission = "chunk"
    elif (
        column is not None
        and column.name in frame.columns
        and isinstance(frame[column.name].dtype, pl.List)
    ):
        scale = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}[plan.units[column.name]]
        gaps, first = frame[column.name], values["first_token_ns"]
        emission = "token" if "token" in words_of(column.name)[0] else "chunk"
    else:
        return None
    rows = pl.DataFrame(
        {"leg": values["leg"], "clock": values["clock"], "first_ns": first, "gaps": gaps}
    )
    return rows.filter(pl.col("gaps").is_not_null()).select(
        "leg",
        pl.lit(0, dtype=pl.Int64).alias("stream"),
        "first_ns",
        pl.col("gaps")
        .list.eval((pl.element() * scale).round().cast(pl.Int32, strict=False))
        .alias("gaps_us"),
        pl.lit(emission).alias("emission"),
        "clock",
        pl.lit(observer).alias("observer"),
    )


def reported(plan: Plan, frame: pl.DataFrame, values: pl.DataFrame) -> list[pl.DataFrame]:
    """What the table states and pdtrace computes by itself, untouched, with what it seems to be."""
    found = []
    said = [
        ("tps", "tps", "tokens/s", _rate_definition(values)),
        ("tpot", "tpot_stated", "ms", _tpot_definition(plan, values)),
        ("cache_hit_ratio", None, "1", "cache hit ratio as the table says"),
    ]
    if plan.rules and plan.first("ttft"):
        said.append(("ttft", "ttft_stated", "ms", "time to first token as the table says"))
    for meaning, name, unit, definition in said:
        column = plan.first(meaning)
        if column is None:
            continue
        series = values[name] if name else number_column(plan, frame, meaning)
        if series is not None:
            found.append(_report(values["leg"], column.name, series, unit, definition))
    for name in _server_words(plan, frame):
        definition = "as the server's response says of itself; not the time that this observer saw"
        unit = "ms" if name.endswith("_ms") else "s" if name.endswith("_s") else "1"
        found.append(_report(values["leg"], name, frame[name], unit, definition))
    return found


def _report(
    leg: pl.Series, quantity: str, value: pl.Series, unit: str, definition: str
) -> pl.DataFrame:
    return (
        pl.DataFrame({"leg": leg, "value": value.cast(pl.Float64, strict=False)})
        .drop_nulls("value")
        .select(
            "leg",
            pl.lit(quantity).alias("quantity"),
            "value",
            pl.lit(unit).alias("unit"),
            pl.lit(definition).alias("definition"),
        )
    )


def _server_words(plan: Plan, frame: pl.DataFrame) -> list[str]:
    """Nested latencies under keys such as nvext.timing, prefill_metrics: a server's own words."""
    latency = re.compile(r"(?:time|latency|ttft|itl|wait|queue|rate)[a-z0-9_]*$")
    return [
        name
        for name in plan.unused
        if "." in name
        and name in frame.columns
        and frame[name].dtype.is_numeric()
        and latency.search(name.rpartition(".")[2])
        and "unix" not in name
        and float(frame[name].cast(pl.Float64).abs().max() or 0) < 1e11  # type: ignore[arg-type]
    ]


def _rate_definition(values: pl.DataFrame) -> str:
    """Which formula the stated tokens per second fit."""
    rows = values.select(
        total=pl.col("output_tokens") / pl.col("e2e_ms") * 1e3 / pl.col("tps"),
        decode=(pl.col("output_tokens") - 1)
        / (pl.col("e2e_ms") - pl.col("ttft_ms"))
        * 1e3
        / pl.col("tps"),
        both=(pl.col("output_tokens") + pl.col("prompt_tokens"))
        / pl.col("e2e_ms")
        * 1e3
        / pl.col("tps"),
    ).select(((pl.all() - 1).abs()).median())
    formulas = {
        "total": "output tokens / whole duration",
        "decode": "(output tokens - 1) / (whole duration - TTFT)",
        "both": "(input + output tokens) / whole duration",
    }
    fits = {
        name: rows[name][0]
        for name in rows.columns
        if rows[name][0] is not None and rows[name][0] < 0.05
    }
    if not fits:
        return "tokens per second as the table says; its formula is not known"
    return formulas[min(fits, key=lambda name: fits[name])]


def _tpot_definition(plan: Plan, values: pl.DataFrame) -> str:
    if plan.dialect == "llmperf":
        return "llmperf: whole duration / output tokens, TTFT included"
    rows = values.select(
        mean=(pl.col("tpot_ms") / pl.col("tpot_stated") - 1).abs(),
        whole=(pl.col("e2e_ms") / pl.col("output_tokens") / pl.col("tpot_stated") - 1).abs(),
    ).median()
    mean, whole = rows["mean"][0], rows["whole"][0]
    if mean is not None and values["ttft_ms"].null_count() < values.height and mean < 0.05:
        return "(whole duration - TTFT) / (output tokens - 1)"
    if whole is not None and whole < 0.05:
        return "whole duration / output tokens, TTFT included"
    return "mean time per token as the table says; its formula is not known"


def served(plan: Plan, values: pl.DataFrame, legs: pl.DataFrame) -> pl.DataFrame | None:
    """The worker that each row says has served it."""
    if plan.first("worker") is None:
        return None
    named = values.select("leg", "rank", served_by="worker").filter(
        pl.col("served_by").str.len_chars() <= 200
    )
    return legs.join(named, on="leg", how="inner", maintain_order="left").select(
        "leg", "record", pl.col("served_by").alias("worker"), "rank", *SAID_OF_THE_REQUEST
    )
