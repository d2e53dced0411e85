"""A finished run as Polars frames: what happened, what an observer saw, and the truth."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from pdtrace.errors import BadOption
from pdtrace.simulator import log, seen, truth
from pdtrace.simulator.fleet import Fleet
from pdtrace.simulator.scenario import Scenario
from pdtrace.simulator.scenarios import SCENARIOS

DURATION_S = 120.0  # of the load, unless told otherwise


@dataclass(frozen=True)
class Run:
    """All instants are true time, ns; only `seen_ns` and `prefills` are what an observer was shown."""

    scenario: Scenario
    seed: int
    duration_s: float
    requests: pl.DataFrame
    steps: pl.DataFrame
    members: pl.DataFrame
    emissions: pl.DataFrame
    prefills: pl.DataFrame
    preemptions: pl.DataFrame
    workers: pl.DataFrame  # worker, role, host and that host's clock: offset_ns, drift_ppm
    lost: pl.DataFrame
    truth_workers: pl.DataFrame
    truth_gaps: pl.DataFrame


def simulate(scenario: str | Scenario, seed: int = 0, duration_s: float | None = None) -> Run:
    """Play a scenario for 120 s of load or as told; the same seed gives the same run."""
    duration_s = DURATION_S if duration_s is None else duration_s
    if isinstance(scenario, str):
        scenario = named(scenario)
    fleet = Fleet(scenario, seed, duration_s).run()
    emissions = seen.emissions(fleet)
    requests = log.request_frame(fleet.requests)
    lost, gaps = truth.losses(fleet.workers, emissions)
    return Run(
        scenario=scenario,
        seed=seed,
        duration_s=duration_s,
        requests=requests,
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


def named(name: str) -> Scenario:
    """The scenario of this name, or one sentence that says which there are."""
    if name not in SCENARIOS:
        raise BadOption(
            f"no scenario is called {name!r}", "`pdtrace demo --list` names all scenarios"
        )
    return SCENARIOS[name]
