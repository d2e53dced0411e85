"""Two runs side by side: what differs between two samples, and by how much. Numpy in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdtrace.methods.statistics import SEED, Z95, Floats, ranks, wilson_interval
from pdtrace.records import dataclass

Integers: TypeAlias = NDArray[np.int64]

RESAMPLES = 2000
EXACT_TO = 4000  # values up to which every resample is sorted; above, a fine grid of bins is used
STRETCHES = 30  # a run is cut into at most so many stretches
FEWEST = 8  # and into at least so many: with fewer, their spread says nothing
SEEN = 40  # fewer values do not show whether they depend on each other
BLOCKS = 200  # units of a long run that are drawn as wholes
BEYOND = 5  # a quantile has an interval only with so many values beyond it, on each side
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
STATISTICS = ("mean", *QUANTILES)


@dataclass(frozen=True)
class Difference:
    """B against A in one figure: values, difference and ratio with 95 % intervals.

    `joint` is the interval of the difference that holds together with those of the other figures of a
    family (Bonferroni). Intervals are None where there are too few values to tell; `note` says why.
    """

    a: float | None
    b: float | None
    n_a: int
    n_b: int
    interval: tuple[float, float] | None = None
    ratio_interval: tuple[float, float] | None = None
    joint: tuple[float, float] | None = None
    note: str = ""

    @property
    def difference(self) -> float | None:
        """B - A; None where one is unknown."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def ratio(self) -> float | None:
        """B / A; None where one is unknown or A is not positive."""
        return None if self.a is None or self.b is None or self.a <= 0 else self.b / self.a


def kolmogorov_smirnov(a: Floats, b: Floats) -> tuple[float, float]:
    """Largest distance between two distributions and the chance of one as large without a difference.

    Two-sample test of Smirnov (1939) with the small-sample form of Stephens (1970); with ties, as token
    counts have them, the chance is overstated, never understated.
    """
    both = np.sort(np.concatenate([a, b]))
    below_a = np.searchsorted(np.sort(a), both, "right") / len(a)
    below_b = np.searchsorted(np.sort(b), both, "right") / len(b)
    distance = float(np.abs(below_a - below_b).max())
    size = float(np.sqrt(len(a) * len(b) / (len(a) + len(b))))
    x = (size + 0.12 + 0.11 / size) * distance
    if x < 0.2:
        return distance, 1.0
    k = np.arange(1, 101)
    chance = 2 * float((np.power(-1.0, k - 1) * np.exp(-2 * (k * x) ** 2)).sum())
    return distance, min(1.0, max(0.0, chance))


def share_difference(good_a: int, n_a: int, good_b: int, n_b: int, z: float = Z95) -> Difference:
    """Difference of two shares with the hybrid score interval of Newcombe (1998, method 10)."""
    if not n_a or not n_b:
        return Difference(
            good_a / n_a if n_a else None, good_b / n_b if n_b else None, n_a, n_b, note="no values"
        )
    a, b = good_a / n_a, good_b / n_b
    (low_a, high_a), (low_b, high_b) = (
        wilson_interval(good_a, n_a, z),
        wilson_interval(good_b, n_b, z),
    )
    low = b - a - float(np.hypot(b - low_b, high_a - a))
    high = b - a + float(np.hypot(high_b - b, a - low_a))
    return Difference(a, b, n_a, n_b, (low, high))


def block_length(values: Floats) -> tuple[int, float]:
    """Length of the stretches to draw, in requests, and how many times too short the run is for it (1: it is not).

    Half as long again as by the rule of Politis & White (2004, corrected 2009) for the circular block
    bootstrap, on the ranks and on what lies above the 90th percentile, the longer of both; at least a
    thirtieth of the run, since longer stretches cost little (see `_wider`) and forgive a wrong rule.
    """
    n = len(values)
    least, most = max(1, n // STRETCHES), max(1, n // FEWEST)
    if n < SEEN or np.ptp(values) == 0:
        return most if n >= 20 else 1, 1.0
    wanted = 1.5 * max(
        _politis_white(ranks(values)),
        _politis_white((values > np.quantile(values, 0.9)).astype(float)),
    )
    return int(min(max(np.ceil(wanted), least), most)), max(1.0, wanted / most)


def _politis_white(series: Floats) -> float:
    n = len(series)
    centred = series - series.mean()
    if not centred.any():
        return 1.0
    run = max(5, int(np.ceil(np.log10(n))))
    most = max(min(n - 1, run + 1), n // 2)
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.abs(np.fft.rfft(centred, size)) ** 2
    covariance = np.fft.irfft(spectrum, size)[: most + 1] / n
    small = np.abs(covariance[1:] / covariance[0]) < 2 * np.sqrt(np.log10(n) / n)
    quiet = np.convolve(small, np.ones(run), "valid") >= run
    if not quiet.any():
        return float(n)
    first = int(np.argmax(quiet))
    width = max(1, min(2 * max(first, 1), most))
    lags = np.arange(1, width + 1)
    weight = np.minimum(1.0, 2 * (1 - lags / width))
    spread = float((weight * lags * covariance[1 : width + 1]).sum() * 2)
    variance = float(covariance[0] + 2 * (weight * covariance[1 : width + 1]).sum())
    if variance <= 0:
        return 1.0
    length: float = (2 * spread**2 / (4 / 3 * variance**2)) ** (1 / 3) * n ** (1 / 3)
    return max(1.0, length)


@dataclass(frozen=True)
class Sample:
    """Values of one run in the order of their requests' arrival; `unit` is the request of each value."""

    values: Floats
    unit: Floats | None = None  # None: every value is a request of its own

    def summary(self) -> dict[str, float]:
        """Mean and quantiles (linear, as quantile_cont)."""
        quantiles = np.quantile(self.values, list(QUANTILES.values()))
        return dict(
            zip(STATISTICS, [float(self.values.mean()), *map(float, quantiles)], strict=True)
        )


def compare(a: Sample, b: Sample, family: int = 1) -> dict[str, Difference]:
    """Differences of mean and quantiles, from stretches of requests drawn with replacement.

    Circular block bootstrap (Politis & Romano 1992), percentile intervals. `family`: how many figures
    are judged together.
    """
    sides = (a, b)
    if not len(a.values) or not len(b.values):
        known = [s.summary() if len(s.values) else {} for s in sides]
        return {
            name: Difference(
                known[0].get(name), known[1].get(name), len(a.values), len(b.values),
                note="unknown on " + " and ".join(x for x, k in zip("AB", known, strict=True) if not k),
            )
            for name in STATISTICS
        }  # fmt: skip
    drawn, short, blocks = zip(*(_resamples(s, SEED + n) for n, s in enumerate(sides)), strict=True)
    values = [s.summary() for s in sides]
    return {
        name: _difference(
            name, values, sides, drawn[0][:, n], drawn[1][:, n], family, max(short), min(blocks),
        )
        for n, name in enumerate(STATISTICS)
    }  # fmt: skip


def _difference(
    name: str,
    values: Sequence[Mapping[str, float]],
    sides: Sequence[Sample],
    drawn_a: Floats,
    drawn_b: Floats,
    family: int,
    short: float,
    blocks: float,
) -> Difference:
    a, b = values[0][name], values[1][name]
    counts = len(sides[0].values), len(sides[1].values)
    beyond = 1.0 - QUANTILES.get(name, 0.5)
    requests = min(_units(s) for s in sides)
    if requests < 10 or requests * beyond < BEYOND - 1e-9:
        return Difference(a, b, *counts, note="too few requests for an interval")
    interval, joint = (
        _wider(drawn_b - drawn_a, b - a, chance, blocks, short) for chance in (0.05, 0.05 / family)
    )
    ratio = None
    if a > 0 and b > 0 and (drawn_a > 0).all() and (drawn_b > 0).all():
        log = _wider(np.log(drawn_b / drawn_a), float(np.log(b / a)), 0.05, blocks, short)
        ratio = (float(np.exp(log[0])), float(np.exp(log[1])))
    note = "values depend on each other for longer than the run allows to judge: the interval is widened and may still be too narrow" if short > 1 else ""  # fmt: skip
    return Difference(a, b, *counts, interval, ratio, joint, note)


def _wider(
    drawn: Floats, value: float, chance: float, blocks: float, short: float
) -> tuple[float, float]:
    """Percentile interval, widened as Student's t for so few stretches (expansion of Cornish & Fisher 1937).

    A run that is `short` times too short for its memory hides part of the spread: widened by the root of it.
    """
    z = normal_quantile(1 - chance / 2)
    df = max(1.0, blocks - 1)
    t = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df * df)
    factor = t / z * float(np.sqrt(short * blocks / df))
    low, high = np.quantile(drawn, [chance / 2, 1 - chance / 2])
    return value + factor * (float(low) - value), value + factor * (float(high) - value)


def _units(sample: Sample) -> int:
    return len(sample.values) if sample.unit is None else len(np.unique(sample.unit))


def _resamples(sample: Sample, seed: int) -> tuple[Floats, float, float]:
    """Statistics of RESAMPLES redrawn runs, one row each; how many times too short the run is; how many stretches it has."""
    random = np.random.default_rng(seed)
    if sample.unit is None:
        index, count, of_unit = np.arange(len(sample.values)), len(sample.values), sample.values
    else:
        index = np.unique(sample.unit, return_inverse=True)[1]
        count = int(index.max()) + 1
        of_unit = np.bincount(index, sample.values) / np.bincount(index)
    length, short = block_length(of_unit)
    blocks = count / length
    if sample.unit is None and count <= EXACT_TO:
        return _exact(sample.values, length, random), short, blocks
    if count > EXACT_TO:  # whole stretches become the units
        index, count, length = index * BLOCKS // count, BLOCKS, max(1, length * BLOCKS // count)
    return _binned(sample.values, index, count, length, random), short, blocks


def _blocks(n: int, length: int, rows: int, random: np.random.Generator) -> Integers:
    """Indices of redrawn runs: stretches of `length` from random places, around the end to the start."""
    starts = random.integers(0, n, (rows, -(-n // length)))
    index = (starts[:, :, None] + np.arange(length)) % n
    found: Integers = index.reshape(rows, -1)[:, :n]
    return found


def _exact(values: Floats, length: int, random: np.random.Generator) -> Floats:
    found = []
    step = max(1, 2_000_000 // len(values))  # bounded memory
    for done in range(0, RESAMPLES, step):
        rows = values[_blocks(len(values), length, min(step, RESAMPLES - done), random)]
        quantiles = np.quantile(rows, list(QUANTILES.values()), axis=1)
        found.append(np.vstack([rows.mean(axis=1)[None, :], quantiles]).T)
    return np.concatenate(found)


def _binned(
    values: Floats, index: Integers, count: int, length: int, random: np.random.Generator
) -> Floats:
    """The same from a histogram per unit: bins of a thousandth, in the tail of a ten-thousandth, of the values."""
    grid = np.concatenate([np.linspace(0, 0.98, 981), np.linspace(0.9801, 1, 200)])
    edges = np.unique(np.quantile(values, grid, method="lower"))
    bins = np.searchsorted(edges, values, "left")
    table = np.bincount(index * len(edges) + bins, minlength=count * len(edges))
    histogram = table.reshape(count, len(edges)).astype(np.float32)
    sums = np.bincount(index, values, count)
    found = []
    for done in range(0, RESAMPLES, 200):
        drawn = _blocks(count, length, min(200, RESAMPLES - done), random)
        weights = np.apply_along_axis(np.bincount, 1, drawn, None, count).astype(np.float32)
        cumulated = np.cumsum(weights @ histogram, axis=1, dtype=np.float64)
        total = cumulated[:, -1]
        places = [edges[(cumulated < q * total[:, None]).sum(axis=1)] for q in QUANTILES.values()]
        found.append(np.vstack([(weights @ sums) / total, *places]).T)
    return np.concatenate(found)


def slow_start(ttft_ms: Floats) -> tuple[int, float, bool | None]:
    """Whether the first requests were slower than the rest: how many, how much (ratio of medians), and the verdict.

    The first tenth (at least 5, at most 50 requests) against the rest, by the rank-sum test of Mann &
    Whitney (1947): seen when p < 0.001 and the median is 1.5 times that of the rest. None below 50.
    """
    n = len(ttft_ms)
    first = min(50, max(5, n // 10))
    if n < 50:
        return first, float("nan"), None
    rest = n - first
    place = ranks(ttft_ms)[:first].sum() - first * (first + 1) / 2
    z = (place - first * rest / 2) / np.sqrt(first * rest * (n + 1) / 12)
    below = float(np.median(ttft_ms[first:]))
    ratio = float(np.median(ttft_ms[:first])) / below if below > 0 else float("nan")
    return first, ratio, bool(z > 3.09 and ratio > 1.5)


def normal_quantile(share: float) -> float:
    """The normal deviate below which this share lies."""
    return NormalDist().inv_cdf(share)
