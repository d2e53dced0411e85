"""NVIDIA Dynamo with mocker workers: what it really writes is read as what really happened."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import run_dynamo as dynamo
from checks import (
    balanced,
    each_request_once,
    exact_partition,
    joined_by,
    legs_of,
    made,
    or_skip,
    read,
    served_where,
    workers_are,
)
from gateway_run import before
from processes import load

REQUESTS = ("--requests", "40")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    or_skip(dynamo.install)


def capture(
    folder: Path, mode: str, tiny: Path, *words: str, gateway: bool = False, recorded: bool = False
) -> Path:
    """Run Dynamo under load; the folder holds capture/ and truth.jsonl."""
    dumps = folder / "capture"
    if made(folder):
        return folder
    with dynamo.serving(dumps, mode, tiny) as url, contextlib.ExitStack() as stack:
        if gateway:
            url = stack.enter_context(before(url, dumps / "gateway"))
        traces = dumps / "client" if recorded else None
        load(url, dynamo.MODEL, folder / "truth.jsonl", *REQUESTS, *words, recorded=traces)
    return folder


@pytest.mark.parametrize("mode", ["disaggregated", "bootstrap", "aggregated"])
def test_each_request_is_joined_over_its_workers(
    mode: str, folder: Callable[[str], Path], tiny: Path
) -> None:
    run = read(capture(folder(f"dynamo-{mode}"), mode, tiny))
    split = mode != "aggregated"
    workers_are(run, {"frontend": 1, **({"prefill": 2, "decode": 2} if split else {"aggregated": 2})})  # fmt: skip
    each_request_once(run)
    served_where(run, "disaggregated" if split else "aggregated")
    exact_partition(run)
    balanced(run)
    engine = {"prefill": 1, "decode": 1} if split else {"aggregated": 1}
    legs_of(run, {"frontend": 1, **engine})
    assert [one.mode for one in run.said().deployments] == ["disaggregated" if split else mode]


def test_two_deployments_under_the_same_load_stay_apart(
    folder: Callable[[str], Path], tiny: Path
) -> None:
    """The same seed twice: request ids and trace ids are those of the other deployment, at the same time."""
    both = folder("dynamo-two")
    with ThreadPoolExecutor(2) as pool:
        homes = list(
            pool.map(lambda name: capture(both / name, "disaggregated", tiny), ("one", "two"))
        )
    run = read(*homes)
    workers_are(run, {"frontend": 2, "prefill": 4, "decode": 4})
    assert len(run.said().deployments) == 2
    served_where(run, "disaggregated")
    exact_partition(run)
    found = run.rows("SELECT external_id, count(*) AS n, count(DISTINCT deployment) AS d FROM requests GROUP BY ALL")  # fmt: skip
    assert {(row["n"], row["d"]) for row in found} == {(2, 2)}
    assert len(found) == 40
    crossing = run.rows(
        "SELECT request FROM legs JOIN workers USING (worker) GROUP BY request HAVING count(DISTINCT workers.deployment) > 1"
    )
    assert not crossing


@pytest.mark.parametrize("client", ["httpx", "openai"])
def test_a_recorded_client_is_the_outermost_observer(
    client: str, folder: Callable[[str], Path], tiny: Path
) -> None:
    run = read(
        capture(
            folder(f"dynamo-{client}"), "disaggregated", tiny, "--client", client, recorded=True
        )
    )
    each_request_once(run)
    joined_by(run, "client")
    served_where(run, "disaggregated")
    exact_partition(run)
    assert {r["window_observer"] for r in run.rows("FROM requests")} == {"client"}
    assert run.said().deployments[0].requests["completed"] == 40


def test_a_recorded_gateway_stands_between_client_and_frontend(
    folder: Callable[[str], Path], tiny: Path
) -> None:
    home = folder("dynamo-gateway")
    run = read(capture(home, "disaggregated", tiny, gateway=True))
    each_request_once(run)
    joined_by(run, "gateway")
    served_where(run, "disaggregated")
    exact_partition(run)


def test_requests_that_their_clients_left_are_told(
    folder: Callable[[str], Path], tiny: Path
) -> None:
    """The request trace has the same row for them as for the others; spans and logs know."""
    run = read(capture(folder("dynamo-left"), "disaggregated", tiny, "--leave", "4"))
    left = {row["request_id"] for row in run.sent if row["left"]}
    outcomes = {row["external_id"]: row["outcome"] for row in run.rows("FROM requests")}
    assert {name for name, outcome in outcomes.items() if outcome == "aborted"} == left
    assert len(outcomes) == len(run.sent)
    served_where(run, "disaggregated")
    exact_partition(run)
