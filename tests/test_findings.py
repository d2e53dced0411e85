"""Findings: hand-made rows in, expected rows out. Round numbers, one meaning a test."""

from __future__ import annotations

from typing import Any

import pytest

from pdtrace import _unsupported, wording
from pdtrace.store import Store

MS = 1_000_000
Row = dict[str, Any]


def request(n: int, **more: Any) -> Row:
    """A completed request of deployment d: TTFT 100 ms, 101 tokens at 10 ms, prompt of 1000."""
    row: Row = {
        "request": f"r{n}", "deployment": "d", "outcome": "completed", "ttft_ms": 100.0 + n % 5,
        "tpot_ms": 10.0 + 0.1 * (n % 5), "prompt_tokens": 1000 + n % 7, "output_tokens": 101,
        "start_ns": n * 1000 * MS,
    } | more  # fmt: skip
    if row["ttft_ms"] is not None and row["start_ns"] is not None:
        row.setdefault("first_token_ns", row["start_ns"] + round(row["ttft_ms"] * MS))
    if row["ttft_ms"] is not None and row["output_tokens"] is not None:
        row.setdefault("e2e_ms", row["ttft_ms"] + (row["output_tokens"] - 1) * row["tpot_ms"])
    if row.get("e2e_ms") is not None and row["start_ns"] is not None:
        row.setdefault("end_ns", row["start_ns"] + round(row["e2e_ms"] * MS))
    return row


def phase(
    n: int, detail: str, start_ms: float, end_ms: float, phase: str, basis: str = "measured"
) -> Row:
    """A phase of request n; times from its start."""
    start = n * 1000 * MS
    return {
        "request": f"r{n}", "phase": phase, "detail": detail, "basis": basis,
        "start_ns": start + round(start_ms * MS), "end_ns": start + round(end_ms * MS),
    }  # fmt: skip


def one(con: Store, name: str, **params: Any) -> Row:
    rows = con.query(name, **params).to_dicts()
    assert len(rows) == 1, rows
    return rows[0]


def none(con: Store, name: str, **params: Any) -> None:
    assert con.query(name, **params).to_dicts() == []


def worker(name: str, role: str = "aggregated", deployment: str = "d") -> Row:
    return {"worker": name, "deployment": deployment, "role": role}


# -- first tokens and streams ----------------------------------------------------------------------


def slow_run(slow_phase: str = "prefill") -> tuple[list[Row], list[Row]]:
    """20 requests, each fourth with a prompt of 9000 tokens and a TTFT of 1000 ms instead of 100."""
    requests, phases = [], []
    for n in range(20):
        slow = n % 4 == 0
        ttft = 1000.0 if slow else 100.0 + n % 5
        requests.append(request(n, ttft_ms=ttft, prompt_tokens=9000 if slow else 1000 + n))
        phases += [
            phase(n, "prefill_queue", 0, 20, "queue"),
            phase(n, "prefill_exec", 20, ttft, slow_phase),
            phase(n, "decode_exec", ttft, ttft + 1000, "decode"),
        ]
    return requests, phases


def test_slow_first_tokens_name_their_phase_and_whether_prompts_explain_them(con: Store) -> None:
    requests, phases = slow_run()
    con.append("requests", requests)
    con.append("phases", phases)
    row = one(con, "slow_first_token")
    assert (row["requests"], row["measured"], row["level"], row["unit"]) == (5, 20, "B", "ms")
    assert row["cost_s"] == pytest.approx(5 * (1.0 - row["typical_ms"] / 1e3))
    assert row["share"] == pytest.approx(row["cost_s"] / sum(r["ttft_ms"] / 1e3 for r in requests))
    assert row["interval_low"] <= row["value"] <= row["interval_high"]
    assert (row["top_phase"], row["grown_phase"]) == ("prefill", "prefill")
    assert row["grown_ratio"] == pytest.approx(1)
    assert (row["prompt_driven"], row["slow_long_input"], row["other_long_input"]) == (True, 5, 0)
    assert row["split"] is False
    assert row["prompt_slope_ms"] == pytest.approx(112, rel=0.02)
    assert row["severity"] == "warning"
    assert {c["request"] for c in row["culprits"]} == {"r0", "r4", "r8", "r12", "r16"}


def test_even_first_tokens_are_no_finding_unless_they_break_the_limit(con: Store) -> None:
    con.append("requests", [request(n) for n in range(50)])
    none(con, "slow_first_token")
    row = one(con, "slow_first_token", slo_ttft_ms=102.5)
    assert (row["requests"], row["limit_given"], row["severity"]) == (20, True, "warning")
    assert row["cost_s"] == pytest.approx((10 * 0.5 + 10 * 1.5) / 1e3)


def test_few_requests_have_no_typical_first_token(con: Store) -> None:
    con.append("requests", [request(n, ttft_ms=10.0 ** (n + 1)) for n in range(4)])
    none(con, "slow_first_token")
    assert con.query("request_marks")["slow_first_token"].null_count() == 4


def test_half_of_the_run_being_slow_does_not_make_slowness_typical(con: Store) -> None:
    con.append("requests", [request(n, ttft_ms=2000.0 if n % 2 else 100.0) for n in range(20)])
    assert one(con, "slow_first_token")["requests"] == 10


def test_prompts_of_one_length_explain_nothing(con: Store) -> None:
    con.append(
        "requests", [request(n, ttft_ms=100.0 + 90 * n, prompt_tokens=500) for n in range(20)]
    )
    con.append("requests", [request(20, ttft_ms=9000.0, prompt_tokens=500)])
    row = one(con, "slow_first_token")
    assert (row["prompt_rho"], row["prompt_driven"]) == (None, False)


def test_without_lengths_nobody_can_tell_whether_prompts_drive(con: Store) -> None:
    con.append(
        "requests",
        [request(n, ttft_ms=2000.0 if n == 3 else 100.0, prompt_tokens=None) for n in range(20)],
    )
    row = one(con, "slow_first_token")
    assert (row["prompt_driven"], row["prompt_pairs"], row["top_phase"]) == (None, None, None)


def test_durations_without_instants_are_level_c(con: Store) -> None:
    con.append(
        "requests",
        [request(n, ttft_ms=2000.0 if n == 3 else 100.0, start_ns=None) for n in range(20)],
    )
    assert one(con, "slow_first_token")["level"] == "C"


def test_failed_requests_do_not_enter_latency(con: Store) -> None:
    con.append(
        "requests",
        [
            request(n, **({"outcome": "failed", "ttft_ms": 9000.0} if n == 3 else {}))
            for n in range(20)
        ],
    )
    none(con, "slow_first_token")


def test_deployments_are_never_pooled(con: Store) -> None:
    con.append("requests", [request(n) for n in range(20)])
    con.append("requests", [request(n + 20, deployment="e", ttft_ms=5000.0 + n) for n in range(20)])
    none(con, "slow_first_token")


def test_slow_streams_cost_what_exceeds_the_typical(con: Store) -> None:
    con.append("requests", [request(n, tpot_ms=50.0 if n < 4 else 10.0) for n in range(20)])
    row = one(con, "slow_stream")
    assert (row["requests"], row["severity"], row["level"]) == (4, "warning", "B")
    assert row["cost_s"] == pytest.approx(4 * 100 * 0.040)
    assert row["gaps"] is None
    none(con, "slow_stream", min_slow_ratio=0.5)


def test_the_worker_that_decodes_the_slow_streams_is_named(con: Store) -> None:
    rows = [
        request(
            n, tpot_ms=50.0 if n % 4 == 1 or n == 2 else 10.0, decode_worker=f"instance:w{n % 4}"
        )
        for n in range(80)
    ]
    con.append("requests", rows)
    row = one(con, "slow_stream")
    assert (row["slow_worker"], row["slow_worker_slow"], row["slow_worker_requests"]) == (
        "instance:w1",
        20,
        20,
    )
    assert row["other_slow_ratio"] == pytest.approx(1 / 60)
    said = wording.finding("slow_stream", row).detail
    assert (
        "20 of them were decoded on w1: 100 % of its 20 requests are slow, 1.7 % of the others'"
        in said
    )


def test_no_worker_is_named_where_the_slow_streams_are_spread(con: Store) -> None:
    con.append(
        "requests",
        [
            request(n, tpot_ms=50.0 if n < 16 else 10.0, decode_worker=f"w{n % 4}")
            for n in range(80)
        ],
    )
    row = one(con, "slow_stream")
    assert row["slow_worker"] is None
    assert "decoded on" not in wording.finding("slow_stream", row).detail


def test_stalls_are_found_though_the_mean_is_even(con: Store) -> None:
    con.append("requests", [request(n) for n in range(20)])
    con.append(
        "legs",
        [
            {"leg": f"l{n}", "request": f"r{n}", "deployment": "d", "observer": "client"}
            for n in range(20)
        ],
    )
    gaps = [10_000] * 95 + [110_000] * 5
    con.append(
        "streams",
        [
            {
                "leg": f"l{n}",
                "stream": 0,
                "gaps_us": gaps,
                "emission": "chunk",
                "observer": "client",
            }
            for n in range(20)
        ],
    )
    row = one(con, "slow_stream")
    assert row["stall_s"] == pytest.approx(20 * 5 * 0.080)
    assert row["stall_ratio"] == pytest.approx(5 * 80 / (95 * 10 + 5 * 110))
    assert (row["gaps"], row["gap_p50_ms"], row["gap_max_ms"]) == (2000, 10, 110)
    assert (row["gap_observer"], row["gap_emission"], row["requests"]) == ("client", "chunk", 0)
    assert one(con, "slow_stream", slo_itl_ms=60)["stall_s"] == pytest.approx(20 * 5 * 0.050)


def test_short_answers_have_no_pace(con: Store) -> None:
    con.append(
        "requests",
        [
            request(n, tpot_ms=500.0 if n < 4 else 10.0, output_tokens=3 if n < 4 else 101)
            for n in range(20)
        ],
    )
    none(con, "slow_stream")


def test_long_answers_explain_durations(con: Store) -> None:
    con.append("requests", [request(n, output_tokens=50 + 40 * n) for n in range(20)])
    row = one(con, "long_output")
    assert (row["severity"], row["cost_s"], row["unit"]) == ("info", None, "ms/token")
    assert row["value"] == pytest.approx(10.2, rel=0.02)
    assert row["share"] > 0.99
    assert row["interval_low"] < row["value"] < row["interval_high"]
    con.execute("UPDATE requests SET output_tokens = 100")
    none(con, "long_output")


def test_the_smallest_case_a_table_of_twenty_rows(con: Store) -> None:
    con.append("requests", [
        request(n, start_ns=None, prompt_tokens=8000 if n in (3, 9, 15) else 400,
                ttft_ms=3000.0 if n in (3, 9, 15) else 250.0 + n,
                output_tokens=1500 if n in (5, 17) else 200, tpot_ms=45.0 if n in (5, 17) else 20.0)
        for n in range(20)
    ])  # fmt: skip
    marks = con.query("request_marks")
    marked = {
        column: sorted(marks.filter(marks[column])["request"].to_list())
        for column in ("slow_first_token", "slow_stream", "long_input", "long_output")
    }
    assert marked == {
        "slow_first_token": ["r15", "r3", "r9"], "long_input": ["r15", "r3", "r9"],
        "slow_stream": ["r17", "r5"], "long_output": ["r17", "r5"],
    }  # fmt: skip
    assert one(con, "slow_first_token")["prompt_driven"] is True
    assert one(con, "slow_stream")["slow_long_output"] == 2
    assert one(con, "long_output")["share"] > 0.9


# -- waits -----------------------------------------------------------------------------------------


def queued(con: Store, detail: str, name: str, wait_ms: float, basis: str = "measured") -> None:
    """20 requests that wait, then prefill until 100 ms, then decode."""
    for n in range(20):
        con.append(
            "requests",
            [request(n, ttft_ms=100.0, tpot_ms=10.0, prefill_worker="p", decode_worker="q")],
        )
        con.append("phases", [
            phase(n, detail, 0, wait_ms, name, basis), phase(n, "prefill_exec", wait_ms, 100, "prefill"),
            phase(n, "decode_exec", 100, 1100, "decode"),
        ])  # fmt: skip


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


def test_unattributed_time_is_shown_from_a_tenth_on(con: Store) -> None:
    queued(con, "unattributed", "unattributed", 95)
    none(con, "unattributed_time")
    row = one(con, "unattributed_time", min_e2e_ratio=0.05)
    assert row["share"] == pytest.approx(95 / 1100)
    assert row["ttft_ratio"] == pytest.approx(0.95)
    assert (row["observed"], row["cost_s"]) == (True, None)


# -- engines ---------------------------------------------------------------------------------------


def judged(worker: str, lost: float | None, flagged: bool | None) -> Row:
    return {
        "worker": worker, "rank": "0", "deployment": "d", "role": "aggregated", "steps": 1000,
        "decode_only_steps": 900, "mixed_steps": 100, "prefill_only_steps": 0, "affected_steps": 100,
        "lost_s": lost, "lost_low_s": lost and lost - 0.1, "lost_high_s": lost and lost + 0.1,
        "decode_s": 40.0 if lost is not None else None, "flagged": flagged, "lost_ratio_low": 0.05,
        "note": None if lost is not None else "sampled",
    }  # fmt: skip


def test_prefill_interference_sums_flagged_workers_only(con: Store) -> None:
    con.append(
        "interference_steps",
        [
            judged("a", 4.0, True),
            judged("b", 2.0, True),
            judged("c", 0.1, False),
            judged("x", None, None),
        ],
    )
    con.append("workers", [worker(w) for w in "abcx"])
    con.append("requests", [request(n, decode_worker="abcx"[n % 4]) for n in range(20)])
    con.append(
        "interference_step_losses",
        [
            {
                "worker": "a",
                "rank": "0",
                "seq": 7,
                "elapsed_ms": 90.0,
                "prefill_tokens": 100,
                "lost_s": 1.0,
            }
        ],
    )
    con.append("step_members", [
        {"worker": "a", "rank": "0", "seq": 7, "request_id": "x-1", "prefill_tokens": 75},
        {"worker": "a", "rank": "0", "seq": 7, "request_id": "x-2", "prefill_tokens": 25},
    ])  # fmt: skip
    con.append(
        "legs",
        [{"leg": "l", "worker": "a", "request_id": "x-1", "request": "r0", "deployment": "d"}],
    )
    row = one(con, "prefill_interference")
    assert (row["value"], row["interval_low"], row["interval_high"]) == (
        6.0,
        pytest.approx(5.8),
        pytest.approx(6.2),
    )
    assert (row["decode_s"], row["share"], row["severity"]) == (80.0, 0.075, "warning")
    assert (row["workers"], row["requests"]) == (["a", "b"], 10)
    assert row["culprits"] == [{"request": "r0", "value": 0.75}, {"request": "x-2", "value": 0.25}]
    assert (row["workers_judged"], row["workers_unknown"], row["longest_step_ms"]) == (3, 1, 90.0)


def test_no_flag_no_interference(con: Store) -> None:
    con.append("interference_steps", [judged("c", 0.1, False), judged("x", None, None)])
    none(con, "prefill_interference")


def test_kv_pressure_from_steps_and_from_samples(con: Store) -> None:
    con.append("workers", [worker("a"), worker("b")])
    con.append("steps", [
        {"worker": "a", "seq": n, "elapsed_ns": 10 * MS, "kv_usage_ratio": 0.97 if n < 20 else 0.5, "waiting": 3 if n == 5 else 0}
        for n in range(100)
    ])  # fmt: skip
    row = one(con, "kv_pressure")
    assert (row["value"], row["level"], row["severity"], row["waiting_max"]) == (
        pytest.approx(0.2),
        "A",
        "warning",
        3,
    )
    con.append(
        "samples",
        [
            {
                "worker": "b",
                "source": 1,
                "time_ns": n,
                "metric": "x:gpu_cache_usage_percent",
                "value": 95.0 if n else 0.8,  # eight tenths of a percent, not nearly full
                "kind": "gauge",
            }
            for n in range(10)
        ],
    )
    row = one(con, "kv_pressure")
    assert (row["workers"], row["level"], row["value"]) == (["b", "a"], "D", 0.9)
    none(con, "kv_pressure", high_ratio=0.99)


def test_a_percentage_that_is_read_as_a_share_is_said_to_be_a_guess(con: Store) -> None:
    con.append("workers", [worker("a"), worker("b")])
    con.append("samples", [
        {"worker": w, "source": 1, "time_ns": n, "metric": metric, "value": 0.95, "kind": "gauge"}
        for n in range(5) for w, metric in (("a", "x_kv_cache_usage_percent"), ("b", "x:kv_cache_usage_perc"))
    ])  # fmt: skip
    row = one(con, "kv_pressure")
    assert (row["value"], row["guessed_metrics"]) == (1.0, ["x_kv_cache_usage_percent"])
    (said,) = wording.finding("kv_pressure", row).assumptions
    assert "x_kv_cache_usage_percent is a share of one, though its name says percent" in said


def test_a_full_rank_is_not_averaged_away_by_an_empty_one(con: Store) -> None:
    """Ranks of one server have caches of their own: two of three are full all the time."""
    con.append("workers", [worker("a")])
    con.append("samples", [
        {"worker": "a", "source": 1, "record": r, "time_ns": t, "metric": m, "labels": f'{{"engine":"{r}"}}', "value": v, "kind": "gauge"}
        for t in range(4)
        for r, usage, waiting in ((0, 1.0, 117), (1, 0.98, 2), (2, 0.5, 900))
        for m, v in (("vllm:kv_cache_usage_perc", usage), ("vllm:num_requests_waiting", waiting))
    ])  # fmt: skip
    row = one(con, "kv_pressure")
    assert (row["value"], row["ranks_pressed"], row["ranks"], row["workers"]) == (1.0, 2, 3, ["a"])
    assert (row["waiting_max"], row["usage_p50_ratio"]) == (117, 1.0)  # 900 wait at the empty one


def test_figures_without_a_rank_are_no_further_rank_and_steps_without_time_no_share(
    con: Store,
) -> None:
    con.append("workers", [worker("a"), worker("b")])
    con.append("samples", [
        {"worker": "a", "source": 1, "record": r, "time_ns": t, "metric": "vllm:kv_cache_usage_perc", "labels": labels, "value": 0.95, "kind": "gauge"}
        for t in range(4)
        for r, labels in enumerate(('{"engine":"0"}', '{"engines_aggregated":"1"}'))
    ])  # fmt: skip
    con.append("steps", [
        {"worker": "b", "seq": n, "elapsed_ns": 0, "kv_usage_ratio": 0.5} for n in range(3)
    ])  # fmt: skip
    row = one(con, "kv_pressure")
    assert (row["value"], row["ranks"], row["ranks_pressed"], row["workers"]) == (1.0, 0, 0, ["a"])


@pytest.mark.parametrize(
    ("metric", "values", "usage"),
    [
        ("x:kv_cache_usage_perc", [0.5, 1.0], [0.5, 1.0]),  # engines write a share under this name
        ("x:kv_cache_usage_perc", [0.5, 50.0], [0.5, None]),  # no share, and nobody says a percent
        ("x_gpu_cache_usage_percent", [0.4, 0.95], [0.4, 0.95]),
        ("x_gpu_cache_usage_percent", [0.4, 1.2], [0.004, 0.012]),
        ("token_usage", [0.3, None], [0.3]),
    ],
)
def test_the_unit_of_kv_usage_comes_from_the_metrics_name(
    con: Store, metric: str, values: list[float | None], usage: list[float | None]
) -> None:
    con.append("samples", [
        {"worker": "w", "source": 1, "record": n, "time_ns": n, "metric": metric, "value": value, "kind": "gauge"}
        for n, value in enumerate(values)
    ])  # fmt: skip
    assert con.query("kv_usage_samples").sort("time_ns")["usage_ratio"].to_list() == usage


def test_preemptions_from_events_and_counters(con: Store) -> None:
    con.append("workers", [worker("a"), worker("b")])
    con.append("requests", [request(n) for n in range(20)])
    con.append("events", [{"worker": "a", "kind": "preemption", "count": 2, "request_id": "q"}])
    con.append("samples", [
        {"worker": "b", "source": 1, "record": 1, "time_ns": t, "metric": m, "value": v, "kind": "counter"}
        for m, points in {"x:num_preemptions_total": [(1, 5.0), (2, 8.0), (3, 1.0)], "x:num_preemptions_created": [(1, 1e9), (2, 2e9)]}.items()
        for t, v in points
    ])  # fmt: skip
    row = one(con, "preemption")
    assert (row["value"], row["from_events"], row["from_counters"]) == (5.0, 2, 3.0)
    assert (row["counter_total"], row["level"], row["cost_s"], row["severity"]) == (
        False,
        "D",
        None,
        "warning",
    )


@pytest.mark.parametrize(
    ("metric", "finding"),
    [("x:num_preemptions_total", "preemption"), ("x:nixl_num_kv_expired_reqs_total", "kv_alarm")],
)
def test_two_dumps_of_counters_without_times_tell_their_difference_in_any_order(
    con: Store, metric: str, finding: str
) -> None:
    """`after.prom` is read before `before.prom`."""
    con.append("workers", [worker("a")])
    con.append("requests", [request(n) for n in range(20)])
    con.append("samples", [
        {"worker": "a", "metric": metric, "kind": "counter", "labels": "{}", "source": n, "value": value}
        for n, value in enumerate((664.0, 4.0))
    ])  # fmt: skip
    assert one(con, finding)["value"] == 660


def test_preempted_phases_give_seconds(con: Store) -> None:
    con.append("requests", [request(n) for n in range(20)])
    con.append("phases", [phase(1, "preempted", 200, 700, "decode")])
    row = one(con, "preemption")
    assert (row["cost_s"], row["level"], row["requests"]) == (0.5, "B", 1)
    assert row["culprits"] == [{"request": "r1", "value": 0.5}]


def test_uneven_requests_are_told_from_chance(con: Store) -> None:
    con.append("workers", [worker("a"), worker("b")])
    con.append(
        "requests",
        [
            request(n, prefill_worker="a" if n < 80 else "b", decode_worker="a" if n < 80 else "b")
            for n in range(100)
        ],
    )
    row = one(con, "worker_imbalance")
    assert (row["side"], row["workers"], row["workers_seen"]) == ("both", ["a"], 2)
    assert row["requests_over_mean"] == pytest.approx(1.6)
    assert (row["share"], row["severity"]) == (pytest.approx(0.8, abs=0.01), "warning")
    assert row["sigma"] == pytest.approx(6, abs=0.1)
    con.execute(
        "UPDATE requests SET prefill_worker = 'b', decode_worker = 'b' WHERE right(request, 1) IN ('0', '1', '2')"
    )
    none(con, "worker_imbalance")


def test_equal_requests_may_be_unequal_tokens(con: Store) -> None:
    con.append(
        "requests",
        [
            request(
                n,
                prefill_worker="ab"[n % 2],
                decode_worker="xy"[n % 2],
                prompt_tokens=3000 if n % 2 else 1000,
            )
            for n in range(100)
        ],
    )
    row = one(con, "worker_imbalance")
    assert (row["side"], row["measure"], row["workers"]) == ("prefill", "tokens", ["b"])
    assert (row["value"], row["requests_over_mean"]) == (1.5, 1.0)


def test_a_worker_of_the_role_without_requests_counts(con: Store) -> None:
    con.append("workers", [worker("a"), worker("b")])
    con.append("requests", [request(n, prefill_worker="a", decode_worker="a") for n in range(40)])
    row = one(con, "worker_imbalance")
    assert (row["idle_workers"], row["value"]) == (1, 2.0)


# -- failures and alarms ---------------------------------------------------------------------------


def test_failures_are_counted_with_their_kinds_and_an_interval(con: Store) -> None:
    outcomes = ["failed", "failed", "aborted"] + ["completed"] * 97
    con.append(
        "requests",
        [
            request(n, outcome=o, error="timeout" if n == 0 else None, e2e_ms=2000.0)
            for n, o in enumerate(outcomes)
        ],
    )
    con.append("workers", [worker("a", "frontend")])
    con.append("events", [
        {"worker": "a", "kind": "http_error", "detail": "HTTP 503 on /v1/completions"},
        {"worker": "a", "kind": "http_error", "detail": "HTTP 400 on /v1/completions", "count": 2},
    ])  # fmt: skip
    row = one(con, "failed_requests")
    assert (
        row["failed"],
        row["aborted"],
        row["seen"],
        row["http_errors"],
        row["server_errors"],
    ) == (2, 1, 100, 3, 1)
    assert (row["value"], row["share"], row["cost_s"], row["severity"]) == (
        2.0,
        0.02,
        4.0,
        "warning",
    )
    assert (row["interval_low"], row["interval_high"]) == pytest.approx((0.55, 7.0), abs=0.01)
    assert {e["error"]: e["requests"] for e in row["errors"]} == {
        "timeout": 1,
        "failed": 1,
        "aborted": 1,
    }


def test_an_http_error_of_a_request_that_failed_is_not_counted_twice(con: Store) -> None:
    con.append("requests", [request(0, outcome="failed", external_id="x")])
    con.append("workers", [worker("a", "frontend")])
    con.append("legs", [{"leg": "l", "source": 1, "record": 7, "request": "r0", "deployment": "d"}])
    con.append("events", [
        {"worker": "a", "kind": "http_error", "request_id": "x", "detail": "500"},
        {"worker": "a", "kind": "http_error", "source": 1, "record": 7, "detail": "500"},
    ])  # fmt: skip
    assert one(con, "failed_requests")["http_errors"] == 0


def test_http_errors_alone_are_level_d(con: Store) -> None:
    con.append("workers", [worker("a", "frontend")])
    con.append("events", [{"worker": "a", "kind": "http_error", "detail": "400"}])
    row = one(con, "failed_requests")
    assert (row["level"], row["severity"], row["seen"], row["share"]) == ("D", "info", 0, None)


def test_failed_requests_do_not_stand_for_the_calls_that_only_access_lines_count(
    con: Store,
) -> None:
    """A log without request lines names a call only where its answer was an error."""
    con.append("requests", [request(n, outcome="failed") for n in range(5)])
    con.append("workers", [worker("a", "aggregated")])
    con.append("facts", [
        {"worker": "a", "key": "http_calls", "value": "1000"},
        {"worker": "a", "key": "http_calls_failed", "value": "5"},
    ])  # fmt: skip
    row = one(con, "failed_requests")
    assert (row["failed"], row["seen"], row["calls"], row["share"]) == (5, 5, 1000, 0.005)
    assert row["severity"] == "warning" and row["interval_high"] < 12
    assert "5 failed of 1,000 calls" in wording.finding("failed_requests", row).title


@pytest.mark.parametrize("failed", [2, 5])
def test_calls_of_the_whole_log_are_no_share_of_a_stretch_of_it(con: Store, failed: int) -> None:
    """Of 1,000 calls in the log 5 failed; of those in the stretch only the failed ones are known, all 5 or 2 of them."""
    con.append("requests", [request(n, outcome="failed") for n in range(failed)])
    con.append("workers", [worker("a", "aggregated")])
    con.append("facts", [
        {"worker": "a", "key": "http_calls", "value": "1000"},
        {"worker": "a", "key": "http_calls_failed", "value": "5"},
        {"worker": "a", "key": "http_calls_whole_log", "value": "true"},
    ])  # fmt: skip
    row = one(con, "failed_requests")
    assert (row["failed"], row["calls"], row["calls_whole_log"]) == (failed, 1000, True)
    assert (row["share"], row["interval_low"], row["interval_high"]) == (None, None, None)
    assert row["severity"] == "warning"
    words = wording.finding("failed_requests", row)
    assert words.title == f"{failed} failed; of how many calls in this stretch of time is not known"
    assert "In the whole log the access lines count 1,000 calls, 5 with an error" in words.detail


def test_no_failure_no_row(con: Store) -> None:
    con.append("requests", [request(n) for n in range(20)])
    none(con, "failed_requests")


def test_an_engine_that_died_is_told_with_what_was_in_flight(con: Store) -> None:
    con.append("workers", [worker("a", "aggregated")])
    con.append("events", [
        {"worker": "a", "kind": "oom", "severity": "critical", "time_ns": 100, "resolution_ns": 10, "detail": "out of memory"},
        {"worker": "a", "kind": "failure", "severity": "critical", "time_ns": 120, "detail": "engine died", "count": 2},
        {"worker": "a", "kind": "started", "severity": "info", "time_ns": 900},
        {"worker": "a", "kind": "failure", "severity": "warning", "time_ns": 5, "request_id": "q"},  # a request's
    ])  # fmt: skip
    whole = {"deployment": "d", "outcome": "completed"}
    con.append("requests", [
        whole | {"request": "lost", "start_ns": 50, "end_ns": 105, "outcome": "aborted"},
        whole | {"request": "no end", "start_ns": 60, "end_ns": None, "outcome": "unknown"},
        whole | {"request": "finished", "start_ns": 50, "end_ns": 99},
        whole | {"request": "before", "start_ns": 1, "end_ns": 20, "outcome": "failed"},
        whole | {"request": "refused", "start_ns": 30, "end_ns": None, "outcome": "failed"},  # the time of its error
        whole | {"request": "later", "start_ns": 950, "end_ns": None, "outcome": "unknown"},
    ])  # fmt: skip
    row = one(con, "engine_failure")
    assert (row["severity"], row["level"], row["value"], row["requests"]) == ("critical", "D", 3, 2)
    assert (row["first_ns"], row["last_ns"], row["restarts"], row["workers"]) == (
        100,
        120,
        1,
        ["a"],
    )
    assert row["kinds"] == [
        {"detail": "engine died", "events": 2},
        {"detail": "out of memory", "events": 1},
    ]


def test_a_request_that_failed_is_no_dead_engine(con: Store) -> None:
    con.append("workers", [worker("a", "aggregated")])
    con.append("events", [{"worker": "a", "kind": "failure", "severity": "warning", "request_id": "q", "time_ns": 5}])  # fmt: skip
    none(con, "engine_failure")


def test_kv_alarms_are_critical_and_counted_once(con: Store) -> None:
    con.append("workers", [worker("p", "prefill")])
    con.append("events", [
        {"worker": "p", "kind": "kv_expired", "time_ns": 5, "request_id": "q", "count": 2},
        {"worker": "p", "kind": "kv_invalid", "time_ns": 9},
        {"worker": "p", "kind": "warning", "time_ns": 1},
    ])  # fmt: skip
    con.append(
        "samples",
        [
            {
                "worker": "p",
                "source": 1,
                "record": 1,
                "metric": "x:kv_expired_reqs_total",
                "value": 2.0,
                "kind": "counter",
            }
        ],
    )
    row = one(con, "kv_alarm")
    assert (row["severity"], row["value"], row["requests"]) == ("critical", 3.0, 1)
    assert (row["first_ns"], row["last_ns"]) == (5, 9)
    assert row["kinds"] == [
        {"kind": "kv_expired", "alarms": 2},
        {"kind": "kv_invalid", "alarms": 1},
    ]


def test_a_counter_of_expired_kv_alone_is_an_alarm_and_zero_is_none(con: Store) -> None:
    con.append("workers", [worker("p", "prefill"), worker("o", "prefill")])
    con.append(
        "samples",
        [
            {
                "worker": w,
                "source": 1,
                "record": 1,
                "metric": "x:kv_expired_reqs_total",
                "value": v,
                "kind": "counter",
            }
            for w, v in (("p", 3.0), ("o", 0.0))
        ],
    )
    row = one(con, "kv_alarm")
    assert (row["value"], row["workers"]) == (3.0, ["p"])


def test_a_counter_of_failed_transfers_is_an_alarm(con: Store) -> None:
    """vLLM counts them in /metrics; its log may say nothing."""
    con.append("workers", [worker("p", "prefill"), worker("q", "decode")])
    con.append("events", [{"worker": "q", "kind": "kv_failure", "time_ns": 5}])
    con.append("samples", [
        {"worker": w, "source": 1, "record": r, "time_ns": t, "metric": "vllm:nixl_num_failed_transfers_total", "value": v, "kind": "counter"}
        for r, (w, t, v) in enumerate([("p", 1, 4.0), ("p", 2, 6.0), ("q", 1, 1.0), ("q", 2, 2.0)])
    ])  # fmt: skip
    row = one(con, "kv_alarm")
    assert row["kinds"] == [{"kind": "kv_failure", "alarms": 3}]  # 2 of p's counter, 1 of q's log
    assert (row["value"], sorted(row["workers"])) == (3.0, ["p", "q"])


def test_failed_transfers(con: Store) -> None:
    con.append("workers", [worker("q", "decode")])
    con.append(
        "transfers",
        [
            {
                "destination_worker": "q",
                "outcome": "failed" if n == 0 else "completed",
                "request_id": "x",
            }
            for n in range(50)
        ],
    )
    row = one(con, "transfer_failures")
    assert (row["value"], row["share"], row["severity"], row["requests"]) == (
        1.0,
        0.02,
        "critical",
        1,
    )


# -- data ------------------------------------------------------------------------------------------


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


# ---- prefill interference from several levels -------------------------------------------------------


def by_gaps(name: str, lost: float | None, flagged: bool | None, **more: Any) -> dict[str, Any]:
    return {
        "worker": name, "deployment": "d", "role": "aggregated", "lost_s": lost,
        "lost_low_s": lost and lost - 0.2, "lost_high_s": lost and lost + 0.2,
        "decode_s": 50.0 if lost is not None else None, "lost_ratio_low": 0.04, "flagged": flagged,
        "note": None if flagged is not None else "no token times", **more,
    }  # fmt: skip


def test_each_worker_is_judged_at_its_best_level(con: Store) -> None:
    con.append("workers", [worker(w) for w in "abcde"])
    con.append("interference_steps", [judged("a", 4.0, True), judged("b", None, None)])
    con.append(
        "interference_gaps",
        [
            by_gaps("a", 4.2, True, tail_explained_ratio=0.9, events=12, event_ms=8.0),
            by_gaps("b", 3.0, True, tail_explained_ratio=0.5, events=5, event_ms=9.0),
            by_gaps("c", 0.1, False),
            by_gaps("d", None, None),
        ],
    )
    con.append(
        "interference_requests",
        [by_gaps(w, 9.0, True) for w in "ab"] + [by_gaps("e", None, None)],
    )
    con.append(
        "interference_gap_losses",
        [
            {"worker": "a", "culprit": "p1", "victim": "v1", "lost_s": 3.0, "pairs": 1},
            {"worker": "b", "culprit": "p2", "victim": "v2", "lost_s": 2.0, "pairs": 1},
            {"worker": "b", "culprit": "p1", "victim": "v2", "lost_s": 0.5, "pairs": 1},
            {"worker": "b", "culprit": None, "victim": None, "lost_s": 0.5, "pairs": 9},
            {"worker": "c", "culprit": "p9", "victim": "v9", "lost_s": 0.1, "pairs": 1},
        ],
    )
    rows = {r["worker"]: r for r in con.query("interference_by_worker").iter_rows(named=True)}
    assert {w: (r["level"], r["flagged"]) for w, r in rows.items()} == {
        "a": ("A", True),
        "b": ("B", True),
        "c": ("B", False),
        "d": (None, None),
        "e": (None, None),
    }
    assert (rows["a"]["steps_lost_s"], rows["a"]["gaps_lost_s"]) == (4.0, 4.2)
    assert rows["d"]["notes"] == ["no token times"]
    row = one(con, "prefill_interference")
    assert (row["level"], row["levels"], row["value"]) == ("B", ["A", "B"], 7.0)
    assert (row["decode_s"], row["share"]) == (90.0, pytest.approx(7 / 90))
    assert row["workers"] == ["a", "b"]
    assert row["culprits"] == [{"request": "p1", "value": 3.5}, {"request": "p2", "value": 2.0}]
    assert row["victims"] == [{"request": "v1", "value": 3.0}, {"request": "v2", "value": 2.5}]
    assert (row["named_by"], row["gaps_lost_s"]) == ("token times", 4.2)
    assert (row["events"], row["event_ms"], row["tail_explained_ratio"]) == (17, 8.0, 0.9)
    assert (row["workers_judged"], row["workers_unknown"]) == (3, 2)


def test_token_times_of_a_sample_do_not_check_the_steps(con: Store) -> None:
    """Of every tenth request token times are there: they know a tenth of prompts and streams."""
    con.append("workers", [worker("a")])
    con.append("interference_steps", [judged("a", 4.0, True)])
    sample = by_gaps("a", 0.1, False, tail_explained_ratio=0.0, best_shift_ms=315.0)
    con.append("interference_gaps", [sample | {"decode_s": 4.0}])
    row = one(con, "prefill_interference")
    assert (row["value"], row["gaps_lost_s"], row["tail_explained_ratio"]) == (4.0, None, None)
    assert row["best_shift_ms"] is None
    said = wording.finding("prefill_interference", row).detail
    assert "token times of the same workers" not in said
    assert "disagree" not in said


def test_no_level_judges_several_engines_under_one_name(con: Store) -> None:
    """Prompts of one engine, laid over the tokens of the other, gave half of the loss with a narrow interval."""
    con.append("workers", [worker("a")])
    note = (
        "step numbers of several engines alternate under one name: their steps cannot be told apart"
    )
    con.append("interference_steps", [judged("a", None, None) | {"note": note}])
    con.append("interference_gaps", [by_gaps("a", 4.2, True)])
    con.append("interference_requests", [by_gaps("a", 4.2, True)])
    none(con, "prefill_interference")
    (row,) = con.query("interference_by_worker").to_dicts()
    assert (row["level"], row["flagged"], row["notes"]) == (None, None, [note])


def test_a_server_under_two_names_is_counted_once(con: Store) -> None:
    """Its log has the steps under a pid, its spans the requests under an instance: one loss, not two."""
    con.append("workers", [worker("pid"), worker("instance"), worker("both")])
    con.append("legs", [{"leg": w, "worker": w, "deployment": "d"} for w in ("instance", "both")])
    con.append("interference_steps", [judged("pid", 4.0, True), judged("both", 1.0, True)])
    con.append("interference_requests", [by_gaps("instance", 3.5, True), by_gaps("both", 2.0, True)])  # fmt: skip
    row = one(con, "prefill_interference")
    assert (row["value"], row["levels"], row["workers"]) == (5.0, ["A"], ["pid", "both"])
    rows = {r["worker"]: r for r in con.query("interference_by_worker").iter_rows(named=True)}
    left = rows["instance"]
    assert (left["level"], left["requests_lost_s"]) == (None, 3.5)
    assert left["notes"] == ["its steps and its requests may stand under two names: counted under the other"]  # fmt: skip


def test_of_one_log_and_several_servers_the_servers_are_counted(con: Store) -> None:
    con.append("workers", [worker(w) for w in ("pid", "i1", "i2")])
    con.append("legs", [{"leg": w, "worker": w, "deployment": "d"} for w in ("i1", "i2")])
    con.append("interference_steps", [judged("pid", 4.0, True)])
    con.append("interference_requests", [by_gaps("i1", 3.5, True), by_gaps("i2", 3.0, True)])
    row = one(con, "prefill_interference")
    assert (row["value"], row["levels"], row["workers"]) == (6.5, ["C"], ["i1", "i2"])


def test_steps_that_name_members_also_name_victims(con: Store) -> None:
    con.append("workers", [worker("a")])
    con.append("interference_steps", [judged("a", 4.0, True)])
    con.append(
        "interference_step_losses",
        [
            {
                "worker": "a",
                "rank": "0",
                "seq": 7,
                "residents": 2,
                "prefill_tokens": 100,
                "lost_s": 1.0,
            }
        ],
    )
    con.append("step_members", [
        {"worker": "a", "rank": "0", "seq": 7, "request_id": "p", "prefill_tokens": 100},
        {"worker": "a", "rank": "0", "seq": 7, "request_id": "v", "decode_tokens": 1},
        {"worker": "a", "rank": "0", "seq": 7, "request_id": "w", "decode_tokens": 1},
    ])  # fmt: skip
    row = one(con, "prefill_interference")
    assert row["culprits"] == [{"request": "p", "value": 1.0}]
    assert row["victims"] == [{"request": "v", "value": 0.5}, {"request": "w", "value": 0.5}]
    assert row["named_by"] == "steps"


def test_a_lone_level_c_worker_without_a_name_is_a_lower_value(con: Store) -> None:
    con.append("interference_requests", [by_gaps("c", 3.0, True)])
    row = one(con, "prefill_interference")
    assert (row["level"], row["value"], row["named_by"]) == ("C", 3.0, None)
    assert (row["culprits"], row["victims"]) == ([], [])


MINUTE = 60 * 10**9


def observed(minute: int, running: float, tokens: float, **other: Any) -> list[dict[str, Any]]:
    """One periodic line over a minute."""
    common = {"worker": "a", "time_ns": minute * MINUTE, "labels": "{}", "kind": "gauge", **other}
    rate = {"interval_ns": MINUTE, "value": tokens}
    return [
        common | {"metric": "x:num_requests_running", "value": running},
        common | rate | {"metric": "x:avg_generation_throughput_toks_per_s"},
        common | rate | {"metric": "x:avg_prompt_throughput_toks_per_s"},
    ]


@pytest.mark.parametrize(("end", "severity"), [([], "critical"), (observed(6, 4, 90.0), "warning")])
def test_requests_run_and_no_token_is_counted(con: Store, end: list[Any], severity: str) -> None:
    con.append("workers", [worker("a", "aggregated")])
    lines = [(1, 4, 90.0), (2, 0, 0.0), (3, 4, 90.0), (4, 4, 0.0), (5, 7, 0.0)]
    con.append("samples", [row for line in lines for row in observed(*line)] + end)
    row = one(con, "engine_stall")
    assert (row["value"], row["longest_s"], row["stretches"], row["running"]) == (120, 120, 1, 7)
    assert (row["severity"], row["first_ns"], row["lasting"]) == (
        severity,
        4 * MINUTE,
        int(not end),
    )
    title = wording.finding("engine_stall", row).title
    assert title == "no token for 120.0 s while up to 7 requests ran"


@pytest.mark.parametrize("running", [3.0, 0.0])
def test_an_engine_says_itself_that_its_workers_take_no_work(con: Store, running: float) -> None:
    """At the start, where nothing runs, such lines are ordinary."""
    con.append("workers", [worker("a", "aggregated")])
    con.append("samples", observed(1, running, 90.0))
    con.append("events", [
        {"worker": "a", "kind": "stall", "severity": "warning", "time_ns": n * MINUTE, "resolution_ns": MINUTE}
        for n in (3, 4)
    ])  # fmt: skip
    if not running:
        none(con, "engine_stall")
        return
    row = one(con, "engine_stall")
    assert (row["value"], row["stretches"], row["lines"], row["lasting"]) == (120, 1, 2, 1)
    assert (row["first_ns"], row["running"], row["severity"]) == (2 * MINUTE, 3, "critical")
    assert "says itself 2 times" in wording.finding("engine_stall", row).detail
    con.append("samples", [sample for n in (5, 6, 7) for sample in observed(n, 3, 0.0)])
    row = one(con, "engine_stall")  # the periodic lines tell of more
    assert (row["value"], row["lines"]) == (180, 0)


def test_token_counters_that_stand_still_are_a_stall_and_idleness_is_none(con: Store) -> None:
    con.append("workers", [worker("a", "aggregated")])
    rows = []
    for minute, running, made in [
        (0, 3, 10),
        (1, 3, 10),
        (2, 3, 20),
        (3, 0, 20),
        (4, 0, 20),
        (5, 3, 20),
    ]:
        common = {"worker": "a", "time_ns": minute * MINUTE, "labels": "{}"}
        rows += [
            common | {"metric": "x:num_requests_running", "value": running, "kind": "gauge"},
            common | {"metric": "x:generation_tokens_total", "value": made, "kind": "counter"},
            common | {"metric": "x:prompt_tokens_total", "value": 5, "kind": "counter"},
        ]
    con.append("samples", rows)
    row = one(con, "engine_stall")
    assert (row["value"], row["stretches"], row["severity"]) == (60, 1, "warning")


@pytest.mark.parametrize(
    "told",
    [
        {"prompt_tokens_total": 0.0},
        {"avg_prompt_throughput_toks_per_s": 0.0},
        {"generation_tokens_total": 0.0},
        {"avg_prompt_throughput_toks_per_s": 0.0, "generation_tokens_total": 100.0},
        {"prompt_tokens_total": 0.0, "avg_generation_throughput_toks_per_s": 20.0},
    ],
)
def test_where_tokens_may_move_unseen_or_do_move_nothing_stalls(
    con: Store, told: dict[str, float]
) -> None:
    """A file of chosen metrics: long answers move no counter of prompts. `told`: by how much each grows a minute."""
    con.append("workers", [worker("a", "aggregated")])
    rows = []
    for minute in range(6):
        common = {"worker": "a", "time_ns": minute * MINUTE, "labels": "{}", "kind": "gauge"}
        rows.append(common | {"metric": "x:num_requests_running", "value": 3})
        for name, by in told.items():
            rows.append(
                common | {"metric": f"x:{name}", "value": by * (minute if "total" in name else 1)}
            )
    con.append("samples", rows)
    none(con, "engine_stall")


def counted(
    n: int, running: float, waiting: float, usage: float, **other: float
) -> list[dict[str, Any]]:
    """One periodic line: what ran, what waited, how full the cache was."""
    common = {
        "worker": "a",
        "source": 1,
        "record": n,
        "time_ns": n,
        "labels": "{}",
        "kind": "gauge",
    }
    told = {
        "x:num_requests_running": running,
        "x:num_requests_waiting": waiting,
        "x:kv_cache_usage_perc": usage,
    }
    told |= {f"x:{name}": value for name, value in other.items()}
    rows = [common | {"metric": metric, "value": value} for metric, value in told.items()]
    for row in rows:
        if row["metric"].endswith("by_reason"):
            row["labels"] = '{"reason": "deferred"}'
    return rows


def test_requests_wait_while_the_cache_has_room(con: Store) -> None:
    con.append("workers", [worker("a", "aggregated")])
    lines = [counted(n, 10 + 6 * n, 90 - 6 * n, n / 10, avg_prompt_throughput_toks_per_s=24_000) for n in (1, 2, 3)]  # fmt: skip
    con.append("samples", [row for line in [*lines, counted(4, 40, 60, 0.95)] for row in line])
    row = one(con, "waiting_with_room")
    assert (row["value"], row["seen"], row["severity"], row["level"]) == (0.75, 3, "warning", "D")
    said = wording.finding("waiting_with_room", row)
    assert "Up to 84 requests waited (median 78) while 16 to 28 ran" in said.detail
    assert "10 % to 30 % full (3 of 4 observations)" in said.detail
    assert "24,000 per second" in said.detail and "not in the data" in said.detail
    con.append("facts", [{"worker": "a", "key": "max_num_seqs", "value": "22"}])
    said = wording.finding("waiting_with_room", one(con, "waiting_with_room"))
    assert (
        "22 requests at once (max_num_seqs) was reached, or nine tenths of it, in 2 of these 3"
        in said.detail
    )
    assert "not in the data" not in said.detail and "max_num_seqs" in said.suggestions[0]
    con.append("samples", [row for n in (5, 6) for row in counted(n, 40, 60, 0.95)])
    none(con, "waiting_with_room")  # as many waited behind a full cache: kv_pressure tells


def test_one_request_that_waited_once_is_no_warning(con: Store) -> None:
    con.append("workers", [worker("a", "aggregated")])
    lines = [counted(n, 9, int(n == 2), 0.6) for n in (1, 2, 3, 4, 5)]
    con.append("samples", [row for line in lines for row in line])
    row = one(con, "waiting_with_room")
    assert (row["value"], row["severity"]) == (0.2, "info")


@pytest.mark.parametrize("role", ["aggregated", "decode"])
def test_requests_that_wait_for_something_of_their_own_do_not_wait_for_room(
    con: Store, role: str
) -> None:
    """On a decode worker that does not tell them apart most wait for KV: it is not judged."""
    con.append("workers", [worker("a", role)])
    told = {"num_requests_waiting_by_reason": 5.0} if role == "aggregated" else {}
    con.append("samples", [row for n in (1, 2, 3) for row in counted(n, 4, 5, 0.1, **told)])
    none(con, "waiting_with_room")


def test_where_requests_tell_their_wait_counters_are_not_asked(con: Store) -> None:
    con.append("workers", [worker("a", "aggregated")])
    con.append("samples", [row for n in (1, 2, 3) for row in counted(n, 4, 5, 0.1)])
    one(con, "waiting_with_room")
    con.append("requests", [request(1)])
    con.append("phase_sums", [{"request": con.rows("SELECT request FROM requests")[0][0], "phase": "queue", "duration_ns": 1}])  # fmt: skip
    none(con, "waiting_with_room")
