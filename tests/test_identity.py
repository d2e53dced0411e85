"""Identity: hand-made legs with known answers, one trap a test."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from identity_fleet import T0, Fleet, S, only, requests_of, router_pd

from pdtrace import _aside, identity


@pytest.fixture(autouse=True, params=["table", "aside"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule holds for legs in a table and for those that lie aside until they are named."""
    if request.param == "aside":
        monkeypatch.setattr(_aside, "LEAST_ROWS", 1)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_the_answer_behind_a_split_does_not_tell_what_the_prompt_found_in_a_cache(
    fleet: Fleet,
) -> None:
    router_pd(fleet, "1", 0, "t", "x-1", "run/a.json", found=None)
    fleet.leg(
        "C1", "client", "instance:c", -0.01, 2.01, first=0.61, span_id="client", trace_id="t",
        path="run/a.json", external_id="x-1", cached_tokens=96,
    )  # fmt: skip
    row = only(fleet.run())
    assert (row["mode"], row["cached_tokens"]) == ("disaggregated", None)


def test_router_prefill_and_decode_are_one_disaggregated_request(fleet: Fleet) -> None:
    router_pd(fleet, "1", 0, "t", "x-1", "run/a.json")
    store = fleet.run(times=2)
    row = only(store)
    assert set(requests_of(store).values()) == {"x-1"}
    assert (row["mode"], row["prefill_worker"], row["decode_worker"]) == (
        "disaggregated",
        "instance:p1",
        "instance:d1",
    )
    assert (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]) == (100, 7, 51)
    assert (row["start_ns"], row["end_ns"]) == (T0, T0 + 2 * S)
    assert row["ttft_ms"] == pytest.approx(600)
    assert row["first_token_origin"] == "decode"
    assert row["tpot_ms"] == pytest.approx(28)
    seen = store.sql("FROM observations WHERE observer = 'engine'").row(0, named=True)
    assert seen["ttft_ms"] is None
    assert seen["tpot_ms"] == pytest.approx((1900 - 550) / 50)
    deployment = only(store, "deployments")
    assert (deployment["mode"], deployment["headline_observer"], deployment["name"]) == (
        "disaggregated",
        "router",
        "run",
    )
    roles = dict(store.sql("SELECT worker, role FROM workers").iter_rows())
    assert roles == {"instance:r1": "router", "instance:p1": "prefill", "instance:d1": "decode"}
    assert store.sql("SELECT role FROM legs WHERE leg = 'D1x-1'").item() == "decode"
    rules = set(store.sql("SELECT rule FROM identity_edges")["rule"])
    assert rules <= {"direct_parent", "router_parent", "engine_request_id"}
    assert "direct_parent" in rules


@pytest.mark.parametrize(
    ("seen", "end", "d_end", "made", "origin"),
    [
        (0.50, 2.0, 1.9, 0.55, "prefill"),  # P's token was seen before D made one
        (0.61, 2.0, 1.9, 0.55, "decode"),
        # D ends after its answer was seen to end: its clock is 0.2 s ahead, which turns the answer
        (0.61, 2.0, 2.2, 0.75, None),
        (0.10, 2.0, 2.2, 0.75, "prefill"),  # not even that explains it
    ],
)
def test_clocks_that_contradict_each_other_do_not_tell_who_made_the_first_token(
    fleet: Fleet, seen: float, end: float, d_end: float, made: float, origin: str | None
) -> None:
    ids: dict[str, Any] = {"request_id": "cmpl-x-0", "external_id": "x"}
    fleet.leg("R", "router", "instance:r", 0, end, first=seen, **ids)
    fleet.leg("P", "engine", "instance:p", 0.02, 0.49, first=0.48, role="prefill", **ids)
    fleet.leg("D", "engine", "instance:d", 0.52, d_end, first=made, role="decode", **ids)
    row = only(fleet.run())
    assert (row["mode"], row["first_token_origin"]) == ("disaggregated", origin)


def test_toy_proxy_without_trace_headers_joins_by_id(fleet: Fleet) -> None:
    for n in range(2):
        at = 3.0 * n
        fleet.leg(
            f"P{n}",
            "engine",
            "instance:p",
            at,
            at + 0.5,
            first=at + 0.5,
            trace_id=f"a{n}",
            span_id=f"a{n}",
            request_id=f"cmpl-u{n}-0",
            external_id=f"u{n}",
            max_tokens=1,
            output_tokens=1,
        )
        fleet.leg(
            f"D{n}",
            "engine",
            "instance:d",
            at + 0.6,
            at + 2,
            first=at + 0.7,
            trace_id=f"b{n}",
            span_id=f"b{n}",
            request_id=f"cmpl-u{n}-0",
            external_id=f"u{n}",
            output_tokens=20,
        )
    store = fleet.run()
    assert requests_of(store) == {"P0": "u0", "D0": "u0", "P1": "u1", "D1": "u1"}
    assert store.count("deployments") == 1
    rows = store.sql("FROM requests")
    assert set(rows["mode"]) == {"disaggregated"}
    assert rows["ttft_ms"].null_count() == 2  # no engine leg saw start and delivered token
    assert set(rows["window_observer"]) == {"engine"}
    assert only(store, "deployments")["headline_observer"] is None


def test_one_trace_without_common_parent_leg_joins_nothing(fleet: Fleet) -> None:
    for n in range(2):
        fleet.leg(
            f"c{n}",
            "engine",
            "instance:e",
            n * 0.1,
            1,
            trace_id="t",
            span_id=f"c{n}",
            parent_span_id="gone",
            external_id=f"r{n}",
        )
    assert fleet.run().count("requests") == 2


def test_coarse_outer_log_gives_neither_window_nor_headline(fleet: Fleet) -> None:
    fleet.leg(
        "L",
        "router",
        "file:run/router.log",
        0,
        2,
        first=1,
        path="run/router.log",
        external_id="x",
        resolution_ns=S,
    )
    fleet.leg("E", "engine", "instance:e", 0.4, 1.4, first=0.6, external_id="x", output_tokens=5)
    store = fleet.run()
    row = only(store)
    assert (row["window_observer"], row["ttft_ms"]) == ("engine", pytest.approx(200))
    assert only(store, "deployments")["headline_observer"] == "engine"


def test_remote_reference_and_bootstrap_room(fleet: Fleet) -> None:
    fleet.leg("P", "engine", "instance:p", 0, 0.5, request_id="own-p", output_tokens=1)
    fleet.leg(
        "D",
        "engine",
        "instance:d",
        0.6,
        2,
        request_id="own-d",
        remote_id="own-p-0a1b2c3d",
        output_tokens=9,
    )
    fleet.leg(
        "P2",
        "engine",
        "instance:p",
        3,
        3.5,
        request_id="q1",
        bootstrap_room="77",
        role="prefill",
        role_basis="log",
    )
    fleet.leg(
        "D2",
        "engine",
        "instance:d",
        3,
        5,
        request_id="q2",
        bootstrap_room="77",
        role="decode",
        role_basis="log",
        first=3.7,
    )
    store = fleet.run()
    found = requests_of(store)
    assert found["P"] == found["D"] != found["P2"] == found["D2"]
    assert {"remote_reference", "bootstrap_room"} <= set(
        store.sql("SELECT rule FROM identity_edges")["rule"]
    )
    row = store.sql("FROM observations WHERE request = $r", r=found["D2"]).row(0, named=True)
    assert row["ttft_ms"] == pytest.approx(700)  # D was there from the start


def test_skewed_clocks_still_join_by_id(fleet: Fleet) -> None:
    for n in range(3):
        at = 100.0 * n
        fleet.leg(f"R{n}", "router", "instance:r", at, at + 1, first=at + 0.5, external_id=f"x{n}")
        fleet.leg(
            f"E{n}",
            "engine",
            "instance:e",
            at + 20,
            at + 20.8,
            external_id=f"x{n}",
            output_tokens=4,
        )
    assert fleet.run().count("requests") == 3


def test_an_id_that_everybody_bears_joins_nobody(fleet: Fleet) -> None:
    for n in range(100):
        fleet.leg(f"E{n}", "engine", "instance:e", n * 0.01, n * 0.01 + 1, external_id="test")
    store = fleet.run()
    assert store.count("requests") == 100


def test_a_request_is_named_as_its_caller_named_it() -> None:
    """Dynamo's frontend leaves a span, log lines and a request trace; the last knows only the id it made itself."""
    legs = pl.DataFrame(
        {
            "n": [0, 1, 2, 3], "leg": ["trace", "span", "log", "engine"], "obs": [1, 1, 1, 4], "lo": [0, 4, 9, 2],
            "container": [False] * 4, "trace_id": [None, "t", "t", "t"], "request_id": ["8f3a"] * 4,
            "external_id": ["8f3a", "drv-1", "drv-1", "drv-1"],
        }
    )  # fmt: skip
    names = identity.request_names(legs, np.zeros(4, dtype=np.int64))
    assert names.to_list() == ["drv-1"] * 4


def test_log_lines_beside_the_span_of_a_bare_name_are_still_one_sighting(fleet: Fleet) -> None:
    same: dict[str, Any] = {"external_id": "load-3", "role": "router"}
    fleet.leg("span", "router", "service:gw", 0, 0.4, span_id="r", trace_id="t", **same)
    fleet.leg("log/gw", "router", "service:gw", 0.001, 0.4, path="run/gw.log", **same)
    found = requests_of(fleet.run())
    assert found["span"] == found["log/gw"]
