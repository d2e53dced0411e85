"""Drop-in instrumentation of serving code: spans of requests and their phases, token times, hops.

Light enough for the hot path (bench/instrument.py has the figures): it loads neither DuckDB nor
Polars, never raises into, blocks or slows the serving process, and never changes its answers.
"""

from __future__ import annotations

from pdtrace.instrumentation.api import (
    dropped_requests,
    flush,
    instrument,
    instrumented,
    phase,
    request,
    steps,
    token,
    uninstrument,
)
from pdtrace.instrumentation.engine_steps import Step, Steps
from pdtrace.instrumentation.requests import Hop, Phase, Request, Stream, current

__all__ = [
    "Hop", "Phase", "Request", "Step", "Steps", "Stream", "current", "dropped_requests", "flush", "instrument",
    "instrumented", "phase", "request", "steps", "token", "uninstrument",
]  # fmt: skip
