"""Recognises JSON lines that carry a Dynamo trace schema, wrapped by a file sink or bare."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from pdtrace.model import Head

_FIRST_LINES = 20
# The beginning of a record; a line may be longer than the head (hashes of a long prompt).
_BEGINNING = (
    rb'^\s*\{(?:\s*"timestamp"\s*:\s*\d+\s*,)?(?:\s*"event"\s*:\s*\{)?\s*"schema"\s*:\s*"%b"'
)


def carries_schema(head: Head, schema: str) -> bool:
    """Whether one of the first lines is a record of this schema: naming it somewhere is not
    enough."""
    beginning = re.compile(_BEGINNING % re.escape(schema.encode()))
    for line in head.data.split(b"\n")[:_FIRST_LINES]:
        if beginning.match(line):
            return True
        if schema.encode() in line and event_of(_object(line), schema) is not None:
            return True
    return False


def event_of(record: Mapping[str, Any], schema: str) -> Mapping[str, Any] | None:
    """The event of a record, wrapped or bare; None when it has another schema."""
    event = record.get("event", record)
    return event if isinstance(event, dict) and event.get("schema") == schema else None


def _object(line: bytes) -> Mapping[str, Any]:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
