"""NVIDIA Dynamo's logs, JSON lines (DYN_LOGGING_JSONL=true) and text: spans, choices, requests, settings, alarms.

Source: ai-dynamo/dynamo lib/runtime/src/logging.rs, 1.6.1; text: _dynamo_log_text. One JSON object a line (time in RFC
3339 with microseconds, level, target, message, the event's and its span's fields); lines of other
writers (Python warnings, banners) are mixed in and skipped. With DYN_LOGGING_SPAN_EVENTS=true the
log tells every span; see _dynamo_log_spans for how well their times are known. A container's
prefix before the object, and Docker's {"log": ...} around it, are taken off; each container of a
mixed file is its own worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import polars as pl
import pyarrow as pa

from pdtrace.model import Head, Match, Sink, Source, worker_id

from . import _dynamo_log_text as text
from . import _log_exports as exports
from ._common import CUT_OFF, NOT_JSON, LineBatch, line_batches, number, rfc3339_to_ns
from ._dynamo_log_spans import MAX_REQUESTS, SpanLines
from ._dynamo_names import ENGINE, LOG_FILE
from ._dynamo_records import REASON_SPAN, USED, Entry, Rows

TITLE = "NVIDIA Dynamo"

REASON_OTHER = "JSON, but no log line of Dynamo"
REASON_WRITER = "line of another writer"
REASON_NO_IDS = "span without ids"

_TARGETS = ("dynamo", "request_span", "span_event", "aisimulate", "kvbm", "nixl")
_VALUES = {"string": pa.string(), "int": pa.int64(), "double": pa.float64(), "bool": pa.bool_()}
_SPAN_SCHEMA = pa.schema(
    [
        ("record", pa.int64()), ("trace_id", pa.string()), ("span_id", pa.string()),
        ("parent_span_id", pa.string()), ("start_ns", pa.int64()), ("end_ns", pa.int64()),
        ("name", pa.string()), ("kind", pa.string()), ("status_code", pa.string()),
        ("scope_name", pa.string()), ("resource", pa.string()), ("extra", pa.string()),
        ("resolution_ns", pa.int64()), *((f"{name}_keys", pa.string()) for name in _VALUES),
        *((f"{name}_values", pa.list_(kind)) for name, kind in _VALUES.items()),
    ]
)  # fmt: skip


def sniff(head: Head) -> Match | None:
    """JSON lines with time, level and a target of Dynamo's crates."""
    lines = head.data.split(b"\n")
    lines = lines if head.complete else lines[:-1]
    if exports.is_export(head.data):
        lines = [line.encode() for line in exports.head_lines(head.data)]
    for line in lines:
        if b'"target' in line and b'"level' in line:  # quotes inside a carrier's text are escaped
            _, fields = _fields(line)
            if fields is not None and str(fields["target"]).startswith(_TARGETS):
                return Match("exact", "Dynamo log (JSON lines)")
        elif b"::" in line:
            told = text.parse(line)
            if told is not None and told[1]["target"].startswith(_TARGETS):
                return Match("exact", "Dynamo log (text)")
    return None


def read(source: Source, out: Sink) -> None:
    """Everything that the log tells; requests it only begins are told at the end."""
    out.unit("line")
    streams: dict[str, _Stream] = {}
    as_text = False
    for batch in _batches(source):
        skipped: dict[str, list[int]] = {}
        for offset, line in enumerate(batch.lines):
            if not line.strip():
                continue
            out.read(1)
            ordinal = batch.first + offset
            name, fields = _fields(line)
            if fields is None:
                cut = batch.cut and offset == len(batch.lines) - 1
                skipped.setdefault(CUT_OFF if cut else _why(line), []).append(ordinal)
                continue
            as_text = bool(fields.pop(text.MARK, False)) or as_text
            stream = streams.setdefault(name, _Stream(source.path, name))
            reason = stream.take(ordinal, fields)
            if reason:
                skipped.setdefault(reason, []).append(ordinal)
        for reason, ordinals in skipped.items():
            out.skip(ordinals, REASON_WRITER if as_text and reason == NOT_JSON else reason)
        for stream in streams.values():
            stream.flush(out)
    for stream in streams.values():
        stream.finish(out)


def _batches(source: Source) -> Iterator[LineBatch]:
    """The lines; of a log store's document each with the name of its stream in front."""
    exported = exports.frame(source)
    if exported is None:
        yield from line_batches(source)
    else:
        named = exported.select(pl.concat_str("stream", "text", separator=" "))
        yield LineBatch(0, [line.encode() for line in named.to_series()])


def _fields(line: bytes) -> tuple[str, dict[str, Any] | None]:
    """(container, fields) of a line; no fields when it is no log line of this format."""
    begin = line.find(b"{")
    try:
        value = orjson.loads(line[begin:]) if begin >= 0 else None
    except orjson.JSONDecodeError:
        value = None
    if value is None:
        told = text.parse(line)
        return ("", None) if told is None else (_container(told[0].strip(" |[]\t")), told[1])
    name = line[:begin].decode("utf-8", "replace").strip(" |[]\t") if begin else ""
    if isinstance(value, dict) and "target" not in value:
        carried = exports.entry(value)
        inner, fields = _fields(carried.text.encode()) if carried is not None else ("", None)
        return (carried.stream if carried is not None else "") or inner, fields
    if isinstance(value, dict) and {"time", "level", "target"} <= value.keys():
        return _container(name), value
    return "", None


def _container(front: str) -> str:
    """The name in front of a line: a stamp or a stream mark is none."""
    words = [
        word
        for word in front.rstrip(":").split()
        if word[:1].isalpha() and word not in ("stdout", "stderr", "F", "P")
    ]
    return words[0] if words else ""


def _why(line: bytes) -> str:
    return (
        REASON_OTHER
        if line.lstrip().startswith(b"{") and line.rstrip().endswith(b"}")
        else NOT_JSON
    )


@dataclass
class _Stream:
    """What one process wrote: its spans, its records and its names."""

    path: str
    name: str
    rows: Rows = field(default_factory=Rows)
    service: str | None = None
    _epochs: set[str] = field(default_factory=set)
    _instances: dict[str, str | None] = field(default_factory=dict)  # worker id -> component
    _window: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        file = f"{self.path}#{self.name}" if self.name else self.path
        self._file = file
        self._worker = worker_id({"file": file})
        self._resource = "log:" + hashlib.sha256(file.encode()).hexdigest()[:24]
        self._spans = SpanLines(self._resource)

    def take(self, record: int, fields: Mapping[str, Any]) -> str:
        """Use one line; returns why it gave nothing, else ''."""
        time_ns = rfc3339_to_ns(str(fields["time"]))
        message = str(fields.get("message") or "")
        self._learn(fields, message, time_ns)
        if message in ("SPAN_FIRST_ENTRY", "SPAN_CLOSED") and not fields.get("span_id"):
            return REASON_NO_IDS  # the text log has none: its spans cannot be told apart
        if message == "SPAN_FIRST_ENTRY" and time_ns is not None:
            self.rows.spans_seen = True
            self._spans.entered(record, time_ns, fields)
            return REASON_SPAN
        if message == "SPAN_CLOSED" and time_ns is not None:
            self.rows.spans_seen = True
            return self._spans.closed(record, time_ns, fields)
        if message == "Selected worker":
            self._remember_cost(fields)
        entry = Entry(
            None,
            record,
            time_ns,
            str(fields["level"]).upper(),
            str(fields["target"]),
            message,
            fields,
            self._worker,
        )
        return self.rows.take(entry) or USED

    def _remember_cost(self, fields: Mapping[str, Any]) -> None:
        cost = number(fields.get("logit"))
        if cost is not None and len(self._spans.costs) < MAX_REQUESTS:
            self._spans.costs[str(fields.get("request_id")), str(fields.get("worker_id"))] = cost

    def _learn(self, fields: Mapping[str, Any], message: str, time_ns: int | None) -> None:
        """Names of the process."""
        if time_ns is not None:
            first, last = self._window or (time_ns, time_ns)
            self._window = (min(first, time_ns), max(last, time_ns))
        if fields.get("span_name") == "handle_payload" and fields.get("instance_id"):
            self._instances.setdefault(str(fields["instance_id"]), fields.get("component"))
        elif message == "FPM trace initialized" and fields.get("producer_id"):
            self._instances.setdefault(str(fields["producer_id"]), fields.get("component"))
        elif fields.get("dynamo.component") == "frontend" and fields.get("dynamo.process.epoch"):
            self._epochs.add(str(fields["dynamo.process.epoch"]))
        elif message.startswith("OpenTelemetry OTLP export enabled") and fields.get("service"):
            self.service = str(fields["service"])
            self._spans.scope = self.service

    def flush(self, out: Sink) -> None:
        """Hand over the rows so far."""
        if self._spans.rows:
            out.add("spans", pa.Table.from_pylist(self._spans.rows, schema=_SPAN_SCHEMA))
            self._spans.rows.clear()
        self.rows.flush(out)

    def finish(self, out: Sink) -> None:
        """The rest, the resource of the rebuilt spans, and who the process is."""
        self._spans.finish()
        self.rows.service = self.service
        self.rows.finish(out, self._worker)
        self.flush(out)
        attributes = {"service.name": self.service, LOG_FILE: self._file}
        known = [(key, value) for key, value in attributes.items() if value]
        schema = pa.schema(
            [
                ("resource", pa.string()),
                ("service_name", pa.string()),
                ("attributes", pa.map_(pa.string(), pa.string())),
            ]
        )
        row = {"resource": self._resource, "service_name": self.service, "attributes": known}
        out.add("resources", pa.Table.from_pylist([row], schema=schema))
        self._declare(out)

    def _declare(self, out: Sink) -> None:
        """One process, one worker; a process that hosts several instances keeps them apart."""
        aliases: dict[str, str | None] = {"file": self._file, "service": self.service}
        role = None
        if len(self._instances) == 1:
            ((aliases["worker_id"], component),) = self._instances.items()
            role = component if component in ("prefill", "decode") else None
        elif len(self._epochs) == 1:
            (aliases["instance"],) = self._epochs
            role = "frontend"
        elif self._is_frontend():
            role = "frontend"
        start, end = self._window or (None, None)
        out.worker(
            aliases, role=role, role_basis="log" if role else None, engine=ENGINE,
            name=self.service or self.name or None, start_ns=start, end_ns=end,
        )  # fmt: skip

    def _is_frontend(self) -> bool:
        return not self._instances and self.rows.frontend_seen
