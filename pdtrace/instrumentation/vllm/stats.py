"""vLLM's iteration details as engine steps (entry point group `vllm.stat_logger_plugins`).

For servers that keep their own scheduler class: with `--enable-logging-iteration-details` vLLM (0.32
and 0.33 were read) hands the composition of each step to its stat loggers, in the API server. Steps
end when they are told there; who was in them is not told. Where PdtraceScheduler records the
engine, this records nothing.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from pdtrace.instrumentation import api, asgi
from pdtrace.instrumentation._doors import once, switched_on
from pdtrace.instrumentation.engine_steps import Steps


class PdtraceStatLogger(StatLoggerBase):  # type: ignore[misc, unused-ignore]
    """One engine's steps; does nothing unless switched on."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._steps: Steps | None = None
        try:
            scheduler = getattr(getattr(vllm_config, "scheduler_config", None), "scheduler_cls", "")
            if "pdtrace." in str(scheduler):
                asgi.served_as("frontend")
            elif switched_on(named=False):
                self._steps = api.steps(rank=str(engine_index))
        except Exception as error:
            once("pdtrace: vLLM's iterations are not recorded", error=error)

    def record(self, scheduler_stats: Any, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
        """A step is over."""
        details = getattr(scheduler_stats, "iteration_details", None)
        if self._steps is None or details is None:
            return
        try:
            self._step(self._steps, details, scheduler_stats)
        except Exception as error:
            self._steps = None
            once("pdtrace: vLLM's iterations are not understood", error=error)

    def _step(self, steps: Steps, details: Any, stats: Any) -> None:
        if getattr(details, "is_dummy", False):  # an idle data parallel rank keeps pace
            return
        end = perf_counter_ns()
        step = steps.step()
        step.start_ns = end - int(details.elapsed_ms * 1e6)
        step.set(
            prefill_requests=details.num_ctx_requests,
            prefill_tokens=details.num_ctx_tokens,
            decode_requests=details.num_generation_requests,
            decode_tokens=details.num_generation_tokens,
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs + getattr(stats, "num_skipped_waiting_reqs", 0),
            kv_usage_ratio=stats.kv_cache_usage,
        )
        steps.add(step, end)
        if not stats.num_running_reqs:
            steps.flush()

    def log(self) -> None:
        """Every now and then: what is kept is handed over."""
        if self._steps is not None:
            self._steps.flush()

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
