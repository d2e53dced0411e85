"""Units of durations whose header names none: the combination that the table itself supports."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pdtrace.records import dataclass

from ._table_headers import UNIT_MS

Floats = NDArray[np.float64]

CANDIDATES = ("s", "ms", "us", "ns")
NAMES = {
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
    "min": "minutes",
}
# Where such latencies usually lie, in ms: only a prior, the table's own consistency weighs more.
_USUAL_MS = {"ttft": 500.0, "e2e": 5_000.0, "tpot": 30.0}
_PER_TOKEN_MS = 30.0
_OTHER_UNIT = 0.7  # cost of two columns without a unit having different ones
_VIOLATION = 8.0  # cost of a first token after the end, times the share of rows
_MISMATCH = 3.0  # cost of a factor of ten between a rate and the durations it must fit


@dataclass(frozen=True)
class Guess:
    """The unit taken for a column, and why."""

    unit: str
    why: str


def guess_units(
    raw: Mapping[str, pl.Series],
    known: Mapping[str, str],
    span_ms: pl.Series | None,
    output_tokens: pl.Series | None,
    tps: pl.Series | None,
) -> dict[str, Guess]:
    """Units of the columns of `raw` (ttft, e2e, tpot as written) that are not in `known`."""
    unknown = [name for name in ("ttft", "e2e", "tpot") if name in raw and name not in known]
    values = {name: _floats(series) for name, series in raw.items()}
    count = len(next(iter(values.values()))) if values else 0
    tokens, rate = _floats_or_nan(output_tokens, count), _floats_or_nan(tps, count)
    span = _floats_or_nan(span_ms, count)
    best: tuple[float, tuple[str, ...]] | None = None
    for units in itertools.product(CANDIDATES, repeat=len(unknown)):
        scaled = {name: values[name] * UNIT_MS[known[name]] for name in values if name in known}
        scaled |= {name: values[name] * UNIT_MS[u] for name, u in zip(unknown, units, strict=True)}
        cost = _cost(scaled, unknown, tokens, rate, span) + _OTHER_UNIT * (len(set(units)) - 1)
        if best is None or cost < best[0]:
            best = cost, units
    if best is None:
        return {}
    chosen = dict(zip(unknown, best[1], strict=True))
    return {
        name: Guess(unit, _why(name, unit, values, known, chosen, tokens, rate, span))
        for name, unit in chosen.items()
    }


def _floats(series: pl.Series) -> Floats:
    return series.cast(pl.Float64).fill_null(math.nan).to_numpy().astype(np.float64)


def _floats_or_nan(series: pl.Series | None, count: int) -> Floats:
    return np.full(count, math.nan) if series is None else _floats(series)


def _decades(a: Floats, b: Floats | float) -> float | None:
    """Median distance in powers of ten; None where the two never stand in one row."""
    with np.errstate(all="ignore"):
        distance = np.abs(np.log10(a / b))
    distance = distance[np.isfinite(distance)]
    return float(np.median(distance)) if distance.size else None


def _expected_ms(tokens: Floats, rate: Floats) -> Floats:
    """Duration that a token rate stands for."""
    with np.errstate(all="ignore"):
        return np.asarray(tokens / rate * 1e3, dtype=np.float64)


@np.errstate(all="ignore")  # absurd values may overflow
def _cost(
    ms: Mapping[str, Floats], unknown: list[str], tokens: Floats, rate: Floats, span: Floats
) -> float:
    cost = 0.0
    for name in unknown:
        positive = ms[name][np.nan_to_num(ms[name]) > 0]
        if positive.size:
            cost += 0.5 * abs(math.log10(float(np.median(positive)) / _USUAL_MS[name]))
    ttft, e2e, tpot = ms.get("ttft"), ms.get("e2e"), ms.get("tpot")
    if ttft is not None and e2e is not None:
        both = np.isfinite(ttft) & np.isfinite(e2e)
        if both.any():
            cost += _VIOLATION * float(np.mean(ttft[both] > e2e[both] * 1.001))
    if e2e is not None:
        cost += _MISMATCH * (_decades(e2e, span) or 0.0)
        decode = e2e - ttft if ttft is not None else e2e
        gaps = np.where(tokens > 1, tokens - 1, math.nan)
        if tpot is not None:
            cost += _MISMATCH * (_decades(decode, tpot * gaps) or 0.0)
        expected = _expected_ms(tokens, rate)
        in_rate = [_decades(part, expected) for part in (decode, e2e)]
        cost += _MISMATCH * min((x for x in in_rate if x is not None), default=0.0)
        cost += 0.5 * (_decades(decode, gaps * _PER_TOKEN_MS) or 0.0)
    elif tpot is not None:
        cost += _MISMATCH * (_decades(tpot, _expected_ms(np.ones_like(rate), rate)) or 0.0)
    return cost


def _why(
    name: str,
    unit: str,
    values: Mapping[str, Floats],
    known: Mapping[str, str],
    chosen: Mapping[str, str],
    tokens: Floats,
    rate: Floats,
    span: Floats,
) -> str:
    """One clause for people: the median in that unit and which other columns agree."""
    median = float(np.nanmedian(values[name])) if np.isfinite(values[name]).any() else math.nan
    units = {**known, **chosen}
    reasons = [f"a median of {median:g} is usual in {NAMES[unit]}"]
    if name in ("ttft", "e2e") and "ttft" in values and "e2e" in values:
        ttft, e2e = (values[n] * UNIT_MS[units[n]] for n in ("ttft", "e2e"))
        both = np.isfinite(ttft) & np.isfinite(e2e)
        if both.any():
            share = float(np.mean(ttft[both] <= e2e[both] * 1.001))
            reasons.append(f"the first token is not later than the end in {share:.0%} of the rows")
    if name == "e2e":
        e2e = values["e2e"] * UNIT_MS[unit]
        if (d := _decades(e2e, _expected_ms(tokens, rate))) is not None and d < 0.2:
            reasons.append("it fits output tokens over tokens per second")
        if (d := _decades(e2e, span)) is not None and d < 0.1:
            reasons.append("it fits start and end")
    return ", ".join(reasons)
