"""vLLM server logs: what each era's lines mean, and the known answers of the full captures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest

import pdtrace
from pdtrace.api import Trace
from pdtrace.collectors import vllm_log
from pdtrace.collectors._python_repr import python_repr
from pdtrace.collectors._vllm_log_config import read_line
from pdtrace.ingest import Options
from pdtrace.inputs import expand

FIXTURES = Path(__file__).parent / "fixtures" / "vllm_log"
SECOND = 1_000_000_000


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * SECOND


def rows(frame: pl.DataFrame, *columns: str) -> list[tuple]:
    return list(frame.select(columns).iter_rows())


def facts(found) -> dict[str, str]:
    return dict(found["facts"].select("key", "value").iter_rows())


def balanced(found) -> bool:
    """Every record is in a table row or counted as skipped."""
    kept = set()
    for table in ("steps", "samples", "events", "legs", "transfers"):
        kept |= set(found[table]["record"].to_list())
    return found.account.read == len(kept) + sum(found.account.reasons.values())


@pytest.fixture
def log(collect, tmp_path: Path) -> Callable:
    """Read a log made of these lines, last changed at an instant."""

    def run(text: str, changed: str = "2026-11-30T12:00:00", name: str = "server.log"):
        path = tmp_path / name
        path.write_text(text, "utf-8")
        stamp = at(changed) / SECOND
        os.utime(path, (stamp, stamp))
        return collect(vllm_log, path)

    return run


STEP = "(APIServer pid=7811) INFO {} [loggers.py:190] Engine {:03d}: Iteration({}): {} context requests, {} context tokens, {} generation requests, {} generation tokens, iteration elapsed time: {} ms, GPU KV cache usage: 61.2%\n"


def test_the_capture_of_an_aggregated_server(collect) -> None:
    found = collect(vllm_log, FIXTURES / "agg-2026-11-29.log")
    assert balanced(found)
    said = facts(found)
    assert said["version"] == "0.32.0"
    assert said["served_model_name"] == "tiny-llama"
    assert (said["max_num_batched_tokens"], said["max_num_seqs"], said["max_model_len"]) == (
        "2048",
        "64",
        "8192",
    )
    assert said["kv_cache_tokens"] == "524288"
    assert said["iteration_logging"] == "on"
    assert said["log_time_zone"] == "assumed UTC"
    assert said["log_year_basis"] == "a date in the file name"
    steps = found["steps"].sort("seq")
    assert steps["seq"].to_list() == list(range(steps.height))
    first = steps.row(0, named=True)
    assert (first["prefill_requests"], first["prefill_tokens"], first["elapsed_ns"]) == (
        1,
        5,
        15_180_000,
    )
    assert first["start_ns"] is None
    assert first["start_lower_ns"] == at("2026-11-29T22:57:56") - 15_180_000
    assert first["start_upper_ns"] == first["start_lower_ns"] + SECOND
    assert steps["pulled_requests"].unique().to_list() == [0]
    assert not found["legs"]["request_id"].str.contains("tokenize").any()


def test_first_steps_of_pulled_requests_on_a_consumer(collect) -> None:
    found = collect(vllm_log, FIXTURES / "nixl-decode.log")
    assert balanced(found)
    worker = found["workers"].filter(pl.col("role").is_not_null()).row(0, named=True)
    assert (worker["role"], worker["role_basis"], worker["engine"]) == ("decode", "config", "vLLM")
    steps = found["steps"].filter(pl.col("prefill_requests") > 0)
    assert steps.height
    assert steps["pulled_requests"].to_list() == steps["prefill_requests"].to_list()
    aliases = set(found["worker_aliases"].filter(pl.col("kind") == "engine_id")["value"])
    assert aliases == {
        "456e7e6e-eb98-4f57-9820-69b5bafec773",
        "b3baa78a-f800-47e2-b0cf-a913e618fef5",
    }
    assert facts(found)["log_year_basis"] == "a line with the full date"
    moved = found["samples"].filter(pl.col("metric") == "log:kv_num_successful_transfers")
    assert (moved["value"][0], moved["interval_ns"][0]) == (16.0, 10 * SECOND)
    assert not found["events"].filter(pl.col("kind").str.starts_with("kv_")).height


def test_abort_refusal_batch_and_two_streams(collect) -> None:
    found = collect(vllm_log, FIXTURES / "edge-2026-11-29.log")
    assert balanced(found)
    legs = found["legs"].sort("record")
    assert rows(legs, "request_id", "external_id", "status", "error") == [
        ("cmpl-edge-abort-0", "edge-abort", "aborted", None),
        (None, None, "failed", "HTTP 400"),
        ("chatcmpl-edge-chat", "edge-chat", "unknown", None),
        ("cmpl-edge-unsampled-0", "edge-unsampled", "unknown", None),
        ("cmpl-edge-batch-0", "edge-batch", "unknown", None),
        ("cmpl-edge-batch-1", "edge-batch-1", "unknown", None),
    ]
    assert legs["note"].to_list() == [None, None, "n=2", None, None, None]
    assert legs["max_tokens"].to_list() == [4000, None, 6, 4, 4, 4]
    assert legs["leg"].n_unique() == 6
    assert rows(found["events"].sort("kind"), "kind", "request_id", "detail") == [
        ("abort", "cmpl-edge-abort-0", "aborted (as a rule the client went away)"),
        ("http_error", None, "400 POST /v1/completions"),
    ]
    assert found["steps"]["pulled_requests"].is_null().all()


def test_v0_with_its_swap_space_preemptions_and_prompts(collect) -> None:
    found = collect(vllm_log, FIXTURES / "synthetic-v0-2024-10-16.log")
    assert balanced(found)
    assert found["steps"].height == 0  # the iteration line was part of a prompt
    assert rows(found["legs"].sort("record"), "request_id", "status", "max_tokens", "note") == [
        ("cmpl-5b-0", "completed", 16, None),
        ("chatcmpl-c1", "aborted", 32, "n=2"),
    ]
    assert found["legs"].sort("record")["e2e_ms"].to_list() == [16_000.0, 17_000.0]
    samples = found["samples"].filter(pl.col("time_ns") == at("2024-10-16T17:11:26"))
    values = {
        (m, labels): v for m, labels, v in samples.select("metric", "labels", "value").iter_rows()
    }
    assert values["vllm:num_requests_waiting", "{}"] == 2
    assert values["vllm:num_requests_swapped", "{}"] == 1
    assert values["vllm:kv_cache_usage_perc", "{}"] == 0.125
    assert values["vllm:cpu_cache_usage_perc", "{}"] == 0.03
    assert values["vllm:avg_prompt_throughput_toks_per_s", "{}"] == 512.3
    assert values["log:prefix_cache_hit_rate", '{"device": "GPU"}'] == pytest.approx(0.412)
    rate = found["samples"].filter(pl.col("metric") == "vllm:avg_prompt_throughput_toks_per_s")
    assert rate["interval_ns"].to_list() == [5 * SECOND, 5 * SECOND]
    preemptions = found["events"].filter(pl.col("kind") == "preemption")
    assert rows(preemptions.sort("record"), "request_id", "count") == [
        ("cmpl-5b-0", 1),
        ("chatcmpl-c1", 50),
    ]
    said = facts(found)
    assert said["pid"] == "4711"
    assert said["kv_cache_blocks"] == "7390"
    assert said["arg_api_key"] == "set"
    assert said["chunked_prefill"] == "False"
    everything = json.dumps(
        [found[t].to_dicts() for t in ("legs", "events", "samples", "facts", "skipped")],
        default=str,
    )
    assert not any(
        word in everything for word in ("sk-very-secret", "first line", "aloud", "spoofed")
    )
    assert all("secret" not in text for text in found.account.excerpts.values())


def test_containers_are_servers_of_their_own_with_the_carriers_time(collect) -> None:
    found = collect(vllm_log, FIXTURES / "synthetic-compose-pd.log")
    assert balanced(found)
    steps = found["steps"].sort("record")
    # the engine that was started again is another worker
    assert steps["worker"].n_unique() == 3
    assert steps["start_ns"].to_list()[0] == at("2026-11-30T08:10:01") + 250_000_000 - 200_000_000
    assert steps["pulled_requests"].to_list() == [None, 1, None]
    assert facts(found)["log_time_zone"] == "UTC+02:00"
    legs = found["legs"].sort("record")
    assert rows(legs, "external_id", "status", "finish_reason", "ttft_ms", "e2e_ms", "error") == [
        ("77", "unknown", None, None, None, None),
        ("77", "completed", "length", 300.0, 700.0, None),
        ("78", "failed", None, None, None, "HTTP 500"),
    ]
    kinds = found["events"].sort("record")["kind"].to_list()
    assert kinds == [
        "started", "started", "kv_failure", "kv_expired", "kv_invalid", "failure", "oom", "failure", "http_error", "started",
    ]  # fmt: skip
    severities = dict(found["events"].select("kind", "severity").iter_rows())
    assert severities["kv_invalid"] == "critical"
    samples = found["samples"]
    assert samples.filter(pl.col("metric") == "log:kv_avg_xfer_time_ms")["value"].to_list() == [
        9.862
    ]
    assert rows(
        samples.filter(pl.col("metric") == "vllm:kv_offload_load_bytes"), "labels", "value"
    ) == [('{"connector": "OffloadingConnector"}', 1048576.0)]
    assert "secret answer" not in json.dumps(
        [found[t].to_dicts() for t in ("legs", "events", "samples")], default=str
    )
    assert found.account.reasons["dummy iteration of an idle data parallel rank"] == 1
    # every container calls its server pid 1: that is nobody's name
    assert "pid" not in set(found["worker_aliases"]["kind"])


def test_stats_of_later_releases_with_items_of_every_kind(log) -> None:
    found = log(
        "(APIServer pid=8110) INFO 11-30 08:10:11 [loggers.py:341] Engine 001: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 700.0 tokens/s, Running: 41 reqs, Waiting: 9 reqs, Deferred: 7 reqs, KV fetch: 2 waiting to start, 4 in progress, 1 completed waiting, Preemptions: 3, GPU KV cache usage: 88.4%, Prefix cache hit rate: 3.0%, External prefix cache hit rate: 98.7%, Shiny new item: 5 reqs\n"
        "(APIServer pid=8110) INFO 11-30 08:10:21 [loggers.py:341] 4 Engines Aggregated: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 2.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, CPU KV cache usage: 8.4%\n"
        "(APIServer pid=8110) INFO 11-30 08:10:31 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 2.41, Accepted throughput: 120.50 tokens/s, Drafted throughput: 256.00 tokens/s, Accepted: 1205 tokens, Drafted: 2560 tokens, Per-position acceptance rate: 0.812, 0.598, Avg Draft acceptance rate: 47.1%\n"
        "(APIServer pid=8110) INFO 11-30 08:10:31 [metrics.py:100] KV Transfer metrics: vllm:kv_offload_load_bytes=1048576, vllm:kv_offload_load_time=4e-3\n"
    )
    assert balanced(found)
    values = {
        (m, labels): v
        for m, labels, v in found["samples"].select("metric", "labels", "value").iter_rows()
    }
    one = '{"engine": "1"}'
    assert values["vllm:num_requests_running", one] == 41
    assert (
        values["vllm:num_requests_waiting_by_reason", '{"engine": "1", "reason": "deferred"}'] == 7
    )
    assert (
        values["vllm:num_requests_kv_fetch_by_stage", '{"engine": "1", "stage": "in_progress"}']
        == 4
    )
    assert values["vllm:kv_cache_usage_perc", one] == pytest.approx(0.884)
    assert values["log:external_prefix_cache_hit_rate", one] == pytest.approx(0.987)
    assert values["log:preemptions", one] == 3
    assert values["log:shiny_new_item", one] == 5
    assert values["vllm:kv_cache_usage_perc", '{"engines_aggregated": "4"}'] == pytest.approx(0.084)
    assert values["log:specdecoding_position_acceptance_rate", '{"position": "1"}'] == 0.598
    assert values["log:specdecoding_avg_draft_acceptance_rate", "{}"] == pytest.approx(0.471)
    assert values["log:specdecoding_accepted_tokens", "{}"] == 1205
    assert values["vllm:kv_offload_load_time", "{}"] == 0.004


def test_the_year_turns_inside_a_log(log) -> None:
    found = log(
        STEP.format("12-31 23:59:59", 0, 1, 0, 0, 1, 1, "5.00")
        + STEP.format("01-01 00:00:01", 0, 2, 0, 0, 1, 1, "5.00"),
        changed="2026-01-01T08:00:00",
    )
    ends = (found["steps"].sort("seq")["start_lower_ns"] + 5_000_000).to_list()
    assert ends == [at("2025-12-31T23:59:59"), at("2026-01-01T00:00:01")]


def test_a_log_is_never_from_after_its_last_change(log) -> None:
    found = log(
        STEP.format("11-29 10:00:00", 0, 1, 0, 0, 1, 1, "5.00"), changed="2026-02-01T00:00:00"
    )
    assert found["steps"]["start_lower_ns"][0] + 5_000_000 == at("2025-11-29T10:00:00")


def test_a_leap_day_finds_its_year(log) -> None:
    found = log(
        STEP.format("02-29 10:00:00", 0, 1, 0, 0, 1, 1, "5.00"), changed="2026-02-01T00:00:00"
    )
    assert found["steps"]["start_lower_ns"][0] + 5_000_000 == at("2024-02-29T10:00:00")


def test_two_runs_in_one_file_are_two_workers(log) -> None:
    banner = (
        "(APIServer pid={}) INFO 11-30 08:00:00 [api_server.py:1] vLLM API server version 0.24.0\n"
    )
    found = log(
        banner.format(7811) + STEP.format("11-30 08:10:00", 0, 4, 0, 0, 1, 1, "5.00")
        + banner.format(9020) + STEP.format("11-30 08:20:00", 0, 4, 0, 0, 1, 1, "5.00").replace("7811", "9020")
    )  # fmt: skip
    assert found["steps"]["worker"].n_unique() == 2
    assert found["events"].filter(pl.col("kind") == "started").height == 2
    assert set(found["worker_aliases"].filter(pl.col("kind") == "pid")["value"]) == {"7811", "9020"}
    assert found["workers"].filter(pl.col("start_ns").is_not_null())["worker"].n_unique() == 2


def test_a_count_that_steps_back_is_a_new_run_and_ranks_are_kept_apart(log) -> None:
    found = log(
        STEP.format("11-30 08:10:00", 0, 100, 0, 0, 1, 1, "5.00") + STEP.format("11-30 08:10:00", 1, 3, 0, 0, 1, 1, "5.00")
        + STEP.format("11-30 08:20:00", 0, 101, 0, 0, 1, 1, "5.00") + STEP.format("11-30 08:30:00", 0, 0, 0, 0, 1, 1, "5.00")
    )  # fmt: skip
    assert rows(found["steps"].sort("record"), "rank", "seq") == [
        ("0", 100),
        ("1", 3),
        ("0", 101),
        ("0", 0),
    ]
    assert found["steps"].sort("record")["worker"].n_unique() == 2


def test_json_lines_of_the_formatter(log) -> None:
    line = {"asctime": "2025-03-01 10:00:00,250", "levelname": "INFO", "name": "vllm.v1.core", "processName": "EngineCore_DP1", "process": 77,
            "message": "Iteration(9): 0 context requests, 0 context tokens, 4 generation requests, 4 generation tokens, iteration elapsed time: 10.00 ms"}  # fmt: skip
    access = {"asctime": "2025-03-01 10:00:01,000", "levelname": "INFO", "name": "uvicorn.access", "processName": "MainProcess", "process": 70,
              "message": '10.0.0.7:1 - "POST /v1/chat/completions HTTP/1.1" 503'}  # fmt: skip
    text = json.dumps(line) + "\n" + json.dumps(access) + "\n"
    found = log(text)
    assert balanced(found)
    step = found["steps"].row(0, named=True)
    assert (step["rank"], step["seq"], step["decode_requests"]) == ("1", 9, 4)
    assert step["start_ns"] == at("2025-03-01T10:00:00") + 240_000_000
    assert rows(found["legs"], "status", "error") == [("failed", "HTTP 503")]


def test_an_id_used_again_is_another_request(log) -> None:
    line = "(APIServer pid=8110) INFO 11-30 08:10:{:02d} [x.py:1] {}\n"
    text = ""
    for second in (10, 50):
        text += line.format(
            second,
            "Received request cmpl-b-1-0: params: SamplingParams(n=1, max_tokens=5), lora_request: None.",
        )
        text += line.format(second, f"Added request cmpl-b-1-0-9586909{second % 7}.")
    text += line.format(51, "Request cmpl-b-1-0 aborted.")
    found = log(text)
    assert rows(found["legs"].sort("record"), "external_id", "status") == [
        ("b-1", "unknown"),
        ("b-1", "aborted"),
    ]
    assert found["legs"]["leg"].n_unique() == 2


def test_internal_ids_alone_lose_the_engines_suffix(log) -> None:
    line = "(APIServer pid=8110) INFO 11-30 08:10:10 [x.py:1] Added request {}.\n"
    found = log(
        "".join(
            line.format(i)
            for i in ("cmpl-b-1-0-9586909d", "0_chatcmpl-c-9a4274da", "1_chatcmpl-c-9a4274da")
        )
    )
    assert rows(found["legs"].sort("record"), "request_id") == [("cmpl-b-1-0",), ("chatcmpl-c",)]
    bare = log(
        "".join(line.format(i) for i in ("cmpl-d-1-0", "chatcmpl-deadbeef-0badcafe", "cmpl-e-0")),
        name="old.log",
    )
    found_ids = (
        bare["legs"].filter(pl.col("leg").str.contains("old.log"))["request_id"].sort().to_list()
    )
    assert found_ids == ["chatcmpl-deadbeef-0badcafe", "cmpl-d-1-0", "cmpl-e-0"]


def test_a_failure_and_its_answer_are_one_request(log) -> None:
    found = log(
        "(APIServer pid=8110) INFO 11-30 08:10:10 [x.py:1] Received request cmpl-a-0: params: SamplingParams(n=1, max_tokens=5), lora_request: None.\n"
        "(APIServer pid=8110) INFO 11-30 08:10:10 [x.py:1] Request cmpl-a-0 failed (bad request): my private prompt.\n"
        'INFO:     10.0.0.7:1 - "POST /v1/completions HTTP/1.1" 400 Bad Request\n'
        'INFO:     10.0.0.7:1 - "POST /tokenize HTTP/1.1" 404 Not Found\n'
        'INFO:     10.0.0.7:1 - "POST /v1/completions?user=joe HTTP/1.1" 400 Bad Request\n'
    )
    assert balanced(found)
    assert rows(found["legs"].sort("record"), "request_id", "status", "error") == [
        ("cmpl-a-0", "failed", "HTTP 400"),
        (None, "failed", "HTTP 400"),
    ]
    assert found["events"].filter(pl.col("kind") == "http_error").height == 3
    assert "joe" not in str(found["events"].to_dicts())
    assert "private" not in str(found["legs"].to_dicts())


@pytest.mark.parametrize(
    "line",
    [
        "ERROR 08-05 16:38:30 async_llm_engine.py:56] Engine background task failed",
        "ERROR 08-05 16:38:30 async_llm_engine.py:663] Engine iteration timed out. This should never happen!",
        "vllm.engine.async_llm_engine.AsyncEngineDeadError: Background loop has errored already.",
        "CRITICAL 08-05 16:38:30 [launcher.py:116] MQLLMEngine is already dead, terminating server process",
        "(APIServer pid=1) ERROR 05-05 12:36:59 [serving.py:1173] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        "(APIServer pid=1) ERROR 05-05 12:36:59 [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.",
    ],
)  # fmt: skip
def test_a_dead_engine_is_told_in_the_words_of_every_era(log, line: str) -> None:
    """Lines of the shapes in vllm-project/vllm issues 5901, 27549 and noonghunna/club-3090 issue 58."""
    found = log(f"INFO 08-05 16:38:20 async_llm_engine.py:140] Finished request a.\n{line}\n")
    assert found["events"].select("kind", "severity", "detail").rows() == [
        ("failure", "critical", "engine died")
    ]


def test_a_dead_engine_stands_in_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "v.log").write_text(
        "INFO 08-05 16:38:20 async_llm_engine.py:173] Added request a.\n"
        "INFO 08-05 16:38:23 async_llm_engine.py:140] Finished request a.\n"
        "ERROR 08-05 16:38:30 async_llm_engine.py:56] Engine background task failed\n"
    )
    assert (
        "An engine failed: engine died (1 x)."
        in pdtrace.open(tmp_path).diagnose().deployments[0].verdict
    )


STATS = "INFO 07-02 11:00:0{} [loggers.py:118] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 7.0 tokens/s, Running: {} reqs, Waiting: 0 reqs\n"


def test_replicas_of_ray_serve_are_servers_of_their_own(log) -> None:
    """The prefix of ray-project/ray; vLLM's own processes may stand behind it."""
    found = log(
        "(ServeReplica:app:LLM pid=5678, ip=10.0.0.4) " + STATS.format(1, 1)
        + "(ServeReplica:app:LLM pid=5679, ip=10.0.0.5) (APIServer pid=5690) " + STATS.format(1, 10)
        + "(ServeReplica:app:LLM pid=5678, ip=10.0.0.4) " + STATS.format(2, 3)
    )  # fmt: skip
    running = found["samples"].filter(pl.col("metric") == "vllm:num_requests_running")
    values = running.group_by("worker").agg(pl.col("value").sort())["value"].to_list()
    assert sorted(values) == [[1.0, 3.0], [10.0]]


def test_pods_of_stern_are_servers_of_their_own(log) -> None:
    """`stern` puts pod and container in front; a few lines are enough where the pods' names are Kubernetes'."""
    found = log(
        "vllm-prefill-6d5f7c9b8-x2x9z vllm " + STATS.format(1, 1)
        + "vllm-decode-7f9b5d6c8-q8k2m vllm " + STATS.format(1, 10)
        + "vllm-decode-7f9b5d6c8-q8k2m vllm " + STATS.format(2, 11)
    )  # fmt: skip
    aliases = (
        found["worker_aliases"].filter(pl.col("kind") == "pod")["value"].unique().sort().to_list()
    )
    assert aliases == ["vllm-decode-7f9b5d6c8-q8k2m", "vllm-prefill-6d5f7c9b8-x2x9z"]


def test_the_model_of_the_first_releases_is_read() -> None:
    """`with config:` without a version in front (vLLM 0.1 to 0.3)."""
    line = "Initializing an LLM engine with config: model='lmsys/vicuna-7b', tokenizer='lmsys/vicuna-7b', seed=0)"
    assert read_line(line)["model"] == "lmsys/vicuna-7b"


def test_a_cut_last_line_is_no_measurement(log) -> None:
    whole = "(APIServer pid=8110) INFO 11-30 08:10:10 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 700.0 tokens/s, Running: 41"
    found = log(whole)
    assert balanced(found)
    assert found["samples"].height == 0
    assert found.account.reasons == {"cut off at the end of the file": 1}


@pytest.mark.parametrize(
    ("end", "values"),
    [
        ("Running: 4 reqs, Waiting: 2 reqs, GPU KV cache usage: 8.4%, Prefix cache hit rate: 3.0%", 6),
        ("Running: 4 reqs, Waiting: 2 reqs, GPU KV cache usage: 8.4%.", 5),
        ("Running: 4 reqs, Waiting: 2 reqs", 4),
        ("Running: 4 reqs, Waiting: 2 reqs, GPU KV cache usage: 8.4", 0),
        ("Running: 4 reqs, Waiting: 2 re", 0),
        ("Running: 4 reqs", 0),
    ],
)  # fmt: skip
def test_a_last_line_without_a_newline_is_read_where_it_is_whole(log, end: str, values: int) -> None:  # fmt: skip
    line = "INFO 11-30 08:10:10 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 7.0 tokens/s, "
    found = log(line + end)
    assert balanced(found)
    assert found["samples"].height == values
    if values:
        assert found["samples"].filter(pl.col("metric") == "vllm:num_requests_running")["value"].item() == 4  # fmt: skip


def test_the_users_logging_prefix_is_stepped_over(log) -> None:
    found = log("[node-7] INFO 07-20 12:00:01 [loggers.py:118] Engine 000: Avg prompt throughput: 2210.4 tokens/s, Avg generation throughput: 310.7 tokens/s, Running: 12 reqs, Waiting: 3 reqs\n")  # fmt: skip
    assert found["samples"]["time_ns"].unique().to_list() == [at("2026-07-20T12:00:01")]


def test_debug_lines_tell_of_transfers(log) -> None:
    line = "(EngineCore_DP0 pid=91{}) DEBUG 11-30 08:10:{} [x.py:1] {}\n"
    found = log(
        line.format(10, 10, "start_load_kv for request cmpl-a-0-9586909d from remote engine 11111111-aaaa-4bbb-8ccc-000000000001. Num local_block_ids: 3. Num remote_block_ids: 4.")
        + line.format(10, 12, "Finished recving KV transfer for request cmpl-a-0-9586909d")
    )  # fmt: skip
    assert balanced(found)
    moved = found["transfers"].row(0, named=True)
    assert moved["source_worker"] == "engine_id:11111111-aaaa-4bbb-8ccc-000000000001"
    assert (moved["start_ns"], moved["end_ns"]) == (
        at("2026-11-30T08:10:10"),
        at("2026-11-30T08:10:12"),
    )
    assert (moved["direction"], moved["outcome"]) == ("prefill_to_decode", "completed")


@pytest.mark.parametrize(
    ("message", "key", "value"),
    [
        ("GPU KV cache size: 1,024,288 tokens", "kv_cache_tokens", "1024288"),
        ("Chunked prefill is enabled with max_num_batched_tokens=2048.", "max_num_batched_tokens", "2048"),
        ("Creating v1 connector with name: NixlConnector and engine_id: ab-cd", "kv_engine_id", "ab-cd"),
        ("Initializing a V1 LLM engine (v0.11.2) with config: model='m', max_seq_len=4096, tensor_parallel_size=8,", "tensor_parallel_size", "8"),
        ("non-default args: {'kv_transfer_config': '{\"kv_connector\":\"LMCacheConnectorV1\",\"kv_role\":\"kv_producer\"}'}", "kv_role", "kv_producer"),
        ("non-default args: {'x': <CompilationMode.NONE: 0>, 'max_num_seqs': 8}", "max_num_seqs", "8"),
    ],
)  # fmt: skip
def test_a_start_up_line_states_a_fact(message: str, key: str, value: str) -> None:
    assert read_line(message)[key] == value


def test_reprs_are_read_and_never_run() -> None:
    assert python_repr("{'a': np.float64(1.5), 'b': F(x=-1, y=[1])}") == {
        "a": 1.5,
        "b": {"_call": "F", "x": -1, "y": [1]},
    }
    assert python_repr("{'a': __import__('os').system('true')}") == {"a": "true"}
    assert python_repr("{broken") is None


@pytest.mark.parametrize(
    ("text", "recognised"),
    [
        ("INFO 10-16 17:11:24 metrics.py:351] Avg prompt throughput: 1.0 tokens/s\n", True),
        ("\x1b[1;36m(APIServer pid=811)\x1b[0;0m INFO 11-30 08:10:11 [loggers.py:248] Engine 001: Avg prompt throughput: 0.0 tokens/s\n", True),
        ('{"asctime":"2025-03-01 10:00:00,250","levelname":"INFO","name":"vllm.engine","message":"hi"}\n', True),
        ('INFO:     127.0.0.1:1 - "GET /metrics HTTP/1.1" 200 OK\n' * 20, False),
        ("2026-11-29 23:09:24 NIXL INFO    _api.py:405 Backend UCX was instantiated\n", False),
        ('{"log":"nothing of that kind"}\n', False),
        ('{"log":"INFO 10-16 17:11:24 metrics.py:351] x\\n","time":"2025-01-01T00:00:00Z"}\n', True),
        ("vllm-1  | (EngineCore pid=9) INFO 11-30 08:10:11 [core.py:357] Iteration(1): 0 context requests\n" * 3, True),
        ("INFO 10-16 17:11:24 [mine.py:1] hello\n", False),
        ("ttft_ms,e2e_ms\n1,2\n", False),
        ("", False),
    ],
)  # fmt: skip
def test_only_a_vllm_log_is_recognised(tmp_path: Path, text: str, recognised: bool) -> None:
    path = tmp_path / "x.log"
    path.write_text(text)
    assert (vllm_log.sniff(expand([str(path)])[0].head()) is not None) is recognised


@pytest.mark.shared
def test_known_answers_of_the_aggregated_capture(collect, shared: Path) -> None:
    found = collect(vllm_log, shared / "data/vllm/agg/server.log.gz")
    assert balanced(found)
    steps = found["steps"].with_columns(
        pl.when(pl.col("prefill_requests") == 0).then(pl.lit("decode")).when(pl.col("decode_requests") > 0).then(pl.lit("mixed"))
        .otherwise(pl.lit("prefill")).alias("kind")
    )  # fmt: skip
    shown = steps.group_by("kind").agg(pl.len(), pl.col("elapsed_ns").median() / 1e6).sort("kind")
    assert shown.rows() == [("decode", 13456, pytest.approx(1.90, abs=0.005)), ("mixed", 263, pytest.approx(65.3, abs=0.05)), ("prefill", 125, pytest.approx(19.67, abs=0.01))]  # fmt: skip
    assert found["legs"].height == 362


@pytest.mark.shared
def test_known_answers_of_the_decode_server(collect, shared: Path) -> None:
    found = collect(vllm_log, shared / "data/vllm/pd_nixl/decode.log.gz")
    assert balanced(found)
    pulled = found["steps"].filter(pl.col("pulled_requests") > 0)
    assert pulled.filter(pl.col("decode_requests") > 0).height == 210
    assert (
        pulled["pulled_requests"].sum()
        == 307 - found["steps"].filter(pl.col("pulled_requests").is_null()).height
    )
    assert found["legs"].height == 307


def test_access_lines_are_counted_as_calls(collect, tmp_path) -> None:
    """Health checks are no calls; a query string changes nothing."""
    stats = "INFO 06-01 12:00:{:02} [loggers.py:118] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.1%"
    access = 'INFO:     10.0.0.7:4123 - "{} HTTP/1.1" {} X'
    lines = [
        stats.format(0),
        access.format("POST /v1/messages?beta=true", 200),
        access.format("GET /health", 200),
    ]
    lines += [access.format("POST /v1/chat/completions", 500), stats.format(10)]
    path = tmp_path / "vllm.log"
    path.write_text("\n".join(lines) + "\n")
    found = collect(vllm_log, path)
    assert balanced(found)
    said = facts(found)
    assert (said["http_calls"], said["http_calls_failed"]) == ("2", "1")


@pytest.mark.parametrize(
    ("line", "kind", "severity"),
    [
        ("ERROR 04-17 06:27:29 [pynccl_pipe.py:264] Encountering exception in KV receiving thread", "warning", "warning"),
        ("(EngineCore pid=203) WARNING 06-18 09:55:04 [jit_monitor.py:103] Triton kernel JIT compilation during inference: fused_moe_kernel. This causes a latency spike;", "warning", "info"),
    ],
)  # fmt: skip
def test_a_line_that_tells_of_its_cause_is_an_event(
    log, line: str, kind: str, severity: str
) -> None:
    assert rows(log(f"{line}\n")["events"], "kind", "severity") == [(kind, severity)]


def test_a_worker_that_takes_no_work_is_told_with_its_minute(log) -> None:
    found = log(
        "(EngineCore_DP0 pid=7) INFO 10-22 09:43:49 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging\n"
    )
    assert rows(found["events"], "kind", "resolution_ns", "count") == [("stall", 60 * SECOND, 1)]


def test_calls_of_a_log_cut_to_a_stretch_of_time_are_said_to_be_of_the_whole(
    tmp_path: Path,
) -> None:
    """30 calls, the first 5 of them failed, one a minute; until 10:02:30 three failed, of how many is not known."""
    stats = "INFO 11-30 10:{:02}:00 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 7.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%\n"
    access = 'INFO:     10.0.0.7:{} - "POST /v1/completions HTTP/1.1" {}\n'
    lines = [
        stats.format(n)
        + access.format(4000 + n, "500 Internal Server Error" if n < 5 else "200 OK")
        for n in range(30)
    ]
    path = tmp_path / "server.log"
    path.write_text("".join(lines), "utf-8")
    os.utime(path, (at("2026-11-30T12:00:00") / SECOND,) * 2)
    cut = Options(until_ns=at("2026-11-30T10:02:30"))
    said = {}
    for name, options in (("whole", None), ("cut", cut)):
        with Trace.read([path], options) as trace:
            said[name] = trace.diagnose().to_dict()["deployments"][0]
    assert said["whole"]["calls"] == {"answered": 30, "failed": 5, "whole_log": False}
    assert said["cut"]["calls"] == {"answered": 30, "failed": 5, "whole_log": True}
    assert list(said["cut"]["window"].values()) == ["2026-11-30T10:00:00.000Z", "2026-11-30T10:02:00.000Z"]  # fmt: skip
    (failed,) = [f for f in said["cut"]["findings"] if f["id"] == "failed_requests"]
    assert (failed["value"], failed["share"], failed["interval"]) == (3, None, None)
    assert "3 failed, of how many calls is not known" in said["cut"]["verdict"]
