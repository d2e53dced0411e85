"""A serving simulator that knows the truth: what each prefill took from each decode.

`simulate(scenario, seed)` gives a Run of Polars frames; `write(run, folder, shape)` writes the dumps
that a real system would leave. For tests, benchmarks and demos; docs/simulator.md says what it
models and what it does not.
"""

from __future__ import annotations

from pdtrace.simulator.run import Run, simulate
from pdtrace.simulator.scenario import Scenario
from pdtrace.simulator.scenarios import SCENARIOS
from pdtrace.simulator.writers import write

__all__ = ["SCENARIOS", "Run", "Scenario", "simulate", "write"]
