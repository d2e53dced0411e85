"""One stretch of a worker's token gaps: their baseline, excess, and what prefills explain of it."""

from __future__ import annotations

import numpy as np
import polars as pl

from pdtrace.methods import _gap_chance as chance
from pdtrace.methods import _gap_prefills as prefill_work
from pdtrace.methods import _gap_series as series
from pdtrace.methods._gap_prefills import Prefills
from pdtrace.methods._gap_series import Gaps, Ints, Residents
from pdtrace.methods.statistics import Bools, Floats, spread_rows, trimmed_least_squares
from pdtrace.records import dataclass

MIN_CLEAN = 300  # fewer gaps without a prefill give no baseline
FIT_ROWS = 30_000
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
    open: Residents
    pace_s: float
    number: Ints  # of each stream among the streams of its request
    prompt: Floats  # tokens of each stream's prompt; NaN unknown
    cost: Floats | None  # of a prefill over (1, n, n^2); None without a fit
    period: tuple[float, float]
    whole: Prefills | None = (
        None  # not cut; where cached tokens are unknown, what was cut may be cost
    )


@dataclass(frozen=True)
class Window:
    """What a stretch of streams gives."""

    gaps: Gaps
    length: Floats
    overlap: Floats
    steps: Floats
    baseline: Floats
    sigma: Floats  # of each gap
    excess: Floats
    credit: Floats
    exposed: Ints  # gaps that met a prefill
    chance_s: float
    shifts: chance.Shifted
    counted_by: str
    merged: int
    prefills: Prefills  # the worker's, and those that preempted requests must have had again
    preempted: int
    foreign_s: float  # overlap of stalls that have another cause, prefills or not
    residents: Floats  # open streams in each gap
    withheld_s: float  # what whole prefills would explain beyond the cut ones


def window_of(streams: pl.DataFrame, offset: int, stage: Stage) -> Window | None:
    """Gaps of some streams with their credit; None where no baseline can be had."""
    part = slice(offset, offset + streams.height)
    gaps, merged = series.gaps_of(streams, stage.first[part], stage.pace_s)
    if len(gaps.start) < MIN_CLEAN:
        return None
    gaps.stream[:] += offset
    gaps, middle, slots, residents, work, preempted = _without_silent(gaps, stage)
    cover = prefill_work.cover_of(work)
    overlap = cover.during(gaps)
    clean = overlap <= 0
    if clean.sum() < MIN_CLEAN:
        return None
    context = stage.open.contexts(slots, middle)
    steps, counted_by = series.steps_of(gaps, clean)
    length = gaps.length
    baseline, noise = _baseline(length, middle, steps, clean, residents, context)
    excess = length - baseline
    # One step in every gap: one number for all of them.
    each = noise * np.sqrt(steps) if steps.strides[0] else np.float64(noise)
    sigma = np.broadcast_to(each, steps.shape)
    exposed = np.flatnonzero(overlap > 0)
    credit, foreign_s = _credit(excess, overlap, sigma, exposed)
    low, high = float(gaps.start.min()), float(gaps.end.max())
    rest = excess - credit
    stalls = np.flatnonzero(rest > NOISE * each)
    by_chance = chance.chance_credit(length[stalls], rest[stalls], cover, low, high, PAUSE_S)
    longest = float((work.end - work.start).max(initial=0.0))
    bounded = np.clip(excess, -NOISE * each, 2 * longest + PAUSE_S)
    shifts = chance.shifted(gaps, bounded, cover, stage.period[1] - stage.period[0])
    return Window(
        gaps, length, overlap, steps, baseline, sigma, excess, credit, exposed, by_chance, shifts,
        counted_by, merged, work, preempted, foreign_s, residents,
        _withheld(gaps, excess, sigma, credit, stage.whole),
    )  # fmt: skip


def _withheld(
    gaps: Gaps, excess: Floats, sigma: Floats, credit: Floats, whole: Prefills | None
) -> float:
    """Seconds beyond the credit that prefills explain if nothing of them is cut."""
    if whole is None:
        return 0.0
    part = whole.within(float(gaps.start.min()), float(gaps.end.max()))
    overlap = prefill_work.cover_of(part).during(gaps)
    rows = np.flatnonzero(overlap > 0)
    more, _ = _credit(excess, overlap, sigma, rows)
    return float(np.maximum(more[rows] - credit[rows], 0.0).sum())


def _without_silent(gaps: Gaps, stage: Stage) -> tuple[Gaps, Floats, Ints, Floats, Prefills, int]:
    """(gaps of requests that were decoding, their middle, its place among the residents, how many
    these are, prefills with those computed again, preemptions).

    A preempted request is no victim while it is away, and its prompt is computed again when it goes
    on: no record shows that prefill.
    """
    middle = gaps.start + gaps.end
    middle *= 0.5
    slots = stage.open.slots(middle)
    residents = stage.open.counts(slots)
    rows = series.silent(gaps, residents, lambda at: stage.open.counts(stage.open.slots(at)))
    work = stage.prefills.within(float(gaps.start.min()), float(gaps.end.max()))
    if not len(rows):
        return gaps, middle, slots, residents, work, 0
    if stage.cost is not None:
        stream = gaps.stream[rows]
        context = stage.prompt[stream] + gaps.made[rows]
        known = ~np.isnan(context)
        again = prefill_work.computed_again(
            gaps, rows[known], stage.request[stream[known]], context[known], stage.cost
        )
        work = prefill_work.joined(work, again)
    kept = np.ones(len(middle), dtype=bool)
    kept[rows] = False
    return gaps.keep(kept), middle[kept], slots[kept], residents[kept], work, len(rows)


def _credit(excess: Floats, overlap: Floats, sigma: Floats, rows: Ints) -> tuple[Floats, float]:
    """(what of the excess prefills explain, overlap of stalls that are too long for them).

    Prefills explain as much as they overlap at most, give or take noise. `rows`: gaps that overlap.
    """
    above, most = excess[rows], overlap[rows]
    noise = np.minimum(NOISE * sigma[rows], most)
    foreign = above > 2 * most + PAUSE_S + noise
    credit = np.zeros_like(excess)
    credit[rows] = np.where(foreign, 0.0, np.clip(above, -noise, most + noise))
    return credit, float(most[foreign].sum())


def _baseline(
    length: Floats,
    middle: Floats,
    steps: Floats,
    clean: Bools,
    residents: Floats,
    context: Floats | None,
) -> tuple[Floats, float]:
    """(duration that each gap would have had without a prefill, noise of one step)."""  # fmt: skip
    columns = [residents] if context is None else [residents, context]
    rows = np.flatnonzero(clean)
    some = rows[spread_rows(len(rows), FIT_ROWS)]
    table = np.column_stack([np.ones(len(some)), *(column[some] for column in columns)])
    table *= steps[some, None]
    weights = 1 / np.sqrt(steps[some])
    taken = length[some]
    floor = 0.01 * float(np.median(taken * weights))
    fit = trimmed_least_squares(table, taken, weights, floor=floor)
    fitted = np.full(len(length), fit.coefficients[0])
    for coefficient, column in zip(fit.coefficients[1:], columns, strict=True):
        fitted += coefficient * column
    _add_drift(fitted, middle, length, steps, rows)
    typical = float(np.median(taken / steps[some]))
    np.maximum(fitted, 0.2 * typical, out=fitted)
    if steps.strides[0]:
        fitted *= steps
    return fitted, fit.sigma


def _add_drift(fitted: Floats, at: Floats, length: Floats, steps: Floats, clean: Ints) -> None:
    """Add the slow change of a step that the fit does not know: running median of clean residuals.

    `fitted` is for one step of each gap.
    """
    low, high = float(at[clean].min()), float(at[clean].max())
    bins = int(min((high - low) / DRIFT_S, len(clean) / DRIFT_GAPS))
    if bins < 2:
        return
    some = clean[spread_rows(len(clean), 3 * DRIFT_GAPS * bins)]  # enough for a median
    residual = length[some] / steps[some] - fitted[some]
    number = np.minimum(((at[some] - low) / (high - low) * bins).astype(np.int64), bins - 1)
    count = np.bincount(number, minlength=bins)
    begin = np.cumsum(count) - count
    enough = count >= DRIFT_GAPS // 2
    if not enough.any():
        return
    # By bin, then by residual: one number of which the bin is the whole part.
    least, most = float(residual.min()), float(residual.max())
    ordered = np.sort(number + (residual - least) / max(most - least, 1e-12) * (1 - 1e-9))
    middle = (begin + count // 2)[enough]
    medians = least + (ordered[middle] - np.flatnonzero(enough)) / (1 - 1e-9) * (most - least)
    centres = low + (np.flatnonzero(enough) + 0.5) * (high - low) / bins
    fitted += np.interp(at, centres, medians)
