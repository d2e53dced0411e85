"""Clocks of several workers at once: each is moved once, along the narrowest bounds."""

from __future__ import annotations

from typing import Any

import pytest

from pdtrace import clocks
from pdtrace._clock_tree import Link, span
from pdtrace.store import Store

MS = 10**6


def leg(
    name: str, n: int, worker: str, observer: str, start: int, end: int, clock: int, **more: Any
) -> dict[str, Any]:
    """A leg of request n; `start` and `end` are ms of true time, `clock` ms that the worker is ahead."""
    moved = {k: (v + clock) * MS if k.endswith("_ns") else v for k, v in more.items()}
    return {
        "leg": f"{name}{n}", "request": f"q{n}", "deployment": "d", "worker": worker, "observer": observer,
        "status": "completed", "start_ns": (start + clock) * MS, "end_ns": (end + clock) * MS, **moved,
    }  # fmt: skip


def append(store: Store, legs: list[dict[str, Any]]) -> None:
    store.append("legs", legs)
    store.append("workers", [{"worker": w} for w in sorted({x["worker"] for x in legs})])


def off(store: Store, name: str, true: int) -> float:
    """How many ms the first such leg lies from its true start, once clocks are aligned."""
    return abs(store.scalar(f"SELECT start_ns FROM legs WHERE leg = '{name}0'") / MS - true)


@pytest.mark.parametrize("clock", [370, -370])
def test_an_aggregated_engine_below_a_router_that_sees_no_token_is_moved(
    store: Store, clock: int
) -> None:
    """No P/D pair, no hop on record: the router's span encloses the engine's by 1 to 2 ms on either side."""
    legs = []
    for n in range(20):
        t = n * 500
        legs += [leg("r", n, "instance:r", "router", t, t + 300, 0),
                 leg("e", n, "instance:e", "engine", t + 1, t + 298, clock, role="aggregated")]  # fmt: skip
    append(store, legs)
    clocks.align(store)
    row = store.sql("FROM clocks").row(0, named=True)
    assert row["lower_ns"] <= clock * MS <= row["upper_ns"]
    assert off(store, "e", 1) <= 1


def test_a_router_that_ends_with_the_headers_moves_no_aggregated_engine(store: Store) -> None:
    legs = []
    for n in range(20):
        t = n * 500
        legs += [leg("r", n, "instance:r", "router", t, t + 50, 0),
                 leg("e", n, "instance:e", "engine", t + 1, t + 298, 0, role="aggregated")]  # fmt: skip
    append(store, legs)
    clocks.align(store)
    assert off(store, "e", 1) == 0


def test_sidecars_are_moved_to_the_gateway_and_take_their_engines_along(store: Store) -> None:
    """Each sidecar's hops know its engine, nothing but the gateway's span knows the sidecars."""
    legs = []
    for n in range(40):
        t, side = n * 500, n % 2
        clock = (1_300, -800)[side]
        ids = {"trace_id": f"{n:032x}"}
        legs += [leg("g", n, "instance:g", "gateway", t, t + 300, 0),
                 leg(f"s{side}-", n, f"instance:s{side}", "router", t + 1, t + 299, clock),
                 leg("h", n, f"instance:s{side}", "router", t + 2, t + 298, clock, container=True, span_id=f"{n:016x}", **ids),
                 leg(f"e{side}-", n, "instance:e", "engine", t + 3, t + 297, 250, parent_span_id=f"{n:016x}", **ids)]  # fmt: skip
    append(store, legs)
    clocks.align(store)
    assert off(store, "s0-", 1) <= 1
    starts = dict(store.rows("SELECT leg, start_ns FROM legs WHERE observer <> 'gateway'"))
    for n in range(40):
        assert abs(starts[f"s{n % 2}-{n}"] / MS - n * 500 - 1) <= 1
        assert abs(starts[f"e{n % 2}-{n}"] / MS - n * 500 - 3) <= 2


def test_prefill_workers_meet_through_the_decode_workers_they_share(store: Store) -> None:
    """Four clocks, no router: KV leaves P at 50 ms, is with D at 60; D told of its room at 5, P heard of it at 6."""
    clock = {"p0": 0, "p1": -650, "d0": 1_050, "d1": -1_050}
    legs, intervals = [], []
    for n in range(40):
        p, d, t = f"p{n % 2}", f"d{n // 2 % 2}", n * 500
        room = {"bootstrap_room": str(n)}
        legs += [leg("p", n, p, "engine", t, t + 60, clock[p], role="prefill", **room),
                 leg("d", n, d, "engine", t, t + 300, clock[d], role="decode", **room)]  # fmt: skip
        for name, who, detail, a, b in (
            ("p", p, "kv_space_wait", 2, 6), ("p", p, "kv_transfer", 50, 61),
            ("d", d, "kv_space_wait", 1, 5), ("d", d, "kv_wait_upper_bound", 5, 60),
        ):  # fmt: skip
            at = t + clock[who]
            intervals.append(
                {
                    "leg": f"{name}{n}",
                    "detail": detail,
                    "start_ns": (at + a) * MS,
                    "end_ns": (at + b) * MS,
                }
            )
    append(store, legs)
    store.append("intervals", intervals)
    clocks.align(store)
    pairs = store.rows(
        "SELECT p.start_ns - d.start_ns FROM legs p JOIN legs d USING (request) WHERE p.role = 'prefill' AND d.role = 'decode'"
    )
    assert max(abs(apart) for (apart,) in pairs) <= 16 * MS


def link(domain: str, reference: str, half: int) -> Link:
    return Link(
        domain,
        reference,
        half,
        10,
        {
            "domain": domain,
            "reference": reference,
            "offset_ns": 5,
            "lower_ns": 4,
            "upper_ns": 7,
            "drift_ppm": None,
        },
        None,
    )


def test_the_narrowest_bounds_are_used_and_turned_towards_the_outermost_clock() -> None:
    """P is known to r within 139 ms, and within 2 ms by way of D."""
    way = {
        one.domain: one for one in span([link("p", "r", 139), link("d", "r", 1), link("d", "p", 1)])
    }
    assert (way["d"].reference, way["p"].reference) == ("r", "d")
    assert {k: way["p"].row[k] for k in ("offset_ns", "lower_ns", "upper_ns")} == {
        "offset_ns": -5, "lower_ns": -7, "upper_ns": -4,
    }  # fmt: skip
    assert "r" not in way


def test_a_client_is_moved_to_a_server_that_told_its_requests_twice(store: Store) -> None:
    """The gateway's span and its log are one server's: both bound the client's clock, which is 400 ms ahead."""
    legs = []
    for n in range(20):
        t = n * 500
        legs += [
            leg("g", n, "instance:g", "gateway", t + 1, t + 299, 0, span_id="1"),
            leg("log", n, "instance:g", "gateway", t + 1, t + 299, 0),
            leg("c", n, "client", "client", t, t + 300, 400),
        ]
    append(store, legs)
    clocks.align(store)
    assert off(store, "c", 0) <= 1


def test_a_file_of_requests_beside_the_spans_does_not_make_the_engine_last_twice(
    store: Store,
) -> None:
    """The file names no role: its record is the same part, told of another worker."""
    legs = []
    for n in range(20):
        t = n * 500
        legs += [
            leg("r", n, "instance:r", "router", t, t + 300, 0),
            leg("e", n, "instance:e", "engine", t + 1, t + 298, 370, role="aggregated"),
            leg("f", n, "file:f", "engine", t + 1, t + 298, 370, output_tokens=9),
        ]
    append(store, legs)
    clocks.align(store)
    assert (off(store, "e", 1) <= 1, off(store, "f", 1) <= 1) == (True, True)


def test_a_bound_that_is_known_on_one_side_only_is_the_other_sides_turned() -> None:
    one = Link(
        "a",
        "b",
        5,
        1,
        {"domain": "a", "reference": "b", "offset_ns": 7, "lower_ns": None, "upper_ns": 9},
        None,
    )
    row = one.turned().row
    assert row == {
        "domain": "b",
        "reference": "a",
        "offset_ns": -7,
        "lower_ns": -9,
        "upper_ns": None,
    }
    assert one.turned().turned().row == one.row
