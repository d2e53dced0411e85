"""What each request's decoding was exposed to on its worker: others' prompts, batch and context.

Everything is a difference of running sums over sorted instants (whole columns, n log n): no loop
over requests, no pair of requests is ever formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdtrace.methods.statistics import Floats

Ints: TypeAlias = NDArray[np.int64]

MOST_PIECES = 4  # a decode window has at either end, in the mean
SHORTEST_PREFILL_S = 1e-3  # a prefill window is never taken shorter: its place is not known better


@dataclass(frozen=True)
class Exposure:
    """Prompt computation in time: a window per request, ready to be summed under any weights.

    The prompt of a request is taken to be computed evenly from `starts` to `ends` (its first
    token); `at` and `until` are the decode windows of those who may be held up.
    """

    starts: Floats
    ends: Floats
    at: Floats
    until: Floats
    by_start: Ints
    by_end: Ints
    places: tuple[Ints, ...]
    in_order: bool  # prompts already stand in the order of their ends
    pieces: Pieces | None  # where few windows overlap: a part of the work to do for each weight

    @classmethod
    def of(cls, starts: Floats, ends: Floats, at: Floats, until: Floats) -> Exposure:
        """Sort once; sums under many weights are then cheap."""
        starts = np.minimum(starts, ends - SHORTEST_PREFILL_S)
        by_start, by_end = np.argsort(starts, kind="stable"), np.argsort(ends, kind="stable")
        first, last = starts[by_start], ends[by_end]
        places = (
            np.searchsorted(first, at, "right"),
            np.searchsorted(first, until, "right"),
            np.searchsorted(last, at, "right"),
            np.searchsorted(last, until, "right"),
        )
        pieces = _pieces(starts[by_end], last, at, until, places[2:])
        in_order = bool((np.diff(ends) >= 0).all())
        return cls(starts, ends, at, until, by_start, by_end, places, in_order, pieces)

    def tokens(self, weights: Floats) -> Floats:
        """Weight computed inside each decode window; `weights` is one row or a table of rows.

        A request's own prompt ends where its decode window begins: it never counts.
        """
        if self.pieces is not None:
            ordered = weights if self.in_order else weights[..., self.by_end]
            return self._by_pieces(ordered, self.pieces)
        rate = weights / (self.ends - self.starts)
        begun = _running(rate[..., self.by_start])
        begun_at = _running((rate * self.starts)[..., self.by_start])
        done = _running(rate[..., self.by_end])
        done_at = _running((rate * self.ends)[..., self.by_end])
        start_at, start_until, end_at, end_until = self.places
        at = self.at * (begun[..., start_at] - done[..., end_at])
        until = self.until * (begun[..., start_until] - done[..., end_until])
        shift = begun_at[..., start_until] - begun_at[..., start_at]
        shift -= done_at[..., end_until] - done_at[..., end_at]
        found: Floats = until - at - shift
        return found

    def _by_pieces(self, ordered: Floats, pieces: Pieces) -> Floats:
        """Whole prompts by running sums, those begun and not ended at either instant by their part."""
        done = _running(ordered)
        found: Floats = done[..., self.places[3]]
        found -= done[..., self.places[2]]
        if len(pieces.prompt):
            part = ordered[..., pieces.prompt] * pieces.part
            found[..., pieces.window] += np.add.reduceat(part, pieces.begin, axis=-1)
        return found


class Pieces(NamedTuple):
    """Prompts of which a part is done at the beginning or end of a decode window, by that window."""

    window: Ints  # windows that have any
    begin: Ints  # of each of these, its first piece
    prompt: Ints  # of each piece, in the order of ends
    part: Floats  # done at the end of the window, less what was done at its beginning


def _pieces(
    starts: Floats, ends: Floats, at: Floats, until: Floats, whole: tuple[Ints, Ints]
) -> Pieces | None:
    """The pieces, None where they are many; `starts` and `ends` are in the order of ends."""
    # From here on no prompt begins before.
    begun = np.minimum.accumulate(starts[::-1])[::-1]
    windows, prompts, parts = [], [], []
    for instants, first, sign in ((at, whole[0], -1.0), (until, whole[1], 1.0)):
        count = np.maximum(np.searchsorted(begun, instants, "left") - first, 0)
        if count.sum() > MOST_PIECES * (len(instants) + 1):
            return None
        window = np.repeat(np.arange(len(instants)), count)
        prompt = np.arange(len(window)) + np.repeat(first - (np.cumsum(count) - count), count)
        part = (instants[window] - starts[prompt]) / (ends[prompt] - starts[prompt])
        windows.append(window)
        prompts.append(prompt)
        parts.append(sign * np.maximum(part, 0.0))
    window, prompt, part = (np.concatenate(some) for some in (windows, prompts, parts))
    some = np.flatnonzero(part)
    some = some[np.argsort(window[some], kind="stable")]
    begin = np.flatnonzero(np.diff(window[some], prepend=-1))
    return Pieces(window[some][begin], begin, prompt[some], part[some])


def prefill_windows(arrivals: Floats, firsts: Floats) -> Floats:
    """When each prompt can have begun: its arrival, or the first token before it on this worker.

    Engines compute prompts in the order of arrival; NaN arrivals give a window of one instant.
    """
    order = np.argsort(firsts, kind="stable")
    previous = np.concatenate([[-np.inf], firsts[order][:-1]])
    starts = np.empty_like(firsts)
    starts[order] = np.maximum(np.where(np.isnan(arrivals), firsts, arrivals)[order], previous)
    return np.minimum(starts, firsts)


def mean_level(at: Floats, until: Floats, level: Floats, growth: Floats) -> Floats:
    """Time mean, over each window, of the sum of all windows' levels.

    Each window [at, until] carries `level` at its start and `level + growth` at its end, linearly
    between: with level 1 and growth 0 the number active, with prompt and output tokens the context.
    """
    length = np.maximum(until - at, 1e-9)
    slope = growth / length
    times = np.concatenate([at, until])
    order = np.argsort(times, kind="stable")
    # value at t = jumps + slopes * t: running sums of both
    jumps = np.concatenate([level - slope * at, -(level - slope * at)])[order]
    slopes = np.concatenate([slope, -slope])[order]
    sorted_times = times[order]
    constant, inclination = np.cumsum(jumps), np.cumsum(slopes)
    step = np.diff(sorted_times, append=sorted_times[-1])
    middle = sorted_times + step / 2
    area = np.concatenate([[0.0], np.cumsum((constant + inclination * middle) * step)])
    place = np.empty(len(times), dtype=np.int64)
    place[order] = np.arange(len(times))
    count = len(at)
    found: Floats = (area[place[count:]] - area[place[:count]]) / length
    return found


def _running(values: Floats) -> Floats:
    """Running sums along the last axis with a 0 in front."""
    sums: Floats = np.empty((*values.shape[:-1], values.shape[-1] + 1))
    sums[..., 0] = 0.0
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums
