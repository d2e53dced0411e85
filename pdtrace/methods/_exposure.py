"""What each request's decoding was exposed to on its worker: others' prompts, batch and context.

Everything is a difference of running sums over sorted instants (whole columns, n log n): no loop
over requests, no pair of requests is ever formed.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdtrace.methods.statistics import Floats
from pdtrace.records import dataclass

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
    by_end: Ints
    ended: tuple[Ints, Ints]  # prompts that ended until each window opens, and until it closes
    in_order: bool  # prompts already stand in the order of their ends
    pieces: Pieces | None  # where few windows overlap: a part of the work to do for each weight
    begun: tuple[Ints, Ints, Ints] | None  # else the order of starts, and how many had begun

    @classmethod
    def of(cls, starts: Floats, ends: Floats, at: Floats, until: Floats) -> Exposure:
        """Sort once; sums under many weights are then cheap."""
        starts = np.minimum(starts, ends - SHORTEST_PREFILL_S)
        in_order = bool((np.diff(ends) >= 0).all())
        by_end = np.arange(len(ends)) if in_order else np.argsort(ends, kind="stable")
        last = ends[by_end]
        ended = np.searchsorted(last, at, "right"), np.searchsorted(last, until, "right")
        pieces = _pieces(starts[by_end], last, at, until, ended)
        begun = None if pieces else _begun(starts, at, until)
        return cls(starts, ends, at, until, by_end, ended, in_order, pieces, begun)

    def tokens(self, weights: Floats) -> Floats:
        """Weight computed inside each decode window; `weights` is one row or a table of rows.

        A request's own prompt ends where its decode window begins: it never counts.
        """
        if self.pieces is not None:
            ordered = weights if self.in_order else weights[..., self.by_end]
            return self._by_pieces(ordered, self.pieces)
        by_start, start_at, start_until = self.begun or _begun(self.starts, self.at, self.until)
        rate = weights / (self.ends - self.starts)
        begun = _running(rate[..., by_start])
        begun_at = _running((rate * self.starts)[..., by_start])
        done = _running(rate[..., self.by_end])
        done_at = _running((rate * self.ends)[..., self.by_end])
        end_at, end_until = self.ended
        at = self.at * (begun[..., start_at] - done[..., end_at])
        until = self.until * (begun[..., start_until] - done[..., end_until])
        shift = begun_at[..., start_until] - begun_at[..., start_at]
        shift -= done_at[..., end_until] - done_at[..., end_at]
        found: Floats = until - at - shift
        return found

    def _by_pieces(self, ordered: Floats, pieces: Pieces) -> Floats:
        """Whole prompts by running sums, those begun and not ended at either instant by their part."""
        done = _running(ordered)
        found: Floats = done[..., self.ended[1]]
        found -= done[..., self.ended[0]]
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


def _begun(starts: Floats, at: Floats, until: Floats) -> tuple[Ints, Ints, Ints]:
    """The order of starts, and how many lie before or at each of these instants."""
    by_start = np.argsort(starts, kind="stable")
    first = starts[by_start]
    return by_start, np.searchsorted(first, at, "right"), np.searchsorted(first, until, "right")


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


def mean_levels(at: Floats, until: Floats, levels: list[tuple[Floats, Floats]]) -> list[Floats]:
    """Time means, over each window, of the sums of all windows' levels; for each (level, growth).

    Each window [at, until] carries `level` at its start and `level + growth` at its end, linearly
    between: with level 1 and growth 0 the number active, with prompt and output tokens the context.
    """
    length = np.maximum(until - at, 1e-9)
    times = np.concatenate([at, until])
    order = np.argsort(times, kind="stable")
    sorted_times = times[order]
    step = np.diff(sorted_times, append=sorted_times[-1:])
    middle = sorted_times + step / 2
    place = np.empty(len(times), dtype=np.int64)
    place[order] = np.arange(len(times))
    opens, closes = np.split(place, [len(at)])
    found = []
    for level, growth in levels:
        slope = growth / length
        # value at t = jumps + slopes * t: running sums of both
        jump = level - slope * at
        constant = np.cumsum(np.concatenate([jump, -jump])[order])
        inclination = np.cumsum(np.concatenate([slope, -slope])[order])
        area = np.concatenate([[0.0], np.cumsum((constant + inclination * middle) * step)])
        found.append((area[closes] - area[opens]) / length)
    return found


def _running(values: Floats) -> Floats:
    """Running sums along the last axis with a 0 in front."""
    sums: Floats = np.empty((*values.shape[:-1], values.shape[-1] + 1))
    sums[..., 0] = 0.0
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums
