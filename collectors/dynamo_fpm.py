"""NVIDIA Dynamo's forward-pass metrics (DYN_FPM_TRACE=1): engine steps without request ids.

Source: ai-dynamo/dynamo lib/llm/src/fpm_trace, 1.6.1 (mocker, vLLM, SGLang, TensorRT-LLM); files
`<prefix>.<worker id>.NNNNNN.jsonl.gz`. Clock: wall, milliseconds, stamped at the end of the step;
a step is [observed - wall_time, observed].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from pdtrace.model import Head, Match, Sink, Source

from ._common import integer, json_records, number, seconds_to_ns
from ._dynamo_names import ENGINE
from ._dynamo_schema import carries_schema, event_of

TITLE = "NVIDIA Dynamo"
SCHEMA = "dynamo.fpm.trace.v1"
MS = 1_000_000

REASON_IDLE = "idle heartbeat"
REASON_OTHER = "no forward-pass record"

_STEP_SCHEMA = {
    "record": pl.Int64, "worker": pl.String, "rank": pl.String, "seq": pl.Int64,
    "elapsed_ns": pl.Int64,
    "start_ns": pl.Int64, "start_lower_ns": pl.Int64, "start_upper_ns": pl.Int64,
    "prefill_requests": pl.Int64, "prefill_tokens": pl.Int64, "prefill_kv_tokens": pl.Int64,
    "decode_requests": pl.Int64, "decode_kv_tokens": pl.Int64, "waiting": pl.Int64,
    "queued_prefill_tokens": pl.Int64, "capture": pl.String,
}  # fmt: skip


def sniff(head: Head) -> Match | None:
    """JSON lines that name the schema."""
    what = "Dynamo forward-pass metrics (engine steps)"
    return Match("exact", what) if carries_schema(head, SCHEMA) else None


def read(source: Source, out: Sink) -> None:
    """Engine steps; heartbeats of an idle engine are skipped, since nothing ran and nothing
    waited."""
    out.unit("record")
    workers: dict[str, str | None] = {}
    for ordinals, objects in json_records(source, out):
        rows = []
        for ordinal, record in zip(ordinals, objects, strict=True):
            event = event_of(record, SCHEMA) or {}
            fpm = event.get("fpm")
            if not isinstance(fpm, dict):
                out.skip(ordinal, REASON_OTHER)
                continue
            row = _step(ordinal, event, fpm)
            if _is_idle(row):
                out.skip(ordinal, REASON_IDLE)
            else:
                rows.append(row)
            workers.setdefault(row["worker"], (event.get("source") or {}).get("component"))
        if rows:
            out.add("steps", pl.DataFrame(rows, schema=_STEP_SCHEMA))
    for worker, component in sorted(workers.items()):
        _declare(worker, component, out)


def _step(ordinal: int, event: Mapping[str, Any], fpm: Mapping[str, Any]) -> dict[str, Any]:
    """One row of `steps`. Who is resident is not said: running stays unknown."""
    scheduled = fpm.get("scheduled_requests") or {}
    queued = fpm.get("queued_requests") or {}
    waiting = [integer(queued.get(key)) for key in ("num_prefill_requests", "num_decode_requests")]
    observed = integer(event.get("observed_at_unix_ms"))
    elapsed = seconds_to_ns(fpm.get("wall_time"))
    start = None if observed is None or elapsed is None else integer(observed * MS - elapsed)
    worker_id = fpm.get("worker_id") or (event.get("source") or {}).get("producer_id")
    rank = fpm.get("dp_rank")
    return {
        "record": ordinal,
        "worker": f"worker_id:{worker_id}",
        "rank": None if rank is None else str(rank),
        "seq": integer(fpm.get("counter_id")),
        "elapsed_ns": elapsed,
        "start_ns": start,
        "start_lower_ns": None if start is None else start - MS,
        "start_upper_ns": None if start is None else start + MS,
        "prefill_requests": integer(scheduled.get("num_prefill_requests")),
        "prefill_tokens": integer(scheduled.get("sum_prefill_tokens")),
        "prefill_kv_tokens": integer(scheduled.get("sum_prefill_kv_tokens")),
        "decode_requests": integer(scheduled.get("num_decode_requests")),
        "decode_kv_tokens": integer(scheduled.get("sum_decode_kv_tokens")),
        "waiting": None if None in waiting else integer(sum(n for n in waiting if n is not None)),
        "queued_prefill_tokens": integer(queued.get("sum_prefill_tokens")),
        "capture": _capture(event.get("capture_mode")),
    }


def _capture(mode: object) -> str | None:
    """full or sampled; unheard modes stay unknown."""
    word = str(mode or "").lower()
    return word if word in ("full", "sampled") else None


def _is_idle(row: Mapping[str, Any]) -> bool:
    counts = ("prefill_requests", "decode_requests", "waiting")
    return not number(row["elapsed_ns"]) and not any(row[name] for name in counts)


def _declare(worker: str, component: str | None, out: Sink) -> None:
    """The worker instance; component "backend" says neither decode nor aggregated."""
    role = component if component in ("prefill", "decode") else None
    out.worker(
        {"worker_id": worker.partition(":")[2]},
        role=role,
        role_basis="log" if role else None,
        engine=ENGINE,
    )
