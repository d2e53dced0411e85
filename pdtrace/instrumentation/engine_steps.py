"""Engine steps: what each iteration of a batching loop held, kept in columns and written as runs.

    steps = pdt.steps()
    while True:
        with steps.step() as step:
            run_the_model(batch)
            step.set(decode_requests=len(decoding), prefill_tokens=chunk, prefill_requests=1)
            step.member("req-1", prefill_tokens=chunk)

One clock reading at each end of a step and a few appends: columns and encoding are the recorder's
business, on its own thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain, repeat
from time import perf_counter_ns, sleep, time_ns
from types import TracebackType
from typing import Any, NamedTuple, Self

from pdtrace import semconv as s
from pdtrace.instrumentation.recorder import Destination
from pdtrace.instrumentation.requests import Request

RUN_STEPS = 256  # steps of one span
RUN_NS = 1_000_000_000  # or as many as begin within a second
# Ids of one span: readers take much text under one key for a prompt. Further members have spans of their own.
RUN_ID_BYTES = 3000
# What is kept of a step until the recorder's thread makes columns of it, about: itself, a member, a decoding request.
STEP_BYTES, MEMBER_BYTES, DECODING_BYTES = 500, 150, 48
UNKNOWN = -1
PARTS = "_parts"  # key of a run's attributes: those of further spans, made by encode.py


class Decoding(NamedTuple):
    """Requests that decoded a token in a step, and their contexts; but for those in `without`."""

    ids: Sequence[str]
    contexts: Sequence[int]
    without: Collection[str]


class Step:
    """One engine step, from its start to its end: a context manager."""

    __slots__ = ("counts", "decoders", "kv_usage_ratio", "members", "start_ns", "steps")

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.counts: dict[str, int] = {}
        self.kv_usage_ratio: float | None = None
        self.members: list[tuple[str, int, int, int]] = []
        self.decoders: Decoding | None = None
        self.start_ns = 0

    def set(self, *, kv_usage_ratio: float | None = None, **counts: int) -> None:
        """What the step held: prefill_requests, prefill_tokens, prefill_kv_tokens, decode_requests,
        decode_tokens, decode_kv_tokens, running, waiting, kv_usage_ratio."""
        self.counts.update(counts)
        if kv_usage_ratio is not None:
            self.kv_usage_ratio = kv_usage_ratio

    def member(
        self,
        request_id: str,
        *,
        prefill_tokens: int = 0,
        decode_tokens: int = 0,
        context_tokens: int = UNKNOWN,
    ) -> None:
        """A request that was in the step, by the id that its spans have."""
        self.members.append((request_id, prefill_tokens, decode_tokens, context_tokens))

    def decoded(
        self, ids: Sequence[str], contexts: Sequence[int] = (), without: Collection[str] = ()
    ) -> None:
        """Many members at once, each of which decoded; the sequences are read later, so leave them as they are."""
        self.decoders = Decoding(ids, contexts, without)

    def __enter__(self) -> Self:
        self.start_ns = perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.steps.add(self, perf_counter_ns())


class Steps:
    """The steps of one engine loop (one rank); not for several threads at once."""

    def __init__(self, recorder: Destination, rank: str | None = None) -> None:
        self._recorder = recorder
        self._rank = rank
        self._seq = 0
        self._run: _Run | None = None

    def step(self) -> Step:
        """A step that begins when its block is entered."""
        return Step(self)

    def add(self, step: Step, end_ns: int) -> None:
        """A step that is over. An exception in its block is the engine's; the step counts."""
        seq, self._seq = self._seq, self._seq + 1
        if not self._recorder.enabled:
            return
        run = self._run
        if run is not None and run.full(step):
            self.flush()
            run = None
        if run is None:
            run = self._run = _Run(seq, step.start_ns)
        run.steps.append((step, end_ns))

    def flush(self) -> None:
        """Hand over what is kept. By itself it happens once a second while steps come; when an engine
        goes idle it is up to the caller."""
        run, self._run = self._run, None
        if run is not None:
            run.hand_over(self._recorder, self._rank)


class _Run:
    """Steps one after another."""

    __slots__ = ("seq", "start_ns", "steps", "wall_ns")

    def __init__(self, seq: int, start_ns: int) -> None:
        self.seq = seq
        self.start_ns = start_ns
        self.wall_ns = time_ns() - (perf_counter_ns() - start_ns)
        self.steps: list[tuple[Step, int]] = []

    def full(self, step: Step) -> bool:
        """Whether a step belongs to the next run."""
        return len(self.steps) >= RUN_STEPS or step.start_ns - self.start_ns >= RUN_NS

    def hand_over(self, recorder: Destination, rank: str | None) -> None:
        """Put the run into the recorder's queue as a span of its own trace; its columns are made there."""
        span = self._span(recorder, {s.STEP_FIRST_SEQ: self.seq, s.STEP_RANK: rank})
        span.put_off(partial(self._columns, span.attributes))
        if any(step.members or step.decoders for step, _ in self.steps):
            span.put_off(partial(self._members, span.attributes))
        span.held_bytes = self._held_bytes()
        recorder.put(span)

    def _held_bytes(self) -> int:
        held = len(self.steps) * STEP_BYTES
        for step, _ in self.steps:
            held += len(step.members) * MEMBER_BYTES
            if step.decoders is not None:
                held += len(step.decoders.ids) * DECODING_BYTES
        return held

    def _span(self, recorder: Destination, attributes: dict[str, Any]) -> Request:
        span = Request(recorder, None, attributes, s.SPAN_STEPS)
        span.wall_ns, span.start_ns, span.end_ns = self.wall_ns, self.start_ns, self.steps[-1][1]
        span.ended = True
        return span

    def _columns(self, attributes: dict[str, Any]) -> None:
        steps = self.steps
        attributes[s.STEP_OFFSETS_NS] = array(
            "q", (one.start_ns - self.start_ns for one, _ in steps)
        )
        attributes[s.STEP_ELAPSED_NS] = array("q", (end - one.start_ns for one, end in steps))
        for name, key in s.STEP_COUNTS.items():
            column = [_number(one.counts.get(name, UNKNOWN)) for one, _ in steps]
            if any(value != UNKNOWN for value in column):
                attributes[key] = array("q", column)
        usage = [one.kv_usage_ratio for one, _ in steps]
        if any(value is not None for value in usage):
            attributes[s.STEP_KV_USAGE] = [
                float(UNKNOWN) if value is None else value for value in usage
            ]

    def _members(self, attributes: dict[str, Any]) -> None:
        """Who was in the steps: with the run as far as its ids fit, the others in spans of their own."""
        named = {s.STEP_FIRST_SEQ: self.seq, s.STEP_RANK: attributes[s.STEP_RANK]}
        parts = _member_columns(self.steps)
        if parts:
            attributes.update(parts[0])
            attributes[PARTS] = [{**named, **part} for part in parts[1:]]


def _member_columns(steps: Sequence[tuple[Step, int]]) -> list[dict[str, Any]]:
    """Attributes of the members, as many requests to a span as their ids fit into one."""
    places: dict[str, _Members] = {}
    spans: list[_Members] = []

    def place(request_id: str) -> _Members:
        found = places.get(request_id)
        if found is None:
            if not spans or spans[-1].id_bytes + len(request_id) > RUN_ID_BYTES:
                spans.append(_Members())
            found = places[request_id] = spans[-1]
        return found

    for index, (step, _) in enumerate(steps):
        for request_id, *numbers in step.members:
            place(request_id).add(index, request_id, *map(_number, numbers))
        if step.decoders is not None:
            ids, contexts, without = step.decoders
            for request_id, context in zip(ids, chain(contexts, repeat(UNKNOWN)), strict=False):
                if request_id not in without:
                    place(request_id).add(index, request_id, 0, 1, context)
            sleep(0)  # lets the engine's thread go on, should it wait for this one
    return [members.attributes() for members in spans]


class _Members:
    """Members of steps, column by column."""

    __slots__ = ("columns", "id_bytes", "ids")

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.id_bytes = 0
        self.columns = [array("q") for _ in s.STEP_MEMBERS]

    def add(self, index: int, request_id: str, prefill: int, decode: int, context: int) -> None:
        known = self.ids.get(request_id)
        if known is None:
            known = self.ids[request_id] = len(self.ids)
            self.id_bytes += len(request_id)
        for column, value in zip(
            self.columns, (index, known, prefill, decode, context), strict=True
        ):
            column.append(value)

    def attributes(self) -> dict[str, Any]:
        named = zip(s.STEP_MEMBERS.values(), self.columns, strict=True)
        return {s.STEP_MEMBER_IDS: list(self.ids), **dict(named)}


def _number(value: Any) -> int:
    """A count as it was given; what is no whole number is unknown."""
    return value if isinstance(value, int) and -(2**63) <= value < 2**63 else UNKNOWN
