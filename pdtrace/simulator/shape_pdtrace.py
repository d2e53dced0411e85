"""pdtrace's own spans: router and workers as one process each, token times, phases, choices.

The router sees what the client sees (`seen_ns`); workers see what they make (`time_ns`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdtrace import semconv as s
from pdtrace.simulator.otlp import CLIENT, INTERNAL, SERVER, Clock, Ids, Span, clocks, write_spans
from pdtrace.simulator.run import Run
from pdtrace.simulator.scenario import LOAD_WEIGHT
from pdtrace.simulator.shape_pdtrace_steps import step_spans
from pdtrace.simulator.streams import Stream, streams

MODEL = "opt-13b"
HOP_NS = 100_000  # between two hosts


def write(run: Run, folder: Path) -> None:
    """One file of spans for each host."""
    by_worker: dict[str, list[Span]] = {}
    for worker, span in _spans(run):
        by_worker.setdefault(worker, []).append(span)
    for worker, spans in sorted(by_worker.items()):
        write_spans(folder / f"{worker}.traces.jsonl", spans)


def _spans(run: Run) -> Iterator[tuple[str, Span]]:
    ids, clock, seen = Ids(run), clocks(run), streams(run)
    hosts = dict(run.workers.select("worker", "host").iter_rows())
    for worker in run.steps["worker"].unique().sort():
        resource = resource_of(worker, hosts[worker])
        for span in step_spans(run, worker, resource, ids, clock[worker]):
            yield worker, span
    for row in run.requests.filter(run.requests["end_ns"].is_not_null()).iter_rows(named=True):
        maker = _Maker(run, ids, clock, hosts, row, seen[row["request"]])
        yield from maker.router()
        if row["prefill_worker"]:
            yield from maker.prefill()
            yield from maker.decode()
        else:
            yield from maker.aggregated()


def resource_of(worker: str, host: str) -> dict[str, str]:
    """The process that emits."""
    return {
        "service.name": worker.rstrip("0123456789"),
        "service.instance.id": worker,
        "host.name": host,
    }


class _Maker:
    """The spans of one request."""

    def __init__(
        self,
        run: Run,
        ids: Ids,
        clock: dict[str, Clock],
        hosts: dict[str, str],
        row: dict[str, Any],
        stream: Stream,
    ) -> None:
        self.run, self.ids, self.clock, self.row = run, ids, clock, row
        self.hosts = hosts
        self.made, self.seen, self.counts = stream.made, stream.seen, stream.tokens
        self.trace = ids.hex(32, "trace", row["request"])

    def span(
        self,
        worker: str,
        name: str,
        start: int,
        end: int,
        parent: str | None,
        attributes: dict[str, Any] | None = None,
        kind: int = INTERNAL,
    ) -> tuple[str, Span]:
        at, key = self.clock[worker], (self.row["request"], worker, name, start, parent)
        resource = resource_of(worker, self.hosts[worker])
        made = Span(
            resource, s.SCOPE, name, self.trace, self.ids.hex(16, "span", *key),
            at(start), at(end), parent, kind, attributes or {},
        )  # fmt: skip
        return worker, made

    def request(
        self, worker: str, role: str, start: int, end: int, parent: str | None, **more: Any
    ) -> tuple[str, Span]:
        row = self.row
        return self.span(
            worker,
            s.SPAN_REQUEST,
            start,
            end,
            parent,
            {
                s.REQUEST_ID: row["request"],
                s.WORKER_ROLE: role,
                s.REQUEST_MODEL: MODEL,
                s.INPUT_TOKENS: row["prompt_tokens"],
                s.CONVERSATION_ID: row["session"],
                s.TURN: row["turn"],
                s.REQUEST_STREAM: True,
                **more,
            },
            SERVER,
        )

    def answer(self, worker: str, times: list[int]) -> dict[str, Any]:
        first = times[0]
        several = any(count != 1 for count in self.counts)
        return {
            s.OUTPUT_TOKENS: self.row["output_tokens"],
            s.REQUEST_MAX_TOKENS: self.row["output_tokens"],
            s.RESPONSE_FINISH_REASONS: ["length"],
            s.FIRST_TOKEN_NS: self.clock[worker](first),
            s.TOKEN_TIMES_US: [round((at - first) / 1000) for at in times],
            s.TOKEN_COUNTS: self.counts if several else None,
            s.TOKEN_EMISSION: "chunk" if several else "token",
        }

    # ---- components
    def router(self) -> Iterator[tuple[str, Span]]:
        row, last = self.row, self.seen[-1]
        whole = self.request(
            "router", "router", row["arrival_ns"], last, None, **self.answer("router", self.seen)
        )
        yield whole
        chosen = row["prefill_worker"] or row["decode_worker"]
        uncached = row["prompt_tokens"] - row["believed_tokens"]
        yield self.span(
            "router", s.SPAN_ROUTER, row["route_start_ns"], row["route_end_ns"], whole[1].span,
            {
                s.ROUTER_POLICY: self.run.scenario.router,
                s.ROUTER_WORKER: chosen,
                s.ROUTER_OVERLAP_TOKENS: row["believed_tokens"],
                s.ROUTER_COST: float(uncached + LOAD_WEIGHT * row["load"]),
                s.ROUTER_CANDIDATES: row["candidates"],
            },
        )  # fmt: skip
        self.sent: dict[str, str] = {}
        legs = [(row["decode_worker"], row["route_end_ns"], last)]
        if row["prefill_worker"]:
            done = row["prefill_end_ns"] + HOP_NS
            legs = [
                (row["prefill_worker"], row["route_end_ns"], done),
                (row["decode_worker"], done, last),
            ]
        for worker, start, end in legs:
            named = f"to {worker}"
            call = Span(
                whole[1].resource, s.SCOPE, s.SPAN_DISPATCH, self.trace,
                self.ids.hex(16, "span", row["request"], named), self.clock["router"](start),
                self.clock["router"](end), whole[1].span, CLIENT, {s.REQUEST_ID: row["request"]},
            )  # fmt: skip
            self.sent[worker] = call.span
            yield "router", call

    def aggregated(self) -> Iterator[tuple[str, Span]]:
        row, worker = self.row, self.row["decode_worker"]
        whole = self.request(
            worker, "aggregated", row["queue_start_ns"], row["end_ns"], self.sent[worker],
            **{s.CACHED_TOKENS: row["cached_tokens"]}, **self.answer(worker, self.made),
        )  # fmt: skip
        yield whole
        yield from self.computed(worker, whole[1].span)
        yield self.span(worker, s.SPAN_DECODE, row["first_token_ns"], row["end_ns"], whole[1].span)

    def computed(self, worker: str, parent: str) -> Iterator[tuple[str, Span]]:
        row = self.row
        queue, start, end = row["queue_start_ns"], row["prefill_start_ns"], row["prefill_end_ns"]
        yield self.span(worker, s.SPAN_QUEUE, queue, start, parent)
        # KV leaves layer by layer from the steps themselves: who records that knows them, not wall time only
        layers = (row["transfer_start_ns"] or end) < end
        detail = {s.PHASE_DETAIL: "prefill_exec"} if layers else {}
        yield self.span(worker, s.SPAN_PREFILL, start, end, parent, detail)

    def prefill(self) -> Iterator[tuple[str, Span]]:
        row, worker = self.row, self.row["prefill_worker"]
        whole = self.request(
            worker, "prefill", row["queue_start_ns"], row["prefill_end_ns"], self.sent[worker],
            **{s.CACHED_TOKENS: row["cached_tokens"]},
        )  # fmt: skip
        yield whole
        yield from self.computed(worker, whole[1].span)

    def decode(self) -> Iterator[tuple[str, Span]]:
        row, worker = self.row, self.row["decode_worker"]
        start = min(row["prefill_end_ns"] + 2 * HOP_NS, row["transfer_start_ns"])
        whole = self.request(
            worker, "decode", start, row["end_ns"], self.sent[worker],
            **self.answer(worker, self.made),
        )  # fmt: skip
        yield whole
        parent = whole[1].span
        moved, there = row["transfer_start_ns"], row["transfer_end_ns"]
        if moved > start:
            yield self.span(
                worker, s.SPAN_QUEUE, start, moved, parent, {s.PHASE_DETAIL: "kv_space_wait"}
            )
        yield self.span(
            worker, s.SPAN_KV_TRANSFER, moved, there, parent,
            {
                s.REQUEST_ID: row["request"],
                s.KV_BYTES: row["transfer_bytes"],
                s.KV_BACKEND: "simulated",
                s.KV_DIRECTION: "prefill_to_decode",
                s.KV_SOURCE: row["prefill_worker"],
                s.KV_DESTINATION: worker,
            },
        )  # fmt: skip
        began, first = row["decode_start_ns"], row["first_token_ns"]
        for name, detail, begin, end in (
            (s.SPAN_QUEUE, "decode_queue", there, began),
            (s.SPAN_DECODE, "decode_exec", began, first),
            (s.SPAN_DECODE, "decode_wall", first, row["end_ns"]),
        ):
            yield self.span(worker, name, begin, end, parent, {s.PHASE_DETAIL: detail})
