"""Files of SGLang's benchmark and of its request metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdtrace.ingest import ingest
from pdtrace.store import Store

MS = 1_000_000
SCALARS = {
    "backend": "sglang-oai", "dataset_name": "random", "max_concurrency": 4, "sharegpt_output_len": None,
    "random_input_len": 64, "random_output_len": 4, "random_range_ratio": 0.0, "duration": 3.0, "completed": 2,
    "total_output_tokens_retokenized": 8, "mean_ttft_ms": 60.0,
}  # fmt: skip


def read(path: Path) -> Store:
    store = Store()
    ingest([str(path)], store)
    for row in store.rows("SELECT rows_read, rows_kept, rows_skipped FROM sources"):
        assert row[0] == row[1] + row[2]
    return store


def test_a_benchs_details_are_requests_by_duration_and_its_failures_have_no_ttft(tmp_path: Path) -> None:  # fmt: skip
    details = {
        "input_lens": [64, 32, 16], "output_lens": [4, 3, 0], "ttfts": [0.1, 0.02, 0.0], "itls": [[0.01, 0.02, 0.01], [0.5, 0.1], []],
        "generated_texts": ["SECRET", "SECRET", ""], "errors": ["", "", "Service Unavailable"], "cached_tokens": [8, 0, 0],
    }  # fmt: skip
    # Infinity stands bare; a second run appends a line, here without details.
    text = json.dumps(SCALARS | {"request_rate": float("inf")} | details) + "\n" + json.dumps(SCALARS | {"request_rate": 2.0}) + "\n"  # fmt: skip
    (tmp_path / "sglang_1130_3_random.jsonl").write_text(text)
    store = read(tmp_path)
    rows = store.rows("SELECT ttft_ms, e2e_ms, tpot_ms, prompt_tokens, cached_tokens, output_tokens, status, error, start_ns FROM legs ORDER BY record")  # fmt: skip
    assert rows == [
        (100, pytest.approx(140), pytest.approx(40 / 3), 64, 8, 4, "completed", None, None),
        (20, pytest.approx(620), pytest.approx(300), 32, 0, 3, "completed", None, None),
        (None, None, None, 16, 0, 0, "failed", "Service Unavailable", None),
    ]  # fmt: skip
    assert store.rows("SELECT gaps_us FROM streams ORDER BY leg") == [([10_000, 20_000, 10_000],), ([500_000, 100_000],)]  # fmt: skip
    assert store.rows("SELECT reason, records FROM skipped") == [("aggregates only: run with --output-details", 1)]  # fmt: skip
    assert ("request_rate", "inf") in store.rows("SELECT key, value FROM facts")
    assert not any("SECRET" in str(row) for row in store.rows("FROM facts"))


def record(rid: str, room: int, tokens: int, **more: object) -> str:
    asked = {
        "rid": rid,
        "text": 'SECRET "bootstrap_room": 9',
        "bootstrap_room": room,
        "stream": True,
    }
    told = {
        "request_parameters": json.dumps(asked), "id": rid, "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 512, "completion_tokens": tokens, "cached_tokens": 64, "queue_time": 0.012,
    }  # fmt: skip
    return json.dumps(told | more) + "\n"


def test_request_metrics_of_both_sides_meet_and_split_prefill_from_transfer(tmp_path: Path) -> None:
    epoch = 1_795_992_996.0
    (tmp_path / "p").mkdir()
    (tmp_path / "d").mkdir()
    p = record("p1", 771122, 1, e2e_latency=0.166, request_received_ts=epoch, forward_entry_time=epoch + 0.024, prefill_finished_time=epoch + 0.134, request_finished_ts=epoch + 0.166)  # fmt: skip
    d = record("d1", 771122, 8, e2e_latency=0.351, first_token_latency=0.176, request_received_ts=epoch + 0.004, forward_entry_time=epoch + 0.178, request_finished_ts=epoch + 0.355, decode_throughput=40.0)  # fmt: skip
    (tmp_path / "p" / "sglang-request-metrics-20261130_08.log").write_text(p + '{"request_par')
    (tmp_path / "d" / "sglang-request-metrics-20261130_08.log").write_text(d)
    store = read(tmp_path)
    assert store.rows("SELECT mode, ttft_ms, e2e_ms FROM requests") == [("disaggregated", pytest.approx(176), pytest.approx(351))]  # fmt: skip
    assert store.rows("SELECT role, role_basis, bootstrap_room, streaming FROM legs ORDER BY role") == [
        ("decode", "inferred", "771122", True), ("prefill", "inferred", "771122", True),
    ]  # fmt: skip
    found = dict(store.rows("SELECT detail, round(sum(end_ns - start_ns) / 1e6, 1) FROM phases GROUP BY detail"))  # fmt: skip
    # P's queue, prompt and transfer as P saw it, then D's own queue; 12 ms before P's queue and 2 before D's first
    # token are told by nobody. The window is that of both servers.
    assert found == {"prefill_queue": 12, "prefill_wall": 110, "kv_transfer": 32, "decode_queue": 12, "decode_wall": 175, "unattributed": 14}  # fmt: skip
    assert not any("SECRET" in str(row) for table in ("legs", "skipped") for row in store.rows(f"FROM {table}"))  # fmt: skip
