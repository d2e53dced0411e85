"""What the stretches of a worker's gaps add up to: seconds, shifts, pairs and stalls."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from pdtrace.methods import _gap_prefills as prefill_work
from pdtrace.methods._gap_series import Gaps, Ints
from pdtrace.methods._gap_window import NOISE, Stage, Window
from pdtrace.methods.statistics import Floats

BLOCKS = 40  # stretches of equal length that the bootstrap draws
PAIR_FLOOR = 1e-5  # of the loss: pairs below are summed into one row
MAX_PAIRS = 100_000
MAX_EVENTS = 100_000

LOSSES_SCHEMA: dict[str, type[pl.DataType]] = {
    "worker": pl.String, "culprit": pl.String, "victim": pl.String, "lost_s": pl.Float64,
    "pairs": pl.Int64,
}  # fmt: skip
EVENTS_SCHEMA: dict[str, type[pl.DataType]] = {
    "worker": pl.String, "victim": pl.String, "stream": pl.Int64, "end_ns": pl.Int64,
    "gap_ms": pl.Float64, "excess_ms": pl.Float64, "lost_ms": pl.Float64, "culprit": pl.String,
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
    pairs: list[pl.DataFrame] = field(default_factory=list)
    stalls: list[pl.DataFrame] = field(default_factory=list)


def add(total: Total, window: Window, stage: Stage) -> None:
    """Add a window's sums."""
    gaps, exposed = window.gaps, window.overlap > 0
    total.gaps += len(gaps.start)
    total.clean += int(window.clean.sum())
    total.exposed += int(exposed.sum())
    total.merged += window.merged
    total.preempted += window.preempted
    total.overlap_s += float(window.overlap.sum())
    total.credit_s += float(window.credit.sum())
    total.chance_s += window.chance_s
    total.foreign_s += window.foreign_s
    # The residents of one step share its noise: sigma adds up over them, not its square.
    shared = stage.open.counts((gaps.start + gaps.end) / 2)[exposed]
    total.noise2 += float((window.sigma[exposed] ** 2 * shared).sum())
    total.exposed_base_s += float(np.minimum(window.baseline, window.overlap)[exposed].sum())
    _add_tail(total, window)
    total.here += window.shifts.here
    for name in ("anywhere", "near"):
        before, more = getattr(total, name), getattr(window.shifts, name)
        if before is None:
            setattr(total, name, more)
        elif len(before) == len(more):
            setattr(total, name, before + more)
    total.cell_s = window.shifts.cell_s
    low, high = stage.period
    block = np.clip((gaps.end - low) / max(high - low, 1e-9) * BLOCKS, 0, BLOCKS - 1)
    number = block.astype(np.int64)
    for slot, values in enumerate((window.credit, window.overlap, gaps.length)):
        total.blocks[slot] += np.bincount(number, values, BLOCKS)
    total.baselines.append(float(np.median(window.baseline / window.steps)))
    total.sigmas.append(float(np.median(window.sigma)))
    total.counted_by.add(window.counted_by)
    pairs = _pairs(window, stage)
    total.pairs.append(pairs)
    total.stalls.append(_stalls(window))


def _add_tail(total: Total, window: Window) -> None:
    """Excess and credit of the longest hundredth of the gaps."""
    length = window.gaps.length
    tail = length >= np.quantile(length, 0.99)
    total.tail_excess_s += float(np.maximum(window.excess[tail], 0.0).sum())
    total.tail_credit_s += float(np.maximum(window.credit[tail], 0.0).sum())


def _pairs(window: Window, stage: Stage) -> pl.DataFrame:
    """Credit of each gap split over the prefills that it met, by the tokens computed meanwhile."""
    work = window.prefills
    length = np.maximum(work.end - work.start, 1e-9)
    density = work.tokens / length
    known = ~np.isnan(density)
    density = np.where(known, density, np.median(density[known]) if known.any() else 1.0)
    rows = np.flatnonzero((window.overlap > 0) & (window.credit != 0))
    victim_of = stage.request[window.gaps.stream]
    parts = [pl.DataFrame(schema={"culprit": pl.Int64, "victim": pl.Int64, "lost_s": pl.Float64})]
    for gap, prefill, both in prefill_work.meetings(window.gaps, rows, work):
        weight = both * density[prefill]
        whole = np.bincount(gap, weight, len(victim_of))
        lost = window.credit[gap] * weight / np.maximum(whole[gap], 1e-300)
        parts.append(
            pl.DataFrame(
                {"culprit": work.request[prefill], "victim": victim_of[gap], "lost_s": lost}
            )
            .filter(pl.col("culprit") != pl.col("victim"))
            .group_by("culprit", "victim")
            .agg(pl.col("lost_s").sum())
        )
    return pl.concat(parts).group_by("culprit", "victim").agg(pl.col("lost_s").sum())


def _stalls(window: Window) -> pl.DataFrame:
    """Gaps that may become events: as much of them as prefills explain, and for how long."""
    rows = np.flatnonzero((window.credit > NOISE * window.sigma) & (window.overlap > 0))
    rows = rows[window.credit[rows] >= 0.5 * window.excess[rows]]
    return pl.DataFrame(
        {
            "stream": window.gaps.stream[rows],
            "start": window.gaps.start[rows],
            "end": window.gaps.end[rows],
            "excess_s": window.excess[rows],
            "lost_s": window.credit[rows],
            "base_s": window.baseline[rows],
        }
    )


def events_of(
    total: Total, stage: Stage, names: pl.Series, base_s: float
) -> tuple[float, pl.DataFrame]:
    """(smallest loss that is called an event in seconds, the events).

    The threshold follows the data: between noise and the bulk of the losses, where the fewest lie.
    """
    stalls = pl.concat(total.stalls)
    floor = _threshold(stalls["lost_s"].to_numpy(), base_s, 4 * float(np.median(total.sigmas)))
    called = stalls.filter(pl.col("lost_s") >= floor)
    called = called.sort("lost_s", descending=True).head(MAX_EVENTS).sort("end", "stream")
    victim = stage.request[called["stream"].to_numpy()]
    gaps = Gaps(
        called["stream"].to_numpy(), called["start"].to_numpy(), called["end"].to_numpy(),
        np.ones(called.height), np.ones(called.height),
    )  # fmt: skip
    culprit = np.full(called.height, -1)
    most = np.zeros(called.height)
    rows = np.arange(called.height)
    for gap, prefill, both in prefill_work.meetings(gaps, rows, stage.prefills):
        other = stage.prefills.request[prefill] != victim[gap]
        order = np.argsort(both[other], kind="stable")
        culprit[gap[other][order]] = stage.prefills.request[prefill[other][order]]
        most[gap[other][order]] = both[other][order]
    events = pl.DataFrame(
        {
            "victim": _named(names, victim),
            "stream": np.zeros(called.height, dtype=np.int64),
            "end_ns": stage.origin_ns + (called["end"] * 1e9).round().cast(pl.Int64),
            "gap_ms": (called["end"] - called["start"]) * 1e3,
            "excess_ms": called["excess_s"] * 1e3,
            "lost_ms": called["lost_s"] * 1e3,
            "culprit": _named(names, culprit),
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
    """Seconds by (culprit, victim): the largest by name, the rest as one row without names."""
    pairs = (
        pl.concat(total.pairs).group_by("culprit", "victim").agg(pl.col("lost_s").sum())
        .sort("lost_s", "culprit", "victim", descending=[True, False, False])
    )  # fmt: skip
    # Noise and chance lie in the pairs too: they sum to what is called lost.
    whole = float(pairs["lost_s"].sum()) if pairs.height else 0.0
    if whole > 0:
        pairs = pairs.with_columns(pl.col("lost_s") * (lost_s / whole))
    named = pairs.head(MAX_PAIRS).filter(pl.col("lost_s") > PAIR_FLOOR * abs(lost_s))
    rest = pairs[named.height :]
    frame = pl.DataFrame(
        {
            "culprit": _named(names, named["culprit"].to_numpy()),
            "victim": _named(names, named["victim"].to_numpy()),
            "lost_s": named["lost_s"],
            "pairs": np.ones(named.height, dtype=np.int64),
        },
        schema={k: v for k, v in LOSSES_SCHEMA.items() if k != "worker"},
    )
    if not rest.height:
        return frame
    last = {
        "culprit": None, "victim": None, "lost_s": float(rest["lost_s"].sum()),
        "pairs": rest.height,
    }  # fmt: skip
    return pl.concat([frame, pl.DataFrame([last], schema=frame.schema)])


def _named(names: pl.Series, codes: Ints) -> pl.Series:
    """Names of requests; a negative code is nobody."""
    known = pl.Series(codes, dtype=pl.Int64)
    picked = names.cast(pl.String).gather(known.clip(lower_bound=0).cast(pl.UInt32))
    return pl.select(pl.when(known >= 0).then(picked)).to_series()
