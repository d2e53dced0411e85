"""Small statistics that SQL cannot do: intervals, robust fits, resampling. Numpy in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdtrace.records import dataclass

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

Z95 = 1.959963984540054  # two-sided 95 % of the normal distribution
MAD_TO_SIGMA = 1.4826  # median absolute deviation -> standard deviation of a normal distribution
SEED = 20240229  # every resampling starts here: the same rows give the same interval


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval and the number of values behind it."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Fit:
    """A trimmed least-squares fit: one coefficient per column, residual sigma, rows kept."""

    coefficients: Floats
    sigma: float
    kept: Bools

    def at(self, columns: Floats) -> Floats:
        """The fitted value of each row of `columns`."""
        fitted: Floats = columns @ self.coefficients
        return fitted


def wilson_interval(successes: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Score interval of a share (Wilson 1927), 95 % by default; (0, 1) without trials."""
    if n <= 0:
        return 0.0, 1.0
    share, z2 = successes / n, z * z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * float(np.sqrt(share * (1 - share) / n + z2 / (4 * n * n)))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(
    values: Floats, statistic: Callable[[Floats], Floats], resamples: int = 1000
) -> Estimate | None:
    """Percentile bootstrap (Efron 1979); `statistic` maps rows of samples to one number each."""
    n = len(values)
    if n < 2:
        return None
    random = np.random.default_rng(SEED)
    step = max(1, min(resamples, 4_000_000 // n))  # bounded memory: 32 MB of samples at a time
    drawn = [
        statistic(values[random.integers(0, n, (min(step, resamples - done), n))])
        for done in range(0, resamples, step)
    ]
    low, high = np.quantile(np.concatenate(drawn), [0.025, 0.975])
    return Estimate(float(statistic(values[None, :])[0]), float(low), float(high), n)


def bootstrap_mean(values: Floats, resamples: int = 1000) -> Estimate | None:
    """The mean and its bootstrap interval."""
    return bootstrap(values, lambda rows: rows.mean(axis=1), resamples)


def bootstrap_quantile(values: Floats, q: float, resamples: int = 1000) -> Estimate | None:
    """A quantile (linear, as quantile_cont) and its bootstrap interval."""
    return bootstrap(values, lambda rows: np.quantile(rows, q, axis=1), resamples)


def block_ratio(
    numerator: Floats,
    denominator: Floats,
    position: Floats,
    blocks: int = 40,
    resamples: int = 2000,
) -> Estimate | None:
    """Sum over sum with a block bootstrap interval (Kuensch 1989): whole stretches are drawn.

    Rows are cut into `blocks` stretches of equal length on the axis `position` (non-decreasing), so
    that rows that depend on each other stay together. None with fewer than ten filled stretches.
    """
    if not len(position) or denominator.sum() <= 0 or position[-1] <= position[0]:
        return None
    block = np.minimum(
        ((position - position[0]) / (position[-1] - position[0]) * blocks).astype(np.int64),
        blocks - 1,
    )
    filled, index = np.unique(block, return_inverse=True)
    if len(filled) < 10:
        return None
    top = np.bincount(index, numerator, len(filled))
    bottom = np.bincount(index, denominator, len(filled))
    draw = np.random.default_rng(SEED).integers(0, len(filled), (resamples, len(filled)))
    below = bottom[draw].sum(axis=1)
    ratios = top[draw].sum(axis=1)[below > 0] / below[below > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Estimate(
        float(numerator.sum() / denominator.sum()), float(low), float(high), len(filled)
    )


def ranks(values: Floats) -> Floats:
    """Ranks from 1; ties share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank: Floats = (last - (counts - 1) / 2)[inverse]
    return mean_rank


def spearman(x: Floats, y: Floats) -> Estimate | None:
    """Rank correlation with Fisher interval, variance of Bonett & Wright (2000).

    None below four pairs or when one side never changes.
    """
    n = len(x)
    if n < 4 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    rho = float(np.corrcoef(ranks(x), ranks(y))[0, 1])
    centre = np.arctanh(np.clip(rho, -0.999999, 0.999999))
    half = Z95 * np.sqrt((1 + rho * rho / 2) / (n - 3))
    return Estimate(rho, float(np.tanh(centre - half)), float(np.tanh(centre + half)), n)


def slope(x: Floats, y: Floats) -> Estimate | None:
    """Least-squares slope of y over x with its normal 95 % interval; None when undefined."""
    n = len(x)
    if n < 3 or np.ptp(x) == 0:
        return None
    dx, dy = x - x.mean(), y - y.mean()
    spread = float(dx @ dx)
    value = float(dx @ dy) / spread
    rest = max(0.0, float(dy @ dy) - value * value * spread)
    half = Z95 * float(np.sqrt(rest / (n - 2) / spread))
    return Estimate(value, value - half, value + half, n)


def spread_rows(count: int, most: int) -> NDArray[np.int64]:
    """At most so many of `count` rows: one of each stretch, drawn, so that no rhythm is met."""
    if count <= most:
        return np.arange(count)
    drawn = (np.arange(most) + np.random.default_rng(SEED).random(most)) * (count / most)
    return np.minimum(drawn.astype(np.int64), count - 1)


def median_sigma(values: Floats) -> float:
    """Standard deviation estimated from the median absolute deviation."""
    return float(MAD_TO_SIGMA * np.median(np.abs(values - np.median(values))))


def trimmed_least_squares(
    columns: Floats,
    y: Floats,
    weights: Floats | None = None,
    *,
    rounds: int = 6,
    cut: float = 3.0,
    floor: float = 0.0,
) -> Fit:
    """Least squares that drops what lies beyond `cut` scaled MAD, `rounds` times.

    (After the reweighted least squares of Rousseeuw & Leroy 1987.) `floor` is the smallest sigma
    used for trimming, in units of y times weight: a source without noise must not be trimmed to
    its commonest rows. Trimming also stops where it would make the columns dependent. `sigma` is
    in the unit of the weighted residuals.
    """
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0] = 1.0
    weight = np.ones(len(y)) if weights is None else weights
    a, b = columns / scale * weight[:, None], y * weight
    rank = int(np.linalg.matrix_rank(_gram(a)))
    kept = np.ones(len(y), dtype=bool)
    beta, sigma = _solve(a, b), 0.0
    for _ in range(rounds):
        residual = b - a @ beta
        centre = float(np.median(residual[kept]))
        sigma = max(median_sigma(residual[kept]), floor)
        trimmed = np.abs(residual - centre) <= cut * sigma
        if np.array_equal(trimmed, kept) or np.linalg.matrix_rank(_gram(a[trimmed])) < rank:
            break
        kept, beta = trimmed, _solve(a[trimmed], b[trimmed])
    return Fit(beta / scale, sigma, kept)


def _gram(a: Floats) -> Floats:
    product: Floats = a.T @ a
    return product


def _solve(a: Floats, b: Floats) -> Floats:
    """Least squares by the normal equations (few scaled columns, a million rows)."""
    solution: Floats = np.asarray(np.linalg.lstsq(_gram(a), a.T @ b, rcond=None)[0], np.float64)
    return solution
