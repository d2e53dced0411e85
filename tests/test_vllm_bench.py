"""vllm bench serve: rows, durations, streams and what the file cannot say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pdtrace.collectors import vllm_bench
from pdtrace.model import Head

FIXTURES = Path(__file__).parent / "fixtures" / "vllm_bench"
Collect = Callable[..., Any]


def facts(collected: Any) -> dict[str, str]:
    return dict(collected["facts"].select("key", "value").iter_rows())


def head(name: str, text: str) -> Head:
    return Head(name, name, text.encode(), complete=True)


def test_results_are_recognised_by_the_settings_they_begin_with() -> None:
    data = (FIXTURES / "long.json").read_bytes()[: 64 << 10]
    match = vllm_bench.sniff(Head("long.json", "long.json", data))
    assert match is not None and match.strength == "exact" and not match.ignore


@pytest.mark.parametrize(
    "text",
    [
        '{"model_id": "m"}',
        '[{"model_id": 1, "tokenizer_id": 1, "num_prompts": 1, "request_rate": 1}]',
        '{"backend": "sglang", "request_rate": 4, "ttfts": [0.1], "itls": [[0.1]], "input_lens": [3]}',
        "",
    ],
)
def test_other_json_is_left_alone(text: str) -> None:
    assert vllm_bench.sniff(head("x.json", text)) is None


def test_copies_and_printed_summaries_are_named_as_not_used() -> None:
    pytorch = vllm_bench.sniff(head("run.pytorch.json", '[{"benchmark": {}}]'))
    printed = vllm_bench.sniff(
        head(
            "out.txt",
            "x\n============ Serving Benchmark Result ============\nSuccessful requests: 8\n",
        )
    )
    assert pytorch is not None and pytorch.ignore
    assert printed is not None and printed.ignore


def test_a_run_gives_one_leg_a_request_on_the_clients_own_clock(collect: Collect) -> None:
    got = collect(vllm_bench, FIXTURES / "long.json")
    raw = json.loads((FIXTURES / "long.json").read_text())
    legs = got["legs"].sort("row_index")
    assert got.account.unit == "request" and got.account.read == 8 and not got.account.reasons
    assert legs["leg"][3].endswith("long.json#3")
    assert legs["start_ns"].null_count() == 8 and legs["clock"].unique().to_list() == [
        got.account.clock
    ]
    assert got.account.clock.startswith("perf:") and got.account.clock.endswith("long.json")
    assert legs["clock_start_ns"][0] == round(raw["start_times"][0] * 1e9)
    assert legs["ttft_ms"].mean() == pytest.approx(raw["mean_ttft_ms"])
    assert legs["tpot_ms"].mean() == pytest.approx(raw["mean_tpot_ms"])
    assert legs["e2e_ms"].mean() == pytest.approx(raw["mean_e2el_ms"])
    assert legs["output_tokens"].sum() == raw["total_output_tokens"]
    assert legs["prompt_tokens"].sum() == raw["total_input_tokens"]
    assert legs["observer"].unique().to_list() == ["client"] and legs["id_prefix"].null_count() == 8
    assert legs["status"].unique().to_list() == ["completed"]


def test_gaps_are_those_between_chunks_in_microseconds(collect: Collect) -> None:
    got = collect(vllm_bench, FIXTURES / "long.json")
    raw = json.loads((FIXTURES / "long.json").read_text())
    stream = got["streams"].sort("leg")
    assert stream["emission"].unique().to_list() == ["chunk"]
    assert stream["gaps_us"][0].to_list() == [round(gap * 1e6) for gap in raw["itls"][0]]
    assert stream["first_ns"].null_count() == 8


def test_the_wall_clock_window_says_that_it_rests_on_utc(collect: Collect) -> None:
    said = facts(collect(vllm_bench, FIXTURES / "long.json"))
    assert said["bench_end_local"] == "20261129-230133" and said["model"] == "tiny-llama"
    assert int(said["window_end_ns"]) == 1_795_993_293 * 10**9
    length = int(said["window_end_ns"]) - int(said["window_start_ns"])
    assert length == round(float(said["bench_duration_s"]) * 1e9)
    assert "UTC" in said["window_basis"]
    assert not any("generated" in key for key in said)


def test_the_clients_wait_is_reported_as_its_own(collect: Collect) -> None:
    reported = collect(vllm_bench, FIXTURES / "long.json")["reported"]
    assert reported["quantity"].unique().to_list() == ["queue_time"] and reported.height == 8
    assert "client" in reported["definition"][0]


def test_appended_runs_keep_their_workers_and_clocks_apart(collect: Collect) -> None:
    got = collect(vllm_bench, FIXTURES / "synthetic-append.json")
    assert got.account.read == 3 + 1 + 4
    assert got.account.reasons == {vllm_bench.AGGREGATES_ONLY: 1}
    assert got["legs"].height == 7 and got["legs"]["worker"].n_unique() == 2
    assert got["legs"]["record"].sort().to_list() == [0, 1, 2, 4, 5, 6, 7]


def test_failed_requests_have_no_times_and_no_error_text(collect: Collect) -> None:
    legs = collect(vllm_bench, FIXTURES / "synthetic-append.json")["legs"].sort("record")
    failed = legs.row(2, named=True)
    assert failed["status"] == "failed" and failed["error"] == "ServerDisconnectedError"
    assert failed["ttft_ms"] is None and failed["e2e_ms"] is None


def test_old_chat_runs_sum_their_gaps_and_say_what_the_first_chunk_was(collect: Collect) -> None:
    got = collect(vllm_bench, FIXTURES / "synthetic-append.json")
    legs = got["legs"].sort("record")
    first, one_token = legs.row(0, named=True), legs.row(1, named=True)
    assert first["e2e_ms"] == pytest.approx(160) and first["tpot_ms"] == pytest.approx(20)
    assert one_token["tpot_ms"] is None and one_token["clock"] is None
    assert "role" in first["ttft_definition"]
    assert facts(got)["backend"] in ("openai", "openai-chat")


def test_runs_with_latencies_alone_give_whole_durations(collect: Collect) -> None:
    legs = collect(vllm_bench, FIXTURES / "synthetic-append.json")["legs"].sort("record")
    last = legs.filter(legs["record"] >= 4)
    assert last["e2e_ms"].to_list() == [500, 250, 1000, 750]
    assert last["ttft_ms"].null_count() == 4 and last["id_prefix"].unique().to_list() == ["run7-"]
    assert last["row_index"].to_list() == [0, 1, 2, 3]
    assert last["status"].unique().to_list() == ["completed"]


def test_a_cut_file_says_so(collect: Collect, tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_bytes((FIXTURES / "long.json").read_bytes()[:3000])
    got = collect(vllm_bench, path)
    assert got.account.read == 1 and list(got.account.reasons) == ["cut off at the end of the file"]


def test_numbers_that_json_does_not_know_are_read(collect: Collect, tmp_path: Path) -> None:
    path = tmp_path / "nan.json"
    run = {
        "model_id": "m", "tokenizer_id": "m", "num_prompts": 1, "request_rate": 1.0, "mean_ttft_ms": float("nan"),
        "ttfts": [0.5], "itls": [[0.1, None, 5000.0]], "output_lens": [4], "input_lens": [None], "errors": [""],
        "start_times": [1.0, 2.0],
    }  # fmt: skip
    path.write_text(json.dumps(run))
    got = collect(vllm_bench, path)
    leg = got["legs"].row(0, named=True)
    assert leg["prompt_tokens"] is None and leg["clock"] is None and leg["ttft_ms"] == 500
    assert got["streams"]["gaps_us"][0].to_list() == [100_000, None, None]
    assert facts(got)["misaligned_arrays"] == "start_times"


def test_a_start_beyond_64_bits_is_unknown(collect: Collect, tmp_path: Path) -> None:
    path = tmp_path / "far.json"
    run = {
        "model_id": "m", "tokenizer_id": "m", "num_prompts": 2, "request_rate": 1.0, "mean_ttft_ms": 500.0,
        "ttfts": [0.5, 0.5], "itls": [[0.1], [0.1]], "output_lens": [2, 2], "input_lens": [3, 3], "errors": ["", ""],
        "start_times": [1.0, 1e18],
    }  # fmt: skip
    path.write_text(json.dumps(run))
    assert collect(vllm_bench, path)["legs"]["clock_start_ns"].to_list() == [10**9, None]


@pytest.mark.shared
def test_whole_captures_agree_with_their_own_means(collect: Collect, shared: Path) -> None:
    for path in sorted((shared / "data" / "vllm").glob("*/bench_*.json*")):
        got = collect(vllm_bench, path)
        worker = f"file:{path}"
        legs = got["legs"].filter(pl.col("worker") == worker)
        said = dict(
            got["facts"].filter(pl.col("worker") == worker).select("key", "value").iter_rows()
        )
        assert legs["ttft_ms"].mean() == pytest.approx(float(said["mean_ttft_ms"])), path
        assert legs["tpot_ms"].mean() == pytest.approx(float(said["mean_tpot_ms"])), path
        assert legs["e2e_ms"].mean() == pytest.approx(float(said["mean_e2el_ms"])), path
        assert legs.height == int(said["num_prompts"])
