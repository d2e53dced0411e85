"""`vllm bench serve` and benchmark_serving.py: result JSON, one request a row where it has them.

Source: vllm-project/vllm, vllm/benchmarks/serve.py, lib/endpoint_request_func.py (0.8.5 to 0.32),
benchmarks/benchmark_serving.py. Clock: perf_counter of the client, seconds; only `date` (local, at
the end of the run) is wall time. Request ids are not in the file: they are a prefix + row index.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from pdtrace.model import Head, Match, Sink, Source

from ._common import NOT_AN_OBJECT
from ._vllm_bench_rows import Run, legs, queue_times, row_count, streams
from ._vllm_bench_values import read_runs, run_facts

TITLE = "vLLM bench serve"

AGGREGATES_ONLY = "aggregates only: run with --save-detailed"
_MARKS = ("model_id", "tokenizer_id", "num_prompts", "request_rate")
_SUMMARY = re.compile(rb"={3,} Serving Benchmark Result ={3,}")


def sniff(head: Head) -> Match | None:
    """Exact: the settings that every result begins with."""
    if head.name.endswith(".pytorch.json"):
        return Match(
            "exact",
            "vllm bench serve, PyTorch benchmark format",
            ignore="copy of the aggregates beside a vllm bench result, no requests",
        )
    if head.data.lstrip()[:1] == b"{":
        if all(re.search(rb'"' + mark.encode() + rb'"\s*:', head.data) for mark in _MARKS):
            return Match("exact", "vllm bench serve result")
        return None
    if _SUMMARY.search(head.data):
        return Match(
            "exact",
            "printed summary of a serving benchmark",
            ignore="printed aggregates; the result file has the requests (vLLM: --save-result --save-detailed; SGLang: --output-file FILE --output-details)",
        )
    return None


def read(source: Source, out: Sink) -> None:
    """Legs and token streams of every run in the file (--append-result writes several)."""
    read_runs(source, out, _read_run)


def _read_run(source: Source, value: Any, number: int, first: int, out: Sink) -> int:
    """Read one result object; returns how many records it has."""
    if not isinstance(value, dict) or not any(mark in value for mark in _MARKS):
        out.read(1)
        out.skip(first, NOT_AN_OBJECT if not isinstance(value, dict) else "no vllm bench result")
        return 1
    # Each run is a process of its own: its perf_counter says nothing about another run's.
    name = source.path if number == 0 else f"{source.path}#{number}"
    worker = out.worker({"file": name}, role="client", role_basis="config", engine="vllm bench")
    for key, fact in run_facts(value):
        out.fact(worker, key, fact)
    count = row_count(value)
    out.read(max(count, 1))
    if count == 0:
        out.skip(first, AGGREGATES_ONLY)
        return 1
    run = Run(value, count, source.path, worker, f"perf:{name}", first)
    if run.start_times is not None:
        out.clock(run.clock)
    out.fact(worker, "misaligned_arrays", ", ".join(run.misaligned) or None)
    out.add("legs", legs(run))
    _add(out, "streams", streams(run))
    _add(out, "reported", queue_times(run))
    return count


def _add(out: Sink, table: str, rows: pa.Table | None) -> None:
    if rows is not None and rows.num_rows:
        out.add(table, rows, record=None)
