"""What a step costs, fitted from positioned instants (level B) ; `step_cost_steps` fits the engine's own steps (level A).

Shape: prefill a + b n + c n^2, decode a + b batch + c context (DistServe's profiler, Zhong et al. 2024),
least squares on the relative error, trimmed. A mixed step pays the decode, the prompt tokens and what
mixing adds, so the fixed part of a prompt-only step is seen only where nothing decodes beside it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdtrace.methods.replay import Cost, Noise
from pdtrace.methods.statistics import Bools, Floats, trimmed_least_squares
from pdtrace.records import dataclass

TOLERANCE_S = 3e-5  # instants that are the same: token times are whole microseconds
NEAR = 0.3  # of a decode step: so much may instants of different origin be apart
SAMPLED = 4000  # prefills that are looked at
GAPS = 40_000  # decode gaps likewise: their mean holds the rare long ones, which few gaps do not tell well
FEWEST = 30  # of gaps and of prefills, for a fit
ALONE = 10  # prefills beside which nothing decodes, for the fixed part of their step
FEW = 2  # as many tell it too, if they agree and lie near the decode's: a busy engine shows no more than its first steps
LIKE_DECODE = (
    0.4,
    1.5,
)  # times the fixed part of a decode step; what lies outside is a start-up or something else
ROUND_BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Prefills:
    """Prompt computations: worker, start, end (s), tokens computed."""

    worker: Floats
    start: Floats
    end: Floats
    tokens: Floats


@dataclass(frozen=True)
class Streams:
    """Token streams on the worker that decoded: one row each, and all their emissions one after the other."""

    worker: Floats
    prompt: Floats
    output: Floats
    first: Floats
    last: Floats
    times: Floats  # emissions of all streams
    owner: NDArray[np.int64]  # stream of each emission, non-decreasing


@dataclass(frozen=True)
class Fitted:
    """A cost with how the engine batches, what it rests on, and how well it fits."""

    cost: Cost
    chunk_tokens: int | None  # None: prompts are computed in steps of their own
    prefill_batch_tokens: int
    budget_basis: str
    decode_rows: int
    prefill_rows: int
    decode_error: float  # median relative residual
    prefill_error: float
    alone_rows: int  # prompt-only steps behind the fixed part; 0: the decode's fixed part stands in
    fixed_range: (
        tuple[float, float] | None
    )  # of that part, where too few steps show it to be drawn anew
    noise: Noise  # how steps scatter around the cost
    level: str = "B"  # A: from the engine's own steps


@dataclass(frozen=True)
class Rows:
    """What is fitted: decode gaps (batch, context, seconds) and prefill spans (steps, batch, context, tokens, squares, seconds)."""

    gap: Floats  # columns: instant, batch, context, seconds
    span: Floats  # columns: instant, steps, batch, context, tokens, squares, seconds
    chunk_tokens: int | None
    prefill_batch_tokens: int
    budget_basis: str


def rows(
    prefills: Prefills,
    streams: Streams,
    said_budget: int | None,
    said_chunked: bool | None,
    *,
    split: bool = False,
) -> Rows | str:
    """The rows to fit, or the sentence that says why there are none; `split`: prefill workers do not decode."""
    if len(streams.times) == 0 or len(prefills.start) == 0:
        return (
            "token times and prefill intervals on known workers are needed to fit what a step costs"
        )
    spans = _groups(prefills)
    clear = _clear(spans)
    gap = _gaps(prefills, streams)
    near = max(TOLERANCE_S, NEAR * float(np.median(gap[:, 3]))) if len(gap) else TOLERANCE_S
    inside, at_end, resident = _emissions_inside(spans, streams, clear, near)
    with_residents = clear & (resident >= 0)
    if with_residents.sum() < ALONE and said_chunked is None and not split:
        return "too few prompts were computed while others decoded: whether steps mix prompts and decodes cannot be told"
    if split:
        chunked = False
    elif with_residents.sum() >= ALONE:
        chunked = bool(at_end[with_residents].mean() > 0.5)
    else:
        chunked = bool(said_chunked)
    batch, context = _residents_at(spans["worker"], spans["start"], spans["start"], streams)
    steps = np.ones(len(spans["start"]))
    budget: int | None = None
    basis = ""
    if chunked:
        seen = with_residents & at_end
        steps[seen] = np.maximum(inside[seen], 1)
        budget, basis = _budget(spans["tokens"][seen], steps[seen], batch[seen], said_budget)
        alone = clear & (resident < 0)
        steps[alone] = np.ceil(spans["tokens"][alone] / max(budget, 1))
        keep = seen | (alone & (batch == 0))
    else:
        keep = clear
    span = np.column_stack(
        [spans["start"], steps, batch if chunked else np.zeros_like(batch), context, spans["tokens"], spans["squares"],
         spans["end"] - spans["start"]]
    )[keep]  # fmt: skip
    shared = spans["count"] > 1
    together = int(spans["tokens"][shared].max()) if shared.any() else 0
    if not chunked:
        basis = (
            "prefill workers do not decode"
            if split
            else "prompts are computed in steps of their own: no stream went on at the end of one"
        )
    return Rows(gap, span[span[:, 6] > 0], budget, together, basis)


def fit(found: Rows, random: np.random.Generator | None = None) -> Fitted | str:
    """The cost; with `random`, of stretches drawn anew (what the fit leaves open)."""
    gap, span = found.gap, found.span
    if len(gap) < FEWEST or len(span) < FEWEST:
        return (
            f"too few undisturbed rows to fit what a step costs: {len(gap)} decode gaps and {len(span)} prefills,"
            f" {FEWEST} of each are needed"
        )
    if random is not None:
        few = span[:, 2] == 0  # each counts: a draw without them would tell of another fixed part
        few &= found.chunk_tokens is not None and few.sum() < ALONE
        gap, span = redrawn(gap, random), np.concatenate([redrawn(span[~few], random), span[few]])
    decode, decode_error = fitted_part(gap[:, 1:3], gap[:, 3], fixed=True)
    mixed, extra = span[:, 2] > 0, 0.0
    within: tuple[float, float] | None = None
    scatter = np.ones(1)
    if found.chunk_tokens is None:
        prefill, error = fitted_part(span[:, 4:6], span[:, 6], fixed=True)
        usual = prefill[0] + prefill[1] * span[:, 4] + prefill[2] * span[:, 5]
        scatter = span[:, 6] / np.maximum(usual, 1e-9)
        alone = len(span)
    else:
        base = decode[0] + decode[1] * span[:, 2] + decode[2] * span[:, 3]
        rest = span[:, 6] - span[:, 1] * base
        use = mixed if mixed.sum() >= FEWEST else np.ones(len(span), bool)
        (extra, *slopes), error = fitted_part(
            span[use][:, (1, 4, 5)], rest[use], fixed=False, scale=span[use, 6]
        )
        left = span[~mixed, 6] - slopes[0] * span[~mixed, 4] - slopes[1] * span[~mixed, 5]
        constant, within, alone = fixed_part(
            left / span[~mixed, 1], error * span[~mixed, 6] / span[~mixed, 1], decode[0] + extra
        )
        prefill = (constant, *slopes)
    # A stream is the sum of its steps: their mean counts, hiccups that the fit trims among them.
    usual = decode[0] + decode[1] * gap[:, 1] + decode[2] * gap[:, 2]
    mean = float(gap[:, 3].sum() / usual.sum()) if usual.sum() > 0 else 1.0
    cost = Cost(
        (prefill[0], prefill[1], prefill[2]),
        (decode[0] * mean, decode[1] * mean, decode[2] * mean),
        extra,
    )
    return Fitted(
        cost, found.chunk_tokens, found.prefill_batch_tokens, found.budget_basis, len(gap), len(span), decode_error,
        error, alone, within, Noise(gap[:, 3] / np.maximum(usual * mean, 1e-9), scatter),
    )  # fmt: skip


def fitted_part(
    columns: Floats, y: Floats, *, fixed: bool, scale: Floats | None = None
) -> tuple[tuple[float, ...], float]:
    """Trimmed least squares on the relative error; a cost that would fall with more work is left out of the model."""
    scale = y if scale is None else scale
    full = np.column_stack([np.ones(len(y)), columns]) if fixed else columns
    first = 1 if fixed else 0
    use = [*range(first), *(n for n in range(first, full.shape[1]) if np.ptp(full[:, n]) > 0)]
    while True:
        found = trimmed_least_squares(full[:, use], y, 1 / scale, floor=1e-4)
        negative = [
            use[n] for n, value in enumerate(found.coefficients) if value < 0 and use[n] >= first
        ]
        if not negative or len(use) == 1:
            break
        use.remove(max(negative))
    values = np.zeros(full.shape[1])
    values[use] = found.coefficients
    error = float(np.median(np.abs((y - full @ values) / scale)))
    return tuple(float(v) for v in values), error


def fixed_part(
    seen: Floats, error: Floats, stand_in: float
) -> tuple[float, tuple[float, float] | None, int]:
    """The fixed part of a step that only computes prompts: value, range (None: many were seen), steps behind it.

    `seen`: what such steps lasted beyond their prompt tokens; `error`: how far the fit is off, in the median. A few
    are believed if they agree. Where none can be, `stand_in` (a decode step's) holds, and the range says how little that is.
    """
    if len(seen) >= ALONE:
        return float(np.median(seen)), None, len(seen)
    if len(seen) >= FEW:
        value, sigma = float(np.median(seen)), 1.4826 * float(np.mean(error))
        low, high = (share * stand_in for share in LIKE_DECODE)
        if np.ptp(seen) <= 4 * sigma + TOLERANCE_S and low <= value <= high:
            wide = 2 * sigma / len(seen) ** 0.5
            return value, (max(value - wide, 0.0), value + wide), len(seen)
    return stand_in, (LIKE_DECODE[0] * stand_in, stand_in), 0


def redrawn(table: Floats, random: np.random.Generator) -> Floats:
    """Rows of 20 stretches of time drawn with replacement."""
    place = np.argsort(np.argsort(table[:, 0])) * 20 // len(table)
    return np.concatenate([table[place == n] for n in random.integers(0, 20, 20)])


def _groups(prefills: Prefills) -> dict[str, Floats]:
    """Prefills of one worker with the same start and end were one step: their tokens together."""
    key = np.column_stack(
        [
            prefills.worker,
            np.round(prefills.start / TOLERANCE_S),
            np.round(prefills.end / TOLERANCE_S),
        ]
    )
    _, first, index = np.unique(key, axis=0, return_index=True, return_inverse=True)
    index = index.ravel()
    return {
        "worker": prefills.worker[first], "start": prefills.start[first], "end": prefills.end[first],
        "tokens": np.bincount(index, prefills.tokens), "squares": np.bincount(index, prefills.tokens**2),
        "count": np.bincount(index).astype(float),
    }  # fmt: skip


def _clear(spans: dict[str, Floats]) -> Bools:
    """Spans that overlap no other on their worker."""
    order = np.lexsort((spans["start"], spans["worker"]))
    worker, start, end = (spans[k][order] for k in ("worker", "start", "end"))
    after = np.append((start[1:] >= end[:-1] - TOLERANCE_S) | (worker[1:] != worker[:-1]), True)
    before = np.ones(len(order), bool)
    for one in np.unique(worker):
        rows = worker == one
        latest = np.maximum.accumulate(end[rows])
        before[rows] = np.append(True, start[rows][1:] >= latest[:-1] - TOLERANCE_S)
    clear = np.zeros(len(order), bool)
    clear[order] = after & before
    return clear


def _emissions_inside(
    spans: dict[str, Floats], streams: Streams, clear: Bools, near: float
) -> tuple[Floats, Bools, NDArray[np.int64]]:
    """For each clear span and one stream that ran through it: emissions up to its end, whether one fell on the end.

    On the end: nearer than `near`, a part of a decode step. A step of its own is followed by a whole decode step.
    """
    n = len(clear)
    inside, at_end, resident = np.zeros(n), np.zeros(n, bool), np.full(n, -1)
    begin = np.searchsorted(streams.owner, np.arange(len(streams.first)))
    stop = np.searchsorted(streams.owner, np.arange(len(streams.first)), "right")
    chosen = np.flatnonzero(clear)
    if len(chosen) > SAMPLED:
        chosen = chosen[:: -(-len(chosen) // SAMPLED)]
    for place in chosen:
        start, end = spans["start"][place], spans["end"][place]
        through = np.flatnonzero(
            (streams.worker == spans["worker"][place])
            & (streams.first <= start + TOLERANCE_S)
            & (streams.last > end + TOLERANCE_S)
        )
        if not len(through):
            continue
        resident[place] = through[0]
        times = streams.times[begin[through[0]] : stop[through[0]]]
        inside[place] = ((times > start + near) & (times <= end + near)).sum()
        at_end[place] = bool((np.abs(times - end) <= near).any())
    return inside, at_end, resident


def _budget(tokens: Floats, steps: Floats, batch: Floats, said: int | None) -> tuple[int, str]:
    """Token budget of a step from how many steps prompts took: between n / steps and n / (steps - 1), plus the decodes."""
    if said:
        return said, "as configured"
    several = steps > 1
    low = float((tokens / steps + batch).max()) if len(tokens) else 1.0
    if not several.any():
        return max(int(low), 1), "no prompt took more than one step: at least as many tokens fit"
    high = float(np.quantile(tokens[several] / (steps[several] - 1) + batch[several], 0.02))
    low = float(np.quantile(tokens / steps + batch, 0.98))
    fits = [b for b in ROUND_BUDGETS if 0.97 * low <= b <= 1.03 * max(high, low)]
    if fits:
        return fits[
            0
        ], f"inferred from how many steps long prompts took ({low:,.0f} to {high:,.0f} tokens)"
    return int(low), "inferred from how many steps long prompts took"


def _gaps(prefills: Prefills, streams: Streams) -> Floats:
    """Gaps between tokens that no prefill on the worker touches, with the batch and its context."""
    same = streams.owner[1:] == streams.owner[:-1]
    start, end = streams.times[:-1][same], streams.times[1:][same]
    worker = streams.worker[streams.owner[1:][same]]
    clean = end > start
    for one in np.unique(worker):
        rows = worker == one
        mine = prefills.worker == one
        order = np.argsort(prefills.start[mine])
        begins = prefills.start[mine][order]
        latest = np.maximum.accumulate(prefills.end[mine][order]) if mine.any() else begins
        before = (
            np.searchsorted(begins, end[rows] - TOLERANCE_S) - 1
        )  # the last prefill that began before the gap ended
        touched = (
            (before >= 0) & (latest[np.maximum(before, 0)] > start[rows] + TOLERANCE_S)
            if mine.any()
            else np.zeros(rows.sum(), bool)
        )
        clean[rows] &= ~touched
    kept = np.flatnonzero(clean)
    kept = kept[np.argsort(end[kept])]
    if len(kept) > GAPS:
        kept = kept[:: -(-len(kept) // GAPS)]
    batch, context = _residents_at(worker[kept], start[kept], end[kept], streams)
    table = np.column_stack([end[kept], batch, context, end[kept] - start[kept]])
    return table[batch > 0]


def _residents_at(
    worker: Floats, start: Floats, end: Floats, streams: Streams
) -> tuple[Floats, Floats]:
    """How many streams decoded from `start` to `end` on the worker, and the tokens of their context."""
    batch, context = np.zeros(len(start)), np.zeros(len(start))
    pace = (streams.output - 1) / np.maximum(streams.last - streams.first, 1e-9)
    for low in range(0, len(start), 500):  # bounded memory
        rows = slice(low, low + 500)
        active = (
            (worker[rows, None] == streams.worker[None, :])
            & (streams.first[None, :] <= start[rows, None] + TOLERANCE_S)
            & (
                streams.last[None, :]
                >= np.maximum(end, start + 2 * TOLERANCE_S)[rows, None] - TOLERANCE_S
            )
        )
        made = 1 + pace[None, :] * np.maximum(start[rows, None] - streams.first[None, :], 0)
        batch[rows] = active.sum(axis=1)
        context[rows] = (active * (streams.prompt[None, :] + made)).sum(axis=1)
    return batch, context
