"""Engine steps: what each iteration of a batching loop held, kept in columns and written as runs.

    steps = pdt.steps()
    while True:
        with steps.step() as step:
            run_the_model(batch)
            step.set(decode_requests=len(decoding), prefill_tokens=chunk, prefill_requests=1)
            step.member("req-1", prefill_tokens=chunk)

One clock reading at each end of a step and a few appends: encoding is the recorder's business.
"""

from __future__ import annotations

import contextlib
from array import array
from time import perf_counter_ns, time_ns
from types import TracebackType
from typing import Any, Self

from pdtrace import semconv as s
from pdtrace.instrumentation.recorder import Destination
from pdtrace.instrumentation.requests import Request

RUN_STEPS = 256  # steps of one span
RUN_NS = 1_000_000_000  # or as many as begin within a second
# Ids of one span: readers take much text under one key for a prompt.
RUN_ID_BYTES = 3000
UNKNOWN = -1
_MEMBER = ("prefill_tokens", "decode_tokens", "context_tokens")


class Step:
    """One engine step, from its start to its end: a context manager."""

    __slots__ = ("counts", "kv_usage_ratio", "members", "start_ns", "steps")

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.counts: dict[str, int] = {}
        self.kv_usage_ratio: float | None = None
        self.members: list[tuple[str, int, int, int]] = []
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
        with contextlib.suppress(Exception):  # whatever was handed to `set` and `member`
            if self._run is not None and self._run.full(step):
                self.flush()
            if self._run is None:
                self._run = _Run(seq, step.start_ns)
            self._run.add(step, end_ns)

    def flush(self) -> None:
        """Hand over what is kept; called by itself once a second and when an engine goes idle is up to the caller."""
        run, self._run = self._run, None
        if run is not None:
            run.hand_over(self._recorder, self._rank)


class _Run:
    """Steps one after another, column by column."""

    __slots__ = ("columns", "elapsed", "end_ns", "id_bytes", "ids", "kv_usage", "members", "offsets", "seq", "start_ns", "wall_ns")  # fmt: skip

    def __init__(self, seq: int, start_ns: int) -> None:
        self.seq = seq
        self.start_ns = start_ns
        self.wall_ns = time_ns() - (perf_counter_ns() - start_ns)
        self.end_ns = start_ns
        self.offsets, self.elapsed = array("q"), array("q")
        self.columns = {name: array("q") for name in s.STEP_COUNTS}
        self.kv_usage = array("d")
        self.ids: dict[str, int] = {}
        self.id_bytes = 0
        self.members = {name: array("q") for name in s.STEP_MEMBERS}

    def full(self, step: Step) -> bool:
        """Whether a step belongs to the next run."""
        return (
            len(self.elapsed) >= RUN_STEPS
            or step.start_ns - self.start_ns >= RUN_NS
            or self.id_bytes + sum(len(member[0]) for member in step.members) > RUN_ID_BYTES
        )

    def add(self, step: Step, end_ns: int) -> None:
        index = len(self.elapsed)
        self.offsets.append(step.start_ns - self.start_ns)
        self.elapsed.append(end_ns - step.start_ns)
        self.end_ns = end_ns
        for name, column in self.columns.items():
            column.append(step.counts.get(name, UNKNOWN))
        self.kv_usage.append(UNKNOWN if step.kv_usage_ratio is None else step.kv_usage_ratio)
        for request_id, *numbers in step.members:
            known = self.ids.get(request_id)
            if known is None:
                known = self.ids[request_id] = len(self.ids)
                self.id_bytes += len(request_id)
            for name, value in zip(s.STEP_MEMBERS, (index, known, *numbers), strict=True):
                self.members[name].append(value)

    def hand_over(self, recorder: Destination, rank: str | None) -> None:
        """Put the run into the recorder's queue as a span of its own trace."""
        attributes: dict[str, Any] = {
            s.STEP_FIRST_SEQ: self.seq,
            s.STEP_RANK: rank,
            s.STEP_OFFSETS_NS: self.offsets,
            s.STEP_ELAPSED_NS: self.elapsed,
        }
        for name, column in self.columns.items():
            if any(value != UNKNOWN for value in column):
                attributes[s.STEP_COUNTS[name]] = column
        if any(value != UNKNOWN for value in self.kv_usage):
            attributes[s.STEP_KV_USAGE] = self.kv_usage.tolist()
        if self.ids:
            attributes[s.STEP_MEMBER_IDS] = list(self.ids)
            attributes.update({s.STEP_MEMBERS[name]: self.members[name] for name in s.STEP_MEMBERS})
        span = Request(recorder, None, attributes, s.SPAN_STEPS)
        span.wall_ns, span.start_ns, span.end_ns = self.wall_ns, self.start_ns, self.end_ns
        span.ended = True
        recorder.put(span)
