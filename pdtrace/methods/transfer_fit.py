"""How long a link takes for so many bytes: T = L0 + bytes / bandwidth, robust, with intervals.

Weighted least squares on relative errors (times scatter in proportion to their size), trimmed after
Rousseeuw & Leroy (1987); intervals from the sandwich variance of White (1980), which holds where the
scatter is uneven. Where transfers overlap on a link, a third term, bytes x others in flight, tells
contention: beside a fair-share link a transfer in company takes about once its own time longer for
each other one (ratio 1), a link with room to spare shows 0.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pdtrace.methods.statistics import Z95, Floats, trimmed_least_squares
from pdtrace.records import dataclass

LEAST = 10  # so few transfers show no line
LEAST_SPREAD = 1.5  # greatest over smallest size: below, setup and bandwidth cannot be told apart
LEAST_TOGETHER = 10  # so many transfers in company and so many alone before contention is judged
CLOCK_STEPS = 5  # a median duration of fewer steps of the clock is mostly rounding

LINK = ("deployment", "source_worker", "destination_worker", "backend", "direction")
TRANSFERS = """
SELECT deployment, source_worker, destination_worker, backend, direction, bytes_basis,
  start_ns, end_ns, duration_ms, bytes
FROM transfer_times
WHERE bytes > 0 AND duration_ms > 0 AND coalesce(outcome, 'completed') = 'completed'
ORDER BY ALL
"""
SCHEMA = {
    **dict.fromkeys(LINK, pl.String), "transfers": pl.Int64, "bytes_basis": pl.String,
    "setup_ms": pl.Float64, "setup_low_ms": pl.Float64, "setup_high_ms": pl.Float64,
    "bytes_per_second": pl.Float64, "bytes_per_second_low": pl.Float64, "bytes_per_second_high": pl.Float64,
    "scatter_ratio": pl.Float64, "contention_ratio": pl.Float64, "contention_low_ratio": pl.Float64,
    "contention_high_ratio": pl.Float64, "note": pl.String,
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """T = setup + bytes / bandwidth (+ contention): value, low, high of each; None where it cannot be told."""

    setup_ms: tuple[float, float, float] | None = None
    bytes_per_second: tuple[float, float | None, float | None] | None = None
    contention: tuple[float, float, float] | None = None
    scatter: float | None = None
    note: str | None = None


def fits(transfers: pl.DataFrame) -> pl.DataFrame:
    """A row of `transfer_fits` for each link."""
    rows = []
    for key, group in transfers.group_by([*LINK, "bytes_basis"], maintain_order=True):
        instants = group.drop_nulls(["start_ns", "end_ns"])
        together = None
        if instants.height == group.height:
            together = others_in_flight(group["start_ns"].to_numpy(), group["end_ns"].to_numpy())
        step = clock_step_ms(instants["start_ns"].to_numpy(), instants["end_ns"].to_numpy())
        line = fit(
            group["bytes"].to_numpy().astype(float), group["duration_ms"].to_numpy(), together, step
        )
        rows.append(
            dict(zip(LINK, key, strict=False))
            | {"bytes_basis": key[-1], "transfers": group.height}
            | _row(line)
        )
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _row(line: Line) -> dict[str, object]:
    names = {
        "setup": ("setup_ms", "setup_low_ms", "setup_high_ms"),
        "speed": ("bytes_per_second", "bytes_per_second_low", "bytes_per_second_high"),
        "contention": ("contention_ratio", "contention_low_ratio", "contention_high_ratio"),
    }
    row: dict[str, object] = {"scatter_ratio": line.scatter, "note": line.note}
    for name, values in (
        ("setup", line.setup_ms),
        ("speed", line.bytes_per_second),
        ("contention", line.contention),
    ):
        row |= dict(zip(names[name], values or (None, None, None), strict=True))
    return row


def fit(
    sizes: Floats, durations_ms: Floats, together: Floats | None = None, step_ms: float = 0.0
) -> Line:
    """The line through (bytes, milliseconds); `together`: mean number of others in flight meanwhile."""
    if len(sizes) < LEAST:
        return Line(note=f"{len(sizes)} transfers are too few for a fit")
    if step_ms and np.median(durations_ms) < CLOCK_STEPS * step_ms:
        return Line(note=f"instants are known to {step_ms:g} ms only: too coarse for a fit")
    if np.quantile(sizes, 0.95) < LEAST_SPREAD * np.quantile(sizes, 0.05):
        return Line(note="sizes are nearly equal: setup time and bandwidth cannot be told apart")
    columns = np.column_stack([np.ones(len(sizes)), sizes])
    shared = together is not None and _both(together)
    if shared and together is not None:
        columns = np.column_stack([columns, sizes * together])
    beta, variance, scatter = _weighted(columns, durations_ms)
    low, high = beta - Z95 * np.sqrt(variance), beta + Z95 * np.sqrt(variance)
    if low[1] <= 0:
        return Line(
            scatter=scatter, note="times do not surely grow with the size: no bandwidth from them"
        )
    contention = None
    if shared:
        half = Z95 * float(np.sqrt(variance[2])) / beta[1]
        value = float(beta[2] / beta[1])
        contention = (value, value - half, value + half)
    return Line(
        setup_ms=(float(beta[0]), float(low[0]), float(high[0])),
        bytes_per_second=(1e3 / float(beta[1]), 1e3 / float(high[1]), 1e3 / float(low[1])),
        contention=contention,
        scatter=scatter,
    )


def _both(together: Floats) -> bool:
    """Enough transfers with company and enough without."""
    alone, joined = int((together < 0.1).sum()), int((together > 0.5).sum())
    return min(alone, joined) >= LEAST_TOGETHER


def _weighted(columns: Floats, y: Floats) -> tuple[Floats, Floats, float]:
    """Coefficients, their sandwich variances and the relative scatter; weights 1 / fitted time."""
    weights = 1 / np.maximum(y, np.median(y) * 1e-3)
    least = float(np.median(y)) * 1e-2
    for _ in range(3):
        found = trimmed_least_squares(columns, y, weights, floor=1e-6)
        weights = 1 / np.maximum(found.at(columns), least)
    kept = trimmed_least_squares(columns, y, weights, floor=1e-6)
    a = columns[kept.kept] * weights[kept.kept, None]
    rest = (y[kept.kept] - columns[kept.kept] @ kept.coefficients) * weights[kept.kept]
    scale = np.abs(a).max(axis=0)
    bread = np.linalg.pinv((a / scale).T @ (a / scale))
    meat = (a / scale * rest[:, None]).T @ (a / scale * rest[:, None])
    n = len(rest) / max(1, len(rest) - columns.shape[1])
    variance: Floats = np.diag(bread @ meat @ bread) * n / scale**2
    return kept.coefficients, variance, float(kept.sigma)


def others_in_flight(start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> Floats:
    """Mean number of other transfers that were under way during each one."""
    start, end = start_ns - start_ns.min(initial=0), end_ns - start_ns.min(initial=0)
    times = np.concatenate([start, end])
    order = np.argsort(times, kind="stable")
    change = np.concatenate([np.ones(len(start)), -np.ones(len(end))])[order]
    at = times[order].astype(np.float64)
    active = np.cumsum(change)
    busy = np.concatenate([[0.0], np.cumsum(active[:-1] * np.diff(at))])

    def until(instants: NDArray[np.int64]) -> Floats:
        value: Floats = np.interp(instants.astype(np.float64), at, busy)
        return value

    length = np.maximum((end - start).astype(np.float64), 1.0)
    mean: Floats = np.maximum((until(end) - until(start)) / length - 1, 0.0)
    return mean


def clock_step_ms(start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> float:
    """The step of the clock that stamped these instants: their greatest common divisor, from 1 us on."""
    if len(start_ns) < LEAST:
        return 0.0
    step = int(np.gcd(np.gcd.reduce(start_ns), np.gcd.reduce(end_ns)))
    return step / 1e6 if step >= 1_000 else 0.0
