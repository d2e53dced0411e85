"""Tables of spans: one row is a span, as ClickHouse, Honeycomb, Phoenix and data frames of traces hold them.

Source: open-telemetry/opentelemetry-collector-contrib exporter/clickhouseexporter (`otel_traces`: Duration in
ns), Honeycomb's query downloads (`trace.trace_id`, `duration_ms`), Arize-ai/phoenix
(`context.trace_id`, `attributes.*`). CSV, JSON lines, a JSON array or Parquet. Rows become OTLP spans;
the collectors of the systems that wrote them say what they mean. What is a table of spans, but does
not say when they were or how long, is named and not read: its rows are no requests.
"""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import IO, Any, NamedTuple

import orjson
import polars as pl

from pdtrace.model import Head, Match, Sink, Source

from . import _otlp_views as views
from . import otlp
from ._common import csv_rows, header_cells, integer, line_batches, list_items, loads, number
from ._log_exports import instant_ns

TITLE = "Tables of spans (ClickHouse exporter, Honeycomb, Phoenix)"

_NOT_READ = "a table of spans or traces: its rows are no requests, and {}; export OTLP or Jaeger JSON instead"
_KEYS: dict[str, tuple[str, ...]] = {
    "trace": ("traceid", "tracetraceid", "contexttraceid", "operationid"),
    "span": ("spanid", "tracespanid", "contextspanid"),
    "parent": ("parentspanid", "traceparentid", "parentid"),
    "name": ("spanname", "name", "operationname", "resourcename", "resource", "roottracename"),
    "start": ("timestamp", "starttime", "starttimestamp", "starttimeunixnano"),
    "end": ("endtime", "endtimestamp", "endtimeunixnano"),
    "kind": ("spankind", "kind"),
    "scope": ("scopename", "libraryname", "otelscopename", "otellibraryname"),
    "status": ("statuscode", "otelstatuscode"),
    "message": ("statusmessage",),
    "service": ("servicename", "service"),
    "own": ("spanattributes", "attributes"),
    "resource": ("resourceattributes",),
}
_DURATIONS = {"durationns": 1, "durationnano": 1, "durationus": 1000, "durationms": 10**6}
_SPAN_KINDS = {"server", "client", "internal", "producer", "consumer", "unspecified"}
_LISTED = re.compile(r'\{\s*"(?:data|traces|spans|rows)"\s*:\s*(?=\[\s*\{)')
_LEFT_OUT = re.compile(r"^(?:Events?|Links?)\b|^(?:TraceState|ScopeVersion|meta\.)", re.IGNORECASE)
# what a request's own table has and a span's has not: a trace id beside them is the request's
_REQUEST = re.compile(
    r"(?i)^(?:ttft|time_?to_?first_?token|(?:input|prompt|output|completion)_?tokens)"
)


class Columns(NamedTuple):
    """Which column is what; `unit_ns`: nanoseconds of one unit of the duration."""

    at: dict[str, str]
    duration: str | None
    unit_ns: int

    @property
    def lacks(self) -> str:
        """What keeps these rows from being spans."""
        if "span" not in self.at or "name" not in self.at:
            return "they have no span id or no name"
        if "start" not in self.at:
            return "they have no start"
        return "" if self.duration or "end" in self.at else "the unit of their duration is not said"


def sniff(head: Head) -> Match | None:
    """A table with a column of trace ids and one of span ids or of span names, and no request's columns."""
    names = _names(head)
    columns = _columns(names) if names else None
    if columns is None:
        return None
    if columns.lacks:
        return Match("dialect", ignore=_NOT_READ.format(columns.lacks))
    return Match("exact", "table of spans")


def read(source: Source, out: Sink) -> None:
    """The rows as OTLP, read as any OTLP is."""
    columns = columns_of(source)
    if columns is not None:
        otlp.read(_AsOtlp(source, columns), out)


def columns_of(source: Source) -> Columns | None:
    """Which column is what in a whole file: where Parquet's names stand, the head does not show them."""
    with source.open() as stream:
        data = stream.read(64 << 10)
        data += stream.read() if data[:4] == b"PAR1" else b""
    return _columns(_names(Head(source.path, source.name, data)) or [])


class _AsOtlp:
    """The same source with its rows written as OTLP/JSON, one span a line."""

    def __init__(self, source: Source, columns: Columns) -> None:
        self.path, self.name, self.number = source.path, source.name, source.number
        self.mtime_ns, self.keep_content = source.mtime_ns, source.keep_content
        self._source, self._columns = source, columns

    def open(self) -> IO[bytes]:
        """The spans as a stream."""
        rows = (
            row if isinstance(row, bytes) else orjson.dumps(_document(row, self._columns))
            for row in _rows(self._source)
        )
        return io.BytesIO(b"".join(row + b"\n" for row in rows))


# ---- which columns


def _plain(name: str) -> str:
    return re.sub(r"\s*\[.*\]|[^a-z]", "", name.lower())


def _columns(names: list[str]) -> Columns | None:
    known = {_plain(name): name for name in reversed(names)}
    at = {
        key: known[word]
        for key, words in _KEYS.items()
        for word in reversed(words)
        if word in known
    }
    if "trace" not in at or not at.keys() & {"span", "name"}:
        return None
    if not {"span", "name"} <= at.keys() and any(_REQUEST.match(name) for name in names):
        return None
    bare = known.get("duration")
    timed = next((word for word in _DURATIONS if word in known), None)
    if timed is not None:
        return Columns(at, known[timed], _DURATIONS[timed])
    clickhouse = {"SpanName", "ServiceName", "Duration"} <= set(names)
    return Columns(at, bare if clickhouse else None, 1)


def _names(head: Head) -> list[str] | None:
    """The names of the first row's columns."""
    if head.data[:4] == b"PAR1":
        return _parquet_names(head)
    text = head.data.decode("utf-8-sig", "replace").lstrip()
    if text[:1] not in ("{", "["):
        first = text.split("\n", 1)[0].strip("\r")
        if "," not in first or len(first) > 8000:
            return None
        return header_cells(first)
    if not re.search(r'"(?:[\w.]*trace[_.]?id|operation_Id)"\s*:', text[:16_000], re.IGNORECASE):
        return None
    listed = _LISTED.match(text)
    begin = listed.end() if listed else 0
    begin = text.find("{", begin)
    try:
        record, _ = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    return list(record) if isinstance(record, dict) else None


def _parquet_names(head: Head) -> list[str] | None:
    """Names stand at the end of the file: of a longer one than the head they are not known yet."""
    try:
        schema = pl.read_parquet_schema(io.BytesIO(head.data))
    except (pl.exceptions.PolarsError, OSError):
        return None
    return list(schema)


# ---- rows


def _rows(source: Source) -> Iterator[Mapping[str, Any] | bytes]:
    """The rows; as bytes, in one line, what is none: it is counted where OTLP is read."""
    with source.open() as stream:
        start = stream.read(64 << 10)
    text = start.decode("utf-8-sig", "replace").lstrip()
    first = text[:1].encode()
    if first == b"{" and not _LISTED.match(text):
        yield from _json_lines(source)
        return
    with source.open() as stream:
        if first in (b"[", b"{"):
            yield from _listed(stream.read().decode("utf-8-sig", "replace").lstrip())
        elif start[:4] == b"PAR1":
            yield from pl.read_parquet(io.BytesIO(stream.read())).iter_rows(named=True)
        else:
            lines = csv_rows(stream.read().decode("utf-8-sig", "replace"))
            header = next(lines, [])
            for cells in lines:
                if cells:
                    yield dict(zip_longest(header, cells[: len(header)]))


def _json_lines(source: Source) -> Iterator[Mapping[str, Any] | bytes]:
    for batch in line_batches(source):
        for line in batch.lines:
            try:
                row = loads(line) if line.strip() else b""
            except ValueError:
                yield line
                continue
            yield row if isinstance(row, dict) else line


def _listed(text: str) -> Iterator[Mapping[str, Any] | bytes]:
    """The rows of one list, or of an object that holds it."""
    match = _LISTED.match(text)
    items, damaged = list_items(text[match.end() :] if match else text)
    yield from (row if isinstance(row, dict) else json.dumps(row).encode() for row in items)
    if damaged:
        yield " ".join(damaged.split()).encode()


def _document(row: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """One row as ResourceSpans."""
    at = columns.at
    value = {key: row.get(name) for key, name in at.items()}
    used = {*at.values(), columns.duration}
    tags = {
        name.removeprefix("attributes."): item
        for name, item in row.items()
        if isinstance(name, str) and name not in used and _said(item) and not _LEFT_OUT.match(name)
    }
    tags |= _mapping(value.get("own"))
    kind = str(value.get("kind") or "internal").lower().removeprefix("span_kind_")
    if kind not in _SPAN_KINDS:  # Phoenix: LLM, CHAIN, TOOL, ...
        tags["openinference.span.kind"], kind = kind, "internal"
    tags |= {"span.kind": kind, "otel.status_code": value.get("status")}
    tags |= {"otel.status_description": value.get("message"), "otel.scope.name": value.get("scope")}
    start, end = instant_ns(value.get("start")), instant_ns(value.get("end"))
    duration = number(row.get(columns.duration)) if columns.duration else None
    if end is None and start is not None and duration is not None:
        end = integer(start + round(duration * columns.unit_ns))
    resource = {"service.name": value.get("service")} | _mapping(value.get("resource"))
    times = {"startTimeUnixNano": start, "endTimeUnixNano": end}
    return views.document(
        resource, value["trace"], value["span"], value.get("parent"), value["name"], tags, times
    )


def _said(value: Any) -> bool:
    """No cell that a table leaves empty: None, '' or a data frame's NaN."""
    return value is not None and not (isinstance(value, str) and not value) and value == value


def _mapping(value: Any) -> dict[str, Any]:
    """A map as it is, as JSON, or as ClickHouse writes it into text: {'key':'value'}."""
    if isinstance(value, list):  # Parquet's maps
        value = {
            item["key"]: item["value"]
            for item in value
            if isinstance(item, dict) and {"key", "value"} <= item.keys()
        }
    if isinstance(value, str) and value.startswith("{") and len(value) < 1 << 20:
        for parse in (orjson.loads, ast.literal_eval):
            try:
                value = parse(value)
                break
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    return {str(k): v for k, v in value.items()} if isinstance(value, dict) else {}
