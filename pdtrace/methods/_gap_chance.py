"""What chance gives: prefills shifted against the gaps, all shifts at once, on a grid."""

from __future__ import annotations

import numpy as np

from pdtrace.methods._gap_prefills import Cover
from pdtrace.methods._gap_series import Gaps
from pdtrace.methods.statistics import Floats
from pdtrace.records import dataclass

FINE_S, COARSE_S, FINE_PERIOD_S = 5e-3, 10e-3, 60.0  # cells of the grid, by the period
EDGE = 0.05  # shifts shorter than this share of the period are not chance
SHIFTS = 2000  # shifts of the null that are kept
NEAR_S = 1.0  # the best shift is sought within this
CLASSES = 24  # classes of length and of excess for the chance credit
PLACES = 20_000  # places on which a class of gaps is laid


@dataclass(frozen=True)
class Shifted:
    """Excess that falls on prefills when these are shifted: at shifts all over the period, nearby."""

    here: float
    anywhere: Floats
    near: Floats  # by lag in cells, the middle one is no shift; positive: prefills moved later
    cell_s: float


def shifted(gaps: Gaps, excess: Floats, cover: Cover, period_s: float) -> Shifted:
    """Correlates the excess of gaps, spread over each, with the cover (circular, by FFT)."""
    cell = FINE_S if period_s < FINE_PERIOD_S else COARSE_S
    low, high = float(gaps.start.min()), float(gaps.end.max())
    cells = _smooth(max(8, int(np.ceil((high - low) / cell))))
    edges: Floats = low + cell * np.arange(cells + 1, dtype=np.float64)
    mass = np.diff(_spread(gaps, excess / gaps.length, low, cell, cells))
    share = np.diff(cover.until(edges)) / cell
    # sum over c of mass[c] * share[c - lag]: the cover moved later by `lag` cells
    moved = np.fft.irfft(np.fft.rfft(mass) * np.conj(np.fft.rfft(share)), cells)
    first = max(1, int(EDGE * cells))
    far = np.unique(np.linspace(first, cells - first, SHIFTS).astype(np.int64))
    reach = round(NEAR_S / cell)
    lags = np.arange(-reach, reach + 1)
    near = np.where(np.abs(lags) < cells / 2, moved[lags % cells], -np.inf)
    return Shifted(float(moved[0]), moved[far], near, cell)


def _smooth(least: int) -> int:
    """The next number without prime factors above 5: an FFT of other lengths takes several times longer."""
    twos = 2 ** np.arange(0, 40, dtype=np.float64)
    threes, fives = 3.0 ** np.arange(0, 20), 5.0 ** np.arange(0, 14)
    products = (twos[:, None, None] * threes[:, None] * fives).ravel()
    return int(products[products >= least].min())


def _spread(gaps: Gaps, density: Floats, low: float, cell: float, cells: int) -> Floats:
    """Density of all gaps summed up to each edge of the grid."""
    # At the end of a gap its density ends, and that of the next one begins where this one follows.
    change = -density
    change[:-1] += density[1:]
    apart = gaps.fresh[1:]
    change[apart - 1] -= density[apart]
    summed = np.zeros(cells + 1)
    edge = cell * np.arange(cells + 1)
    for instants, step in (
        (gaps.end - low, change), (gaps.start[gaps.fresh] - low, density[gaps.fresh]),
    ):  # fmt: skip
        slot = np.minimum((instants * (1 / cell)).astype(np.int64), cells - 1)
        slope = np.bincount(slot, step, cells)
        instants *= step
        summed[1:] += np.cumsum(slope) * edge[1:] - np.cumsum(np.bincount(slot, instants, cells))
    return summed


def chance_credit(
    length: Floats, excess: Floats, cover: Cover, low: float, high: float, pause_s: float
) -> float:
    """Credit that these gaps would get if they lay anywhere: stalls that prefills did not make.

    A stall meets a prefill by chance the likelier the longer it is. Gaps are put into classes of
    length and excess; each class is laid on places all over the period.
    """
    if not len(length) or high <= low or not len(cover.at):
        return 0.0
    places = np.linspace(low, high, PLACES, endpoint=False)
    total = 0.0
    for members in _classes(length):
        mean_length = float(length[members].mean())
        met = cover.between(places, np.minimum(places + mean_length, high))
        for some in _classes(excess[members]):
            mean_excess = float(excess[members][some].mean())
            credit = np.where(mean_excess > 2 * met + pause_s, 0.0, np.minimum(mean_excess, met))
            total += float(credit.mean()) * len(some)
    return total


def _classes(values: Floats) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Rows in classes of about equal values, on a logarithmic scale."""
    low, high = float(values.min()), float(values.max())
    if high <= low * 1.05 or low <= 0:
        return [np.arange(len(values))]
    number = np.log(values / low) / np.log(high / low) * CLASSES
    number = np.minimum(number.astype(np.int64), CLASSES - 1)
    return [np.flatnonzero(number == n) for n in np.unique(number)]
