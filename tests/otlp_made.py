"""Hand-made OTLP in every spelling, and what the collector gave of it."""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
from opentelemetry.proto.logs.v1 import logs_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from pdtrace import spans as span_sql
from pdtrace.collectors import otlp
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
        status={"code": 2, "message": "timed out"},
        traceState="a=b",
        flags=257,
        droppedEventsCount=3,
    ),
    span(spanId="01" * 8, parentSpanId="", endTimeUnixNano="0", kind=0, attributes=[]),
    attributes=attributes({"scope attribute": 1}),
)  # fmt: skip


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
