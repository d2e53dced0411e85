"""Which beginnings prompts share, who computed them before, and who got the next request that begins so.

From hashes of prompt blocks. A block's place counts: hashes are mixed into one number for all of a
prompt up to there (the models told apart), so it does not matter whether the source hashes blocks alone
or with what stands before them. Requests are taken in the order of their starts: "before" means that
another request with the same beginning had arrived before. Whether its KV was ready, or still there, is
not known: everything here is what could have been found at most. Shared beginnings form a tree
(a radix tree, as in SGLang's RadixAttention, arXiv 2312.07104); a segment is an edge of it.

Memory: of runs with more than `MOST_STEPS` blocks every second, fourth, ... is compared (the result says
how many tokens that are): a beginning found so is right, but up to that much too short.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pdtrace.records import dataclass

MOST_STEPS = 4_000_000
SEGMENTS = 100
WORKERS_NAMED = 16

DEPLOYMENTS = """
SELECT l.deployment, count(DISTINCT b.block_tokens) AS sizes, sum(len(b.hashes))::BIGINT AS blocks
FROM prefix_blocks AS b
JOIN legs AS l ON l.leg = b.leg
JOIN requests AS r ON r.request = l.request
WHERE r.outcome IS DISTINCT FROM 'failed' AND len(b.hashes) > 0
GROUP BY l.deployment
ORDER BY l.deployment
"""
# Of several records that tell a request's blocks, the longest list. The order is that of wall clocks, else of
# the clock of the records, else of the records themselves.
REQUESTS = """
SELECT r.request, r.prefill_worker AS worker, r.model, r.prompt_tokens, b.block_tokens,
  list_filter(b.hashes, lambda h, i: i % $stride = 0) AS hashes
FROM prefix_blocks AS b
JOIN legs AS l ON l.leg = b.leg
JOIN requests AS r ON r.request = l.request
WHERE l.deployment IS NOT DISTINCT FROM $deployment AND r.outcome IS DISTINCT FROM 'failed'
  AND len(b.hashes) > 0
QUALIFY row_number() OVER (PARTITION BY r.request ORDER BY len(b.hashes) DESC, b.leg) = 1
ORDER BY coalesce(l.start_ns, r.start_ns, l.clock_start_ns), b.source, b.record, r.request
"""
REQUESTS_SCHEMA: dict[str, Any] = {
    "deployment": pl.String, "request": pl.String, "worker": pl.String, "step_tokens": pl.Int64,
    "steps": pl.Int64, "seen_steps": pl.Int64, "here_steps": pl.Int64, "seen_tokens": pl.Int64,
    "here_tokens": pl.Int64, "holders": pl.Int64, "holders_ratio": pl.Float64,
}  # fmt: skip
SEGMENTS_SCHEMA: dict[str, Any] = {
    "deployment": pl.String, "prefix": pl.String, "from_step": pl.Int64, "until_step": pl.Int64,
    "step_tokens": pl.Int64, "requests": pl.Int64, "workers": pl.List(pl.String),
    "worker_requests": pl.List(pl.Int64),
}  # fmt: skip

Numbers = NDArray[np.int64]
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True)
class _Steps:
    """All steps of all requests, one after the other: whose, which place, which beginning (a number)."""

    owner: Numbers
    place: Numbers
    beginning: Numbers  # 0 .. n-1
    names: NDArray[np.uint64]  # by beginning
    first: Numbers  # by beginning: the step where it appears first
    begin: Numbers  # by request: its first step
    length: Numbers  # by request


def stride(blocks: int, most: int = MOST_STEPS) -> int:
    """Every how many-th block is compared, so that memory stays bounded."""
    step = 1
    while blocks > most * step:
        step *= 2
    return step


def prefixes(
    rows: pl.DataFrame, deployment: str | None, blocks_per_step: int = 1
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rows of `prefix_requests` and `prefix_segments` of one deployment's requests, in the order of arrival."""
    rows = rows.filter(pl.col("hashes").list.len() > 0)
    if rows.is_empty():
        return pl.DataFrame(schema=REQUESTS_SCHEMA), pl.DataFrame(schema=SEGMENTS_SCHEMA)
    steps = _steps(rows)
    names = rows["worker"].drop_nulls().unique().sort()
    worker = rows["worker"].replace_strict(
        names, pl.Series(range(len(names)), dtype=pl.Int64), default=None, return_dtype=pl.Int64
    )
    number = worker.fill_null(len(names)).to_numpy()
    seen = _leading(steps, steps.owner[steps.first][steps.beginning] < steps.owner)
    places = len(names) + 1
    pairs, first = np.unique(
        steps.beginning * places + number[steps.owner], return_index=True
    )  # who had computed which beginning, and when first
    since = steps.owner[first]
    own = np.searchsorted(pairs, steps.beginning * places + number[steps.owner])
    here = _leading(steps, since[own] < steps.owner)
    holders, ratio = _holders(steps, seen, pairs, since, number, places)
    told = rows.select(
        pl.lit(deployment, dtype=pl.String).alias("deployment"),
        "request",
        "worker",
        (pl.col("block_tokens") * blocks_per_step).alias("step_tokens"),
        "prompt_tokens",
        steps=pl.Series(steps.length),
        seen_steps=pl.Series(seen),
        here_steps=pl.Series(here),
        holders=pl.Series(holders),
        holders_ratio=pl.Series(ratio).fill_nan(None),
    ).with_columns(pl.when(pl.col("worker").is_not_null()).then("here_steps"))
    told = told.with_columns(_tokens("seen"), _tokens("here"))
    sizes = told["step_tokens"].unique()
    size = sizes[0] if len(sizes) == 1 else None
    return (
        told.select(pl.col(n).cast(t) for n, t in REQUESTS_SCHEMA.items()),
        _segments(steps, number, names, deployment, size),
    )


def _tokens(part: str) -> pl.Expr:
    """Steps in tokens; a partial last block is none that a cache could give."""
    whole = pl.min_horizontal(f"{part}_steps", pl.col("prompt_tokens") // pl.col("step_tokens"))
    known = pl.col("prompt_tokens").is_not_null() & pl.col(f"{part}_steps").is_not_null()
    return pl.when(known).then(whole * pl.col("step_tokens")).alias(f"{part}_tokens")


def _steps(rows: pl.DataFrame) -> _Steps:
    length = rows["hashes"].list.len().cast(pl.Int64).to_numpy()
    hashes = rows["hashes"].explode(empty_as_null=False).to_numpy()
    begin = np.concatenate([[0], np.cumsum(length)[:-1]]).astype(np.int64)
    owner = np.repeat(np.arange(len(length), dtype=np.int64), length)
    place = np.arange(len(hashes), dtype=np.int64) - begin[owner]
    # One hash for all up to here: sum of mixed (hash, place), modulo 2**64, begun anew with each request.
    mixed = (hashes ^ (place.astype(np.uint64) + np.uint64(1)) * _ODD) * _MIX
    mixed ^= mixed >> np.uint64(31)
    total = np.cumsum(mixed * _ODD, dtype=np.uint64)
    before = np.concatenate([np.zeros(1, dtype=np.uint64), total])[begin]
    model = rows["model"].fill_null("").hash(seed=7).to_numpy().astype(np.uint64)
    total -= before[owner] - model[owner]
    names, first, beginning = np.unique(total, return_index=True, return_inverse=True)
    return _Steps(
        owner, place, beginning.astype(np.int64), names, first.astype(np.int64), begin, length
    )


def _leading(steps: _Steps, true: NDArray[np.bool_]) -> Numbers:
    """How many steps from the first on are true, by request."""
    until = np.where(true, steps.length[steps.owner], steps.place)
    leading: Numbers = np.minimum.reduceat(until, steps.begin)
    return leading


def _holders(
    steps: _Steps, seen: Numbers, pairs: Numbers, since: Numbers, number: Numbers, places: int
) -> tuple[Numbers, NDArray[np.float64]]:
    """Workers that had computed all that was seen of each request, and their share of all requests."""
    known = number < places - 1
    share = np.bincount(number[known], minlength=places)[: places - 1] / max(known.sum(), 1)
    asked = np.flatnonzero(seen > 0)
    longest = steps.beginning[steps.begin[asked] + seen[asked] - 1]
    low = np.searchsorted(pairs, longest * places)
    high = np.searchsorted(pairs, longest * places + places - 1)  # unknown workers are the last
    of = np.repeat(asked, high - low)
    at = np.arange(len(of)) - np.repeat(np.cumsum(high - low) - (high - low), high - low)
    at += np.repeat(low, high - low)
    had = since[at] < of
    holders = np.bincount(of[had], minlength=len(seen)).astype(np.int64)
    ratio = np.full(len(seen), np.nan)
    if len(share):
        sums = np.bincount(of[had], weights=share[pairs[at[had]] % places], minlength=len(seen))
        ratio[asked] = sums[asked]
    return holders, ratio


def _segments(
    steps: _Steps, number: Numbers, names: pl.Series, deployment: str | None, size: int | None
) -> pl.DataFrame:
    """The edges of the tree of beginnings that two requests or more share."""
    requests = np.bincount(steps.beginning)
    shared = requests[steps.beginning]
    same = (np.diff(steps.owner) == 0) & (np.diff(shared) == 0)
    starts = np.concatenate([[True], ~same])
    ends = np.concatenate([~same, [True]])
    from_place = steps.place[np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))]
    edges = np.flatnonzero(ends & (shared > 1))
    last, where = np.unique(steps.beginning[edges], return_index=True)
    edges = edges[where]
    gain = (requests[last] - 1) * (steps.place[edges] - from_place[edges] + 1)
    best = np.lexsort((steps.names[last], -gain))[:SEGMENTS]
    members = [
        number[steps.owner[np.flatnonzero(steps.beginning == beginning)]]
        for beginning in last[best].tolist()
    ]
    told = [_by_worker(numbers, names) for numbers in members]
    return pl.DataFrame(
        {
            "deployment": [deployment] * len(best),
            "prefix": [f"{int(name):016x}" for name in steps.names[last[best]]],
            "from_step": from_place[edges[best]],
            "until_step": steps.place[edges[best]] + 1,
            "step_tokens": [size] * len(best),
            "requests": requests[last[best]],
            "workers": [workers for workers, _ in told],
            "worker_requests": [counts for _, counts in told],
        },
        schema=SEGMENTS_SCHEMA,
    )


def _by_worker(numbers: Numbers, names: pl.Series) -> tuple[list[str], list[int]]:
    counts = np.bincount(numbers[numbers < len(names)], minlength=len(names))
    order = np.argsort(-counts, kind="stable")[:WORKERS_NAMED]
    order = order[counts[order] > 0]
    return [str(names[int(i)]) for i in order], [int(counts[i]) for i in order]
