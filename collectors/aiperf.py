"""AIPerf: requests (profile_export.jsonl), scrapes (server_metrics_export.jsonl), its settings.

Source: ai-dynamo/aiperf 0.13.0 (also files of 2025 without credit and phase fields). Clock: wall,
nanoseconds; durations have a unit per value. x_request_id travels as X-Request-ID to the server.
inter_token_latency is one mean per request; the gaps are in inter_chunk_latency. Usage counts of
the server win over AIPerf's own tokenizer. profile_export_raw.jsonl repeats the same requests with
prompts and answers: not used.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from pdtrace.model import Head, Match, Sink, Source

from ._aiperf_requests import add_requests
from ._aiperf_samples import add_samples
from ._common import CUT_OFF, json_records

TITLE = "AIPerf (profile_export.jsonl and the other files of a run)"

_USELESS = (
    (r"inputs\.json$", rb'"session_id"\s*:.{0,200}"payloads"', "the prompts that AIPerf sent"),
    (r"profile_export_console\.txt$", rb"AIPerf \|", "a picture of profile_export_aiperf.json"),
    (
        r"profile_export.*\.csv$",
        rb"^Metric,avg,",
        "the same aggregates as profile_export_aiperf.json",
    ),
    (
        r"timeslices.*\.csv$",
        rb"^Timeslice,Start_NS,End_NS,",
        "aggregates per time slice; the requests have more",
    ),
    (
        r"timeslices.*\.json$",
        rb'"timeslices"\s*:\s*\[',
        "aggregates per time slice; the requests have more",
    ),
    (
        r"server_metrics_export\.csv$",
        rb"^# AIPerf Server Metrics",
        "aggregates of server_metrics_export.jsonl",
    ),
    (
        r"server_metrics_export\.json$",
        rb'"endpoints_configured"',
        "aggregates of server_metrics_export.jsonl",
    ),
    (r"server_metrics_export\.parquet$", rb"^PAR1", "aggregates of server_metrics_export.jsonl"),
    (
        r"gpu_telemetry_export",
        rb'"(?:dcgm_url|gpu_uuid|gpu_index)"',
        "GPU telemetry: not about requests",
    ),
    (r"\.aiperf_results_ready\.json$", rb'"ready"', "a marker file of AIPerf"),
    (r"aiperf.*\.log$|aiperf\.stdout", rb"aiperf|AIPerf", "AIPerf's own progress log"),
)
_SUMMARY = re.compile(rb'"aiperf_version"\s*:')
_LOG_LINE = re.compile(rb"^\d{2}:\d{2}:\d{2}\.\d{3} INFO +.*\(\w+\.py:\d+\)", re.MULTILINE)


def sniff(head: Head) -> Match | None:
    """By the keys of the first record, or by name and first words of the run's other files."""
    kind = _jsonl_kind(head.data)
    if kind == "requests":
        return Match("exact", "AIPerf requests (profile_export.jsonl)")
    if kind == "raw":
        return Match(
            "exact", ignore="the same requests as profile_export.jsonl, with prompts and answers"
        )
    if kind == "scrapes":
        return Match("exact", "AIPerf server metrics (scrapes)")
    for name, content, why in _USELESS:
        if re.search(name, head.name) and re.search(
            content, head.data[:8192], re.MULTILINE | re.DOTALL
        ):
            return Match("exact", ignore=why)
    if _LOG_LINE.search(head.data[:4096]) and b"AIPerf" in head.data[:4096]:
        return Match("exact", ignore="AIPerf's own progress log")
    if head.data.lstrip()[:1] == b"{" and _SUMMARY.search(head.data[:2048]):
        return Match(
            "exact", "AIPerf summary: its settings and totals (the requests have the values)"
        )
    return None


def _jsonl_kind(data: bytes) -> str | None:
    """Which of AIPerf's JSON-lines files this is, from the start of the first record."""
    start = data[:16_384]
    if start.startswith(b'{"metadata"') and re.search(
        rb'"(?:x_request_id|session_num|credit_issued_ns)"', start[:2048]
    ):
        if re.search(rb'"metrics"\s*:\s*\{', start):
            return "requests"
        return (
            "raw"
            if re.search(rb'"(?:payload|responses|start_perf_ns|request_headers)"', start)
            else "requests"
        )
    if start.startswith(b'{"endpoint_url"') and b'"timestamp_ns"' in start[:2048]:
        return "scrapes"
    return None


def read(source: Source, out: Sink) -> None:
    """Requests as client legs, scrapes as samples, the summary as facts."""
    with source.open() as stream:
        kind = _jsonl_kind(stream.read(16_384))
    if kind == "requests":
        out.unit("request")
        worker = out.worker(
            {"file": source.path}, role="client", role_basis="log", name="AIPerf", engine="AIPerf"
        )
        for ordinals, objects in json_records(source, out):
            add_requests(ordinals, objects, source.path, worker, out)
    elif kind == "scrapes":
        out.unit("scrape")
        workers: dict[str, str] = {}
        for ordinals, objects in json_records(source, out):
            add_samples(ordinals, objects, workers, out)
    else:
        _read_summary(source, out)


def _read_summary(source: Source, out: Sink) -> None:
    """Settings as facts, totals as samples at the run's end."""
    out.unit("document")
    out.read(1)
    with source.open() as stream:
        text = stream.read()
    try:
        summary = orjson.loads(text)
    except orjson.JSONDecodeError:
        out.skip(0, CUT_OFF)
        return
    for key, value in _settings(summary).items():
        out.fact(None, key, value)
    rows = [
        {
            "record": 0,
            "metric": f"aiperf:{tag}",
            "value": float(value["avg"]),
            "labels": orjson.dumps({"unit": value.get("unit")}).decode(),
        }
        for tag, value in summary.items()
        if isinstance(value, dict) and isinstance(value.get("avg"), int | float)
    ]
    if rows:
        out.add("samples", rows)
    else:
        out.skip(0, "no aggregates")


def _settings(summary: dict[str, Any]) -> dict[str, Any]:
    """Version, load and limits of the run; names as facts."""
    config = summary.get("input_config") or {}
    found: dict[str, Any] = {
        "client": "AIPerf " + str(summary.get("aiperf_version", "")),
        "client_cancelled": summary.get("was_cancelled"),
        "client_streaming": (config.get("endpoint") or {}).get("streaming"),
        "client_endpoint": (config.get("endpoint") or {}).get("type"),
    }
    models = ((config.get("models") or {}).get("items")) or []
    found["model"] = ", ".join(str(m.get("name")) for m in models if isinstance(m, dict)) or None
    for tag, limit in (config.get("slos") or {}).items():
        found[f"slo:{tag}"] = limit
    for phase in config.get("phases") or []:
        if isinstance(phase, dict) and phase.get("kind", "profiling") == "profiling":
            for key in ("type", "rate", "concurrency", "requests", "request_rate"):
                if phase.get(key) is not None:
                    found[f"load_{key}"] = phase[key]
    return {key: value for key, value in found.items() if value is not None}
