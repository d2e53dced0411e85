"""OTLP in all its spellings gives the same rows, loses nothing but content, and survives damage."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from pdtrace import spans as span_sql
from pdtrace.collectors import _otlp_decoders, _otlp_json, _otlp_wire, otlp
from pdtrace.collectors._common import rfc3339_to_ns
from pdtrace.model import Head
from pdtrace.store import Store

FIXTURES = Path(__file__).parent / "fixtures" / "otlp"
TRACE, SPAN, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"
START, END = 1_790_000_000_000_000_001, 1_790_000_000_500_000_002


class Bytes:
    """A source of given bytes."""

    path, name, number, mtime_ns = "given", "given", 0, None

    def __init__(self, data: bytes, keep_content: bool = False) -> None:
        self.data, self.keep_content = data, keep_content

    def open(self) -> io.BytesIO:
        return io.BytesIO(self.data)


class Rows:
    """A sink that puts everything into a store and remembers the rest."""

    def __init__(self) -> None:
        self.store = Store()
        self.units: list[str] = []
        self.count = 0
        self.skipped: list[tuple[int, str]] = []
        self.facts: dict[str, Any] = {}
        self.logs: list[dict[str, Any]] = []
        self.resources: list[dict[str, str | None]] = []

    def unit(self, name: str) -> None:
        self.units.append(name)

    def read(self, n: int) -> None:
        self.count += n

    def add(self, table: str, batch: Any, *, record: str | None = "record") -> None:
        if table == "log_records":
            self.logs.extend(batch)
        else:
            self.store.append(table, batch)

    def skip(self, record: int | list[int], reason: str, excerpt: str | None = None) -> None:
        self.skipped += [(r, reason) for r in ([record] if isinstance(record, int) else record)]

    def fact(self, worker: str | None, key: str, value: object) -> None:
        self.facts[key] = value

    def worker(self, aliases: dict[str, str | None], **_: object) -> str:
        self.resources.append(aliases)
        return f"instance:{aliases['instance']}"

    def frame(self, table: str = "spans", columns: str = "*") -> pl.DataFrame:
        return self.store.sql(f"SELECT {columns} FROM {table} ORDER BY ALL")

    def attribute(self, key: str, kind: type = str) -> list[Any]:
        sql = span_sql.attribute_sql(key, kind)
        return self.store.sql(f"SELECT {sql} AS v FROM spans ORDER BY record")["v"].to_list()


class Nothing:
    """A sink that forgets."""

    def __getattr__(self, _: str) -> Callable[..., int]:
        return lambda *_, **__: 0


def survive(data: bytes) -> None:
    otlp.read(Bytes(data), Nothing())  # type: ignore[arg-type]


def read(data: bytes, **options: Any) -> Rows:
    out = Rows()
    otlp.read(Bytes(data, **options), out)  # type: ignore[arg-type]
    return out


def span(**changes: Any) -> dict[str, Any]:
    return {
        "traceId": TRACE, "spanId": SPAN, "parentSpanId": PARENT, "name": "llm_request", "kind": 2,
        "startTimeUnixNano": str(START), "endTimeUnixNano": str(END), **changes,
    }  # fmt: skip


def request(
    *spans: dict[str, Any], resource: dict[str, Any] | None = None, **scope: Any
) -> dict[str, Any]:
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": attributes(resource or {"service.name": "engine"})},
                "scopeSpans": [
                    {"scope": {"name": "lib", "version": "2", **scope}, "spans": list(spans)}
                ],
            }
        ]
    }


def attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": any_value(value)} for key, value in values.items()]


def any_value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, bytes):
        return {"bytesValue": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return {"arrayValue": {"values": [any_value(v) for v in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": attributes(value)}}
    return {} if value is None else {"stringValue": value}


def lines(*requests: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in requests)


_CLASSES = {
    "resourceSpans": trace_pb2.TracesData,
    "resourceLogs": logs_pb2.LogsData,
    "resourceMetrics": metrics_pb2.MetricsData,
}


def message(value: dict[str, Any]) -> bytes:
    """An OTLP/JSON request as protobuf (ids are hexadecimal there, base64 in protobuf's own mapping)."""
    from google.protobuf import json_format

    def ids(node: Any) -> Any:
        if isinstance(node, dict):
            return {
                k: base64.b64encode(bytes.fromhex(v)).decode()
                if k in ("traceId", "spanId", "parentSpanId")
                else ids(v)
                for k, v in node.items()
            }
        return [ids(v) for v in node] if isinstance(node, list) else node

    return json_format.ParseDict(ids(value), _CLASSES[next(iter(value))]()).SerializeToString()


def framed(*requests: dict[str, Any]) -> bytes:
    return b"".join(struct.pack(">I", len(m)) + m for m in map(message, requests))


EVERY_TYPE = {
    "text": "héllo \"q\"\n", "empty text": "", "whole": -7, "big": 2**62, "real": 0.1, "whole real": 3.0, "yes": True, "no": False,
    "list": ["stop", "length"], "mixed": ["a", 1, 2.5, False], "nested": [[1, 2], {"a": [None]}], "map": {"b": 1, "a": {"c": "d"}},
    "raw": b"\x00\xff", "nothing": None, "empty list": [], "empty map": {},
}  # fmt: skip

ONE = request(
    span(
        attributes=attributes(EVERY_TYPE),
        events=[
            {"timeUnixNano": str(START + 5), "name": "first_token", "attributes": attributes({"n": 1, "t": "x\"y", "f": 1.0})},
            {"timeUnixNano": str(START + 9), "name": "finish", "droppedAttributesCount": 2},
        ],
        links=[{"traceId": "ab" * 16, "spanId": "cd" * 8, "flags": 256, "traceState": "k=v", "attributes": attributes({"why": "retry"})}],
        status={"code": 2, "message": "boom"},
        traceState="a=b",
        flags=257,
        droppedEventsCount=3,
    ),
    span(spanId="01" * 8, parentSpanId="", endTimeUnixNano="0", kind=0, attributes=[]),
    attributes=attributes({"scope attribute": 1}),
)  # fmt: skip


def check_one(out: Rows) -> None:
    rows = out.frame().sort("record")
    assert out.units == ["span"]
    assert out.count == 2
    assert out.skipped == []
    first, second = rows.rows(named=True)
    assert (first["trace_id"], first["span_id"], first["parent_span_id"]) == (TRACE, SPAN, PARENT)
    assert (first["start_ns"], first["end_ns"]) == (START, END)
    assert (first["kind"], first["status_code"], first["status_message"]) == (
        "server",
        "error",
        "boom",
    )
    assert (first["trace_state"], first["flags"], first["scope_name"], first["scope_version"]) == (
        "a=b",
        257,
        "lib",
        "2",
    )
    assert first["events"] == [
        {"time_ns": START + 5, "name": "first_token", "attributes": '{"n":1,"t":"x\\"y","f":1.0}'},
        {"time_ns": START + 9, "name": "finish", "attributes": None},
    ]
    assert first["links"] == [
        {"trace_id": "ab" * 16, "span_id": "cd" * 8, "attributes": '{"why":"retry"}'}
    ]
    assert json.loads(first["extra"]) == {
        "droppedEventsCount": 3,
        "events": {"1": {"droppedAttributesCount": 2}},
        "links": {"0": {"flags": 256, "traceState": "k=v"}},
        "scope": {"attributes": {"scope attribute": 1}},
    }
    assert (second["parent_span_id"], second["end_ns"], second["kind"], second["status_code"]) == (
        None,
        None,
        "unspecified",
        "unset",
    )
    assert second["string_keys"] is None
    assert second["events"] is None
    assert second["resolution_ns"] == 1
    assert out.attribute("text") == ['héllo "q"\n', None]
    assert out.attribute("empty text") == ["", None]
    assert out.attribute("whole", int) == [-7, None]
    assert out.attribute("big", int) == [2**62, None]
    assert out.attribute("real", float) == [0.1, None]
    assert out.attribute("whole real", int) == [3, None]
    assert out.attribute("yes", bool) == [True, None]
    assert out.attribute("no", bool) == [False, None]
    assert out.attribute("whole real") == ["3.0", None]
    others = {
        key: out.attribute(key)[0]
        for key in ("list", "mixed", "nested", "map", "raw", "nothing", "empty list", "empty map")
    }
    assert others == {
        "list": '["stop","length"]', "mixed": '["a",1,2.5,false]', "nested": '[[1,2],{"a":[null]}]', "map": '{"b":1,"a":{"c":"d"}}',
        "raw": '{"bytesValue":"AP8="}', "nothing": "null", "empty list": "[]", "empty map": "{}",
    }  # fmt: skip
    (resource,) = out.frame("resources").rows(named=True)
    assert resource["service_name"] == "engine"
    assert first["resource"] == second["resource"] == resource["resource"]


def snake(value: Any) -> Any:
    import re

    if isinstance(value, dict):
        return {
            re.sub(r"(?<=[a-z])([A-Z])", lambda m: "_" + m[1].lower(), k): snake(v)
            for k, v in value.items()
        }
    return [snake(v) for v in value] if isinstance(value, list) else value


def numbers(value: Any) -> Any:
    """64-bit integers as JSON numbers, enums as names."""
    if isinstance(value, dict):
        names = {
            "kind": {0: "SPAN_KIND_UNSPECIFIED", 2: "SPAN_KIND_SERVER"},
            "code": {2: "STATUS_CODE_ERROR"},
        }
        return {
            k: int(v) if k in ("intValue", "startTimeUnixNano", "endTimeUnixNano", "timeUnixNano")
            else names[k].get(v, v) if k in names else numbers(v)
            for k, v in value.items()
        }  # fmt: skip
    return [numbers(v) for v in value] if isinstance(value, list) else value


def base64_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            k: base64.b64encode(bytes.fromhex(v)).decode()
            if k in ("traceId", "spanId", "parentSpanId")
            else base64_ids(v)
            for k, v in value.items()
        }
    return [base64_ids(v) for v in value] if isinstance(value, list) else value


SPELLINGS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "lines": lambda r: lines(r),
    "line without newline": lambda r: json.dumps(r).encode(),
    "compact line": lambda r: json.dumps(r, separators=(",", ":")).encode() + b"\n",
    "pretty": lambda r: json.dumps(r, indent=2).encode(),
    "array": lambda r: json.dumps([r]).encode(),
    "pretty array": lambda r: json.dumps([r], indent=1).encode(),
    "snake case": lambda r: lines(snake(r)),
    "numbers and names": lambda r: lines(numbers(r)),
    "base64 ids": lambda r: lines(base64_ids(r)),
    "protobuf": message,
    "framed protobuf": framed,
    "byte order mark": lambda r: b"\xef\xbb\xbf" + lines(r),
    "framed zstd": lambda r: _zstd(message(r)),
    "framed zstd json": lambda r: _zstd(json.dumps(r).encode()),
}  # fmt: skip


def _zstd(data: bytes) -> bytes:
    import zstandard

    packed = zstandard.ZstdCompressor().compress(data)
    return struct.pack(">I", len(packed)) + packed


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_gives_the_same_known_rows(spelling: str) -> None:
    check_one(read(SPELLINGS[spelling](ONE)))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_recognised(spelling: str) -> None:
    data = SPELLINGS[spelling](ONE)
    match = otlp.sniff(Head("x", "x", data, complete=True))
    assert match is not None
    assert match.strength == "exact"


def test_googles_protobuf_gives_what_ptars_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ptars")
    fast = read(framed(ONE)).frame()
    monkeypatch.setattr(_otlp_decoders, "_ptars_handler", lambda: None)
    slow = read(framed(ONE))
    check_one(slow)
    assert slow.frame().equals(fast)


def test_the_walk_gives_what_pyarrow_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = request(
        span(
            attributes=attributes({"a": "b", "n": 1, "f": 2.0, "ok": True, "l": ["x", 1]}),
            status={"code": 1},
        )
    )
    assert _otlp_json.resource_spans(lines(plain), _otlp_json.spelling_of(lines(plain))) is not None
    fast = read(lines(plain)).frame()
    monkeypatch.setattr(_otlp_json, "resource_spans", lambda *_, **__: None)
    assert read(lines(plain)).frame().equals(fast)


def test_fields_that_otlp_does_not_know_are_kept() -> None:
    out = read(lines(request(span(acmeField={"x": [1]}, attributes=attributes({"a": 1})))))
    assert json.loads(out.frame()["extra"][0]) == {"acmeField": {"x": [1]}}
    assert out.attribute("a", int) == [1]


def with_unknown_fields(data: bytes) -> bytes:
    """A request whose first span has fields 99 (5) and 100 ("text")."""
    traces = trace_pb2.TracesData.FromString(data)
    one = traces.resource_spans[0].scope_spans[0].spans[0]
    one.MergeFromString(b"\x98\x06\x05" + b"\xa2\x06\x04text")
    return traces.SerializeToString()


def test_protobuf_fields_that_otlp_does_not_know_are_kept() -> None:
    plain = read(message(ONE))
    out = read(with_unknown_fields(message(ONE)))
    (extra,) = out.store.rows("SELECT extra FROM spans")[0]
    kept = json.loads(extra)
    assert kept.pop("field99") == 5
    assert kept.pop("field100") == base64.b64encode(b"text").decode()
    assert kept == json.loads(plain.store.rows("SELECT extra FROM spans")[0][0] or "{}")
    columns = "* EXCLUDE (extra)"
    assert out.frame(columns=columns).equals(plain.frame(columns=columns))


def test_defaults_that_are_written_out_are_no_unknown_fields() -> None:
    values = [{"stringValue": ""}, {"intValue": "0"}, {"doubleValue": 0.0}, {"boolValue": False}]
    values += [{"intValue": "-1"}, {"intValue": str(2**63 - 1)}, {"stringValue": "x" * 200}]
    pairs = [{"key": f"k{i}", "value": value} for i, value in enumerate(values)]
    data = message(request(span(attributes=[*pairs, *attributes({"l": [1], "m": {"a": 2}})])))
    arrow = _otlp_decoders.resource_spans([data])
    assert arrow is not None
    assert _otlp_decoders._total_bytes(arrow) == len(data)
    traces = trace_pb2.TracesData.FromString(data)
    # droppedEventsCount: 0
    one = traces.resource_spans[0].scope_spans[0].spans[0].SerializeToString() + b"\x60\x00"
    scope = b"\x12" + _otlp_wire._encoded(len(one)) + one
    group = b"\x12" + _otlp_wire._encoded(len(scope)) + scope
    odd = b"\x0a" + _otlp_wire._encoded(len(group)) + group
    arrow = _otlp_decoders.resource_spans([odd])
    assert arrow is not None
    assert _otlp_decoders._total_bytes(arrow) < len(odd)


def test_missing_ids_are_unknown_and_large_ids_stay_text() -> None:
    bare = {
        "name": "x",
        "attributes": [
            {"key": "worker", "value": {"intValue": "16004647803649141590"}},
            {"key": "n", "value": {"stringValue": " 42 "}},
        ],
    }
    out = read(lines(request(bare)))
    row = out.frame().row(0, named=True)
    assert [row[k] for k in ("trace_id", "span_id", "parent_span_id", "start_ns", "end_ns")] == [
        None
    ] * 5
    assert out.attribute("worker") == ["16004647803649141590"]
    assert out.attribute("worker", int) == [None]
    assert out.attribute("n", int) == [42]
    assert out.attribute("absent") == [None]


def test_a_key_that_comes_twice_keeps_its_first_value_and_the_other_in_extra() -> None:
    twice = [
        {"key": "a", "value": {"stringValue": "1"}},
        {"key": "a", "value": {"stringValue": "2"}},
        {"key": "b\x1fc", "value": {"intValue": "3"}},
    ]
    for data in (lines(request(span(attributes=twice))), framed(request(span(attributes=twice)))):
        out = read(data)
        assert out.attribute("a") == ["1"]
        assert json.loads(out.frame()["extra"][0]) == {"attributes": [["a", "2"], ["b\x1fc", 3]]}


def test_content_becomes_length_and_hash_unless_asked_for() -> None:
    prompt, long = "Tell me a secret", "z" * 5000
    body = request(
        span(
            attributes=attributes(
                {
                    "gen_ai.prompt": prompt, "gen_ai.prompt.0.content": prompt, "gen_ai.prompt.0.role": "user", "unknown": long,
                    "gen_ai.input.messages": [{"role": "user", "content": prompt}], "gen_ai.usage.input_tokens": 4, "exception.stacktrace": long,
                }
            ),
            events=[{"timeUnixNano": "1", "name": "gen_ai.content.prompt", "attributes": attributes({"gen_ai.event.content": prompt})}],
        )
    )  # fmt: skip
    stand_in = json.dumps(
        {"length": 16, "sha256": hashlib.sha256(prompt.encode()).hexdigest()}, separators=(",", ":")
    )
    for data in (lines(body), framed(body)):
        out = read(data)
        everything = str(out.frame().rows()) + str(out.frame("resources").rows())
        assert prompt not in everything
        assert long not in everything
        assert out.attribute("gen_ai.prompt.0.content") == [stand_in]
        assert out.attribute("gen_ai.prompt.0.role") == ["user"]
        assert json.loads(out.attribute("unknown")[0])["length"] == 5000
        assert len(out.attribute("exception.stacktrace")[0]) == 4096
        assert out.attribute("gen_ai.usage.input_tokens", int) == [4]
        assert out.facts == {"content_withheld": 6}
        kept = read(data, keep_content=True)
        assert kept.attribute("gen_ai.prompt") == [prompt]
        assert kept.attribute("unknown") == [long]
        assert kept.facts == {}


@pytest.mark.parametrize("pretty", [False, True])
def test_a_cut_json_file_keeps_the_whole_spans(pretty: bool) -> None:
    three = request(*[span(spanId=f"{i:016x}", attributes=attributes({"i": i})) for i in (1, 2, 3)])
    whole = request(span(spanId="ff" * 8))
    text = json.dumps(three, indent=2 if pretty else None)
    cut = text[: text.rindex('"intValue"')].encode()
    out = read(cut if pretty else lines(whole) + cut)
    assert [r for _, r in out.skipped] == ["cut off at the end of the file"]
    assert out.frame().height == (2 if pretty else 3)
    assert out.count == out.frame().height + 1
    assert [record for record, _ in out.skipped] == [out.count - 1]


def test_a_cut_protobuf_file_keeps_the_whole_spans() -> None:
    three = request(*[span(spanId=f"{i:016x}") for i in (1, 2, 3)])
    whole = request(span(spanId="ff" * 8))
    for data, expected in ((framed(whole, three)[:-9], 3), (message(three)[:-9], 2)):
        out = read(data)
        assert out.frame().height == expected
        assert [r for _, r in out.skipped] == ["cut off at the end of the file"]
        assert out.count == expected + 1


def test_a_broken_line_between_good_ones_is_skipped() -> None:
    out = read(
        lines(request(span()))
        + b'{"resourceSpans": [oops]}\n\n"text"\n{"other": 1}\n'
        + lines(request(span(spanId="02" * 8)))
    )
    assert out.frame().height == 2
    assert sorted(reason for _, reason in out.skipped) == [
        "JSON, but no OTLP export request",
        "JSON, but not an object",
        "not JSON",
    ]
    assert out.count == 5


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"{}\n", b"[]", b'{"resourceSpans": []}', b'{"resourceSpans": null}\n']
)
def test_files_without_a_span_give_nothing(data: bytes) -> None:
    out = read(data)
    assert out.frame().height == 0
    assert out.count == 0


LOGS = {
    "resourceLogs": [
        {
            "resource": {"attributes": attributes({"service.name": "worker"})},
            "scopeLogs": [
                {
                    "scope": {"name": "lib"},
                    "logRecords": [
                        {
                            "observedTimeUnixNano": str(START), "severityNumber": 9, "body": {"stringValue": "hello"}, "eventName": "seen",
                            "traceId": TRACE, "spanId": SPAN, "attributes": attributes({"request_id": "r1", "n": 2}),
                        },
                        {"timeUnixNano": str(END), "observedTimeUnixNano": str(START), "severityText": "Error", "body": any_value({"a": 1})},
                    ],
                }
            ],
        }
    ]
}  # fmt: skip


@pytest.mark.parametrize(
    "data", [lines(LOGS), framed(LOGS), message(LOGS), json.dumps(LOGS, indent=1).encode()]
)
def test_log_records_go_to_the_staging_table(data: bytes) -> None:
    out = read(data)
    assert out.units == ["log record"]
    assert out.count == 2
    first, second = out.logs
    assert first["time_ns"] == START
    assert (first["severity"], first["body"], first["event_name"], first["scope_name"]) == (
        "INFO",
        "hello",
        "seen",
        "lib",
    )
    assert (first["trace_id"], first["span_id"]) == (TRACE, SPAN)
    assert json.loads(first["attributes"]) == {"request_id": "r1", "n": 2}
    assert (second["time_ns"], second["severity"], second["body"], second["trace_id"]) == (
        END,
        "Error",
        '{"a":1}',
        None,
    )
    assert out.frame("resources")["resource"].to_list() == [first["resource"]]
    match = otlp.sniff(Head("x", "x", data, complete=True))
    assert match is not None


def _point(**fields: Any) -> dict[str, Any]:
    return {
        "startTimeUnixNano": str(START),
        "timeUnixNano": str(END),
        "attributes": attributes({"b": "2", "a": 1}),
        **fields,
    }


METRICS = {
    "resourceMetrics": [
        {
            "resource": {"attributes": attributes({"service.instance.id": "i-1"})},
            "scopeMetrics": [
                {
                    "metrics": [
                        {"name": "running", "gauge": {"dataPoints": [_point(asInt="3")]}},
                        {"name": "tokens", "sum": {"isMonotonic": True, "aggregationTemporality": 1, "dataPoints": [_point(asDouble=2.5)]}},
                        {
                            "name": "ttft",
                            "histogram": {
                                "aggregationTemporality": 2,
                                "dataPoints": [_point(count="6", sum=1.5, bucketCounts=["1", "2", "3"], explicitBounds=[0.1, 1.0])],
                            },
                        },
                        {"name": "empty", "gauge": {"dataPoints": [_point()]}},
                    ]
                }
            ],
        }
    ]
}  # fmt: skip


@pytest.mark.parametrize("data", [lines(METRICS), framed(METRICS), message(METRICS)])
def test_data_points_become_samples(data: bytes) -> None:
    out = read(data)
    assert out.units == ["data point"]
    assert out.count == 4
    assert out.skipped == [(3, "data point without a value")]
    rows = out.store.sql(
        "SELECT metric, labels, value, interval_ns, kind, worker, record, time_ns FROM samples ORDER BY record, metric, value"
    ).rows()
    shared = '{"a":"1","b":"2"'
    assert rows == [
        ("running", shared + "}", 3.0, None, "gauge", "instance:i-1", 0, END),
        ("tokens", shared + "}", 2.5, END - START, "counter", "instance:i-1", 1, END),
        ("ttft_bucket", shared + ',"le":"0.1"}', 1.0, None, "histogram", "instance:i-1", 2, END),
        ("ttft_bucket", shared + ',"le":"1.0"}', 3.0, None, "histogram", "instance:i-1", 2, END),
        ("ttft_bucket", shared + ',"le":"+Inf"}', 6.0, None, "histogram", "instance:i-1", 2, END),
        ("ttft_count", shared + "}", 6.0, None, "histogram", "instance:i-1", 2, END),
        ("ttft_sum", shared + "}", 1.5, None, "histogram", "instance:i-1", 2, END),
    ]


def test_buckets_of_exponential_histograms_become_cumulative_series() -> None:
    point = _point(
        count="10", sum=9.0, scale=-1, zeroCount="3", zeroThreshold=0.0,
        negative={"offset": 0, "bucketCounts": ["4"]}, positive={"offset": -1, "bucketCounts": ["1", "2"]},
    )  # fmt: skip
    metric = {"name": "size", "exponentialHistogram": {"dataPoints": [point]}}
    metrics = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [metric]}]}]}
    for data in (lines(metrics), message(metrics)):
        rows = (
            read(data)
            .store.sql(
                """SELECT json_extract_string(labels, 'le') AS le, value FROM samples
               WHERE metric = 'size_bucket' ORDER BY value, TRY_CAST(le AS DOUBLE)"""
            )
            .rows()
        )
        # Scale -1: edges are powers of 4.
        assert rows == [
            ("-4.0", 0.0),
            ("-1.0", 4.0),
            ("0.0", 7.0),
            ("0.25", 7.0),
            ("1.0", 8.0),
            ("4.0", 10.0),
            ("+Inf", 10.0),
        ]


def test_a_file_that_mixes_signals_counts_records() -> None:
    out = read(framed(ONE, LOGS, METRICS))
    assert out.units == ["span", "record", "record"]
    assert out.count == 8
    records = (
        out.frame()["record"].to_list()
        + [row["record"] for row in out.logs]
        + out.frame("samples")["record"].to_list()
    )
    assert set(records) == {0, 1, 2, 3, 4, 5, 6}
    assert read(lines(ONE, LOGS, METRICS)).count == 8


def test_many_blocks_keep_the_order_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_otlp_json, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(otlp, "GROUP_BYTES", 500)
    many = [
        request(span(spanId=f"{i + 1:016x}", startTimeUnixNano=str(START + i))) for i in range(50)
    ]
    for data in (
        lines(*many),
        framed(*many),
        message({"resourceSpans": [r["resourceSpans"][0] for r in many]}),
    ):
        frame = read(data).frame("spans").sort("record")
        assert frame["record"].to_list() == list(range(50))
        assert frame["start_ns"].to_list() == [START + i for i in range(50)]


# ---- never raises, never claims --------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_never_claimed_and_never_raise(data: bytes) -> None:
    assert otlp.sniff(Head("x", "x", data, complete=True)) is None
    survive(data)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 255), st.sampled_from(["json", "framed", "bare"]))
@example(230663121, 0, "bare")  # ptars reads it, Google's protobuf does not
def test_a_flipped_byte_or_a_cut_never_raises(place: int, byte: int, kind: str) -> None:
    whole = {"json": lines(ONE, ONE), "framed": framed(ONE, LOGS), "bare": message(ONE)}[kind]
    at = place % len(whole)
    survive(whole[:at] + bytes([byte]) + whole[at + 1 :])
    survive(whole[:at])
    otlp.sniff(Head("x", "x", whole[:at], complete=False))


@pytest.mark.parametrize(
    "text",
    ['{"resourceSpans": 1}', '{"results": []}', '{"a": "resourceSpans"}', "plain text", '{"traceEvents": []}', '[{"traceId": "1", "id": "2", "name": "zipkin"}]', '{"data": [{"traceID": "1", "spans": []}]}'],
)  # fmt: skip
def test_other_json_is_not_claimed(text: str) -> None:
    assert otlp.sniff(Head("x", "x", text.encode(), complete=True)) is None


# ---- duplicates ------------------------------------------------------------------------------------


def fill(files: dict[str, bytes], order: list[str]) -> tuple[Store, pl.DataFrame]:
    store = Store()
    numbers = {name: i for i, name in enumerate(sorted(files))}
    for name in order:
        frame = read(files[name]).store.arrow("SELECT * EXCLUDE (source) FROM spans")
        store.append("spans", frame.append_column("source", [[numbers[name]] * frame.num_rows]))
        store.append(
            "sources",
            [{"source": numbers[name], "sha256": hashlib.sha256(name.encode()).hexdigest()}],
        )
    return store, span_sql.deduplicate(store.connection)


def test_without_duplicates_nothing_is_removed() -> None:
    store, removed = fill({"a": lines(ONE)}, ["a"])
    assert removed.height == 0
    assert store.count("spans") == 2


@pytest.mark.parametrize("at_once", [1, 1_000_000])
def test_copies_count_once_and_the_winner_does_not_depend_on_the_order(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_sql, "_SPANS_AT_ONCE", at_once)
    poor = request(span(attributes=attributes({"a": 1, "gen_ai.prompt": "secret"})))
    rich = request(span(attributes=attributes({"a": 1, "b": 2})), span(spanId="02" * 8))
    files = {"poor": lines(poor), "rich": lines(rich), "copy": framed(rich)}
    kept = []
    for order in (["poor", "rich", "copy"], ["copy", "rich", "poor"]):
        store, removed = fill(files, order)
        assert store.count("spans") == 2
        assert removed["records"].sum() == 3
        assert removed["conflicts"].sum() == 1
        assert set(removed["reason"]) == {span_sql.IN_ANOTHER_SOURCE}
        kept.append(sorted(store.rows("SELECT source, record, span_id, int_keys FROM spans")))
    assert kept[0] == kept[1]
    assert {row[3] for row in kept[0]} == {"a\x1fb", None}


def test_duplicates_within_a_source_and_spans_without_ids() -> None:
    bare = {"name": "no ids", "startTimeUnixNano": "5"}
    store, removed = fill({"a": lines(request(span(), bare), request(span(), bare))}, ["a"])
    assert store.count("spans") == 3
    assert removed.rows() == [(0, span_sql.IN_THE_SOURCE, 1, 0, [2])]


def test_a_span_rebuilt_from_logs_gives_way_to_the_exported_one() -> None:
    store, _ = fill({"a": lines(request(span()))}, ["a"])
    store.append(
        "spans",
        [
            {"source": 1, "record": 7, "trace_id": TRACE, "span_id": SPAN, "start_ns": START - 400, "name": "llm_request", "resolution_ns": 1_000_000},
            {"source": 1, "record": 8, "trace_id": TRACE, "span_id": "09" * 8, "start_ns": START, "name": "only in the log", "resolution_ns": 1_000_000},
        ],
    )  # fmt: skip
    removed = span_sql.deduplicate(store.connection)
    assert removed.rows() == [(1, span_sql.LOG_COPY, 1, 0, [7])]
    assert store.count("spans") == 2


def test_packed_maps_are_stored_as_keys_and_values() -> None:
    store = Store()
    rows = [
        {
            "trace_id": "1",
            "span_id": "2",
            "attributes_string": {"a": "x"},
            "attributes_int": {"n": 5},
        },
        {"trace_id": "3", "span_id": "4"},
    ]
    store.append("spans", span_sql.packed(rows))
    assert store.rows(
        "SELECT string_keys, string_values, int_keys, int_values FROM spans ORDER BY trace_id"
    ) == [("a", ["x"], "n", [5]), (None, None, None, None)]
    kinds = {span_sql.keys_of(texts) for _, _, *texts in span_sql.kinds(store.connection)}
    assert kinds == {frozenset({"a", "n"}), frozenset()}


def test_keys_with_quotes_are_safe_in_sql() -> None:
    sql = span_sql.attribute_sql("it's", str)
    duckdb.sql(
        f"SELECT {sql} FROM (SELECT 'it''s' AS string_keys, ['x'] AS string_values, NULL::VARCHAR AS int_keys, NULL::BIGINT[] AS int_values, NULL::VARCHAR AS double_keys, NULL::DOUBLE[] AS double_values, NULL::VARCHAR AS bool_keys, NULL::BOOLEAN[] AS bool_values, NULL::VARCHAR AS other_keys, NULL::VARCHAR[] AS other_values)"
    ).fetchall()


def test_attributes_are_found_at_one_place_and_span_by_span_alike() -> None:
    store = Store()
    store.append(
        "spans",
        [
            {
                "span_id": "a",
                "string_keys": "one\x1ftwo\x1fthree",
                "string_values": ["1", "2", "3"],
            },
            {"span_id": "b", "string_keys": "one\x1fthree", "string_values": ["4", "5"]},
            {"span_id": "c", "string_keys": None, "int_keys": "one", "int_values": [6]},
            {"span_id": "d", "string_keys": "one", "string_values": ["7"]},
        ],
    )
    held = span_sql.keys_held([texts for _, _, *texts in span_sql.kinds(store.connection)])
    assert held == {
        "one": {"string": 1, "int": 1},
        "two": {"string": None},
        "three": {"string": None},
    }
    for key, expected in {
        "one": ["1", "4", "6", "7"],
        "two": ["2", None, None, None],
        "three": ["3", "5", None, None],
    }.items():
        for places in (held[key], None):
            sql = span_sql.attribute_sql(key, str, places)
            rows = store.sql(f"SELECT {sql} AS v FROM spans ORDER BY span_id")
            assert rows["v"].to_list() == expected, key


def test_spans_of_many_small_blocks_are_stored_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(
        json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [
            {"traceId": f"{n:032x}", "spanId": f"{n:016x}", "name": "x", "startTimeUnixNano": "1",
             **({"parentSpanId": "f" * 16} if n % 5 == 0 else {})}
        ]}]}]}) + "\n"
        for n in range(1, 101)
    ).encode()  # fmt: skip
    whole = read(lines).frame()
    monkeypatch.setattr(_otlp_json, "BLOCK_BYTES", 300)
    monkeypatch.setattr(otlp, "GATHERED_ROWS", 7)
    assert whole.height == 100
    assert read(lines).frame().equals(whole)


# ---- real captures ---------------------------------------------------------------------------------


def test_the_two_fixtures_of_one_capture_give_the_same_rows() -> None:
    one, two = (read((FIXTURES / f"vllm_pd.{kind}").read_bytes()) for kind in ("pb", "jsonl"))
    assert one.frame().height == 21
    assert one.frame().equals(two.frame())
    assert one.frame("resources").equals(two.frame("resources"))
    logs, same = (read((FIXTURES / f"dynamo_logs.{kind}").read_bytes()) for kind in ("pb", "jsonl"))
    assert logs.logs
    assert logs.logs == same.logs


@pytest.mark.shared
@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ("vllm/agg/vllm.traces.otlp.bin.gz", "vllm/agg/vllm.traces.otlp.jsonl.gz", 374),
        ("vllm/pd_nixl/pd.traces.otlp.bin.gz", "vllm/pd_nixl/pd.traces.otlp.jsonl.gz", 1556),
        ("dynamo/agg/otlp_traces.pb.gz", "dynamo/agg/otlp_traces.jsonl.gz", 2202),
        (
            "dynamo/disagg_bootstrap/otlp_traces.pb.gz",
            "dynamo/disagg_bootstrap/otlp_traces.jsonl.gz",
            None,
        ),
        ("dynamo/agg/otlp_logs.pb.gz", "dynamo/agg/otlp_logs.jsonl.gz", 3948),
    ],
)
def test_captures_in_both_formats_give_the_same_rows(
    shared: Path, first: str, second: str, count: int | None
) -> None:
    one, two = (
        read(gzip.decompress((shared / "data" / name).read_bytes())) for name in (first, second)
    )
    assert one.count == two.count
    assert count is None or one.count == count
    assert one.skipped == two.skipped == []
    assert one.frame().equals(two.frame())
    assert one.logs == two.logs


def test_kinds_and_codes_that_are_no_enum_stay_as_text() -> None:
    odd = ["²", "9" * 5000, "-1", "٣"]
    spans = [
        span(spanId=f"{n + 1:016x}", kind=text, status={"code": text})
        for n, text in enumerate([*odd, "3"])
    ]
    found = read(json.dumps(request(*spans)).encode()).frame().sort("record")
    assert found["kind"].to_list() == [*odd[:3], "client", "client"]
    assert found["status_code"].to_list() == [*odd[:3], "٣", "3"]


def test_an_instant_with_a_raised_digit_is_none() -> None:
    assert rfc3339_to_ns("2026-01-01T00:00:00.²Z") is None
    assert rfc3339_to_ns("2026-01-01T00:00:00.5Z") == 1767225600500000000
