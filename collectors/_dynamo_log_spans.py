"""Spans rebuilt from the SPAN_FIRST_ENTRY and SPAN_CLOSED lines of Dynamo's JSONL log.

A closing line carries the span's ids, parent and attributes, the instant it was written
(microseconds) and busy and idle time, each rounded to three digits: the length of a span of 1.2 s
is known to 10 ms. Its start is the first entry, kept inside what the rounded length allows.
Resolution: the rounding, at least 1 ms; a process that is starved of CPU may write a line later
still (20 ms seen once in 8,800 spans; p99 0.5 ms).
Spans of which no child was entered (response.streaming, worker.admission) are logged without trace
id and with ids local to the process: they go under the trace of their dynamo.request.id and get an
id made of trace, name and dynamo.operation.id, marked in `extra`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdtrace.model import MADE_SPAN_ID

from ._common import number

MS = 1_000_000
MAX_REQUESTS = 200_000  # requests remembered to find the trace of lines that do not name it
LONG_TEXT = 4096
SEPARATOR = "\x1f"  # between the keys of a span in table `spans`

REASON_NO_TRACE = "span line without trace id, of a request that is not in this log"
REASON_NO_SPAN = "span line without span id, name or length"

# Fields of a line that are no attributes of the span.
_OWN = {
    "time", "level", "file", "line", "target", "message", "trace_id", "span_id", "parent_id",
    "span_name",
    "trace_flags", "otel.kind", "time.busy_us", "time.idle_us", "time.duration_us", "module_path",
    "thread_id",
}  # fmt: skip
_BOOLEANS = {"true": True, "false": False}
_BOOLEAN_KEYS = {"migration.is_retry", "dynamo.request.terminal.error", "cancelled"}


@dataclass
class _Home:
    """Where the spans of a request without a trace id belong."""

    trace_id: str
    parents: dict[str, str] = field(default_factory=dict)  # span name -> span id


@dataclass
class SpanLines:
    """Pairs the lines of a stream; `rows` are rows of `spans`."""

    resource: str
    scope: str | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    costs: dict[tuple[str, str], float] = field(default_factory=dict)  # (request, worker) -> logit
    _entered: dict[str, tuple[int, int, Mapping[str, Any]]] = field(default_factory=dict)
    _homes: dict[str, _Home] = field(default_factory=dict)

    def entered(self, record: int, time_ns: int, fields: Mapping[str, Any]) -> None:
        """A span began; it gives a row when it closes, or at the end of the log."""
        if fields.get("trace_id") and fields.get("span_id"):
            self._entered[str(fields["span_id"])] = (record, time_ns, fields)
            self._remember(fields)

    def closed(self, record: int, time_ns: int, fields: Mapping[str, Any]) -> str:
        """A span ended; returns why it gave no row, else ''."""
        busy, idle = number(fields.get("time.busy_us")), number(fields.get("time.idle_us"))
        if not fields.get("span_id") or not fields.get("span_name") or busy is None or idle is None:
            return REASON_NO_SPAN
        self._remember(fields)
        ids = self._ids(fields)
        if ids is None:
            return REASON_NO_TRACE
        first = self._entered.pop(str(fields["span_id"]), None)
        start, resolution = _start(time_ns, busy, idle, first[1] if first else None)
        times = {"busy_ns": round(busy * 1e3), "idle_ns": round(idle * 1e3)}
        row = self._row(record, {**fields, **times, **self._cost(fields)}, ids)
        row |= {"start_ns": start, "end_ns": time_ns, "resolution_ns": resolution}
        self.rows.append(row)
        return ""

    def _cost(self, fields: Mapping[str, Any]) -> dict[str, float]:
        """The cost of a hop's choice, which a line of the scheduler told before."""
        if not str(fields["span_name"]).endswith("route_request"):
            return {}
        cost = self.costs.pop((str(fields.get("request_id")), str(fields.get("worker_id"))), None)
        return {} if cost is None else {"logit": cost}

    def finish(self) -> None:
        """Spans that never ended in this log."""
        for record, time_ns, fields in self._entered.values():
            row = self._row(
                record,
                fields,
                (str(fields["trace_id"]), str(fields["span_id"]), fields.get("parent_id"), False),
            )
            self.rows.append(row | {"start_ns": time_ns, "end_ns": None, "resolution_ns": MS})
        self._entered.clear()

    def _remember(self, fields: Mapping[str, Any]) -> None:
        request = fields.get("dynamo.request.id") or fields.get("request_id")
        if not request or not fields.get("trace_id"):
            return
        home = self._homes.setdefault(str(request), _Home(str(fields["trace_id"])))
        home.parents[str(fields.get("span_name"))] = str(fields["span_id"])
        if len(self._homes) > MAX_REQUESTS:
            del self._homes[next(iter(self._homes))]

    def _ids(self, fields: Mapping[str, Any]) -> tuple[str, str, object, bool] | None:
        """(trace, span, parent, made up here) of a closing line."""
        if fields.get("trace_id"):
            return str(fields["trace_id"]), str(fields["span_id"]), fields.get("parent_id"), False
        home = self._homes.get(str(fields.get("dynamo.request.id") or fields.get("request_id")))
        if home is None:
            return None
        name = str(fields["span_name"])
        own = fields.get("dynamo.operation.id") or fields["span_id"]
        made = hashlib.sha256(f"{home.trace_id}/{name}/{own}".encode()).hexdigest()[:16]
        parents = ["request.lifecycle", "http-request"]
        if name.startswith(("worker.", "response.streaming.")):
            parents = ["handle_payload"]
        parent = next((home.parents[p] for p in parents if p in home.parents), None)
        return home.trace_id, made, parent, True

    def _row(
        self, record: int, fields: Mapping[str, Any], ids: tuple[str, str, object, bool]
    ) -> dict[str, Any]:
        trace, span, parent, made = ids
        kind = str(fields.get("otel.kind") or "internal").lower()
        return {
            "record": record, "trace_id": trace, "span_id": span,
            "parent_span_id": None if parent in (None, "") else str(parent),
            "name": str(fields.get("span_name")), "kind": kind, "status_code": "unset",
            "scope_name": self.scope,
            "resource": self.resource,
            "extra": MADE_SPAN_ID if made else None,
            **_attributes(fields),
        }  # fmt: skip


def _start(end: int, busy_us: float, idle_us: float, first_entry: int | None) -> tuple[int, int]:
    """(start, resolution): the first entry, kept inside what the rounded length allows."""
    length = round((busy_us + idle_us) * 1e3)
    grain = max(_grain_us(busy_us), _grain_us(idle_us)) * 1000
    start = end - length
    if first_entry is not None:
        start = min(max(first_entry, start - grain), start + grain)
    return start, max(grain, MS)


def _grain_us(value: float) -> int:
    """What one unit of the third digit stands for."""
    return 1 if value < 1000 else int(10 ** (math.floor(math.log10(value)) - 2))


def _attributes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as typed attributes, the way table `spans` keeps them: keys as one text, values as
    a list.

    Texts too long to be a name are told by their length only.
    """
    typed: dict[str, dict[str, Any]] = {"string": {}, "int": {}, "double": {}, "bool": {}}
    for key, value in fields.items():
        if key in _OWN or value is None:
            continue
        if isinstance(value, bool):
            typed["bool"][key] = value
        elif key in _BOOLEAN_KEYS and value in _BOOLEANS:
            typed["bool"][key] = _BOOLEANS[value]
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            typed["int"][key] = value
        elif isinstance(value, float):
            typed["double"][key] = value
        else:
            said = str(value)
            typed["string"][key] = said if len(said) <= LONG_TEXT else f'{{"length":{len(said)}}}'
    columns: dict[str, Any] = {}
    for kind, values in typed.items():
        columns[f"{kind}_keys"] = SEPARATOR.join(values) if values else None
        columns[f"{kind}_values"] = list(values.values()) if values else None
    return columns
