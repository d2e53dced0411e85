"""What people type after options: limits, checks, instants; each parser raises BadOption with an example."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Literal

from pdtrace.errors import BadOption
from pdtrace.model import Slo

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_UNITS_MS = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "m": 60e3, "min": 60e3}
_DURATION = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([a-zµ]*)\s*$")
_SLO_KEYS = {
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "itl": "itl_ms",
    "e2e": "e2e_ms",
    "e2el": "e2e_ms",
}
_CHECK = re.compile(
    r"^\s*(ttft|tpot|itl|e2e)_(mean|p50|p90|p95|p99|max)\s*(<=|>=|<|>)\s*(.+)$"
    r"|^\s*(failed|attainment)\s*(<=|>=|<|>)\s*([0-9]*\.?[0-9]+)\s*(%?)\s*$"
)


@dataclass(frozen=True)
class Check:
    """A condition on one number of the diagnosis; durations in ms, shares in 0..1."""

    text: str
    metric: str
    statistic: str
    operator: Literal["<", "<=", ">", ">="]
    limit: float

    def holds(self, value: float | None) -> bool:
        """Whether the value meets the condition; an unknown value never does."""
        if value is None:
            return False
        return {
            "<": value < self.limit,
            "<=": value <= self.limit,
            ">": value > self.limit,
            ">=": value >= self.limit,
        }[self.operator]


def duration_ms(text: str) -> float:
    """A duration such as 500ms, 0.5s or 2m in milliseconds; a bare number is milliseconds."""
    match = _DURATION.match(text.lower())
    if match is None or (match[2] or "ms") not in _UNITS_MS:
        raise BadOption(f"{text!r} is no duration", "write it like 500ms, 0.5s or 2m")
    return float(match[1]) * _UNITS_MS[match[2] or "ms"]


def parse_slo(text: str) -> Slo:
    """Limits such as ttft=500ms,tpot=50ms."""
    slo = Slo()
    for part in text.split(","):
        key, separator, value = part.partition("=")
        name = _SLO_KEYS.get(key.strip().lower().removesuffix("_ms"))
        if not separator or name is None:
            raise BadOption(
                f"--slo: {part.strip()!r} is not understood",
                "write it like ttft=500ms,tpot=50ms,e2e=10s",
            )
        slo = replace(slo, **{name: duration_ms(value)})
    return slo


def parse_check(text: str) -> Check:
    """A condition such as ttft_p95<500ms, failed<1% or attainment>=95%."""
    match = _CHECK.match(text.lower())
    if match is None:
        raise BadOption(
            f"--check: {text!r} is not understood",
            "write it like 'ttft_p95<500ms', 'tpot_p50<=50ms', 'failed<1%' or 'attainment>=95%'",
        )
    if match[1]:
        return Check(text, f"{match[1]}_ms", match[2], match[3], duration_ms(match[4]))  # type: ignore[arg-type]
    limit = float(match[7]) / (100 if match[8] else 1)
    return Check(text, match[5], "share", match[6], limit)  # type: ignore[arg-type]


def parse_window(since: str | None, until: str | None) -> tuple[int | None, int | None]:
    """--since and --until as nanoseconds; None where not given."""
    start = None if since is None else parse_instant(since)
    end = None if until is None else parse_instant(until)
    if start is not None and end is not None and start >= end:
        raise BadOption(
            f"--since {since} is not before --until {until}", "exchange them; the end is exclusive"
        )
    return start, end


def parse_instant(text: str) -> int:
    """An ISO-8601 instant (UTC when it has no zone) or epoch seconds, as nanoseconds."""
    if re.fullmatch(r"\d{9,10}(\.\d+)?", text.strip()):
        return round(float(text) * 1e9)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise BadOption(f"{text!r} is no instant", "write it like 2026-11-29T23:05:00Z") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    instant = (moment - _EPOCH) // _MICROSECOND * 1000
    if not -(2**63) <= instant < 2**63:
        raise BadOption(f"{text!r} is outside of the years 1678 to 2261", "give a time of the data")
    return instant
