"""Findings on waits between arrival and first token: hand-made rows in, the answer out."""

from __future__ import annotations

import pytest
from finding_rows import none, one, phase, queued, request, worker

from pdtrace.store import Store


def test_engine_queue_is_the_wait_before_prefill(con: Store) -> None:
    queued(con, "before_queue", "queue", 60, "placed")
    row = one(con, "engine_queue")
    assert row["value"] == row["cost_s"] == pytest.approx(1.2)
    assert row["share"] == pytest.approx(0.6)
    assert row["share_of_e2e_ratio"] == pytest.approx(60 / 1100)
    assert (row["before_queue_s"], row["prefill_queue_s"], row["placed_ratio"]) == (
        pytest.approx(1.2),
        0,
        1,
    )
    assert (row["severity"], row["requests"], row["workers"]) == ("warning", 20, ["p"])
    none(con, "router_queue")
    none(con, "kv_transfer")


def test_a_short_queue_is_no_finding(con: Store) -> None:
    queued(con, "prefill_queue", "queue", 5)
    none(con, "engine_queue")


def test_half_a_running_step_is_no_warning(con: Store) -> None:
    queued(con, "before_queue", "queue", 40, "placed")
    assert one(con, "engine_queue")["severity"] == "info"
    assert one(con, "engine_queue", min_wait_ms=30)["severity"] == "warning"


def test_router_queue_adds_deciding_and_dispatching(con: Store) -> None:
    queued(con, "router_decide", "router", 10)
    row = one(con, "router_queue")
    assert (row["value"], row["router_decide_s"], row["router_queue_s"]) == (
        pytest.approx(0.2),
        pytest.approx(0.2),
        0,
    )
    assert row["severity"] == "info"


def test_a_kv_wait_that_may_hold_other_things_is_an_upper_bound(con: Store) -> None:
    queued(con, "kv_wait_upper_bound", "kv_wait", 30, "upper_bound")
    row = one(con, "kv_transfer")
    assert (row["value"], row["bound"], row["interval_low"]) == (
        pytest.approx(0.6),
        True,
        pytest.approx(0),
    )
    assert row["interval_high"] == row["value"]
    assert row["workers"] == ["q"]


def test_split_deployments_always_get_an_answer_about_kv(con: Store) -> None:
    queued(con, "kv_transfer", "kv_transfer", 1)
    none(con, "kv_transfer")
    con.execute("UPDATE requests SET mode = 'disaggregated'")
    row = one(con, "kv_transfer")
    assert (row["severity"], row["share"]) == ("info", pytest.approx(0.01))


def test_a_measured_transfer_is_no_bound(con: Store) -> None:
    queued(con, "kv_transfer", "kv_transfer", 30)
    con.append("workers", [worker("q", "decode")])
    con.append(
        "transfers", [{"destination_worker": "q", "bytes": 1000, "outcome": "completed"}] * 3
    )
    row = one(con, "kv_transfer")
    assert (row["bound"], row["transfers"], row["transferred_bytes"]) == (False, 3, 3000)
    assert row["interval_low"] == row["value"] == row["transfer_s"]


def test_first_tokens_before_the_window_tell_no_share_of_it(con: Store) -> None:
    """Ten requests' tokens stand 900 ms before their starts, by another clock: 60 % stay 60 %."""
    queued(con, "before_queue", "queue", 60)
    for n in range(20, 30):
        con.append("requests", [request(n, ttft_ms=-900.0, prefill_worker="p", decode_worker="q")])
        con.append("phases", [phase(n, "unattributed", 0, 1100, "unattributed")])
    assert one(con, "engine_queue")["share"] == pytest.approx(0.6)
    assert one(con, "unattributed_time")["ttft_ratio"] in (None, 0.0)


def test_unattributed_time_is_shown_from_a_tenth_on(con: Store) -> None:
    queued(con, "unattributed", "unattributed", 95)
    none(con, "unattributed_time")
    row = one(con, "unattributed_time", min_e2e_ratio=0.05)
    assert row["share"] == pytest.approx(95 / 1100)
    assert row["ttft_ratio"] == pytest.approx(0.95)
    assert (row["observed"], row["cost_s"]) == (True, None)
