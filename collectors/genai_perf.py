"""GenAI-Perf and Perf Analyzer: profile_export.json, one request with the instants of its responses.

Source: triton-inference-server/perf_analyzer 2.59, src/profile_data_exporter.cc (layout) and
genai-perf/genai_perf/profile_data_parser/llm_profile_data_parser.py (which responses hold tokens).
Clock: system_clock of the client, nanoseconds since the epoch. Token counts are not in the file
(GenAI-Perf tokenises the texts anew) unless the server's usage is. Prompts and answers are looked
at, never stored. The tool's other files hold aggregates of this one.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import polars as pl

from pdtrace.model import WALL, Head, Match, Sink, Source

from ._common import NOT_AN_OBJECT, integer, whole_document
from ._genai_perf_responses import Answer, answer_of

TITLE = "GenAI-Perf, Perf Analyzer (profile_export.json)"
NO_START = "no timestamp"
TTFT = "client: first response with text - request sent"
_START = re.compile(rb'^\s*\{\s*"experiments"\s*:\s*\[\s*\{\s*"experiment"\s*:')
_KEYS = (rb'"requests"', rb'"response_timestamps"')


def sniff(head: Head) -> Match | None:
    """By the keys that the exporter writes first; aggregates by their name and settings."""
    if _START.match(head.data) and (all(key in head.data for key in _KEYS) or not head.complete):
        return Match("exact", "GenAI-Perf requests (profile_export.json)")
    if re.search(r"genai_perf\.(?:json|csv)$", head.name) and (
        b'"input_config"' in head.data or head.data.startswith(b"Metric,avg")
    ):
        return Match(
            "exact", ignore="aggregates of GenAI-Perf; profile_export.json has the requests"
        )
    return None


def read(source: Source, out: Sink) -> None:
    """Every request of every experiment (load level) as a client leg with its stream."""
    out.unit("request")
    document = whole_document(source, out)
    if document is None:
        return
    first = 0
    experiments = document.get("experiments") if isinstance(document, dict) else None
    if not experiments:
        out.read(1)
        out.skip(0, NOT_AN_OBJECT if not isinstance(document, dict) else "no experiment")
        return
    for number, experiment in enumerate(experiments):
        first += _read_experiment(source, document, experiment, number, first, out)


def _read_experiment(
    source: Source, document: dict[str, Any], experiment: Any, number: int, first: int, out: Sink
) -> int:
    """One load level; it is a client of its own, so that two loads are never pooled."""
    requests = experiment.get("requests") if isinstance(experiment, dict) else None
    if not isinstance(requests, list):
        return 0
    name = source.path if number == 0 else f"{source.path}#{number}"
    worker = out.worker({"file": name}, role="client", role_basis="log", name="GenAI-Perf", engine="perf_analyzer")  # fmt: skip
    _facts(document, experiment, worker, out)
    out.read(len(requests))
    rows, streams, missing = [], [], []
    for place, request in enumerate(requests):
        start = integer(request.get("timestamp")) if isinstance(request, dict) else None
        if start is None:
            missing.append(first + place)
            continue
        # One answer is a handful of short texts; whole columns would have to parse them one by one too.
        answer = answer_of(request)
        leg = f"{source.path}#{first + place}"
        rows.append(_leg(leg, first + place, start, answer, worker))
        if len(answer.times_ns) > 1:
            streams.append(_stream(leg, answer))
    if missing:
        out.skip(missing, NO_START)
    if rows:
        out.add("legs", pl.DataFrame(rows, infer_schema_length=None))
    if streams:
        out.add(
            "streams",
            pl.DataFrame(streams, schema_overrides={"gaps_us": pl.List(pl.Int32)}),
            record=None,
        )
    return len(requests)


def _facts(document: dict[str, Any], experiment: dict[str, Any], worker: str, out: Sink) -> None:
    load = experiment.get("experiment") or {}
    key = {"concurrency": "max_concurrency", "request_rate": "request_rate"}.get(
        str(load.get("mode"))
    )
    if key is not None:
        out.fact(worker, key, load.get("value"))
    for name, fact in (("service_kind", "client_service"), ("endpoint", "client_endpoint"), ("version", "client_version")):  # fmt: skip
        if document.get(name):
            out.fact(worker, fact, document[name])


def _leg(leg: str, record: int, start: int, answer: Answer, worker: str) -> dict[str, Any]:
    first = answer.times_ns[0] if answer.streaming and answer.times_ns else None
    last = answer.times_ns[-1] if first is not None else None
    pace = None
    if first is not None and last is not None and (answer.output_tokens or 0) > 1:
        pace = (last - first) / 1e6 / (answer.output_tokens - 1)  # type: ignore[operator]
    return {
        "leg": leg, "record": record, "worker": worker, "observer": "client", "role": "client",
        "role_basis": "log", "container": False, "clock": WALL, "resolution_ns": 1,
        "request_id": answer.request_id,
        "external_id": re.sub("^(?:chatcmpl|cmpl)-", "", answer.request_id) if answer.request_id else None,
        "session": answer.session, "model": answer.model, "streaming": answer.streaming,
        "max_tokens": answer.max_tokens, "start_ns": start, "first_token_ns": first,
        "last_token_ns": last, "end_ns": answer.end_ns,
        "ttft_ms": None if first is None else (first - start) / 1e6,
        "e2e_ms": None if answer.end_ns is None else (answer.end_ns - start) / 1e6,
        "tpot_ms": pace,
        "ttft_definition": None if first is None else TTFT,
        "prompt_tokens": answer.prompt_tokens, "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens, "status": answer.status,
        "finish_reason": answer.finish_reason, "error": answer.error,
    }  # fmt: skip


def _stream(leg: str, answer: Answer) -> dict[str, Any]:
    times = answer.times_ns
    return {
        "leg": leg, "stream": 0, "first_ns": times[0], "emission": "chunk", "clock": WALL,
        "observer": "client",
        "gaps_us": [(b - a) // 1000 for a, b in pairwise(times)],
    }  # fmt: skip
