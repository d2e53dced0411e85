"""The sweep behind the partition: overlapping ranked intervals in, one owner of every instant out.

Arrays only. The windows of a batch are laid end to end on one axis, so that one sort cuts them all;
within a rank the interval that started first keeps the time, between ranks the smaller rank wins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdtrace.records import dataclass

Ints: TypeAlias = NDArray[np.int64]

NOBODY = -1  # owner of an instant that no interval covers


@dataclass(frozen=True)
class Windows:
    """Non-empty windows [start, end) and their place on the common axis."""

    start: Ints
    end: Ints

    @property
    def base(self) -> Ints:
        """Position of each window's start on the axis."""
        length = self.end - self.start
        base: Ints = np.cumsum(length) - length
        return base

    @property
    def total(self) -> int:
        """Length of the axis."""
        return int((self.end - self.start).sum())


@dataclass(frozen=True)
class Intervals:
    """Ranked intervals of windows: `window` is an index, `kind` the identity that they win for."""

    window: Ints
    start: Ints
    end: Ints
    rank: Ints
    kind: Ints

    def take(self, rows: NDArray[np.bool_] | Ints) -> Intervals:
        """Some of them."""
        return Intervals(
            self.window[rows], self.start[rows], self.end[rows], self.rank[rows], self.kind[rows]
        )


@dataclass(frozen=True)
class Pieces:
    """The partition: consecutive pieces of each window with the kind that owns them."""

    window: Ints
    start: Ints
    end: Ints
    kind: Ints  # NOBODY where no interval covers
    clip: Ints  # per window: time cut from intervals that stick out
    overlap: Ints  # per window: time covered by more than one interval

    def owned_by(self, kind: int) -> Pieces:
        """The same with an owner for what no interval covers."""
        return replace(self, kind=np.where(self.kind == NOBODY, kind, self.kind))


def sweep(windows: Windows, intervals: Intervals) -> Pieces:
    """Partition every window exactly; intervals must run forwards (end >= start).

    Most windows hold intervals that follow one another: these are laid out as they come.
    """
    inside, clip = _clip(windows, intervals)
    inside = inside.take(np.argsort(inside.start + (windows.base - windows.start)[inside.window]))
    crowded = np.zeros(len(windows.start), dtype=bool)
    again = inside.window[1:] == inside.window[:-1]
    crowded[inside.window[1:][again & (inside.start[1:] < inside.end[:-1])]] = True
    if not crowded.any():
        return _laid(windows, inside, clip)
    if crowded.all():
        return _swept(windows, inside, clip)
    return _merged(crowded, *(
        lay(
            Windows(windows.start[part], windows.end[part]),
            _renumbered(inside.take(part[inside.window]), part),
            clip[part],
        )
        for lay, part in ((_swept, crowded), (_laid, ~crowded))
    ))  # fmt: skip


def _renumbered(intervals: Intervals, part: NDArray[np.bool_]) -> Intervals:
    """The same with the places that their windows have among those of `part`."""
    return replace(intervals, window=(np.cumsum(part) - 1)[intervals.window])


def _merged(crowded: NDArray[np.bool_], swept: Pieces, laid: Pieces) -> Pieces:
    """The pieces of both kinds of windows in the order of windows."""
    window = np.concatenate(
        [np.flatnonzero(crowded)[swept.window], np.flatnonzero(~crowded)[laid.window]]
    )
    order = np.argsort(window, kind="stable")

    def both(name: str) -> Ints:
        joined: Ints = np.concatenate([getattr(swept, name), getattr(laid, name)])
        return joined

    clip, overlap = np.empty((2, len(crowded)), dtype=np.int64)
    for part, found in ((crowded, swept), (~crowded, laid)):
        clip[part], overlap[part] = found.clip, found.overlap
    start, end, kind = (both(name)[order] for name in ("start", "end", "kind"))
    return Pieces(window[order], start, end, kind, clip, overlap)


def _laid(windows: Windows, intervals: Intervals, clip: Ints) -> Pieces:
    """Windows whose intervals (in order) do not overlap: the intervals, and what is left around them."""
    count, window = len(windows.start), intervals.window
    opens = np.ones(len(window), dtype=bool)
    np.not_equal(window[1:], window[:-1], out=opens[1:])
    reached = np.empty_like(intervals.start)  # until where the window is filled before each
    reached[1:] = intervals.end[:-1]
    reached[opens] = windows.start[window[opens]]
    gap = intervals.start > reached
    each = np.bincount(window, minlength=count)
    filled = windows.start.copy()
    last = np.append(opens[1:], True)[: len(opens)]
    filled[window[last]] = intervals.end[last]
    rest = filled < windows.end
    # Where each piece stands among all: behind the gaps and rests before it.
    place = np.arange(len(window)) + np.cumsum(gap) + (np.cumsum(rest) - rest)[window]
    gaps = np.bincount(window, gap, count).astype(np.int64)
    at_end = np.cumsum(each + gaps + rest) - 1
    size = len(window) + int(gap.sum()) + int(rest.sum())
    pieces = np.empty((3, size), dtype=np.int64)
    for where, which, start, kind in (
        (place, window, intervals.start, intervals.kind),
        (place[gap] - 1, window[gap], reached[gap], NOBODY),
        (at_end[rest], np.flatnonzero(rest), filled[rest], NOBODY),
    ):
        pieces[0, where], pieces[1, where], pieces[2, where] = which, start, kind
    owner, start, kind = pieces
    fresh = np.ones(size, dtype=bool)
    fresh[1:] = (kind[1:] != kind[:-1]) | (owner[1:] != owner[:-1])
    owner, start, kind = owner[fresh], start[fresh], kind[fresh]
    end = np.append(start[1:], 0)[: len(start)]
    closes = np.append(owner[1:] != owner[:-1], True)[: len(owner)]
    end[closes] = windows.end[owner[closes]]
    return Pieces(owner, start, end, kind, clip, np.zeros(count, dtype=np.int64))


def _swept(windows: Windows, inside: Intervals, clip: Ints) -> Pieces:
    """Windows whose intervals overlap."""
    offset = windows.base - windows.start  # instant + offset = position on the axis
    first = inside.start + offset[inside.window]
    last = inside.end + offset[inside.window]
    cuts, (begin, left, right) = _cuts((windows.base, first, last), windows.total)
    owner = _owners(inside, left, right, len(cuts) - 1)
    return _pieces(windows, cuts, begin, owner, clip, _overlap(cuts, begin, left, right))


def _clip(windows: Windows, intervals: Intervals) -> tuple[Intervals, Ints]:
    """The parts inside the windows, and per window the time that was cut off."""
    start = np.maximum(intervals.start, windows.start[intervals.window])
    end = np.minimum(intervals.end, windows.end[intervals.window])
    kept = np.maximum(end - start, 0)
    cut = (intervals.end - intervals.start) - kept
    # Float sums are exact up to 104 days of cut time; beyond that a nanosecond is not the question.
    sums = np.bincount(intervals.window, weights=cut, minlength=len(windows.start))
    inside = Intervals(intervals.window, start, end, intervals.rank, intervals.kind)
    return inside.take(kept > 0), np.minimum(sums, 2.0**62).astype(np.int64)


def _cuts(groups: tuple[Ints, ...], total: int) -> tuple[Ints, list[Ints]]:
    """All distinct positions, sorted, `total` last; and for each group the places of its own."""
    positions = np.concatenate([*groups, np.array([total], dtype=np.int64)])
    order = np.argsort(positions)
    ordered = positions[order]
    fresh = np.empty(len(ordered), dtype=bool)
    fresh[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=fresh[1:])
    index = np.empty(len(ordered), dtype=np.int64)
    index[order] = np.cumsum(fresh) - 1
    bounds = np.cumsum([len(group) for group in groups])
    return ordered[fresh], np.split(index[:-1], bounds[:-1])


def _owners(intervals: Intervals, left: Ints, right: Ints, segments: int) -> Ints:
    """The kind that owns each segment between two cuts."""
    owner = np.full(segments, NOBODY, dtype=np.int64)
    for rank in np.unique(intervals.rank)[::-1]:  # the strongest is written last
        rows = np.flatnonzero(intervals.rank == rank)
        begin, end, kind = _disjoint(left[rows], right[rows], intervals.kind[rows])
        # Disjoint: starts are distinct and so are ends, plain indexed addition counts each.
        change = np.zeros(segments + 1, dtype=np.int64)
        change[begin] += kind + 1
        change[end] -= kind + 1
        active = np.cumsum(change[:-1])
        np.copyto(owner, active - 1, where=active > 0)
    return owner


def _disjoint(left: Ints, right: Ints, kind: Ints) -> tuple[Ints, Ints, Ints]:
    """The same union without overlap: the earliest start keeps the time, then the longest."""
    order = np.argsort(left)
    if (left[order][1:] >= right[order][:-1]).all():
        return left[order], right[order], kind[order]
    order = np.lexsort((kind, -right, left))
    left, right, kind = left[order].copy(), right[order], kind[order]
    left[1:] = np.maximum(left[1:], np.maximum.accumulate(right)[:-1])
    keep = left < right
    return left[keep], right[keep], kind[keep]


def _overlap(cuts: Ints, begin: Ints, left: Ints, right: Ints) -> Ints:
    """Per window: the time that more than one interval covers."""
    if len(begin) == 0:
        return np.zeros(0, dtype=np.int64)
    depth = np.bincount(left, minlength=len(cuts)) - np.bincount(right, minlength=len(cuts))
    doubly = np.where(np.cumsum(depth)[:-1] > 1, np.diff(cuts), 0)
    return np.add.reduceat(doubly, begin)


def _pieces(
    windows: Windows, cuts: Ints, begin: Ints, owner: Ints, clip: Ints, overlap: Ints
) -> Pieces:
    """Merge neighbouring segments of one window and one owner."""
    fresh = np.empty(len(owner), dtype=bool)
    np.not_equal(owner[1:], owner[:-1], out=fresh[1:])
    fresh[begin] = True
    head = np.flatnonzero(fresh)
    opens = np.zeros(len(owner), dtype=np.int64)
    opens[begin] = 1
    window = np.cumsum(opens)[head] - 1
    offset = (windows.base - windows.start)[window]
    tail = np.append(head[1:], len(owner))
    return Pieces(window, cuts[head] - offset, cuts[tail] - offset, owner[head], clip, overlap)
