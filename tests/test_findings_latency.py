"""Findings on first tokens and streams: hand-made rows in, the answer out, and silence where it does not apply."""

from __future__ import annotations

import pytest
from finding_rows import Row, none, one, phase, request

from pdtrace import wording
from pdtrace.store import Store


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
