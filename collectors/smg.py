"""smg, the SGLang model gateway (also sglang-router): one span a call, with the workers that it chose.

Source: lightseekorg/smg, 1.13.0, model_gateway/src/middleware/logging.rs (span `http_request`,
kind INTERNAL) and src/observability/events.rs (when the call goes to the workers, and when their
response heads are there); sglang-router 0.3.2 writes `uri` where smg writes `path`. Numbers are
texts; `latency` is microseconds to the response head. The span ends with the stream. Clock: wall.
0.3.2 begins a trace of its own whatever its caller sent, and may lose spans of streams.
"""

from __future__ import annotations

import polars as pl

from pdtrace.model import Claims, Sink

from ._spans_only import read, sniff

__all__ = ["CLAIMS", "SWITCHES", "TITLE", "interpret", "read", "sniff"]
TITLE = "smg (SGLang model gateway), sglang-router"

SWITCHES = {
    "router_time": "smg launch --enable-trace --otlp-traces-endpoint HOST:PORT (gRPC)",
    "router_decisions": "smg launch --enable-trace --otlp-traces-endpoint HOST:PORT (gRPC)",
}

CLAIMS = Claims(
    scopes=("smg",),
    attributes={
        **dict.fromkeys(("method", "path", "uri", "request_id"), str),
        "status_code": int,
        "latency": int,
    },
)
# Calls that make tokens or vectors; the others (health, workers, models) are no requests.
_INFERENCE = (
    r"/(chat/)?completions\b|/generate\b|/responses\b|/messages\b|/embeddings?\b|/rerank\b|/score\b"
    r"|/classify\b|/encode\b"
)
_SENDING = r"^Sending (concurrent requests|request)"
_ADDRESS = r"://([^/?#\"]+)"
_URLS = {"prefill_url": "prefill", "decode_url": "decode", "url": None}
_LATENCY = "smg: call received to response head, as it states it; neither the call's duration nor its TTFT"  # fmt: skip


def interpret(spans: pl.DataFrame, facts: pl.DataFrame, out: Sink) -> None:
    """The gateway's legs, its decisions, and the time that they took."""
    calls = _calls(spans)
    if not calls.height:
        return
    choices = _choices(calls)
    sent = choices.group_by("leg").agg(
        pl.col("time_ns").min().alias("sent_ns")
    )  # retries send again
    calls = calls.join(sent, on="leg", how="left", maintain_order="left")
    out.add("legs", _legs(calls), record=None)
    out.add("intervals", _intervals(calls), record=None)
    out.add("reported", _reported(calls), record=None)
    out.add("decisions", _decisions(choices), record=None)
    out.add("workers", _workers(calls), record=None)


def _calls(spans: pl.DataFrame) -> pl.DataFrame:
    """Calls that make tokens, with `leg` and `route`."""
    route = pl.coalesce("path", "uri").str.replace(r"^[a-z]+://[^/]+", "").str.replace(r"[?#].*", "")  # fmt: skip
    return (
        spans.filter(pl.col("mine") & (pl.col("name") == "http_request"))
        .with_columns(
            pl.concat_str(["trace_id", "span_id"], separator="/").alias("leg"),
            route.alias("route"),
        )
        .filter(
            (pl.col("method").str.to_uppercase() == "POST")
            & pl.col("route").str.contains(_INFERENCE)
        )
    )


def _choices(calls: pl.DataFrame) -> pl.DataFrame:
    """One row per call to a worker: when, of which phase, to which address."""
    events = (
        calls.filter(pl.col("events").list.len() > 0)
        .explode("events")
        .with_columns(
            pl.col("events").struct.field("time_ns"),
            pl.col("events").struct.field("name").alias("event"),
            pl.col("events").struct.field("attributes"),
        )
        .filter(pl.col("event").str.contains(_SENDING))
        .sort("leg", "time_ns", maintain_order=True)
    )
    parts = [
        events.with_columns(
            pl.col("attributes")
            .str.json_path_match(f"$.{key}")
            .str.extract(_ADDRESS, 1)
            .alias("address"),
            pl.lit(phase or "aggregated").alias("phase"),
        )
        for key, phase in _URLS.items()
    ]
    known = pl.concat(parts).filter(pl.col("address").is_not_null())
    return known.sort("leg", "time_ns", "phase", descending=[False, False, True])


def _status() -> pl.Expr:
    code = pl.col("attribute.status_code")
    return (
        pl.when(code == 499)  # the client went away
        .then(pl.lit("aborted"))
        .when(code >= 400)
        .then(pl.lit("failed"))
        .when(code < 400)
        .then(pl.lit("completed"))
        .otherwise(pl.lit("unknown"))
    )


def _legs(calls: pl.DataFrame) -> pl.DataFrame:
    """The gateway's own view; when the first token passed through it, it does not say."""
    code = pl.col("attribute.status_code")
    return calls.select(
        "leg", "source", "worker", "trace_id", "span_id", "parent_span_id", "start_ns", "end_ns", "resolution_ns",
        "request_id", "route",
        pl.col("request_id").alias("external_id"),
        pl.lit("router").alias("observer"),
        pl.lit("router").alias("role"),
        pl.lit("span").alias("role_basis"),
        pl.lit(value=False).alias("container"),
        pl.lit("wall").alias("clock"),
        ((pl.col("end_ns") - pl.col("start_ns")) / 1e6).alias("e2e_ms"),
        _status().alias("status"),
        pl.when(code >= 400).then(pl.format("HTTP {}", code)).alias("error"),
    )  # fmt: skip


def _intervals(calls: pl.DataFrame) -> pl.DataFrame:
    """From the call's arrival until it goes to the workers: body, queue of the gateway, choice."""
    return calls.filter(pl.col("sent_ns") > pl.col("start_ns")).select(
        "leg",
        pl.lit("router_decide").alias("detail"),
        "start_ns",
        pl.col("sent_ns").alias("end_ns"),
        pl.lit("measured").alias("basis"),
        pl.lit("wall").alias("clock"),
        "resolution_ns",
        pl.lit(value=False).alias("censored"),
        pl.lit("call received to the call to the workers, waiting for admission within").alias("semantics"),
    )  # fmt: skip


def _reported(calls: pl.DataFrame) -> pl.DataFrame:
    return calls.filter(pl.col("latency").is_not_null()).select(
        "source",
        "leg",
        pl.lit("latency").alias("quantity"),
        (pl.col("latency") / 1e3).alias("value"),
        pl.lit("ms").alias("unit"),
        pl.lit(_LATENCY).alias("definition"),
    )


def _decisions(choices: pl.DataFrame) -> pl.DataFrame:
    """A choice of two workers took what it took once: its duration stands at the first."""
    first = pl.int_range(pl.len()).over("leg") == 0
    return choices.select(
        "source", "leg", "trace_id", "request_id", "time_ns", "phase",
        pl.col("worker").alias("router"),
        pl.when(first).then((pl.col("time_ns") - pl.col("start_ns")) / 1e6).alias("duration_ms"),
        pl.format("address:{}", "address").alias("worker"),
    )  # fmt: skip


def _workers(calls: pl.DataFrame) -> pl.DataFrame:
    times = calls.group_by("worker").agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    return times.select(
        "worker",
        pl.lit("smg").alias("engine"),
        pl.lit("router").alias("role"),
        pl.lit("span").alias("role_basis"),
        "start_ns",
        "end_ns",
    )
