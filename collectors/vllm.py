"""vLLM spans: `llm_request` of V0 and V1, start-up spans, and the routers and P/D proxies in front.

Source: vllm-project/vllm (vllm/tracing, vllm/v1/engine/output_processor.py; 0.8.5 to 0.32),
vllm-project/router, vllm-project/production-stack. Start and end are wall clock of the API server;
latencies are seconds.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import polars as pl
import pyarrow as pa

from pdtrace.errors import UnknownFormat
from pdtrace.model import Claims, Head, Match, Sink, Source

from . import _vllm_layout as layout
from . import _vllm_measured as measured
from . import _vllm_routers as routers
from . import _vllm_workers as workers
from ._vllm_latency import PREFIX, QUANTITIES, V0_ONLY, V1_ONLY, reported
from ._vllm_requests import engine_legs, preemptions, request_spans

TITLE = "vLLM"

# What adds an item of the coverage list (view coverage_items).
SWITCHES = {
    "queue_wait": "vllm serve --otlp-traces-endpoint URL",
    "prefill_time": "vllm serve --otlp-traces-endpoint URL",
    "decode_time": "vllm serve --otlp-traces-endpoint URL",
    "first_token": "vllm serve --otlp-traces-endpoint URL, or vllm bench serve --save-detailed",
    "engine_steps": "vllm serve --enable-logging-iteration-details (0.14 or newer)",
    "engine_counters": "scrape /metrics once a second",
    "kv_usage": "scrape /metrics once a second, or --enable-logging-iteration-details (0.32 or newer)",
    "cached_tokens": "vllm serve --enable-prompt-tokens-details, and keep the usage of the answers",
    "token_times": "vllm bench serve --save-result --save-detailed, or a client that logs every chunk",
    "client_view": "vllm bench serve --save-result --save-detailed, or a client-side log",
    "kv_transfer": "no release up to 0.32 states it for a request; /metrics has histograms of all transfers",
    "outcome": "vllm serve --enable-log-requests",
    "router_time": "turn on tracing in the router or proxy in front",
    "router_decisions": "turn on tracing in the router or proxy in front",
}

_TOKENS = (
    "gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens",
    "gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens",
    "gen_ai.usage.cached_tokens", "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.num_sequences", "gen_ai.request.max_tokens",
)  # fmt: skip
_ROUTER_TEXTS = (
    "request.id", "request_id", "vllm.request_id", "vllm.request_phase", "vllm.backend_url",
    "vllm.routing_logic", "vllm.model", "url.full", "url.path", "http.url", "http.target",
    "http.route", "server.address", "error", "error.type",
)  # fmt: skip

CLAIMS = Claims(
    scopes=("vllm*", "pd_proxy", "pd-proxy"),
    names=(
        "router /*",
        "proxy.request",
        "proxy.prefill",
        "proxy.decode",
        *measured.CHILD_SPANS,
    ),
    # TensorRT-LLM's tracing is a copy of vLLM's; these keys only vLLM writes under that name.
    shared_names={
        "llm_request": (
            *(PREFIX + name for name in (*V1_ONLY, *V0_ONLY)),
            "gen_ai.usage.num_sequences",
        )
    },
    prefixes=("vllm.",),
    attributes={
        **{PREFIX + name: float for name in QUANTITIES},
        **dict.fromkeys(_TOKENS, int),
        **dict.fromkeys(
            ("gen_ai.request.id", "gen_ai.response.model", "gen_ai.request.model"), str
        ),
        **dict.fromkeys(_ROUTER_TEXTS, str),
        **dict.fromkeys(("server.port", "http.response.status_code", "http.status_code"), int),
        "latency_ms": float,
        "vllm.is_streaming": bool,
    },
    resource_attributes=("vllm.process_kind",),
    resource_aliases={"service.instance.id": "instance", "vllm.process_id": "pid"},
)


def sniff(head: Head) -> Match | None:
    """Spans come through OTLP: no file is this collector's own."""
    return None


def read(source: Source, out: Sink) -> None:
    """Not a reader: `otlp` reads, this module says what the spans mean."""
    raise UnknownFormat(f"{source.path}: vLLM spans are read as OTLP", "give the OTLP dump itself")


def interpret(spans: pl.DataFrame, facts: pl.DataFrame, out: Sink) -> None:
    """Legs, intervals and reported values of vLLM's requests and of the routers before them."""
    proxied = routers.classified(spans)
    requests = request_spans(spans, facts)
    calls = routers.hops(proxied, requests)
    if not requests.is_empty():
        _interpret_engine(spans, requests, calls, out)
    if not proxied.is_empty():
        _interpret_routers(calls, routers.servers(proxied, calls), out)
    out.add("worker_aliases", workers.processes(spans), record=None)


def _interpret_engine(
    spans: pl.DataFrame, requests: pl.DataFrame, calls: pl.DataFrame, out: Sink
) -> None:
    states = measured.states(spans, requests)
    # Each of these keeps one core busy.
    with ThreadPoolExecutor(1, "pdtrace-vllm") as beside:
        told = beside.submit(_reported, requests)
        placed = beside.submit(_intervals, requests, states)
        out.add("legs", engine_legs(requests, calls, states), record=None)
        out.add("workers", workers.seen(requests, "vLLM"), record=None)
        out.add("worker_aliases", workers.called_addresses(calls), record=None)
        out.add("facts", workers.facts(requests), record=None)
        out.add("reported", told.result(), record=None)
        if not states.is_empty():
            out.add("events", preemptions(requests, states), record=None)
        out.add("intervals", placed.result(), record=None)


def _reported(requests: pl.DataFrame) -> pa.Table:
    return layout.table(reported(layout.numbered(requests)), requests["leg"])


def _intervals(requests: pl.DataFrame, states: pl.DataFrame) -> pl.DataFrame | pa.Table:
    """Where the durations of the requests lie, and what child spans or events measured instead."""
    found = layout.placed(layout.numbered(requests))
    if states.is_empty():
        return layout.table(found, requests["leg"])
    named = found.with_columns(
        pl.col("semantics").cast(pl.String), leg=requests["leg"].gather(found["leg"])
    )
    kept = measured.without_replaced(named, states)
    return pl.concat([kept, measured.intervals(states, requests)])


def _interpret_routers(calls: pl.DataFrame, served: pl.DataFrame, out: Sink) -> None:
    out.add("legs", routers.server_legs(served), record=None)
    out.add("legs", routers.hop_legs(calls), record=None)
    out.add("intervals", routers.intervals(served), record=None)
    out.add("reported", routers.reported(served), record=None)
    out.add("decisions", routers.decisions(calls, served), record=None)
    for (router,), part in served.group_by("router"):
        out.add("workers", workers.seen(part, str(router), "router"), record=None)
