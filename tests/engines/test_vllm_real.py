"""vLLM on the CPU: its own spans and logs, and what pdtrace records through its doors, tell the same requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import run_vllm as vllm
from checks import (
    Run,
    balanced,
    each_request_once,
    exact_partition,
    joined_by,
    made,
    or_skip,
    served_where,
    workers_are,
)
from processes import load

REQUESTS = ("--requests", "16", "--rate", "3", "--long", "1000")
OWN = ("otlp_traces.pb", "*.log")  # what vLLM writes by itself
DOORS = ("doors",)  # what pdtrace writes inside of it


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    or_skip(vllm.install)


def run(folder: Path, mode: str, tiny: Path) -> Path:
    """vLLM under load, all records at once."""
    if made(folder):
        return folder
    with vllm.serving(folder / "capture", mode, tiny, doors=True) as url:
        load(url, vllm.MODEL, folder / "truth.jsonl", *REQUESTS, recorded=folder / "capture" / "client")  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def one(folder: Callable[[str], Path], tiny: Path) -> Path:
    return or_skip(lambda: run(folder("vllm-aggregated"), "aggregated", tiny))


@pytest.fixture(scope="module")
def split(folder: Callable[[str], Path], tiny: Path) -> Path:
    return or_skip(lambda: run(folder("vllm-nixl"), "disaggregated", tiny))


def read(folder: Path, *names: str) -> Run:
    """Those files of a capture (all where none are named)."""
    capture = folder / "capture"
    paths = [path for name in names for path in sorted(capture.glob(name))] or [capture]
    return Run(paths, [folder / "truth.jsonl"])


def computed(run: Run) -> int:
    """Prompt tokens that were computed, as the answers tell it."""
    usage = [row["usage"] for row in run.sent]
    cached = [(u["prompt_tokens_details"] or {}).get("cached_tokens") or 0 for u in usage]
    return sum(u["prompt_tokens"] for u in usage) - sum(cached)


@pytest.mark.parametrize(
    "names", [(), ("client", *OWN), ("client", *DOORS), ("client", *DOORS, "*.log")]
)
def test_one_server_is_read_the_same_by_whatever_tells_of_it(
    names: tuple[str, ...], one: Path
) -> None:
    run = read(one, *names)
    each_request_once(run)
    joined_by(run, "client")
    served_where(run, "aggregated")
    exact_partition(run)
    balanced(run)
    steps = run.rows("SELECT sum(prefill_tokens) AS prompt, sum(decode_tokens) AS output FROM steps")[0]  # fmt: skip
    assert steps["prompt"] == computed(run)
    # The first token of each comes from the last step of its prompt.
    assert steps["output"] == sum(row["usage"]["completion_tokens"] - 1 for row in run.sent)


def test_all_records_of_one_server_are_one_worker(one: Path) -> None:
    run = read(one)
    workers_are(run, {"aggregated": 1, "client": 1})
    assert len(run.said().deployments) == 1


def test_steps_name_their_members(one: Path) -> None:
    run = read(one, *DOORS)
    members = run.rows("SELECT sum(prefill_tokens) AS prompt FROM step_members")[0]
    assert members["prompt"] == computed(run)


@pytest.mark.parametrize("names", [(), ("client", "proxy", *OWN), ("client", "proxy", *DOORS)])
def test_prefill_and_decode_over_nixl_are_one_request(names: tuple[str, ...], split: Path) -> None:
    run = read(split, *names)
    each_request_once(run)
    joined_by(run, "client")
    joined_by(run, "router")
    served_where(run, "disaggregated")
    exact_partition(run)
    balanced(run)
    assert [one.mode for one in run.said().deployments] == ["disaggregated"]
    waits = run.rows("SELECT count(DISTINCT request) AS n FROM phases WHERE phase IN ('kv_transfer', 'kv_wait')")  # fmt: skip
    assert waits[0]["n"] == len(run.sent)


def test_all_records_of_a_pair_are_two_workers(split: Path) -> None:
    """Metrics name no server; their counters tell which of the two pulled KV."""
    workers_are(read(split), {"client": 1, "router": 1, "prefill": 1, "decode": 1})
    workers_are(read(split, "client", "proxy", *OWN), {"client": 1, "router": 1, "prefill": 1, "decode": 1})  # fmt: skip
