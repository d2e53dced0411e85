"""pdtrace's own spans (scope `pdtrace`): requests, phases, token times, transfers, choices, engine steps.

Source: pdtrace/semconv.py. Clock: wall of the process that emits them, nanoseconds.
"""

from __future__ import annotations

import polars as pl

from pdtrace import model
from pdtrace import semconv as s
from pdtrace.model import Claims, Sink

from ._pdtrace_steps import ATTRIBUTES, arrays_of, members, steps
from ._spans_only import read, sniff

__all__ = ["CLAIMS", "TITLE", "interpret", "read", "sniff"]

TITLE = "pdtrace instrumentation (spans)"

_TEXTS = (
    s.REQUEST_MODEL,
    s.RESPONSE_FINISH_REASONS,
    s.CONVERSATION_ID,
    s.USER_ID,
    s.HTTP_ROUTE,
    s.ERROR_TYPE,
    s.REQUEST_ID,
    s.ENGINE_REQUEST_ID,
    s.REMOTE_REQUEST_ID,
    s.WORKER_ROLE,
    s.PHASE_DETAIL,
    s.TOKEN_TIMES_US,
    s.TOKEN_COUNTS,
    s.TOKEN_EMISSION,
    s.KV_BACKEND,
    s.KV_DIRECTION,
    s.KV_SOURCE,
    s.KV_DESTINATION,
    s.KV_ROOM,
    s.ROUTER_POLICY,
    s.ROUTER_WORKER,
)
_COUNTS = (
    s.INPUT_TOKENS,
    s.OUTPUT_TOKENS,
    s.CACHED_TOKENS,
    s.REQUEST_MAX_TOKENS,
    s.HTTP_STATUS,
    s.ATTEMPT,
    s.STREAM_INDEX,
    s.TURN,
    s.FIRST_TOKEN_NS,
    s.KV_BYTES,
    s.ROUTER_OVERLAP_TOKENS,
    s.ROUTER_CANDIDATES,
    s.PREEMPTIONS,
)

CLAIMS = Claims(
    scopes=(s.SCOPE,),
    names=(s.SPAN_REQUEST, s.SPAN_DISPATCH, s.SPAN_STEPS, *s.PHASE_SPANS),
    attributes={
        **dict.fromkeys(_TEXTS, str),
        **dict.fromkeys(_COUNTS, int),
        **ATTRIBUTES,
        s.REQUEST_STREAM: bool,
        s.ABORTED: bool,
        s.ROUTER_COST: float,
    },
)
_TTFT = "request span start - first token, same process"
_ENGINE_ROLES = ("prefill", "decode", "aggregated")


def interpret(spans: pl.DataFrame, facts: pl.DataFrame, out: Sink) -> None:
    """Request and dispatch spans as legs, phase spans as intervals of their parent."""
    mine = spans.filter("mine").with_columns(leg=pl.format("{}/{}", "trace_id", "span_id"))
    requests = mine.filter(pl.col("name").is_in([s.SPAN_REQUEST, s.SPAN_DISPATCH]))
    phases = (
        mine.filter(pl.col("name").is_in(list(s.PHASE_SPANS)))
        .join(
            requests.select(
                "trace_id", parent_span_id="span_id", parent_leg="leg", role=s.WORKER_ROLE
            ),
            on=["trace_id", "parent_span_id"],
            how="left",
            maintain_order="left",
        )
        .with_columns(
            parent_leg=pl.coalesce("parent_leg", pl.format("{}/{}", "trace_id", "parent_span_id"))
        )
    )
    for table, frame in (
        ("legs", _legs(requests)),
        ("intervals", _intervals(phases)),
        ("streams", _streams(requests)),
        ("transfers", _transfers(phases)),
        ("decisions", _decisions(phases)),
        ("steps", steps(mine)),
        ("step_members", members(mine)),
        ("events", _preemptions(requests)),
    ):
        if frame.height:
            out.add(table, frame)


def _preemptions(requests: pl.DataFrame) -> pl.DataFrame:
    """How often each request was put off; when is not known."""
    return requests.filter(pl.col(s.PREEMPTIONS) > 0).select(
        "source",
        "worker",
        pl.lit("preemption").alias("kind"),
        pl.lit("warning").alias("severity"),
        pl.coalesce(s.ENGINE_REQUEST_ID, s.REQUEST_ID).alias("request_id"),
        pl.col(s.PREEMPTIONS).alias("count"),
    )


def _observer() -> pl.Expr:
    """Engines by their role; a span without a role is an engine's."""
    role = pl.col(s.WORKER_ROLE)
    return (
        pl.when(role.is_in(_ENGINE_ROLES) | ~role.is_in(model.OBSERVERS))
        .then(pl.lit("engine"))
        .otherwise(role.fill_null("engine"))
    )


def _legs(requests: pl.DataFrame) -> pl.DataFrame:
    first, start = pl.col(s.FIRST_TOKEN_NS), pl.col("start_ns")
    last = first + _offsets(s.TOKEN_TIMES_US).list.max() * 1000
    failed = (
        (pl.col("status_code") == "error")
        | (pl.col(s.HTTP_STATUS) >= 400)
        | pl.col(s.ERROR_TYPE).is_not_null()
    )
    e2e_ms, ttft_ms = (pl.col("end_ns") - start) / 1e6, (first - start) / 1e6
    decode_ms = (pl.coalesce(last, "end_ns") - first) / 1e6
    tokens = pl.col(s.OUTPUT_TOKENS)
    return requests.select(
        "leg",
        "source",
        "worker",
        _observer().alias("observer"),
        pl.col(s.WORKER_ROLE).alias("role"),
        pl.when(pl.col(s.WORKER_ROLE).is_not_null()).then(pl.lit("span")).alias("role_basis"),
        (pl.col("name") == s.SPAN_DISPATCH).alias("container"),
        "trace_id",
        "span_id",
        "parent_span_id",
        pl.coalesce(s.ENGINE_REQUEST_ID, s.REQUEST_ID).alias("request_id"),
        pl.col(s.REQUEST_ID).alias("external_id"),
        pl.col(s.REMOTE_REQUEST_ID).alias("remote_id"),
        pl.col(s.KV_ROOM).alias("bootstrap_room"),
        pl.col(s.CONVERSATION_ID).alias("session"),
        pl.col(s.USER_ID).alias("tenant"),
        pl.col(s.HTTP_ROUTE).alias("route"),
        pl.col(s.TURN).alias("turn"),
        pl.col(s.ATTEMPT).alias("attempt"),
        pl.col(s.STREAM_INDEX).alias("stream"),
        pl.lit(model.WALL).alias("clock"),
        "start_ns",
        first.alias("first_token_ns"),
        last.alias("last_token_ns"),
        "end_ns",
        "resolution_ns",
        ttft_ms.alias("ttft_ms"),
        e2e_ms.alias("e2e_ms"),
        pl.when(tokens > 1).then(decode_ms / (tokens - 1)).alias("tpot_ms"),
        pl.when(first.is_not_null()).then(pl.lit(_TTFT)).alias("ttft_definition"),
        pl.when(pl.col(s.WORKER_ROLE) == "prefill")
        .then(pl.lit(value=False))
        .alias("first_token_delivered"),
        pl.col(s.REQUEST_MODEL).alias("model"),
        pl.col(s.INPUT_TOKENS).alias("prompt_tokens"),
        pl.col(s.CACHED_TOKENS).alias("cached_tokens"),
        tokens.alias("output_tokens"),
        pl.col(s.REQUEST_MAX_TOKENS).alias("max_tokens"),
        pl.col(s.REQUEST_STREAM).alias("streaming"),
        pl.when(pl.col(s.ABORTED))
        .then(pl.lit("aborted"))
        .when(failed.fill_null(value=False))
        .then(pl.lit("failed"))
        .when(pl.col("end_ns").is_null())
        .then(pl.lit("unknown"))
        .otherwise(pl.lit("completed"))
        .alias("status"),
        pl.col(s.RESPONSE_FINISH_REASONS).str.extract(r"([A-Za-z_]+)", 1).alias("finish_reason"),
        pl.coalesce(
            s.ERROR_TYPE,
            pl.when(pl.col(s.HTTP_STATUS) >= 400).then(pl.col(s.HTTP_STATUS).cast(pl.String)),
        ).alias("error"),
    )


def _offsets(key: str) -> pl.Expr:
    return arrays_of(key, pl.Int64)


def _intervals(phases: pl.DataFrame) -> pl.DataFrame:
    """Phase spans; a decode worker's queue is decode_queue unless the span says its detail."""
    named = pl.col("name").replace_strict(s.PHASE_SPANS, return_dtype=pl.String)
    waits = (named == "prefill_queue") & (pl.col("role") == "decode")
    detail = pl.when(pl.col(s.PHASE_DETAIL).is_in(list(model.PHASE_DETAILS))).then(s.PHASE_DETAIL)
    return phases.select(
        pl.col("parent_leg").alias("leg"),
        pl.coalesce(detail, pl.when(waits).then(pl.lit("decode_queue")).otherwise(named)).alias(
            "detail"
        ),
        "start_ns",
        "end_ns",
        pl.lit("measured").alias("basis"),
        pl.lit(model.WALL).alias("clock"),
        "resolution_ns",
        pl.col("end_ns").is_null().alias("censored"),
        pl.col("name").alias("semantics"),
    )


def _streams(requests: pl.DataFrame) -> pl.DataFrame:
    return requests.filter(pl.col(s.TOKEN_TIMES_US).is_not_null()).select(
        "source",
        "leg",
        pl.coalesce(s.STREAM_INDEX, pl.lit(0, dtype=pl.Int64)).alias("stream"),
        pl.col(s.FIRST_TOKEN_NS).alias("first_ns"),
        _offsets(s.TOKEN_TIMES_US)
        .list.diff(null_behavior="drop")
        .cast(pl.List(pl.Int32))
        .alias("gaps_us"),
        _offsets(s.TOKEN_COUNTS).cast(pl.List(pl.Int32)).alias("emission_tokens"),
        pl.coalesce(s.TOKEN_EMISSION, pl.lit("token")).alias("emission"),
        pl.lit(model.WALL).alias("clock"),
        _observer().alias("observer"),
    )


def _transfers(phases: pl.DataFrame) -> pl.DataFrame:
    moves = pl.col(s.PHASE_DETAIL).fill_null("kv_transfer").is_in(["kv_transfer", "kv_load"])
    return phases.filter((pl.col("name") == s.SPAN_KV_TRANSFER) & moves).select(
        "source",
        pl.col("parent_leg").alias("leg"),
        pl.col(s.REQUEST_ID).alias("request_id"),
        pl.col(s.KV_SOURCE).alias("source_worker"),
        pl.col(s.KV_DESTINATION).alias("destination_worker"),
        "start_ns",
        "end_ns",
        ((pl.col("end_ns") - pl.col("start_ns")) / 1e6).alias("duration_ms"),
        pl.col(s.KV_BYTES).alias("bytes"),
        pl.col(s.KV_BACKEND).alias("backend"),
        pl.col(s.KV_DIRECTION).alias("direction"),
        pl.when(pl.col("status_code") == "error")
        .then(pl.lit("failed"))
        .otherwise(pl.lit("completed"))
        .alias("outcome"),
    )


def _decisions(phases: pl.DataFrame) -> pl.DataFrame:
    chosen = pl.any_horizontal(pl.col(s.ROUTER_WORKER, s.ROUTER_POLICY).is_not_null())
    return phases.filter((pl.col("name") == s.SPAN_ROUTER) & chosen).select(
        "source",
        pl.col("parent_leg").alias("leg"),
        "trace_id",
        pl.col(s.REQUEST_ID).alias("request_id"),
        pl.col("worker").alias("router"),
        pl.col("start_ns").alias("time_ns"),
        ((pl.col("end_ns") - pl.col("start_ns")) / 1e6).alias("duration_ms"),
        pl.col(s.ROUTER_POLICY).alias("policy"),
        pl.col(s.ROUTER_WORKER).alias("worker"),
        pl.col(s.ROUTER_COST).alias("cost"),
        pl.col(s.ROUTER_OVERLAP_TOKENS).alias("overlap_tokens"),
        pl.col(s.ROUTER_CANDIDATES).alias("candidates"),
    )
