"""Where a series changes its level, and whether it does: stretches of blocks, judged by shuffling.

Circular binary segmentation (Olshen, Venkatraman, Lucito & Wysocki 2004): the stretch whose mean
differs most from the rest is found, judged by shuffling the blocks, and its parts are searched in
turn. Values are ranks, so that a heavy tail is no change. Two guards against false alarms: blocks
are widened until their residuals no longer depend on each other (queues have memory), and the test
stops as soon as the answer is sure to be no (Besag & Clifford 1991).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pdtrace.methods.statistics import SEED, Floats, ranks
from pdtrace.records import dataclass

BLOCKS = 100  # blocks that a series is cut into at most
PER_BLOCK = 5  # values in a block at least
LEAST_BLOCKS = 12  # fewer independent blocks cannot show a change
SHORTEST = (
    0.1  # of the run: a shorter stretch is an episode, which waiting lines have by themselves
)
DEPENDENT = 0.2  # correlation of successive residuals above which blocks are widened
MAX_P = 0.002
SHUFFLES, BATCH, LOST_HOPE = 999, 37, 10
CHI2_95 = 3.841


@dataclass(frozen=True)
class Cut:
    """A change before value number `at`; the place lies in [low, high] with 95 % confidence."""

    at: int
    low: int
    high: int
    p_value: float


@dataclass(frozen=True)
class Course:
    """How a series went: its cuts, or a steady drift, and the p value of that."""

    cuts: tuple[Cut, ...] = ()
    drift_p: float | None = None
    per_block: float = 0.0  # values in a block that does not depend on the next


def course(values: Floats) -> Course:
    """Cuts or drift of a series of values in the order of time; nothing without evidence."""
    if len(values) < LEAST_BLOCKS * PER_BLOCK or np.ptp(values) == 0:
        return Course()
    scores = ranks(values) / len(values)
    blocks = _independent(scores, _levelled)
    per_block = len(scores) / len(blocks[0]) if blocks else 0.0
    drift = _drift(scores)
    if drift is not None:
        return Course(drift_p=drift, per_block=per_block)
    found: list[Cut] = []
    waiting = [(0, len(scores))]
    while waiting:
        begin, end = waiting.pop()
        inner = _stretch(scores[begin:end])
        if inner:
            cuts = [Cut(c.at + begin, c.low + begin, c.high + begin, c.p_value) for c in inner]
            found += cuts
            edges = [begin, *(c.at for c in cuts), end]
            waiting += list(pairwise(edges))
    return Course(tuple(sorted(found, key=lambda cut: cut.at)), per_block=per_block)


def _stretch(scores: Floats) -> list[Cut]:
    """The edges of the stretch that differs from the rest, if it surely does."""
    blocks = _independent(scores, _levelled)
    if blocks is None:
        return []
    means, edges = blocks
    pairs = _pairs(len(means))
    best, at = _most(means[None], pairs)
    p_value = _shuffled(means, float(best[0]), lambda rows: _most(rows, pairs)[0])
    if p_value > MAX_P:
        return []
    left, right = int(pairs[0][at[0]]), int(pairs[1][at[0]])
    inside = [place for place in (left, right) if 0 < place < len(means)]
    return [_place(scores, means, edges, place, inside, p_value) for place in inside]


def _place(
    scores: Floats, means: Floats, edges: NDArray[np.int64], place: int, cuts: list[int], p: float
) -> Cut:
    """The cut to the value, and the blocks between which it may as well lie (profile likelihood)."""
    lower = max([c for c in cuts if c < place], default=0)
    upper = min([c for c in cuts if c > place], default=len(means))
    part = means[lower:upper]
    costs = np.array([_cost(part, k) for k in range(1, len(part))])
    noise = max(float(costs.min()) / max(1, len(part) - 2), 1e-12)
    near = np.flatnonzero(costs <= costs.min() + CHI2_95 * noise) + 1 + lower
    low, high = min(int(near.min()), place), max(int(near.max()), place)
    begin, end = edges[max(lower, place - 2)], edges[min(upper, place + 2)]
    window = scores[begin:end]
    # to the value: where the two sides differ most around the edge of the block
    at = np.arange(1, len(window))
    sums = np.cumsum(window)[:-1]
    gap = (sums / at - (window.sum() - sums) / (len(window) - at)) ** 2
    exact = int(begin + 1 + np.argmax(gap * at * (len(window) - at)))
    return Cut(exact, min(int(edges[low]), exact), max(int(edges[high]), exact), p)


def _cost(part: Floats, k: int) -> float:
    left, right = part[:k], part[k:]
    return float(((left - left.mean()) ** 2).sum() + ((right - right.mean()) ** 2).sum())


def _drift(scores: Floats) -> float | None:
    """p value of a steady rise or fall that fits better than any stretch; None when it does not."""
    blocks = _independent(scores, _detrended)
    if blocks is None:
        return None
    means = blocks[0]
    time = np.arange(len(means)) - (len(means) - 1) / 2
    time /= np.sqrt(time @ time)
    fall = float((means - means.mean()) @ time)
    best, _ = _most(means[None], _pairs(len(means)))
    if abs(fall) < float(best[0]):
        return None
    p_value = _shuffled(means, abs(fall), lambda rows: np.abs(rows @ time))
    return p_value if p_value <= MAX_P else None


def _independent(
    scores: Floats, rest_of: Callable[[Floats], Floats]
) -> tuple[Floats, NDArray[np.int64]] | None:
    """(means, edges) of blocks that do not depend on each other; None with too few."""
    count = min(BLOCKS, len(scores) // PER_BLOCK)
    while count >= LEAST_BLOCKS:
        edges = np.linspace(0, len(scores), count + 1).astype(np.int64)
        means = np.add.reduceat(scores, edges[:-1]) / np.diff(edges)
        if _dependence(means, rest_of(means)) < max(DEPENDENT, 1.28 / np.sqrt(count)):
            return means, edges
        count = int(count / 1.5)
    return None


def _dependence(means: Floats, rest: Floats) -> float:
    """Correlation of successive means that a few changes of level do not make; of their residuals.

    The larger of that of the residuals and one that looks at differences only,
    (med |x[i+2] - x[i]|)^2 / (med |x[i+1] - x[i]|)^2 - 1 (Chakar, Lebarbier, Levy-Leduc & Robin
    2017, A robust approach for estimating change-points in the mean of an AR(1) process).
    """
    near, far = np.abs(means[1:] - means[:-1]), np.abs(means[2:] - means[:-2])
    below = float(np.median(near)) ** 2
    robust = float(np.median(far)) ** 2 / below - 1 if below > 0 else 0.0
    spread = float(rest @ rest)
    return max(robust, float(rest[1:] @ rest[:-1]) / spread if spread > 0 else 0.0)


def _levelled(means: Floats) -> Floats:
    """Residuals around the best stretch and its rest: a change is no dependence."""
    pairs = _pairs(len(means))
    _, at = _most(means[None], pairs)
    left, right = int(pairs[0][at[0]]), int(pairs[1][at[0]])
    rest = means.copy()
    for part in (slice(0, left), slice(left, right), slice(right, len(means))):
        if len(means[part]):
            rest[part] = means[part] - means[part].mean()
    return rest


def _detrended(means: Floats) -> Floats:
    """Residuals around a straight line."""
    time = np.arange(len(means)) - (len(means) - 1) / 2
    level = means - means.mean()
    rest: Floats = level - time * (level @ time) / (time @ time)
    return rest


def _pairs(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All stretches [left, right) of blocks, long enough inside and outside, at neither edge short."""
    least = max(2, round(SHORTEST * count))
    left, right = np.triu_indices(count + 1, least)
    good = (right - left <= count - least) & ((left == 0) | (left >= least))
    good &= (right == count) | (right <= count - least)
    return left[good], right[good]


def _most(
    rows: Floats, pairs: tuple[NDArray[np.int64], NDArray[np.int64]]
) -> tuple[Floats, NDArray[np.int64]]:
    """(largest contrast of a stretch with the rest, number of the stretch), for rows of means."""
    left, right = pairs
    count = rows.shape[1]
    sums = np.zeros((len(rows), count + 1))
    np.cumsum(rows - rows.mean(axis=1, keepdims=True), axis=1, out=sums[:, 1:])
    size = right - left
    contrast = np.abs(sums[:, right] - sums[:, left]) * np.sqrt(count / (size * (count - size)))
    return contrast.max(axis=1), contrast.argmax(axis=1)


def _shuffled(means: Floats, real: float, statistic: Callable[[Floats], Floats]) -> float:
    """Share of shuffles of the blocks that are as extreme."""
    random = np.random.default_rng(SEED)
    done = as_good = 0
    while done < SHUFFLES and as_good < LOST_HOPE:
        rows = random.permuted(np.tile(means, (BATCH, 1)), axis=1)
        as_good += int((statistic(rows) >= real * (1 - 1e-9)).sum())
        done += BATCH
    return (1 + as_good) / (1 + done)
