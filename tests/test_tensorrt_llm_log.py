"""TensorRT-LLM's log: iterations are steps, one line a step, and failures are told without what users wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdtrace import diagnose, registry
from pdtrace.api import Trace
from pdtrace.model import Head

LOG = registry.collectors()["tensorrt_llm_log"]
Collect = Callable[..., Any]
LINE = (
    "[08/19/2026-14:{m:02}:{s:02}] [TRT-LLM] [I] iter = {i}, global_rank = {r}, rank = {r}, currank_total_requests = 0/1, "
    "host_step_time = {ms:.2f}ms, prev_device_step_time = 3.9ms, timestamp = 2026-08-19 14:{m:02}:{s:02}, "
    "num_scheduled_requests: {n}, states = {{'num_ctx_requests': {c}, 'num_ctx_tokens': {t}, 'num_generation_tokens': {g}}}"
)  # fmt: skip


def lines(count: int, ranks: int = 1, alike: bool = True) -> str:
    """Steps of 10 ms with 20 decodes; every tenth computes 1000 tokens of a prompt, too, and takes 60 ms."""
    found = []
    at = 0.0
    for i in range(count):
        prompt = i % 10 == 0
        at += 0.06 if prompt else 0.01
        found += [
            LINE.format(
                i=i, r=r, ms=60 if prompt else 10, m=int(at // 60), s=int(at % 60), n=20 + prompt, c=int(prompt),
                t=1000 if prompt else 0, g=20 if alike else 20 + r,
            )
            for r in range(ranks)
        ]  # fmt: skip
    return "\n".join(found) + "\n"


def test_prompts_that_held_decodes_up_are_told_from_iterations_alone(tmp_path: Path) -> None:
    (tmp_path / "serve.log").write_text(lines(2000))
    trace = Trace.read([tmp_path])
    (mine,) = diagnose.diagnose(trace.store).deployments
    (found,) = [f for f in mine.findings if f.id == "prefill_interference"]
    # 200 of 2000 steps hold 20 decodes up for 50 ms each
    assert found.level == "A"
    assert found.cost_s == pytest.approx(200 * 20 * 0.05, rel=0.05)


@pytest.mark.parametrize(("alike", "steps"), [(True, 50), (False, 100)])
def test_ranks_that_share_every_batch_count_once(collect: Collect, tmp_path: Path, alike: bool, steps: int) -> None:  # fmt: skip
    (tmp_path / "serve.log").write_text(lines(50, ranks=2, alike=alike))
    assert collect(LOG, tmp_path / "serve.log")["steps"].height == steps


def test_a_failing_line_says_what_failed_and_not_what_was_asked(collect: Collect, tmp_path: Path) -> None:  # fmt: skip
    bad = "[08/19/2026-14:00:02] [TRT-LLM] [E] Error encountered while processing request to http://a:1/v1: my secret prompt\n"
    (tmp_path / "serve.log").write_text(lines(20) + bad)
    got = collect(LOG, tmp_path / "serve.log")
    assert got["events"].select("kind", "detail").rows() == [("failure", "a request failed")]
    assert got["workers"].height == 1  # a date in brackets is nobody's pod


@pytest.mark.parametrize("text", [b"", b"[TRT-LLM] is fast\n", b"iter = 3, loss = 0.2\n"])
def test_strangers_are_left_alone(text: bytes) -> None:
    assert LOG.sniff(Head("x.log", "x.log", text, complete=True)) is None


def test_iterations_of_before_1_0_tell_seconds(collect: Collect, tmp_path: Path) -> None:
    """NVIDIA/TensorRT-LLM pull request 3914: elapsed_time in seconds, the requests counted or not."""
    line = (
        "[04/28/2025-09:56:44] [TRT-LLM] [I] iter = {i}, global_rank = 0, rank = 0, currank_total_requests = 0/0, elapsed_time = {s}s, "
        "timestamp = 2025-04-28 09:56:44, {n}states = {{'num_ctx_requests': 0, 'num_ctx_tokens': 0, 'num_generation_tokens': 16}}\n"
    )  # fmt: skip
    text = line.format(i=198, s="0.005060911178588867", n="") + line.format(i=199, s="9.5e-05", n="num_scheduled_requests: 10, ")  # fmt: skip
    (tmp_path / "serve.log").write_text(text)
    steps = collect(LOG, tmp_path / "serve.log")["steps"].sort("seq")
    assert steps["elapsed_ns"].to_list() == [5_060_911, 95_000]
    assert steps["decode_requests"].to_list() == [None, 10]  # 16 with the padding of a CUDA graph


def test_printed_totals_of_a_benchmark_say_where_the_requests_are(collect: Collect, tmp_path: Path) -> None:  # fmt: skip
    text = (
        "[05/13/2026-21:33:16] [TRT-LLM] [I] Starting the throughput benchmark\n"
        "= PERFORMANCE OVERVIEW \nRequest Throughput (req/sec):                     23.9\n"
        "Total Output Throughput (tokens/sec):             24500.1\n"
    )
    (tmp_path / "bench.txt").write_text(text)
    account = collect(LOG, tmp_path / "bench.txt").account
    assert account.reasons[LOG.REASON_TOTALS] == 3 and account.read == 4


def test_a_failed_forward_pass_and_an_executor_that_did_not_start_are_failures(collect: Collect, tmp_path: Path) -> None:  # fmt: skip
    stamp = "[05/13/2026-21:33:16] [TRT-LLM] [E] "
    said = (
        "Encountered an error in forward function: The max KV cache length of input sequences (3646) exceeds the KV cache manager's maximum supported length (2049).",
        "Traceback (most recent call last):",
        "Failed to initialize executor on rank 1: [TensorRT-LLM][ERROR] CUDA runtime error in ::cudaFree(ptr): an illegal memory access was encountered",
        "Executor worker died during initialization.",
    )  # fmt: skip
    (tmp_path / "serve.log").write_text("".join(f"{stamp}{line}\n" for line in said))
    events = collect(LOG, tmp_path / "serve.log")["events"].sort("record")
    assert events["kind"].unique().to_list() == ["failure"]
    assert events["detail"].to_list() == [
        "a forward pass failed: sequences longer than the KV cache holds", "GPU or communication error", "the executor did not start",
    ]  # fmt: skip
