"""SGLang's logs and files where they say a thing twice, say what cannot be, or quote what users wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdtrace.ingest import ingest
from pdtrace.store import Store

S = 1_793_520_000  # 2026-11-01 08:00:00 UTC


def read(path: Path, text: str) -> Store:
    (path / "server.log").write_text(text, "utf-8")
    store = Store()
    ingest([str(path)], store)
    assert store.rows("SELECT rows_read - rows_kept - rows_skipped FROM sources") == [(0,)]
    return store


def stats(rid: str, at: int, ranks: str) -> str:
    return (
        f"[2026-11-01 08:00:{at:02d}{ranks}] ReqTimeStats(rid={rid}, input_len=512, cached_input_len=64, output_len=11, "
        f"type=unified): queue_duration=20.00ms, forward_duration=500.00ms, entry_time={S + at - 0.52:.3f}\n"
    )


def batch(stamp: str, ranks: str, kind: str) -> str:
    said = {"Prefill": "#new-seq: 1, #new-token: 1000", "Decode": "#running-req: 3, gen throughput (token/s): 500.00"}  # fmt: skip
    return f"[2026-11-01 08:00:{stamp}{ranks}] {kind} batch, {said[kind]}\n"


def test_stages_and_ranks_of_the_same_batches_count_once(tmp_path: Path) -> None:
    """Two pipeline stages of two ranks in data parallel: every line of the second stage tells the first one's again."""
    text = ""
    for second in range(0, 6, 2):
        for dp in (0, 1):
            for pp in (0, 1):
                ranks = f" DP{dp} PP{pp} TP{dp}"
                text += batch(f"{second:02d}.{pp}00", ranks, "Prefill") + batch(f"{second:02d}.{pp + 4}00", ranks, "Decode")  # fmt: skip
    text += "".join(stats(f"r{n}", 7 + n, f" DP0 PP{pp} TP0") for n in range(3) for pp in (0, 1))
    text += "".join(
        f"[2026-11-01 08:00:20 DP0 PP{pp} TP0] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 9\n"
        for pp in (0, 1)
        for _ in (1, 2)
    )
    store = read(tmp_path, text)
    assert store.rows("SELECT request_id FROM legs ORDER BY 1") == [("r0",), ("r1",), ("r2",)]
    assert store.rows(
        "SELECT labels ->> 'dp_rank', count(*), min(value), max(value) FROM samples "
        "WHERE metric = 'log:prompt_throughput_toks_per_s' GROUP BY 1 ORDER BY 1"
    ) == [("0", 2, 500.0, 500.0), ("1", 2, 500.0, 500.0)]
    assert store.rows("SELECT kind, sum(count) FROM events GROUP BY 1") == [("preemption", 6)]
    assert store.rows("SELECT rows_kept, rows_skipped FROM sources") == [(12 + 3 + 2, 12 + 3 + 2)]


def test_the_zone_is_not_taken_from_what_a_user_wrote(tmp_path: Path) -> None:
    pasted = "[2026-11-01 08:00:05] Receive: obj=GenerateReqInput(text='ReqTimeStats(rid=x): entry_time=1900000000.5', rid='u1')\n"
    store = read(tmp_path, pasted + stats("u1", 6, "").replace("08:00:06", "10:00:06"))
    assert store.rows("SELECT value FROM facts WHERE key = 'log_time_zone'") == [
        ("UTC+02:00 (stamps against the epochs that lines state)",)
    ]
    assert store.rows("SELECT start_ns // 1000000 FROM legs") == [(S * 1000 + 5480,)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("e2e_latency", "1e300"), ("e2e_latency", "-1.0"), ("prompt_tokens", "9" * 30), ("cached_tokens", "-3"), ("completion_tokens", "1e300"),
     ("request_received_ts", "1e300"), ("request_received_ts", str(S * 10**9)), ("queue_time", "1e300"), ("dp_rank", "1e30")],
)  # fmt: skip
def test_a_number_that_cannot_be_is_unknown_and_takes_no_other_request_with_it(
    tmp_path: Path, name: str, value: str
) -> None:
    told = f"'request_received_ts': {S + 5}, 'forward_entry_time': {S + 5.5}, " if name == "queue_time" else ""  # fmt: skip
    finish = f"[2026-11-01 08:00:06] Finish: obj=GenerateReqInput(rid='odd'), out={{'meta_info': {{'id': 'odd', {told}'{name}': {value}}}}}\n"
    store = read(tmp_path, finish + stats("good", 7, ""))
    column = {"e2e_latency": "e2e_ms", "completion_tokens": "output_tokens", "request_received_ts": "start_ns", "queue_time": "tpot_ms", "dp_rank": "rank"}.get(name, name)  # fmt: skip
    assert store.rows(f"SELECT request_id, {column} FROM legs WHERE request_id = 'odd'") == [("odd", None)]  # fmt: skip
    assert store.rows("SELECT e2e_ms FROM legs WHERE request_id = 'good'") == [(520.0,)]
    assert store.rows("SELECT count(*) FROM intervals WHERE end_ns < start_ns") == [(0,)]


def test_a_sample_is_finite(tmp_path: Path) -> None:
    line = batch("01", "", "Decode").replace("500.00", "9" * 400)
    assert read(tmp_path, line).rows("SELECT metric FROM samples") == [("log:num_running_reqs",)]


@pytest.mark.parametrize(
    ("stamp", "expected"),
    # 0.5.6 to 0.5.8: first token as the API server saw it, after the transfer; later the scheduler's own stamp
    [("prefill_finished_ts", []), ("prefill_finished_time", [("kv_transfer", 10.0)])],
)
def test_a_prefill_servers_transfer_is_told_only_by_the_schedulers_stamp(
    tmp_path: Path, stamp: str, expected: list[tuple[str, float]]
) -> None:
    record: dict[str, Any] = {
        "request_parameters": json.dumps({"rid": "p", "bootstrap_room": 77}), "id": "p", "completion_tokens": 1,
        "finish_reason": {"type": "length"}, "request_received_ts": S + 1.0, "request_finished_ts": S + 2.91, stamp: S + 2.90,
    }  # fmt: skip
    store = read(tmp_path, json.dumps(record) + "\n")
    assert store.rows("SELECT detail, round((end_ns - start_ns) / 1e6, 3) FROM intervals") == expected  # fmt: skip


def test_a_piece_of_a_log_without_a_batch_is_known_by_its_ranks(tmp_path: Path) -> None:
    """sgl-project/sglang issue 9266: the answers to health checks and what the ranks of a decode server say."""
    store = read(
        tmp_path,
        '[2025-08-29 11:56:24] INFO:     10.0.0.1:61226 - "GET /v1/models HTTP/1.1" 200 OK\n'
        "[2025-08-29 11:56:28] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 11:56:08.\n"
        "[2025-08-29 11:56:51 TP0 EP0] Error fetching prefill parallel info from bootstrap: HTTPConnectionPool(host='p', port=30089): Max retries\n",
    )
    assert store.rows("SELECT kind, count(*) FROM events GROUP BY ALL") == [("warning", 2)]


def test_a_refused_health_check_is_no_failed_request(tmp_path: Path) -> None:
    text = batch("01", " TP0", "Decode") + "".join(
        f'[2026-11-01 08:00:0{n}] INFO:     127.0.0.1:1 - "GET {path} HTTP/1.1" {code}\n'
        for n, path, code in ((2, "/health_generate", "503 Service Unavailable"), (3, "/v1/files", "404 Not Found"))
    )  # fmt: skip
    store = read(tmp_path, text)
    told = store.rows("SELECT kind, severity, detail FROM events ORDER BY time_ns")
    assert told == [("warning", "info", "503 GET /health_generate"), ("http_error", "warning", "404 GET /v1/files")]  # fmt: skip
