"""vLLM on the CPU: its own spans and logs, and what pdtrace records through its doors, tell the same requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_vllm as vllm
from checks import (
    Run,
    balanced,
    each_request_once,
    exact_partition,
    joined_by,
    or_skip,
    served_where,
    workers_are,
)
from processes import load

REQUESTS = ("--requests", "16", "--rate", "3", "--long", "1000")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    or_skip(vllm.install)


def capture(folder: Path, mode: str, tiny: Path, *, recorded: bool = False, **how: Any) -> Run:
    """Run vLLM under load, and read what is left."""
    dumps = folder / "capture"
    with vllm.serving(dumps, mode, tiny, **how) as url:
        traces = dumps / "client" if recorded else None
        load(url, vllm.MODEL, folder / "truth.jsonl", *REQUESTS, recorded=traces)
    return Run([dumps], [folder / "truth.jsonl"])


def test_one_server_by_its_own_records(folder: Callable[[str], Path], tiny: Path) -> None:
    run = capture(folder("vllm-aggregated"), "aggregated", tiny, recorded=True)
    workers_are(run, {"aggregated": 1, "client": 1})
    each_request_once(run)
    joined_by(run, "client")
    served_where(run, "aggregated")
    exact_partition(run)
    balanced(run)
    steps = run.rows("SELECT sum(prefill_tokens) AS prompt, sum(decode_tokens) AS output FROM steps")  # fmt: skip
    asked = sum(row["usage"]["completion_tokens"] - 1 for row in run.sent)
    assert steps[0]["output"] == asked  # the first token of each comes from its prompt's last step


def test_prefill_and_decode_over_nixl(folder: Callable[[str], Path], tiny: Path) -> None:
    run = capture(folder("vllm-nixl"), "disaggregated", tiny)
    workers_are(run, {"router": 1, "prefill": 1, "decode": 1})
    each_request_once(run)
    joined_by(run, "router")
    served_where(run, "disaggregated")
    exact_partition(run)
    balanced(run)
    assert run.rows("SELECT DISTINCT mode FROM deployments") == [{"mode": "disaggregated"}]
    pulled = run.rows("SELECT sum(pulled_requests) AS n FROM steps JOIN workers USING (worker) WHERE role = 'decode'")  # fmt: skip
    assert pulled[0]["n"] == len(run.sent)


def test_one_server_through_its_doors(folder: Callable[[str], Path], tiny: Path) -> None:
    run = capture(folder("vllm-doors"), "aggregated", tiny, doors=True, recorded=True)
    each_request_once(run)
    joined_by(run, "client")
    served_where(run, "aggregated")
    exact_partition(run)
    members = run.rows("SELECT sum(prefill_tokens) AS prompt FROM step_members")
    computed = sum(
        row["usage"]["prompt_tokens"] - (row["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        for row in run.sent
    )  # fmt: skip
    assert members[0]["prompt"] == computed


def test_prefill_and_decode_through_their_doors(folder: Callable[[str], Path], tiny: Path) -> None:
    run = capture(folder("vllm-nixl-doors"), "disaggregated", tiny, doors=True)
    each_request_once(run)
    joined_by(run, "router")
    served_where(run, "disaggregated")
    exact_partition(run)
    moved = run.rows("SELECT count(DISTINCT request) AS n FROM phases WHERE phase IN ('kv_transfer', 'kv_wait')")  # fmt: skip
    assert moved[0]["n"] == len(run.sent)
