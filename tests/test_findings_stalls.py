"""Findings from counters alone: engines that stand still, requests that wait while there is room."""

from __future__ import annotations

from typing import Any

import pytest
from finding_rows import none, one, request, worker

from pdtrace import wording
from pdtrace.store import Store

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
