"""Prefill interference from token times and prefill intervals (level B): decode seconds lost.

What is estimated: for each gap between tokens, (actual duration - duration that its steps would
have had with the same batch and no prompt computed), where a prompt of another request was being
computed on the same worker, summed. Not estimated: what a request would gain under another
scheduler.

The baseline comes from gaps that met no prefill: a trimmed fit on open streams and their context,
times the steps in the gap, plus slow drift. A long stall meets a prefill by chance the likelier the
longer it is (length bias): that credit is computed and taken away, and prefills shifted over the
whole period (circular, all shifts at once by FFT) say whether the match in time is chance. A p value
alone is not enough, since batches grow when prefills end: the share of prefill time lost must stand
out from what chance gives (`contrast`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import polars as pl

from pdtrace.methods import _gap_prefills as prefill_work
from pdtrace.methods import _gap_series as series
from pdtrace.methods._gap_prefills import Prefills
from pdtrace.methods._gap_series import Ints
from pdtrace.methods._gap_totals import (
    BLOCKS,
    EVENTS_SCHEMA,
    LOSSES_SCHEMA,
    Total,
    events_of,
    join,
    losses_of,
    summed,
)
from pdtrace.methods._gap_window import MIN_CLEAN, Stage
from pdtrace.methods.statistics import Z95, Floats, block_ratio
from pdtrace.records import dataclass

MIN_EXPOSED = 20  # fewer gaps that met a prefill are an anecdote
MAX_P, MIN_CONTRAST, MIN_SHARE = 0.01, 0.15, 0.005
MIN_CONTRAST_BURSTS = (
    0.2  # where steps make several tokens each, or a path delivers several together
)
# Error of the interval as parts of the exposed baseline and of the loss, calibrated on simulations.
BASE_ERROR, MODEL_ERROR, DIRTY_ERROR = 0.015, 0.02, 0.12
DIRTY_RATIO = 0.1  # merged deliveries from which tokens are said to come in bundles
WINDOW_EMISSIONS, THREADS = 250_000, 2
SEEN = 0.9  # share of the decoded requests that should have token times
ELSEWHERE = (
    "a decode worker of a P/D pair: its prompts are computed elsewhere and are not laid over its"
    " tokens; steps that slow down meanwhile would share a host with them, which is contention of"
    " the host, not prefill interference"
)
OFFSET_S = 2e-3  # token times are moved onto the prefills' clock from this offset on

RESULT_SCHEMA: dict[str, type[pl.DataType]] = {
    "worker": pl.String, "rank": pl.String, "deployment": pl.String, "role": pl.String,
    "observer": pl.String, "streams": pl.Int64, "gaps": pl.Int64, "clean_gaps": pl.Int64, "exposed_gaps": pl.Int64,
    "prefills": pl.Int64, "prefill_s": pl.Float64, "baseline_ms": pl.Float64,
    "noise_ms": pl.Float64, "counted_by": pl.String, "merged_ratio": pl.Float64,
    "overlap_s": pl.Float64, "credit_s": pl.Float64, "chance_s": pl.Float64,
    "lost_s": pl.Float64, "lost_low_s": pl.Float64, "lost_high_s": pl.Float64,
    "decode_s": pl.Float64, "lost_ratio": pl.Float64, "lost_ratio_low": pl.Float64,
    "lost_ratio_high": pl.Float64, "contrast_ratio": pl.Float64, "p_value": pl.Float64,
    "tail_explained_ratio": pl.Float64, "event_ms": pl.Float64, "events": pl.Int64,
    "offset_ms": pl.Float64, "best_shift_ms": pl.Float64, "cut_s": pl.Float64,
    "flagged": pl.Boolean, "note": pl.String,
}  # fmt: skip


@dataclass(frozen=True)
class Judgement:
    """What one worker lost: the row of the worker, who took it from whom, the stalls called."""

    row: dict[str, Any]
    losses: pl.DataFrame
    events: pl.DataFrame


def interference(
    streams: pl.DataFrame,
    prefills: pl.DataFrame,
    worker: str,
    deployment: str | None = None,
    role: str | None = None,
    kv_consumer: bool = False,
    decoded: int | None = None,
    load: Callable[[pl.DataFrame], pl.DataFrame] | None = None,
) -> Judgement:
    """Judge one worker.

    `streams`: request, stream, first_ns, last_ns, emissions, prompt_tokens, observer, and gaps_us
    and emission_tokens unless `load` adds them to some of the rows. `prefills`: request, start_ns,
    end_ns, tokens of the prompts computed on this worker, and on no other. `decoded`: requests that
    were decoded here, with token times or without.
    """
    row: dict[str, Any] = {
        "worker": worker, "deployment": deployment, "role": role, "streams": streams.height,
        "prefills": prefills.height,
        "observer": "+".join(sorted(streams["observer"].drop_nulls().unique().to_list())) or None
        if "observer" in streams.columns else None,
    }  # fmt: skip
    if role == "decode" or kv_consumer:
        return _unknown(row, ELSEWHERE)
    streams = streams.filter(pl.col("emissions") > 1).sort("first_ns", maintain_order=True)
    if not streams.height:
        return _unknown(row, "no token times of requests decoded here")
    if not prefills.height:
        return _unknown(row, "no prompt is known to have been computed here while others decoded")
    names, stage, notes, cut, offset = _stage(streams, prefills)
    if decoded and streams.height < SEEN * decoded:
        notes.append(
            f"only {streams.height:,} of {decoded:,} requests decoded here have token times:"
            " what the others lost is not in the sum"
        )
    total = Total()
    for part in _parts(streams, stage, load):
        join(total, part)
    row |= {
        "prefill_s": float((stage.prefills.end - stage.prefills.start).sum()),
        "cut_s": cut, "offset_ms": offset * 1e3,
    }  # fmt: skip
    if not total.gaps:
        return _unknown(row, f"fewer than {MIN_CLEAN} token gaps without a prefill: weak baseline")
    return _judged(row, total, stage, names, notes)


def tables(judged: list[Judgement]) -> dict[str, pl.DataFrame]:
    """The tables of this method from what was judged."""
    losses = [j.losses for j in judged if j.losses.height]
    events = [j.events for j in judged if j.events.height]
    return {
        "interference_gaps": pl.DataFrame([j.row for j in judged], schema=RESULT_SCHEMA),
        "interference_gap_losses": pl.concat(losses or [pl.DataFrame(schema=LOSSES_SCHEMA)]),
        "interference_events": pl.concat(events or [pl.DataFrame(schema=EVENTS_SCHEMA)]),
    }


def _unknown(row: dict[str, Any], why: str) -> Judgement:
    return Judgement(
        {**dict.fromkeys(RESULT_SCHEMA), **row, "flagged": None, "note": why},
        pl.DataFrame(schema=LOSSES_SCHEMA), pl.DataFrame(schema=EVENTS_SCHEMA),
    )  # fmt: skip


def _stage(
    streams: pl.DataFrame, prefills: pl.DataFrame
) -> tuple[pl.Series, Stage, list[str], float | None, float]:
    """(names of the requests, the worker's data on one axis, notes, seconds cut, offset)."""
    names = pl.concat([streams["request"], prefills["request"]]).unique(maintain_order=True)
    code = pl.DataFrame({"request": names, "code": np.arange(len(names))})

    def codes(frame: pl.DataFrame) -> Ints:
        joined = frame.select("request").join(code, on="request", how="left", maintain_order="left")
        return joined["code"].to_numpy().astype(np.int64)

    origin = int(min(_least(streams, "first_ns"), _least(prefills, "start_ns")))
    request, first = codes(streams), _seconds(streams["first_ns"], origin)
    last = _seconds(streams["last_ns"], origin)
    work = Prefills(
        codes(prefills), _seconds(prefills["start_ns"], origin),
        _seconds(prefills["end_ns"], origin),
        prefills["tokens"].cast(pl.Float64).fill_null(np.nan).to_numpy(),
    )  # fmt: skip
    notes, moved = [], 0.0
    offset = prefill_work.own_offset(work, request, first)
    pace = series.pace(last - first, streams["emissions"].to_numpy() - 1.0)
    if offset is not None and abs(offset[0]) > OFFSET_S and offset[1] < max(pace, abs(offset[0])):
        moved = offset[0]
        notes.append(
            f"tokens were seen {moved * 1e3:,.1f} ms after the prefills that made them ended"
            " (median of first tokens): prefills are moved by that"
        )
        work = Prefills(work.request, work.start + moved, work.end + moved, work.tokens)
    work = whole = prefill_work.before_own_tokens(work, request, first)
    work, cut, cost = prefill_work.cut_to_cost(work)
    work = work.ordered()
    unsure = "sure" in prefills.columns and not prefills["sure"].all()
    if cut is None:
        notes.append("too few prefills with known tokens to tell a pause inside one from its cost")
    prompt = (
        streams["prompt_tokens"].cast(pl.Float64).fill_null(np.nan).to_numpy()
        if "prompt_tokens" in streams.columns
        else np.full(len(first), np.nan)
    )
    made = streams["emissions"].to_numpy().astype(np.float64)
    stage = Stage(
        origin, request, first, last, work,
        series.residents(first, last, prompt, made), pace,
        streams["stream"].fill_null(0).to_numpy().astype(np.int64), prompt, cost,
        (float(first.min()), float(last.max())), whole.ordered() if unsure and cut else None,
    )  # fmt: skip
    return names, stage, notes, cut, moved


def _least(frame: pl.DataFrame, column: str) -> int:
    return int(frame.select(pl.col(column).min()).item())


def _seconds(instants: pl.Series, origin_ns: int) -> Floats:
    values: Floats = (instants - origin_ns).to_numpy().astype(np.float64) / 1e9
    return values


def _parts(
    streams: pl.DataFrame, stage: Stage, load: Callable[[pl.DataFrame], pl.DataFrame] | None
) -> Iterator[Total]:
    """The sums of each window of streams in their order, several computed at a time."""

    def part(window: slice) -> Total:
        rows = streams[window]
        return summed(rows if load is None else load(rows), window.start, stage)

    windows = list(_windows(streams))
    if len(windows) == 1:
        yield part(windows[0])
        return
    with ThreadPoolExecutor(THREADS, "pdtrace-gaps") as pool:
        waiting: deque[Future[Total]] = deque()
        for window in windows:
            if len(waiting) > THREADS:
                yield waiting.popleft().result()
            waiting.append(pool.submit(part, window))
        while waiting:
            yield waiting.popleft().result()


def _windows(streams: pl.DataFrame) -> Iterator[slice]:
    """Stretches of streams with a bounded number of emissions."""
    total = np.cumsum(streams["emissions"].to_numpy())
    begin = 0
    while begin < len(total):
        done = total[begin - 1] if begin else 0
        stop = int(np.searchsorted(total, done + WINDOW_EMISSIONS, side="right"))
        stop = max(begin + 1, stop)
        yield slice(begin, stop)
        begin = stop


def _judged(
    row: dict[str, Any], total: Total, stage: Stage, names: pl.Series, notes: list[str]
) -> Judgement:
    """The worker's row, pairs and events from its sums."""
    bundled = total.merged > DIRTY_RATIO * (total.gaps + total.merged)
    dirty = bundled or total.preempted > 0
    overlap, fraction = total.overlap_s, _fraction_lost(total)
    lost = fraction * overlap
    decode_s = float(total.blocks[2].sum())
    half = (
        Z95 * float(np.sqrt(total.noise2))
        + BASE_ERROR * total.exposed_base_s
        + (DIRTY_ERROR if dirty else MODEL_ERROR) * abs(lost)
    )
    net = total.blocks[0] - total.chance_s / max(overlap, 1e-9) * total.blocks[1]
    ratio = block_ratio(
        net * (lost / net.sum() if net.sum() > 0 else 1.0), total.blocks[2],
        np.arange(BLOCKS, dtype=np.float64),
    )  # fmt: skip
    p = _p_value(total)
    bursts = bundled or "deliveries" in total.counted_by
    contrast = MIN_CONTRAST_BURSTS if bursts else MIN_CONTRAST
    flagged = bool(
        p is not None
        and p <= MAX_P
        and fraction > contrast
        and ratio is not None
        and ratio.low > MIN_SHARE
        and total.exposed >= MIN_EXPOSED
    )
    low = lost - half
    if p is None or p > MAX_P or fraction <= contrast:
        low = min(low, 0.0)  # as prefills at other times would fit as well, it may be nothing
    base = float(np.median(total.baselines))
    floor, events = events_of(total, stage.origin_ns, names, base) if flagged else (None, None)
    if total.weak:
        notes.append(f"{total.weak} stretches without a baseline are left out")
    if total.preempted:
        notes.append(
            f"{total.preempted:,} times a stream fell silent while others went on: taken for"
            " preempted, and its prompt for computed again before it went on"
        )
    if bundled:
        notes.append("tokens came in bundles: the interval is wider")
    if total.withheld_s > MODEL_ERROR * abs(lost):
        notes.append(
            f"of prompts whose cached tokens are unknown, some took longer than others of their length: "
            f"a pause, or more to compute, which would make it up to {total.withheld_s:,.1f} s more"
        )
    row |= {
        "gaps": total.gaps, "clean_gaps": total.clean, "exposed_gaps": total.exposed,
        "baseline_ms": base * 1e3, "noise_ms": float(np.median(total.sigmas)) * 1e3,
        "counted_by": "+".join(sorted(total.counted_by)),
        "merged_ratio": total.merged / (total.gaps + total.merged),
        "overlap_s": overlap, "credit_s": total.credit_s, "chance_s": total.chance_s, "lost_s": lost,
        "lost_low_s": low, "lost_high_s": lost + half + total.withheld_s, "decode_s": decode_s,
        "lost_ratio": lost / decode_s if decode_s else None,
        "lost_ratio_low": ratio.low if ratio else None,
        "lost_ratio_high": ratio.high if ratio else None,
        "contrast_ratio": fraction, "p_value": p,
        "tail_explained_ratio": total.tail_credit_s / total.tail_excess_s
        if total.tail_excess_s > 0 else None,
        "event_ms": None if floor is None else floor * 1e3,
        "events": None if events is None else events.height,
        "best_shift_ms": _best_shift(total, base), "flagged": flagged,
        "note": "; ".join(notes) or None,
    }  # fmt: skip
    worker = pl.lit(row["worker"], pl.String)
    return Judgement(
        {**dict.fromkeys(RESULT_SCHEMA), **row},
        losses_of(total, names, lost).with_columns(worker=worker).select(list(LOSSES_SCHEMA))
        if flagged else pl.DataFrame(schema=LOSSES_SCHEMA),
        pl.DataFrame(schema=EVENTS_SCHEMA) if events is None
        else events.with_columns(worker=worker).select(list(EVENTS_SCHEMA)),
    )  # fmt: skip


def _fraction_lost(total: Total) -> float:
    """Share of the seconds in which gaps and prefills overlap that prefills took.

    S/V = f + (1 - f) c, where S is credit, V overlap and c what chance gives: stalls of other causes
    add only to what prefills left. Gaps with a stall too long for their prefills say nothing of f;
    their overlap counts like that of the others.
    """
    told = total.overlap_s - total.foreign_s
    if told <= 0:
        return 0.0
    by_chance = min(total.chance_s / total.overlap_s, 0.9)
    return (total.credit_s / told - by_chance) / (1 - by_chance)


def _p_value(total: Total) -> float | None:
    """Share of shifts that put as much excess onto prefills as there is."""
    if total.anywhere is None or not len(total.anywhere):
        return None
    return float((1 + (total.anywhere >= total.here).sum()) / (1 + len(total.anywhere)))


def _best_shift(total: Total, base_s: float) -> float | None:
    """Milliseconds by which prefills would have to move to fit the stalls best; 0 within a step."""
    if total.near is None or not np.isfinite(total.near).any():
        return None
    middle = len(total.near) // 2
    best = int(np.argmax(total.near))
    away = (best - middle) * total.cell_s
    if abs(away) <= base_s + total.cell_s or total.near[best] <= 1.05 * total.near[middle]:
        return 0.0
    return away * 1e3
