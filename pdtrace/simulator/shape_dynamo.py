"""NVIDIA Dynamo 1.6: frontend and worker spans, request trace, forward-pass metrics, client log.

P/D as in bootstrap mode: both hops are sent at once and run side by side, the KV moves while the
prefill worker holds its hop open. Spelling, units and precision follow dumps of the real system:
attributes recorded late are strings, steps are stamped in whole milliseconds at their end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pdtrace.simulator.engine import server_of
from pdtrace.simulator.otlp import Clock, Ids, Span, clocks, write_spans
from pdtrace.simulator.run import Run
from pdtrace.simulator.scenario import BLOCK_TOKENS, LOAD_WEIGHT
from pdtrace.simulator.shape_dynamo_spans import MS, NEAR_NS, Maker
from pdtrace.simulator.streams import NO_STREAM, servers, streams, tries_by_request
from pdtrace.simulator.trouble import REFUSED

SCHEMA_TRACE, SCHEMA_FPM = "dynamo.request.trace.v1", "dynamo.fpm.trace.v1"


def write(run: Run, folder: Path) -> None:
    """Spans of all processes, the frontend's log, request trace, steps by worker, client log."""
    ids, clock, seen = Ids(run), clocks(run), streams(run)
    tries = tries_by_request(run)
    spans: list[Span] = []
    log: list[dict[str, Any]] = []
    trace: list[dict[str, Any]] = []
    client: list[dict[str, Any]] = []
    for row in run.requests.sort("arrival_ns", "request").iter_rows(named=True):
        if row["end_ns"] is None:
            continue
        stream = seen.get(row["request"], NO_STREAM)
        maker = Maker(run, ids, clock, row, stream, tries.get(row["request"], []))
        spans += maker.spans()
        log += _choices(maker)
        if row["outcome"] == "completed":
            trace.append(_record(maker))
        client.append(_client(maker))
    write_spans(folder / "otlp_traces.jsonl", spans)
    _write_lines(folder / "frontend.log.jsonl", sorted(log, key=lambda line: str(line["time"])))
    first = min((line["event"]["event_time_unix_ms"] for line in trace), default=0)
    trace.sort(key=lambda line: int(line["event"]["event_time_unix_ms"]))
    for line in trace:
        line["timestamp"] = line["event"]["event_time_unix_ms"] - first + 1000
    _write_lines(folder / "request_trace.jsonl", trace)
    _write_lines(folder / "client.jsonl", client)
    for server, ranks in servers(run).items():
        number = ids.number(server)
        lines = [line for worker in ranks for line in _steps(run, worker, number, clock[worker])]
        lines.sort(key=lambda line: int(line["event"]["observed_at_unix_ms"]))
        _write_lines(folder / f"fpm.{number}.000000.jsonl", lines)


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def _choices(maker: Maker) -> Iterator[dict[str, Any]]:
    """The router's choice of each hop, as the frontend logs it."""
    row = maker.row
    for phase, worker, *_ in maker.hops():
        at = maker.clock["router"](row["route_end_ns"])
        uncached = row["prompt_tokens"] - row["believed_tokens"]
        yield {
            "time": datetime.fromtimestamp(at // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
            + f".{at // 1000 % 1_000_000:06d}Z",
            "level": "INFO",
            "file": "/opt/dynamo/lib/kv-router/src/scheduling/selector/mod.rs",
            "line": 342,
            "target": "dynamo_kv_router::scheduling::selector",
            "message": "Selected worker",
            "disk_blocks": 0,
            "dp_rank": maker.rank(worker),
            "effective_cached_blocks": 0.0
            if phase == "Decode"
            else row["believed_tokens"] / BLOCK_TOKENS,
            "host_pinned_blocks": 0,
            "logit": (uncached + LOAD_WEIGHT * row["load"]) / BLOCK_TOKENS,
            "request_id": maker.id,
            "router_mode": "kv",
            "total_kv_blocks": f"Some({maker.run.scenario.kv_blocks})",
            "worker_id": maker.ids.number(server_of(worker)[0]),
            "worker_type": "prefill" if phase == "Prefill" else "decode",
        }


def _record(maker: Maker) -> dict[str, Any]:
    """The request trace's line; its first token is that of the worker which prefilled."""
    row, at = maker.row, maker.clock["router"]
    start = row["route_start_ns"]
    made = (row["prefill_end_ns"] if maker.split else row["first_token_ns"]) + NEAR_NS
    wait, ttft = row["route_end_ns"] - start, made - start
    request: dict[str, Any] = {"request_id": maker.id}
    if row["session"]:
        request |= {"x_request_id": maker.x_id, "model": "opt-13b"}
    request |= {
        "input_tokens": row["prompt_tokens"],
        "output_tokens": row["output_tokens"],
        "cached_tokens": row["cached_tokens"],
        "request_received_ms": at(start) // MS,
        "prefill_wait_time_ms": wait / MS,
        "prefill_time_ms": (ttft - wait) / MS,
        "ttft_ms": ttft / MS,
        "total_time_ms": (maker.last - start) / MS,
        "avg_itl_ms": maker.itl(ttft),
        "kv_hit_rate": row["believed_tokens"] / row["prompt_tokens"],
    }
    if maker.split:
        request["kv_transfer_estimated_latency_ms"] = 0.0
    request["queue_depth"] = 0
    request["worker"] = {
        "prefill_worker_id": int(maker.worker_id("prefill_worker")),
        "prefill_dp_rank": int(maker.rank(row["prefill_worker"] or row["decode_worker"])),
        "decode_worker_id": int(maker.worker_id("decode_worker")),
        "decode_dp_rank": int(maker.rank(row["decode_worker"])),
    }
    request["replay"] = {
        "trace_block_size": BLOCK_TOKENS,
        "input_length": row["prompt_tokens"],
        "input_sequence_hashes": _hashes(maker),
    }
    event: dict[str, Any] = {
        "schema": SCHEMA_TRACE,
        "event_type": "request_end",
        "event_time_unix_ms": at(maker.last) // MS,
    }
    if row["session"]:
        event["agent_context"] = {"session_id": row["session"]}
    return {"timestamp": 0, "event": event | {"request": request}}


def _client(maker: Maker) -> dict[str, Any]:
    """What a client that writes down its chunks has."""
    row, at = maker.row, maker.clock["router"]
    n, refused = row["output_tokens"], {REFUSED: 503}.get(row["error"], 500)
    good = row["outcome"] == "completed"
    made: dict[str, Any] = {
        "prompt_tokens": row["prompt_tokens"],
        "completion_tokens": n,
        "total_tokens": row["prompt_tokens"] + n,
        "prompt_tokens_details": {"cached_tokens": row["cached_tokens"]},
    }
    return {
        "x_request_id": maker.x_id,
        "trace_id": maker.trace,
        "parent_span_id": maker.span_id("client"),
        "max_tokens": row["asked_tokens"],
        "start_unix_ns": at(row["arrival_ns"]),
        "chunk_unix_ns": [at(time) for time in maker.stream.seen],
        "status": refused if row["outcome"] == "failed" and not maker.stream.seen else 200,
        "usage": made if good else None,
        "error": row["error"] or (None if good else "cancelled"),
        "end_unix_ns": at(max([row["end_ns"], *maker.stream.seen[-1:]])) + 200_000,
    }


def _hashes(maker: Maker) -> list[int]:
    """One number per block of the prompt, the last partial one too; equal where requests begin alike."""
    row, ids = maker.row, maker.ids
    count = -(-row["prompt_tokens"] // BLOCK_TOKENS)
    common = 0
    if row["prefix"] is not None:
        common = min(maker.run.scenario.system_tokens // BLOCK_TOKENS, count)
    own = ids.number("blocks", row["session"] or row["request"])
    shared = ids.number("prefix", row["prefix"])
    key = np.where(np.arange(count) < common, np.uint64(shared), np.uint64(own))
    block = np.arange(1, count + 1, dtype=np.uint64)
    mixed = (key ^ (block * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
    return [int(number) for number in mixed]


def _steps(run: Run, worker: str, number: int, clock: Clock) -> list[dict[str, Any]]:
    """Every step of a worker (DYN_FPM_MODE=full)."""
    steps = run.steps.filter(pl.col("worker") == worker).sort("seq")
    start = clock(steps["start_ns"].to_list()[0]) // MS if steps.height else 0
    component = "prefill" if worker.startswith("prefill") else "backend"
    lines = []
    for count, s in enumerate(steps.iter_rows(named=True)):
        observed = clock(s["start_ns"] + s["elapsed_ns"]) // MS
        scheduled = {
            "num_prefill_requests": s["prefill_requests"],
            "sum_prefill_tokens": s["prefill_tokens"],
            "var_prefill_length": 0.0,
            "sum_prefill_kv_tokens": s["prefill_kv_tokens"],
            "num_decode_requests": s["decode_requests"],
            "sum_decode_kv_tokens": s["decode_kv_tokens"],
            "var_decode_kv_tokens": 0.0,
        }
        queued = {
            "num_prefill_requests": s["waiting"],
            "sum_prefill_tokens": 0,
            "var_prefill_length": 0.0,
            "num_decode_requests": 0,
            "sum_decode_kv_tokens": 0,
            "var_decode_kv_tokens": 0.0,
        }
        fpm = {
            "version": 1,
            "worker_id": str(number),
            "dp_rank": int(server_of(worker)[1] or 0),
            "counter_id": count + 1,
            "wall_time": s["elapsed_ns"] / 1e9,
            "scheduled_requests": scheduled,
            "queued_requests": queued,
        }
        event = {
            "schema": SCHEMA_FPM,
            "source": {"namespace": "dynamo", "component": component, "producer_id": str(number)},
            "capture_mode": "full",
            "observed_at_unix_ms": observed,
            "fpm": fpm,
        }
        lines.append({"timestamp": observed - start, "event": event})
    return lines
