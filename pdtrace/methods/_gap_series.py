"""Token streams of one worker as gaps: coalesced chunks merged, steps counted, residents known."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pdtrace.methods.statistics import Bools, Floats
from pdtrace.records import dataclass

Ints: TypeAlias = NDArray[np.int64]

MERGE_S, MERGE_SHARE = 6e-3, 0.25
# A stream is silent that misses so many steps, and so many times what it then brings, while so many
# streams are open.
SILENT_STEPS, SILENT_TIMES, SILENT_AMONG = 2.5, 2.0, 4.0
TOGETHER = 3  # streams that fall silent and go on together were held up, not preempted
CELL_S = 5e-3  # cells of time in which things are counted before they are looked at one by one
CELLS_EACH = 4  # of these a gap at most
STEPS = 8  # places that are gone on one by one; a search takes over
KNOWN = 0.9  # share of streams whose prompt length must be known for a context term


@dataclass(frozen=True)
class Gaps:
    """Gaps between deliveries, one element each; seconds since the origin of the worker's data."""

    stream: Ints  # row of the stream among those given
    start: Floats
    end: Floats
    emissions: Floats  # emissions that the delivery at the end holds
    tokens: Floats  # their tokens; as many as emissions where nobody says
    made: Floats  # tokens that the stream had made before

    @cached_property
    def fresh(self) -> Ints:
        """Gaps that do not begin where the one before them ended: what holds at ends is not theirs."""
        apart = np.ones(len(self.start), dtype=bool)
        np.not_equal(self.start[1:], self.end[:-1], out=apart[1:])
        return np.flatnonzero(apart)

    @cached_property
    def length(self) -> Floats:
        """Duration of each gap."""
        return self.end - self.start

    def keep(self, rows: Bools | Ints) -> Gaps:
        """Only these gaps, or in this order."""
        return Gaps(
            self.stream[rows], self.start[rows], self.end[rows], self.emissions[rows],
            self.tokens[rows], self.made[rows],
        )  # fmt: skip


def pace(spans: Floats, counts: Floats) -> float:
    """Typical seconds between two emissions: the median over streams, which no burst can pull."""
    known = counts > 0
    return float(np.median(spans[known] / counts[known])) if known.any() else 0.0


def gaps_of(streams: pl.DataFrame, first: Floats, typical: float) -> tuple[Gaps, int]:
    """(gaps of these streams, stream after stream, emissions that came bundled).

    `first` is each stream's first emission.
    """
    counts = streams["gaps_us"].list.len().to_numpy().astype(np.int64)
    us = streams["gaps_us"].explode().to_numpy()
    stream = np.repeat(np.arange(len(counts)), counts)
    heads = (np.cumsum(counts) - counts)[counts > 0]
    # In whole nanoseconds: what came at one instant must not differ by rounding.
    end_ns = np.cumsum(us, dtype=np.int64)
    before = np.rint(first[counts > 0] * 1e9).astype(np.int64) - (end_ns[heads] - us[heads]) * 1000
    end_ns *= 1000
    end_ns += np.repeat(before, counts[counts > 0])
    end: Floats = end_ns / 1e9
    # Emissions close behind the stream's first one belong to it: no gap lies before them.
    fresh = np.zeros(len(us), dtype=bool)
    fresh[heads] = True
    # A delivery ends where the next emission is not close behind.
    near = max(min(MERGE_S, MERGE_SHARE * typical), 1e-6)
    close = us < near * 1e6
    tokens = _tokens(streams, counts)
    if not close.any() and tokens is None:
        start = _starts(end, fresh, first[stream[heads]])
        one = np.broadcast_to(np.float64(1), len(us))
        made = np.arange(1.0, len(us) + 1) - np.repeat(heads, counts[counts > 0])
        return Gaps(stream, start, end, one, one, made), 0
    if tokens is None:
        tokens = np.ones(len(us))
    last = np.ones(len(us), dtype=bool)
    last[:-1] = ~close[1:] | fresh[1:]
    group = np.cumsum(last) - last
    size = np.bincount(group).astype(np.float64)
    made = np.bincount(group, tokens).astype(np.float64)
    at = np.flatnonzero(last)
    begin = np.flatnonzero(np.concatenate([[True], last[:-1]]))
    start = _starts(end[at], fresh[begin], first[stream[heads]])
    total = np.cumsum(tokens) - tokens
    before = total[begin] - total[(np.cumsum(counts) - counts)[stream[begin]]] + 1
    merged = Gaps(stream[at], start, end[at], size, made, before)
    return merged.keep(merged.length >= near), int(len(us) - len(at))


def _starts(ends: Floats, fresh: Bools, first: Floats) -> Floats:
    """Each gap begins where the one before it ended, a stream's first one at its first emission."""
    starts = np.empty_like(ends)
    starts[1:] = ends[:-1]
    starts[fresh] = first
    return starts


def _tokens(streams: pl.DataFrame, counts: Ints) -> Floats | None:
    """Tokens of the emission that ends each gap, 1 where nobody says; None where nobody says any."""
    if "emission_tokens" not in streams.columns:
        return None
    told = streams["emission_tokens"]
    fits = (told.list.len().fill_null(0).to_numpy() == counts + 1) & (counts > 0)
    if not fits.any():
        return None
    ones = np.ones(int(counts.sum()))
    values = told.filter(pl.Series(fits)).list.slice(1).explode()
    ones[np.repeat(fits, counts)] = values.cast(pl.Float64).fill_null(1.0).to_numpy()
    return np.maximum(ones, 1.0)


def steps_of(gaps: Gaps, clean: Bools) -> tuple[Floats, str]:
    """(engine steps in each gap, what they are counted by).

    Time grows with the tokens where a path holds chunks back, with the emissions where it joins
    them, and with neither where a step makes several tokens (speculative decoding): the count that
    leaves the smallest relative scatter is taken.
    """
    choices = {
        "emissions": gaps.emissions, "tokens": gaps.tokens, "deliveries": np.ones_like(gaps.tokens),
    }  # fmt: skip
    if gaps.emissions is gaps.tokens and not gaps.tokens.strides[0]:  # one each, all of them
        return gaps.emissions, "emissions"
    length = gaps.length[clean]
    if not len(length) or all(np.array_equal(c, gaps.tokens) for c in choices.values()):
        return gaps.emissions, "emissions"
    scatter = {}
    for name, count in choices.items():
        per_step = length / count[clean]
        middle = float(np.median(per_step))
        relative = np.abs(per_step / middle - 1) if middle > 0 else np.full(len(length), np.inf)
        scatter[name] = float(np.minimum(relative, 2.0).mean())
    best = min(scatter, key=scatter.__getitem__)
    return choices[best], best


def silent(gaps: Gaps, open_streams: Floats, open_at: Callable[[Floats], Floats]) -> Ints:
    """Gaps in which the other streams went on for several steps and this one made nothing.

    Such a request was not decoding: it was preempted (or moved). A request that was held up with
    all others is none, and a path that held tokens back brings them afterwards. Streams that began
    meanwhile bring a token each at the end of a stall: they count among the others (`open_at`).
    Several that fall silent and go on together were held up, while streams of another engine under
    the same name went on.
    """
    rows = np.flatnonzero(_quiet(_most_meanwhile(gaps), gaps.tokens, open_streams))
    if not len(rows):
        return rows
    order = np.argsort(gaps.end)
    ends, made = gaps.end[order], np.concatenate([[0.0], np.cumsum(gaps.tokens[order])])
    tokens = gaps.tokens[rows]
    meanwhile = (
        made[np.searchsorted(ends, gaps.end[rows], side="right")]
        - made[np.searchsorted(ends, gaps.start[rows], side="right")]
        - tokens
    )
    others = np.maximum(open_streams[rows], open_at(gaps.end[rows] - 1e-7))
    quiet: Ints = rows[_quiet(meanwhile, tokens, others)]
    return quiet[~_together(gaps.start[quiet], gaps.end[quiet])]


def _together(start: Floats, end: Floats) -> Bools:
    """Which of these stretches begin and end with at least two others, to a cell of time."""
    most = np.zeros(len(start), dtype=np.int64)
    for shift in (0.0, 0.5):  # an edge of one grid is the middle of the other
        cells = np.column_stack([np.floor(start / CELL_S + shift), np.floor(end / CELL_S + shift)])
        _, place, count = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
        most = np.maximum(most, count[place.ravel()])
    found: Bools = most >= TOGETHER
    return found


def _quiet(meanwhile: Floats, tokens: Floats, open_streams: Floats) -> Bools:
    """Whether the others, who made so many tokens meanwhile, went on without this stream."""
    missed = meanwhile / np.maximum(open_streams - 1, 1.0) - tokens
    quiet: Bools = missed > np.maximum(SILENT_STEPS, SILENT_TIMES * tokens)
    return quiet & (open_streams >= SILENT_AMONG)


def _most_meanwhile(gaps: Gaps) -> Floats:
    """At least the tokens that others made in each gap, from sums over cells of time."""
    low, high = float(gaps.start.min()), float(gaps.end.max())
    per_second = 1 / max(CELL_S, (high - low) / (CELLS_EACH * len(gaps.start)))
    place = gaps.end - low
    place *= per_second
    last = place.astype(np.int64)
    made = np.concatenate([[0.0], np.cumsum(np.bincount(last, gaps.tokens))])
    before = made[last]
    meanwhile: Floats = made[1:][last]
    meanwhile -= gaps.tokens
    meanwhile[1:] -= before[:-1]
    fresh = gaps.fresh
    meanwhile[fresh[1:]] += before[fresh[1:] - 1]
    meanwhile[fresh] -= made[((gaps.start[fresh] - low) * per_second).astype(np.int64)]
    return meanwhile


@dataclass(frozen=True)
class Residents:
    """How many streams are open, and how many tokens of context they hold, at any instant."""

    at: Floats  # instants at which something changes
    count: Floats  # open streams from there on
    context: Floats | None  # their tokens there; None where prompt lengths are not known
    slope: Floats | None  # tokens a second from there on

    @cached_property
    def _following(self) -> Floats:
        return np.append(self.at[1:], np.inf)

    def counts(self, slots: Ints) -> Floats:
        """Open streams at these places."""
        return np.maximum(self.count[slots], 1.0)

    def contexts(self, slots: Ints, times: Floats) -> Floats | None:
        """Context tokens at these instants and their places."""
        if self.context is None or self.slope is None:
            return None
        held: Floats = self.at[slots]
        np.subtract(times, held, out=held)
        held *= self.slope[slots]
        held += self.context[slots]
        return np.maximum(held, 0.0, out=held)

    def slots(self, times: Floats) -> Ints:
        """Places of these instants (in any order) among those at which something changes."""
        low, high = float(times.min()), float(times.max())
        inside = np.diff(np.searchsorted(self.at, [low, high]))
        cells = int(np.clip(CELLS_EACH * inside[0], 1, len(times)))
        width = max(high - low, 1e-9) / cells
        # A hair before each edge: rounding must not put an instant behind its place.
        edges = low + (np.arange(cells + 1) - 1e-6) * width
        before = np.maximum(np.searchsorted(self.at, edges, side="right") - 1, 0)
        place = times - low
        place /= width
        slots: Ints = before[place.astype(np.int64)]
        following = self._following
        rows = np.flatnonzero(following[slots] <= times)
        for _ in range(STEPS):
            slots[rows] += 1
            rows = rows[following[slots[rows]] <= times[rows]]
        slots[rows] = np.searchsorted(self.at, times[rows], side="right") - 1
        return slots


def residents(first: Floats, last: Floats, prompt: Floats, made: Floats) -> Residents:
    """Open streams over time; `prompt` is NaN where unknown, `made` the tokens of the stream."""
    instants = np.concatenate([first, last])
    order = np.argsort(instants, kind="stable")
    at = instants[order]
    change = np.concatenate([np.ones(len(first)), -np.ones(len(last))])[order]
    count = np.cumsum(change)
    known = ~np.isnan(prompt)
    if not len(first) or known.mean() < KNOWN:
        return Residents(at, count, None, None)
    held = np.where(known, prompt, np.median(prompt[known]))
    rate = made / np.maximum(last - first, 1e-6)
    slope = np.cumsum(np.concatenate([rate, -rate])[order])
    jump = np.concatenate([held, -(held + made)])[order]
    grown = np.concatenate([[0.0], slope[:-1] * np.diff(at)])
    return Residents(at, count, np.cumsum(jump + grown), slope)
