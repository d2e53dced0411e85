"""Dynamo's log as it comes without DYN_LOGGING_JSONL: Rust's compact text, to the fields of the JSON lines.

`2026-07-24T02:09:00.860252Z  INFO http-request: dynamo_llm::http::service::metrics: request completed
request_id=be2b... status=success elapsed_ms=1497 method=POST ... ttft_ms="1094.97"`: instant, level,
names of the open spans, target, message, fields of the event, fields of the spans. Where event and span
have a field of one name the event's stands first, and is taken: http-request has a request_id of its own that
no worker knows. Colours (also in files: tracing writes them without a terminal) are taken off. Source:
ai-dynamo/dynamo lib/runtime/src/logging.rs with tracing-subscriber's compact format; seen in logs of 2026.
"""

from __future__ import annotations

import re
from typing import Any

_ANSI = re.compile(rb"\x1b\[[0-9;]*m")
_LINE = re.compile(
    r"^(?P<front>.*?)(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d))\s+"
    r"(?P<level>TRACE|DEBUG|INFO|WARN|ERROR)\s+"
    r"(?:(?P<spans>[\w.-]+(?::[\w.-]+)*): (?=[A-Za-z_]\w*::))?"
    r"(?P<target>[A-Za-z_]\w*(?:(?:::|\.)[\w<>]+)*): ?(?P<said>.*)$",
    re.DOTALL,
)
_FIELD = re.compile(r'(?:^|\s)([A-Za-z_][\w.]*)=("(?:[^"\\]|\\.)*"|\S*)')
MARK = "_text"  # among the fields: the line was text
_OTHERS = re.compile(r"[\"'=]|\b(?:TRACE|DEBUG|INFO|WARN|WARNING|ERROR)\b")
_LABELS = re.compile(r"\{[^{}]*\}")  # of a log store
_MOST_WORDS = 8  # in front of a line: `Jul 24 02:09:00 host unit[7]: `, a pod, a stamp of its own
_MARKS = (b"INFO", b"WARN", b"ERROR", b"DEBUG", b"TRACE")


def parse(line: bytes) -> tuple[str, dict[str, Any]] | None:
    """(what stands before the instant, fields as the JSON lines have them), or None."""
    if b": " not in line or not any(mark in line for mark in _MARKS):
        return None
    found = _LINE.match(_ANSI.sub(b"", line).decode("utf-8", "replace").rstrip())
    if found is None or not _is_carrier(found["front"]):
        return None
    said = found["said"]
    values: dict[str, Any] = {}
    first = len(said)
    for field in _FIELD.finditer(said):
        first = min(first, field.start())
        values.setdefault(field[1], _plain(field[2]))
    spans = found["spans"]
    return found["front"], {
        **values,
        **({"span_name": spans.rpartition(":")[2]} if spans else {}),
        MARK: True,
        "time": found["time"],
        "level": found["level"],
        "target": found["target"],
        "message": said[:first].strip(),
    }


def _is_carrier(front: str) -> bool:
    """Whether this may be what carries a line; else another writer's line quotes one, a prompt for example."""
    front = _LABELS.sub("", front)
    return len(front.split()) <= _MOST_WORDS and not _OTHERS.search(front)


def _plain(value: str) -> str:
    """A value without the quotes of its debug form."""
    if value[:1] == '"' and value[-1:] == '"' and len(value) > 1:
        return value[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return value
