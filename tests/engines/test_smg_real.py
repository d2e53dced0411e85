"""The smg gateway before recorded stub workers: its spans join theirs, its choices are kept."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import run_smg as smg
from checks import (
    balanced,
    each_request_once,
    exact_partition,
    joined_by,
    made,
    or_skip,
    read,
    served_where,
    workers_are,
)
from processes import load

REQUESTS = ("--requests", "24")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    or_skip(smg.install)


def capture(folder: Path, mode: str, recorded: bool = False) -> Path:
    dumps = folder / "capture"
    if made(folder):
        return folder
    with smg.serving(dumps, mode) as url:
        traces = dumps / "client" if recorded else None
        load(url, smg.MODEL, folder / "truth.jsonl", *REQUESTS, recorded=traces)
    return folder


@pytest.mark.parametrize("mode", smg.MODES)
def test_gateway_and_workers_are_one_request(mode: str, folder: Callable[[str], Path]) -> None:
    run = read(capture(folder(f"smg-{mode}"), mode))
    split = mode == "disaggregated"
    workers_are(run, {"router": 1, **({"prefill": 2, "decode": 2} if split else {"aggregated": 2})})
    each_request_once(run)
    joined_by(run, "router")
    served_where(run, mode)
    exact_partition(run)
    assert len(run.said().deployments) == 1
    choices = run.rows(
        "SELECT request_id, list(phase ORDER BY phase) AS phases FROM decisions GROUP BY ALL"
    )
    assert len(choices) == 24
    assert {tuple(row["phases"]) for row in choices} == {("decode", "prefill") if split else ("aggregated",)}  # fmt: skip


def test_a_recorded_client_is_the_outermost_observer(folder: Callable[[str], Path]) -> None:
    run = read(capture(folder("smg-client"), "disaggregated", recorded=True))
    each_request_once(run)
    joined_by(run, "client")
    joined_by(run, "router")
    served_where(run, "disaggregated")
    exact_partition(run)
    assert {row["window_observer"] for row in run.rows("FROM requests")} == {"client"}


def test_two_gateways_under_the_same_load_stay_apart(folder: Callable[[str], Path]) -> None:
    """Their spans name no instance, only the service `smg`: file and workers tell them apart."""
    both = folder("smg-two")
    with ThreadPoolExecutor(2) as pool:
        homes = list(pool.map(lambda name: capture(both / name, "disaggregated"), ("one", "two")))
    run = read(*homes)
    workers_are(run, {"router": 2, "prefill": 4, "decode": 4})
    assert len(run.said().deployments) == 2
    served_where(run, "disaggregated")
    exact_partition(run)
    assert len(run.rows("FROM requests")) == 48


def test_every_record_is_accounted_for(folder: Callable[[str], Path]) -> None:
    balanced(read(capture(folder("smg-balanced"), "disaggregated")))
