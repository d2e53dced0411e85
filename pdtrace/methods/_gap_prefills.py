"""Prefills of one worker as intervals: cut at what they cost, joined into cover, met by gaps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from pdtrace.methods._gap_series import Gaps, Ints
from pdtrace.methods.statistics import Bools, Floats, trimmed_least_squares
from pdtrace.records import dataclass

PAUSE_S = 0.02  # what a prefill may exceed its fitted cost by; the rest is a pause or a queue
COST_ERROR = 0.05  # relative error of such a fit that is no reason to leave a prefill out
ALIKE, ALIKE_WITHIN = 9, 1.5  # prefills of about as many tokens that tell what is usual
MIN_COSTED = 20  # fewer prefills with known tokens give no cost
MIN_OWN = 20  # fewer requests seen on both sides give no offset of the token times
TOGETHER_S = 8e-3  # streams that go on within this went on in one step
PAIRS_AT_ONCE = 2_000_000


@dataclass(frozen=True)
class Prefills:
    """Prefills by start; seconds since the origin of the worker's data."""

    request: Ints
    start: Floats
    end: Floats
    tokens: Floats  # NaN unknown

    def ordered(self) -> Prefills:
        """By start."""
        by = np.argsort(self.start, kind="stable")
        return Prefills(self.request[by], self.start[by], self.end[by], self.tokens[by])

    @cached_property
    def reach(self) -> Floats:
        """Until when any prefill up to each one lasts."""
        return np.maximum.accumulate(self.end)

    def within(self, low: float, high: float) -> Prefills:
        """Those, of ordered ones, that may last into this time: a window looks at no others."""
        part = slice(
            int(np.searchsorted(self.reach, low, "right")),
            int(np.searchsorted(self.start, high, "left")),
        )
        return Prefills(self.request[part], self.start[part], self.end[part], self.tokens[part])


def cut_to_cost(prefills: Prefills) -> tuple[Prefills, float | None, Floats | None]:
    """(prefills no longer than such prompts take here, seconds cut, cost over (1, n, n^2)).

    Without a fit (as given, None, None).

    A host pause inside a prefill, or a queue in front of it, is not its cost. The end is kept: it is
    the first token. Cost is fitted on relative error over (1, n, n^2), and corrected by what
    prefills of about as many tokens take; where there are few of these nothing is cut.
    """
    length = prefills.end - prefills.start
    known = ~np.isnan(prefills.tokens) & (prefills.tokens > 0) & (length > 0)
    if known.sum() < MIN_COSTED:
        return prefills, None, None
    # Prompts computed in the same steps share them: what counts is all that was computed meanwhile.
    own = np.where(known, prefills.tokens, 0.0)
    n = np.where(known, _meanwhile(prefills, own), 0.0)
    table = np.column_stack([np.ones(len(n)), n, _meanwhile(prefills, own * own)])
    scale = n + n[known].mean() / 10
    rows = np.flatnonzero(known)
    rows = rows[:: max(1, len(rows) // 50_000)]
    floor = COST_ERROR * float(np.median(length[rows] / scale[rows]))
    fit = trimmed_least_squares(table[rows], length[rows], 1 / scale[rows], floor=floor)
    usual = np.maximum(fit.at(table), 0.0)
    usual[known] *= _of_alike(n[known], length[known] / np.maximum(usual[known], 1e-9))
    most = usual + np.maximum(4 * fit.sigma * scale, PAUSE_S)
    most[_few_alike(n, n[known])] = np.inf
    allowed = np.where(known, np.minimum(length, most), length)
    cut = Prefills(prefills.request, prefills.end - allowed, prefills.end, prefills.tokens)
    return cut, float((length - allowed).sum()), fit.coefficients


def computed_again(
    gaps: Gaps, silent: Ints, request: Ints, context: Floats, cost: Floats
) -> Prefills:
    """Prompts that preempted requests must have had computed again when they went on.

    `silent` are the gaps of such streams; `context` the tokens they held. Until the token that ends
    the gap, for as long as such prompts take here; those that go on together were computed together.
    """
    by = np.argsort(gaps.end[silent], kind="stable")
    end = gaps.end[silent][by]
    group = np.cumsum(np.concatenate([[False], np.diff(end) > TOGETHER_S]))
    tokens = context[by]
    table = np.column_stack(
        [np.ones(int(group[-1]) + 1), np.bincount(group, tokens), np.bincount(group, tokens**2)]
    )
    last = np.maximum.reduceat(end, np.flatnonzero(np.diff(group, prepend=-1)))[group]
    start = last - np.maximum(table @ cost, 0.0)[group]
    return Prefills(request[by], np.maximum(start, gaps.start[silent][by]), last, tokens)


def _of_alike(tokens: Floats, ratio: Floats) -> Floats:
    """The median ratio among the prefills of about as many tokens: a fit may miss the few long."""
    by = np.argsort(tokens, kind="stable")
    windows = np.lib.stride_tricks.sliding_window_view(ratio[by], ALIKE)
    middle = np.median(windows, axis=1)
    medians = np.empty(len(ratio))
    medians[by] = np.pad(middle, (ALIKE // 2, ALIKE // 2), mode="edge")
    return medians


def _few_alike(tokens: Floats, known: Floats) -> Bools:
    """Prefills of which too few others have about as many tokens to say what is usual."""
    ordered = np.sort(known)
    count = np.searchsorted(ordered, tokens * ALIKE_WITHIN, side="right") - np.searchsorted(
        ordered, tokens / ALIKE_WITHIN, side="left"
    )
    few: Bools = count < ALIKE
    return few


def _meanwhile(prefills: Prefills, amount: Floats) -> Floats:
    """Of amounts spread evenly over their prefills, what falls into each prefill's time."""
    rate = amount / np.maximum(prefills.end - prefills.start, 1e-9)
    instants = np.concatenate([prefills.start, prefills.end])
    order = np.argsort(instants, kind="stable")
    at = instants[order]
    slope = np.cumsum(np.concatenate([rate, -rate])[order])
    done = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(at))])
    spent: Floats = np.interp(prefills.end, at, done) - np.interp(prefills.start, at, done)
    return spent


def own_offset(prefills: Prefills, request: Ints, first: Floats) -> tuple[float, float] | None:
    """(seconds by which token times come after the prefills' own ends, their scatter).

    A stream's first token is made at the end of its own prefill: the median of the difference is the
    offset of the two clocks and the way of a token to whoever saw it. None with too few pairs.
    """
    last: Floats = np.full(
        int(max(request.max(initial=-1), prefills.request.max(initial=-1))) + 1, np.nan
    )
    np.fmax.at(last, prefills.request, prefills.end)
    late = first - last[request]
    late = late[~np.isnan(late)]
    if len(late) < MIN_OWN:
        return None
    low, middle, high = np.quantile(late, [0.25, 0.5, 0.75])
    return float(middle), float(high - low)


def before_own_tokens(prefills: Prefills, request: Ints, first: Floats) -> Prefills:
    """Prefills that end at their request's first token at the latest, where they began before it."""
    size = int(max(request.max(initial=-1), prefills.request.max(initial=-1))) + 1
    seen: Floats = np.full(size, np.inf)
    np.minimum.at(seen, request, first)
    own = seen[prefills.request]
    end = np.where(prefills.start < own, np.minimum(prefills.end, own), prefills.end)
    return Prefills(prefills.request, prefills.start, end, prefills.tokens)


def joined(a: Prefills, b: Prefills) -> Prefills:
    """Both, by start."""
    return Prefills(
        np.concatenate([a.request, b.request]), np.concatenate([a.start, b.start]),
        np.concatenate([a.end, b.end]), np.concatenate([a.tokens, b.tokens]),
    ).ordered()  # fmt: skip


@dataclass(frozen=True)
class Cover:
    """Time in which at least one prompt was computed, as a growing sum."""

    at: Floats
    covered: Floats

    def between(self, start: Floats, end: Floats) -> Floats:
        """Covered seconds between these instants."""
        overlap: Floats = self.until(end) - self.until(start)
        return overlap

    def during(self, gaps: Gaps) -> Floats:
        """Covered seconds of each gap; most begin where the gap before them ended."""
        until = self.until(gaps.end)
        overlap: Floats = until.copy()
        overlap[1:] -= until[:-1]
        overlap[gaps.fresh] = until[gaps.fresh] - self.until(gaps.start[gaps.fresh])
        return overlap

    def until(self, times: Floats) -> Floats:
        """Covered seconds up to these instants."""
        if not len(self.at):
            return np.zeros(len(times))
        return np.interp(times, self.at, self.covered)


def cover_of(prefills: Prefills) -> Cover:
    """The union of prefills that are ordered by start."""
    if not len(prefills.start):
        return Cover(np.empty(0), np.empty(0))
    reach = prefills.reach
    opens = np.concatenate([[True], prefills.start[1:] > reach[:-1]])
    start = prefills.start[opens]
    end = reach[np.concatenate([np.flatnonzero(opens)[1:] - 1, [len(reach) - 1]])]
    at = np.column_stack([start, end]).ravel()
    length = end - start
    before = np.cumsum(length) - length
    return Cover(at, np.column_stack([before, before + length]).ravel())


def meetings(gaps: Gaps, rows: Ints, prefills: Prefills) -> Iterator[tuple[Ints, Ints, Floats]]:
    """(gap, prefill, seconds that both last) for the gaps in `rows`, a bounded number at a time."""
    low = np.searchsorted(prefills.reach, gaps.start[rows], side="right")
    high = np.searchsorted(prefills.start, gaps.end[rows], side="left")
    count = np.maximum(high - low, 0)
    total = np.cumsum(count)
    begin = 0
    while begin < len(rows):
        done = total[begin - 1] if begin else 0
        stop = max(begin + 1, int(np.searchsorted(total, done + PAIRS_AT_ONCE, side="right")))
        part = slice(begin, stop)
        gap = np.repeat(rows[part], count[part])
        within = np.arange(len(gap)) - np.repeat(total[part] - count[part] - done, count[part])
        prefill = np.repeat(low[part], count[part]) + within
        both = np.minimum(gaps.end[gap], prefills.end[prefill]) - np.maximum(
            gaps.start[gap], prefills.start[prefill]
        )
        met = both > 0
        yield gap[met], prefill[met], both[met]
        begin = stop
