"""Files are told from their first bytes by short cuts that never change the answer."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from pdtrace import registry
from pdtrace.collectors import _log_wrappers, not_read, prometheus
from pdtrace.model import Head, Match

NAMED = (
    b" INFO sglang_router::x", b" DEBUG smg::a", b" INFO sgl_model_gateway::", b" WARN model_gateway::x", b"vllm_router_rs::a",
    b"(ProxyActor pid=1", b"(ServeController pid=1", b"-- CALL x OK 1.0ms", b"-- GET /x 200 1.0ms", b"-- POST /x ERROR 1.0ms",
    b'"request_info": {}, "request_throughput_req_s"', b"= PERFORMANCE OVERVIEW", b"= WORLD + RUNTIME INFORMATION", b'I0101 00:00:00.000000 1 simulator.go:1] "Configuration:',
    b"[Metrics] Transfer Engine Stats", b"I0101 00:00:00.000000 1 transfer_engine.cpp:1]", b"] LMCache INFO:", b"INFO LMCache: ",
    b'"request_latency": {"unit": "ms"', b'"time_to_first_token": {\n "unit":', b"llama-benchy (0.4.0)", b'"Active Request Count":1', b'\\"Iteration Counter\\":2',
    b"Run Info,Run Info,Benchmark", b"Benchmarks Stats:", b'{"load_summary":',
    b'"successes": {"count": 1, "request_latency": {', b"ResourceSpans #0 Span #1\n Trace ID",
)  # fmt: skip


@pytest.mark.parametrize("data", NAMED)
def test_the_words_looked_for_first_stand_in_all_that_a_pattern_takes(data: bytes) -> None:
    names = {name for name, _, _ in not_read._NAMED}
    assert not_read._WORDS.keys() <= names
    assert any(pattern.search(data) for _, _, pattern in not_read._NAMED)
    assert not_read.sniff(Head("a", "a", data))


def test_what_can_be_no_more_than_a_dialect_is_not_asked_behind_an_exact_match(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LMCache's words stand in spans: OTLP is read; in a text of nobody's they name it; two that do: the first by name."""
    asked: list[str] = []
    for collector in (not_read, registry.collectors()["run_files"]):
        own = collector.sniff

        def sniff(head: Head, name: str = collector.__name__, own: Any = own) -> Match | None:
            asked.append(name.rpartition(".")[2])
            found: Match | None = own(head)
            return found

        monkeypatch.setattr(collector, "sniff", sniff)
    words = b"x] LMCache INFO: stored"
    spans = b'{"resourceSpans":[{"scopeSpans":[]}],"note":"' + words + b'"}'
    ((name, _),) = registry.sniff(Head("a.json", "a.json", spans))
    assert (name, asked) == ("otlp", [])
    ((name, _),) = registry.sniff(Head("a.pid", "a.pid", words))
    assert (name, asked) == ("not_read", ["not_read", "run_files"])


def test_the_first_lines_tell_metrics_only_with_a_type_and_a_sample() -> None:
    typed, sample = "# TYPE a counter", "a_total 1"
    assert prometheus._soon_certain([typed, "", sample])
    assert not prometheus._soon_certain(
        [typed, "Date: Mon 1", "# a_total 1", "2026-01-01 00:00:00 1"]
    )
    assert not prometheus._soon_certain([sample, sample])


def test_wrappers_asked_at_once_are_those_that_carry() -> None:
    lines = pl.Series([f"web-1  | line {n}" for n in range(20)])
    able = _log_wrappers._able(lines)
    assert [n for n in _log_wrappers._WRAPPERS if _log_wrappers._carries(lines, n)] == ["compose"]
    assert "compose" in able
    few = pl.Series([*lines[:8].to_list(), *["plain words"] * 12])  # fewer than 60 in 100
    assert not _log_wrappers._able(few)


def test_a_vllm_log_is_known_beside_the_head_before_it() -> None:
    line = b"INFO 11-29 22:59:12 [loggers.py:199] Engine 000: Avg prompt throughput: 1.0 tokens/s\n"
    heads = [Head("a", "a.log", b"nothing\n"), Head("b", "b.log", line * 3)] * 2
    assert [[name for name, _ in registry.sniff(head)] for head in heads][1::2] == [
        ["vllm_log"]
    ] * 2
