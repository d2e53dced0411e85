"""Dynamo's files: request trace, forward-pass metrics and logs give the rows that their records mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdtrace import registry
from pdtrace.model import Head
from pdtrace.spans import attribute_sql

FIXTURES = Path(__file__).parent / "fixtures"
MS = 1_000_000
MODULES = registry.collectors()

Collect = Callable[..., Any]


def head(path: Path) -> Head:
    return Head(str(path), path.name, path.read_bytes()[: 1 << 16], complete=True)


@pytest.mark.parametrize(
    ("collector", "file"),
    [
        ("dynamo_request_trace", "dynamo_request_trace/agg.jsonl"),
        ("dynamo_request_trace", "dynamo_request_trace/synthetic-session.jsonl"),
        ("dynamo_fpm", "dynamo_fpm/agg.4134309532607695301.000000.jsonl"),
        ("dynamo_log", "dynamo_log/frontend.log.jsonl"),
        ("dynamo_log", "dynamo_log/synthetic-plain.log.jsonl"),
    ],
)
def test_a_file_is_recognised_by_its_own_collector_only(collector: str, file: str) -> None:
    claimed = {
        name
        for name in MODULES
        if name.startswith("dynamo") and MODULES[name].sniff(head(FIXTURES / file))
    }
    assert claimed == {collector}


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b'{"time":"x","level":"INFO","target":"app"}\n', b"time level target dynamo\n"],
)
def test_strangers_are_left_alone(text: bytes) -> None:
    for name in MODULES:
        if name.startswith("dynamo"):
            assert MODULES[name].sniff(Head("x.jsonl", "x.jsonl", text, complete=True)) is None


def test_request_trace_with_p_and_d_apart(collect: Collect) -> None:
    got = collect(
        MODULES["dynamo_request_trace"],
        FIXTURES / "dynamo_request_trace" / "synthetic-session.jsonl",
    )
    legs = {row["leg"]: row for row in got["legs"].to_dicts()}
    front = legs["dynamo_request_trace/r-1"]
    assert (front["external_id"], front["session"], front["model"]) == (
        "client-1",
        "agent-7",
        "tiny",
    )
    assert (front["ttft_ms"], front["first_token_ns"]) == (
        None,
        None,
    )  # ttft_ms is the prefill worker's
    assert (front["e2e_ms"], front["cached_tokens"], front["finish_reason"]) == (500.0, 64, "stop")
    prefill, decode = (legs[f"dynamo_request_trace/r-1/{role}"] for role in ("prefill", "decode"))
    assert prefill["worker"] == "worker_id:17172504481790508292"
    assert (prefill["end_ns"] - front["start_ns"]) / MS == 100
    assert prefill["first_token_delivered"] is False
    assert (decode["first_token_ns"] - front["start_ns"]) / MS == 150
    intervals = {row["detail"]: row for row in got["intervals"].to_dicts()}
    assert {d: (r["end_ns"] - r["start_ns"]) / MS for d, r in intervals.items()} == {
        "prefill_wall": 80, "kv_wait_upper_bound": 50, "decode_wall": 350,
    }  # fmt: skip
    assert {row["basis"] for row in intervals.values()} == {"placed", "upper_bound"}
    reported = {row["quantity"]: row for row in got["reported"].to_dicts()}
    assert "not the client's" in reported["ttft_ms"]["definition"]
    assert reported["queue_depth"]["value"] == 3


def test_a_record_without_timings_gives_what_it_has(collect: Collect) -> None:
    got = collect(
        MODULES["dynamo_request_trace"],
        FIXTURES / "dynamo_request_trace" / "synthetic-session.jsonl",
    )
    leg = next(row for row in got["legs"].to_dicts() if row["leg"] == "dynamo_request_trace/r-2")
    assert (leg["prompt_tokens"], leg["output_tokens"], leg["external_id"]) == (40, 5, "r-2")
    assert (leg["ttft_ms"], leg["e2e_ms"]) == (None, None)
    assert (leg["end_ns"] - leg["start_ns"]) / MS == 1000


def test_every_record_is_kept_or_named_and_no_prompt_is_stored(collect: Collect) -> None:
    got = collect(
        MODULES["dynamo_request_trace"],
        FIXTURES / "dynamo_request_trace" / "synthetic-session.jsonl",
    )
    assert got.account.unit == "record"
    assert got.account.read == 7
    assert sorted(got.account.reasons.values()) == [1, 1, 1, 1]
    assert got["events"].select("kind", "detail").rows() == [
        ("tool", "tool_end search succeeded 120 ms")
    ]
    for table in ("legs", "events", "facts", "reported", "intervals"):
        assert "secret" not in str(got[table].to_dicts())


def test_aggregated_request_trace_has_a_ttft(collect: Collect) -> None:
    got = collect(MODULES["dynamo_request_trace"], FIXTURES / "dynamo_request_trace" / "agg.jsonl")
    front = got["legs"].filter(observer="frontend")
    assert front.height == 2
    assert front["ttft_ms"].null_count() == 0
    assert got["legs"].filter(observer="engine")["role"].to_list() == ["aggregated"] * 2
    assert set(got["intervals"]["detail"]) == {"prefill_wall", "decode_wall"}


def test_forward_passes_are_steps_and_heartbeats_are_not(collect: Collect) -> None:
    got = collect(
        MODULES["dynamo_fpm"], FIXTURES / "dynamo_fpm" / "agg.4134309532607695301.000000.jsonl"
    )
    assert (got.account.read, dict(got.account.reasons)) == (14, {"idle heartbeat": 2})
    steps = got["steps"].sort("seq")
    assert steps.height == 12
    mixed = steps.filter(steps["prefill_requests"] > 0).row(0, named=True)
    assert (mixed["worker"], mixed["rank"], mixed["seq"]) == (
        "worker_id:4134309532607695301",
        "0",
        91,
    )
    assert (mixed["prefill_tokens"], mixed["elapsed_ns"]) == (218, 25_730_250)
    assert mixed["start_ns"] == 1795993231459 * MS - 25_730_250
    assert mixed["start_lower_ns"] <= mixed["start_ns"] <= mixed["start_upper_ns"]
    assert mixed["running"] is None
    assert steps["capture"].unique().to_list() == ["full"]


def test_a_log_without_span_events_gives_legs_choices_and_failures(collect: Collect) -> None:
    got = collect(MODULES["dynamo_log"], FIXTURES / "dynamo_log" / "synthetic-plain.log.jsonl")
    legs = {row["leg"]: row for row in got["legs"].to_dicts()}
    a = legs["dynamo_log/a"]
    assert (a["status"], a["e2e_ms"], a["model"], a["streaming"], a["external_id"]) == (
        "completed", 1000.0, "tiny", True, "client-a",
    )  # fmt: skip
    worker = legs["dynamo_log/a/3333333333333333"]
    assert (worker["worker"], worker["role"], worker["e2e_ms"]) == (
        "worker_id:17172504481790508292",
        "prefill",
        50.0,
    )
    assert (legs["dynamo_log/b"]["status"], legs["dynamo_log/b"]["error"]) == ("failed", "internal")
    assert (legs["dynamo_log/c"]["status"], legs["dynamo_log/c"]["e2e_ms"]) == ("aborted", 250.0)
    assert (legs["dynamo_log/d"]["status"], legs["dynamo_log/d"]["end_ns"]) == ("unknown", None)
    choice = got["decisions"].row(0, named=True)
    assert (choice["cost"], choice["worker"], choice["phase"]) == (
        3.5,
        "worker_id:17172504481790508292",
        "prefill",
    )
    kinds = got["events"].sort("time_ns").select("kind", "request_id", "detail").rows()
    assert kinds == [
        ("failure", "b", "request failed internal"),
        ("abort", "c", "request aborted cancelled"),
        ("warning", "d", "dynamo_llm::migration: Stream disconnected"),
    ]


def test_each_container_of_a_mixed_log_is_a_worker(collect: Collect) -> None:
    got = collect(MODULES["dynamo_log"], FIXTURES / "dynamo_log" / "synthetic-plain.log.jsonl")
    roles = {row["worker"].split("#")[-1]: row["role"] for row in got["workers"].to_dicts()}
    assert roles == {"frontend-1": "frontend", "worker_id:17172504481790508292": "prefill"}
    assert got.account.reasons["not JSON"] == 1


def test_no_text_of_a_request_leaves_the_log(collect: Collect) -> None:
    got = collect(MODULES["dynamo_log"], FIXTURES / "dynamo_log" / "synthetic-plain.log.jsonl")
    for table in ("legs", "events", "facts", "workers", "decisions", "skipped"):
        assert "secret" not in str(got[table].to_dicts())


def test_a_span_log_names_its_process_and_settings(collect: Collect) -> None:
    got = collect(MODULES["dynamo_log"], FIXTURES / "dynamo_log" / "prefill.log.jsonl")
    worker = got["workers"].row(0, named=True)
    assert (worker["worker"], worker["role"], worker["name"]) == (
        "worker_id:2975962904877096645", "prefill", "dynamo-worker-prefill",
    )  # fmt: skip
    aliases = dict(got["worker_aliases"].select("kind", "value").rows())
    assert set(aliases) == {"worker_id", "file", "service"}
    facts = dict(got["facts"].select("key", "value").rows())
    assert (facts["kv_blocks"], facts["kv_block_size"], facts["max_num_batched_tokens"]) == (
        "4096",
        "16",
        "2048",
    )


def test_the_cost_of_a_choice_stands_at_the_rebuilt_hop(collect: Collect) -> None:
    got = collect(MODULES["dynamo_log"], FIXTURES / "dynamo_log" / "frontend.log.jsonl")
    cost = attribute_sql("logit", float)
    hops = got.store.sql(f"SELECT {cost} AS cost FROM spans WHERE name = 'kv_router.route_request'")
    assert hops.height == 4
    assert hops["cost"].null_count() == 0
    choices = got["decisions"]  # those that the hops tell too become one with them later
    assert sorted(choices["cost"]) == [5.0, 5.5, 12.0, 12.75]
    assert set(choices["phase"]) == {"prefill", "decode"}


def test_a_read_log_counts_every_line(collect: Collect) -> None:
    got = collect(MODULES["dynamo_log"], FIXTURES / "dynamo_log" / "decode.log.jsonl")
    lines = len((FIXTURES / "dynamo_log" / "decode.log.jsonl").read_text().splitlines())
    assert got.account.read == lines
    kept = got.store.sql(
        "SELECT count(DISTINCT record) AS n FROM (SELECT record FROM spans UNION ALL SELECT record FROM events)"
    )
    assert kept["n"][0] + sum(got.account.reasons.values()) <= lines


@pytest.mark.parametrize(
    ("collector", "file", "table", "field"),
    [
        ("dynamo_request_trace", "agg.jsonl", "legs", "request_received_ms"),
        ("dynamo_request_trace", "agg.jsonl", "legs", "total_time_ms"),
        ("dynamo_request_trace", "agg.jsonl", "legs", "input_tokens"),
        ("dynamo_fpm", "agg.4134309532607695301.000000.jsonl", "steps", "num_prefill_requests"),
        ("dynamo_fpm", "agg.4134309532607695301.000000.jsonl", "steps", "observed_at_unix_ms"),
        ("dynamo_fpm", "agg.4134309532607695301.000000.jsonl", "steps", "wall_time"),
    ],
)
@pytest.mark.parametrize("absurd", ["99999999999999000000", "-1e300", "9" * 400])
def test_an_absurd_number_costs_no_record(
    collector: str,
    file: str,
    table: str,
    field: str,
    absurd: str,
    collect: Collect,
    tmp_path: Path,
) -> None:
    found = FIXTURES / collector / file
    text, count = re.subn(
        rf'("{field}": ?)-?[\d.e+]+', rf"\g<1>{absurd}", found.read_text(), count=1
    )
    assert count
    path = tmp_path / file
    path.write_text(text)
    rows = collect(MODULES[collector], found)[table].height
    assert rows and collect(MODULES[collector], path)[table].height == 2 * rows  # one store
