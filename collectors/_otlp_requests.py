"""OTLP/JSON export requests one by one: told apart by signal, cut and broken ones saved or counted."""

from __future__ import annotations

import json
import re
from dataclasses import field
from typing import Any

import orjson

from pdtrace.records import dataclass

from . import _otlp_views as views
from ._common import CUT_OFF, LONELY, NOT_AN_OBJECT, NOT_JSON, loads
from ._otlp_json_walk import camel

NOT_OTLP = "JSON, but no OTLP export request"


@dataclass
class Requests:
    """What export requests hold, by signal, and the records that could not be taken.

    (reason, excerpt).
    """

    spans: list[Any] = field(default_factory=list)
    logs: list[Any] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def take(self, value: Any) -> None:
        """Note the contents of one request, or of an array of them."""
        if isinstance(value, list):
            for item in value:
                self.take(item)
            return
        if not isinstance(value, dict):
            self.problems.append((NOT_AN_OBJECT, ""))
            return
        request = camel(value)
        inner = request.get("trace") or request.get("data") or request.get("result")
        if isinstance(inner, dict) and not request.keys() & _SIGNALS:
            request = camel(inner)
        found = False
        for key, target in (
            ("resourceSpans", self.spans),
            ("batches", self.spans),
            ("resourceLogs", self.logs),
            ("resourceMetrics", self.metrics),
        ):
            items = request.get(key)
            if key in request:
                found = True
                target.extend(items if isinstance(items, list) else [])
        if not found and (viewed := views.resource_spans(value)):
            self.spans.extend(viewed)
        elif not found and request:
            self.problems.append((NOT_OTLP, ""))


_SIGNALS = {"resourceSpans", "resourceLogs", "resourceMetrics", "batches"}


def requests_of_lines(block: bytes, *, cut: bool) -> Requests:
    """Requests of whole lines, one by one; `cut`: the last one may end in the middle."""
    found = Requests()
    lines = block.split(b"\n")
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            found.take(loads(line))
        except ValueError:
            last = cut and index == len(lines) - 1
            if last and (value := salvaged(line)) is not None:
                found.take(value)
            found.problems.append(
                (CUT_OFF if last else NOT_JSON, line[:200].decode("utf-8", "replace"))
            )
    return found


def requests_of_document(data: bytes) -> Requests:
    """Requests of a whole file: one object or array, several one after the other, or a cut one."""
    found = Requests()
    try:
        found.take(loads(data))
    except ValueError:
        _take_one_by_one(LONELY.sub(r"\\ufffd", data.decode("utf-8", "replace")), found)
    return found


def _take_one_by_one(text: str, found: Requests) -> None:
    decoder = json.JSONDecoder()
    at = 0
    blank = re.compile(r"[\s,\x1e]*")
    while (at := blank.match(text, at).end()) < len(text):  # type: ignore[union-attr]
        try:
            value, at = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError):
            rest = text[at:]
            kept = salvaged(rest.encode("utf-8", "surrogatepass"))
            if kept is not None:
                found.take(kept)
            reason = CUT_OFF if rest[:1] in "{[" else NOT_JSON
            found.problems.append((reason, rest[:200]))
            return
        found.take(value)


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')


_RECORD_LISTS = {
    b"",
    b"spans",
    b"logRecords",
    b"log_records",
    b"metrics",
    b"scopeSpans",
    b"scope_spans",
    b"scopeLogs",
    b"scope_logs",
    b"scopeMetrics",
    b"scope_metrics",
    b"resourceSpans",
    b"resource_spans",
    b"resourceLogs",
    b"resource_logs",
    b"resourceMetrics",
    b"resource_metrics",
    b"batches",
}


def salvaged(data: bytes) -> Any:
    """A cut JSON request without the record that was cut; None when nothing is left."""
    stack: list[tuple[bytes, bytes]] = []  # closing bracket, key that the list stands under
    last = b""
    end, closers = 0, b""
    for token in _TOKEN.finditer(data):
        sign = token.group()
        if sign in (b"{", b"["):
            stack.append((b"}" if sign == b"{" else b"]", last))
            last = b""
        elif sign in (b"}", b"]"):
            if not stack or stack[-1][0] != sign:
                return None
            stack.pop()
            if sign == b"}" and stack and stack[-1][0] == b"]" and stack[-1][1] in _RECORD_LISTS:
                end, closers = token.end(), b"".join(bracket for bracket, _ in reversed(stack))
        else:
            last = sign[1:-1]
    if not end:
        return None
    try:
        return orjson.loads(data[:end] + closers)
    except orjson.JSONDecodeError:
        return None
