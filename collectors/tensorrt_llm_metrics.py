"""TensorRT-LLM's request metrics (return_perf_metrics): what /perf_metrics answers, and the files of 1.3.

Source: NVIDIA/TensorRT-LLM tensorrt_llm/serve/perf_metrics.py and openai_server.py, 2025-09 to 2026-08: a JSON array
of one poll (emptied by reading), several polls in one file, or JSON lines (perf_metrics_output_dir). Clock: steady,
without a date; a router's record is on the router's clock, where the offsets that it measured at start hold.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from pdtrace.model import Head, Match, Sink, Source

from ._trtllm_json import polled
from ._trtllm_records import Pair, Side, pair_of, side_of
from ._trtllm_rows import ENGINE, Rows, shared_id

TITLE = ENGINE

SWITCHES = {
    "queue_wait": "return_perf_metrics: true in the server's YAML, then GET /perf_metrics (perf_metrics_output_dir in 1.3)",
    "prefill_time": "return_perf_metrics: true in the server's YAML, then GET /perf_metrics",
    "decode_time": "return_perf_metrics: true in the server's YAML, then GET /perf_metrics",
    "first_token": "return_perf_metrics: true in the server's YAML, then GET /perf_metrics",
    "kv_transfer": "return_perf_metrics: true for the disaggregated server and both kinds of workers, then GET its /perf_metrics",
    "kv_transfer_bytes": "GET /perf_metrics of the generation servers themselves: what reaches the router through headers has no size",
    "router_time": "return_perf_metrics: true in the disaggregated server's YAML, then GET its /perf_metrics",
    "token_times": "num_postprocess_workers: 0 beside return_perf_metrics (time_breakdown_metrics, since 1.2), or a client that logs every chunk",
    "input_tokens": "trtllm-serve --otlp_traces_endpoint URL, or ask for usage in the answers (stream_options.include_usage): request metrics count blocks only",
    "output_tokens": "trtllm-serve --otlp_traces_endpoint URL, or ask for usage in the answers (stream_options.include_usage)",
    "engine_steps": "print_iter_log: true in the server's YAML, and keep its log",
    "engine_counters": "GET /prometheus/metrics once a second, or enable_iter_perf_stats: true and GET /metrics",
    "kv_usage": "enable_iter_perf_stats: true and GET /metrics once a second, or GET /prometheus/metrics",
    "cached_tokens": "ask the server for cached tokens in usage.prompt_tokens_details",
    "arrival_time": "trtllm-serve --otlp_traces_endpoint URL: the clock of request metrics has no date",
    "client_view": "a client-side log, or AIPerf's per-request file",
}

REASON_OTHER = "JSON, but no record of a request"
REASON_EMPTY = "record without any time"
_PART = 20_000  # records whose rows are held at once

_NAMES = re.compile(
    rb'"(?:ctx_|gen_)?perf_metrics"\s*:[\s\S]{0,2000}?"(?:timing_metrics|kv_cache_metrics|first_iter)"'
    rb'|"disagg_server_arrival_time"\s*:'
)
_FILE = re.compile(r"perf_metrics-(?:server|ctx|gen)-(?P<host>.+)-\d+-\d{8}T\d{6}Z\b")


def sniff(head: Head) -> Match | None:
    """The keys that only these records have."""
    return Match("exact", "TensorRT-LLM request metrics") if _NAMES.search(head.data) else None


def read(source: Source, out: Sink) -> None:
    """Legs of router and workers, their phases, KV transfers and token times."""
    out.unit("request")
    rows = Rows(source.path, source.name)
    out.clock(rows.clock)
    # A benchmark of generation servers alone calls every request 1. Which ids repeat and whose clock is apart, all records say together: the file is read twice.
    halves: Counter[str] = Counter()
    apart: set[str | None] = set()
    for _, told in _told(source, _Unheard()):
        if isinstance(told, Pair):
            apart |= _apart(told)
            halves[f"pair/{shared_id(told)}"] += 1
        elif name := _half(told):
            halves[name] += 1
    router = worker = None
    named = _FILE.search(source.name)  # since 1.3 the file says where it was written
    host = named["host"] if named else None
    roles: set[str] = set()
    servers: set[tuple[str, str]] = set()
    for place, (record, told) in enumerate(_told(source, out), 1):
        if isinstance(told, Pair):
            router = router or out.worker(
                {"file": source.path}, role="router", role_basis="log", engine=ENGINE, name=f"disaggregated server, {source.name}"
            )  # fmt: skip
            known = halves[f"pair/{shared_id(told)}"] == 1
            rows.pair(record, told, router, apart, ids=known)
            servers |= _servers(told)
        else:
            worker = worker or out.worker(
                {"file": source.path}, engine=ENGINE, host=host, name=source.name
            )
            known = halves[_half(told) or ""] == 1
            if role := rows.side(record, told, worker, ids=known):
                roles.add(role)
        if place % _PART == 0:
            rows.flush(out)
    rows.flush(out)
    if worker is not None and len(roles) == 1:
        out.worker({"file": source.path}, role=roles.pop(), role_basis="log", engine=ENGINE)
    for server, role in sorted(servers):
        out.worker({"address": server}, role=role, role_basis="log", engine=ENGINE, name=server)
    for server in sorted(filter(None, apart)):
        out.add("events", [{
            "worker": f"address:{server}", "kind": "warning", "severity": "warning",
            "detail": "its clock was not aligned with the router's: only durations of its requests are used",
        }], record=None)  # fmt: skip


class _Unheard:
    """A sink for the first of two readings: what it counts is counted in the second."""

    def read(self, n: int) -> None:
        """Nothing."""

    def skip(self, record: int | Sequence[int], reason: str, excerpt: str | None = None) -> None:
        """Nothing."""


def _told(source: Source, out: Sink | _Unheard) -> Iterator[tuple[int, Pair | Side]]:
    """Records with their ordinals. One by one: they are nested, and no two versions have the same fields."""
    for record, (value, damaged) in enumerate(polled(source)):
        out.read(1)
        told = (pair_of(value) or side_of(value)) if isinstance(value, dict) else None
        if told is None:
            out.skip(record, damaged or REASON_OTHER)
        elif not _timed(told):
            out.skip(record, REASON_EMPTY)
        else:
            yield record, told


def _timed(told: Pair | Side) -> bool:
    if isinstance(told, Side):
        return told.start is not None
    return told.arrival is not None or told.ctx is not None or told.gen is not None


def _half(side: Side) -> str | None:
    """Id and half of a request that two workers share."""
    shared = side.disagg_request or side.ctx_request
    return f"{side.half()}/{shared}" if shared else None


def _apart(pair: Pair) -> set[str | None]:
    """Servers whose stamps cannot be on the router's clock: one request is enough, an offset holds for all."""
    return {pair.ctx_server if half == "ctx" else pair.gen_server for half in pair.apart()}


def _servers(pair: Pair) -> set[tuple[str, str]]:
    """The workers that a router names."""
    named = ((pair.ctx_server, "prefill"), (pair.gen_server, "decode"))
    return {(server, role) for server, role in named if server}
