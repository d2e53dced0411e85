"""A stand-in for vLLM's scheduler modules, shaped like the real ones, with an engine loop and a clock of its own.

Names, signatures and what is set when, as read in vllm/v1/core/sched/{scheduler,async_scheduler,output}.py,
vllm/v1/request.py, vllm/v1/engine/{__init__,core}.py of three versions:
0.8 (cached requests one object each, one EngineCoreOutputs), 0.10 (0.10.2) and 0.33 (0.33.0).
"""

from __future__ import annotations

import abc
import enum
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Clock:
    """The time of the stand-in, nanoseconds."""

    def __init__(self) -> None:
        self.now = 1_000_000_000

    def __call__(self) -> int:
        return self.now

    def pass_ms(self, ms: float) -> None:
        self.now += int(ms * 1e6)


class RequestStatus(enum.IntEnum):
    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return ("stop", "length", "abort", "error")[self.value]


class Request:
    def __init__(
        self,
        request_id: str,
        prompt: int,
        max_tokens: int,
        trace_headers: dict[str, str] | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        stop: list[str] | None = None,
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = prompt
        self.max_tokens = max_tokens
        self.trace_headers = trace_headers
        self.kv_transfer_params = kv_transfer_params
        self.sampling_params = SimpleNamespace(stop=stop or [])
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.output: list[int] = []

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output)

    def is_finished(self) -> bool:
        return self.status > RequestStatus.PREEMPTED


@dataclass
class NewRequestData:
    req_id: str
    num_computed_tokens: int


@dataclass
class CachedRequestData:
    req_ids: list[str]
    num_computed_tokens: list[int]
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int


@dataclass
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None


@dataclass
class EngineCoreOutputs:
    outputs: list[EngineCoreOutput]


class KVCacheManager:
    def __init__(self) -> None:
        self.usage = 0.25


class Scheduler:
    """Running requests first, the last one preempted where KV is short; then waiting ones in order."""

    version = "0.33"
    budget = 512
    kv_tokens = 100_000
    drafts = 0

    def __init__(self, vllm_config: Any, **_: Any) -> None:
        self.vllm_config = vllm_config
        self.connector = getattr(vllm_config, "connector", None)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished_recving_kv_req_ids: set[str] = set()
        self.failed_recving_kv_req_ids: set[str] = set()
        self.kv_cache_manager = KVCacheManager()
        self.is_down = False

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def has_requests(self) -> bool:
        return bool(self.requests)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        counts: dict[str, int] = {}
        cached: list[Request] = []
        new: list[NewRequestData] = []
        resumed: set[str] = set()
        preempted = False
        for request in list(self.running):
            if request not in self.running or sum(counts.values()) >= self.budget:
                continue
            left = (
                request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            )
            if (
                left <= 0
                or len(request.output) + request.num_output_placeholders > request.max_tokens
            ):
                continue
            left = 1 + self.drafts if left == 1 else left
            count = min(left, self.budget - sum(counts.values()))
            while self._held() + count > self.kv_tokens:
                victim = self.running.pop()
                victim.status, victim.num_computed_tokens = RequestStatus.PREEMPTED, 0
                victim.num_output_placeholders = 0
                counts.pop(victim.request_id, None)
                cached = [r for r in cached if r is not victim]
                self.waiting.appendleft(victim)
                preempted = True
                if victim is request:
                    break
            if request in self.running:
                counts[request.request_id] = count
                cached.append(request)
        skipped: list[Request] = []
        while self.waiting and not preempted and sum(counts.values()) < self.budget:
            request = self.waiting.popleft()
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                if request.request_id not in self.finished_recving_kv_req_ids:
                    skipped.append(request)
                    continue
                self.finished_recving_kv_req_ids.remove(request.request_id)
                if request.request_id in self.failed_recving_kv_req_ids:
                    self.failed_recving_kv_req_ids.remove(request.request_id)
                    request.num_computed_tokens = 0
                request.status = RequestStatus.WAITING
            elif self.connector is not None and self.connector(request):
                request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
                request.num_computed_tokens = request.num_tokens - 1
                skipped.append(request)
                continue
            count = min(
                request.num_tokens - request.num_computed_tokens, self.budget - sum(counts.values())
            )
            if self._held() + count > self.kv_tokens:
                skipped.append(request)
                break
            counts[request.request_id] = count
            if request.status == RequestStatus.PREEMPTED:
                resumed.add(request.request_id)
                cached.append(request)
            else:
                new.append(NewRequestData(request.request_id, request.num_computed_tokens))
            request.status = RequestStatus.RUNNING
            self.running.append(request)
        self.waiting.extendleft(reversed(skipped))
        before = [r.num_computed_tokens for r in cached]
        for request_id, count in counts.items():
            self._advanced(self.requests[request_id], count)
        return SchedulerOutput(
            new, self._cached(cached, before, resumed), counts, sum(counts.values())
        )

    def _held(self) -> int:
        return sum(r.num_computed_tokens for r in self.running)

    def _cached(self, requests: list[Request], before: list[int], resumed: set[str]) -> Any:
        ids = [r.request_id for r in requests]
        if self.version == "0.8":
            return [
                SimpleNamespace(
                    req_id=i, num_computed_tokens=n, resumed_from_preemption=i in resumed
                )
                for i, n in zip(ids, before, strict=True)
            ]
        if self.version == "0.10":
            return SimpleNamespace(
                req_ids=ids,
                num_computed_tokens=before,
                resumed_from_preemption=[i in resumed for i in ids],
            )
        return CachedRequestData(ids, before, resumed)

    def _advanced(self, request: Request, count: int) -> None:
        request.num_computed_tokens += count

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        outputs = []
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            tokens = list(model_runner_output.sampled.get(request_id, ()))
            if request is None or request.is_finished() or not tokens:
                continue
            request.output += tokens
            request.num_output_placeholders = max(0, request.num_output_placeholders - len(tokens))
            reason = FinishReason.LENGTH if len(request.output) >= request.max_tokens else None
            if reason is not None:
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
                self._free(request)
            outputs.append(EngineCoreOutput(request_id, tokens, reason))
        self.finished_recving_kv_req_ids |= set(model_runner_output.arrived)
        self.failed_recving_kv_req_ids |= set(model_runner_output.failed)
        made = EngineCoreOutputs(outputs)
        return made if self.version == "0.8" else {0: made}

    def _free(self, request: Request) -> None:
        self.requests.pop(request.request_id, None)
        self.running = [r for r in self.running if r is not request]
        if request in self.waiting:
            self.waiting.remove(request)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> Any:
        if request_ids is None:
            request_ids = list(self.requests)
        ids = (request_ids,) if isinstance(request_ids, str) else set(request_ids)
        ended = [self.requests[i] for i in ids if i in self.requests]
        for request in ended:
            request.status = finished_status
            self._free(request)
        return ended

    def shutdown(self) -> None:
        self.is_down = True


class AsyncScheduler(Scheduler):
    """Schedules the next batch before the result of the last one is there."""

    def _advanced(self, request: Request, count: int) -> None:
        super()._advanced(request, count)
        if request.num_computed_tokens >= request.num_tokens + request.num_output_placeholders:
            request.num_output_placeholders += 1


class StatLoggerBase(abc.ABC):
    """vllm/v1/metrics/loggers.py; plugins are classes below it."""

    @abc.abstractmethod
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

    @abc.abstractmethod
    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None: ...  # fmt: skip

    @abc.abstractmethod
    def log_engine_initialized(self) -> None: ...


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.33") -> None:
    """Make `import vllm.v1.core.sched.scheduler` and the others find the stand-in."""
    fields: dict[str, Any] = {"request_id": ""}
    if version == "0.33":
        fields["external_req_id"] = None
    places: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": AsyncScheduler},
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.loggers": {"StatLoggerBase": StatLoggerBase},
        "vllm.v1.engine": {"EngineCoreRequest": type("EngineCoreRequest", (), fields)},
    }
    monkeypatch.setattr(Scheduler, "version", version)
    if version == "0.8":
        monkeypatch.delattr(Scheduler, "get_request_counts")
        monkeypatch.delattr(Scheduler, "shutdown")
    for name, content in places.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


def config(**given: Any) -> Any:
    """A VllmConfig with what is read of it."""
    base: dict[str, Any] = {
        "scheduler_config": SimpleNamespace(async_scheduling=False),
        "model_config": SimpleNamespace(served_model_name=["tiny"], model="/models/tiny"),
        "parallel_config": SimpleNamespace(data_parallel_size=1, data_parallel_index=0),
        "kv_transfer_config": None,
        "diffusion_config": None,
    }
    return SimpleNamespace(**{**base, **given})


@dataclass
class Result:
    """What the model runner gives back: tokens by request, requests whose KV has arrived or failed to."""

    sampled: dict[str, list[int]]
    arrived: list[str]
    failed: list[str]


class Engine:
    """The engine's loop: a batch takes 1 ms to schedule and `step_ms` plus 0.1 ms a prompt token to run."""

    def __init__(
        self, scheduler: Any, clock: Clock, step_ms: float = 10, in_flight: int = 1
    ) -> None:
        self.scheduler, self.clock, self.step_ms, self.in_flight = (
            scheduler,
            clock,
            step_ms,
            in_flight,
        )
        self.batches: deque[tuple[SchedulerOutput, Result, int]] = deque()
        self.free_at = 0
        self.arrivals: dict[str, int] = {}  # request -> instant at which its KV is there
        self.failures: set[str] = set()

    def step(self) -> Any:
        """One turn of the loop; None where it only filled the queue."""
        output = self.scheduler.schedule()
        self.clock.pass_ms(1)
        sampled, prompt = {}, 0
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            start = request.num_computed_tokens - count
            prompt += max(0, min(count, request.num_prompt_tokens - start))
            if start + count >= request.num_tokens:
                sampled[request_id] = [7] * (count if start >= request.num_prompt_tokens else 1)
        work = (self.step_ms + prompt / 10) * 1e6 if output.num_scheduled_tokens else 0
        self.free_at = max(self.free_at, self.clock.now) + int(work)
        if output.num_scheduled_tokens or not self.batches:
            self.batches.append((output, Result(sampled, [], []), self.free_at))
        if len(self.batches) < self.in_flight and output.num_scheduled_tokens:
            return None
        output, result, done = self.batches.popleft()
        self.clock.now = max(self.clock.now, done)
        result.arrived = [r for r, at in self.arrivals.items() if at <= self.clock.now]
        result.failed = [r for r in result.arrived if r in self.failures]
        for request_id in result.arrived:
            del self.arrivals[request_id]
        return self.scheduler.update_from_output(output, result)

    def run(self) -> None:
        """Until nothing is left."""
        turns = 0
        while self.scheduler.has_requests() or self.batches:
            self.step()
            turns += 1
            assert turns < 10_000, "the stand-in does not come to an end"
