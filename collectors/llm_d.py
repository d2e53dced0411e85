"""llm-d's spans: the endpoint picker (EPP) behind the gateway, and the sidecar that sends a request to prefill and decode.

Source: llm-d/llm-d-router (pkg/epp/requestcontrol, pkg/epp/scheduling, pkg/sidecar/proxy), 0.8 to 0.10 and later; before that
llm-d-inference-scheduler and gateway-api-inference-extension. Names changed with every release, attributes did not:
spans are told by scope and attribute prefix. `gateway.request` lasts as long as the answer streams through;
the sidecar's `decode` hangs below its `prefill`, which has ended. Sidecar times in attributes are whole milliseconds, and
`true_ttft_ms` ends when decode is sent: no token was there, so it is nobody's first-token time. Clock: wall.
"""

from __future__ import annotations

import polars as pl

from pdtrace.model import WALL, Claims, Sink

from . import _llmd_picks as picks
from ._llmd_names import ENGINE, TITLE
from ._llmd_tree import placed
from ._spans_only import read, sniff

__all__ = ["CLAIMS", "SWITCHES", "TITLE", "interpret", "read", "sniff"]

_ON = "OTEL_EXPORTER_OTLP_ENDPOINT (and OTEL_TRACES_EXPORTER=otlp), unsampled: OTEL_TRACES_SAMPLER_ARG=1.0"
SWITCHES = {
    "router_time": f"tracing of the endpoint picker (--tracing=true) and of the sidecar: {_ON}",
    "router_decisions": f"tracing of the endpoint picker, 0.10 or newer (--tracing=true): {_ON}; or its log at -v 3",
    "explained_time": f"tracing of the endpoint picker, of the sidecar and of the pods: {_ON}",
    "client_view": "llm-d-benchmark's or inference-perf's file of single requests, or a client-side log",
}

_PROXY = "llm_d.pd_proxy."
CLAIMS = Claims(
    scopes=("llm-d*", "gateway-api-inference-extension*"),
    names=("llm_d.*", "gateway.request", "gateway.ext_proc.request", "gateway.request_orchestration"),
    prefixes=("llm_d.",),
    attributes={
        **dict.fromkeys(
            (_PROXY + "request_id", _PROXY + "prefill_target", _PROXY + "decode.target", _PROXY + "connector",
             "gen_ai.request.id", "gen_ai.request.model", "target_model", *picks.TEXTS), str,
        ),
        **dict.fromkeys((_PROXY + "prefill.status_code", *picks.COUNTS), int),
        **dict.fromkeys((_PROXY + name for name in picks.SUMMARY), float),
        **dict.fromkeys((_PROXY + "decode.streaming", _PROXY + "disaggregation_used"), bool),
    },
    resource_aliases={"service.instance.id": "instance"},
)  # fmt: skip


def interpret(spans: pl.DataFrame, facts: pl.DataFrame, out: Sink) -> None:
    """Legs of picker and sidecar, the calls to prefill and decode, choices, and the time that they took."""
    tree = placed(spans)
    parts = {place: tree.filter(pl.col("place") == place) for place in ("picker", "sidecar", "call")}  # fmt: skip
    chosen = picks.decisions(tree, spans)
    for table, frame in (
        ("legs", _picker_legs(tree, parts["picker"])),
        ("legs", _sidecar_legs(parts["sidecar"], parts["call"])),
        ("legs", _call_legs(parts["call"])),
        ("intervals", picks.intervals(tree, spans)),
        ("decisions", chosen),
        ("reported", picks.reported(tree)),
        ("worker_aliases", picks.pods(chosen)),
        ("workers", _workers(parts["picker"], "gateway")),
        ("workers", _workers(parts["sidecar"], "router")),
    ):
        if frame.height:
            out.add(table, frame, record=None)


_IDS = (
    "leg", "source", "worker", "trace_id", "span_id", "parent_span_id", "start_ns", "resolution_ns",
)  # fmt: skip


def _status() -> pl.Expr:
    return (
        pl.when(pl.col("status_code") == "error")
        .then(pl.lit("failed"))
        .when(pl.col("end_ns").is_null())
        .then(pl.lit("unknown"))
        .otherwise(pl.lit("completed"))
    )


def _picker_legs(tree: pl.DataFrame, pickers: pl.DataFrame) -> pl.DataFrame:
    """The picker sees a request from its headers to the end of its answer; of a bare choice no end is known."""
    told = (
        tree.drop_nulls("owner")
        .group_by("owner")
        .agg(
            pl.col("gen_ai.request.id").drop_nulls().first().alias("known_id"),
            pl.coalesce("target_model", "gen_ai.request.model").drop_nulls().first().alias("known_model"),
        )
    )  # fmt: skip
    whole = pl.col("name") != "gateway.request_orchestration"
    end = pl.when(whole).then("end_ns")
    named = pickers.join(told, left_on="leg", right_on="owner", how="left", maintain_order="left")
    return named.select(
        *_IDS,
        observer=pl.lit("gateway"),
        role=pl.lit("gateway"),
        role_basis=pl.lit("span"),
        container=pl.lit(value=False),
        request_id=pl.coalesce("gen_ai.request.id", "known_id"),
        external_id=pl.coalesce("gen_ai.request.id", "known_id"),
        clock=pl.lit(WALL),
        end_ns=end,
        e2e_ms=(end - pl.col("start_ns")) / 1e6,
        model=pl.coalesce("target_model", "gen_ai.request.model", "known_model"),
        status=pl.when(whole).then(_status()).otherwise(pl.lit("unknown")),
        error=pl.when(pl.col("status_code") == "error").then(pl.lit("error")),
    )


def _sidecar_legs(sidecars: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """The sidecar's own id of a request goes to both engines; whether its answer was streamed its decode call says."""
    told = calls.group_by("owner").agg(
        pl.col(_PROXY + "request_id").drop_nulls().first().alias("known_id"),
        pl.col(_PROXY + "decode.streaming").drop_nulls().first().alias("streaming"),
    )
    named = sidecars.join(told, left_on="leg", right_on="owner", how="left", maintain_order="left")
    return named.select(
        *_IDS, "streaming",
        observer=pl.lit("router"),
        role=pl.lit("router"),
        role_basis=pl.lit("span"),
        container=pl.lit(value=False),
        request_id=pl.coalesce(_PROXY + "request_id", "known_id"),
        external_id=pl.coalesce(_PROXY + "request_id", "known_id"),
        clock=pl.lit(WALL),
        end_ns=pl.col("end_ns"),
        e2e_ms=(pl.col("end_ns") - pl.col("start_ns")) / 1e6,
        status=_status(),
        error=pl.when(pl.col("status_code") == "error").then(pl.lit("error")),
    )  # fmt: skip


def _call_legs(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls only carry an engine's leg: whom they reached, never how long a phase took."""
    return calls.select(
        *_IDS,
        observer=pl.lit("router"),
        role=pl.col("half"),
        role_basis=pl.lit("span"),
        container=pl.lit(value=True),
        request_id=pl.col(_PROXY + "request_id"),
        clock=pl.lit(WALL),
        end_ns=pl.col("end_ns"),
        status=_status(),
    )


def _workers(spans: pl.DataFrame, role: str) -> pl.DataFrame:
    times = spans.group_by("worker").agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    return times.select(
        "worker",
        "start_ns",
        "end_ns",
        engine=pl.lit(ENGINE),
        role=pl.lit(role),
        role_basis=pl.lit("span"),
    )
