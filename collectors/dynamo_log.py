"""NVIDIA Dynamo's logs, JSON lines (DYN_LOGGING_JSONL=true) and text: spans, choices, requests, settings, alarms.

Source: ai-dynamo/dynamo lib/runtime/src/logging.rs, 1.6.1; text: _dynamo_log_text. One JSON object a line (time in RFC
3339 with microseconds, level, target, message, the event's and its span's fields); lines of other
writers (Python warnings, banners) are mixed in and skipped. With DYN_LOGGING_SPAN_EVENTS=true the
log tells every span; see _dynamo_log_spans for how well their times are known. A container's
prefix before the object, and Docker's {"log": ...} around it, are taken off; each container of a
mixed file is its own worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import polars as pl

from pdtrace.model import Head, Match, Sink, Source

from . import _dynamo_log_text as text
from . import _log_exports as exports
from ._common import CUT_OFF, NOT_JSON, LineBatch, line_batches

TITLE = "NVIDIA Dynamo"

REASON_OTHER = "JSON, but no log line of Dynamo"
REASON_WRITER = "line of another writer"

_TARGETS = ("dynamo", "request_span", "span_event", "aisimulate", "kvbm", "nixl")


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
    from ._dynamo_log_stream import Stream  # four modules: only for who has such a log

    out.unit("line")
    streams: dict[str, Stream] = {}
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
            stream = streams.setdefault(name, Stream(source.path, name))
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
