"""The building blocks of schemas/views: hand-made rows in, figures that can be checked in the head out."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from pdtrace.store import Store

MS = 1_000_000


def rows(store: Store, query: str, *columns: str, **parameters: object) -> list[tuple[Any, ...]]:
    """Some columns of a query, sorted."""
    return sorted(store.query(query, **parameters).select(columns).rows(), key=str)


def requests(store: Store, *items: dict[str, Any]) -> None:
    store.append(
        "requests", [{"deployment": "d", "outcome": "completed", **item} for item in items]
    )


def observe(store: Store, observer: str, *values: dict[str, Any]) -> None:
    defaults = {"deployment": "d", "observer": observer, "basis": "measured", "level": "B"}
    store.append("observations", [{**defaults, **value} for value in values])


def phase(
    store: Store, request: str, detail: str, start_ms: float, end_ms: float, basis: str = "measured"
) -> None:
    from pdtrace.model import PHASE_DETAILS

    store.append("phases", [{"request": request, "phase": PHASE_DETAILS[detail], "detail": detail,
                             "start_ns": int(start_ms * MS), "end_ns": int(end_ms * MS), "basis": basis}])  # fmt: skip


def test_failed_requests_do_not_count_and_unknown_ones_only_where_nothing_better_is_known(
    con: Store,
) -> None:
    requests(con, {"request": "good"}, {"request": "bad", "outcome": "failed"}, {"request": "maybe", "outcome": "unknown"},
             {"request": "lone", "outcome": None, "deployment": "e"}, {"request": "gone", "outcome": "aborted", "deployment": "e"})  # fmt: skip
    assert rows(con, "counted_requests", "request") == [("good",), ("lone",)]
    assert rows(con, "request_latency", "request", "counted") == [
        ("bad", False), ("gone", False), ("good", True), ("lone", True), ("maybe", False),
    ]  # fmt: skip


def test_each_observer_has_its_own_latency_and_one_is_the_headline(con: Store) -> None:
    requests(
        con, *[{"request": f"r{n}"} for n in range(5)], {"request": "failed", "outcome": "failed"}
    )
    observe(
        con,
        "client",
        *[
            {"request": f"r{n}", "ttft_ms": 10.0 * n, "definition": "send to first chunk"}
            for n in range(5)
        ],
    )
    observe(con, "engine", {"request": "r0", "ttft_ms": 3.0, "definition": "arrival to first token", "basis": "reported"},
            {"request": "r1", "ttft_ms": 5.0, "definition": "arrival to first token", "level": "C"},
            {"request": "r2"}, {"request": "failed", "ttft_ms": 999.0})  # fmt: skip
    con.append("deployments", [{"deployment": "d", "headline_observer": "client"}])
    found = con.query("latency_by_observer").sort("observer")
    client, engine = found.to_dicts()
    assert (client["metric"], client["headline"], client["count"]) == ("ttft_ms", True, 5)
    assert [client[k] for k in ("mean", "p50", "p90", "p95", "p99", "max")] == pytest.approx(
        [20, 20, 36, 38, 39.6, 40]
    )
    assert (client["definition"], client["basis"], client["level"]) == (
        "send to first chunk",
        "measured",
        "B",
    )
    assert (engine["headline"], engine["count"], engine["p50"]) == (False, 2, 4.0)
    assert (engine["basis"], engine["level"]) == ("reported", "C")


def test_inter_token_latency_is_over_gaps_and_says_what_an_emission_is(con: Store) -> None:
    gaps = [1000, 2000, 3000, 4000, 500_000, None]
    requests(con, {"request": "r"}, {"request": "failed", "outcome": "failed"})
    con.append("legs", [{"leg": "span", "request": "r", "observer": "client"}, {"leg": "log", "request": "r", "observer": "client"},
                        {"leg": "f", "request": "failed", "observer": "client"}])  # fmt: skip
    con.append("streams", [{"leg": "span", "gaps_us": gaps, "emission": "chunk"}, {"leg": "log", "gaps_us": [9, 9], "emission": "chunk"},
                           {"leg": "f", "gaps_us": [7], "emission": "chunk"}])  # fmt: skip
    row = con.query("latency_by_observer").row(0, named=True)
    expected = pl.Series(gaps).drop_nulls() / 1000
    assert (row["metric"], row["observer"], row["count"], row["level"]) == (
        "itl_ms",
        "client",
        5,
        "B",
    )
    assert "chunk" in row["definition"]
    for share in (50, 90, 95, 99):
        assert row[f"p{share}"] == pytest.approx(expected.quantile(share / 100, "linear"))
    assert (row["mean"], row["max"]) == (102.0, 500.0)


def test_token_gaps_carry_their_instant_and_their_tokens(con: Store) -> None:
    con.append(
        "legs",
        [{"leg": "l", "request": "r", "worker": "w", "deployment": "d", "observer": "engine"}],
    )
    con.append("streams", [
        {"leg": "l", "stream": 0, "first_ns": 5_000_000, "gaps_us": [1000, 2500], "emission_tokens": [1, 2, 3]},
        {"leg": "l", "stream": 1, "gaps_us": [700]},
    ])  # fmt: skip
    assert rows(con, "token_gaps", "stream", "position", "gap_ms", "emitted_tokens", "end_ns", "worker") == [
        (0, 1, 1.0, 2, 6_000_000, "w"), (0, 2, 2.5, 3, 8_500_000, "w"), (1, 1, 0.7, None, None, "w"),
    ]  # fmt: skip


def test_phases_that_did_not_occur_count_as_zero_only_where_they_could(con: Store) -> None:
    requests(con,
             {"request": "a", "mode": "aggregated", "start_ns": 0, "end_ns": 100 * MS, "first_token_ns": 40 * MS},
             {"request": "b", "mode": "aggregated", "start_ns": 0, "end_ns": 100 * MS, "first_token_ns": 60 * MS},
             {"request": "p", "mode": "disaggregated", "start_ns": 0, "end_ns": 100 * MS},
             {"request": "x", "mode": "aggregated", "start_ns": 0, "end_ns": 100 * MS, "outcome": "failed"})  # fmt: skip
    phase(con, "a", "prefill_queue", 0, 10, "placed")
    phase(con, "a", "prefill_wall", 10, 40)
    phase(con, "a", "decode_wall", 40, 100)
    phase(con, "b", "prefill_wall", 0, 50)
    phase(con, "b", "decode_wall", 50, 90)
    phase(con, "b", "unattributed", 90, 100, "inferred")
    phase(con, "p", "kv_wait_upper_bound", 0, 100, "upper_bound")
    phase(con, "x", "prefill_wall", 0, 100)
    found = {row["detail"]: row for row in con.query("phase_summary").to_dicts()}
    queue = found["prefill_queue"]
    assert (queue["count"], queue["requests"], queue["p50_ms"], queue["basis"]) == (
        1,
        2,
        5.0,
        "placed",
    )
    assert queue["p90_ms"] == pytest.approx(9.0)
    assert queue["share_of_e2e"] == pytest.approx(10 / 300)
    assert queue["share_of_ttft"] == pytest.approx(10 / 100)
    assert found["decode_wall"]["share_of_ttft"] == pytest.approx(
        10 / 100
    )  # b: from 50 to its first token at 60
    assert (found["kv_wait_upper_bound"]["requests"], found["kv_wait_upper_bound"]["phase"]) == (
        1,
        "kv_wait",
    )
    assert sum(row["share_of_e2e"] for row in found.values()) == pytest.approx(1)
    assert sum(row["share_of_ttft"] or 0 for row in found.values()) == pytest.approx(1)
    first = {row["detail"]: row for row in con.query("ttft_phase_summary").to_dicts()}
    assert set(first) == {"prefill_queue", "prefill_wall", "decode_wall"}
    assert (
        first["decode_wall"]["count"],
        first["decode_wall"]["requests"],
        first["decode_wall"]["p50_ms"],
    ) == (1, 2, 5.0)
    parts = rows(
        con, "phase_by_request", "request", "detail", "duration_ms", "ttft_part_ms", "counted"
    )
    assert ("b", "decode_wall", 40.0, 10.0, True) in parts
    assert ("p", "kv_wait_upper_bound", 100.0, None, True) in parts
    assert ("x", "prefill_wall", 100.0, None, False) in parts


def test_durations_without_position_are_summed_apart(con: Store) -> None:
    requests(con, {"request": "a"}, {"request": "b"})
    con.append("legs", [{"leg": "la", "request": "a"}, {"leg": "lb", "request": "b"}])
    con.append("intervals", [
        {"leg": "la", "detail": "prefill_queue", "duration_ns": 4 * MS, "basis": "reported"},
        {"leg": "lb", "detail": "prefill_queue", "duration_ns": 8 * MS, "basis": "reported"},
        {"leg": "lb", "detail": "prefill_queue", "start_ns": 0, "end_ns": 8 * MS, "basis": "measured"},
    ])  # fmt: skip
    assert rows(con, "duration_summary", "detail", "count", "p50_ms", "total_ms", "basis", "level") == [
        ("prefill_queue", 2, 6.0, 12.0, "reported", "C"),
    ]  # fmt: skip


def test_concurrency_works_on_any_interval_set(con: Store) -> None:
    con.append("legs", [{"worker": "w", "start_ns": 0, "end_ns": 10}, {"worker": "w", "start_ns": 5, "end_ns": 15},
                        {"worker": "v", "start_ns": 5, "end_ns": 10}, {"worker": "v", "start_ns": 9, "end_ns": None}])  # fmt: skip
    assert rows(con, "concurrency", "start_ns", "end_ns", "active", intervals="legs") == [
        (0, 5, 1),
        (10, 15, 1),
        (5, 10, 3),
    ]
    assert rows(con, "worker_concurrency", "worker", "start_ns", "active") == [
        ("v", 5, 1), ("w", 0, 1), ("w", 10, 1), ("w", 5, 2),
    ]  # fmt: skip


def test_worker_load_counts_prompts_once_and_busy_time_as_a_union(con: Store) -> None:
    s = 1_000_000_000
    con.append(
        "workers", [{"worker": "a", "role": "aggregated"}, {"worker": "b", "role": "aggregated"}]
    )
    common = {"deployment": "d", "observer": "engine"}
    con.append("legs", [
        {"leg": "1/0", "request": "r1", "worker": "a", "start_ns": 0, "end_ns": 10 * s, "prompt_tokens": 100, "output_tokens": 5, **common},
        {"leg": "1/1", "request": "r1", "worker": "a", "start_ns": 0, "end_ns": 12 * s, "prompt_tokens": 100, "output_tokens": 7, **common},
        {"leg": "2", "request": "r2", "worker": "a", "start_ns": 5 * s, "end_ns": 8 * s, "prompt_tokens": 200, "output_tokens": 8, **common},
        {"leg": "3", "request": "r3", "worker": "b", "start_ns": 20 * s, "end_ns": 21 * s, "prompt_tokens": 100, **common},
        {"leg": "hop", "request": "r3", "worker": "b", "start_ns": 0, "end_ns": 99 * s, "container": True, **common},
    ])  # fmt: skip
    found = {row["worker"]: row for row in con.query("worker_load").to_dicts()}
    a, b = found["a"], found["b"]
    assert (a["requests"], a["prompt_tokens"], a["output_tokens"]) == (2, 300, 20)
    assert (a["busy_s"], a["resident_s"], a["peers"]) == (12.0, 15.0, 2)
    assert a["requests_ratio"] == pytest.approx(2 / 3)
    assert a["prompt_tokens_ratio"] == 0.75
    assert (b["busy_s"], b["output_tokens"], b["output_tokens_ratio"]) == (1.0, None, None)


def test_steps_divide_into_classes_and_pulled_prompts_are_no_prefill(con: Store) -> None:
    con.append(
        "workers", [{"worker": "d", "role": "decode"}, {"worker": "a", "role": "aggregated"}]
    )
    con.append("steps", [
        {"worker": "a", "seq": 1, "elapsed_ns": 2 * MS, "prefill_requests": 0, "prefill_tokens": 0, "decode_requests": 3, "decode_tokens": 3},
        {"worker": "a", "seq": 2, "elapsed_ns": 60 * MS, "prefill_requests": 1, "prefill_tokens": 512, "decode_requests": 3, "decode_tokens": 3},
        {"worker": "a", "seq": 3, "elapsed_ns": 50 * MS, "prefill_requests": 1, "prefill_tokens": 512, "decode_requests": 0, "decode_tokens": 0},
        {"worker": "a", "seq": 4, "elapsed_ns": 9 * MS, "prefill_requests": 1, "prefill_tokens": 1, "decode_requests": 2, "decode_tokens": 2},
        {"worker": "a", "seq": 5, "elapsed_ns": 1 * MS, "prefill_requests": 0, "prefill_tokens": 0, "decode_requests": 0, "decode_tokens": 0},
        {"worker": "a", "seq": 6, "elapsed_ns": None},
        {"worker": "d", "seq": 1, "elapsed_ns": 3 * MS, "prefill_requests": 2, "prefill_tokens": 2, "decode_requests": 4, "decode_tokens": 4},
        {"worker": "d", "seq": 2, "elapsed_ns": 4 * MS, "prefill_requests": 2, "prefill_tokens": 70, "pulled_requests": 1, "decode_requests": 4},
    ])  # fmt: skip
    assert rows(con, "step_classes", "worker", "class", "count", "p50_ms") == [
        ("a", "decode_only", 1, 2.0), ("a", "idle", 1, 1.0), ("a", "mixed", 2, 34.5), ("a", "prefill_only", 1, 50.0),
        ("a", "unknown", 1, None), ("d", "mixed", 1, 4.0), ("d", "pulled", 1, 3.0),
    ]  # fmt: skip
    assert rows(con, "step_kinds", "worker", "seq", "own_prefill_requests")[-2:] == [
        ("d", 1, 0),
        ("d", 2, 1),
    ]


def test_source_summary_lists_reasons_and_whether_it_adds_up(con: Store) -> None:
    con.append("sources", [{"source": 1, "path": "a.log", "used": True, "rows_read": 10, "rows_kept": 7, "rows_skipped": 3},
                           {"source": 2, "path": "b.bin", "used": False}])  # fmt: skip
    con.append(
        "skipped",
        [
            {"source": 1, "reason": "blank", "records": 1},
            {"source": 1, "reason": "truncated", "records": 2},
        ],
    )
    assert rows(con, "source_summary", "path", "balanced") == [("a.log", True), ("b.bin", None)]
    assert con.rows("SELECT skipped_reasons FROM source_summary WHERE source = 1") == [
        ({"truncated": 2, "blank": 1},)
    ]


def test_data_checks_alarm_on_what_is_more_than_routine(con: Store) -> None:
    requests(con, *[{"request": f"r{n}", "start_ns": 0, "end_ns": 1000 * MS} for n in range(3)])
    for n in range(3):
        phase(con, f"r{n}", "prefill_wall", 0, 1000 if n < 2 else 999)
    con.append("partition_checks", [
        {"request": "r0", "window_ns": 1000 * MS, "clip_ns": 4 * MS, "overlap_ns": 0, "negative_ns": 0},
        {"request": "r1", "window_ns": 1000 * MS, "clip_ns": 20 * MS, "overlap_ns": 0, "negative_ns": 2 * MS},
        {"request": "r2", "window_ns": 1000 * MS, "clip_ns": 0, "overlap_ns": 0, "negative_ns": 0},
    ])  # fmt: skip
    con.append(
        "spans",
        [
            {"trace_id": "t", "span_id": "a", "start_ns": 5},
            {"trace_id": "t", "span_id": "b", "start_ns": 5, "end_ns": 3},
        ],
    )
    con.append("sources", [{"source": 1, "rows_read": 10, "rows_kept": 7, "rows_skipped": 3}])
    con.append("skipped", [{"source": 1, "reason": "duplicate of another record", "records": 2},
                           {"source": 1, "reason": "conflict: copies differ", "records": 1}])  # fmt: skip
    found = {row["check_name"]: row for row in con.query("data_checks").to_dicts()}
    assert (
        found["clipped"]["affected"],
        found["clipped"]["amount_ms"],
        found["clipped"]["alarm"],
    ) == (1, 20.0, True)
    assert (found["partition_exact"]["affected"], found["partition_exact"]["alarm"]) == (1, True)
    assert (found["negative_remainder"]["affected"], found["negative_remainder"]["alarm"]) == (
        1,
        False,
    )
    assert (found["span_without_end"]["affected"], found["span_backwards"]["affected"]) == (1, 1)
    assert (found["duplicate_records"]["affected"], found["conflicting_copies"]["alarm"]) == (
        2,
        True,
    )
    assert (found["skipped_records"]["affected"], found["unbalanced_sources"]["affected"]) == (3, 0)


def test_coverage_tells_missing_from_not_applicable(con: Store) -> None:
    con.append(
        "deployments",
        [{"deployment": "d", "mode": "disaggregated"}, {"deployment": "e", "mode": "aggregated"}],
    )
    requests(con, {"request": "a", "mode": "disaggregated", "prompt_tokens": 5, "start_ns": 1}, {"request": "b", "mode": "disaggregated"},
             {"request": "c", "mode": "aggregated", "deployment": "e"})  # fmt: skip
    con.append(
        "workers",
        [
            {"worker": "w", "deployment": "d", "role": "decode"},
            {"worker": "v", "deployment": "d", "role": "router"},
        ],
    )
    con.append("steps", [{"worker": "w", "seq": 1}])
    con.append("samples", [{"worker": "w", "metric": "engine:kv_cache_usage_perc", "value": 0.5}])
    con.append("legs", [{"leg": "l", "request": "a", "deployment": "d"}])
    con.append("intervals", [{"leg": "l", "detail": "prefill_queue", "duration_ns": 1}])
    found = {(r["deployment"], r["item"]): r for r in con.query("coverage_items").to_dicts()}
    assert found["d", "input_tokens"]["present_ratio"] == 0.5
    assert found["d", "queue_wait"]["present"] == 1
    assert (found["d", "kv_transfer"]["applies"], found["d", "kv_transfer"]["present_ratio"]) == (
        True,
        0.0,
    )
    assert found["e", "kv_transfer"]["applies"] is False
    assert (
        found["d", "engine_steps"]["present_ratio"],
        found["d", "kv_usage"]["present_ratio"],
    ) == (1.0, 1.0)
    assert (
        found["d", "router_decisions"]["applies"],
        found["e", "router_decisions"]["applies"],
    ) == (True, None)
    assert found["e", "engine_steps"]["present_ratio"] is None


def test_every_view_answers_on_an_empty_store(con: Store) -> None:
    from pdtrace import library

    for name, query in library.queries().items():
        if query.kind == "views":
            assert con.query(name).columns == [c.name for c in query.columns], name


def test_a_name_that_says_percent_gives_no_unit_a_share_one(con: Store) -> None:
    con.append("workers", [{"worker": "w", "deployment": "d"}])
    con.append("samples", [
        {"worker": "w", "source": 1, "record": n, "time_ns": n, "metric": metric, "kind": "gauge", "value": 0.4}
        for n, metric in enumerate(("x_kv_usage_percent", "x_kv_usage_perc"))
    ])  # fmt: skip
    rows = dict(con.rows("SELECT metric, unit FROM metric_summary"))
    assert rows == {"x_kv_usage_percent": "", "x_kv_usage_perc": "1"}


def test_seconds_are_summed_exactly_so_that_no_order_of_adding_shows(con: Store) -> None:
    """Ten waits of 0.1 ms are 1 ms; as floating-point milliseconds they add up to 0.9999999999999999."""
    names = [f"r{n}" for n in range(10)]
    requests(con, *({"request": name, "start_ns": 0, "first_token_ns": MS, "end_ns": 2 * MS} for name in names))  # fmt: skip
    for name in names:
        phase(con, name, "prefill_queue", 0, 0.1)
        phase(con, name, "prefill_wall", 0.1, 1)
        phase(con, name, "decode_wall", 1, 2)
    queued = "WHERE detail = 'prefill_queue'"
    found = con.rows(f"SELECT total_ms, share_of_e2e, ttft_total_ms, share_of_ttft FROM phase_summary {queued}")  # fmt: skip
    assert found == [(1.0, 0.05, 1.0, 0.1)]
    assert con.rows(f"SELECT total_ms, share_of_ttft FROM ttft_phase_summary {queued}") == [(1.0, 0.1)]  # fmt: skip
    shares = con.rows("SELECT total_ms, share FROM phase_shares WHERE phase = 'queue' ORDER BY share")  # fmt: skip
    assert shares == [(1.0, 0.05), (1.0, 0.1)]
    wait = con.rows("SELECT wait_s, e2e_ratio FROM waits(details := ['prefill_queue'])")
    assert wait == [(0.001, 0.05)]


def test_parts_of_a_gauge_are_no_figure_of_their_own(con: Store) -> None:
    """vLLM 0.25 tells waiting requests by reason, too: a mean over the reasons is nobody's queue."""
    con.append("workers", [{"worker": "w", "deployment": "d"}])
    common = {"worker": "w", "time_ns": 1, "kind": "gauge"}
    con.append("samples", [
        common | {"metric": "vllm:num_requests_waiting", "labels": "{}", "value": 64.0},
        common | {"metric": "vllm:num_requests_waiting_by_reason", "labels": '{"reason": "capacity"}', "value": 64.0},
        common | {"metric": "vllm:num_requests_waiting_by_reason", "labels": '{"reason": "deferred"}', "value": 0.0},
    ])  # fmt: skip
    assert con.rows("SELECT metric, mean FROM metric_summary") == [
        ("vllm:num_requests_waiting", 64.0)
    ]
