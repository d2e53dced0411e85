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
