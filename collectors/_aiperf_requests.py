"""AIPerf's request records as legs, streams and reported values."""

from __future__ import annotations

from typing import Any

import polars as pl

from pdtrace.model import Sink

from ._common import integer, number
from ._errors import UNNAMED, error_kind

NO_START = "no request_start_ns"
TTFT = "client: first response chunk - request start"
_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "seconds": 1e3, "milliseconds": 1.0}

# What AIPerf's code computes under each tag (ai-dynamo/aiperf 0.13.0).
DEFINITIONS = {
    "time_to_first_token": "first response - request start",
    "time_to_first_output_token": "first response with a non-reasoning token - request start",
    "time_to_second_token": "second response - first response",
    "request_latency": "last content response - request start",
    "inter_token_latency": "one mean per request: (request latency - TTFT) / "
    "(output tokens by AIPerf's tokenizer - tokens of the first chunk)",
    "input_sequence_length": "prompt tokens by AIPerf's tokenizer, without the chat template",
    "output_sequence_length": "output tokens by AIPerf's tokenizer",
    "usage_prompt_tokens": "prompt tokens as the server's usage says",
    "usage_completion_tokens": "output tokens as the server's usage says",
    "http_req_blocked": "HTTP client: waited for a connection",
    "http_req_connecting": "HTTP client: connecting",
    "http_req_sending": "HTTP client: sending the request",
    "http_req_waiting": "HTTP client: request sent - first byte of the response",
    "good_request_count": "1 when the request met the run's --goodput limits",
    "stream_setup_latency": "stream opened - request start",
}


def add_requests(
    ordinals: list[int], objects: list[dict[str, Any]], path: str, worker: str, out: Sink
) -> None:
    """Legs, streams and reported values of one batch of records."""
    usable = [
        (ordinal, record)
        for ordinal, record in zip(ordinals, objects, strict=True)
        if integer((record.get("metadata") or {}).get("request_start_ns")) is not None
    ]
    missing = sorted(set(ordinals) - {ordinal for ordinal, _ in usable})
    if missing:
        out.skip(missing, NO_START)
    if not usable:
        return
    rows = pl.DataFrame(
        [_row(o, r, path) for o, r in usable], infer_schema_length=None, schema=_ROW
    )
    out.add("legs", _legs(rows, worker))
    streams = _streams(rows)
    if streams.height:
        out.add("streams", streams)
    reported = _reported([r for _, r in usable], rows["leg"].to_list())
    if reported:
        out.add("reported", reported)


_ROW: dict[str, pl.DataType | type[pl.DataType]] = {
    "leg": pl.String,
    "record": pl.Int64,
    "start_ns": pl.Int64,
    "finish_ns": pl.Int64,
    "ttft_ms": pl.Float64,
    "e2e_ms": pl.Float64,
    "external_id": pl.String,
    "session": pl.String,
    "turn": pl.Int64,
    "prompt_tokens": pl.Int64,
    "output_tokens": pl.Int64,
    "cached_tokens": pl.Int64,
    "gaps_ms": pl.List(pl.Float64),
    "cancelled": pl.Boolean,
    "error": pl.String,
    "phase": pl.String,
}


def _row(ordinal: int, record: dict[str, Any], path: str) -> dict[str, Any]:
    meta, metrics = record["metadata"], record.get("metrics") or {}
    error = record.get("error")
    return {
        "leg": f"{path}#{ordinal}",
        "record": ordinal,
        "start_ns": integer(meta["request_start_ns"]),
        "finish_ns": integer(meta.get("request_end_ns")),
        "ttft_ms": duration_ms(metrics.get("time_to_first_token")),
        "e2e_ms": duration_ms(metrics.get("request_latency")),
        "external_id": meta.get("x_request_id"),
        "session": meta.get("conversation_id"),
        "turn": integer(meta.get("turn_index")),
        "prompt_tokens": _first(metrics, "usage_prompt_tokens", "input_sequence_length"),
        "output_tokens": _first(metrics, "usage_completion_tokens", "output_sequence_length"),
        "cached_tokens": _first(metrics, "usage_prompt_cache_read_tokens"),
        "gaps_ms": _durations_ms(metrics.get("inter_chunk_latency")),
        "cancelled": bool(meta.get("was_cancelled")) or _error(error).startswith("499"),
        "error": _error(error) or None,
        "phase": meta.get("benchmark_phase") or meta.get("phase_kind"),
    }


def duration_ms(metric: Any) -> float | None:
    """One duration with its own unit, in ms."""
    if not isinstance(metric, dict):
        return None
    value, factor = number(metric.get("value")), _MS.get(str(metric.get("unit", "ms")))
    return None if value is None or factor is None else value * factor


def _durations_ms(metric: Any) -> list[float] | None:
    if not isinstance(metric, dict) or not isinstance(metric.get("value"), list):
        return None
    factor = _MS.get(str(metric.get("unit", "ms")))
    return (
        None
        if factor is None
        else [float(v) * factor for v in metric["value"] if number(v) is not None]
    )


def _first(metrics: dict[str, Any], *tags: str) -> int | None:
    """The first of these counts that is there."""
    for tag in tags:
        value = integer((metrics.get(tag) or {}).get("value"))
        if value is not None:
            return value
    return None


def _error(error: Any) -> str:
    """Code and type; the message may quote the request and is left out."""
    if not isinstance(error, dict):
        return "error" if error else ""
    parts = (error.get("code"), error.get("type"))
    return " ".join(error_kind(part) or "" for part in parts if part) or UNNAMED


def _legs(rows: pl.DataFrame, worker: str) -> pl.DataFrame:
    nanoseconds = {
        name: (pl.col(name) * 1e6).round().cast(pl.Int64, strict=False)
        for name in ("ttft_ms", "e2e_ms")
    }
    end = pl.coalesce(pl.col("start_ns") + nanoseconds["e2e_ms"], "finish_ns")
    decode = pl.col("e2e_ms") - pl.col("ttft_ms")
    return rows.select(
        "leg",
        "record",
        pl.lit(worker).alias("worker"),
        pl.lit("client").alias("observer"),
        pl.lit("client").alias("role"),
        pl.lit("log").alias("role_basis"),
        pl.lit(value=False).alias("container"),
        pl.col("external_id").alias("request_id"),
        "external_id",
        "session",
        "turn",
        pl.lit("wall").alias("clock"),
        "start_ns",
        (pl.col("start_ns") + nanoseconds["ttft_ms"]).alias("first_token_ns"),
        (pl.col("start_ns") + nanoseconds["e2e_ms"]).alias("last_token_ns"),
        end.alias("end_ns"),
        pl.lit(1, dtype=pl.Int64).alias("resolution_ns"),
        "ttft_ms",
        pl.coalesce("e2e_ms", (end - pl.col("start_ns")) / 1e6).alias("e2e_ms"),
        pl.when(pl.col("output_tokens") > 1)
        .then(decode / (pl.col("output_tokens") - 1))
        .alias("tpot_ms"),
        pl.when(pl.col("ttft_ms").is_not_null()).then(pl.lit(TTFT)).alias("ttft_definition"),
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        pl.when(pl.col("gaps_ms").is_not_null()).then(pl.lit(value=True)).alias("streaming"),
        pl.when("cancelled")
        .then(pl.lit("aborted"))
        .when(pl.col("error").is_not_null())
        .then(pl.lit("failed"))
        .otherwise(pl.lit("completed"))
        .alias("status"),
        "error",
        pl.when(pl.col("phase") == "warmup").then(pl.lit("warmup")).alias("note"),
    )


def _streams(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("gaps_ms").is_not_null() & pl.col("ttft_ms").is_not_null()).select(
        "leg",
        pl.lit(0, dtype=pl.Int64).alias("stream"),
        (pl.col("start_ns") + (pl.col("ttft_ms") * 1e6).round().cast(pl.Int64, strict=False)).alias(
            "first_ns"
        ),
        pl.col("gaps_ms")
        .list.eval((pl.element() * 1e3).round())
        .cast(pl.List(pl.Int32))
        .alias("gaps_us"),
        pl.lit("chunk").alias("emission"),
        pl.lit("wall").alias("clock"),
        pl.lit("client").alias("observer"),
    )


def _reported(records: list[dict[str, Any]], legs: list[str]) -> list[dict[str, Any]]:
    """The defined metrics as AIPerf wrote them, and how late the client itself sent the request."""
    found = []
    for leg, record in zip(legs, records, strict=True):
        metrics, meta = record.get("metrics") or {}, record["metadata"]
        for tag, definition in DEFINITIONS.items():
            metric = metrics.get(tag)
            if isinstance(metric, dict) and (value := number(metric.get("value"))) is not None:
                found.append(
                    {
                        "leg": leg,
                        "quantity": tag,
                        "value": value,
                        "unit": str(metric.get("unit", "")),
                        "definition": definition,
                    }
                )
        issued = integer(meta.get("credit_issued_ns"))
        if issued is not None:
            found.append(
                {
                    "leg": leg,
                    "quantity": "credit_to_start",
                    "value": (meta["request_start_ns"] - issued) / 1e6,
                    "unit": "ms",
                    "definition": "request start - credit issued: the load generator's own wait",
                }
            )
    return found
