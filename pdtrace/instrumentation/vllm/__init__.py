"""vLLM through its public doors; nothing of vLLM is imported before vLLM asks for one of them.

    PDTRACE_FOLDER=traces vllm serve MODEL \\
        --scheduler-cls pdtrace.instrumentation.vllm.PdtraceScheduler \\
        --middleware pdtrace.instrumentation.vllm.PdtraceMiddleware

docs/engines.md says what each door records, and what it cannot see.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "PdtraceScheduler": "pdtrace.instrumentation.vllm.scheduler",
    "PdtraceMiddleware": "pdtrace.instrumentation.vllm.frontend",
    "PdtraceStatLogger": "pdtrace.instrumentation.vllm.stats",
}

__all__ = ["PdtraceMiddleware", "PdtraceScheduler", "PdtraceStatLogger"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(home), name)
