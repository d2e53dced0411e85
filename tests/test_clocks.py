"""Clocks: offsets with known answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from pdtrace import clocks
from pdtrace.store import Store

MS = 10**6
T0 = 1_790_000_000_000_000_000


def hops(
    theta_ns: float, *, count: int = 200, drift: float = 0.0, back_ms: float = 0.15
) -> pl.DataFrame:
    """Hops of 100 ms every 1.5 s; the server's clock is theta (plus drift) ahead; delays of 0.1 ms and more."""
    rng = np.random.default_rng(1)
    sent = T0 + np.arange(count) * 1_500 * MS
    out = (0.1 + rng.exponential(0.1, count)) * MS
    home = (back_ms + rng.exponential(0.1, count)) * MS
    ahead = theta_ns + drift * (sent - sent.mean())
    received = sent + out + ahead
    answered = received + 100 * MS
    back = answered - ahead + home
    return pl.DataFrame(
        {
            n: v.astype(np.int64)
            for n, v in {
                "sent": sent,
                "received": received,
                "answered": answered,
                "back": back,
            }.items()
        }
    )


def test_no_offset_is_not_shifted() -> None:
    found = clocks.hop_bounds(hops(0))
    assert abs(found["offset_ns"]) < 0.1 * MS  # type: ignore[arg-type]
    assert "nothing shifted" in str(found["method"])


@pytest.mark.parametrize("theta", [50 * MS, -50 * MS])
def test_clear_offset_is_found_within_its_half_width(theta: int) -> None:
    found = clocks.hop_bounds(hops(theta))
    assert found["method"] == clocks.SHIFTED
    assert abs(found["offset_ns"] - theta) <= found["half_width_ns"] < 0.3 * MS  # type: ignore[operator]


def test_drift_is_taken_out() -> None:
    found = clocks.hop_bounds(hops(20 * MS, drift=50e-6))
    assert found["drift_ppm"] == pytest.approx(50, abs=2)
    assert abs(found["offset_ns"] - 20 * MS) <= found["half_width_ns"] < 1 * MS  # type: ignore[operator]


def test_hops_that_end_before_their_server_give_an_upper_bound_only() -> None:
    found = clocks.hop_bounds(hops(0, back_ms=-80))
    assert found["half_width_ns"] is None
    assert "cross" in str(found["method"])


def test_domain_offset_is_the_least_delayed_request() -> None:
    row = clocks.domain_offset("perf:x", "d", np.arange(0, 101) * MS + 1_000 * MS)
    assert row["offset_ns"] == -1_005 * MS
    assert row["residual_p50_ns"] == 45 * MS


def skewed_fleet(store: Store, theta: int) -> None:
    legs: list[dict[str, Any]] = []
    rows = hops(theta, count=20)
    for n, (sent, received, answered, back) in enumerate(rows.iter_rows()):
        base = {
            "deployment": "d",
            "request": f"q{n}",
            "trace_id": f"t{n}",
            "clock": "wall",
            "resolution_ns": 1,
        }
        legs.append(
            {
                **base,
                "leg": f"h{n}",
                "worker": "instance:r",
                "observer": "router",
                "container": True,
                "span_id": "h",
                "start_ns": sent,
                "end_ns": back,
            }
        )
        legs.append(
            {
                **base,
                "leg": f"e{n}",
                "worker": "instance:e",
                "observer": "engine",
                "container": False,
                "span_id": "e",
                "parent_span_id": "h",
                "start_ns": received,
                "end_ns": answered,
                "first_token_ns": received + MS,
            }
        )
    store.append("legs", legs)
    store.append("workers", [{"worker": "instance:r"}, {"worker": "instance:e"}])
    store.append(
        "intervals",
        [
            {
                "leg": "e3",
                "detail": "prefill_exec",
                "start_ns": legs[7]["start_ns"],
                "end_ns": legs[7]["end_ns"],
            }
        ],
    )
    store.append("steps", [{"worker": "instance:e", "seq": 1, "start_ns": legs[7]["start_ns"]}])


def test_skewed_worker_is_moved_with_all_that_it_stamped_and_only_once(store: Store) -> None:
    skewed_fleet(store, -30 * MS)
    assert (
        store.sql(
            "SELECT count(*) FROM legs WHERE leg LIKE 'e%' AND start_ns < 1790000000000000000 + 1500000000 * CAST(leg[2:] AS BIGINT)"
        ).item()
        == 20
    )
    clocks.align(store)
    clocks.align(store)
    row = store.sql("FROM clocks").row(0, named=True)
    assert (row["domain"], row["reference"], row["method"]) == (
        "instance:e",
        "instance:r",
        clocks.SHIFTED,
    )
    assert abs(row["offset_ns"] + 30 * MS) <= row["half_width_ns"]
    late = store.sql(
        "SELECT min(e.start_ns - h.start_ns) AS d, min(h.end_ns - e.end_ns) AS b FROM legs e JOIN legs h USING (trace_id) WHERE e.leg LIKE 'e%' AND h.leg LIKE 'h%'"
    ).row(0)
    assert late[0] > 0
    assert late[1] > 0
    start = store.sql("SELECT start_ns FROM legs WHERE leg = 'e3'").item()
    assert store.sql("SELECT start_ns FROM intervals").item() == start
    assert store.sql("SELECT start_ns FROM steps").item() == start


def test_workers_of_one_host_have_one_clock(store: Store) -> None:
    skewed_fleet(store, -30 * MS)
    store.execute("UPDATE workers SET host = 'same'")
    clocks.align(store)
    assert store.count("clocks") == 0


def test_nothing_to_align(store: Store) -> None:
    clocks.align(store)
    assert store.count("clocks") == 0
