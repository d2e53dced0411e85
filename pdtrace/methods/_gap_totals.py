"""What the stretches of a worker's gaps add up to: seconds, shifts, pairs and stalls."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import numpy as np
import polars as pl

from pdtrace.methods import _gap_prefills as prefill_work
from pdtrace.methods._gap_series import Ints
from pdtrace.methods._gap_window import NOISE, Stage, Window, window_of
from pdtrace.methods.statistics import Floats, spread_rows
from pdtrace.records import dataclass

BLOCKS = 40  # stretches of equal length that the bootstrap draws
PAIR_FLOOR = 1e-5  # of the loss: pairs below are summed into one row
MAX_PAIRS = 100_000
TYPICAL_ROWS = 20_000  # gaps of a window that tell its typical step
MAX_EVENTS = 100_000

LOSSES_SCHEMA: dict[str, type[pl.DataType]] = {
    "worker": pl.String, "culprit": pl.String, "victim": pl.String, "lost_s": pl.Float64,
    "pairs": pl.Int64,
}  # fmt: skip
EVENTS_SCHEMA: dict[str, type[pl.DataType]] = {
    "worker": pl.String, "victim": pl.String, "stream": pl.Int64, "end_ns": pl.Int64,
    "gap_ms": pl.Float64, "excess_ms": pl.Float64, "lost_ms": pl.Float64, "culprit": pl.String,
}  # fmt: skip


_PAIR: dict[str, type[pl.DataType]] = {
    "culprit": pl.Int64, "victim": pl.Int64, "lost_s": pl.Float64,
}  # fmt: skip


@dataclass
class Total:
    """Sums over the windows of a worker."""

    gaps: int = 0
    clean: int = 0
    exposed: int = 0
    merged: int = 0
    weak: int = 0
    preempted: int = 0
    overlap_s: float = 0.0
    credit_s: float = 0.0
    chance_s: float = 0.0
    foreign_s: float = 0.0
    noise2: float = 0.0
    exposed_base_s: float = 0.0
    withheld_s: float = 0.0
    tail_excess_s: float = 0.0
    tail_credit_s: float = 0.0
    here: float = 0.0
    anywhere: Floats | None = None
    near: Floats | None = None
    cell_s: float = 0.0
    blocks: Floats = field(default_factory=lambda: np.zeros((4, BLOCKS)))
    baselines: list[float] = field(default_factory=list)
    sigmas: list[float] = field(default_factory=list)
    counted_by: set[str] = field(default_factory=set)
    unnamed: int = 0  # pairs that are in no row of their own
    pairs: list[pl.DataFrame] = field(default_factory=list)
    stalls: list[pl.DataFrame] = field(default_factory=list)


_SUMS = (
    "gaps", "clean", "exposed", "merged", "weak", "preempted", "overlap_s", "credit_s", "chance_s",
    "foreign_s", "noise2", "exposed_base_s", "withheld_s", "tail_excess_s", "tail_credit_s", "here", "blocks",
    "baselines", "sigmas", "unnamed", "pairs", "stalls",
)  # fmt: skip


def join(total: Total, part: Total) -> None:
    """Add the sums of another window."""
    for name in _SUMS:
        setattr(total, name, getattr(total, name) + getattr(part, name))
    for name in ("anywhere", "near"):
        before, more = getattr(total, name), getattr(part, name)
        if before is None:
            setattr(total, name, more)
        elif more is not None and len(before) == len(more):
            setattr(total, name, before + more)
    total.cell_s = part.cell_s or total.cell_s
    total.counted_by |= part.counted_by


def summed(streams: pl.DataFrame, offset: int, stage: Stage) -> Total:
    """The sums of one window of streams."""
    total, window = Total(), window_of(streams, offset, stage)
    if window is None:
        total.weak = 1
        return total
    exposed = window.exposed
    overlap, credit = window.overlap[exposed], window.credit[exposed]
    total.gaps = len(window.length)
    total.clean = len(window.length) - len(exposed)
    total.exposed = len(exposed)
    total.merged, total.preempted = window.merged, window.preempted
    total.overlap_s, total.credit_s = float(overlap.sum()), float(credit.sum())
    total.chance_s, total.foreign_s = window.chance_s, window.foreign_s
    total.withheld_s = window.withheld_s
    # The residents of one step share its noise: sigma adds up over them, not its square.
    total.noise2 = float((window.sigma[exposed] ** 2 * window.residents[exposed]).sum())
    total.exposed_base_s = float(np.minimum(window.baseline[exposed], overlap).sum())
    _add_tail(total, window)
    total.here, total.cell_s = window.shifts.here, window.shifts.cell_s
    total.anywhere, total.near = window.shifts.anywhere, window.shifts.near
    low, high = stage.period
    block = window.gaps.end - low
    block *= BLOCKS / max(high - low, 1e-9)
    number = block.astype(np.int64)
    np.clip(number, 0, BLOCKS - 1, out=number)
    for slot, values in enumerate((credit, overlap)):
        total.blocks[slot] = np.bincount(number[exposed], values, BLOCKS)
    total.blocks[2] = np.bincount(number, window.length, BLOCKS)
    some = spread_rows(len(window.length), TYPICAL_ROWS)
    total.baselines.append(float(np.median(window.baseline[some] / window.steps[some])))
    total.sigmas.append(float(np.median(window.sigma[some])))
    total.counted_by.add(window.counted_by)
    _add_pairs(total, window, stage)
    return total


def _add_tail(total: Total, window: Window) -> None:
    """Excess and credit of the longest hundredth of the gaps."""
    place = int(np.ceil(0.99 * (len(window.length) - 1)))
    tail = np.flatnonzero(window.length >= np.partition(window.length, place)[place])
    total.tail_excess_s += float(np.maximum(window.excess[tail], 0.0).sum())
    total.tail_credit_s += float(np.maximum(window.credit[tail], 0.0).sum())


def _add_pairs(total: Total, window: Window, stage: Stage) -> None:
    """Credit of each gap split over the prefills that it met, by the tokens computed meanwhile.

    Of gaps whose credit stands out of the noise: what is left goes to the row without names.
    """
    rows = window.exposed[window.credit[window.exposed] > window.sigma[window.exposed]]
    if not len(rows):
        total.pairs.append(pl.DataFrame(schema=_PAIR))
        total.stalls.append(_stalls(window, stage, np.empty(0, dtype=np.int64)))
        return
    work, victim_of = window.prefills, stage.request[window.gaps.stream]
    length = np.maximum(work.end - work.start, 1e-9)
    density = work.tokens / length
    known = ~np.isnan(density)
    density = np.where(known, density, np.median(density[known]) if known.any() else 1.0)
    most = np.full(len(victim_of), -1)  # the prefill that took most of each gap
    parts = [pl.DataFrame(schema=_PAIR)]
    for gap, prefill, both in prefill_work.meetings(window.gaps, rows, work):
        weight = both * density[prefill]
        whole = np.bincount(gap, weight, len(victim_of))
        lost = window.credit[gap] * weight / np.maximum(whole[gap], 1e-300)
        others = work.request[prefill] != victim_of[gap]
        gap, culprit, lost = gap[others], work.request[prefill[others]], lost[others]
        order = np.argsort(lost, kind="stable")
        most[gap[order]] = culprit[order]
        parts.append(_summed(culprit, victim_of[gap], lost))
    pairs = pl.concat(parts).sort("lost_s", descending=True)
    total.pairs.append(pairs.head(MAX_PAIRS))
    total.unnamed += max(0, pairs.height - MAX_PAIRS)
    total.stalls.append(_stalls(window, stage, most))


def _summed(culprit: Ints, victim: Ints, lost: Floats) -> pl.DataFrame:
    """Seconds by (culprit, victim)."""
    wide = int(victim.max(initial=0)) + 1
    key = culprit * wide + victim
    order = np.argsort(key, kind="stable")
    begin = np.flatnonzero(np.diff(key[order], prepend=-1))
    seconds = np.add.reduceat(lost[order], begin) if len(begin) else np.empty(0)
    pair = key[order][begin]
    return pl.DataFrame({"culprit": pair // wide, "victim": pair % wide, "lost_s": seconds}, _PAIR)


def _stalls(window: Window, stage: Stage, culprit: Ints) -> pl.DataFrame:
    """Gaps that may become events: the longest of those that prefills explain half of or more."""
    rows = window.exposed
    rows = rows[window.credit[rows] > NOISE * window.sigma[rows]]
    rows = rows[window.credit[rows] >= 0.5 * window.excess[rows]]
    rows = rows[np.argsort(-window.credit[rows], kind="stable")[:MAX_EVENTS]]
    stream = window.gaps.stream[rows]
    return pl.DataFrame(
        {
            "victim": stage.request[stream],
            "stream": stage.number[stream],
            "start": window.gaps.start[rows],
            "end": window.gaps.end[rows],
            "excess_s": window.excess[rows],
            "lost_s": window.credit[rows],
            "culprit": culprit[rows],
        }
    )


def events_of(
    total: Total, origin_ns: int, names: pl.Series, base_s: float
) -> tuple[float, pl.DataFrame]:
    """(smallest loss that is called an event in seconds, the events).

    The threshold follows the data: between noise and the bulk of the losses, where the fewest lie.
    """
    stalls = pl.concat(total.stalls)
    floor = _threshold(stalls["lost_s"].to_numpy(), base_s, 4 * float(np.median(total.sigmas)))
    called = stalls.filter(pl.col("lost_s") >= floor)
    called = called.sort("lost_s", descending=True).head(MAX_EVENTS).sort("end", "victim", "stream")
    events = pl.DataFrame(
        {
            "victim": _named(names, called["victim"].to_numpy()),
            "stream": called["stream"],
            "end_ns": origin_ns + (called["end"] * 1e9).round().cast(pl.Int64),
            "gap_ms": (called["end"] - called["start"]) * 1e3,
            "excess_ms": called["excess_s"] * 1e3,
            "lost_ms": called["lost_s"] * 1e3,
            "culprit": _named(names, called["culprit"].to_numpy()),
        }
    )
    return floor, events


def _threshold(lost: Floats, base_s: float, noise_s: float) -> float:
    """Where the fewest losses lie, between noise (or a quarter of a step) and two steps."""
    low = max(noise_s, 0.25 * base_s)
    high = max(2 * base_s, 2 * low)
    inside = lost[(lost >= low) & (lost <= high)]
    if len(inside) < 20:
        return low if len(inside) < 0.01 * len(lost) else max(low, 0.5 * base_s)
    counts, edges = np.histogram(np.log(inside), bins=24, range=(np.log(low), np.log(high)))
    smooth = np.convolve(counts, [1, 2, 1], mode="same")
    best = int(np.argmin(smooth[1:-1])) + 1
    return float(np.exp((edges[best] + edges[best + 1]) / 2))


def losses_of(total: Total, names: pl.Series, lost_s: float) -> pl.DataFrame:
    """Seconds by (culprit, victim): the largest by name, the rest as one row without names.

    Chance lies in the pairs too: they are scaled to what is called lost, and never above it.
    """
    pairs = (
        pl.concat(total.pairs).group_by("culprit", "victim").agg(pl.col("lost_s").sum())
        .sort("lost_s", "culprit", "victim", descending=[True, False, False])
    )  # fmt: skip
    whole = float(pairs["lost_s"].sum())
    if whole > max(lost_s, 0.0):
        pairs = pairs.with_columns(pl.col("lost_s") * (max(lost_s, 0.0) / whole))
    named = pairs.head(MAX_PAIRS).filter(pl.col("lost_s") > PAIR_FLOOR * abs(lost_s))
    frame = pl.DataFrame(
        {
            "culprit": _named(names, named["culprit"].to_numpy()),
            "victim": _named(names, named["victim"].to_numpy()),
            "lost_s": named["lost_s"],
            "pairs": np.ones(named.height, dtype=np.int64),
        }
    )
    last: dict[str, Any] = {
        "culprit": None, "victim": None, "lost_s": lost_s - float(named["lost_s"].sum()),
        "pairs": pairs.height - named.height + total.unnamed,
    }  # fmt: skip
    if not last["pairs"] and abs(last["lost_s"]) <= 1e-9 * abs(lost_s):
        return frame
    return pl.concat([frame, pl.DataFrame([last], schema=frame.schema)])


def _named(names: pl.Series, codes: Ints) -> pl.Series:
    """Requests (names, or the numbers that stand for them) by code; a negative code is nobody."""
    known = pl.Series(codes, dtype=pl.Int64)
    picked = names.gather(known.clip(lower_bound=0).cast(pl.UInt32))
    return pl.select(pl.when(known >= 0).then(picked)).to_series()
