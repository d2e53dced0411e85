"""TensorRT-LLM's own files: stamps of a clock without a date become phases, and nothing is made of what was not stamped."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdtrace import coverage, diagnose, registry
from pdtrace.api import Trace

FIXTURES = Path(__file__).parent / "fixtures"
UPTIME = 294_065.0  # seconds since the host's start


def side(number: int, at: float, *, decode: bool, offset: float = 0.0) -> dict[str, Any]:
    """A worker's record: 1 ms HTTP, 10 ms wait, then 50 ms prompt, or 5 ms wait, 20 ms transfer, 5 ms wait and 5 steps of 10 ms."""
    at += offset
    timing = {"server_arrival_time": at, "arrival_time": at + 0.001}
    record: dict[str, Any] = {"request_id": number, "ctx_request_id": number}
    if decode:
        timing |= {
            "kv_cache_transfer_start": at + 0.006, "kv_cache_transfer_end": at + 0.026, "kv_cache_size": 4_000_000,
            "first_scheduled_time": at + 0.031, "first_token_time": at + 0.041, "server_first_token_time": at + 0.042,
            "last_token_time": at + 0.081,
        }  # fmt: skip
        steps = [{"iter": i, "token_time": 77.0 + number + 0.01 * i} for i in range(5)]
        record["time_breakdown_metrics"] = {"step_metrics": steps}
    else:
        made = at + 0.061
        timing |= {
            "first_scheduled_time": at + 0.011, "first_token_time": made, "last_token_time": made,
            "server_first_token_time": made + 0.001,
        }  # fmt: skip
    record["perf_metrics"] = {"timing_metrics": timing, "kv_cache_metrics": {}}
    return record


def pairs(count: int, **more: Any) -> list[dict[str, Any]]:
    """Requests at a router: 2 ms to the context server, 3 ms from its answer to the generation server, 1 ms out."""
    found = []
    for n in range(count):
        at = UPTIME + 0.2 * n
        found.append({
            "ctx_server": "ctx:8001", "gen_server": f"gen{n % 2}:8002", "disagg_server_arrival_time": at,
            "disagg_server_first_token_time": at + 0.109, **more,
            "ctx_perf_metrics": side(100 + n, at + 0.002, decode=False),
            "gen_perf_metrics": side(100 + n, at + 0.067, decode=True),
        })  # fmt: skip
    return found


def read(tmp_path: Path, **files: Any) -> Trace:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / f"{name}.json").write_text(text)
    return Trace.read([tmp_path])


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Twenty requests of a router."""
    return read(tmp_path_factory.mktemp("routed"), perf_metrics=pairs(20))


def phases(trace: Trace) -> dict[str, float]:
    """Milliseconds of each detail, in the mean over the requests that have it."""
    rows = trace.store.sql(
        "SELECT detail, sum(end_ns - start_ns) / 1e6 / count(DISTINCT request) AS ms FROM phases GROUP BY detail"
    )
    return dict(rows.iter_rows())


def test_a_routers_records_are_cut_into_phases_that_add_up(routed: Trace) -> None:
    trace = routed
    (mine,) = diagnose.diagnose(trace.store).deployments
    assert mine.mode == "disaggregated"
    assert mine.window == (None, None)  # the clock has no date
    found = phases(trace)
    expected = {
        "dispatch": 5, "frontend": 2, "prefill_queue": 10, "prefill_wall": 50, "bridge_wait": 5, "kv_transfer": 20,
        "decode_queue": 5, "decode_exec": 10, "stream_out": 2, "decode_wall": 39,
    }  # fmt: skip
    assert found == pytest.approx(expected, abs=0.01)
    row = trace.store.sql("SELECT min(ttft_ms) AS a, max(ttft_ms) AS b, min(prefill_worker) AS p FROM requests").row(0)  # fmt: skip
    assert row == (pytest.approx(109, abs=0.01), pytest.approx(109, abs=0.01), "address:ctx:8001")
    gaps = trace.store.sql("SELECT gaps_us, emission FROM streams")
    assert gaps.height == 20
    assert gaps.row(0) == ([10_000] * 4, "token")  # the first step made the first token
    moved = trace.store.sql("SELECT count(*), min(bytes), max(duration_ms) FROM transfers").row(0)
    assert moved == (20, 4_000_000, pytest.approx(20, abs=0.01))
    chosen = trace.store.sql("SELECT phase, count(DISTINCT worker) FROM decisions GROUP BY phase ORDER BY phase")  # fmt: skip
    assert chosen.rows() == [("decode", 2), ("prefill", 1)]


def test_a_server_whose_clock_was_not_aligned_gives_durations_only(tmp_path: Path) -> None:
    records = pairs(40)
    for record in records:
        if record["gen_server"] == "gen1:8002":
            at = record["disagg_server_arrival_time"]
            record["gen_perf_metrics"] = side(
                record["ctx_perf_metrics"]["request_id"], at, decode=True, offset=377_680.5
            )
    trace = read(tmp_path, perf_metrics=records)
    assert trace.store.sql("SELECT count(*) FROM requests").item() == 40
    legs = trace.store.sql(
        "SELECT worker, count(start_ns) AS placed, count(e2e_ms) AS lasting FROM legs WHERE role = 'decode' GROUP BY worker ORDER BY worker"
    )
    assert legs.rows() == [("address:gen0:8002", 20, 20), ("address:gen1:8002", 0, 20)]
    assert (trace.store.sql("SELECT e2e_ms FROM requests")["e2e_ms"].drop_nulls() < 1000).all()
    assert trace.store.sql("SELECT worker FROM events WHERE kind = 'warning'").rows() == [("address:gen1:8002",)]  # fmt: skip


def test_files_of_each_process_tell_the_same_requests_once(tmp_path: Path) -> None:
    records = pairs(10, status="complete")
    names = {half: f"perf_metrics-server-{half}host-7-20260801T000000Z" for half in ("ctx", "gen")}
    files: dict[str, Any] = {}
    for n, record in enumerate(records):
        record["gen_server"] = "gen0:8002"
        record["disagg_request_id"] = 10**17 + n
    for half, name in names.items():
        own = [copy.deepcopy(record[f"{half}_perf_metrics"]) for record in records]
        for n, record in enumerate(own):
            record["disagg_request_id"] = 10**17 + n
        files[name] = "\n".join(map(json.dumps, own)) + "\n"
    for record in records:  # what reaches the router has no size
        del record["gen_perf_metrics"]["perf_metrics"]["timing_metrics"]["kv_cache_size"]
    files["perf_metrics-disagg-h-1-20260801T000000Z"] = "\n".join(map(json.dumps, records))
    trace = read(tmp_path, **files)
    assert trace.store.sql("SELECT count(*), count(DISTINCT deployment) FROM requests").row(0) == (10, 1)  # fmt: skip
    assert trace.store.sql("SELECT count(*) FROM workers").item() == 3
    moved = trace.store.sql("SELECT count(*), sum(bytes), min(source_worker), min(destination_worker) FROM transfers")  # fmt: skip
    assert moved.row(0) == (10, 40_000_000, "address:ctx:8001", "address:gen0:8002")
    assert phases(trace)["kv_transfer"] == pytest.approx(20, abs=0.01)


def test_requests_numbered_alike_by_two_servers_stay_two(tmp_path: Path) -> None:
    """Every server counts from the same number, and two of one host share its clock."""
    own = []
    for n in range(10):
        record = side(2048 + n, UPTIME + n, decode=False)
        del record["ctx_request_id"]
        own.append(record)
    trace = read(tmp_path, a=own, b=own[:9])
    assert trace.store.sql("SELECT count(*), count(DISTINCT deployment) FROM requests").row(0) == (19, 2)  # fmt: skip


def test_generation_servers_alone_call_every_request_one(tmp_path: Path) -> None:
    own = [side(n, UPTIME + n, decode=True) | {"ctx_request_id": 1} for n in range(10)]
    trace = read(tmp_path, perf_metrics=own)
    assert trace.store.sql("SELECT count(*) FROM requests").item() == 10


def test_stamps_that_were_never_set_are_unknown(collect: Callable[..., Any]) -> None:
    module = registry.collectors()["tensorrt_llm_metrics"]
    got = collect(module, FIXTURES / "tensorrt_llm_metrics" / "synthetic-files.jsonl")
    legs = got["legs"].sort("record")
    assert legs["status"].to_list() == ["completed", "unknown"]
    assert legs["e2e_ms"].to_list() == [pytest.approx(51), None]


def test_what_is_missing_names_its_switch(routed: Trace) -> None:
    switches = {row["item"]: row["switch"] for row in coverage.items(routed.store) if row["present"] == 0}  # fmt: skip
    assert "otlp_traces_endpoint" in switches["input_tokens"]
    assert "print_iter_log" in switches["engine_steps"]


def test_a_cut_array_with_half_a_character_gives_its_whole_records(
    collect: Callable[..., Any], tmp_path: Path
) -> None:
    record = side(1, UPTIME, decode=False) | {"request_id": "\ud800"}
    (tmp_path / "m.json").write_text(json.dumps([record, record])[:-20])
    got = collect(registry.collectors()["tensorrt_llm_metrics"], tmp_path / "m.json")
    assert got["legs"]["request_id"].to_list() == ["\ufffd@m.json"]
