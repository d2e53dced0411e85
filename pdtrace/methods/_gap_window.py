"""One stretch of a worker's token gaps: their baseline, excess, and what prefills explain of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from pdtrace.methods import _gap_chance as chance
from pdtrace.methods import _gap_prefills as prefill_work
from pdtrace.methods import _gap_series as series
from pdtrace.methods._gap_prefills import Cover, Prefills
from pdtrace.methods._gap_series import Gaps, Ints, Residents
from pdtrace.methods.statistics import Bools, Fit, Floats, trimmed_least_squares

MIN_CLEAN = 300  # fewer gaps without a prefill give no baseline
FIT_ROWS = 50_000
PAUSE_S = 0.02  # a stall longer than twice the overlap and this has another cause
NOISE = 3.0  # sigmas by which noise may carry a gap beyond its overlap
DRIFT_S, DRIFT_GAPS = 1.0, 20  # a bin of the slow drift: at least as long, with as many gaps


@dataclass(frozen=True)
class Stage:
    """One worker's data on one time axis (seconds since `origin_ns`)."""

    origin_ns: int
    request: Ints  # of each stream
    first: Floats
    last: Floats
    prefills: Prefills
    cover: Cover
    open: Residents
    pace_s: float
    number: Ints  # of each stream among the streams of its request
    prompt: Floats  # tokens of each stream's prompt; NaN unknown
    cost: Floats | None  # of a prefill over (1, n, n^2); None without a fit
    period: tuple[float, float]


@dataclass(frozen=True)
class Window:
    """What a stretch of streams gives."""

    gaps: Gaps
    overlap: Floats
    steps: Floats
    baseline: Floats
    sigma: Floats  # of each gap
    excess: Floats
    credit: Floats
    clean: Bools
    chance_s: float
    shifts: chance.Shifted
    counted_by: str
    merged: int
    prefills: Prefills  # the worker's, and those that preempted requests must have had again
    preempted: int
    foreign_s: float  # overlap of stalls that have another cause, prefills or not


def window_of(streams: pl.DataFrame, offset: int, stage: Stage) -> Window | None:
    """Gaps of some streams with their credit; None where no baseline can be had."""
    part = slice(offset, offset + streams.height)
    gaps, merged = series.gaps_of(streams, stage.first[part], stage.pace_s)
    gaps = replace(gaps, stream=gaps.stream + offset)
    gaps, work, preempted = _without_silent(gaps, stage)
    cover = prefill_work.cover_of(work) if preempted else stage.cover
    overlap = cover.between(gaps.start, gaps.end)
    clean = overlap <= 0
    if clean.sum() < MIN_CLEAN:
        return None
    steps, counted_by = series.steps_of(gaps, clean)
    baseline, fit = _baseline(gaps, steps, clean, stage)
    excess = gaps.length - baseline
    sigma = fit.sigma * np.sqrt(steps)
    credit, foreign = _credit(excess, overlap, sigma)
    low, high = float(gaps.start.min()), float(gaps.end.max())
    rest = excess - credit
    stalls = rest > NOISE * sigma
    by_chance = chance.chance_credit(gaps.length[stalls], rest[stalls], cover, low, high, PAUSE_S)
    longest = float((work.end - work.start).max())
    bounded = np.clip(excess, -NOISE * sigma, 2 * longest + PAUSE_S)
    shifts = chance.shifted(gaps, bounded, cover, stage.period[1] - stage.period[0])
    return Window(
        gaps, overlap, steps, baseline, sigma, excess, credit, clean, by_chance, shifts, counted_by,
        merged, work, preempted, float(overlap[foreign].sum()),
    )  # fmt: skip


def _without_silent(gaps: Gaps, stage: Stage) -> tuple[Gaps, Prefills, int]:
    """(gaps of requests that were decoding, prefills with those computed again, preemptions).

    A preempted request is no victim while it is away, and its prompt is computed again when it goes
    on: no record shows that prefill.
    """
    quiet = series.silent(gaps, stage.open.counts((gaps.start + gaps.end) / 2))
    rows = np.flatnonzero(quiet)
    if not len(rows):
        return gaps, stage.prefills, 0
    work = stage.prefills
    if stage.cost is not None:
        stream = gaps.stream[rows]
        context = stage.prompt[stream] + gaps.made[rows]
        known = ~np.isnan(context)
        again = prefill_work.computed_again(
            gaps, rows[known], stage.request[stream[known]], context[known], stage.cost
        )
        work = prefill_work.joined(work, again)
    return gaps.keep(~quiet), work, len(rows)


def _credit(excess: Floats, overlap: Floats, sigma: Floats) -> tuple[Floats, Bools]:
    """(what of the excess prefills explain, stalls that are too long for them).

    Prefills explain as much as they overlap at most, give or take noise.
    """
    noise = np.minimum(NOISE * sigma, overlap)
    credit = np.clip(excess, -noise, overlap + noise)
    foreign = (overlap > 0) & (excess > 2 * overlap + PAUSE_S + noise)
    return np.where((overlap > 0) & ~foreign, credit, 0.0), foreign


def _baseline(gaps: Gaps, steps: Floats, clean: Bools, stage: Stage) -> tuple[Floats, Fit]:
    """Duration that each gap would have had without a prefill."""
    middle = (gaps.start + gaps.end) / 2
    columns = [np.ones(len(steps)), stage.open.counts(middle)]
    context = stage.open.contexts(middle)
    if context is not None:
        columns.append(context)
    table = np.column_stack(columns) * steps[:, None]
    rows = np.flatnonzero(clean)
    rows = rows[:: max(1, -(-len(rows) // FIT_ROWS))]
    weights = 1 / np.sqrt(steps[rows])
    length = gaps.length
    floor = 0.01 * float(np.median(length[rows] * weights))
    fit = trimmed_least_squares(table[rows], length[rows], weights, floor=floor)
    fitted = fit.at(table)
    typical = float(np.median(length[rows] / steps[rows]))
    fitted += steps * _drift(middle, (length - fitted) / steps, clean)
    return np.maximum(fitted, 0.2 * typical * steps), fit


def _drift(at: Floats, residual: Floats, clean: Bools) -> Floats:
    """Slow change of a step that the fit does not know: running median of clean residuals."""
    rows = np.flatnonzero(clean)
    low, high = float(at[rows[0]]), float(at[rows[-1]])  # nearly in order of time
    bins = int(min((high - low) / DRIFT_S, len(rows) / DRIFT_GAPS))
    if bins < 2:
        return np.zeros(len(at))
    rows = rows[:: max(1, len(rows) // (3 * DRIFT_GAPS * bins))]  # enough for a median
    times, values = at[rows], residual[rows]
    number = np.clip((times - low) / (high - low) * bins, 0, bins - 1).astype(np.int64)
    order = np.lexsort((values, number))
    count = np.bincount(number, minlength=bins)
    begin = np.cumsum(count) - count
    enough = count >= DRIFT_GAPS // 2
    if not enough.any():
        return np.zeros(len(at))
    medians = values[order][(begin + count // 2)[enough]]
    centres = low + (np.flatnonzero(enough) + 0.5) * (high - low) / bins
    drift: Floats = np.interp(at, centres, medians)
    return drift
