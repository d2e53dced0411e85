"""Token streams of one worker as gaps: coalesced chunks merged, steps counted, residents known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pdtrace.methods.statistics import Bools, Floats

Ints: TypeAlias = NDArray[np.int64]

MERGE_S, MERGE_SHARE = 6e-3, 0.25
# A stream is silent that misses so many steps, and so many times what it then brings, while so many
# streams are open.
SILENT_STEPS, SILENT_TIMES, SILENT_AMONG = 2.5, 2.0, 4.0
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

    @property
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
    """(gaps of these streams by their start, emissions that came bundled).

    `first` is each stream's first emission.
    """
    counts = streams["gaps_us"].list.len().to_numpy().astype(np.int64)
    gaps = streams["gaps_us"].explode().to_numpy().astype(np.float64) / 1e6
    stream = np.repeat(np.arange(len(counts)), counts)
    passed = np.cumsum(gaps)
    offset = np.concatenate([[0.0], passed])[np.concatenate([[0], np.cumsum(counts)[:-1]])]
    end = first[stream] + passed - offset[stream]
    tokens = _tokens(streams, counts)
    # A delivery ends where the next emission is not close behind.
    near = max(min(MERGE_S, MERGE_SHARE * typical), 1e-6)
    last = np.ones(len(gaps), dtype=bool)
    last[:-1] = (gaps[1:] >= near) | (stream[1:] != stream[:-1])
    # Emissions close behind the stream's first one belong to it: no gap lies before them.
    fresh = np.zeros(len(gaps), dtype=bool)
    heads = (np.cumsum(counts) - counts)[counts > 0]
    fresh[heads] = True
    group = np.cumsum(last) - last
    size = np.bincount(group).astype(np.float64)
    made = np.bincount(group, tokens).astype(np.float64)
    at = np.flatnonzero(last)
    begin = np.flatnonzero(np.concatenate([[True], last[:-1]]))
    start = np.where(fresh[begin], first[stream[begin]], end[begin - 1])
    total = np.cumsum(tokens) - tokens
    heads = np.cumsum(counts) - counts
    before = total[begin] - total[heads[stream[begin]]] + 1
    merged = Gaps(stream[at], start, end[at], size, made, before)
    # by time: what is looked up in sorted instants is found several times faster in order
    by = np.argsort(start, kind="stable")
    return merged.keep(by[merged.length[by] >= near]), int(len(gaps) - len(at))


def _tokens(streams: pl.DataFrame, counts: Ints) -> Floats:
    """Tokens of the emission that ends each gap; 1 where nobody says."""
    ones = np.ones(int(counts.sum()))
    if "emission_tokens" not in streams.columns:
        return ones
    told = streams["emission_tokens"]
    fits = (told.list.len().fill_null(0).to_numpy() == counts + 1) & (counts > 0)
    if not fits.any():
        return ones
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


def silent(gaps: Gaps, open_streams: Floats) -> Bools:
    """Gaps in which the other streams went on for several steps and this one made nothing.

    Such a request was not decoding: it was preempted (or moved). A request that was held up with
    all others is none, and a path that held tokens back brings them afterwards.
    """
    order = np.argsort(gaps.end, kind="stable")
    ends, made = gaps.end[order], np.concatenate([[0.0], np.cumsum(gaps.tokens[order])])
    meanwhile = (
        made[np.searchsorted(ends, gaps.end, side="right")]
        - made[np.searchsorted(ends, gaps.start, side="right")]
        - gaps.tokens
    )
    missed = meanwhile / np.maximum(open_streams - 1, 1.0) - gaps.tokens
    quiet: Bools = (
        (open_streams >= SILENT_AMONG)
        & (missed > SILENT_STEPS)
        & (missed > SILENT_TIMES * gaps.tokens)
    )
    return quiet


@dataclass(frozen=True)
class Residents:
    """How many streams are open, and how many tokens of context they hold, at any instant."""

    at: Floats  # instants at which something changes
    count: Floats  # open streams from there on
    context: Floats | None  # their tokens there; None where prompt lengths are not known
    slope: Floats | None  # tokens a second from there on

    def counts(self, times: Floats) -> Floats:
        """Open streams at these instants."""
        return np.maximum(self.count[self._slot(times)], 1.0)

    def contexts(self, times: Floats) -> Floats | None:
        """Context tokens at these instants."""
        if self.context is None or self.slope is None:
            return None
        slot = self._slot(times)
        held: Floats = self.context[slot] + self.slope[slot] * (times - self.at[slot])
        return np.maximum(held, 0.0)

    def _slot(self, times: Floats) -> Ints:
        return np.maximum(np.searchsorted(self.at, times, side="right") - 1, 0).astype(np.int64)


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
