"""A finished run as Polars frames: what happened, what an observer saw, and the truth."""

from __future__ import annotations

from dataclasses import dataclass, replace

import polars as pl

from pdtrace.errors import BadOption
from pdtrace.simulator import log, seen, truth
from pdtrace.simulator.fleet import Fleet
from pdtrace.simulator.scenario import BLOCK_TOKENS, Scenario
from pdtrace.simulator.scenarios import SCENARIOS

DURATION_S = 120.0  # of the load, unless told otherwise


@dataclass(frozen=True)
class Run:
    """All instants are true time, ns; only `seen_ns` and `prefills` are what an observer was shown."""

    scenario: Scenario
    seed: int
    duration_s: float
    requests: pl.DataFrame
    tries: pl.DataFrame  # failed attempts that another one followed
    steps: pl.DataFrame
    members: pl.DataFrame
    emissions: pl.DataFrame
    prefills: pl.DataFrame
    preemptions: pl.DataFrame
    workers: pl.DataFrame  # worker, role, host and that host's clock: offset_ns, drift_ppm; died_ns
    lost: pl.DataFrame
    truth_workers: pl.DataFrame
    truth_gaps: pl.DataFrame


def simulate(scenario: str | Scenario, seed: int = 0, duration_s: float | None = None) -> Run:
    """Play a scenario for 120 s of load or as told; the same seed gives the same run."""
    duration_s = DURATION_S if duration_s is None else duration_s
    if isinstance(scenario, str):
        scenario = named(scenario)
    if scenario.kv_peak_ratio:
        scenario = replace(scenario, kv_blocks=_short_of_peak(scenario, seed, duration_s))
    fleet = Fleet(scenario, seed, duration_s).run()
    emissions = seen.emissions(fleet)
    requests = log.request_frame(fleet.requests)
    lost, gaps = truth.losses(fleet.workers, emissions)
    return Run(
        scenario=scenario,
        seed=seed,
        duration_s=duration_s,
        requests=requests,
        tries=log.try_frame(fleet.requests),
        steps=log.step_frame(fleet.workers, scenario),
        members=log.member_frame(fleet.workers),
        emissions=emissions,
        prefills=seen.prefills(requests, scenario),
        preemptions=log.preemption_frame(fleet.workers),
        workers=seen.clocks(fleet),
        lost=lost,
        truth_workers=truth.by_worker(fleet.workers, lost),
        truth_gaps=gaps,
    )


def _short_of_peak(scenario: Scenario, seed: int, duration_s: float) -> int:
    """Blocks that do at most times, but not at the worst: a share of what the same load would take
    with plenty, and enough for the longest request."""
    plenty = replace(scenario, kv_peak_ratio=0.0, kv_blocks=1_000_000)
    fleet = Fleet(plenty, seed, duration_s).run()
    peak = max(step.blocks for worker in fleet.workers for step in worker.steps)
    longest = max(r.prompt + r.output for r in fleet.requests) // BLOCK_TOKENS + 2
    return max(int(peak * scenario.kv_peak_ratio), longest)


def named(name: str) -> Scenario:
    """The scenario of this name, or one sentence that says which there are."""
    if name not in SCENARIOS:
        raise BadOption(
            f"no scenario is called {name!r}", "`pdtrace demo --list` names all scenarios"
        )
    return SCENARIOS[name]
