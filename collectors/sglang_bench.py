"""SGLang's bench_serving: result JSON lines, one run a line, one request a row where it has them.

Source: sgl-project/sglang python/sglang/bench_serving.py, 0.4.6 to 0.5.23 (`--output-file`, with
`--output-details` the arrays). It began as a copy of vLLM's benchmark and has the same arrays, but no
start times and no ids: requests have durations only, and join no server's records. The gaps of the
native backend are those of chunks spread evenly over their tokens. Infinity and NaN stand bare.
"""

from __future__ import annotations

import math
import re
from typing import Any

import polars as pl

from pdtrace.model import Head, Match, Sink, Source

from ._common import NOT_AN_OBJECT

TITLE = "SGLang bench_serving"

AGGREGATES_ONLY = "aggregates only: run with --output-details"
_MARKS = ("total_output_tokens_retokenized", "sharegpt_output_len", "random_range_ratio")
_TTFT = "bench_serving: send to first chunk with content, perf_counter of the client"
_LEFT_OUT = ("generated_texts", "server_info")


def sniff(head: Head) -> Match | None:
    """Exact: keys that only this tool writes, in the first line."""
    if head.data.lstrip()[:1] != b"{":
        return None
    marks = sum(re.search(rb'"' + mark.encode() + rb'"\s*:', head.data) is not None for mark in _MARKS)  # fmt: skip
    if marks >= 2 and re.search(rb'"backend"\s*:', head.data):
        return Match("exact", "SGLang bench_serving result")
    return None


def read(source: Source, out: Sink) -> None:
    """Legs and streams of every run in the file (each run appends a line)."""
    from ._vllm_bench_values import read_runs  # the same shape of file

    read_runs(source, out, _read_run)


def _read_run(source: Source, value: Any, number: int, first: int, out: Sink) -> int:
    """Read one result object; returns how many records it has."""
    from ._vllm_bench_rows import Run, legs, row_count, streams
    from ._vllm_bench_values import run_facts

    if not isinstance(value, dict) or not any(mark in value for mark in _MARKS):
        out.read(1)
        out.skip(first, NOT_AN_OBJECT if not isinstance(value, dict) else "no bench_serving result")
        return 1
    value = {key: item for key, item in value.items() if key not in _LEFT_OUT}
    name = source.path if number == 0 else f"{source.path}#{number}"
    worker = out.worker({"file": name}, role="client", role_basis="config", engine=TITLE)
    rate = value.get("request_rate")
    endless = isinstance(rate, float) and math.isinf(rate)
    for key, fact in run_facts(value | ({"request_rate": "inf"} if endless else {})):
        out.fact(worker, key, fact)
    count = row_count(value)
    out.read(max(count, 1))
    if count == 0:
        out.skip(first, AGGREGATES_ONLY)
        return 1
    run = Run(value, count, source.path, worker, f"perf:{name}", first)
    out.fact(worker, "misaligned_arrays", ", ".join(run.misaligned) or None)
    rows = legs(run).with_columns(
        ttft_definition=pl.when(pl.col("ttft_ms").is_not_null()).then(pl.lit(_TTFT)),
        row_index=pl.lit(None, dtype=pl.Int64),  # no id of a request is made of it
    )
    cached = value.get("cached_tokens")
    if isinstance(cached, list) and len(cached) == count:
        rows = rows.with_columns(cached_tokens=pl.Series(cached, dtype=pl.Int64, strict=False))
    out.add("legs", rows)
    gaps = streams(run)
    if gaps is not None and gaps.num_rows:
        out.add("streams", gaps, record=None)
    return count
