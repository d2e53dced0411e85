"""Spans that no named system claims: servers are requests, clients hops, phase words intervals.

The reading is modest: a span is a request when it is a SERVER span or a GenAI client call
(OpenTelemetry GenAI conventions 1.41: the inference span is CLIENT); a phase only when its name is
the exact word (queue, prefill, kv_transfer, decode) in a trace that speaks of models. Clock: wall.
"""

from __future__ import annotations

import polars as pl

from pdtrace import model, semconv
from pdtrace.model import Claims, Sink

from . import _generic_columns as columns
from ._generic_tree import with_places
from ._spans_only import read, sniff

__all__ = ["CLAIMS", "TITLE", "interpret", "read", "sniff"]
TITLE = "Other spans (OpenTelemetry GenAI conventions, OpenInference, home-made)"

CLAIMS = Claims(
    fallback=True,
    attributes={
        **dict.fromkeys(columns.TEXTS, str),
        **dict.fromkeys(columns.COUNTS, int),
        **dict.fromkeys((*columns.TTFT_SECONDS, *columns.LATENCIES), float),
    },
)
_DEFINITION = "attribute {} of the span, seconds, as its emitter computes it"


def interpret(spans: pl.DataFrame, facts: pl.DataFrame, out: Sink) -> None:
    """Unclaimed spans as legs, intervals, transfers and reported values."""
    placed = with_places(spans)
    if not placed.height:
        return
    legs = placed.filter(pl.col("place").is_in(["request", "call", "hop"]))
    # What carries another component's leg (a proxy's `prefill`, `decode`) is a container, no phase.
    phases = placed.filter(
        pl.col("detail").is_not_null() & pl.col("phase_leg").is_not_null() & ~pl.col("covers")
    )
    for table, frame in (
        ("legs", _legs(legs)),
        ("intervals", _intervals(phases)),
        ("transfers", _transfers(phases)),
        ("reported", _reported(legs.filter(pl.col("place") != "hop"))),
    ):
        if frame.height:
            out.add(table, frame)


def _first_tokens(legs: pl.DataFrame) -> pl.DataFrame:
    """Earliest first-token event of each span: trace_id, span_id, event_ns."""
    named = pl.col("event_name").str.to_lowercase().str.contains(columns.FIRST_TOKEN_EVENT)
    return (
        legs.select("trace_id", "span_id", "events")
        .filter(pl.col("events").list.len() > 0)
        .explode("events")
        .with_columns(
            event_name=pl.col("events").struct.field("name"),
            event_ns=pl.col("events").struct.field("time_ns"),
        )
        .filter(named)
        .group_by("trace_id", "span_id")
        .agg(pl.col("event_ns").min())
    )


def _legs(spans: pl.DataFrame) -> pl.DataFrame:
    legs = spans.join(
        _first_tokens(spans), on=["trace_id", "span_id"], how="left", maintain_order="left"
    )
    place, start, end = pl.col("place"), pl.col("start_ns"), pl.col("end_ns")
    seconds = columns.first_of(columns.TTFT_SECONDS)
    stated = pl.when(seconds > 0).then(start + (seconds * 1e9).round().cast(pl.Int64))
    first = pl.when(place != "hop").then(pl.coalesce("event_ns", stated))
    code = columns.first_of(columns.HTTP_STATUS)
    failed = (
        (pl.col("status_code") == "error")
        | (code >= 400)
        | pl.col(semconv.ERROR_TYPE).is_not_null()
    )
    aborted = (code == 499) | pl.col(semconv.ERROR_TYPE).str.to_lowercase().str.contains(
        "cancel|abort|disconnect"
    )
    request_id = columns.first_of(columns.REQUEST_IDS).str.strip_chars('[]"')
    tokens = columns.first_of(columns.OUTPUT_TOKENS)
    role = (
        pl.when(place == "call")
        .then(pl.lit("client"))
        .when(pl.col("observer") == "router")
        .then(pl.lit("router"))
        .when((place == "request") & (pl.col("observer") == "gateway"))
        .then(pl.lit("gateway"))
        .when(pl.col("detail") == "prefill_wall")
        .then(pl.lit("prefill"))
        .when(pl.col("detail") == "decode_wall")
        .then(pl.lit("decode"))
    )
    ttft_ms = (first - start) / 1e6
    return legs.with_columns(role=role).select(
        "leg",
        "source",
        "worker",
        "observer",
        "role",
        pl.when(pl.col("role").is_not_null()).then(pl.lit("span")).alias("role_basis"),
        (place == "hop").alias("container"),
        "trace_id",
        "span_id",
        "parent_span_id",
        request_id.alias("request_id"),
        request_id.str.replace(r"^(?:chatcmpl|cmpl)-", "").alias("external_id"),
        columns.first_of(columns.SESSIONS).alias("session"),
        columns.first_of(columns.TENANTS).alias("tenant"),
        columns.first_of(columns.ROUTES).str.split("?").list.first().alias("route"),
        pl.lit(model.WALL).alias("clock"),
        "start_ns",
        first.alias("first_token_ns"),
        "end_ns",
        "resolution_ns",
        ttft_ms.alias("ttft_ms"),
        ((end - start) / 1e6).alias("e2e_ms"),
        pl.when((tokens > 1) & (place != "hop") & first.is_not_null())
        .then((end - first) / 1e6 / (tokens - 1))
        .alias("tpot_ms"),
        pl.when(pl.col("event_ns").is_not_null() & first.is_not_null())
        .then(pl.lit("span start - first-token event"))
        .when(first.is_not_null())
        .then(pl.lit("attribute of the span, counted from its start"))
        .alias("ttft_definition"),
        columns.first_of(columns.MODELS).alias("model"),
        columns.first_of(columns.PROMPT_TOKENS).alias("prompt_tokens"),
        columns.first_of(columns.CACHED_TOKENS).alias("cached_tokens"),
        tokens.alias("output_tokens"),
        columns.first_of(columns.MAX_TOKENS).alias("max_tokens"),
        pl.when(aborted.fill_null(value=False))
        .then(pl.lit("aborted"))
        .when(failed.fill_null(value=False))
        .then(pl.lit("failed"))
        .when(end.is_null())
        .then(pl.lit("unknown"))
        .otherwise(pl.lit("completed"))
        .alias("status"),
        columns.first_of(columns.FINISH_REASONS)
        .str.extract(r"([A-Za-z_]+)", 1)
        .alias("finish_reason"),
        pl.coalesce(semconv.ERROR_TYPE, pl.when(code >= 400).then(code.cast(pl.String))).alias(
            "error"
        ),
    )


def _intervals(phases: pl.DataFrame) -> pl.DataFrame:
    return phases.select(
        pl.col("phase_leg").alias("leg"),
        "detail",
        "start_ns",
        "end_ns",
        pl.lit("measured").alias("basis"),
        pl.lit(model.WALL).alias("clock"),
        "resolution_ns",
        pl.col("end_ns").is_null().alias("censored"),
        pl.format("span {}", "name").alias("semantics"),
    )


def _transfers(phases: pl.DataFrame) -> pl.DataFrame:
    moved = phases.filter(pl.col("detail") == "kv_transfer")
    return moved.select(
        "source",
        pl.col("phase_leg").alias("leg"),
        columns.first_of(columns.REQUEST_IDS).alias("request_id"),
        pl.col("worker").alias("source_worker"),
        "start_ns",
        "end_ns",
        ((pl.col("end_ns") - pl.col("start_ns")) / 1e6).alias("duration_ms"),
        columns.first_of(columns.KV_BYTES).alias("bytes"),
        columns.first_of(columns.KV_BACKENDS).alias("backend"),
        pl.when(pl.col("status_code") == "error")
        .then(pl.lit("failed"))
        .otherwise(pl.lit("completed"))
        .alias("outcome"),
    )


def _reported(legs: pl.DataFrame) -> pl.DataFrame:
    keys = dict.fromkeys(columns.LATENCIES)
    return pl.concat(
        legs.filter(pl.col(key) >= 0).select(  # TensorRT-LLM writes -1 for unknown
            "source",
            "leg",
            pl.lit(key).alias("quantity"),
            pl.col(key).alias("value"),
            pl.lit("s").alias("unit"),
            pl.lit(_DEFINITION.format(key)).alias("definition"),
        )
        for key in keys
    )
