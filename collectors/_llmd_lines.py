"""One line of llm-d's logs (zap): its message, instant and fields, whoever carried it.

Source: llm-d/llm-d-router pkg/common/observability/logging; kubernetes-sigs/controller-runtime's zap options. JSON with
`ts`, `level`, `msg` (epoch seconds, or RFC 3339 of whole seconds: the operators' chart) or with `timestamp`, `body`; and the
console layout: instant, level, caller, message and fields between tabs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pdtrace.records import dataclass

from ._common import integer, loads, number, rfc3339_to_ns
from ._llmd_names import ADDRESS, POD

_CONSOLE = re.compile(
    rb"(\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d))\t([A-Za-z0-9()-]+)\t(?:([\w./:-]+)\t)?([^\t{]+?)(?:\t(\{.*\}))?\s*$"
)
_ANSI = re.compile(rb"\x1b\[[0-9;]*m")
_FRACTION = re.compile(r"\.(\d+)")


@dataclass(frozen=True)
class Line:
    """What one line says."""

    message: str
    level: str
    time_ns: int | None
    resolution_ns: int | None
    fields: Mapping[str, Any]

    @property
    def request(self) -> str | None:
        """The caller's x-request-id, or the sidecar's own id."""
        for key in ("x-request-id", "request_id", "requestID"):
            value = self.fields.get(key)
            if isinstance(value, str) and value:
                return value
        return None


def line_of(raw: bytes) -> Line | None:
    """A line of llm-d's loggers; None for any other."""
    start = raw.find(b"{")
    if start >= 0:
        try:
            value = loads(raw[start:])
        except ValueError:
            value = None
        if isinstance(value, dict):
            inner = value.get("log")
            if isinstance(inner, str):  # Docker's and fluentd's way to carry a line
                return line_of(inner.encode("utf-8", "replace"))
            if (line := _of_json(value)) is not None:
                return line
    return _of_console(_ANSI.sub(b"", raw))


def _of_json(value: Mapping[str, Any]) -> Line | None:
    message = value.get("msg", value.get("body", value.get("message")))
    if not isinstance(message, str):
        return None
    time_ns, resolution_ns = _instant(value.get("ts", value.get("timestamp", value.get("time"))))
    level = str(value.get("level", value.get("severity", ""))).lower()
    return Line(message, level, time_ns, resolution_ns, value)


def _of_console(raw: bytes) -> Line | None:
    found = _CONSOLE.search(raw)
    if found is None:
        return None
    stamp, level, _, message, fields = found.groups()
    time_ns, resolution_ns = _instant(stamp.decode())
    try:
        told = loads(fields) if fields else {}
    except ValueError:
        told = {}
    text = message.decode("utf-8", "replace").strip()
    return Line(
        text,
        level.decode().lower(),
        time_ns,
        resolution_ns,
        told if isinstance(told, dict) else {},
    )


def _instant(value: object) -> tuple[int | None, int | None]:
    """Epoch nanoseconds and how finely they are known."""
    if isinstance(value, str):
        time_ns = rfc3339_to_ns(value.replace(",", "."))
        digits = _FRACTION.search(value)
        return time_ns, None if time_ns is None else 10 ** max(0, 9 - len(digits[1]) if digits else 9)  # fmt: skip
    seconds = number(value)
    if seconds is None or not 1e9 < seconds < 9e9:
        return None, None
    return round(seconds * 1e6) * 1_000, 1_000


def endpoint_of(value: object) -> str | None:
    """The worker that an endpoint names: {NamespacedName:ns/pod Address:ip ...}, address:port, or a pod; of several the first."""
    if isinstance(value, dict):
        name, at = value.get("Name") or value.get("PodName"), value.get("Address")
        if isinstance(name, str) and name:
            return _pod(name)
        return f"address:{at}:{value['Port']}" if at and value.get("Port") else None
    if not isinstance(value, str):
        return None
    named = re.search(r"NamespacedName:([^\s{}]+)", value)
    if named:
        return _pod(named[1])
    text = value.strip("[]{} ").split(",")[0].split(" ")[0]
    if re.match(ADDRESS, text):
        return f"address:{text}"
    return _pod(text) if "/" in text else None


def _pod(text: str) -> str | None:
    found = re.match(POD, text)
    return f"pod:{found[1]}" if found else None


def scores_of(fields: Mapping[str, Any]) -> tuple[int | None, float | None, str | None]:
    """Candidates, best score, and whose it is where nobody shares it, of a picker's line; its list is not sorted yet."""
    count = integer(fields.get("num-of-candidates"))
    told = fields.get("scored-endpoints", fields.get("scored-pods"))
    if not isinstance(told, list):
        return count, None, None
    scored = [
        (score, endpoint_of(one.get("Endpoint", one.get("Pod"))))
        for one in told
        if isinstance(one, dict) and (score := number(one.get("Score"))) is not None
    ]
    if not scored:
        return count, None, None
    best = max(score for score, _ in scored)
    holders = {worker for score, worker in scored if score == best}
    alone = len([1 for score, _ in scored if score == best]) == 1
    return count, best, holders.pop() if alone else None
