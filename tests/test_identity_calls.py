"""Calls with several prompts, streams or attempts: which of them are one request."""

from __future__ import annotations

from typing import Any

import pytest
from identity_fleet import MS, T0, Fleet, S, only, requests_of

from pdtrace import _aside


@pytest.fixture(autouse=True, params=["table", "aside"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule holds for legs in a table and for those that lie aside until they are named."""
    if request.param == "aside":
        monkeypatch.setattr(_aside, "LEAST_ROWS", 1)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_agent_trace_with_many_calls_is_many_requests(fleet: Fleet) -> None:
    fleet.leg("agent", "gateway", "instance:agent", 0, 9, trace_id="t", span_id="agent")
    for n in range(3):
        fleet.span("t", f"tool{n}", "agent")
        fleet.leg(
            f"call{n}",
            "engine",
            "instance:e",
            1 + 2 * n,
            2 + 2 * n,
            first=1.5 + 2 * n,
            trace_id="t",
            span_id=f"c{n}",
            parent_span_id=f"tool{n}",
            request_id=f"cmpl-r{n}-0",
            external_id=f"r{n}",
            output_tokens=5,
        )
    store = fleet.run()
    assert requests_of(store) == {"agent": None, "call0": "r0", "call1": "r1", "call2": "r2"}


def test_agent_that_sends_one_id_with_all_calls(fleet: Fleet) -> None:
    fleet.leg("agent", "gateway", "instance:agent", 0, 9, trace_id="t", span_id="agent")
    for n in range(3):
        fleet.leg(
            f"call{n}",
            "engine",
            "instance:e",
            1 + 2 * n,
            2 + 2 * n,
            trace_id="t",
            span_id=f"c{n}",
            parent_span_id="agent",
            external_id="session-1",
            output_tokens=5,
        )
    store = fleet.run()
    assert store.count("requests") == 3
    assert len(set(requests_of(store).values())) == 4


def test_batched_prompts_are_two_requests_of_one_call(fleet: Fleet) -> None:
    fleet.leg("R", "router", "instance:r", 0, 2, trace_id="t", span_id="r", external_id="b")
    fleet.leg(
        "H",
        "router",
        "instance:r",
        0,
        2,
        trace_id="t",
        span_id="h",
        parent_span_id="r",
        container=True,
    )
    for n in range(2):
        fleet.leg(
            f"E{n}",
            "engine",
            "instance:e",
            0.1,
            1 + n * 0.1,
            trace_id="t",
            span_id=f"e{n}",
            parent_span_id="h",
            request_id=f"cmpl-b-{n}",
            external_id=f"b-{n}",
            output_tokens=9,
        )
    store = fleet.run()
    found = requests_of(store)
    assert store.count("requests") == 2
    assert found["E0"] == found["R"] == found["H"]
    assert found["E1"] != found["E0"]
    assert store.sql("SELECT leg_a, leg_b FROM identity_edges WHERE rule = 'same_call'").rows() == [
        ("R", "E1")
    ]


def test_batched_prompts_without_a_router(fleet: Fleet) -> None:
    for n in range(2):
        fleet.leg(
            f"E{n}",
            "engine",
            "instance:e",
            0.1,
            1,
            trace_id="t",
            span_id=f"e{n}",
            request_id=f"cmpl-b-{n}",
            external_id=f"b-{n}",
        )
    assert set(requests_of(fleet.run()).values()) == {"b-0", "b-1"}


def test_n_2_is_one_request_with_two_streams(fleet: Fleet) -> None:
    for n in range(2):
        fleet.leg(
            f"E{n}",
            "engine",
            "instance:e",
            0,
            1 + n,
            first=0.4 - n * 0.1,
            trace_id="t",
            span_id=f"e{n}",
            external_id="c",
            request_id="chatcmpl-c",
            stream=n,
            output_tokens=10 + n,
            prompt_tokens=8,
        )
    row = only(fleet.run())
    assert (row["streams"], row["output_tokens"], row["prompt_tokens"]) == (2, 21, 8)
    assert row["ttft_ms"] == pytest.approx(300)
    assert row["end_ns"] == T0 + 2 * S
    assert row["mode"] == "aggregated"


def test_router_retry_is_one_request_with_two_attempts(fleet: Fleet) -> None:
    fleet.leg(
        "R", "router", "instance:r", 0, 3, first=2.2, trace_id="t", span_id="r", external_id="x"
    )
    for n, worker in enumerate(("instance:a", "instance:b")):
        fleet.leg(
            f"H{n}",
            "router",
            "instance:r",
            n,
            n + 0.9,
            trace_id="t",
            span_id=f"h{n}",
            parent_span_id="r",
            container=True,
            attempt=n,
        )
        fleet.leg(
            f"E{n}",
            "engine",
            worker,
            n + 0.1,
            n + 0.8,
            trace_id="t",
            span_id=f"e{n}",
            parent_span_id=f"h{n}",
            request_id=f"id-{n}",
            status="failed" if n == 0 else "completed",
            output_tokens=0 if n == 0 else 30,
            first=None if n == 0 else 1.5,
        )
    row = only(fleet.run())
    assert (row["attempts"], row["outcome"], row["mode"], row["decode_worker"]) == (
        2,
        "completed",
        "aggregated",
        "instance:b",
    )
    assert row["ttft_ms"] == pytest.approx(2200)


def test_span_log_and_request_trace_of_one_request(fleet: Fleet) -> None:
    fleet.leg(
        "span",
        "engine",
        "instance:e",
        0.7,
        1.5,
        first=0.9,
        trace_id="t",
        span_id="e",
        request_id="cmpl-a-0",
        external_id="a",
        output_tokens=10,
    )
    fleet.leg(
        "log",
        "engine",
        "instance:e",
        0,
        1,
        path="run/server.log",
        request_id="cmpl-a-0",
        external_id="a",
        resolution_ns=S,
        clock="wall",
    )
    fleet.leg(
        "aborted",
        "engine",
        "instance:e",
        5,
        6,
        path="run/server.log",
        request_id="cmpl-z-0",
        external_id="z",
        resolution_ns=S,
        status="aborted",
    )
    store = fleet.run()
    assert requests_of(store) == {"span": "a", "log": "a", "aborted": "z"}
    rows = {r["request"]: r for r in store.sql("FROM requests").iter_rows(named=True)}
    assert rows["a"]["start_ns"] == T0 + 700 * MS
    assert rows["a"]["ttft_ms"] == pytest.approx(200)
    assert rows["z"]["outcome"] == "aborted"


def test_two_log_records_of_one_request_are_no_streams(fleet: Fleet) -> None:
    for n in range(2):
        fleet.leg(
            f"F{n}",
            "frontend",
            "instance:f",
            0.001 * n,
            1,
            first=0.2,
            path="run/f.log",
            trace_id="t",
            span_id="f",
            request_id="u",
            external_id="x",
            output_tokens=5,
        )
    store = fleet.run()
    row = only(store)
    assert (row["streams"], row["output_tokens"]) == (1, 5)


def test_migration_keeps_one_request(fleet: Fleet) -> None:
    fleet.leg(
        "F", "frontend", "instance:f", 0, 3, first=0.3, trace_id="t", span_id="f", request_id="u"
    )
    for n in range(2):
        fleet.leg(
            f"E{n}",
            "engine",
            f"instance:e{n}",
            n + 0.1,
            n + 1.05,
            trace_id="t",
            span_id=f"e{n}",
            parent_span_id="f",
            request_id="u",
            attempt=n,
            output_tokens=20,
            status="failed" if n == 0 else "completed",
        )
    row = only(fleet.run())
    assert (row["attempts"], row["outcome"], row["mode"], row["decode_worker"]) == (
        2,
        "completed",
        "aggregated",
        "instance:e1",
    )


def test_how_a_request_ended_is_told_by_its_finest_record(fleet: Fleet) -> None:
    """Dynamo's request trace (milliseconds) has the same row for a request that its client left; the span knows."""
    own: dict[str, Any] = {"request_id": "8f3a"}
    fleet.leg("span", "frontend", "instance:f", 0.0004, 0.3, first=0.1, external_id="drv-1", trace_id="t", span_id="s", status="aborted", **own)  # fmt: skip
    fleet.leg("engine", "engine", "instance:e", 0.01, 0.3, external_id="drv-1", trace_id="t", span_id="e", parent_span_id="s", role="aggregated", status="aborted", **own)  # fmt: skip
    fleet.leg("record/1", "frontend", None, 0, 0.3, external_id="8f3a", resolution_ns=MS, path="run/records.json", **own)  # fmt: skip
    fleet.leg("record/1/aggregated", "engine", "instance:e", 0.01, 0.3, external_id="8f3a", resolution_ns=MS, path="run/records.json", role="aggregated", status="unknown", **own)  # fmt: skip
    request = only(fleet.run())
    assert (request["outcome"], request["external_id"]) == ("aborted", "drv-1")
    assert request["first_token_ns"] == T0 + 100 * MS


def test_an_attempt_that_failed_before_one_that_did_not_is_no_failure(fleet: Fleet) -> None:
    same: dict[str, Any] = {"request_id": "8f3a", "external_id": "drv-1", "trace_id": "t"}
    fleet.leg("try", "frontend", "instance:f", 0, 0.1, span_id="a", status="failed", attempt=0, **same)  # fmt: skip
    fleet.leg("again", "frontend", "instance:f", 0.2, 0.3, span_id="b", attempt=1, **same)
    assert only(fleet.run())["outcome"] == "completed"
