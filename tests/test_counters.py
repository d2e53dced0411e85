"""Periodic counters: stretches, and whether tokens came slower where more prompts were computed."""

from __future__ import annotations

from typing import Any

import pytest

from pdtrace.store import Store

S = 1_000_000_000
T0 = 1_800_000_000 * S


def scrapes(con: Store, prompts: list[int], gap_ms: list[float], **worker: Any) -> None:
    """A scrape each second: prompt tokens computed in it, 100 tokens made with this mean gap."""
    con.append("workers", [{"worker": "w", "deployment": "d"} | worker])
    totals = {"m:prompt_tokens_total": 0.0, "m:generation_tokens_total": 0.0,
              "m:inter_token_latency_seconds_sum": 0.0, "m:inter_token_latency_seconds_count": 0.0}  # fmt: skip
    rows = []
    for second in range(len(prompts) + 1):
        if second:
            added = (prompts[second - 1], 100, gap_ms[second - 1] / 10, 100)
            totals = {m: v + a for (m, v), a in zip(totals.items(), added, strict=True)}
        rows += [
            {"worker": "w", "metric": m, "labels": "{}", "value": v, "time_ns": T0 + second * S}
            for m, v in totals.items()
        ]
        rows.append(
            {
                "worker": "w",
                "metric": "m:num_requests_running",
                "value": 4.0,
                "time_ns": T0 + second * S,
            }
        )
    con.append("samples", rows)


def test_counters_grow_into_stretches(con: Store) -> None:
    scrapes(con, [10] * 20, [5.0] * 20)
    rows = con.sql("FROM counter_intervals() ORDER BY start_ns")
    assert rows["prompt_tokens"].sum() == 200
    assert rows["made_tokens"].sum() == 2000
    assert rows["seconds"].to_list() == [4.0, 5.0, 5.0, 5.0, 1.0]
    assert rows["gap_mean_ms"].to_list() == pytest.approx([5.0] * 5)
    assert rows["running"].to_list() == [4.0] * 5


def test_a_restart_counts_from_zero(con: Store) -> None:
    con.append("workers", [{"worker": "w", "deployment": "d"}])
    con.append("samples", [
        {"worker": "w", "metric": "generation_tokens_total", "labels": "{}", "value": v, "time_ns": T0 + n * S}
        for n, v in enumerate((100.0, 300.0, 50.0))
    ])  # fmt: skip
    assert con.sql("SELECT sum(made_tokens) FROM counter_intervals()").item() == 250


def test_slower_tokens_where_more_prompts_were_computed(con: Store) -> None:
    heavy = [
        (n + 1) // 5 % 3 == 1 for n in range(300)
    ]  # five seconds of ten times the prompts, ten without
    scrapes(con, [1000 if h else 100 for h in heavy], [15.0 if h else 8.0 for h in heavy])
    row = con.query("interference_by_counters").row(0, named=True)
    assert (row["basis"], row["measure"], row["stretches"]) == ("scrapes", "gap", 61)
    assert (row["few_ms"], row["many_ms"]) == (
        pytest.approx(8),
        pytest.approx(15),
    )
    assert row["correlation"] > 0.7
    assert row["correlation_p"] < 1e-4


def test_log_lines_state_rates_and_pace_stands_in_for_gaps(con: Store) -> None:
    con.append("workers", [{"worker": "w", "deployment": "d"}])
    con.append("samples", [
        {"worker": "w", "metric": metric, "labels": "{}", "value": value, "time_ns": T0 + n * 10 * S, "source": 0,
         "record": n, "interval_ns": 10 * S if "throughput" in metric else None}
        for n in range(30)
        for metric, value in (("m:avg_prompt_throughput_toks_per_s", 100.0 * (n % 3)),
                              ("m:avg_generation_throughput_toks_per_s", 400.0 - 100 * (n % 3)),
                              ("m:num_requests_running", 4.0))
    ])  # fmt: skip
    row = con.query("interference_by_counters").row(0, named=True)
    assert (row["basis"], row["measure"], row["stretches"], row["stretch_s"]) == (
        "lines",
        "pace",
        30,
        10,
    )
    assert (row["few_ms"], row["many_ms"]) == (10, 20)  # 4 running, 400 and 200 tokens a second
    assert row["correlation"] == pytest.approx(1)


def test_even_counters_and_decode_workers_say_nothing(con: Store) -> None:
    scrapes(con, [100] * 60, [8.0] * 60)
    assert con.query("interference_by_counters")["correlation"].to_list() == [None]
    con.execute("UPDATE workers SET role = 'decode'")
    assert con.query("interference_by_counters").is_empty()
