"""View waits: the sums behind engine_queue, router_queue and kv_transfer; ties in their culprits."""

from __future__ import annotations

from typing import Any

import pytest

from pdtrace.store import Store

MS = 1_000_000


def fill(con: Store, waits_ms: list[float], detail: str = "router_queue", **more: Any) -> None:
    """Requests of 1000 ms, first token at 500 ms, that wait so long at their start."""
    con.append(
        "requests",
        [
            {"request": f"r{n}", "deployment": "d", "outcome": "completed", "start_ns": 0,
             "end_ns": 1000 * MS, "first_token_ns": 500 * MS, "prefill_worker": f"p{n % 2}",
             "decode_worker": "d0"} | more
            for n in range(len(waits_ms))
        ],
    )  # fmt: skip
    con.append(
        "phases",
        [
            {"request": f"r{n}", "phase": "router", "detail": detail, "start_ns": 0,
             "end_ns": round(wait * MS), "basis": "measured"}
            for n, wait in enumerate(waits_ms) if wait
        ],
    )  # fmt: skip


def test_waits_sum_by_detail_and_count_those_that_did_not_wait_with_zero(con: Store) -> None:
    fill(con, [100, 300, 0, 0])
    con.append("phases", [{"request": "r0", "phase": "router", "detail": "dispatch", "basis": "placed",
                           "start_ns": 100 * MS, "end_ns": 200 * MS}])  # fmt: skip
    (row,) = con.sql(
        "FROM waits(details := ['router_queue', 'dispatch'], apart := 'dispatch')"
    ).to_dicts()
    assert (row["wait_s"], row["requests"], row["seen"]) == (0.5, 2, 4)
    assert row["ttft_ratio"] == pytest.approx(0.5 / 2)
    assert row["e2e_ratio"] == pytest.approx(0.5 / 4)
    assert row["wait_p50_ms"] == pytest.approx(100)
    assert row["placed_ratio"] == pytest.approx(0.2)
    assert row["detail_s"] == {"dispatch": 0.1, "router_queue": 0.4}
    assert row["workers"] == ["p1", "p0"]
    assert row["culprits"] == [{"request": "r1", "value": 0.3}, {"request": "r0", "value": 0.2}]
    assert con.sql("FROM waits(details := ['kv_load'])").is_empty()


def test_equal_culprits_stand_in_the_order_of_their_names(con: Store) -> None:
    fill(con, [100.0] * 9)
    names = [c["request"] for c in con.query("router_queue").to_dicts()[0]["culprits"]]
    assert names == ["r0", "r1", "r2", "r3", "r4"]
