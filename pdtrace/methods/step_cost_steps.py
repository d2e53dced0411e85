"""What a step costs, fitted from the engine's own steps (level A): no inference of batching, no instants needed.

The same shape as in `step_cost`. Decode-only steps give the decode, mixed steps what prompt tokens add to it,
prompt-only steps their fixed part. A prompt token's square is that of its step's prompts, taken as of equal
length (a step tells their number and sum). Steps without the context of their decodes are fitted on the batch
alone. What passes between steps, or beside what an engine states of them (asynchronous scheduling), is seen in
the gaps between tokens that no prompt touches: their mean above the fitted step is added to every step.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from pdtrace.methods.replay import Cost, Noise
from pdtrace.methods.statistics import Floats
from pdtrace.methods.step_cost import ALONE, FEWEST, Fitted, fitted_part, fixed_part, redrawn

STEPS = """
SELECT s.worker, s.rank, s.seq, s.start_ns, s.elapsed_ns / 1e9 AS elapsed_s,
  coalesce(s.prefill_requests, 0) AS prefill_requests, coalesce(s.prefill_tokens, 0) AS prefill_tokens,
  coalesce(s.prefill_kv_tokens, 0) AS prefill_kv_tokens, coalesce(s.decode_requests, 0) AS decode_requests,
  coalesce(s.decode_kv_tokens, 0) AS decode_kv_tokens
FROM steps AS s
JOIN workers AS w ON w.worker = s.worker
WHERE w.deployment = $deployment AND s.elapsed_ns > 0 AND coalesce(s.pulled_requests, 0) = 0
ORDER BY s.worker, s.rank, s.seq
"""
# Workers that prefill or decode, and those of them that tell all their steps.
COMPLETE = """
SELECT count(DISTINCT r.worker), count(DISTINCT s.worker)
FROM (
  SELECT unnest([prefill_worker, decode_worker]) AS worker FROM requests WHERE deployment = ?
) AS r
LEFT JOIN (
  SELECT worker FROM steps GROUP BY worker HAVING bool_and(capture = 'full')
) AS s ON s.worker = r.worker
WHERE r.worker IS NOT NULL
"""


def fit(
    steps: pl.DataFrame, gaps: Floats, said_budget: int | None, *, split: bool,
    random: np.random.Generator | None = None,
) -> Fitted | str:  # fmt: skip
    """The cost; with `random`, of stretches of the steps drawn anew.

    `gaps`: between tokens without a prompt (columns: instant, batch, context, seconds), as step_cost.Rows has them.
    """
    new, batch = pl.col("prefill_tokens") > 0, pl.col("decode_requests") > 0
    decodes, mixed, alone = (
        _table(steps.filter(part), random) for part in (~new & batch, new & batch, new & ~batch)
    )
    if len(decodes) < FEWEST or len(mixed) + len(alone) < FEWEST:
        return (
            f"too few engine steps to fit what one costs: {len(decodes)} that only decode and"
            f" {len(mixed) + len(alone)} with prompts, {FEWEST} of each are needed"
        )
    chunked = len(mixed) >= ALONE and not split
    decode, decode_error = fitted_part(decodes[:, 1:3], decodes[:, 6], fixed=True)
    extra, slopes, error = 0.0, (0.0, 0.0), 0.0
    prefill = (decode[0], 0.0, 0.0)
    within, lone = None, len(alone)
    if chunked:
        rest = mixed[:, 6] - _decodes(decode, mixed)
        (extra, *slope), error = fitted_part(
            mixed[:, 3:5], rest, fixed=True, scale=mixed[:, 6]
        )  # what mixing adds may be below 0
        slopes = (slope[0], slope[1])
        left = alone[:, 6] - slopes[0] * alone[:, 3] - slopes[1] * alone[:, 4]
        constant, within, lone = fixed_part(left, error * alone[:, 6], decode[0] + extra)
        prefill = (constant, *slopes)
    elif len(alone) < FEWEST:
        return "too few steps that only compute prompts to fit what one costs"
    else:
        (constant, linear, square), error = fitted_part(alone[:, 3:5], alone[:, 6], fixed=True)
        prefill = (constant, linear, square)
    usual = _decodes(decode, decodes)
    mean = float(decodes[:, 6].sum() / usual.sum()) if usual.sum() > 0 else 1.0
    decode = (decode[0] * mean, decode[1] * mean, decode[2] * mean)
    beside = _beside(decode, gaps)
    within = (within[0] + beside, within[1] + beside) if within else None
    cost = Cost(
        (prefill[0] + beside, prefill[1], prefill[2]), (decode[0] + beside, *decode[1:]), extra
    )
    told = prefill[0] + prefill[1] * alone[:, 3] + prefill[2] * alone[:, 4]
    scatter = alone[:, 6] / np.maximum(told, 1e-9) if len(alone) else np.ones(1)
    return Fitted(
        cost, (said_budget or _budget(steps)) if chunked else None, _together(steps),
        "as the steps show" + (", budget as configured" if said_budget and chunked else ""),
        len(decodes), len(mixed) + len(alone), decode_error, error,
        lone, within, Noise(decodes[:, 6] / np.maximum(usual * mean, 1e-9), scatter), level="A",
    )  # fmt: skip


def _table(steps: pl.DataFrame, random: np.random.Generator | None) -> Floats:
    """Columns: order, batch, context, tokens, squares, prompts, seconds."""
    tokens, prompts = pl.col("prefill_tokens"), pl.max_horizontal("prefill_requests", 1)
    table = steps.select(
        pl.int_range(pl.len()).cast(pl.Float64),
        pl.col("decode_requests").cast(pl.Float64),
        pl.col("decode_kv_tokens").cast(pl.Float64),
        tokens.cast(pl.Float64),
        squares=tokens / prompts * (tokens + 2.0 * pl.col("prefill_kv_tokens")),
        prompts=prompts.cast(pl.Float64),
        seconds="elapsed_s",
    ).to_numpy()
    found: Floats = table if random is None or len(table) < FEWEST else redrawn(table, random)
    return found


def _decodes(decode: tuple[float, ...], table: Floats) -> Floats:
    seconds: Floats = decode[0] + decode[1] * table[:, 1] + decode[2] * table[:, 2]
    return seconds


def _beside(decode: tuple[float, float, float], gaps: Floats) -> float:
    """Seconds that a gap between tokens lasts above the step, in the mean; 0 with few gaps."""
    if len(gaps) < FEWEST:
        return 0.0
    told = decode[0] + decode[1] * gaps[:, 1] + decode[2] * gaps[:, 2]
    return max(0.0, float((gaps[:, 3] - told).mean()))


def _budget(steps: pl.DataFrame) -> int:
    """The most tokens that any step had."""
    return int((steps["prefill_tokens"] + steps["decode_requests"]).max() or 1)  # type: ignore[arg-type]


def _together(steps: pl.DataFrame) -> int:
    """The most prompt tokens of a step with several prompts."""
    several = steps.filter(pl.col("prefill_requests") > 1)["prefill_tokens"]
    return int(several.max() or 0)  # type: ignore[arg-type]
