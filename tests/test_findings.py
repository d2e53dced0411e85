"""Findings on the data themselves and on reuse: hand-made rows in, the answer out, and silence where it does not apply."""

from __future__ import annotations

import pytest
from finding_rows import MS, none, one, queued, request, worker

from pdtrace import _unsupported, wording
from pdtrace.store import Store


def test_a_clock_that_is_off_is_told_from_an_uncertain_one(con: Store) -> None:
    con.append("clocks", [
        {"deployment": "d", "domain": "host:b", "reference": "host:a", "offset_ns": 20 * MS, "half_width_ns": 2 * MS},
        {"deployment": "d", "domain": "host:c", "reference": "host:a", "offset_ns": MS, "half_width_ns": 3 * MS},
        {"deployment": "d", "domain": "perf:x", "reference": "host:a", "offset_ns": 10**15, "half_width_ns": 1},
    ])  # fmt: skip
    row = one(con, "clock_skew")
    assert (row["value"], row["interval_low"], row["interval_high"]) == (20, 18, 22)
    assert (row["workers"], row["clocks_off"], row["severity"]) == (["host:b"], 1, "warning")


def test_messages_one_way_bound_a_clock_from_one_side_only(con: Store) -> None:
    link = {"deployment": "d", "reference": "host:a", "offset_ns": None, "half_width_ns": None}
    # 20 ms ahead at most: no sign that it is ahead at all
    con.append("clocks", [link | {"domain": "host:b", "lower_ns": None, "upper_ns": 20 * MS}])
    none(con, "clock_skew")
    con.append("clocks", [link | {"domain": "host:c", "lower_ns": None, "upper_ns": -7 * MS}])
    row = one(con, "clock_skew")
    assert (row["value"], row["interval_low"], row["interval_high"]) == (7, 7, None)
    assert (row["workers"], row["clocks_off"], row["at_least"]) == (["host:c"], 1, True)
    assert row["severity"] == "warning"
    assert "1 clock off by at least 7" in wording.finding("clock_skew", row).detail


def test_where_an_offset_lies_is_said_as_an_interval() -> None:
    said = _unsupported._interval
    assert said(None, 12 * MS) == "at most 12.0 ms ahead of"
    assert said(None, -5 * MS) == "at least 5.00 ms behind"
    assert said(3 * MS, 12 * MS) == "at most 12.0 ms ahead of and at least 3.00 ms ahead of"
    assert said(-3 * MS, None) == "at most 3.00 ms behind"


def test_effects_before_causes_and_negative_remainders_are_shown(con: Store) -> None:
    con.append("requests", [request(n) for n in range(20)])
    con.append("legs", [
        {"leg": "a", "trace_id": "t", "span_id": "1", "worker": "p", "deployment": "d", "request": "r0", "start_ns": 100 * MS},
        {"leg": "b", "trace_id": "t", "span_id": "2", "parent_span_id": "1", "worker": "q", "deployment": "d", "request": "r0", "start_ns": 90 * MS},
    ])  # fmt: skip
    con.append("partition_checks", [
        {"request": "r1", "window_ns": 1000 * MS, "clip_ns": 0, "overlap_ns": 0, "negative_ns": -3 * MS},
        {"request": "r2", "window_ns": 1000 * MS, "clip_ns": 50 * MS, "overlap_ns": 0, "negative_ns": 0},
        {"request": "r3", "window_ns": 1000 * MS, "clip_ns": 4 * MS, "overlap_ns": 0, "negative_ns": 0},
    ])  # fmt: skip
    row = one(con, "clock_skew")
    assert (row["early_requests"], row["negative_requests"], row["clipped_requests"]) == (1, 1, 1)
    assert (row["value"], row["worst_early_ms"], row["requests"], row["severity"]) == (
        10,
        10,
        3,
        "warning",
    )


def test_clocks_that_agree_are_no_finding(con: Store) -> None:
    con.append("requests", [request(n) for n in range(20)])
    con.append(
        "clocks",
        [
            {
                "deployment": "d",
                "domain": "b",
                "reference": "a",
                "offset_ns": 1000,
                "half_width_ns": 1000,
            }
        ],
    )
    none(con, "clock_skew")


def test_data_gaps_name_what_is_missing_and_of_how_many(con: Store) -> None:
    con.append("sources", [{"source": 1, "path": "x.log", "rows_read": 100}])
    con.append("skipped", [
        {"source": 1, "reason": "cut off at the end of the file", "records": 1},
        {"source": 1, "reason": "duplicate of another source", "records": 50},
        {"source": 1, "reason": "line without a measurement", "records": 40},
    ])  # fmt: skip
    con.append(
        "legs",
        [{"leg": f"l{n}", "source": 1, "deployment": "d", "request": f"r{n}"} for n in range(20)],
    )
    con.append(
        "requests",
        [
            request(n, output_tokens=None if n < 10 else 101, ttft_ms=100.0, prefill_worker="a")
            for n in range(20)
        ],
    )
    con.append("workers", [worker("a")])
    con.append("steps", [{"worker": "a", "seq": 1, "capture": "sampled"}])
    row = one(con, "data_gaps")
    gaps = {g["gap"]: (g["missing"], g["total"], g["detail"]) for g in row["gaps"]}
    assert gaps == {
        "missing_output_tokens": (10, 20, None), "sampled_steps": (1, 1, None),
        "skipped_records": (1, 100, "cut off at the end of the file"),
    }  # fmt: skip
    assert (row["severity"], row["sources"], row["workers"], row["requests"]) == (
        "warning",
        ["x.log"],
        ["a"],
        10,
    )


def test_complete_data_have_no_gaps(con: Store) -> None:
    con.append("requests", [request(n) for n in range(20)])
    none(con, "data_gaps")


def test_later_turns_that_compute_their_prefix_again(con: Store) -> None:
    con.append("requests", [
        request(4 * s + t, session=f"s{s}", turn=t, prompt_tokens=1000 * (t + 1), cached_tokens=0, prefill_worker="ab"[t % 2])
        for s in range(10) for t in range(4)
    ])  # fmt: skip
    row = one(con, "low_cache_reuse")
    assert (row["requests"], row["sessions"], row["moved_turns"], row["share"]) == (30, 10, 30, 1.0)
    con.execute("UPDATE requests SET cached_tokens = prompt_tokens - 900")
    none(con, "low_cache_reuse")


def test_idle_decode_workers_with_waiting_requests(con: Store) -> None:
    con.append("workers", [worker("q", "decode")])
    con.append("steps", [
        {"worker": "q", "rank": "0", "seq": n, "start_ns": n * 100 * MS, "elapsed_ns": 10 * MS, "decode_requests": 1, "capture": "full"}
        for n in range(101)
    ])  # fmt: skip
    none(con, "decode_idle")
    queued(con, "kv_wait_upper_bound", "kv_wait", 80, "upper_bound")
    # each second: 80 ms of waiting, of which a step fills 10; idle without a wait is not counted
    none(con, "decode_idle")
    row = one(con, "decode_idle", min_idle_ratio=0.05)
    assert row["value"] == pytest.approx(10 * 0.070)
    assert row["share"] == pytest.approx(0.7 / 10.01)
    assert row["idle_s"] == pytest.approx(10.01 - 1.01)
    assert (row["bound"], row["interval_low"]) == (True, 0)
    con.execute("UPDATE phases SET basis = 'measured'")
    assert one(con, "decode_idle", min_idle_ratio=0.05)["interval_low"] == pytest.approx(0.7)
    when = con.sql("FROM finding_times WHERE finding = 'decode_idle'")
    assert when["weight"].sum() == pytest.approx(0.7)
    assert set(when["deployment"]) == {row["deployment"]}


def test_sources_are_paths_of_what_a_finding_rests_on(con: Store) -> None:
    con.append("sources", [{"source": 1, "path": "b.json"}, {"source": 2, "path": "a.json"}])
    con.append("requests", [request(n, ttft_ms=2000.0 if n == 3 else 100.0) for n in range(20)])
    con.append(
        "legs",
        [
            {"leg": f"l{n}", "source": 1 + n % 2, "deployment": "d", "request": f"r{n}"}
            for n in range(20)
        ],
    )
    assert one(con, "slow_first_token")["sources"] == ["a.json", "b.json"]


def test_an_empty_store_has_no_findings(con: Store) -> None:
    from pdtrace import library

    for query in library.queries().values():
        if query.kind == "findings":
            none(con, query.name)
