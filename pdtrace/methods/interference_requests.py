"""Prefill interference from per-request durations (level C): decode seconds lost, by worker.

What is known: when each request's first token came, how long it decoded, and how many prompt
tokens it brought. A request's decode duration is regressed on its own work (tokens, batch, context,
prompt) and on what others brought to the worker meanwhile: N prompts, X uncached prompt tokens, X2
their squares. That is no evidence by itself: load grows with the same arrivals. The test therefore
permutes prompt lengths among requests inside short stretches of time (Fisher 1935; restricted
permutation, Good 2005), which keeps every arrival, the batch and its growth, and asks whether the
real lengths explain more than shuffled ones do.

`lost_s` is the part that lengths explain, a lower value: what a prompt costs whatever its length
cannot be told from what more load costs, and enters only the upper end of the interval. Victims and
culprits of single stalls are not known at this level. Only for workers that compute prompts and
decode: where prompts are computed elsewhere there is nothing to estimate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from pdtrace.methods import _permuted
from pdtrace.methods._exposure import SHORTEST_PREFILL_S, Exposure, mean_levels, prefill_windows
from pdtrace.methods.statistics import Bools, Floats, trimmed_least_squares
from pdtrace.records import dataclass

# Workers that decoded, and what forbids judging them.
WORKERS = """
WITH served AS (
  SELECT deployment, decode_worker AS worker, count(*) AS n,
    coalesce(bool_or(mode = 'disaggregated' OR prefill_worker <> decode_worker), false)
      AS disaggregated
  FROM requests
  GROUP BY deployment, decode_worker
),
placed AS (
  SELECT deployment, sum(n) AS requests, coalesce(sum(n) FILTER (worker IS NOT NULL), 0) AS known
  FROM served
  GROUP BY deployment
)
SELECT s.deployment, s.worker, w.role, coalesce(f.consumer, false) AS kv_consumer, s.disaggregated,
  1 - p.known / p.requests AS unplaced_ratio
FROM served AS s
JOIN placed AS p ON p.deployment IS NOT DISTINCT FROM s.deployment
LEFT JOIN workers AS w ON w.worker = s.worker
LEFT JOIN (
  SELECT worker, bool_or(value ILIKE '%consumer%') AS consumer
  FROM facts
  WHERE key = 'kv_role'
  GROUP BY worker
) AS f ON f.worker = s.worker
WHERE s.worker IS NOT NULL OR p.known = 0
ORDER BY s.deployment, s.worker
"""

MIN_KNOWN = 0.9  # of a worker's requests, those whose instants and prompt lengths are known
MIN_VICTIMS = 50  # fewer decodes give no baseline
MIN_UNLIKE = 10  # fewer prompts that stand out in length are an anecdote
MIN_VARIATION = 0.2  # prompt lengths that vary less (deviation over mean) give the test no power
MAX_P = 0.01
LOOKED_AT, STRETCHES = 16_000, 8  # requests that fit and test look at, in so many stretches
MIN_SHARE = 0.01  # lower bound of lost / decode seconds from which a worker is flagged
# Width of the interval: the spread that shuffled lengths give, and the error of the model itself as
# parts of the loss and of decode time; calibrated on simulations.
SPREADS, MODEL_ERROR, BASE_ERROR = 2.0, 0.25, 0.02

RESULT_SCHEMA: dict[str, type[pl.DataType]] = {
    "worker": pl.String, "rank": pl.String, "deployment": pl.String, "role": pl.String,
    "observer": pl.String,
    "requests": pl.Int64, "usable_requests": pl.Int64, "victims": pl.Int64,
    "unlike_prompts": pl.Int64, "cached_known": pl.Boolean, "permutations": pl.Int64,
    "p_value": pl.Float64, "lost_s": pl.Float64, "lost_low_s": pl.Float64,
    "lost_high_s": pl.Float64, "decode_s": pl.Float64, "lost_ratio": pl.Float64,
    "lost_ratio_low": pl.Float64, "lost_ratio_high": pl.Float64,
    "lost_per_1000_tokens_ms": pl.Float64, "flagged": pl.Boolean, "note": pl.String,
}  # fmt: skip


@dataclass(frozen=True)
class Requests:
    """One worker's requests as arrays, ordered by first token; seconds since the first arrival."""

    arrivals: Floats
    firsts: Floats
    begins: Floats  # when each prompt can have begun to be computed
    ends: Floats
    prompts: Floats
    computed: Floats  # thousands of prompt tokens that were computed
    outputs: Floats
    victims: Bools  # decoded long enough to be held up, one stream, duration known
    cached_known: bool


def interference(
    requests: pl.DataFrame,
    worker: str | None,
    deployment: str | None = None,
    role: str | None = None,
    kv_consumer: bool = False,
    disaggregated: bool = False,
    unplaced_ratio: float = 0.0,
    rank: str | None = None,
) -> pl.DataFrame:
    """One row for one worker: what its decodes lost to others' prompts, or why that is unknown."""
    row: dict[str, Any] = {"worker": worker, "rank": rank, "deployment": deployment, "role": role}
    row["requests"] = requests.height
    why_not = _elsewhere(worker, role, kv_consumer or disaggregated, unplaced_ratio)
    usable = _usable(requests)
    if not why_not:
        row |= {"usable_requests": usable.height, "observer": _observer(usable)}
        why_not = _incomplete(requests.height, usable)
    if not why_not:
        mine = _arrays(usable)
        found, why_not = _estimate(mine)
        row |= found
    told = "judged for itself: the requests name their data-parallel rank" if rank else None
    row["note"] = "; ".join(n for n in (why_not or row.get("note"), told) if n) or None
    return pl.DataFrame([row], schema=RESULT_SCHEMA)


def _elsewhere(worker: str | None, role: str | None, split: bool, unplaced: float) -> str:
    """Why a worker cannot be judged, whatever its requests say."""
    if worker is None:
        return "cannot tell: which worker served each request is unknown"
    if role in {"decode", "prefill"} or split:
        return "not judged: prompts and answers are computed on different workers"
    if unplaced > 1 - MIN_KNOWN:
        return f"cannot tell: the worker of {unplaced:.0%} of the requests is unknown"
    return ""


def _usable(requests: pl.DataFrame) -> pl.DataFrame:
    """Requests whose first token has an instant and whose prompt has a length."""
    return requests.filter(
        pl.col("start_ns").is_not_null()
        & pl.col("ttft_ms").is_finite()
        & (pl.col("ttft_ms") >= 0)
        & (pl.col("prompt_tokens") >= 0)
    )


def _observer(usable: pl.DataFrame) -> str | None:
    return None if usable.is_empty() else str(usable["observer"][0])


def _incomplete(total: int, usable: pl.DataFrame) -> str:
    if usable.height < MIN_KNOWN * total or usable.height < MIN_VICTIMS:
        return (
            f"cannot tell: {usable.height:,} of {total:,} requests have an instant of the first"
            f" token and a prompt length (needs nine in ten, and {MIN_VICTIMS})"
        )
    coarse, typical = usable["resolution_ns"].max(), (usable["e2e_ms"] - usable["ttft_ms"]).median()
    if isinstance(coarse, int) and isinstance(typical, float) and coarse > typical * 1e6:
        return "cannot tell: instants are coarser than a typical decode is long"
    return ""


def _arrays(usable: pl.DataFrame) -> Requests:
    """Arrays in the order of first tokens."""
    start = usable["start_ns"].cast(pl.Int64)
    first_ns = start.min()
    arrivals = (start - first_ns).to_numpy().astype(np.float64) / 1e9
    firsts = arrivals + _floats(usable, "ttft_ms") / 1e3
    ends = arrivals + _floats(usable, "e2e_ms") / 1e3
    prompts, cached = _floats(usable, "prompt_tokens"), _floats(usable, "cached_tokens")
    cached_known = bool((~np.isnan(cached)).mean() >= MIN_KNOWN)
    computed = prompts - (np.nan_to_num(cached) if cached_known else 0.0)
    outputs = _floats(usable, "output_tokens")
    single = usable["streams"].fill_null(1).to_numpy() <= 1
    completed = usable["outcome"].fill_null("unknown").is_in(["completed", "unknown"]).to_numpy()
    victims = (outputs >= 3) & (ends > firsts) & single & completed
    order = np.argsort(firsts, kind="stable")
    arrivals, firsts = arrivals[order], firsts[order]
    return Requests(
        arrivals, firsts, prefill_windows(arrivals, firsts), ends[order], prompts[order],
        np.maximum(computed, 0.0)[order] / 1e3, outputs[order], victims[order], cached_known,
    )  # fmt: skip


def _estimate(mine: Requests) -> tuple[dict[str, Any], str]:
    """The estimate as columns of the row, and why it is none (empty when it is one)."""
    chosen = mine.victims
    row: dict[str, Any] = {"victims": int(chosen.sum()), "cached_known": mine.cached_known}
    if row["victims"] < MIN_VICTIMS:
        return (
            row,
            f"cannot tell: only {row['victims']} decodes whose length and duration are known",
        )
    exposure = Exposure.of(mine.begins, mine.firsts, mine.firsts[chosen], mine.ends[chosen])
    row["unlike_prompts"] = _standing_out(mine)
    if why_not := _powerless(mine, row["unlike_prompts"]):
        return row, why_not
    own, others = _design(mine, exposure)
    duration = (mine.ends - mine.firsts)[chosen]
    rows, judged = _looked_at(mine)
    table, seconds = np.column_stack([own, others])[judged], duration[judged]
    weights = 1 / np.sqrt(table[:, 0])  # variance grows with the number of gaps
    among = exposure if rows.all() else Exposure.of(
        mine.begins[rows], mine.firsts[rows], mine.firsts[chosen][judged], mine.ends[chosen][judged],
    )  # fmt: skip
    base = own.shape[1] + 1  # own work and the number of prompts: what shuffled lengths leave
    gain = _permuted.test(table[:, :base], seconds, weights, mine.computed[rows], among)
    effects = _fitted(table, seconds, weights, base - 1) * others.sum(axis=0)
    fixed_s, length_s, tokens = (
        float(effects[0]),
        float(effects[1:].sum()),
        float(others[:, 1].sum()),
    )
    decode_s = float(duration.sum())
    row |= {"permutations": gain.permutations, "p_value": gain.p_value, "decode_s": decode_s}
    if length_s > decode_s:
        return row, "cannot tell: the estimate exceeds all decode time, so its model does not hold"
    errors = (SPREADS * gain.spread_ratio * decode_s, MODEL_ERROR * length_s, BASE_ERROR * decode_s)
    half = float(np.linalg.norm(errors))
    low, high = length_s - half, length_s + fixed_s + half
    row |= {
        "lost_s": length_s, "lost_low_s": low, "lost_high_s": high,
        "lost_ratio": length_s / decode_s, "lost_ratio_low": low / decode_s,
        "lost_ratio_high": high / decode_s,
        "lost_per_1000_tokens_ms": length_s / tokens * 1e3 if tokens > 0 else None,
        "flagged": bool(gain.p_value <= MAX_P and low > MIN_SHARE * decode_s),
        "note": None if mine.cached_known else (
            "cached tokens are unknown: whole prompts stand for the computed part"
        ),
    }  # fmt: skip
    return row, ""


def _standing_out(mine: Requests) -> int:
    """Prompts computed while others decoded whose length differs by half the median or more."""
    opens, closes = _around(mine)
    firsts, ends = mine.firsts[mine.victims], mine.ends[mine.victims]
    begun = np.searchsorted(np.sort(np.minimum(firsts, ends - SHORTEST_PREFILL_S)), closes, "left")
    exposed = begun > np.searchsorted(np.sort(ends), opens, "right")
    typical = float(np.median(mine.computed))
    away = np.abs(mine.computed - typical)
    return int(((away > 0) & (away >= 0.5 * typical) & exposed).sum())


def _around(mine: Requests) -> tuple[Floats, Floats]:
    """Each prompt's own window, a moment at least, in which others may have decoded."""
    return np.minimum(mine.begins, mine.firsts - 1e-3), mine.firsts - 1e-6


def _powerless(mine: Requests, unlike_prompts: int) -> str:
    """Why lengths cannot show anything here."""
    mean = float(mine.computed.mean())
    if mean <= 0 or mine.computed.std() < MIN_VARIATION * mean:
        return "cannot tell: prompts are nearly equal in length, so lengths can show nothing"
    if unlike_prompts < MIN_UNLIKE:
        return (
            f"cannot tell: only {unlike_prompts} prompts that stand out in length were computed"
            f" while others decoded (needs {MIN_UNLIKE})"
        )
    return ""


def _looked_at(mine: Requests) -> tuple[Bools, Bools]:
    """(requests, victims) that fit and test look at: all, or whole stretches spread over the run.

    Of a stretch, the victims that end before it does: all that they met is in it.
    """
    count = len(mine.firsts)
    if count <= LOOKED_AT:
        return np.ones(count, dtype=bool), np.ones(int(mine.victims.sum()), dtype=bool)
    size = LOOKED_AT // STRETCHES
    begin = np.linspace(0, count - size, STRETCHES).astype(np.int64)
    stretch = np.searchsorted(begin, np.arange(count), "right") - 1
    inside = np.arange(count) < begin[stretch] + size
    until = mine.firsts[begin + size - 1]
    return inside, (inside & (mine.ends <= until[stretch]))[mine.victims]


def _design(mine: Requests, exposure: Exposure) -> tuple[Floats, Floats]:
    """(own work, others' N, X, X2), one row per victim.

    Own work is gaps, gaps x mean number active, gaps x mean context, own prompt.
    """
    ones = np.ones(len(mine.firsts))
    known = np.where(np.isfinite(mine.ends), mine.ends, mine.firsts)
    until, grown = np.maximum(known, mine.firsts), np.nan_to_num(mine.outputs)
    levels = [(ones, 0 * ones), (mine.prompts, grown)]
    active, context = (mean[mine.victims] for mean in mean_levels(mine.firsts, until, levels))
    gaps = (mine.outputs - 1)[mine.victims]
    own = np.column_stack([gaps, gaps * active, gaps * context, mine.prompts[mine.victims]])
    others = exposure.tokens(np.stack([ones, mine.computed, mine.computed**2])).T
    return own, others


def _fitted(table: Floats, duration: Floats, weights: Floats, own: int) -> Floats:
    """Coefficients of the columns behind the first `own` ones, from one trimmed fit.

    Others' prompts cannot make a decode shorter: a column that would is left out (coefficient 0).
    """
    kept = list(range(table.shape[1]))
    floor = 0.01 * float(np.median(duration * weights))
    found = np.zeros(table.shape[1])
    while True:
        found[:] = 0.0
        fit = trimmed_least_squares(table[:, kept], duration, weights, floor=floor)
        found[kept] = fit.coefficients
        effect = (found * table.sum(axis=0))[own:]
        if effect.min() >= 0:
            return found[own:]
        kept.remove(own + int(effect.argmin()))


def _floats(frame: pl.DataFrame, column: str) -> Floats:
    values = frame[column].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    return np.asarray(values, np.float64)
