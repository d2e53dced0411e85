"""What one process wrote into Dynamo's log: its spans, its records, and the names that it goes by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pdtrace.model import Sink, worker_id

from ._common import number, rfc3339_to_ns
from ._dynamo_log_spans import MAX_REQUESTS, SpanLines
from ._dynamo_names import ENGINE, LOG_FILE
from ._dynamo_records import REASON_SPAN, USED, Entry, Rows

REASON_NO_IDS = "span without ids"

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


@dataclass
class Stream:
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
