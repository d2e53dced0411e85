"""SGLang's own spans: requests, their stages on every side, token times, KV movements.

Source: sgl-project/sglang, 0.5.3 to 0.5.23, python/sglang/srt/tracing/trace.py (to 0.5.8) and
srt/observability/{trace,req_time_stats,mooncake_trace}.py. Scope `sglang server`, every span INTERNAL.
The sides of a P/D pair know one another by `bootstrap_room` (hex in spans); Mooncake's sender threads
are a trace of their own in the same room. Clock: wall, from each process's monotonic clock.
"""

from __future__ import annotations

import polars as pl

from pdtrace import model
from pdtrace.model import Claims, Sink

from ._spans_only import read, sniff

__all__ = ["CLAIMS", "ENGINE", "TITLE", "interpret", "read", "sniff"]
TITLE = "SGLang (spans)"
ENGINE = "SGLang"

_LATENCIES = {
    "gen_ai.latency.time_to_first_token": "request created in the API server to its first token there",
    "gen_ai.latency.e2e": "request created in the API server to its end there",
    "gen_ai.latency.time_in_model_prefill": "handed to the scheduler to the first token: the queue is inside",
    "gen_ai.latency.time_in_model_decode": "first token to the end in the API server",
    "gen_ai.latency.time_in_model_inference": "handed to the scheduler to the end: the queue is inside",
}
_TTFT = "gen_ai.latency.time_to_first_token"
_COUNTS = {
    "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "cached_tokens": "gen_ai.usage.cached_tokens",
    "output_tokens": "gen_ai.usage.completion_tokens",
    "max_tokens": "gen_ai.request.max_tokens",
}
_REASONS = "gen_ai.response.finish_reasons"
_MODEL = "gen_ai.response.model"

CLAIMS = Claims(
    scopes=("sglang server",),
    attributes={
        **dict.fromkeys(("rid", "module", "bootstrap_room", "host_id", "thread_label"), str),
        **dict.fromkeys((_REASONS, _MODEL, "err_type"), str),
        **dict.fromkeys(("pid", "tp_rank", "pp_rank", "dp_rank", "status_code"), int),
        **dict.fromkeys(_COUNTS.values(), int),
        **dict.fromkeys(_LATENCIES, float),
    },
)


def interpret(spans: pl.DataFrame, facts: pl.DataFrame, out: Sink) -> None:
    """Requests as legs of the server that had them, their stages as intervals."""
    from . import _sglang_intervals as times  # only for who has such spans
    from ._sglang_spans import tree
    from ._sglang_workers import with_servers

    found = tree(spans)
    if not found.requests.height and not found.sends.height:
        return
    requests = with_servers(_outcomes(found.requests, found.threads), found.threads, out)
    seen = pl.col("start_ns") + (pl.col(_TTFT) * 1e9).round().cast(pl.Int64, strict=False)
    requests = times.with_tokens(requests, found.stages).with_columns(
        seen_ns=pl.when(pl.col(_TTFT) > 0).then(seen)
    )
    for table, frame in (
        ("legs", _legs(requests)),
        ("intervals", times.intervals(found, requests)),
        ("streams", times.streams(requests)),
        ("transfers", times.transfers(found, requests)),
        ("events", times.retractions(found, requests)),
        ("reported", _reported(requests)),
    ):
        if frame.height:
            out.add(table, frame)


def _outcomes(requests: pl.DataFrame, threads: pl.DataFrame) -> pl.DataFrame:
    """Adds rank, finish_reason, status, error. An abort with an HTTP status is the server's refusal."""
    code = pl.col("attribute.status_code")
    told = threads.group_by("leg").agg(
        rank=pl.col("dp_rank").filter("schedules").drop_nulls().first().cast(pl.String),
        broken=(pl.col("status_code") == "error").any(),
        http=code.filter(code >= 400).max(),
        err_type_below=pl.col("err_type").drop_nulls().first(),
    )
    reason = pl.col(_REASONS).str.extract(r"([A-Za-z_]+)", 1)
    stopped = pl.col("broken").fill_null(value=False) | (reason == "abort").fill_null(value=False)
    return requests.join(told, on="leg", how="left", maintain_order="left").with_columns(
        finish_reason=reason,
        status=pl.when(stopped & pl.col("http").is_not_null())
        .then(pl.lit("failed"))
        .when(stopped)
        .then(pl.lit("aborted"))
        .when(pl.col("end_ns").is_null())
        .then(pl.lit("unknown"))
        .otherwise(pl.lit("completed")),
        error=pl.coalesce("err_type_below", pl.format("HTTP {}", "http")),
    )


def _legs(requests: pl.DataFrame) -> pl.DataFrame:
    router = pl.col("role") == "router"
    start, end = pl.col("start_ns"), pl.col("end_ns")
    first = pl.coalesce("seen_ns", "made_ns")
    tokens = pl.col(_COUNTS["output_tokens"])
    last = pl.max_horizontal(pl.col("loops").list.last(), first)
    return requests.select(
        "leg", "source", "worker", "role", "rank", "trace_id", "span_id", "parent_span_id", "start_ns", "end_ns",
        "resolution_ns", "request_id", "role_basis", "status", "finish_reason", "error",
        pl.col("request_id").alias("external_id"),
        pl.col("room").alias("bootstrap_room"),
        pl.when(router).then(pl.lit("router")).otherwise(pl.lit("engine")).alias("observer"),
        pl.lit(value=False).alias("container"),
        pl.lit(model.WALL).alias("clock"),
        first.alias("first_token_ns"),
        pl.when(pl.col("loops").list.len() > 0).then(last).alias("last_token_ns"),
        ((first - start) / 1e6).alias("ttft_ms"),
        ((end - start) / 1e6).alias("e2e_ms"),
        pl.when(tokens > 1).then((end - first) / 1e6 / (tokens - 1)).alias("tpot_ms"),
        pl.when(pl.col("seen_ns").is_not_null())
        .then(pl.lit("request created to first token, both in the API server"))
        .when(first.is_not_null())
        .then(pl.lit("request created in the API server to first token made by the scheduler"))
        .alias("ttft_definition"),
        pl.when(pl.col("role") == "prefill").then(pl.lit(value=False)).alias("first_token_delivered"),
        pl.col(_MODEL).alias("model"),
        *(pl.col(key).alias(name) for name, key in _COUNTS.items()),
    )  # fmt: skip


def _reported(requests: pl.DataFrame) -> pl.DataFrame:
    return pl.concat(
        requests.filter(pl.col(key).is_not_null()).select(
            "source",
            "leg",
            pl.lit(key).alias("quantity"),
            pl.col(key).alias("value"),
            pl.lit("s").alias("unit"),
            pl.lit(f"SGLang: {text}").alias("definition"),
        )
        for key, text in _LATENCIES.items()
    )
