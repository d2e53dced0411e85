"""Spans as OTLP JSON lines, as a collector's file exporter writes them; ids; host clocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdtrace.simulator.run import Run
from pdtrace.simulator.scenario import EPOCH_NS

INTERNAL, SERVER, CLIENT = 1, 2, 3
BATCH = 32  # spans of one export

Clock = Callable[[int], int]


@dataclass(frozen=True)
class Span:
    """One span; instants are those of the clock of the host that emitted it."""

    resource: Mapping[str, Any]
    scope: str
    name: str
    trace: str
    span: str
    start: int
    end: int
    parent: str | None = None
    kind: int = INTERNAL
    attributes: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[tuple[str, int]] = ()
    error: bool = False
    flags: int | None = None  # of the trace context; None: not said to be sampled


class Ids:
    """Ids that depend on scenario, seed and what they name, and on nothing else."""

    def __init__(self, run: Run) -> None:
        self._key = f"{run.scenario.name}/{run.seed}/{run.duration_s}"

    def hex(self, length: int, *parts: object) -> str:
        """As many hex digits."""
        text = repr((self._key, *parts)).encode()
        return hashlib.blake2b(text, digest_size=32).hexdigest()[:length]

    def uuid(self, *parts: object) -> str:
        """A version 4 UUID."""
        h = self.hex(32, "uuid", *parts)
        return f"{h[:8]}-{h[8:12]}-4{h[13:16]}-a{h[17:20]}-{h[20:32]}"

    def number(self, *parts: object) -> int:
        """A worker id as Dynamo draws them: 64 bits."""
        return int(self.hex(16, "number", *parts), 16)


def clocks(run: Run) -> dict[str, Clock]:
    """For each worker what the wall clock of its host shows at a true instant."""

    def shown(offset: int, drift: float) -> Clock:
        return lambda at: at + offset + round((at - EPOCH_NS) * drift * 1e-6)

    return {
        row["worker"]: shown(row["offset_ns"], row["drift_ppm"])
        for row in run.workers.iter_rows(named=True)
    }


def write_spans(path: Path, spans: Sequence[Span]) -> None:
    """One line an export, in the order in which spans end."""
    ordered = sorted(spans, key=lambda span: (span.end, span.span))
    with path.open("w", encoding="utf-8") as stream:
        for at in range(0, len(ordered), BATCH):
            stream.write(json.dumps(_export(ordered[at : at + BATCH])) + "\n")


def _export(spans: Sequence[Span]) -> dict[str, Any]:
    groups: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        groups.setdefault((json.dumps(span.resource), span.scope), []).append(span)
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": pairs(group[0].resource)},
                "scopeSpans": [{"scope": {"name": scope}, "spans": [_span(s) for s in group]}],
            }
            for (_, scope), group in groups.items()
        ]
    }


def _span(span: Span) -> dict[str, Any]:
    shown: dict[str, Any] = {"traceId": span.trace, "spanId": span.span}
    if span.parent:
        shown["parentSpanId"] = span.parent
    shown |= {
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.start),
        "endTimeUnixNano": str(span.end),
    }
    if span.attributes:
        shown["attributes"] = pairs(span.attributes)
    if span.events:
        shown["events"] = [{"timeUnixNano": str(at), "name": name} for name, at in span.events]
    remote = 768 if span.kind == SERVER and span.parent else 256  # whether the parent is elsewhere
    flags = remote if span.flags is None else span.flags
    return shown | {"status": {"code": 2} if span.error else {}, "flags": flags}


def pairs(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """OTLP's key-value list; what is None is not set."""
    return [{"key": k, "value": _value(v)} for k, v in attributes.items() if v is not None]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [_value(v) for v in value]}}
    return {"stringValue": str(value)}
