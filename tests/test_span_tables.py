"""One row is a span: read as spans where start and length are known, and never as requests."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import pdtrace
from pdtrace import registry
from pdtrace.collectors import span_tables
from pdtrace.model import Head

Collect = Callable[..., Any]
START = 1_748_779_200_000_000_123  # 2025-06-01 12:00:00 UTC
TAGS = {
    "gen_ai.request.id": "chatcmpl-1", "gen_ai.usage.prompt_tokens": 700, "gen_ai.usage.completion_tokens": 11,
    "gen_ai.latency.e2e": 1.25, "gen_ai.latency.time_to_first_token": 0.25, "gen_ai.latency.time_in_queue": 0.05,
    "gen_ai.latency.time_in_model_prefill": 0.18, "gen_ai.latency.time_in_model_decode": 1.0,
}  # fmt: skip
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7"


def at(ns: int) -> str:
    return (
        datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S") + f".{ns % 10**9:09}"
    )


def clickhouse() -> dict[str, Any]:
    return {
        "Timestamp": at(START), "TraceId": TRACE, "SpanId": SPAN, "ParentSpanId": "", "TraceState": "", "SpanName": "llm_request",
        "SpanKind": "Server", "ServiceName": "chat", "ResourceAttributes": {"service.instance.id": "pod-a"},
        "ScopeName": "vllm.llm_engine", "SpanAttributes": {k: str(v) for k, v in TAGS.items()}, "Duration": 1_260_000_000,
        "StatusCode": "Unset", "StatusMessage": "", "Events.Timestamp": [], "Events.Name": [],
    }  # fmt: skip


def honeycomb() -> dict[str, Any]:
    return {
        "Timestamp": at(START), "trace.trace_id": TRACE, "trace.span_id": SPAN, "name": "llm_request", "duration_ms": 1260,
        "service.name": "chat", "library.name": "vllm.llm_engine", "span.kind": "server", **TAGS,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def matches(data: bytes) -> list[tuple[str, Any]]:
    return registry.sniff(Head("x", "x", data, complete=True))


@pytest.mark.parametrize("make", [clickhouse, honeycomb])
@pytest.mark.parametrize("form", ["lines", "array", "csv"])
def test_a_row_is_its_span_in_every_form(
    collect: Collect, tmp_path: Path, make: Callable[[], dict[str, Any]], form: str
) -> None:
    rows = [make()]
    text = json.dumps(rows) if form == "array" else json.dumps(rows[0]) + "\n"
    path = tmp_path / "spans"
    path.write_text(table(rows) if form == "csv" else text)
    assert matches(path.read_bytes())[0][0] == "span_tables"
    span = collect(span_tables, path)["spans"].row(0, named=True)
    assert (span["trace_id"], span["span_id"], span["parent_span_id"]) == (TRACE, SPAN, None)
    assert (span["start_ns"], span["end_ns"]) == (START, START + 1_260_000_000)
    assert (span["name"], span["kind"], span["scope_name"]) == (
        "llm_request",
        "server",
        "vllm.llm_engine",
    )
    ints = dict(zip(span["int_keys"].split(chr(31)), span["int_values"], strict=True))
    assert ints["gen_ai.usage.prompt_tokens"] == 700


def test_vllms_span_in_a_table_is_the_same_request(tmp_path: Path) -> None:
    (tmp_path / "spans").write_text(json.dumps(clickhouse()) + "\n")
    request = pdtrace.open(tmp_path / "spans").requests().row(0, named=True)
    assert (request["ttft_ms"], request["prompt_tokens"], request["output_tokens"]) == (
        250,
        700,
        11,
    )


def phoenix() -> list[dict[str, Any]]:
    """A chain and the model call in it, as Phoenix' data frame holds them: gaps make counts floats."""
    common = {
        "parent_id": None,
        "start_time": datetime.fromtimestamp(START // 10**9, UTC),
        "context.trace_id": TRACE,
    }
    end = datetime.fromtimestamp(START // 10**9 + 2, UTC)
    return [
        common | {"name": "chain", "span_kind": "CHAIN", "end_time": end, "context.span_id": "a" * 16, "attributes.llm.token_count.prompt": float("nan")},
        common | {"name": "model", "span_kind": "LLM", "end_time": end, "context.span_id": "b" * 16, "parent_id": "a" * 16, "attributes.llm.token_count.prompt": 700.0},
    ]  # fmt: skip


def test_of_phoenix_only_model_calls_are_requests(tmp_path: Path) -> None:
    pl.DataFrame(phoenix(), strict=False).write_parquet(tmp_path / "spans.parquet")
    requests = pdtrace.open(tmp_path / "spans.parquet").requests()
    assert requests.select("prompt_tokens", "e2e_ms").rows() == [(700, 2000)]


def test_a_long_parquet_of_spans_is_no_table_of_requests(collect: Collect, tmp_path: Path) -> None:
    """Its names stand behind the first 64 KiB."""
    from pdtrace.collectors import table as requests

    rows = [
        clickhouse() | {"SpanId": f"{n:016x}", "StatusMessage": f"{n * 7919:064d}"}
        for n in range(1, 3000)
    ]
    path = tmp_path / "long.parquet"
    pl.DataFrame(rows).write_parquet(path, compression="uncompressed")
    assert path.stat().st_size > 64 << 10
    found = collect(requests, path)
    assert (found["spans"].height, found["legs"].height, found.account.read) == (2999, 0, 2999)


@pytest.mark.parametrize(
    "text",
    [
        "Date,Service,Resource,Duration,Trace ID\n2025-06-01T12:00:00Z,vllm,llm_request,1260000000,0af7651916cd43dd\n",
        'timestamp [UTC],id,type,name,success,duration,operation_Id\n"6/1/2025, 12:00:00.000 PM",1,GenAI,llm_request,True,1260,a\n',
        json.dumps({"traces": [{"traceID": "a1", "rootServiceName": "chat", "rootTraceName": "llm_request", "durationMs": 9}]}),
    ],
)  # fmt: skip
def test_lists_of_traces_are_named_and_not_read_as_requests(text: str) -> None:
    name, match = matches(text.encode())[0]
    assert name == "span_tables"
    assert "no requests" in match.ignore


def test_a_clients_log_with_trace_ids_stays_a_table_of_requests() -> None:
    text = "trace_id,span_id,ttft_ms,total_ms,output_tokens\n0af7,00f0,250,1250,11\n0af8,00f1,260,1260,12\n"
    assert [name for name, _ in matches(text.encode())] == ["table"]
    assert (
        span_tables.sniff(Head("x", "x", b"name,trace_id,ttft_ms\na,b,3\n", complete=True)) is None
    )


@pytest.mark.parametrize(
    ("key", "value"), [("openinference.span.kind", "LLM"), ("llm.request.type", "chat")]
)
def test_model_calls_in_the_words_of_other_conventions_are_requests(
    tmp_path: Path, key: str, value: str
) -> None:
    row = {
        "Timestamp": at(START), "TraceId": TRACE, "SpanId": SPAN, "SpanName": "ask", "SpanKind": "Client", "ServiceName": "app",
        "Duration": 10**9, "SpanAttributes": {key: value, "llm.usage.completion_tokens": "11"},
    }  # fmt: skip
    (tmp_path / "spans").write_text(json.dumps(row) + "\n")
    request = pdtrace.open(tmp_path / "spans").requests().row(0, named=True)
    assert (request["e2e_ms"], request["output_tokens"]) == (1000, 11)


def many(count: int) -> list[dict[str, Any]]:
    return [
        {**clickhouse(), "SpanId": f"{n:016x}", "TraceId": f"{n:032x}"} for n in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("text", "kept", "skipped"),
    [
        (json.dumps({"data": many(3)}), 3, 0),
        (json.dumps({"rows": many(3)}, indent=1), 3, 0),
        (json.dumps([*many(3), 5, "x"]), 3, 2),
        (json.dumps(many(3))[:-60], 2, 1),
        ("\n".join([*map(json.dumps, many(3)), '{"TraceId": broken', "[1]"]), 3, 2),
        ("\n".join(json.dumps({**row, "Timestamp": 9.9e19}) for row in many(3)), 3, 0),
        ("\n".join(json.dumps({**row, "Duration": 1e300}) for row in many(3)), 3, 0),
    ],
    ids=["wrapped", "indented", "not rows", "cut off", "damaged lines", "stamp", "duration"],
)
def test_what_is_damaged_is_counted_and_costs_no_other_row(
    tmp_path: Path, text: str, kept: int, skipped: int
) -> None:
    path = tmp_path / "spans.json"
    path.write_text(text)
    with pdtrace.open(str(path)) as trace:
        rows = trace.sql(
            "SELECT rows_kept, rows_skipped, starts_with(why, 'table of spans') FROM sources"
        ).rows()
    assert rows == [(kept, skipped, True)]


def test_the_limit_of_csv_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "spans.csv"
    row = clickhouse() | {"SpanAttributes": json.dumps({k: str(v) for k, v in TAGS.items()})}
    path.write_text(table([row]))
    before = csv.field_size_limit()
    with pdtrace.open(str(path)) as trace:
        assert trace.sql("SELECT count(*) AS n FROM requests")["n"][0] == 1
    assert csv.field_size_limit() == before
