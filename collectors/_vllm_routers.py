"""Routers in front of vLLM: vllm-router (Rust), production-stack's router (Python), P/D proxies.

Source: vllm-project/router (SERVER `{METHOD} {route}`, CLIENT children with vllm.request_phase;
CLIENT ends are late by up to seconds, `latency_ms` is the time to response headers),
vllm-project/production-stack (`router ...` and `process_request`), proxies with spans
proxy.request, proxy.prefill, proxy.decode and the event first_chunk.
"""

from __future__ import annotations

import polars as pl

from ._vllm_layout import rows

# Routes that make tokens or vectors; the others (health, metrics, models, admin) are no requests.
_INFERENCE = (
    r"/(chat/|text_)?completions?\b|/generate|/responses\b|/messages\b|/embeddings?\b|/rerank|/score\b"
    r"|/classify\b|/pooling\b|/invocations\b|/audio/"
)
_SHARED_COLUMNS = (
    "leg", "source", "worker", "trace_id", "span_id", "parent_span_id",
    "start_ns", "end_ns", "resolution_ns",
)  # fmt: skip
_HEADS = (
    0.5  # part of a router's spans shorter than their engine's from which on all end with heads
)
_FIRST_EVENTS = ["first_chunk", "first_token"]
_TTFT = "router: request received to the first chunk from the worker that decodes"
_LATENCY = (
    "vllm-router: request received to response headers; neither the request's latency nor its TTFT"
)


def _is_rust() -> pl.Expr:
    by_scope = pl.col("scope_name").is_in(["vllm-router", "vllm_router"])
    return by_scope | (
        (pl.col("service_name") == "vllm-router") & pl.col("name").str.contains(r"^[A-Z]+ /")
    )


def classified(spans: pl.DataFrame) -> pl.DataFrame:
    """Spans of routers with `router` (which one) and `part` (server or hop)."""
    name, kind = pl.col("name"), pl.col("kind")
    is_stack_hop = (name == "process_request") & (
        pl.col("vllm.backend_url").is_not_null() | pl.col("vllm.request_id").is_not_null()
    )
    router = (
        pl.when(name.str.starts_with("proxy."))
        .then(pl.lit("pd-proxy"))
        .when(name.str.starts_with("router /") | is_stack_hop)
        .then(pl.lit("production-stack router"))
        .when(_is_rust() | pl.col("vllm.request_phase").is_not_null())
        .then(pl.lit("vllm-router"))
    )
    is_hop = kind.is_in(["client", "producer"]) | name.is_in(
        ["proxy.prefill", "proxy.decode", "process_request"]
    )
    return (
        spans.filter(pl.col("mine"))
        .with_columns(router.alias("router"))
        .filter(pl.col("router").is_not_null() & ~name.str.contains(r"^(GET|HEAD|OPTIONS|DELETE) "))
        .with_columns(
            pl.when(is_hop).then(pl.lit("hop")).otherwise(pl.lit("server")).alias("part"),
            pl.concat_str(["trace_id", "span_id"], separator="/").alias("leg"),
            pl.coalesce(
                "vllm.request_phase", name.str.extract(r"^proxy\.(prefill|decode)$", 1)
            ).alias("phase"),
            pl.coalesce("http.response.status_code", "http.status_code").alias("code"),
        )
    )


def hops(routers: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """Calls to a worker: address, first token where stamped, and the engine's leg below."""
    calls = routers.filter(pl.col("part") == "hop")
    url = pl.coalesce("vllm.backend_url", "url.full", "http.url").str.extract(
        r"^[a-z]+://([^/?#]+)", 1
    )
    # server.address is a host or, from some releases, host:port already.
    has_port = pl.col("server.address").str.contains(r":\d+$")
    address = (
        pl.when(has_port | pl.col("server.port").is_null())
        .then(pl.col("server.address"))
        .otherwise(pl.format("{}:{}", "server.address", "server.port"))
    )
    below = requests.select(
        "trace_id",
        pl.col("parent_span_id").alias("span_id"),
        pl.col("worker").alias("engine_worker"),
        (pl.col("start_ns") + pl.col("window_ns")).alias("engine_end_ns"),
        pl.col("window_ns").alias("engine_ns"),
    )
    below = (
        below.filter(pl.col("span_id").is_not_null())
        .group_by("trace_id", "span_id")
        .agg(pl.col("engine_worker").min(), pl.col("engine_end_ns", "engine_ns").max())
    )
    order = (
        pl.col("start_ns")
        .rank("ordinal")
        .over("trace_id", "parent_span_id", "phase")
        .cast(pl.Int64)
        - 1
    )
    count = pl.len().over("trace_id", "parent_span_id", "phase")
    return (
        calls.with_columns(
            pl.coalesce(url, address).alias("address"),
            pl.when((count > 1) & pl.col("phase").is_not_null()).then(order).alias("attempt"),
        )
        .join(_first_tokens(calls), on="leg", how="left", maintain_order="left")
        .join(below, on=["trace_id", "span_id"], how="left", maintain_order="left")
    )


def _first_tokens(spans: pl.DataFrame) -> pl.DataFrame:
    """First-token events: leg, first_ns."""
    return (
        spans.select("leg", "events")
        .filter(pl.col("events").list.len() > 0)
        .explode("events")
        .unnest("events")
        .filter(pl.col("name").is_in(_FIRST_EVENTS))
        .group_by("leg")
        .agg(pl.col("time_ns").min().alias("first_ns"))
    )


def servers(routers: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """One row per request that a router served, with what its calls to workers say."""
    per_parent = calls.group_by("trace_id", pl.col("parent_span_id").alias("span_id")).agg(
        pl.col("start_ns").min().alias("first_call_ns"),
        pl.col("first_ns")
        .filter(pl.col("phase").fill_null("") != "prefill")
        .min()
        .alias("call_first_ns"),
        pl.col("end_ns").filter(pl.col("phase") == "prefill").max().alias("prefill_end_ns"),
        pl.col("engine_end_ns").filter(pl.col("phase") == "prefill").max(),
        pl.col("start_ns").filter(pl.col("phase") == "decode").min().alias("decode_call_ns"),
        pl.col("engine_ns").max(),
    )
    own = routers.filter(pl.col("part") == "server")
    route = pl.coalesce("http.route", "url.path", "http.target", "name")
    return (
        own.join(per_parent, on=["trace_id", "span_id"], how="left", maintain_order="left")
        .join(_first_tokens(own), on="leg", how="left", maintain_order="left")
        .with_columns(pl.coalesce("first_ns", "call_first_ns").alias("first_ns"), _end())
        .filter(
            (pl.col("router") == "pd-proxy")
            | route.str.contains(_INFERENCE)
            | pl.col("first_call_ns").is_not_null()
        )
    )


def _end() -> pl.Expr:
    """End of the request; unknown where the span is over before its stream is.

    A span that is left with the response's head (as `latency_ms` is) is shorter than what
    the engine below served: durations of two clocks compare, instants need not. Where most spans of
    a router show it, those without an engine's span end that way too.
    """
    over = pl.col("end_ns") - pl.col("start_ns") < pl.col("engine_ns")
    mostly = over.mean().over("worker") > _HEADS
    return (
        pl.when(over.fill_null(value=False) | mostly.fill_null(value=False))
        .then(None)
        .otherwise("end_ns")
        .alias("end_ns")
    )


def _status() -> pl.Expr:
    code = pl.col("code")
    failed = (code >= 400) | (pl.col("status_code") == "error") | pl.col("error").is_not_null()
    fine = (code < 400) | (pl.col("status_code") == "ok") | pl.col("first_ns").is_not_null()
    return (
        pl.when(code == 499)  # nginx's code for a client that went away; the routers took it over
        .then(pl.lit("aborted"))
        .when(failed.fill_null(value=False))
        .then(pl.lit("failed"))
        .when(fine.fill_null(value=False))
        .then(pl.lit("completed"))
        .otherwise(pl.lit("unknown"))
    )


def server_legs(served: pl.DataFrame) -> pl.DataFrame:
    """Legs of the routers' own view of a request."""
    first, start = pl.col("first_ns"), pl.col("start_ns")
    # The header's id goes to the engines as it is; they put their own prefix before it.
    request_id = pl.coalesce("request.id", "request_id", "vllm.request_id")
    return served.select(
        *_SHARED_COLUMNS,
        pl.lit("router").alias("observer"),
        pl.lit("router").alias("role"),
        pl.lit("span").alias("role_basis"),
        pl.lit(value=False).alias("container"),
        request_id.alias("request_id"),
        request_id.alias("external_id"),
        pl.lit("wall").alias("clock"),
        first.alias("first_token_ns"),
        ((first - start) / 1e6).alias("ttft_ms"),
        ((pl.col("end_ns") - start) / 1e6).alias("e2e_ms"),
        pl.when(first.is_not_null()).then(pl.lit(_TTFT)).alias("ttft_definition"),
        pl.when(first.is_not_null()).then(pl.lit(value=True)).alias("first_token_delivered"),
        pl.col("vllm.model").alias("model"),
        pl.col("vllm.is_streaming").alias("streaming"),
        _status().alias("status"),
        _error().alias("error"),
    )  # fmt: skip


def _error() -> pl.Expr:
    code = pl.col("code")
    return pl.coalesce(
        pl.when(code >= 400).then(pl.format("HTTP {}", code)),
        pl.col("error.type"),
        pl.when(pl.col("status_code") == "error").then(pl.lit("error")),
    )


def hop_legs(calls: pl.DataFrame) -> pl.DataFrame:
    """Legs of calls to workers: containers that only carry the engine's leg."""
    prefill_or_decode = pl.col("phase").is_in(["prefill", "decode"])
    return calls.select(
        *_SHARED_COLUMNS,
        "attempt",
        pl.lit("router").alias("observer"),
        pl.when(prefill_or_decode).then(pl.col("phase")).alias("role"),
        pl.when(prefill_or_decode).then(pl.lit("span")).alias("role_basis"),
        pl.lit(value=True).alias("container"),
        pl.lit("wall").alias("clock"),
        _status().alias("status"),
        _error().alias("error"),
    )  # fmt: skip


def intervals(served: pl.DataFrame) -> pl.DataFrame:
    """What routers do before, and between, their calls to workers."""
    call = pl.col("decode_call_ns")
    exact_ends = pl.col("router") == "pd-proxy"
    return pl.concat(
        [
            rows(
                served, "router_decide", pl.col("start_ns"), pl.col("first_call_ns"),
                basis="measured", semantics="request received to the first call to a worker",
            ),
            rows(
                served.filter(exact_ends), "dispatch", pl.col("prefill_end_ns"), call,
                basis="measured", semantics="prefill worker's answer to the decode call",
            ),
            rows(
                served.filter(~exact_ends), "bridge_wait", pl.col("engine_end_ns"), call,
                basis="measured", semantics="end on the prefill worker to the decode call",
            ),
        ]
    )  # fmt: skip


def reported(served: pl.DataFrame) -> pl.DataFrame:
    """vllm-router's latency_ms under its definition."""
    return served.filter(pl.col("latency_ms").is_not_null()).select(
        "source",
        "leg",
        pl.lit("latency_ms").alias("quantity"),
        pl.col("latency_ms").alias("value"),
        pl.lit("ms").alias("unit"),
        pl.lit(_LATENCY).alias("definition"),
    )


def decisions(calls: pl.DataFrame, served: pl.DataFrame) -> pl.DataFrame:
    """Which worker each call went to: the engine's id where its span is here, else the address."""
    parents = served.select(
        "trace_id",
        pl.col("span_id").alias("parent_span_id"),
        pl.col("leg").alias("router_leg"),
        (pl.col("first_call_ns") - pl.col("start_ns")).alias("decided_ns"),
        "first_call_ns",
        pl.coalesce("request.id", "request_id", "vllm.request_id").alias("served_id"),
    )
    chosen = pl.coalesce("engine_worker", pl.format("address:{}", "address"))
    phase = pl.col("phase").replace({"inference": "aggregated"})
    first = pl.col("start_ns") == pl.col("first_call_ns")
    return (
        calls.join(parents, on=["trace_id", "parent_span_id"], how="left", maintain_order="left")
        .select(
            "source",
            pl.col("router_leg").alias("leg"),
            "trace_id",
            pl.coalesce("served_id", "vllm.request_id").alias("request_id"),
            pl.col("worker").alias("router"),
            pl.col("start_ns").alias("time_ns"),
            pl.when(first).then(pl.col("decided_ns") / 1e6).alias("duration_ms"),
            phase.alias("phase"),
            pl.col("vllm.routing_logic").alias("policy"),
            chosen.alias("worker"),
        )
        .filter(pl.col("worker").is_not_null())
    )
