"""NVIDIA Dynamo's spans and OTLP log records: frontend, router and workers of a request.

Source: ai-dynamo/dynamo 1.6.1 (spans of lib/runtime/src/{logging,telemetry}.rs and lib/llm);
older vocabularies (http-request with handle_payload only, prefill_routing, client_request) too.
Clock: wall. Numbers recorded late are strings; worker ids are u64 beyond 2**63 and stay text. A
request is keyed by its `request_id`, a UUID of Dynamo that frontend, router, workers, request
trace and log share.
"""

from __future__ import annotations

import polars as pl

from pdtrace.errors import UnreadableInput
from pdtrace.model import Claims, Head, Match, Sink, Source

from ._dynamo_intervals import intervals, with_choice
from ._dynamo_legs import (
    frontend_legs,
    frontend_rows,
    leg_id,
    route_rows,
    unseen_worker_rows,
    worker_legs,
    worker_rows,
)
from ._dynamo_names import (
    ENGINE,
    FACT_BLOCK_SIZE,
    LOG_FILE,
    REPORTED_ENGINE,
    REPORTED_SPAN,
    engine_worker,
    status_of,
)
from ._dynamo_request_trace import SCOPE, add_otlp_payloads, coverage
from ._dynamo_spans import Tree, tree

TITLE = "NVIDIA Dynamo"

# What adds an item of the coverage list (view coverage_items).
SWITCHES = {
    "queue_wait": "none up to 1.6 states it: the engine's queue lies inside the prefill; DYN_FPM_TRACE=1 with"
    " DYN_FPM_MODE=full shows how many waited at each step",
    "prefill_time": "DYN_REQUEST_TRACE=1 (needed to split prefill from KV wait where prefill and decode run side by side)",
    "decode_time": "OTEL_EXPORT_ENABLED=true",
    "first_token": "OTEL_EXPORT_ENABLED=true with streamed answers (request.ttft_ms of the request trace is the prefill worker's)",
    "token_times": "aiperf profile (profile_export.jsonl), or a client that logs every chunk",
    "client_view": "aiperf profile (profile_export.jsonl), or a client-side log",
    "engine_steps": "DYN_FPM_TRACE=1 and DYN_FPM_MODE=full",
    "engine_counters": "scrape DYN_SYSTEM_PORT/metrics of each worker once a second",
    "kv_usage": "scrape DYN_SYSTEM_PORT/metrics of each worker once a second",
    "cached_tokens": "DYN_REQUEST_TRACE=1 where one worker does prefill and decode; behind a split no record up to 1.6 is known to state what the prefill side found",
    "input_tokens": "DYN_REQUEST_TRACE=1, or OTEL_EXPORT_ENABLED=true",
    "output_tokens": "DYN_REQUEST_TRACE=1, or OTEL_EXPORT_ENABLED=true",
    "session": "send x-dynamo-session-id and turn on DYN_REQUEST_TRACE=1",
    "outcome": "OTEL_EXPORT_ENABLED=true with DYN_LIFECYCLE_TRACE_ENABLED=1",
    "explained_time": "OTEL_EXPORT_ENABLED=true, DYN_LIFECYCLE_TRACE_ENABLED=1 and DYN_REQUEST_TRACE=1",
    "router_time": "OTEL_EXPORT_ENABLED=true, or DYN_LOGGING_JSONL=true with DYN_LOGGING_SPAN_EVENTS=true",
    "router_decisions": "DYN_LOGGING_JSONL=true, or OTEL_EXPORT_ENABLED=true",
    "worker_ids": "OTEL_EXPORT_ENABLED=true, or DYN_REQUEST_TRACE=1",
    "kv_transfer": "no span up to 1.6 states it for a request; NIXL_TELEMETRY_ENABLE=y gives totals",
    "kv_transfer_bytes": "NIXL_TELEMETRY_ENABLE=y gives totals, not per request",
}

CLAIMS = Claims(
    names=(
        "http-request", "request.lifecycle", "request.preprocessing", "request.dispatch",
        "kv_router.*",
        "router.route_request", "handle_payload", "worker.admission", "worker.operation*",
        "engine.generate",
        "response.streaming*", "prefill_routing", "client_request",
    ),
    prefixes=("dynamo.lifecycle.", "dynamo.request."),
    attributes={
        "request_id": str, "x_request_id": str, "method": str, "uri": str, "model": str,
        "input_tokens": int, "output_tokens": int, "ttft_ms": float, "avg_itl_ms": float,
        "itl_p50_ms": float, "itl_p99_ms": float, "itl_max_ms": float,
        "prefill_worker_id": str, "decode_worker_id": str, "worker_id": str, "instance_id": str,
        "dp_rank": str, "component": str, "endpoint": str, "phase": str, "router_mode": str,
        "overlap_blocks": float, "logit": float, "request.attempt": int, "request.outcome": str,
        "error.type": str,
        "migration.tokens_completed": int, "finish_reason": str, "cancelled": bool,
        "disagg_role": str,
        "dynamo.request.id": str, "dynamo.operation.id": str, "dynamo.operation.role": str,
        "dynamo.process.epoch": str,
        "dynamo.session.id": str, "dynamo.session.source": str,
        "dynamo.request.terminal.outcome": str,
    },
    resource_aliases={LOG_FILE: "file"},
    log_scopes=("dynamo*", "request_span", "span_event", "log", "aisimulate*", "mm_routing",
    "_core"),
)  # fmt: skip

_REQUEST = ("trace_id", "rid")
REASON_COPY = "log record that was read already"


def sniff(head: Head) -> Match | None:
    """Spans arrive through otlp and dynamo_log; this module reads no file."""
    del head
    return None


def read(source: Source, out: Sink) -> None:
    """Refuse: see sniff()."""
    del out
    raise UnreadableInput(f"{source.path}: dynamo interprets spans, it reads no files")


def interpret(spans: pl.DataFrame, facts: pl.DataFrame, out: Sink) -> None:
    """Legs, intervals, reported values, router decisions and failed attempts from whole traces."""
    found = _on_frontends(tree(spans), out)
    frontends, workers = frontend_legs(found), worker_legs(found)
    _declare_workers(workers, out)
    for rows in (
        frontend_rows(frontends),
        route_rows(found.routes),
        unseen_worker_rows(found.routes),
        worker_rows(workers),
    ):
        _add(out, "legs", rows)
    _add(out, "intervals", intervals(found, frontends, workers, coverage(facts)))
    _add(out, "reported", _reported(frontends, workers))
    _add(out, "decisions", _decisions(found, facts))
    _add(out, "events", _failed_attempts(found))


def interpret_logs(records: pl.DataFrame, facts: pl.DataFrame, out: Sink) -> pl.DataFrame:
    """The same log records as in the JSONL log, and the request trace's `otel` sink.

    Returns source, record and reason of the records that gave no row.
    """
    # The same export may be there twice (.pb and .jsonl): a record is told by all that it says.
    told = [
        "time_ns",
        "scope_name",
        "event_name",
        "body",
        "trace_id",
        "span_id",
        "attributes",
        "service_name",
    ]
    ordered = records.sort("source", "record")
    records = ordered.unique(told, keep="first", maintain_order=True)
    copies = ordered.join(records, on=["source", "record"], how="anti")
    from ._dynamo_records import add_otlp_records  # two modules: only for who has such records

    payloads = pl.col("scope_name").fill_null("") == SCOPE
    unused = [
        *add_otlp_payloads(records.filter(payloads), facts, out),
        *add_otlp_records(records.filter(~payloads), facts, out),
    ]
    names = {"source": pl.Int32, "record": pl.Int64, "reason": pl.String}
    return pl.concat(
        [
            copies.select("source", "record", reason=pl.lit(REASON_COPY)).cast(names),  # type: ignore[arg-type]
            pl.DataFrame(unused, schema=names, orient="row"),
        ]
    )


def _add(out: Sink, table: str, rows: pl.DataFrame) -> None:
    if rows.height:
        out.add(table, rows)


def _on_frontends(found: Tree, out: Sink) -> Tree:
    """The tree with the frontend process behind each http-request and hop in column `worker`.

    A resource names the service only; the process stands in dynamo.process.epoch (`<pid>:<uuid>`)
    of the frontend's lifecycle spans and tells apart frontends that share a service name.
    """
    epochs = (
        found.others.filter(
            (pl.col("name") == "request.lifecycle") & pl.col("dynamo.process.epoch").is_not_null()
        )
        .group_by(_REQUEST)
        .agg(epoch=pl.col("dynamo.process.epoch").min())
    )
    requests = found.requests.join(epochs, on=_REQUEST, how="left")
    window = [pl.col("start_ns").min(), pl.col("end_ns").max()]
    processes = (
        requests.group_by("epoch", "worker", "service_name").agg(window).sort("epoch", "worker")
    )
    named = [
        {"epoch": row["epoch"], "worker": row["worker"], "frontend": _frontend_worker(row, out)}
        for row in processes.iter_rows(named=True)
    ]
    names = pl.DataFrame(
        named, schema={"epoch": pl.String, "worker": pl.String, "frontend": pl.String}
    )
    requests = (
        requests.join(
            names.unique(["epoch", "worker"]), on=["epoch", "worker"], how="left", nulls_equal=True
        )
        .with_columns(worker="frontend")
        .drop("epoch", "frontend")
    )
    owner = requests.select(*_REQUEST, frontend="worker").unique(_REQUEST)
    routes = (
        found.routes.join(owner, on=_REQUEST, how="left")
        .with_columns(worker=pl.coalesce("frontend", "worker"))
        .drop("frontend")
    )
    return Tree(requests, routes, found.workers, found.others)


def _frontend_worker(row: dict[str, str], out: Sink) -> str | None:
    """Declare one frontend process and return its id; a strong name of the resource is kept
    beside."""
    if row["epoch"] is None:
        if row["worker"] is not None:
            out.add(
                "workers",
                [
                    {
                        "worker": row["worker"],
                        "role": "frontend",
                        "role_basis": "span",
                        "engine": ENGINE,
                    }
                ],
            )
        return row["worker"]
    worker = out.worker(
        {"instance": row["epoch"], "service": row["service_name"]},
        role="frontend", role_basis="span", engine=ENGINE, name=row["service_name"],
        start_ns=row["start_ns"], end_ns=row["end_ns"],  # type: ignore[arg-type]
    )  # fmt: skip
    if row["worker"] and not row["worker"].startswith("service:"):
        out.add(
            "worker_aliases", [{"worker": row["worker"], "kind": "instance", "value": row["epoch"]}]
        )
    return worker


def _declare_workers(workers: pl.DataFrame, out: Sink) -> None:
    """The worker instances that handle_payload names, with the role that most of its requests
    give."""
    instances = (
        workers.filter(pl.col("instance_id").is_not_null())
        .group_by("instance_id", "service_name")
        .agg(
            role=pl.col("role").drop_nulls().mode().sort().first(),
            start_ns=pl.col("start_ns").min(),
            end_ns=pl.col("end_ns").max(),
        )
        .sort("instance_id", "service_name")
    )
    for row in instances.iter_rows(named=True):
        out.worker(
            {"worker_id": row["instance_id"], "service": row["service_name"]},
            role=row["role"], role_basis="span" if row["role"] else None, engine=ENGINE,
            name=row["service_name"], start_ns=row["start_ns"], end_ns=row["end_ns"],
        )  # fmt: skip


def _reported(frontends: pl.DataFrame, workers: pl.DataFrame) -> pl.DataFrame:
    """Latencies that Dynamo states of itself, each with what its code measures."""
    return pl.concat(
        [_said(frontends, key, key, text) for key, text in REPORTED_SPAN.items()]
        + [_said(workers, f"generate_{key}", key, text) for key, text in REPORTED_ENGINE.items()]
    )


def _said(frame: pl.DataFrame, column: str, quantity: str, definition: str) -> pl.DataFrame:
    return frame.filter(pl.col(column).is_not_null()).select(
        "source",
        leg=leg_id(),
        quantity=pl.lit(quantity),
        value=pl.col(column),
        unit=pl.lit("ms"),
        definition=pl.lit(definition),
    )


def _decisions(found: Tree, facts: pl.DataFrame) -> pl.DataFrame:
    """The router's choices as the hops show them; cost and load stand in the log only."""
    sizes = facts.filter(pl.col("key") == FACT_BLOCK_SIZE).select(
        engine="worker", block=pl.col("value").cast(pl.Int64, strict=False)
    )
    common = sizes["block"].drop_nulls().unique()
    only = int(common[0]) if len(common) == 1 else None
    hops = with_choice(found).with_columns(engine=engine_worker(pl.col("instance")))
    hops = hops.join(sizes.drop_nulls().unique("engine"), on="engine", how="left").with_columns(
        block=pl.coalesce("block", pl.lit(only, dtype=pl.Int64))
    )
    kv = pl.when(pl.col("name").str.starts_with("kv_router.")).then(pl.lit("kv"))
    duration = (pl.col("choice_end_ns") - pl.col("choice_start_ns")).cast(pl.Float64) / 1e6
    return hops.filter(pl.col("instance").is_not_null()).select(
        "source",
        "trace_id",
        leg=leg_id(),
        request_id=pl.col("rid"),
        router=pl.col("worker"),
        time_ns=pl.coalesce("choice_end_ns", "start_ns"),
        duration_ms=duration,
        phase=pl.col("role"),
        policy=pl.coalesce("router_mode", kv).str.to_lowercase(),
        worker=pl.col("engine"),
        cost=pl.col("logit"),
        overlap_tokens=(pl.col("overlap_blocks") * pl.col("block")).round().cast(pl.Int64),
    )


def _failed_attempts(found: Tree) -> pl.DataFrame:
    """One event per attempt that failed; cancellations are the user's."""
    failed = found.routes.filter(status_of(pl.col("outcome")) == "failed")
    return failed.select(
        "source",
        "resolution_ns",
        worker=pl.coalesce(engine_worker(pl.col("instance")), "worker"),
        time_ns=pl.coalesce("end_ns", "start_ns"),
        kind=pl.lit("failure"),
        severity=pl.lit("warning"),
        request_id=pl.col("rid"),
        detail=pl.concat_str(pl.lit("attempt failed: "), pl.coalesce("error.type", "outcome")),
    )
