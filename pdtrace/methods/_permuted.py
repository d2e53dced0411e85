"""Whether prompt lengths explain decode durations better than the same lengths shuffled in time.

Restricted permutation test (Good 2005, Permutation, Parametric and Bootstrap Tests of Hypotheses):
lengths change places only inside a stretch of successive requests; the statistic is the fall of the
squared residuals when the two length columns get the best coefficients that are not negative.
Sampling stops as soon as the answer is sure to be no (Besag & Clifford 1991).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pdtrace.methods.statistics import SEED, Bools, Floats, median_sigma, trimmed_least_squares
from pdtrace.records import dataclass

if TYPE_CHECKING:
    from pdtrace.methods._exposure import Exposure

STRETCH = 20  # requests among which lengths are shuffled: longer ones mix quiet and busy times
PERMUTATIONS = 999
BATCH = 111  # permutations computed at once
CLIP = 8.0  # residuals beyond so many scaled MAD count as that many
LOST_HOPE = 10  # shuffles as good as the real lengths: p stays above 0.01
CELLS = 4_000_000  # permutations x requests that are computed at most
CELLS_AT_ONCE = 128_000  # of these, so many lie in the processor's cache


@dataclass(frozen=True)
class Gain:
    """The p value, and how much decode time chance explains.

    `spread_ratio` is the root mean square of what shuffled lengths explain of that which the real
    ones leave, as a share of decode time: the noise of the estimate.
    """

    p_value: float
    spread_ratio: float
    permutations: int


def test(
    base: Floats, duration: Floats, weights: Floats, lengths: Floats, exposure: Exposure
) -> Gain:
    """The real lengths (one per prompt) against shuffled ones, beyond the base columns."""
    residual, basis = _residual(base, duration, weights)

    def columns(rows: Floats) -> list[Floats]:
        return [exposure.tokens(rows), exposure.tokens(rows * rows)]

    met = columns(lengths[None])
    products = _Products(weights, basis, [residual])
    real, of_one, of_two = (float(found[0]) for found in _gains(*products.of(met)[:5]))
    explained = of_one * met[0][0] * weights + of_two * met[1][0] * weights
    rest = residual - explained + basis @ (basis.T @ explained)
    products = _Products(weights, basis, [residual, rest])
    random = np.random.default_rng(SEED)
    # Inside one decode window shuffling changes nothing: a stretch holds several windows' prompts.
    stretch = max(STRETCH, round(2 * float(np.median(base[:, -1]))))
    rounds = max(199, min(PERMUTATIONS, CELLS // len(lengths)))
    batch = max(1, min(BATCH, CELLS // 8 // len(lengths)))
    seconds: list[Floats] = []
    done = as_good = 0
    while done < rounds and as_good < LOST_HOPE:
        size = min(batch, rounds - done)
        for rows in _shuffled(lengths, stretch, size, random):
            met = columns(rows)
            x, y, a, b, c, x_rest, y_rest = products.of(met)
            as_good += int((_gains(x, y, a, b, c)[0] >= real * (1 - 1e-9)).sum())
            _, by_one, by_two = _gains(x_rest, y_rest, a, b, c)
            seconds.append(by_one * met[0].sum(axis=1) + by_two * met[1].sum(axis=1))
        done += size
    spread = float(np.sqrt(np.mean(np.concatenate(seconds) ** 2)))
    return Gain((1 + as_good) / (1 + done), spread / float(duration.sum()), done)


class _Products:
    """Products of two tables of columns with residuals and with each other, beyond the base.

    The residuals have nothing of the base in them; of the columns, what the base explains is taken
    from the products, so that no column is formed without it.
    """

    def __init__(self, weights: Floats, basis: Floats, residuals: list[Floats]) -> None:
        self._weights, self._size = weights, basis.shape[1]
        self._sides = np.column_stack([basis, *residuals])

    def of(self, met: list[Floats]) -> list[Floats]:
        """First and second with the first residual, first with itself, second with itself, both
        with each other; then first and second with each further residual."""
        one, two = (columns * self._weights for columns in met)
        of_one, of_two = one @ self._sides, two @ self._sides
        base = slice(0, self._size)
        a, b, c = (
            np.einsum("ij,ij->i", x, y) - np.einsum("ij,ij->i", in_x[:, base], in_y[:, base])
            for x, y, in_x, in_y in (
                (one, one, of_one, of_one), (two, two, of_two, of_two), (one, two, of_one, of_two)
            )
        )  # fmt: skip
        first, *further = zip(of_one.T[self._size :], of_two.T[self._size :], strict=True)
        squares = [np.maximum(a, 0.0), np.maximum(b, 0.0), c]
        return [*first, *squares, *(found for pair in further for found in pair)]


def _residual(base: Floats, duration: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Clipped residuals of durations over the base columns, and an orthonormal basis of these."""
    weighted = duration * weights
    floor = 0.01 * float(np.median(weighted))
    fit = trimmed_least_squares(base, duration, weights, floor=floor)
    rest = weighted - fit.at(base) * weights
    rest = rest - np.median(rest)
    limit = CLIP * max(median_sigma(rest), 1e-3 * floor)
    rest = np.clip(rest, -limit, limit)
    columns = base * weights[:, None]
    scale = np.abs(columns).max(axis=0)
    left, size, _ = np.linalg.svd(columns / np.where(scale > 0, scale, 1.0), full_matrices=False)
    basis = left[:, size > 1e-9 * size[0]]
    return rest - basis @ (basis.T @ rest), basis


def _gains(x: Floats, y: Floats, a: Floats, b: Floats, c: Floats) -> tuple[Floats, Floats, Floats]:
    """(gain, coefficient, coefficient) of two columns a row, coefficients not negative.

    From their products: x and y with the residual, a and b with themselves, c with each other.
    """
    alone_x = np.where((x > 0) & (a > 0), x / np.where(a > 0, a, 1.0), 0.0)
    alone_y = np.where((y > 0) & (b > 0), y / np.where(b > 0, b, 1.0), 0.0)
    size = a * b - c * c
    sound: Bools = size > 1e-9 * a * b
    size = np.where(sound, size, 1.0)
    both_x, both_y = (b * x - c * y) / size, (a * y - c * x) / size
    together = sound & (both_x >= 0) & (both_y >= 0)
    options = np.stack(
        [np.where(together, both_x * x + both_y * y, -1.0), alone_x * x, alone_y * y]
    )
    best = options.argmax(axis=0)
    gain: Floats = options.max(axis=0)
    nothing = np.zeros_like(x)
    return (
        gain,
        np.choose(best, [both_x, alone_x, nothing]),
        np.choose(best, [both_y, nothing, alone_y]),
    )


def _shuffled(
    lengths: Floats, stretch: int, size: int, random: np.random.Generator
) -> Iterator[Floats]:
    """Rows of lengths, shuffled inside stretches of successive requests; some rows at a time.

    Each stretch is sorted by random numbers: many short sorts take a third of a long one's time.
    """
    count = len(lengths)
    stretches = max(1, count // stretch)
    place = np.arange(count) * stretches // count
    begin = np.searchsorted(place, np.arange(stretches))
    longest = int(np.diff(begin, append=count).max())
    slots = begin[:, None] + np.arange(longest)
    spare = slots >= np.append(begin[1:], count)[:, None]  # where a stretch is shorter
    slots[spare] = 0
    at_once = max(1, CELLS_AT_ONCE // count)
    for done in range(0, size, at_once):
        keys = place + random.random((min(at_once, size - done), count))
        if not spare.any():
            order = np.argsort(keys.reshape(-1, *slots.shape), axis=-1) + begin[:, None]
            yield lengths[order.reshape(keys.shape)]
            continue
        keys = keys[:, slots]
        keys[:, spare] = np.inf
        order = np.argsort(keys, axis=-1) + begin[:, None]
        yield lengths[order[:, ~spare]]
