"""What people type after options: limits, checks, instants; each parser raises BadOption with an example."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Literal

from pdtrace.errors import BadOption
from pdtrace.model import Slo
from pdtrace.records import dataclass

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
_ITL_KEY = re.compile(r"^itl_(?:max|p(50|75|90|95|99|99\.9))$")
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
    """Limits such as ttft=500ms,tpot=50ms,itl_p99=100ms."""
    slo = Slo()
    for part in text.split(","):
        key, separator, value = part.partition("=")
        found = slo_limit(key)
        if not separator or found is None:
            raise BadOption(
                f"--slo: {part.strip()!r} is not understood",
                "write it like ttft=500ms,tpot=50ms,e2e=10s, or name a .toml file",
            )
        slo = with_limit(slo, *found, duration_ms(value), where="--slo")
    return slo


def slo_limit(key: str) -> tuple[str, float | None] | None:
    """The metric that a limit's name means, and for gaps between tokens which quantile; None when it is no limit."""
    word = key.strip().lower().removesuffix("_ms")
    if word in _SLO_KEYS:
        return _SLO_KEYS[word], None
    match = _ITL_KEY.match(word)
    return ("itl_ms", float(match[1]) / 100 if match[1] else 1.0) if match else None


def with_limit(slo: Slo, metric: str, quantile: float | None, limit_ms: float, where: str) -> Slo:
    """The limits with one more; a second limit of the same metric is refused."""
    if getattr(slo, metric) is not None:
        name = metric.removesuffix("_ms")
        raise BadOption(f"{where}: two limits for {name}", "give one limit for each metric")
    if limit_ms <= 0:
        raise BadOption(f"{where}: a limit of 0 can never be met", "write it like ttft=500ms")
    slo = replace(slo, **{metric: limit_ms})
    return slo if quantile is None else replace(slo, itl_quantile=quantile)


def parse_ratio(text: str) -> tuple[int, int]:
    """Prefill and decode workers such as 1:3."""
    match = re.fullmatch(r"\s*([1-9]\d{0,3})\s*[:/]\s*([1-9]\d{0,3})\s*", text)
    if match is None:
        raise BadOption(f"--pd: {text!r} is no ratio", "write prefill and decode workers like 1:3")
    return int(match[1]), int(match[2])


def parse_range(text: str) -> tuple[float, float]:
    """A positive number such as 100, or a range such as 50-200."""
    parts = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(?:-\s*([0-9]*\.?[0-9]+)\s*)?", text)
    low = float(parts[1]) if parts else 0.0
    high = float(parts[2]) if parts and parts[2] else low
    if not 0 < low <= high:
        raise BadOption(f"{text!r} is no range", "write it like 100 or 50-200")
    return low, high


def parse_check(text: str, *, limited: bool = True) -> Check:
    """A condition such as ttft_p95<500ms, failed<1% or attainment>=95%; the last needs limits to be given."""
    match = _CHECK.match(text.lower())
    if match is None:
        raise BadOption(
            f"--check: {text!r} is not understood",
            "write it like 'ttft_p95<500ms', 'tpot_p50<=50ms', 'failed<1%' or 'attainment>=95%'",
        )
    if match[1]:
        return Check(text, f"{match[1]}_ms", match[2], match[3], duration_ms(match[4]))  # type: ignore[arg-type]
    if match[5] == "attainment" and not limited:
        raise BadOption(
            f"--check: {text!r} needs limits to be attained", "add them, like --slo ttft=500ms"
        )
    limit = float(match[7]) / (100 if match[8] else 1)
    return Check(text, match[5], "share", match[6], limit)  # type: ignore[arg-type]


def one_of(**given: object) -> None:
    """Raise BadOption when more than one of these options was given."""
    names = [f"--{name}" for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise BadOption(f"{' and '.join(names)} exclude each other", f"give {' or '.join(names)}")


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
