"""A worker slower than its peers: at the same batch, among equals, and only from engine steps."""

from __future__ import annotations

from typing import Any

import pytest
from finding_rows import none, one, request, worker

from pdtrace import wording
from pdtrace.store import Store


def fit(name: str, fixed_ms: float, each_ms: float, **more: Any) -> dict[str, Any]:
    """A worker whose decode step takes `fixed_ms` and `each_ms` for each request of its batch."""
    return {
        "worker": name, "deployment": "d", "role": "aggregated", "capture": "full", "decode_only_steps": 1000,
        "baseline_ms": fixed_ms, "baseline_per_request_ms": each_ms, "decode_s": 100.0, "lost_s": 10.0,
    } | more  # fmt: skip


def put(con: Store, fits: list[dict[str, Any]], context: int | None = None) -> None:
    """These workers, each with steps of 1 to 21 requests: the middle batch is 11."""
    names = [row["worker"] for row in fits]
    con.append("workers", [worker(name) for name in names])
    con.append("interference_steps", fits)
    con.append("steps", [
        {"worker": name, "decode_requests": n, "prefill_tokens": 0, "elapsed_ns": 1,
         "decode_kv_tokens": None if context is None else n * context}
        for name in names for n in range(1, 22)
    ])  # fmt: skip


def test_the_slow_one_is_named_with_the_step_it_takes(con: Store) -> None:
    put(con, [fit("a", 5.0, 0.1), fit("b", 5.0, 0.1), fit("c", 7.0, 0.14)])
    con.append("requests", [request(n, decode_worker="c") for n in range(7)])
    row = one(con, "slow_worker")
    assert (row["value"], row["batch"], row["peers"]) == (pytest.approx(1.4), 11, 2)
    assert (row["step_ms"], row["peer_ms"]) == (pytest.approx(8.54), pytest.approx(6.1))
    assert (row["workers"], row["severity"], row["requests"]) == (["c"], "warning", 7)
    assert (row["interval_low"], row["interval_high"]) == (
        pytest.approx(1.288),
        pytest.approx(1.512),
    )
    assert row["cost_s"] == pytest.approx(90 * (1 - 1 / 1.4))
    said = wording.finding("slow_worker", row)
    assert (
        "aggregated-3 is slower than its peers: a decode step takes 1.40 times as long"
        in said.title
    )
    assert "8.54 ms against 6.10 ms (2 peers) for a step of 11 requests" in said.detail


@pytest.mark.parametrize(
    "other",
    [
        fit("c", 5.5, 0.11),  # a tenth slower: within the scatter of such fits
        fit("c", 2.0, 0.5),  # slower at large batches only: its line is not known well enough there
        fit("c", 7.0, 0.14, decode_only_steps=100),
        fit("c", 7.0, 0.14, capture="sampled"),
        fit("c", 7.0, 0.14, role="decode"),  # not the same work
        fit("c", 19.0, -0.2, noise_ms=3.0, decode_only_p50_ms=17.0),  # steps of two kinds
        fit("c", None, None),
    ],
)
def test_nothing_is_said_of_little_of_few_steps_or_of_other_work(
    con: Store, other: dict[str, Any]
) -> None:
    put(con, [fit("a", 5.0, 0.1), fit("b", 5.0, 0.1), other])
    none(con, "slow_worker")


def test_workers_with_another_model_are_no_peers(con: Store) -> None:
    put(con, [fit("a", 5.0, 0.1), fit("b", 5.0, 0.1), fit("c", 9.0, 0.2)])
    con.append("facts", [
        {"worker": name, "key": "model", "value": "large" if name == "c" else "small"} for name in "abc"
    ])  # fmt: skip
    none(con, "slow_worker")


def test_longer_contexts_are_no_slowness_where_steps_say_them(con: Store) -> None:
    known = {"baseline_per_kv_token_ms": 0.001}
    put(con, [fit(name, 5.0, 0.1, **known) for name in "abc"], context=1000)
    none(con, "slow_worker")
