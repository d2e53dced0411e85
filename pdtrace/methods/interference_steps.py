"""Prefill interference from engine steps (level A): decode seconds lost to prefill, by worker.

What is estimated: over the steps in which prompt tokens were computed, (actual duration - duration
that the same step would have had with the same decode batch and no prompt tokens), times the
requests that were decoding. Not estimated: what a request would gain under another scheduler.

What each step did and who was decoding in it is told in `_step_kinds`. A host pause inside a
prefill step is not its cost: excess is cut at a robust fit of prefill cost. Sampled steps give no
sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pdtrace.methods._step_context import beyond_fit
from pdtrace.methods._step_kinds import Steps, classify, floats, residents_of, surely_decoded
from pdtrace.methods.statistics import (
    Z95,
    Bools,
    Fit,
    Floats,
    block_ratio,
    trimmed_least_squares,
)

# One rank's steps in the order in which they ran. Ends are compared, since a coarse log time is
# the time of an end; inside one tick the engine's own count decides.
STEPS = """
SELECT rank, seq, coalesce(start_ns, start_lower_ns) AS start_ns, elapsed_ns, prefill_requests,
  prefill_tokens, prefill_kv_tokens, decode_requests, decode_tokens, decode_kv_tokens, running,
  pulled_requests, capture, start_ns IS NOT NULL AS placed
FROM steps
WHERE worker = $worker AND rank IS NOT DISTINCT FROM $rank
ORDER BY coalesce(start_ns, start_lower_ns) + elapsed_ns, seq, source, record
"""

RANKS = "SELECT DISTINCT rank FROM steps WHERE worker = $worker ORDER BY rank"

WORKERS = """
SELECT s.worker, any_value(w.deployment) AS deployment, any_value(w.role) AS role,
  coalesce(bool_or(f.value ILIKE '%consumer%'), false) AS kv_consumer
FROM (SELECT DISTINCT worker FROM steps) AS s
LEFT JOIN workers AS w ON w.worker = s.worker
LEFT JOIN facts AS f ON f.worker = s.worker AND f.key = 'kv_role'
GROUP BY s.worker
ORDER BY s.worker
"""

MIN_DECODE_ONLY = 30  # fewer decode-only steps give no baseline
MIN_AFFECTED = 5  # fewer steps with victims are an anecdote
MIN_SHARE = 0.01  # lower bound of lost / decode seconds from which a worker is flagged
PAUSE_NS = 20e6  # what a prefill step may exceed its fitted cost by; the rest is called a pause
# Steps that begin as early before the end of the last one ran beside it (parts of the step, ns); so many may.
AT_ONCE, AT_ONCE_NS, MOST_AT_ONCE = 0.2, 2_000_000, 0.2
SURE_COSTS = (
    100  # prefill steps from which on their cost is known well enough to call the rest a pause
)
MANY_DEAR = 5  # so many prefill steps one after another that all exceed their cost: no pauses
FIT_ROWS = 50_000  # rows that a fit looks at
# Error of the interval as parts of the exposed baseline and of the loss, calibrated on simulations.
BASE_ERROR, MODEL_ERROR = 0.015, 0.02

RESULT_SCHEMA: dict[str, type[pl.DataType]] = {
    "worker": pl.String, "rank": pl.String, "deployment": pl.String, "role": pl.String,
    "capture": pl.String, "steps": pl.Int64, "decode_only_steps": pl.Int64,
    "mixed_steps": pl.Int64, "prefill_only_steps": pl.Int64, "idle_steps": pl.Int64,
    "pulled_steps": pl.Int64, "decode_only_p50_ms": pl.Float64, "mixed_p50_ms": pl.Float64,
    "prefill_only_p50_ms": pl.Float64, "baseline_ms": pl.Float64,
    "baseline_per_request_ms": pl.Float64, "baseline_per_kv_token_ms": pl.Float64,
    "noise_ms": pl.Float64, "affected_steps": pl.Int64, "lost_s": pl.Float64,
    "lost_low_s": pl.Float64, "lost_high_s": pl.Float64, "decode_s": pl.Float64,
    "lost_ratio": pl.Float64, "lost_ratio_low": pl.Float64, "lost_ratio_high": pl.Float64,
    "prefill_only_lost_s": pl.Float64, "plain_lost_s": pl.Float64, "capped_s": pl.Float64,
    "again_lost_s": pl.Float64,
    "flagged": pl.Boolean, "note": pl.String,
}  # fmt: skip
LOSSES_SCHEMA: dict[str, type[pl.DataType]] = {
    "worker": pl.String, "rank": pl.String, "seq": pl.Int64, "start_ns": pl.Int64,
    "elapsed_ms": pl.Float64, "baseline_ms": pl.Float64, "excess_ms": pl.Float64,
    "residents": pl.Int64, "prefill_requests": pl.Int64, "prefill_tokens": pl.Int64,
    "lost_s": pl.Float64,
}  # fmt: skip


def interference(
    steps: pl.DataFrame,
    worker: str,
    deployment: str | None = None,
    role: str | None = None,
    kv_consumer: bool = False,
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(one row per rank, one row per step that held decodes up) for one worker's ordered steps."""
    results, losses = [], []
    consumer = kv_consumer or role == "decode"
    ranks = steps["rank"].unique(maintain_order=True).to_list()
    for rank in ranks:
        # of a single rank no copy is made: its steps may be a large part of memory
        part = steps if len(ranks) == 1 else steps.filter(pl.col("rank").eq_missing(rank))
        result, lost = _rank(part, consumer)
        name = {"worker": worker, "rank": rank}
        results.append({**name, "deployment": deployment, "role": role, **result})
        if lost is not None:
            losses.append(lost.with_columns(worker=pl.lit(worker), rank=pl.lit(rank, pl.String)))
    columns = list(LOSSES_SCHEMA)
    return (
        pl.DataFrame(results, schema=RESULT_SCHEMA),
        pl.concat([frame.select(columns).cast(pl.Schema(LOSSES_SCHEMA)) for frame in losses])
        if losses
        else pl.DataFrame(schema=LOSSES_SCHEMA),
    )


def _rank(frame: pl.DataFrame, consumer: bool) -> tuple[dict[str, Any], pl.DataFrame | None]:
    known = (
        frame.filter(pl.col("elapsed_ns").is_not_null())
        if frame["elapsed_ns"].has_nulls()
        else frame
    )
    steps = classify(known, consumer)
    result = _describe(frame, steps)
    why_not = _no_sum(frame, known, steps)
    if why_not:
        return {**result, "flagged": None, "note": why_not}, None
    columns, fit = _baseline(steps)
    baseline, open_ns = fit.at(columns), np.zeros(len(steps.elapsed))
    if columns.shape[1] == 2:  # the context is unknown
        told, open_ns = beyond_fit(steps.elapsed, steps.decodes, steps.decode_only, baseline)
        baseline = baseline + told
    excess = np.where(steps.prefill_only, steps.elapsed, steps.elapsed - baseline)
    capped, cut = _cap(steps, excess)
    residents, certain = residents_of(steps)
    affected = (steps.mixed | steps.prefill_only) & (residents > 0)
    lost = np.where(affected, capped * residents, 0.0) / 1e9
    lost_table = pl.DataFrame(
        {
            "seq": known["seq"],
            "start_ns": known["start_ns"],
            "elapsed_ms": steps.elapsed / 1e6,
            "baseline_ms": np.where(steps.prefill_only, 0.0, baseline) / 1e6,
            "excess_ms": capped / 1e6,
            "residents": residents.astype(np.int64),
            "prefill_requests": known["prefill_requests"],
            "prefill_tokens": known["prefill_tokens"],
            "lost_s": lost,
        }
    )
    if steps.again.any():
        again = pl.lit(pl.Series(steps.again))
        lost_table = lost_table.with_columns(
            pl.when(again)
            .then(pl.lit(pl.Series(values)).cast(pl.Int64))
            .otherwise(name)
            .alias(name)
            for name, values in (
                ("prefill_requests", np.where(steps.again, steps.prefills, 0.0)),
                ("prefill_tokens", np.where(steps.again, steps.tokens, 0.0)),
            )
        )
    lost_table = lost_table.filter(pl.Series(affected))
    result |= _baseline_columns(steps, fit)
    result |= _totals(steps, residents, affected, lost, baseline, fit)
    result["lost_low_s"] -= float((open_ns * residents)[affected & steps.mixed].sum()) / 1e9
    unsure = residents - surely_decoded(steps, residents)
    result["lost_low_s"] -= float((capped * unsure)[affected].sum()) / 1e9
    of_again = steps.again_tokens / np.where(steps.again, steps.tokens, 1.0)
    result["again_lost_s"] = float((lost * of_again).sum())
    result["capped_s"] = None if cut is None else float((cut * residents)[affected].sum() / 1e9)
    if cut is not None:
        # so few do not tell for sure what a prompt costs, and so many one after another are no pauses: it may be cost
        unsure_cut = affected if affected.sum() < SURE_COSTS else affected & _in_rows(steps, cut)
        result["lost_high_s"] += float((cut * residents)[unsure_cut].sum() / 1e9)
    few = result["affected_steps"] if 0 < result["affected_steps"] < MIN_AFFECTED else 0
    result["note"] = _note(steps, cut is None, certain, few)
    return result, lost_table


def _describe(frame: pl.DataFrame, steps: Steps) -> dict[str, Any]:
    captures = set(frame["capture"].unique().to_list())
    active = steps.decode_only | steps.mixed | steps.prefill_only
    return {
        "capture": "full" if captures == {"full"} else "sampled" if "sampled" in captures else None,
        "steps": frame.height,
        "decode_only_steps": int(steps.decode_only.sum()),
        "mixed_steps": int(steps.mixed.sum()),
        "prefill_only_steps": int(steps.prefill_only.sum()),
        "idle_steps": int((~active).sum()),
        "pulled_steps": int(steps.pulled.sum()),
        "decode_only_p50_ms": _p50(steps.elapsed[steps.decode_only]),
        "mixed_p50_ms": _p50(steps.elapsed[steps.mixed]),
        "prefill_only_p50_ms": _p50(steps.elapsed[steps.prefill_only]),
    }


def _no_sum(frame: pl.DataFrame, known: pl.DataFrame, steps: Steps) -> str:
    """Why the seconds lost cannot be summed here; empty when they can."""
    if set(frame["capture"].unique().to_list()) != {"full"}:
        return "steps are sampled or their capture is unknown: seconds lost cannot be summed"
    if known.height < frame.height:
        return (
            f"{frame.height - known.height} steps have no duration: seconds lost cannot be summed"
        )
    if several := _several_engines(known):
        return several
    if steps.decode_only.sum() < MIN_DECODE_ONLY:
        return f"fewer than {MIN_DECODE_ONLY} decode-only steps: no baseline"
    return ""


def _several_engines(known: pl.DataFrame) -> str:
    """Why these are not the steps of one engine, one after the other; empty where they may be."""
    if known.height < 2:
        return ""
    # In the order of time numbers grow, but for a restart.
    if known.select((pl.col("seq").diff() <= 0).mean() > MOST_AT_ONCE).item():
        return "step numbers of several engines alternate under one name: their steps cannot be told apart"
    placed = known["placed"].all() if "placed" in known.columns else True
    if not placed or known["start_ns"].has_nulls():
        return ""
    start = known["start_ns"].to_numpy().astype(np.float64)
    order = np.argsort(start, kind="stable")
    elapsed = known["elapsed_ns"].to_numpy().astype(np.float64)[order]
    late = start[order][:-1] + elapsed[:-1] - start[order][1:]
    share = float((late > np.maximum(AT_ONCE * elapsed[1:], AT_ONCE_NS)).mean())
    if share <= MOST_AT_ONCE:
        return ""
    return (
        f"{share:.0%} of the steps begin before the one before them ended: several engines under one name, or steps"
        " in flight together, whose time would count twice"
    )


def _baseline(steps: Steps) -> tuple[Floats, Fit]:
    """Duration of a step without prompt tokens, from its decode batch and (if known) context."""
    columns = [np.ones(len(steps.elapsed)), steps.decodes]
    context = floats(steps.frame, "decode_kv_tokens")
    if not np.isnan(context[steps.decode_only | steps.mixed]).any():
        columns.append(np.nan_to_num(context))
    table = np.column_stack(columns)
    chosen = _sample(steps.decode_only)
    # Variance grows about with the duration: weights from the batch, not from the noisy duration.
    weights = 1 / np.sqrt(np.maximum(steps.decodes[chosen], 1.0))
    floor = 0.01 * float(np.median(steps.elapsed[chosen] * weights))
    return table, trimmed_least_squares(table[chosen], steps.elapsed[chosen], weights, floor=floor)


def _sample(mask: Bools) -> NDArray[np.int64]:
    """Rows to fit on: all up to FIT_ROWS, else every k-th (more would not move the fit)."""
    rows = np.flatnonzero(mask)
    return rows[:: max(1, -(-len(rows) // FIT_ROWS))]


def _baseline_columns(steps: Steps, fit: Fit) -> dict[str, Any]:
    beta = fit.coefficients / 1e6
    typical = float(np.median(np.sqrt(np.maximum(steps.decodes[steps.decode_only], 1.0))))
    return {
        "baseline_ms": float(beta[0]),
        "baseline_per_request_ms": float(beta[1]),
        "baseline_per_kv_token_ms": float(beta[2]) if len(beta) > 2 else None,
        "noise_ms": fit.sigma * typical / 1e6,
    }


def _cap(steps: Steps, excess: Floats) -> tuple[Floats, Floats | None]:
    """(excess cut at what such prompts cost here, what was cut); (excess, None) without a fit.

    Cost is fitted on relative error over (1, n, n^2), and n * prior context where the source has
    it. Where it has not, the step may continue a prompt of which up to `before` tokens, those of
    the unbroken run of prefill steps before it, are its context: attention over them makes a step
    at most (n + 2 * before) / n times as dear, so only what exceeds that is called a pause.
    """
    rows = np.flatnonzero(steps.mixed | steps.prefill_only)
    tokens = steps.tokens[rows]
    if len(rows) < 8 or np.isnan(tokens).any() or not tokens.all():
        return excess, None
    # A step of its own also pays the fixed cost of a step.
    columns = [np.ones(len(rows)), tokens, steps.prefill_only[rows].astype(np.float64)]
    if len(rows) >= 20:
        columns.append(tokens * tokens)
    prior = floats(steps.frame, "prefill_kv_tokens")[rows]
    prior_known = not np.isnan(prior).any()
    if prior_known and len(rows) >= 20:
        columns.append(tokens * prior)
    table = np.column_stack(columns)
    chosen = _sample(np.ones(len(rows), dtype=bool))
    scale = tokens + tokens.mean() / 10
    fit = trimmed_least_squares(table[chosen], excess[rows][chosen], 1 / scale[chosen])
    dearer = 1.0 if prior_known else 1.0 + 2.0 * _run_before(steps, rows) / tokens
    limit = np.maximum(fit.at(table), 0.0) * dearer + np.maximum(4 * fit.sigma * scale, PAUSE_NS)
    capped = excess.copy()
    capped[rows] = np.minimum(excess[rows], limit)
    return capped, excess - capped


def _in_rows(steps: Steps, cut: Floats) -> Bools:
    """Steps that belong to a long row of prefill steps of which each was dearer than any prompt should be."""
    rows = np.flatnonzero(steps.mixed | steps.prefill_only)
    dear = np.concatenate([[0], (cut[rows] > 0).astype(np.int8), [0]])
    starts, ends = np.flatnonzero(np.diff(dear) == 1), np.flatnonzero(np.diff(dear) == -1)
    found = np.zeros(len(cut), dtype=bool)
    for start, end in zip(starts, ends, strict=True):
        if end - start >= MANY_DEAR:
            found[rows[start:end]] = True
    return found


def _run_before(steps: Steps, rows: NDArray[np.int64]) -> Floats:
    """Prompt tokens computed in the unbroken run of prefill steps before each of these steps."""
    computed = np.concatenate([[0.0], np.cumsum(steps.tokens)])
    prefill = steps.mixed | steps.prefill_only
    run_start = np.maximum.accumulate(np.where(prefill, 0, np.arange(1, len(prefill) + 1)))
    run: Floats = computed[rows] - computed[run_start[rows]]
    return run


def _totals(
    steps: Steps, residents: Floats, affected: Bools, lost: Floats, baseline: Floats, fit: Fit
) -> dict[str, Any]:
    """Seconds lost with two intervals: of this period (realised), of its share in such periods."""
    decode = steps.elapsed * residents / 1e9
    total, decode_s = float(lost.sum()), float(decode.sum())
    mixed = steps.mixed
    weight = np.sqrt(np.maximum(steps.decodes, 1.0))
    noise = np.sqrt(float(((fit.sigma * weight * residents)[affected & mixed] ** 2).sum())) / 1e9
    exposed = float((np.abs(baseline) * residents)[affected & mixed].sum()) / 1e9
    half = Z95 * noise + BASE_ERROR * exposed + MODEL_ERROR * abs(total)
    ratio = block_ratio(lost, decode, np.cumsum(steps.elapsed))
    p50 = float(np.median(steps.elapsed[steps.decode_only]))
    plain = float(((steps.elapsed - p50) * steps.decodes)[mixed].sum()) / 1e9
    count = int(affected.sum())
    return {
        "affected_steps": count,
        "lost_s": total,
        "lost_low_s": total - half,
        "lost_high_s": total + half,
        "decode_s": decode_s,
        "lost_ratio": total / decode_s if decode_s else None,
        "lost_ratio_low": ratio.low if ratio else None,
        "lost_ratio_high": ratio.high if ratio else None,
        "prefill_only_lost_s": float(lost[steps.prefill_only].sum()),
        "plain_lost_s": plain,
        "flagged": bool(ratio and ratio.low > MIN_SHARE and count >= MIN_AFFECTED),
    }


def _note(steps: Steps, uncapped: bool, certain: bool, few: int) -> str | None:
    notes = []
    if few:
        notes.append(
            f"only {few} {'step' if few == 1 else 'steps'} held somebody up: fewer than {MIN_AFFECTED} are"
            " an anecdote, not yet how the worker runs"
        )
    if steps.prefill_only.any():
        notes.append(
            "steps without decodes: counted are only requests that surely were decoding"
            if certain
            else "for some steps without decodes nobody says who was held up: counted as nobody"
        )
    if uncapped and (steps.mixed | steps.prefill_only).any():
        notes.append("too few prefill steps to tell a host pause inside one from its cost")
    if steps.again.any():
        notes.append(
            f"{int(steps.again.sum())} steps that computed preempted requests again count as prefill"
        )
    if steps.pulled.any():
        notes.append("steps that only took over pulled KV are not counted as prefill")
    return "; ".join(notes) or None


def _p50(values: Floats) -> float | None:
    return float(np.median(values)) / 1e6 if len(values) else None
