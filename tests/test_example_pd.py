"""The example of a P/D router, run for real: four processes and a client, joined and partitioned."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdtrace.api import Trace

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "pd"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    if not EXAMPLE.is_dir():
        pytest.skip("the tests run away from the checkout")
    folder = tmp_path_factory.mktemp("traces")
    command = [sys.executable, str(EXAMPLE / "run.py"), str(folder), "10"]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with Trace.read([folder]) as trace:
        yield trace


def test_one_deployment_of_five_processes(trace: Trace) -> None:
    roles = trace.sql("SELECT role FROM workers ORDER BY role")["role"].to_list()
    assert roles == ["aggregated", "client", "decode", "prefill", "router"]
    assert trace.sql("SELECT count(*), any_value(mode) FROM deployments").rows() == [(1, "mixed")]


def test_the_legs_of_each_request_are_joined(trace: Trace) -> None:
    rows = trace.sql("""
        SELECT r.mode, list_sort(list(DISTINCT l.role)) AS roles, count(DISTINCT r.request)
        FROM requests r JOIN legs l USING (request) WHERE NOT l.container GROUP BY r.mode, r.request
    """).rows()
    roles = {(mode, tuple(seen)) for mode, seen, _ in rows}
    assert roles == {
        ("disaggregated", ("client", "decode", "prefill", "router")),
        ("aggregated", ("aggregated", "client", "router")),
    }
    assert set(trace.requests()["outcome"]) == {"completed"}


def test_phases_partition_each_request(trace: Trace) -> None:
    uneven = trace.sql("""
        SELECT r.request FROM requests r JOIN phases p USING (request)
        GROUP BY r.request, r.start_ns, r.end_ns HAVING sum(p.end_ns - p.start_ns) <> r.end_ns - r.start_ns
    """)
    assert uneven.height == 0
    seen = dict(trace.sql("SELECT mode, list(DISTINCT phase) FROM requests JOIN phases USING (request) GROUP BY mode").rows())  # fmt: skip
    assert set(seen["disaggregated"]) >= {"queue", "prefill", "kv_transfer", "decode"}
    assert "kv_transfer" not in seen["aggregated"]


def test_transfers_have_their_bytes(trace: Trace) -> None:
    rows = trace.sql("SELECT t.bytes, r.prompt_tokens FROM transfers t JOIN legs USING (leg) JOIN requests r USING (request)").rows()  # fmt: skip
    assert rows
    assert all(size == 256 * tokens for size, tokens in rows)


def test_long_prompts_are_the_culprits_of_the_stalls_on_the_aggregated_worker(trace: Trace) -> None:
    (deployment,) = trace.diagnose().to_dict()["deployments"]
    finding: Any = next(f for f in deployment["findings"] if f["id"] == "prefill_interference")
    names = dict(trace.sql("SELECT worker, role FROM workers").rows())
    assert [names[worker] for worker in finding["workers"]] == ["aggregated"]
    assert finding["level"] == "A"
    asked = dict(trace.sql("SELECT request, prompt_tokens FROM requests").rows())
    assert asked[finding["culprits"][0]["request"]] == 4000
    # No step computed prompts beside decodes: nothing to cross-check, and nothing is said of it.
    assert "–" not in finding["detail"]
    assert "Cross-check" not in finding["detail"]


def test_the_engine_loops_steps_are_there(trace: Trace) -> None:
    rows = dict(trace.sql("SELECT role, count(*) FROM steps JOIN workers USING (worker) GROUP BY role").rows())  # fmt: skip
    assert set(rows) == {"prefill", "decode", "aggregated"}
    assert trace.sql("SELECT count(*) FROM steps WHERE start_ns IS NULL").item() == 0
    joined = trace.sql("SELECT count(*) FROM step_members m JOIN legs l ON l.request_id = m.request_id AND l.worker = m.worker").item()  # fmt: skip
    assert joined == trace.sql("SELECT count(*) FROM step_members").item() > 0
