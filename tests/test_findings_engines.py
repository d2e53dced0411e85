"""Findings on engines: KV space, preemption and balance, from steps, samples and events."""

from __future__ import annotations

import pytest
from finding_rows import MS, none, one, phase, request, worker

from pdtrace import wording
from pdtrace.store import Store


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
