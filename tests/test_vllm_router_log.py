"""The log of vLLM production stack's router: who was asked, when, and the same requests at their engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdtrace.api import Trace
from pdtrace.collectors import vllm_router_log
from pdtrace.model import Head

FIXTURE = Path(__file__).parent / "fixtures" / "vllm_router_log" / "synthetic-stack.log"


def test_choices_waits_and_what_the_router_measured(collect) -> None:
    found = collect(vllm_router_log, FIXTURE)
    legs = {leg["request_id"]: leg for leg in found["legs"].to_dicts()}
    assert {name: leg["session"] for name, leg in legs.items()} == {"r-1": None, "r-2": "alpha", "r-3": None}  # fmt: skip
    # the epoch in the line, not its stamp: that is local time, here two hours ahead
    assert legs["r-2"]["start_ns"] == 1_758_266_292_798_000_000
    assert (legs["r-3"]["e2e_ms"], legs["r-3"]["status"]) == (2500, "completed")
    assert (legs["r-1"]["e2e_ms"], legs["r-1"]["status"]) == (None, "unknown")
    # the answer of the prefill worker is not the user's first token
    assert "ttft_ms" not in found["legs"].columns or found["legs"]["ttft_ms"].null_count() == 3
    assert sorted(found["reported"]["value"].to_list()) == [0.25, 0.45]
    asked = found["decisions"].filter(found["decisions"]["request_id"] == "r-2").sort("time_ns")
    assert asked["worker"].to_list() == ["address:10.0.0.2:8000", "address:10.0.0.1:8000"]
    assert asked["duration_ms"].to_list() == [2, None]


def test_the_engine_has_the_same_requests(tmp_path: Path) -> None:
    (tmp_path / "router.log").write_text(FIXTURE.read_text("utf-8"), "utf-8")
    line = "INFO 09-19 07:18:{} async_llm_engine.py:{}] {} request cmpl-{}-0.\n"
    (tmp_path / "vllm-2025-09-19.log").write_text(
        line.format(12, 173, "Added", "r-1") + line.format(14, 140, "Finished", "r-1"), "utf-8"
    )
    trace = Trace.read([tmp_path])
    rows = trace.store.rows("SELECT observer FROM legs WHERE request = (SELECT request FROM legs WHERE request_id = 'r-1') ORDER BY 1")  # fmt: skip
    assert rows == [("engine",), ("router",)]


@pytest.mark.parametrize("text", ["Routing request a to b", "INFO: Routing request r to http://a at noon, process time = 1"])  # fmt: skip
def test_other_logs_are_left_alone(text: str) -> None:
    assert vllm_router_log.sniff(Head("x", "x", f"{text}\n".encode(), complete=True)) is None
