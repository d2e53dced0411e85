"""Spans with known truth as OTLP/JSON lines, as a collector's file exporter writes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MS = 1_000_000
S = 1_000_000_000
T0 = 1_700_000_000 * S  # 2023-11-14T22:13:20Z
INTERNAL, SERVER, CLIENT = 1, 2, 3


@dataclass
class Span:
    """One span and where it comes from."""

    resource: Mapping[str, Any]
    scope: str
    name: str
    trace: str
    span: str
    start: int
    end: int
    parent: str | None = None
    kind: int = SERVER
    attributes: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[tuple[str, int], ...] = ()
    error: bool = False


def trace_id(*parts: object) -> str:
    return hashlib.sha256(repr(("trace", *parts)).encode()).hexdigest()[:32]


def span_id(*parts: object) -> str:
    return hashlib.sha256(repr(("span", *parts)).encode()).hexdigest()[:16]


def uuid(*parts: object) -> str:
    h = hashlib.sha256(repr(("uuid", *parts)).encode()).hexdigest()
    return f"{h[:8]}-{h[8:12]}-4{h[13:16]}-a{h[17:20]}-{h[20:32]}"


def write(path: Path, spans: Iterable[Span], per_line: int = 8) -> Path:
    """One line per exported batch; spans of one resource and scope together."""
    spans = sorted(spans, key=lambda s: (s.end, s.span))
    lines = []
    for at in range(0, len(spans), per_line):
        groups: dict[str, dict[str, Any]] = {}
        for span in spans[at : at + per_line]:
            key = json.dumps([span.resource, span.scope], sort_keys=True)
            group = groups.setdefault(
                key,
                {
                    "resource": {"attributes": _pairs(span.resource)},
                    "scopeSpans": [{"scope": {"name": span.scope}, "spans": []}],
                },
            )
            group["scopeSpans"][0]["spans"].append(_span(span))
        lines.append(json.dumps({"resourceSpans": list(groups.values())}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def _span(span: Span) -> dict[str, Any]:
    return {
        "traceId": span.trace,
        "spanId": span.span,
        **({"parentSpanId": span.parent} if span.parent else {}),
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.start),
        "endTimeUnixNano": str(span.end),
        "attributes": _pairs(span.attributes),
        **(
            {"events": [{"name": n, "timeUnixNano": str(t)} for n, t in span.events]}
            if span.events
            else {}
        ),
        "status": {"code": 2} if span.error else {},
        "flags": 256,
    }


def _pairs(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": k, "value": _value(v)} for k, v in attributes.items() if v is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, (list, tuple)):
        return {"arrayValue": {"values": [_value(v) for v in value]}}
    return {"stringValue": str(value)}
