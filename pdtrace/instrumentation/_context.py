"""Trace and span ids, and the W3C traceparent header (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping
from typing import NamedTuple

TRACEPARENT = "traceparent"
_HEADER = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-|$)")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16

# An own source of randomness: a serving process that seeds `random` must not repeat its trace ids.
_random = random.Random()  # noqa: S311 -- ids, no secrets
os.register_at_fork(after_in_child=_random.seed)


class Parent(NamedTuple):
    """The span that caused a request: ids as lower-case hexadecimal."""

    trace_id: str
    span_id: str
    sampled: bool


def new_trace_id() -> str:
    """A random trace id, 32 hexadecimal digits, never zero."""
    return f"{_random.getrandbits(128) or 1:032x}"


def new_span_id() -> str:
    """A random span id, 16 hexadecimal digits, never zero."""
    return f"{_random.getrandbits(64) or 1:016x}"


def parse(header: str | bytes | None) -> Parent | None:
    """The parent that a traceparent header names; None where there is none or it is malformed."""
    if not header:
        return None
    text = header.decode("latin-1") if isinstance(header, bytes) else header
    found = _HEADER.match(text.strip().lower())
    if found is None or found[1] == _NO_TRACE or found[2] == _NO_SPAN or text[:2] == "ff":
        return None
    return Parent(found[1], found[2], bool(int(found[3], 16) & 1))


def from_headers(headers: Mapping[str, str]) -> Parent | None:
    """The parent that these HTTP headers name, whatever the case of their names."""
    value = headers.get(TRACEPARENT) or headers.get("Traceparent")
    if value is None:
        value = next((v for k, v in headers.items() if k.lower() == TRACEPARENT), None)
    return parse(value)
