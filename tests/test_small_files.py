"""Many small files of spans: read at once, with the answer of the same spans in one file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pdtrace
from pdtrace import registry
from pdtrace.ingest import Options, ingest
from pdtrace.store import Store

N = 40
T0 = 1_764_500_000 * 10**9


def trace(n: int, **more: Any) -> dict[str, Any]:
    """A request of a vLLM as OTLP: known by its service name only."""
    start = T0 + n * 10**8
    latency = {"time_in_queue": 0.01, "time_to_first_token": 0.1 + n / 1000, "e2e": 1.0}
    attributes: dict[str, Any] = {
        "gen_ai.request.id": f"cmpl-{n}",
        "gen_ai.usage.prompt_tokens": 100 + n,
        "gen_ai.usage.completion_tokens": 20,
        **{f"gen_ai.latency.{name}": value for name, value in latency.items()},
        **more,
    }
    span = {
        "traceId": f"{n + 1:032x}", "spanId": f"{n + 1:016x}", "name": "llm_request", "kind": 2,
        "startTimeUnixNano": str(start), "endTimeUnixNano": str(start + 10**9),
        "attributes": [{"key": key, "value": value_of(value)} for key, value in attributes.items()],
    }  # fmt: skip
    service = {"key": "service.name", "value": {"stringValue": "vllm"}}
    scope = {"scope": {"name": "vllm.llm_engine"}, "spans": [span]}
    return {"resourceSpans": [{"resource": {"attributes": [service]}, "scopeSpans": [scope]}]}


def value_of(value: Any) -> dict[str, Any]:
    kinds = {str: "stringValue", float: "doubleValue", int: "intValue"}
    return {kinds[type(value)]: value}


def tables(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """What does not depend on which file a record stands in."""
    spans = "SELECT * EXCLUDE (source, record) FROM spans ORDER BY trace_id"
    requests = "SELECT * EXCLUDE (deployment, decode_worker, prefill_worker) FROM requests ORDER BY request"  # fmt: skip
    return {"spans": store.rows(spans), "requests": store.rows(requests)}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files that were read one by one."""
    otlp = registry.collectors()["otlp"]
    read, seen = otlp.read, list[str]()

    def noted(source: Any, out: Any) -> None:
        seen.append(Path(source.path).name)
        read(source, out)

    monkeypatch.setattr(otlp, "read", noted)
    yield seen


def test_one_trace_a_file_is_read_as_the_same_traces_in_one(tmp_path: Path, alone: list[str]) -> None:  # fmt: skip
    many, one = tmp_path / "many", tmp_path / "one"
    many.mkdir()
    one.mkdir()
    for n in range(N):
        (many / f"trace-{n:04x}.json").write_text(json.dumps(trace(n), indent=n % 2 or None))
    (one / "traces.jsonl").write_text("".join(json.dumps(trace(n)) + "\n" for n in range(N)))
    whole, parts = pdtrace.open(one).store, pdtrace.open(many).store
    assert alone == ["traces.jsonl"]
    assert tables(parts) == tables(whole)
    assert parts.rows("SELECT count(DISTINCT deployment), count(*) FROM requests") == [(1, N)]
    kept = "SELECT count(*), min(rows_kept), max(rows_read), min(record_unit), count(DISTINCT sha256) FROM sources"
    assert parts.rows(kept) == [(N, 1, 1, "span", N)]
    assert parts.rows("SELECT count(DISTINCT source), max(record) FROM spans") == [(N, 0)]


def test_files_that_are_not_just_spans_are_read_alone(tmp_path: Path, alone: list[str]) -> None:
    """A cut file, one with log records, one of protobuf and one compressed, among others."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for n in range(5):
        (tmp_path / f"{n}.json").write_text(json.dumps(trace(n)))
    text = json.dumps(trace(5)) + "\n" + json.dumps(trace(6))
    (tmp_path / "cut.json").write_text(text[:-20])
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"timeUnixNano": str(T0), "body": {"stringValue": "x"}}]}]}]}  # fmt: skip
    (tmp_path / "logs.json").write_text(json.dumps(logs))
    message = ExportTraceServiceRequest()
    span = message.resource_spans.add().scope_spans.add().spans.add()
    span.trace_id, span.span_id, span.name = b"p" * 16, b"p" * 8, "work"
    span.start_time_unix_nano = span.end_time_unix_nano = T0
    (tmp_path / "one.pb").write_bytes(message.SerializeToString())
    (tmp_path / "z.json.gz").write_bytes(gzip.compress(json.dumps(trace(7)).encode()))
    store = pdtrace.open(tmp_path).store
    assert sorted(alone) == ["cut.json", "logs.json"]
    read = dict(store.rows("SELECT regexp_extract(path, '[^/]+$'), rows_kept FROM sources"))
    assert read == {**{f"{n}.json": 1 for n in range(5)}, "cut.json": 1, "logs.json": 0, "one.pb": 1, "z.json.gz": 1}  # fmt: skip


def test_a_file_given_twice_counts_once_and_content_is_withheld(tmp_path: Path) -> None:
    secret = {"gen_ai.prompt": "tell me a secret"}
    for name, n in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / f"{name}.json").write_text(json.dumps(trace(n, **secret)))
    store = pdtrace.open(tmp_path).store
    assert store.count("spans") == store.count("requests") == 2
    assert store.rows("SELECT why FROM sources WHERE path LIKE '%b.json'")[0][0].startswith("dup")
    assert not store.rows("SELECT 1 FROM spans WHERE spans::VARCHAR LIKE '%secret%'")


def test_where_reading_at_once_breaks_down_each_is_read_alone(
    tmp_path: Path, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after rows were stored: they are taken back, so that nothing counts twice."""
    otlp = registry.collectors()["otlp"]
    together = otlp.read_together

    def broken(files: Any) -> list[int]:
        together(files)
        raise RuntimeError("broken")

    monkeypatch.setattr(otlp, "read_together", broken)
    for n in range(5):
        (tmp_path / f"{n}.json").write_text(json.dumps(trace(n)))
    store = pdtrace.open(tmp_path).store
    assert sorted(alone) == [f"{n}.json" for n in range(5)]
    assert store.rows("SELECT sum(rows_read), sum(rows_kept) FROM sources") == [(5, 5)]
    assert store.count("requests") == 5


def test_a_file_alone_is_hashed_where_somebody_may_look_and_several_always(tmp_path: Path) -> None:
    for n in range(2):
        (tmp_path / f"{n}.json").write_text(json.dumps(trace(n)))
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    told = "SELECT count(sha256), count(*), sum(bytes) FROM sources"
    for given, hashed, expected in ((paths[:1], True, 1), (paths[:1], False, 0), (paths, False, 2)):
        store = Store()
        ingest(given, store, Options(hashed=hashed))
        size = sum(Path(path).stat().st_size for path in given)
        assert store.rows(told) == [(expected, len(given), size)]
