"""Findings on failures and alarms: counted once, with their interval."""

from __future__ import annotations

from pathlib import Path

import pytest
from finding_rows import none, one, request, worker

from pdtrace import diagnose, wording
from pdtrace.api import Trace
from pdtrace.store import Store


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


def test_what_servers_warn_of_themselves_is_told_and_remarks_are_not(tmp_path: Path) -> None:
    """kserve issue 5987: engines without a KV connector behind a P/D sidecar; the line is the only symptom."""
    lost = "(EngineCore_DP0 pid=62) WARNING 08-10 09:12:{:02d} [core.py:367] Got kv_transfer_params, but no KVConnector found. Disabling KVTransfer for this request.\n"
    stats = (
        "(APIServer pid=1) INFO 08-10 09:12:41 [loggers.py:259] Engine 000: Avg prompt throughput: 120.4 tokens/s, Avg generation throughput: "
        "18.1 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.3%, Prefix cache hit rate: 0.0%\n"
        '(APIServer pid=1) INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 503 Service Unavailable\n'
    )  # fmt: skip
    (tmp_path / "vllm.log").write_text(lost.format(1) + lost.format(31) + stats)
    (mine,) = diagnose.diagnose(Trace.read([tmp_path]).store).deployments
    (found,) = [f for f in mine.findings if f.id == "log_warning"]
    assert found.title.startswith(
        "the log warns: KV transfer asked for, but the engine has no KV connector"
    )
    assert found.title.endswith("(2 x)") and "503" not in found.title
    assert not [f for f in mine.findings if f.id == "failed_requests"]
