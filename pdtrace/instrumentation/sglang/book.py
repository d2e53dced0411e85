"""What SGLang's scheduler does, kept as requests with their phases and as engine steps.

Fed after each processed batch; knows SGLang's objects by attribute only
(sglang/srt/managers/schedule_batch.py and sglang/srt/observability/req_time_stats.py, 0.5.23). SGLang
stamps its own stages on the clock that we use too (`time.perf_counter`): queues and transfers are
those. A step lasts from the later of its launch and the end of the step before it to the end of the
processing of its result, when its tokens are handed on.
"""

from __future__ import annotations

import os
from collections import deque
from time import monotonic_ns, perf_counter_ns
from typing import Any

from pdtrace.instrumentation import api
from pdtrace.instrumentation.requests import Request

_SECOND = 1_000_000_000
_ROLES = {"prefill": "prefill", "decode": "decode", "null": "aggregated"}
# Stages of SchedulerReqTimeStats: (from, to, detail). What begins the wait before them differs by role.
_STAGES = {
    "aggregated": (
        ("wait_queue_entry_time", "forward_entry_time", "prefill_queue"),
        ("forward_entry_time", "prefill_finished_time", "prefill_wall"),
    ),
    "prefill": (
        ("prefill_bootstrap_queue_entry_time", "wait_queue_entry_time", "prefill_queue"),
        ("wait_queue_entry_time", "forward_entry_time", "prefill_queue"),
        ("forward_entry_time", "prefill_transfer_queue_entry_time", "prefill_wall"),
        ("prefill_transfer_queue_entry_time", "prefill_kv_transfer_finish_time", "kv_transfer"),
    ),
    # From the transfer queue's entry on the decode side waits for the prefill worker and for the KV alike.
    "decode": (
        ("decode_prealloc_queue_entry_time", "decode_transfer_queue_entry_time", "kv_space_wait"),
        ("decode_transfer_queue_entry_time", "wait_queue_entry_time", "kv_wait_upper_bound"),
        ("wait_queue_entry_time", "forward_entry_time", "decode_queue"),
    ),
}
_ENTRIES = (
    "prefill_bootstrap_queue_entry_time",
    "decode_prealloc_queue_entry_time",
    "wait_queue_entry_time",
)
_REMEMBERED = 4096  # requests that ended: batches in flight may hold them once more


class _Life:
    """A request from its first batch to its end."""

    __slots__ = ("emitted", "request", "role", "theirs")

    def __init__(self, theirs: Any, request: Request, role: str) -> None:
        self.theirs = theirs
        self.request = request
        self.role = role
        self.emitted = 0


class Book:
    """The requests and steps of one scheduler. Not for several threads: SGLang calls it from one."""

    def __init__(self, model: str | None = None, records: bool = True) -> None:
        self.records = records
        self.lives: dict[str, _Life] = {}
        self._model = model
        self._steps = api.steps()
        self._last_end = 0
        self._ended: deque[str] = deque()
        self._ended_ids: set[str] = set()

    def processed(self, batch: Any) -> None:
        """A batch's result was processed just now."""
        now, mode = perf_counter_ns(), batch.forward_mode
        if mode.is_idle():
            return
        prompts = self._prompts(batch)
        launched = getattr(batch, "launch_ts", None)
        start = None if not launched else max(_from_monotonic(launched), self._last_end)
        self._last_end = now
        decoded, decoders = 0, []
        for req in batch.reqs:
            life = self._known(req, now)
            if life is None:
                continue
            made = max(0, len(req.output_ids) - life.emitted)
            life.emitted = len(req.output_ids)
            if made:
                life.request.stream.at(now, made)
            if req.rid in prompts:
                if start is not None and prompts[req.rid][0]:
                    life.request.mark("prefill_exec", start, now, tokens=prompts[req.rid][0])
            else:
                decoded += made
                decoders.append(req.rid)
            if req.finished() and life.role != "prefill":
                self._end(life, now)
        if start is not None and not mode.is_prebuilt():  # which only takes over KV and a token
            self._stepped(batch, prompts, (start, now), decoders, decoded)
        for life in [one for one in self.lives.values() if one.role == "prefill"]:
            # What handed_over() was not told of.
            if _stamp(getattr(life.theirs, "time_stats", None), "completion_time"):
                self._end(life, now)
        if not self.lives:
            self._steps.flush()

    def handed_over(self, done: Any) -> None:
        """The KV of these requests of a prefill worker is with the decode worker, or failed to get there."""
        now = perf_counter_ns()
        for req in done:
            life = self.lives.get(req.rid)
            if life is not None:
                self._end(life, now)
        if not self.lives:
            self._steps.flush()

    def forget(self) -> None:
        """Recording broke: what is under way is not told, rather than told wrongly as aborted."""
        for life in self.lives.values():
            life.request.ended = True
        self.lives.clear()

    def _prompts(self, batch: Any) -> dict[str, tuple[int, int]]:
        """(prompt tokens computed, tokens cached before) of each request whose prompt was in the batch."""
        mode = batch.forward_mode
        lengths = getattr(batch, "extend_lens", None)
        if mode.is_decode() or not mode.is_extend() or mode.is_target_verify() or lengths is None:
            return {}
        cached = getattr(batch, "prefix_lens", None) or [0] * len(lengths)
        beside = {req.rid for req in getattr(batch, "decoding_reqs", None) or ()}  # a mixed batch
        rows = zip(batch.reqs, lengths, cached, strict=False)
        return {req.rid: (int(n), int(before)) for req, n, before in rows if req.rid not in beside}

    def _stepped(
        self, batch: Any, prompts: dict[str, tuple[int, int]], times: tuple[int, int],
        decoders: list[str], decoded: int,
    ) -> None:  # fmt: skip
        step = self._steps.step()
        step.start_ns, end = times
        step.set(
            prefill_requests=len(prompts),
            prefill_tokens=sum(tokens for tokens, _ in prompts.values()),
            prefill_kv_tokens=sum(before for _, before in prompts.values()),
            decode_requests=len(decoders),
            decode_tokens=decoded,
        )
        if prompts:
            for rid, (tokens, before) in prompts.items():
                step.member(rid, prefill_tokens=tokens, context_tokens=before)
            step.decoded(decoders)
        self._steps.add(step, end)

    def _known(self, req: Any, now: int) -> _Life | None:
        life = self.lives.get(req.rid)
        if life is None and req.rid not in self._ended_ids:
            stats = getattr(req, "time_stats", None)
            role = _role(stats)
            room = getattr(req, "bootstrap_room", None)
            request = api.request(
                request_id=str(req.rid),
                role=role,
                model=self._model,
                prompt_tokens=len(req.origin_input_ids),
                max_tokens=getattr(getattr(req, "sampling_params", None), "max_new_tokens", None),
                room=None if room is None else str(room),
            )
            entered = min((t for t in (_stamp(stats, name) for name in _ENTRIES) if t), default=now)
            request.wall_ns -= request.start_ns - entered
            request.start_ns = entered
            life = self.lives[req.rid] = _Life(req, request, role)
        return life

    def _end(self, life: _Life, now: int) -> None:
        req, request = life.theirs, life.request
        self.lives.pop(req.rid, None)
        self._ended.append(req.rid)
        self._ended_ids.add(req.rid)
        if len(self._ended) > _REMEMBERED:
            self._ended_ids.discard(self._ended.popleft())
        stats = getattr(req, "time_stats", None)
        for begin, end, detail in _STAGES[life.role]:
            a, b = _stamp(stats, begin), _stamp(stats, end)
            if a and b and b >= a:
                attributes = {"direction": "prefill_to_decode"} if detail == "kv_transfer" else {}
                request.mark(detail, a, b, **attributes)
        times = request.stream.times
        if len(times) > 1:
            request.mark("decode", times[0], times[-1])
        reason = _reason(req)
        request.set(
            output_tokens=life.emitted,
            cached_tokens=getattr(req, "cached_tokens", None),
            preemptions=getattr(req, "retraction_count", 0) or None,
            finish_reasons=[reason],
        )
        request.end(aborted=reason == "abort")


def _role(stats: Any) -> str:
    told = os.environ.get("PDTRACE_ROLE")
    if told in _STAGES:
        return told
    mode = getattr(stats, "disagg_mode", None)
    return _ROLES.get(str(getattr(mode, "value", mode)), "aggregated")


def _stamp(stats: Any, name: str) -> int:
    """One of SGLang's stamps in our nanoseconds; 0 where it was not set."""
    value = getattr(stats, name, 0.0)
    return int(value * _SECOND) if isinstance(value, int | float) and value > 0 else 0


def _from_monotonic(seconds: float) -> int:
    """An instant of `time.monotonic` on the clock of `time.perf_counter_ns` (the same one on Linux)."""
    return int(seconds * _SECOND) + (perf_counter_ns() - monotonic_ns())


def _reason(req: Any) -> str:
    told = getattr(req, "finished_reason", None)
    kind = told.to_json().get("type") if told is not None else None
    return str(kind) if kind else "unknown"
