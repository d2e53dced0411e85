"""The spans of a request at NVIDIA Dynamo's frontend and workers; attributes recorded late are strings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdtrace.simulator.engine import server_of
from pdtrace.simulator.otlp import CLIENT, SERVER, Clock, Ids, Span
from pdtrace.simulator.run import Run
from pdtrace.simulator.scenario import BLOCK_TOKENS
from pdtrace.simulator.streams import Stream
from pdtrace.simulator.trouble import BROKEN, DEAD, REFUSED

MS = 1_000_000
NEAR_NS = 60_000  # from the frontend to a worker and back
PREPROCESSING_NS = 40_000
_HOP_OUTCOMES = {BROKEN: "failed", DEAD: "worker_disconnected"}


class Maker:
    """The spans of one request, and what its lines share with them."""

    def __init__(
        self,
        run: Run,
        ids: Ids,
        clock: dict[str, Clock],
        row: dict[str, Any],
        stream: Stream,
        tries: list[dict[str, Any]],
    ) -> None:
        self.run, self.ids, self.row, self.stream = run, ids, row, stream
        self.clock = clock
        self.trace = ids.hex(32, "trace", row["request"])
        self.id = ids.uuid("request", row["request"])
        self.x_id = f"sim-{row['request'][1:]}"
        self.split = row["prefill_worker"] is not None
        self.tries, self.good = tries, row["outcome"] == "completed"
        self.first = stream.seen[0] - NEAR_NS if stream.seen else None
        self.last = max([row["end_ns"], *stream.seen[-1:]]) - NEAR_NS

    def spans(self) -> Iterator[Span]:
        """All spans of the request, the root first."""
        row = self.row
        start, ready = row["route_start_ns"], row["route_end_ns"]
        yield self._frontend(
            "http-request", start, self.last + 100_000, self.span_id("client"),
            self._http(), error=True,
        )  # fmt: skip
        root = self.span_id("http-request")
        terminal = {
            "dynamo.session.id": row["session"] or self.id,
            "dynamo.session.source": "agent_context" if row["session"] else "request_id_fallback",
            "dynamo.request.terminal.timestamp_unix_ns": str(self.clock["router"](self.last)),
            "dynamo.request.terminal.outcome": self._outcome(),
            "dynamo.request.terminal.error": row["outcome"] == "failed",
        }
        yield self._frontend(
            "request.lifecycle", start + 5000, self.last + 50_000, root, self._life() | terminal
        )
        life = self.span_id("request.lifecycle")
        yield self._frontend(
            "request.preprocessing", start + 10_000, start + PREPROCESSING_NS, life, self._life()
        )
        for number, (phase, worker, begin, end, attempt, outcome) in enumerate(self.hops()):
            which = (phase, attempt) if attempt else (phase,)
            ready = begin
            chosen = ready - (MS // 50 if number == 0 else 0)
            yield self._frontend(
                "kv_router.select_worker", max(start + PREPROCESSING_NS, chosen - 60_000), chosen,
                life, {"target": "dynamo_llm::kv_router::routing_host::kv"}, *which,
            )  # fmt: skip
            yield from self._selection(which, chosen)
            sent = ready + number * 20_000
            yield self._frontend(
                "kv_router.route_request", sent, max(end + NEAR_NS, sent + 1), life,
                self._route(phase, worker, attempt, outcome), *which, kind=CLIENT,
            )  # fmt: skip
            if outcome != "worker_disconnected":  # who is dead exports nothing
                yield self._payload(which, worker, sent + NEAR_NS, max(end, sent + NEAR_NS))
        if self.first is not None:
            yield self._frontend("response.streaming", self.first, self.last, life, self._life())

    def _outcome(self) -> str:
        row = self.row
        if row["outcome"] == "failed":
            return "rejected" if row["error"] == REFUSED else "failed"
        return {"completed": "success", "aborted": "cancelled"}[row["outcome"]]

    def rank(self, worker: str) -> str:
        """The data-parallel rank that the worker is, as Dynamo writes it."""
        return server_of(worker)[1] or "0"

    def _selection(self, which: tuple[object, ...], chosen: int) -> Iterator[Span]:
        """The parts of a choice, in the order in which they ran."""
        parent, part = self.span_id("kv_router.select_worker", *which), chosen - 55_000
        for name, target, takes in (
            ("compute_block_hashes", "input", 9_000),
            ("compute_seq_hashes", "input", 6_000),
            ("find_matches", "core::run", 14_000),
            ("schedule", "core::run", 20_000),
        ):
            about = {"target": f"dynamo_kv_router::services::selection::{target}"}
            yield self._frontend(f"kv_router.{name}", part, part + takes, parent, about, *which)
            part += takes + 500

    def hops(self) -> list[tuple[str, str, int, int, int, str]]:
        """(phase, worker, sent, end at the worker, attempt, outcome) of each hop."""
        row, over = self.row, self.row["left_ns"] or self.row["end_ns"]
        ending = _HOP_OUTCOMES.get(row["error"]) or self._outcome()
        failed = [
            ("Aggregated", t["worker"], t["sent_ns"], t["end_ns"], t["attempt"], _HOP_OUTCOMES[t["error"]])
            for t in self.tries
        ]  # fmt: skip
        if row["decode_worker"] is None or row["queue_start_ns"] is None:
            return failed
        if not self.split:
            own = (row["decode_worker"], row["sent_ns"], over + NEAR_NS, len(failed), ending)
            return [*failed, ("Aggregated", *own)]
        sent, there = row["route_end_ns"], row["transfer_end_ns"]
        broken = ending if there is None else "success"
        return [
            ("Prefill", row["prefill_worker"], sent, over if there is None else there, 0, broken),
            ("Decode", row["decode_worker"], sent, over + NEAR_NS, 0, ending),
        ]

    def span_id(self, *what: object) -> str:
        """The id of the span of this request that is called so."""
        return self.ids.hex(16, "span", self.row["request"], *what)

    def _frontend(
        self,
        name: str,
        start: int,
        end: int,
        parent: str,
        attributes: dict[str, Any],
        *which: object,
        kind: int = 1,
        error: bool = False,
    ) -> Span:
        at, service = self.clock["router"], "dynamo-frontend"
        flags = 769 if name == "http-request" else 257  # the client is elsewhere; all are sampled
        return Span(
            {"service.name": service}, service, name, self.trace, self.span_id(name, *which),
            at(start), at(end), parent, kind,
            attributes | {"busy_ns": 50_000, "idle_ns": max(end - start - 50_000, 0)},
            error=error, flags=flags,
        )  # fmt: skip

    def _payload(self, which: tuple[Any, ...], worker: str, start: int, end: int) -> Span:
        phase = str(which[0])
        role = {"Prefill": "prefill", "Decode": "decode"}.get(phase, "agg")
        at, service = self.clock[worker], f"dynamo-worker-{role}"
        parent = self.span_id("kv_router.route_request", *which)
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
            "instance_id": str(self.ids.number(server_of(worker)[0])),
            "busy_ns": 1_000_000,
            "idle_ns": max(end - start - 1_000_000, 0),
        }
        return Span(
            {"service.name": service}, service, "handle_payload", self.trace,
            self.span_id("handle_payload", *which), at(start), at(end), parent, SERVER, attributes,
            flags=769,
        )  # fmt: skip

    def _http(self) -> dict[str, Any]:
        row = self.row
        asked = {
            "target": "request_span",
            "method": "POST",
            "uri": "/v1/chat/completions",
            "version": "HTTP/1.1",
            "trace_id": self.trace,
            "parent_id": self.span_id("client"),
            "trace_flags": "01",
            "x_request_id": self.x_id,
            "request_id": self.id,
        }
        if not self.good or self.first is None:  # what did not end in order lacks the rest
            return asked
        return asked | {
            "input_tokens": str(row["prompt_tokens"]),
            "output_tokens": str(row["output_tokens"]),
            "image_count": "0",
            "video_count": "0",
            "audio_count": "0",
            "ttft_ms": f"{(self.first - row['route_start_ns']) / MS:.2f}",
            "avg_itl_ms": f"{self.itl(self.first - row['route_start_ns']):.2f}",
            "prefill_worker_id": self.worker_id("prefill_worker"),
            "decode_worker_id": self.worker_id("decode_worker"),
        }

    def worker_id(self, column: str) -> str:
        """The worker in this column, else the one that decodes: 64 bits, decimal."""
        return str(self.ids.number(server_of(self.row[column] or self.row["decode_worker"])[0]))

    def itl(self, ttft: int) -> float:
        """Milliseconds per token after the first, which came `ttft` ns after the start."""
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

    def _route(self, phase: str, worker: str, attempt: int, outcome: str) -> dict[str, Any]:
        overlap = 0 if phase == "Decode" else self.row["believed_tokens"] // BLOCK_TOKENS
        moved = {"migration.tokens_completed": "0"} if phase != "Prefill" else {}
        return {
            "target": "request_span",
            "request_id": self.id,
            "dp_rank": self.rank(worker),
            "overlap_blocks": str(overlap),
            "phase": phase,
            "worker_id": str(self.ids.number(server_of(worker)[0])),
            "request.attempt": str(attempt),
            "migration.is_retry": attempt > 0,
            **moved,
            "request.outcome": outcome,
        }
