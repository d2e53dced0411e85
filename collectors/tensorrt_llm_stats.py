"""TensorRT-LLM's iteration statistics: what its `/metrics` answers (JSON, not Prometheus), as samples.

Source: NVIDIA/TensorRT-LLM tensorrt_llm/_torch/pyexecutor/py_executor.py and cpp/tensorrt_llm/executor (JSON keys), 0.20 to
1.3. `timestamp` is local time when the iteration was begun; empty in early versions. No steps are made of them: with the
overlap scheduler `iterLatencyMS` runs until the batch is looked at in the next loop, and `iter` may name that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import polars as pl

from pdtrace.model import Head, Match, Sink, Source

from ._common import integer, number
from ._trtllm_json import polled
from ._trtllm_rows import ENGINE

TITLE = ENGINE
SWITCHES = {
    "engine_counters": "enable_iter_perf_stats: true in the server's YAML, and GET /metrics once a second (it is emptied by reading)",
    "kv_usage": "enable_iter_perf_stats: true in the server's YAML, and GET /metrics once a second",
}

REASON_OTHER = "JSON, but no statistics of an iteration"
_PREFIX = "iteration_stats:"
# Names that mean what other engines call so; the rest keeps its own.
_NAMES = {
    "numQueuedRequests": "num_requests_waiting",
    "numScheduledRequests": "num_requests_running",
}
_TOP = (
    "iterLatencyMS", "numActiveRequests", "numNewActiveRequests", "numQueuedRequests", "numCompletedRequests",
    "maxNumActiveRequests", "newActiveRequestsQueueLatencyMS", "gpuMemUsage",
)  # fmt: skip
_BATCH = (
    "numScheduledRequests", "numContextRequests", "numGenRequests", "numPausedRequests", "numCtxTokens",
    "avgNumDecodedTokensPerIter",
)  # fmt: skip
_BLOCKS = ("maxNumBlocks", "freeNumBlocks", "usedNumBlocks", "reusedBlocks", "missedBlocks", "cacheHitRate")  # fmt: skip
_COUNTERS = ("reusedBlocks", "missedBlocks")
_ROWS = 50_000
_SCHEMA = {
    "record": pl.Int64, "worker": pl.String, "time_ns": pl.Int64, "metric": pl.String, "labels": pl.String,
    "value": pl.Float64, "kind": pl.String, "resolution_ns": pl.Int64,
}  # fmt: skip


def sniff(head: Head) -> Match | None:
    """The keys that only these records have."""
    data = head.data
    ours = b'"iterLatencyMS"' in data and (
        b'"inflightBatchingStats"' in data
        or b'"kvCacheStats"' in data
        or b'"numActiveRequests"' in data
    )
    return Match("exact", "TensorRT-LLM iteration statistics") if ours else None


def read(source: Source, out: Sink) -> None:
    """Waiting, running, KV usage and the like of every iteration that was polled."""
    out.unit("iteration")
    worker = out.worker({"file": source.path}, engine=ENGINE, name=source.name)
    rows: list[dict[str, Any]] = []
    dated = False
    for record, (value, damaged) in enumerate(polled(source)):
        out.read(1)
        if not isinstance(value, dict) or number(value.get("iterLatencyMS")) is None:
            out.skip(record, damaged or REASON_OTHER)
            continue
        at = _instant(value.get("timestamp"))
        dated = dated or at is not None
        told = list(_samples(value))
        rows += [
            {
                "record": record, "worker": worker, "time_ns": at, "metric": _PREFIX + _NAMES.get(name, name),
                "labels": labels, "value": figure, "kind": "counter" if name in _COUNTERS else "gauge",
                "resolution_ns": None if at is None else 1_000,
            }
            for name, labels, figure in told
        ]  # fmt: skip
        if len(rows) >= _ROWS:
            out.add("samples", pl.DataFrame(rows, schema=_SCHEMA))
            rows = []
    if rows:
        out.add("samples", pl.DataFrame(rows, schema=_SCHEMA))
    if dated:
        out.fact(worker, "log_time_zone", "assumed UTC")


def _samples(record: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(name, labels, value) of what a record tells; data parallel ranks are told apart."""
    rank = integer(record.get("attentionDpRank"))
    labels = "{}" if rank is None else f'{{"dp_rank":"{rank}"}}'
    batch, blocks = (record.get(key) for key in ("inflightBatchingStats", "kvCacheStats"))
    for place, names in ((record, _TOP), (batch, _BATCH), (blocks, _BLOCKS)):
        if isinstance(place, dict):
            for name in names:
                value = number(place.get(name))
                if value is not None:
                    yield name, labels, value
    if isinstance(blocks, dict):
        most, used = number(blocks.get("maxNumBlocks")), number(blocks.get("usedNumBlocks"))
        if most and used is not None:
            yield "kv_cache_usage_ratio", labels, used / most


def _instant(text: object) -> int | None:
    """`%m-%d-%Y %H:%M:%S.%f`, taken as UTC; None where it is none."""
    try:
        moment = datetime.strptime(str(text), "%m-%d-%Y %H:%M:%S.%f").replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(moment.timestamp()) * 1_000_000_000 + moment.microsecond * 1_000
