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

import polars as pl

from pdtrace.simulator.otlp import CLIENT, SERVER, Clock, Ids, Span, clocks, write_spans
from pdtrace.simulator.run import Run
from pdtrace.simulator.scenario import BLOCK_TOKENS, LOAD_WEIGHT
from pdtrace.simulator.streams import Stream, streams

MS = 1_000_000
NEAR_NS = 60_000  # from the frontend to a worker and back
PREPROCESSING_NS = 40_000
SCHEMA_TRACE, SCHEMA_FPM = "dynamo.request.trace.v1", "dynamo.fpm.trace.v1"


def write(run: Run, folder: Path) -> None:
    """Spans of all processes, the frontend's log, request trace, steps by worker, client log."""
    ids, clock, seen = Ids(run), clocks(run), streams(run)
    spans: list[Span] = []
    log: list[dict[str, Any]] = []
    trace: list[dict[str, Any]] = []
    client: list[dict[str, Any]] = []
    for row in run.requests.sort("arrival_ns", "request").iter_rows(named=True):
        if row["end_ns"] is None:
            continue
        maker = _Maker(run, ids, clock, row, seen[row["request"]])
        spans += maker.spans()
        log += maker.choices()
        trace.append(maker.record())
        client.append(maker.client())
    write_spans(folder / "otlp_traces.jsonl", spans)
    _write_lines(folder / "frontend.log.jsonl", sorted(log, key=lambda line: str(line["time"])))
    first = min((line["event"]["event_time_unix_ms"] for line in trace), default=0)
    trace.sort(key=lambda line: int(line["event"]["event_time_unix_ms"]))
    for line in trace:
        line["timestamp"] = line["event"]["event_time_unix_ms"] - first + 1000
    _write_lines(folder / "request_trace.jsonl", trace)
    _write_lines(folder / "client.jsonl", client)
    for worker in run.steps["worker"].unique().sort():
        number = ids.number(worker)
        lines = _steps(run, worker, number, clock[worker])
        _write_lines(folder / f"fpm.{number}.000000.jsonl", lines)


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


class _Maker:
    """What one request leaves."""

    def __init__(
        self, run: Run, ids: Ids, clock: dict[str, Clock], row: dict[str, Any], stream: Stream
    ) -> None:
        self.run, self.ids, self.row, self.stream = run, ids, row, stream
        self.clock = clock
        self.trace = ids.hex(32, "trace", row["request"])
        self.id = ids.uuid("request", row["request"])
        self.x_id = f"sim-{row['request'][1:]}"
        self.split = row["prefill_worker"] is not None
        self.first = stream.seen[0] - NEAR_NS
        self.last = stream.seen[-1] - NEAR_NS

    # ---- spans
    def spans(self) -> Iterator[Span]:
        row = self.row
        start, ready = row["route_start_ns"], row["route_end_ns"]
        yield self._frontend(
            "http-request", start, self.last + 100_000, self._id("client"),
            self._http(), error=True,
        )  # fmt: skip
        root = self._id("http-request")
        terminal = {
            "dynamo.session.id": row["session"] or self.id,
            "dynamo.session.source": "agent_context" if row["session"] else "request_id_fallback",
            "dynamo.request.terminal.timestamp_unix_ns": str(self.clock["router"](self.last)),
            "dynamo.request.terminal.outcome": "success",
            "dynamo.request.terminal.error": False,
        }
        yield self._frontend(
            "request.lifecycle", start + 5000, self.last + 50_000, root, self._life() | terminal
        )
        life = self._id("request.lifecycle")
        yield self._frontend(
            "request.preprocessing", start + 10_000, start + PREPROCESSING_NS, life, self._life()
        )
        for number, (phase, worker, end) in enumerate(self._hops()):
            chosen = ready - (MS // 50 if number == 0 else 0)
            yield self._frontend(
                "kv_router.select_worker", max(start + PREPROCESSING_NS, chosen - 60_000), chosen,
                life, {}, phase,
            )  # fmt: skip
            sent = ready + number * 20_000
            yield self._frontend(
                "kv_router.route_request", sent, end + NEAR_NS, life, self._route(phase, worker),
                phase, kind=CLIENT,
            )  # fmt: skip
            yield self._payload(phase, worker, sent + NEAR_NS, end)
        yield self._frontend("response.streaming", self.first, self.last, life, self._life())

    def _hops(self) -> list[tuple[str, str, int]]:
        row = self.row
        if not self.split:
            return [("Aggregated", row["decode_worker"], row["end_ns"] + NEAR_NS)]
        return [
            ("Prefill", row["prefill_worker"], row["transfer_end_ns"]),
            ("Decode", row["decode_worker"], row["end_ns"] + NEAR_NS),
        ]

    def _id(self, *what: object) -> str:
        return self.ids.hex(16, "span", self.row["request"], *what)

    def _frontend(
        self,
        name: str,
        start: int,
        end: int,
        parent: str,
        attributes: dict[str, Any],
        *which: str,
        kind: int = 1,
        error: bool = False,
    ) -> Span:
        at, service = self.clock["router"], "dynamo-frontend"
        return Span(
            {"service.name": service}, service, name, self.trace, self._id(name, *which),
            at(start), at(end), parent, kind,
            attributes | {"busy_ns": 50_000, "idle_ns": max(end - start - 50_000, 0)}, error=error,
        )  # fmt: skip

    def _payload(self, phase: str, worker: str, start: int, end: int) -> Span:
        role = {"Prefill": "prefill", "Decode": "decode"}.get(phase, "agg")
        at, service = self.clock[worker], f"dynamo-worker-{role}"
        parent = self._id("kv_router.route_request", phase)
        attributes = {
            "target": "request_span",
            "trace_id": self.trace,
            "parent_id": parent,
            "trace_flags": "01",
            "x_request_id": self.x_id,
            "request_id": self.id,
            "component": "prefill" if phase == "Prefill" else "backend",
            "endpoint": "generate",
            "namespace": "dynamo",
            "instance_id": str(self.ids.number(worker)),
            "busy_ns": 1_000_000,
            "idle_ns": max(end - start - 1_000_000, 0),
        }
        return Span(
            {"service.name": service}, service, "handle_payload", self.trace,
            self._id("handle_payload", phase), at(start), at(end), parent, SERVER, attributes,
        )  # fmt: skip

    def _http(self) -> dict[str, Any]:
        row = self.row
        return {
            "target": "request_span",
            "method": "POST",
            "uri": "/v1/chat/completions",
            "version": "HTTP/1.1",
            "trace_id": self.trace,
            "parent_id": self._id("client"),
            "trace_flags": "01",
            "x_request_id": self.x_id,
            "request_id": self.id,
            "input_tokens": str(row["prompt_tokens"]),
            "output_tokens": str(row["output_tokens"]),
            "image_count": "0",
            "video_count": "0",
            "audio_count": "0",
            "ttft_ms": f"{(self.first - row['route_start_ns']) / MS:.2f}",
            "avg_itl_ms": f"{self._itl(self.first - row['route_start_ns']):.2f}",
            "prefill_worker_id": self._worker_id("prefill_worker"),
            "decode_worker_id": self._worker_id("decode_worker"),
        }

    def _worker_id(self, column: str) -> str:
        return str(self.ids.number(self.row[column] or self.row["decode_worker"]))

    def _itl(self, ttft: int) -> float:
        total = self.last - self.row["route_start_ns"]
        return float((total - ttft) / MS / max(self.row["output_tokens"] - 1, 1))

    def _life(self) -> dict[str, Any]:
        return {
            "target": "dynamo.request_lifecycle",
            "dynamo.request.id": self.id,
            "dynamo.operation.id": self.ids.uuid("operation", self.row["request"]),
            "dynamo.operation.role": "frontend",
            "dynamo.lifecycle.schema": "v1",
            "dynamo.lifecycle.profile": "generic.v1",
            "dynamo.lifecycle.mode": "core",
            "dynamo.component": "frontend",
            "dynamo.instance.id": "pid-24567",
            "dynamo.process.epoch": f"24567:{self.ids.uuid('epoch')}",
            "dynamo.lifecycle.identity.state": "complete",
        }

    def _route(self, phase: str, worker: str) -> dict[str, Any]:
        overlap = 0 if phase == "Decode" else self.row["believed_tokens"] // BLOCK_TOKENS
        return {
            "target": "request_span",
            "request_id": self.id,
            "dp_rank": "0",
            "overlap_blocks": str(overlap),
            "phase": phase,
            "worker_id": str(self.ids.number(worker)),
            "request.attempt": "0",
            "migration.is_retry": False,
            "request.outcome": "success",
        }

    # ---- lines
    def choices(self) -> Iterator[dict[str, Any]]:
        """The router's choice of each hop, as the frontend logs it."""
        row = self.row
        for phase, worker, _ in self._hops():
            at = self.clock["router"](row["route_end_ns"])
            uncached = row["prompt_tokens"] - row["believed_tokens"]
            yield {
                "time": datetime.fromtimestamp(at // 1_000_000_000, UTC).strftime(
                    "%Y-%m-%dT%H:%M:%S"
                )
                + f".{at // 1000 % 1_000_000:06d}Z",
                "level": "INFO",
                "file": "/opt/dynamo/lib/kv-router/src/scheduling/selector/mod.rs",
                "line": 342,
                "target": "dynamo_kv_router::scheduling::selector",
                "message": "Selected worker",
                "disk_blocks": 0,
                "dp_rank": "0",
                "effective_cached_blocks": 0.0
                if phase == "Decode"
                else row["believed_tokens"] / BLOCK_TOKENS,
                "host_pinned_blocks": 0,
                "logit": (uncached + LOAD_WEIGHT * row["load"]) / BLOCK_TOKENS,
                "request_id": self.id,
                "router_mode": "kv",
                "total_kv_blocks": f"Some({self.run.scenario.kv_blocks})",
                "worker_id": self.ids.number(worker),
                "worker_type": "prefill" if phase == "Prefill" else "decode",
            }

    def record(self) -> dict[str, Any]:
        """The request trace's line; its first token is that of the worker which prefilled."""
        row, at = self.row, self.clock["router"]
        start = row["route_start_ns"]
        made = (row["prefill_end_ns"] if self.split else row["first_token_ns"]) + NEAR_NS
        wait, ttft = row["route_end_ns"] - start, made - start
        request: dict[str, Any] = {"request_id": self.id}
        if row["session"]:
            request |= {"x_request_id": self.x_id, "model": "opt-13b"}
        request |= {
            "input_tokens": row["prompt_tokens"],
            "output_tokens": row["output_tokens"],
            "cached_tokens": row["cached_tokens"],
            "request_received_ms": at(start) // MS,
            "prefill_wait_time_ms": wait / MS,
            "prefill_time_ms": (ttft - wait) / MS,
            "ttft_ms": ttft / MS,
            "total_time_ms": (self.last - start) / MS,
            "avg_itl_ms": self._itl(ttft),
            "kv_hit_rate": row["believed_tokens"] / row["prompt_tokens"],
        }
        if self.split:
            request["kv_transfer_estimated_latency_ms"] = 0.0
        request["queue_depth"] = 0
        request["worker"] = {
            "prefill_worker_id": int(self._worker_id("prefill_worker")),
            "prefill_dp_rank": 0,
            "decode_worker_id": int(self._worker_id("decode_worker")),
            "decode_dp_rank": 0,
        }
        event: dict[str, Any] = {
            "schema": SCHEMA_TRACE,
            "event_type": "request_end",
            "event_time_unix_ms": at(self.last) // MS,
        }
        if row["session"]:
            event["agent_context"] = {"session_id": row["session"]}
        return {"timestamp": 0, "event": event | {"request": request}}

    def client(self) -> dict[str, Any]:
        """What a client that writes down its chunks has."""
        row, at = self.row, self.clock["router"]
        n = row["output_tokens"]
        return {
            "x_request_id": self.x_id,
            "trace_id": self.trace,
            "parent_span_id": self._id("client"),
            "max_tokens": n,
            "start_unix_ns": at(row["arrival_ns"]),
            "chunk_unix_ns": [at(time) for time in self.stream.seen],
            "status": 200,
            "usage": {
                "prompt_tokens": row["prompt_tokens"],
                "completion_tokens": n,
                "total_tokens": row["prompt_tokens"] + n,
                "prompt_tokens_details": {"cached_tokens": row["cached_tokens"]},
            },
            "error": None,
            "end_unix_ns": at(self.stream.seen[-1]) + 200_000,
        }


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
            "dp_rank": 0,
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
