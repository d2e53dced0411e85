"""Numbers as people read them: one way to write a duration, a share, a count, a size."""

from __future__ import annotations

UNKNOWN = "–"


def duration(ms: float | None) -> str:
    """Milliseconds as 0.42 ms, 92.5 ms, 1.15 s or 3.2 min."""
    if ms is None:
        return UNKNOWN
    size = abs(ms)
    if size >= 600_000:
        return f"{ms / 60_000:.1f} min"
    if size >= 10_000:
        return f"{ms / 1000:.1f} s"
    if size >= 1000:
        return f"{ms / 1000:.2f} s"
    if size >= 100:
        return f"{ms:.0f} ms"
    if size >= 10 or size == 0:
        return f"{ms:.1f} ms"
    return f"{ms:.2f} ms"


def short(ms: float) -> str:
    """A resolution: 1 s, 10 ms, without digits that it does not have."""
    return f"{ms / 1000:g} s" if ms >= 1000 else f"{ms:g} ms"


def seconds(value: float | None) -> str:
    """Seconds lost or spent, as 49.9 s."""
    if value is None:
        return UNKNOWN
    rounded = round(value, 1 if abs(value) >= 10 else 2) or 0.0  # no minus before nothing
    return f"{rounded:.1f} s" if abs(value) >= 10 else f"{rounded:.2f} s"


def share(value: float | None) -> str:
    """A share of 0..1 as per cent."""
    if value is None:
        return UNKNOWN
    percent = 100 * value
    return f"{percent:.0f} %" if abs(percent) >= 10 else f"{percent:.1f} %"


def size(value: float | None) -> str:
    """Bytes as 512 B, 759 MB, 6.11 GB (powers of ten)."""
    if value is None:
        return UNKNOWN
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            scaled = value / scale
            digits = 0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
            return f"{scaled:.{digits}f} {unit}"
    return f"{value:.0f} B"


def rate(bytes_per_second: float | None) -> str:
    """A rate as 0.36 GB/s or 403 MB/s (powers of ten)."""
    return UNKNOWN if bytes_per_second is None else f"{size(bytes_per_second)}/s"


def count(value: float | None) -> str:
    """A count with thousands separators."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def quantity(value: float | None, unit: str | None) -> str:
    """A value with its unit; seconds, milliseconds and shares in their own style."""
    if value is None:
        return UNKNOWN
    if unit == "ms":
        return duration(value)
    if unit == "s":
        return seconds(value)
    if unit in {"1", "ratio", "share"}:
        return share(value)
    text = count(value) if float(value).is_integer() else f"{value:,.2f}"
    noun = (unit or "").removesuffix("s") if value == 1 else unit
    return f"{text} {noun or ''}".strip()


def plural(n: int, noun: str) -> str:
    """1 request, 2 requests."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
