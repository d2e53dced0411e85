"""pdtrace's own spans: router and workers as one process each, token times, phases, choices.

The router sees what the client sees (`seen_ns`); workers see what they make (`time_ns`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pdtrace import semconv as s
from pdtrace.simulator.engine import server_of
from pdtrace.simulator.otlp import CLIENT, INTERNAL, SERVER, Clock, Ids, Span, clocks, write_spans
from pdtrace.simulator.run import Run
from pdtrace.simulator.scenario import LOAD_WEIGHT
from pdtrace.simulator.shape_pdtrace_steps import step_spans
from pdtrace.simulator.streams import NO_STREAM, Stream, streams, tries_by_request
from pdtrace.simulator.trouble import DEAD

MODEL = "opt-13b"
HOP_NS = 100_000  # between two hosts

# span, attributes, start and end of what an engine did; None where it did not come to it
Stage = tuple[str, dict[str, Any], int | None, int | None]


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
    tries = tries_by_request(run)
    for worker in run.steps["worker"].unique().sort():
        resource = resource_of(server_of(worker)[0], hosts[worker])
        for span in step_spans(run, worker, resource, ids, clock[worker]):
            yield server_of(worker)[0], span
    for row in run.requests.filter(run.requests["end_ns"].is_not_null()).iter_rows(named=True):
        stream = seen.get(row["request"], NO_STREAM)
        maker = _Maker(run, ids, clock, hosts, row, stream, tries.get(row["request"], []))
        yield from maker.router()
        yield from maker.failed()
        if row["decode_worker"] is None or row["error"] == DEAD:  # who is dead exports nothing
            continue
        if row["prefill_worker"]:
            yield from maker.prefill()
            yield from maker.decode()
        elif row["queue_start_ns"] is not None:
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
        tries: list[dict[str, Any]],
    ) -> None:
        self.run, self.ids, self.clock, self.row = run, ids, clock, row
        self.hosts = hosts
        self.tries = tries
        # When the client had the end, and when the engines had: they notice later who went away.
        self.last = max([row["end_ns"], *stream.seen[-1:]])
        self.over = row["left_ns"] or row["end_ns"]
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
        resource = resource_of(server_of(worker)[0], self.hosts[worker])
        made = Span(
            resource, s.SCOPE, name, self.trace, self.ids.hex(16, "span", *key),
            at(start), at(end), parent, kind, attributes or {}, error=s.ERROR_TYPE in (attributes or {}),
        )  # fmt: skip
        return server_of(worker)[0], made

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

    def ending(self) -> dict[str, Any]:
        """What a span says of a request that did not complete."""
        row = self.row
        if row["outcome"] == "aborted":
            return {s.ABORTED: True}
        return {s.ERROR_TYPE: row["error"]} if row["outcome"] == "failed" else {}

    def answer(self, worker: str, times: list[int]) -> dict[str, Any]:
        if not times:
            return {s.REQUEST_MAX_TOKENS: self.row["asked_tokens"], **self.ending()}
        first = times[0]
        several = any(count != 1 for count in self.counts)
        return {
            s.OUTPUT_TOKENS: self.row["output_tokens"],
            s.REQUEST_MAX_TOKENS: self.row["asked_tokens"],
            s.RESPONSE_FINISH_REASONS: ["length"] if self.row["outcome"] == "completed" else None,
            **self.ending(),
            s.FIRST_TOKEN_NS: self.clock[worker](first),
            s.TOKEN_TIMES_US: [round((at - first) / 1000) for at in times],
            s.TOKEN_COUNTS: self.counts if several else None,
            s.TOKEN_EMISSION: "chunk" if several else "token",
        }

    # ---- components
    def router(self) -> Iterator[tuple[str, Span]]:
        row, last = self.row, self.last
        whole = self.request(
            "router", "router", row["arrival_ns"], last, None, **self.answer("router", self.seen)
        )
        yield whole
        # the choice of the first attempt
        chosen = row["prefill_worker"] or (
            self.tries[0]["worker"] if self.tries else row["decode_worker"]
        )
        uncached = row["prompt_tokens"] - row["believed_tokens"]
        yield self.span(
            "router", s.SPAN_ROUTER, row["route_start_ns"], row["route_end_ns"], whole[1].span,
            {
                s.ROUTER_POLICY: self.run.scenario.router,
                s.ROUTER_WORKER: chosen and server_of(chosen)[0],
                s.ROUTER_OVERLAP_TOKENS: row["believed_tokens"],
                s.ROUTER_COST: float(uncached + LOAD_WEIGHT * row["load"]),
                s.ROUTER_CANDIDATES: row["candidates"],
            },
        )  # fmt: skip
        self.sent: dict[str, str] = {}
        for worker, attempt, start, end, told in self.legs():
            named = f"to {worker}" + (f" again {attempt}" if attempt else "")
            call = Span(
                whole[1].resource, s.SCOPE, s.SPAN_DISPATCH, self.trace,
                self.ids.hex(16, "span", row["request"], named), self.clock["router"](start),
                self.clock["router"](end), whole[1].span, CLIENT, {s.REQUEST_ID: row["request"], **told},
                error=s.ERROR_TYPE in told,
            )  # fmt: skip
            self.sent[worker] = call.span
            yield "router", call

    def legs(self) -> Iterator[tuple[str, int, int, int, dict[str, Any]]]:
        """(worker, attempt, start, end, attributes) of each call of the router."""
        row, counted = self.row, self.run.scenario.retries > 0
        for attempt in self.tries:
            number, error = attempt["attempt"], attempt["error"]
            told = {s.ATTEMPT: number, s.ERROR_TYPE: error}
            yield attempt["worker"], number, attempt["sent_ns"], attempt["end_ns"] + HOP_NS, told
        told = ({s.ATTEMPT: len(self.tries)} if counted else {}) | self.ending()
        done = row["prefill_end_ns"]
        if row["prefill_worker"]:
            there = self.last if done is None else done + HOP_NS
            yield row["prefill_worker"], 0, row["route_end_ns"], there, told if done is None else {}
            if done is not None and there < self.last:
                yield row["decode_worker"], 0, there, self.last, told
        elif row["decode_worker"]:
            yield row["decode_worker"], len(self.tries), row["sent_ns"], self.last, told

    def failed(self) -> Iterator[tuple[str, Span]]:
        """What the engines say of attempts that failed."""
        for number, attempt in enumerate(self.tries):
            if attempt["error"] == DEAD:
                continue
            worker, start, end = attempt["worker"], attempt["queue_start_ns"], attempt["end_ns"]
            parent = self.ids.hex(
                16, "span", self.row["request"], f"to {worker}" + (f" again {number}" if number else "")
            )  # fmt: skip
            error = {s.ERROR_TYPE: attempt["error"]}
            whole = self.request(worker, "aggregated", start, end, parent, **error)
            yield whole
            yield from self.stages(worker, whole[1].span, end, (
                (s.SPAN_QUEUE, {}, start, attempt["prefill_start_ns"]),
                (s.SPAN_PREFILL, {}, attempt["prefill_start_ns"], None),
            ))  # fmt: skip

    def stages(
        self, worker: str, parent: str, over: int, stages: Iterable[Stage]
    ) -> Iterator[tuple[str, Span]]:
        """Spans of what the engine did until it was over: the last one may have been cut."""
        for name, attributes, begin, end in stages:
            if begin is None or begin > over:
                return
            yield self.span(
                worker, name, begin, over if end is None else min(end, over), parent, attributes
            )

    def aggregated(self) -> Iterator[tuple[str, Span]]:
        row, worker = self.row, self.row["decode_worker"]
        whole = self.request(
            worker, "aggregated", row["queue_start_ns"], self.over, self.sent[worker],
            **{s.CACHED_TOKENS: row["cached_tokens"]}, **self.answer(worker, self.made),
        )  # fmt: skip
        yield whole
        parent, first = whole[1].span, row["first_token_ns"]
        yield from self.computed(worker, parent, self.over)
        decoded: tuple[Stage, ...] = ((s.SPAN_DECODE, {}, first, row["end_ns"]),)
        yield from self.stages(worker, parent, self.over, decoded)

    def computed(self, worker: str, parent: str, over: int) -> Iterator[tuple[str, Span]]:
        row = self.row
        queue, start, end = row["queue_start_ns"], row["prefill_start_ns"], row["prefill_end_ns"]
        # KV leaves layer by layer from the steps themselves: who records that knows them, not wall time only
        layers = end is not None and (row["transfer_start_ns"] or end) < end
        detail = {s.PHASE_DETAIL: "prefill_exec"} if layers else {}
        yield from self.stages(
            worker, parent, over, ((s.SPAN_QUEUE, {}, queue, start), (s.SPAN_PREFILL, detail, start, end))
        )  # fmt: skip

    def prefill(self) -> Iterator[tuple[str, Span]]:
        row, worker = self.row, self.row["prefill_worker"]
        over = row["prefill_end_ns"] or self.over
        whole = self.request(
            worker, "prefill", row["queue_start_ns"], over, self.sent[worker],
            **{s.CACHED_TOKENS: row["cached_tokens"]},
            **({} if row["prefill_end_ns"] else self.ending()),
        )  # fmt: skip
        yield whole
        yield from self.computed(worker, whole[1].span, over)

    def decode(self) -> Iterator[tuple[str, Span]]:
        row, worker = self.row, self.row["decode_worker"]
        if worker not in self.sent:
            return
        moved, there = row["transfer_start_ns"], row["transfer_end_ns"]
        start = min(row["prefill_end_ns"] + 2 * HOP_NS, moved or self.over)
        whole = self.request(
            worker, "decode", start, self.over, self.sent[worker],
            **self.answer(worker, self.made),
        )  # fmt: skip
        yield whole
        parent = whole[1].span
        transfer = {
            s.REQUEST_ID: row["request"],
            s.KV_BYTES: row["transfer_bytes"],
            s.KV_BACKEND: "simulated",
            s.KV_DIRECTION: "prefill_to_decode",
            s.KV_SOURCE: row["prefill_worker"],
            s.KV_DESTINATION: worker,
        }
        waited: tuple[Stage, ...] = (
            (s.SPAN_QUEUE, {s.PHASE_DETAIL: "kv_space_wait"}, start, moved),
        )
        began, first = row["decode_start_ns"], row["first_token_ns"]
        yield from self.stages(worker, parent, self.over, (
            *(waited if (moved or self.over) > start else ()),
            (s.SPAN_KV_TRANSFER, transfer, moved, there),
            (s.SPAN_QUEUE, {s.PHASE_DETAIL: "decode_queue"}, there, began),
            (s.SPAN_DECODE, {s.PHASE_DETAIL: "decode_exec"}, began, first),
            (s.SPAN_DECODE, {s.PHASE_DETAIL: "decode_wall"}, first, row["end_ns"]),
        ))  # fmt: skip
