"""One name through many files and long pauses: what is one deployment, what stays apart."""

from __future__ import annotations

from typing import Any

import pytest
from identity_fleet import Fleet, deployments_of


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def call(fleet: Fleet, n: int, at: float, path: str, **row: Any) -> None:
    """One request of a server that is known by its service name only."""
    known = {"worker": "service:vllm", "trace_id": f"t{n}", "span_id": f"s{n}", **row}
    fleet.leg(
        f"E{n}", "engine", known.pop("worker"), at, at + 1.5, path=path, request_id=f"r{n}", **known
    )


@pytest.mark.parametrize(
    ("paths", "deployments"),
    [
        pytest.param([f"run/trace-{name}.json" for name in "abcdefgh"], 1, id="one trace a file"),
        pytest.param(
            [f"run/{name}.json" for name in "abcdefghijj"], 1, id="one file of ten has two"
        ),
        # Two dumps beside each other: nothing says that their servers are one.
        pytest.param([f"run/{name}.json" for name in "abababab"], 2, id="many traces a file"),
        pytest.param([f"{place}/{n}.json" for place in "ab" for n in "stuv"], 2, id="two folders"),
    ],
)
def test_files_of_one_trace_each_in_one_folder_are_one_recording(
    fleet: Fleet, paths: list[str], deployments: int
) -> None:
    for n, path in enumerate(paths):
        call(fleet, n, 0.1 * n, path)
    assert len(set(deployments_of(fleet.run()).values())) == deployments


def test_a_quiet_server_is_one_deployment(fleet: Fleet) -> None:
    for n in range(5):
        call(fleet, n, 900 * n, "run/traces.json")
    assert len(set(deployments_of(fleet.run()).values())) == 1


def routed(fleet: Fleet, n: int, at: float, engine: str | None) -> None:
    """A request through a router known by its service name only, and perhaps an engine behind it."""
    path = "run/traces.json"
    fleet.leg(f"R{n}", "router", "service:gw", at, at + 1, path=path, trace_id=f"t{n}", span_id=f"r{n}")  # fmt: skip
    if engine:
        fleet.leg(f"E{n}", "engine", engine, at, at + 1, path=path, trace_id=f"t{n}", span_id=f"e{n}", parent_span_id=f"r{n}")  # fmt: skip


def test_a_pause_behind_which_other_processes_serve_begins_another_run(fleet: Fleet) -> None:
    """Refused requests (no engine) go with what came before them; those at the very beginning with what follows."""
    engines = (None, "instance:a", None, "instance:b", None, "instance:b")
    for n, engine in enumerate(engines):
        routed(fleet, n, 300 * n, engine)
    found = deployments_of(fleet.run())
    assert found["R0"] == found["R1"] == found["R2"] != found["R3"]
    assert found["R3"] == found["R4"] == found["R5"]


def test_a_pause_behind_which_the_same_process_serves_begins_nothing(fleet: Fleet) -> None:
    for n, engine in enumerate(("instance:a", None, "instance:a")):
        routed(fleet, n, 300 * n, engine)
    assert len(set(deployments_of(fleet.run()).values())) == 1
