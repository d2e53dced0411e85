"""vLLM's scheduler, recorded: `--scheduler-cls pdtrace.instrumentation.vllm.PdtraceScheduler`.

A subclass of the scheduler that vLLM would have used (asynchronous or not, or the one that
PDTRACE_VLLM_SCHEDULER names), made where vLLM makes its scheduler. Only methods of vLLM's
SchedulerInterface are overridden; each calls the original first and returns what it returned.
Recording that breaks is told once and ends; scheduling goes on untouched.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import Any

from pdtrace.instrumentation._doors import once, switched_on
from pdtrace.instrumentation.vllm.book import Book
from pdtrace.instrumentation.vllm.lives import Deployment

_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
_ASYNC = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
_DIFFUSION = "vllm.v1.core.sched.diffusion_scheduler.DiffusionScheduler"
_ASYNC_DIFFUSION = "vllm.v1.core.sched.diffusion_scheduler.DiffusionAsyncScheduler"
_made: dict[type, type] = {}


class PdtraceScheduler:
    """What is recorded of a scheduler; making one makes a subclass of vLLM's."""

    _pdtrace: Book | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance of the recorded subclass of the scheduler that vLLM would have used."""
        if cls is not PdtraceScheduler:
            return super().__new__(cls)
        config = kwargs.get("vllm_config", args[0] if args else None)
        return object.__new__(recorded(base(config)))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            config = getattr(self, "vllm_config", None)
            if switched_on(named=True):
                self._pdtrace = Book(described(config))
        except Exception as error:
            once("pdtrace: vLLM's scheduler is not recorded", error=error)

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a request in."""
        result = super().add_request(request, *args, **kwargs)  # type: ignore[misc]
        if self._pdtrace is not None:
            self._kept(self._pdtrace.added, request)
        return result

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Make the next batch."""
        if self._pdtrace is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        began = perf_counter_ns()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self._pdtrace is not None:  # as in update_from_output
            self._kept(self._pdtrace.scheduled, self, output, began)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Take in a batch's result."""
        if self._pdtrace is None:
            return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        now = perf_counter_ns()
        answers = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self._pdtrace is not None:  # what ends requests inside may have broken it
            self._kept(self._pdtrace.updated, self, scheduler_output, answers, now)
        return answers

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """End requests from outside."""
        if self._pdtrace is None:
            return super().finish_requests(request_ids, *args, **kwargs)  # type: ignore[misc]
        ids: list[str] | None = None
        if isinstance(request_ids, str):
            ids = [request_ids]
        elif isinstance(request_ids, Iterable):
            ids = list(request_ids)  # it may be one that can be read once only
            request_ids = ids
        result = super().finish_requests(request_ids, *args, **kwargs)  # type: ignore[misc]
        status = kwargs.get("finished_status", args[0] if args else None)
        if self._pdtrace is not None:
            self._kept(self._pdtrace.finished, ids, status)
        return result

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        """Go down."""
        if self._pdtrace is not None:
            self._kept(self._pdtrace.closed)
        shutdown = getattr(super(), "shutdown", None)  # not in all versions
        return None if shutdown is None else shutdown(*args, **kwargs)

    def _kept(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:
            book, self._pdtrace = self._pdtrace, None
            once("pdtrace: this vLLM is not understood; it is no longer recorded", error=error)
            if book is not None:
                book.forget()


def base(config: Any) -> type:
    """The scheduler that vLLM would have used under this configuration."""
    named = os.environ.get("PDTRACE_VLLM_SCHEDULER")
    if named:
        return _class(named)
    asynchronous = getattr(getattr(config, "scheduler_config", None), "async_scheduling", None)
    if getattr(config, "diffusion_config", None) is not None:
        return _class(_ASYNC_DIFFUSION if asynchronous else _DIFFUSION)
    return _class(_ASYNC if asynchronous else _SCHEDULER)


def recorded(scheduler: type) -> type:
    """The recorded subclass of a scheduler class; the same one each time."""
    if scheduler not in _made:
        _made[scheduler] = type(f"Pdtrace{scheduler.__name__}", (PdtraceScheduler, scheduler), {})
    return _made[scheduler]


def described(config: Any) -> Deployment:
    """What the configuration says of this engine; what this version does not have stays unknown."""
    transfer = getattr(config, "kv_transfer_config", None)
    kv_role = getattr(transfer, "kv_role", None)
    parallel = getattr(config, "parallel_config", None)
    rank = getattr(parallel, "data_parallel_index", None)
    if rank is None:
        rank = getattr(parallel, "data_parallel_rank", None)
    several = (getattr(parallel, "data_parallel_size", 1) or 1) > 1 or bool(rank)
    return Deployment(
        model=_model(getattr(config, "model_config", None)),
        role={"kv_producer": "prefill", "kv_consumer": "decode"}.get(str(kv_role), "aggregated"),
        connector=getattr(transfer, "kv_connector", None),
        consumer=str(kv_role) == "kv_consumer",
        rank=str(rank) if several and rank is not None else None,
        randomised_ids=_randomised_ids(),
    )


def _model(config: Any) -> str | None:
    served = getattr(config, "served_model_name", None)
    if isinstance(served, list | tuple):
        served = served[0] if served else None
    name = served or getattr(config, "model", None)
    return None if name is None else str(name)[:256]


def _randomised_ids() -> bool:
    """Whether this version puts 8 random digits behind each request id (since 0.14)."""
    if os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") not in ("", "0", "false"):
        return False
    return hasattr(_class("vllm.v1.engine.EngineCoreRequest"), "external_req_id")


def _class(path: str) -> type:
    module, _, name = path.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found
