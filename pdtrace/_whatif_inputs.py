"""What a replay needs of one deployment: arrivals, lengths, prefill intervals, token times, limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdtrace.methods.replay import Load
from pdtrace.methods.statistics import Floats, trimmed_least_squares
from pdtrace.methods.step_cost import Prefills, Streams
from pdtrace.records import dataclass

if TYPE_CHECKING:
    import polars as pl

    from pdtrace.store import Store

FEWEST = 30  # requests, below which nothing is replayed
MIXED = 0.02  # share of requests on another set-up that is no set-up of its own
COMPLETE = 0.98  # share of the arrivals whose length and instant must be known

_REQUESTS = """
WITH engine AS (
  SELECT request,
    min(start_ns) FILTER (role IN ('prefill', 'aggregated')) AS engine_ns,
    min(first_token_ns) FILTER (role IN ('decode', 'aggregated')) AS made_ns
  FROM legs
  WHERE deployment = $deployment AND observer = 'engine'
  GROUP BY request
),
prefill AS (
  SELECT p.request, any_value(p.worker) AS worker, min(p.start_ns) AS start_ns, max(p.end_ns) AS end_ns
  FROM phases AS p
  WHERE p.phase = 'prefill' AND p.basis != 'upper_bound'
  GROUP BY p.request
  HAVING count(DISTINCT p.worker) = 1
),
-- a data-parallel rank is a worker: it has a scheduler and a KV cache of its own
ranked AS (
  SELECT DISTINCT worker FROM request_ranks
),
seen AS (
  SELECT *, coalesce(prefill_worker, decode_worker) AS entry_server
  FROM request_values
  WHERE deployment = $deployment
),
served AS (
  SELECT v.* EXCLUDE (decode_worker),
    CASE WHEN n.worker IS NULL THEN v.entry_server ELSE v.entry_server || '#' || a.rank END AS entry_worker,
    CASE WHEN m.worker IS NULL THEN v.decode_worker ELSE v.decode_worker || '#' || b.rank END AS decode_worker
  FROM seen AS v
  LEFT JOIN ranked AS n ON n.worker = v.entry_server
  LEFT JOIN ranked AS m ON m.worker = v.decode_worker
  LEFT JOIN request_ranks AS a ON a.request = v.request AND a.worker = v.entry_server
  LEFT JOIN request_ranks AS b ON b.request = v.request AND b.worker = v.decode_worker
)
SELECT v.request, v.start_ns, v.ttft_ms, v.tpot_ms, v.e2e_ms, v.first_token_ns, v.counted,
  v.prompt_tokens, v.cached_tokens, v.output_tokens, v.mode, v.outcome,
  v.entry_server, v.entry_worker, v.decode_worker, r.streams, e.engine_ns, e.made_ns,
  CASE WHEN p.worker = v.entry_server THEN v.entry_worker ELSE p.worker END AS prefill_worker,
  p.start_ns AS prefill_ns, p.end_ns AS prefilled_ns
FROM served AS v
JOIN requests AS r ON r.request = v.request
LEFT JOIN engine AS e ON e.request = v.request
LEFT JOIN prefill AS p ON p.request = v.request
ORDER BY coalesce(e.engine_ns, v.start_ns), v.request
"""

# Names under which several data-parallel ranks ran steps, where requests do not say which of them served them.
_HIDDEN_RANKS = """
SELECT coalesce(max(ranks), 1)
FROM (
  SELECT count(DISTINCT s.rank) AS ranks
  FROM steps AS s
  JOIN workers AS w ON w.worker = s.worker
  WHERE w.deployment = $deployment AND s.worker NOT IN (SELECT worker FROM request_ranks)
  GROUP BY s.worker
)
"""

# The stream that is nearest to the engine.
_STREAMS = """
SELECT l.request, s.first_ns, s.gaps_us, s.emission_tokens
FROM streams AS s
JOIN legs AS l ON l.leg = s.leg
WHERE l.deployment = $deployment AND s.first_ns IS NOT NULL AND len(s.gaps_us) > 0
QUALIFY row_number() OVER (
  PARTITION BY l.request
  ORDER BY coalesce(s.observer, l.observer) = 'engine' DESC, len(s.gaps_us) DESC, s.leg
) = 1
"""

_TRANSFERS = """
SELECT t.bytes, coalesce((t.end_ns - t.start_ns) / 1e9, t.duration_ms / 1e3) AS seconds, v.prompt_tokens
FROM transfers AS t
LEFT JOIN legs AS l ON l.leg = t.leg
LEFT JOIN request_values AS v ON v.request = l.request
WHERE l.deployment = $deployment AND t.bytes > 0 AND coalesce(t.outcome, 'completed') = 'completed'
  AND coalesce(t.direction, 'prefill_to_decode') = 'prefill_to_decode'
"""


@dataclass(frozen=True)
class Inputs:
    """A deployment as arrays; instants in seconds from the first arrival."""

    load: Load
    prefills: Prefills
    streams: Streams
    lead_s: Floats  # from the start as the headline observer saw it to the arrival at the engine
    tail_s: float  # from the end of the prefill (split: the first token as D made it) to the first token as seen, median
    ttft_s: Floats  # as recorded; NaN unknown
    tpot_s: Floats
    e2e_s: Floats
    counted: Floats  # 1 where it enters the figures
    split: bool
    entries: int  # workers that requests came to
    decoders: int  # decode workers of a split
    cached_known: float  # share of requests with cached tokens
    cached_ratio: float  # prompt tokens that were found in a cache, of all
    ranked: bool  # workers are data-parallel ranks
    lost: int  # failed and aborted requests, whose answers were cut short


@dataclass(frozen=True)
class Link:
    """What the recorded transfers say: seconds = latency + bytes / speed; bytes of a prompt token."""

    bytes_per_s: float
    latency_s: float
    bytes_per_token: float
    transfers: int


def inputs(store: Store, deployment: str) -> Inputs | str:
    """The arrays, or the sentence that says what is missing."""
    import polars as pl

    rows = store.sql(_REQUESTS, deployment=deployment)
    known = rows.drop_nulls(["start_ns", "prompt_tokens", "output_tokens"]).filter(
        pl.col("output_tokens") > 0
    )
    told = rows.filter(~pl.col("outcome").is_in(["failed", "aborted"]).fill_null(value=False))
    if known.height < FEWEST:
        return f"only {known.height} requests have an arrival, a prompt length and an answer length; {FEWEST} are needed"
    if known.height < COMPLETE * told.height:
        return (
            f"{told.height - known.height:,} of {told.height:,} requests lack arrival or lengths: the load on the engines"
            " cannot be played"
        )
    if known["streams"].max() is not None and int(known["streams"].max()) > 1:  # type: ignore[arg-type]
        return "some requests have several answers (n > 1): their steps cannot be played one by one"
    ranks = int(store.sql(_HIDDEN_RANKS, deployment=deployment).item())
    if ranks > 1:
        return (
            f"{ranks} data-parallel ranks stand under one worker's name, and the requests do not say which of them served"
            " them: who ran beside whom is not known"
        )
    part = float((known["mode"] == "disaggregated").mean())  # type: ignore[arg-type]
    if MIXED < part < 1 - MIXED:
        return (
            f"{part:.0%} of the requests ran split into prefill and decode and the others did not: two set-ups in one"
            " deployment cannot be played as one"
        )
    if known["entry_worker"].null_count() > 0.02 * known.height:
        return "which worker served a request is not known"
    start = int(known["start_ns"].min())  # type: ignore[arg-type]
    streams = _streams(store, deployment, known, start)
    if isinstance(streams, str):
        return streams
    split = part > 0.5
    entry, decode = _numbers(known["entry_worker"]), _numbers(known["decode_worker"])
    arrival = _seconds(known["engine_ns"].fill_null(known["start_ns"]), start)
    began = _seconds(known["start_ns"], start)
    # A prompt that is complete makes a token; some engines hand it out one step later.
    made = known["made_ns"] if split else known["prefilled_ns"]
    tail = _seconds(known["first_token_ns"], start) - _seconds(made, start)
    tail = tail[np.isfinite(tail)]
    spans = known.drop_nulls(["prefill_ns", "prefilled_ns", "prefill_worker"])
    number = {name: n for n, name in enumerate(sorted(set(known["entry_worker"].drop_nulls())))}
    return Inputs(
        load=Load(arrival, _whole(known["prompt_tokens"]), _whole(known["cached_tokens"].fill_null(0)),
                  _whole(known["output_tokens"]), entry, decode),
        prefills=Prefills(
            np.array([number.get(w, -1) for w in spans["prefill_worker"]], float), _seconds(spans["prefill_ns"], start),
            _seconds(spans["prefilled_ns"], start),
            (spans["prompt_tokens"] - spans["cached_tokens"].fill_null(0)).cast(float).to_numpy(),
        ),
        streams=streams,
        lead_s=arrival - began,
        tail_s=float(np.median(tail)) if len(tail) else 0.0,
        ttft_s=known["ttft_ms"].cast(float).to_numpy() / 1e3,
        tpot_s=known["tpot_ms"].cast(float).to_numpy() / 1e3,
        e2e_s=known["e2e_ms"].cast(float).to_numpy() / 1e3,
        counted=known["counted"].cast(float).to_numpy(),
        split=split,
        entries=int(entry.max()) + 1,
        decoders=int(decode.max()) + 1 if split else 0,
        cached_known=1 - known["cached_tokens"].null_count() / known.height,
        cached_ratio=int(known["cached_tokens"].fill_null(0).sum()) / max(int(known["prompt_tokens"].sum()), 1),
        ranked=bool((known["entry_worker"] != known["entry_server"]).any()),
        lost=rows.height - told.height,
    )  # fmt: skip


def _streams(store: Store, deployment: str, known: pl.DataFrame, start: int) -> Streams | str:
    import polars as pl

    places = known.select(
        "request", "prompt_tokens", "output_tokens", "decode_worker"
    ).with_columns(number=pl.Series(_numbers(known["decode_worker"])))
    rows = (
        store.sql(_STREAMS, deployment=deployment)
        .join(places, on="request")
        .with_row_index("owner")
    )
    several = rows["emission_tokens"].list.max().drop_nulls()
    if rows.height and (several > 1).sum() > 0.02 * rows.height:
        return (
            "streams deliver several tokens at once (speculative decoding, or a proxy that bundles): the length of a"
            " decode step cannot be read from them"
        )
    if rows.is_empty():
        return "no token times with instants: the length of a decode step cannot be read"
    gaps = rows.select("owner", "first_ns", "gaps_us").explode("gaps_us")
    after = gaps.with_columns(
        (
            pl.col("first_ns")
            - start
            + 1000 * pl.col("gaps_us").cast(pl.Int64).cum_sum().over("owner")
        ).alias("at")
    ).select("owner", "at")
    first = rows.select("owner", at=pl.col("first_ns") - start)
    times = pl.concat([first, after]).drop_nulls().sort("owner", "at")
    ends = times.group_by("owner", maintain_order=True).agg(
        first=pl.col("at").first(), last=pl.col("at").last()
    )
    return Streams(
        rows["number"].cast(float).to_numpy(), rows["prompt_tokens"].cast(float).to_numpy(),
        rows["output_tokens"].cast(float).to_numpy(), ends["first"].to_numpy() / 1e9, ends["last"].to_numpy() / 1e9,
        times["at"].to_numpy() / 1e9, times["owner"].cast(pl.Int64).to_numpy(),
    )  # fmt: skip


def _numbers(names: pl.Series) -> np.ndarray:
    """Workers as numbers in the order of their ids; -1 unknown."""
    order = {name: n for n, name in enumerate(sorted(set(names.drop_nulls())))}
    return np.array([order.get(name, -1) for name in names], np.int64)


def _seconds(instants: pl.Series, start: int) -> Floats:
    found: Floats = (instants - start).cast(float).to_numpy() / 1e9
    return found


def _whole(column: pl.Series) -> np.ndarray:
    return column.cast(int).to_numpy()


def link(store: Store, deployment: str) -> Link | None:
    """Speed and latency of the recorded transfers; None where too few say their bytes and time."""
    rows = store.sql(_TRANSFERS, deployment=deployment).drop_nulls(["bytes", "seconds"])
    rows = rows.filter(rows["seconds"] > 0)
    if rows.height < FEWEST:
        return None
    size, seconds = rows["bytes"].cast(float).to_numpy(), rows["seconds"].cast(float).to_numpy()
    if np.ptp(size) == 0:
        return None
    found = trimmed_least_squares(np.column_stack([np.ones(len(size)), size]), seconds, 1 / seconds)
    if found.coefficients[1] <= 0:
        return None
    tokens = rows["prompt_tokens"].cast(float).to_numpy()
    each = (size / tokens)[np.isfinite(size / tokens)]
    per_token = float(np.median(each)) if len(each) else float("nan")
    return Link(
        1 / float(found.coefficients[1]),
        max(0.0, float(found.coefficients[0])),
        per_token,
        rows.height,
    )


def model_bytes(store: Store, deployment: str) -> float | None:
    """KV bytes of a token where all models of the deployment agree on it; None unknown."""
    rows = store.sql(
        "SELECT DISTINCT bytes_per_token FROM kv_sizes WHERE deployment = $deployment",
        deployment=deployment,
    )["bytes_per_token"].to_list()
    return float(rows[0]) if len(rows) == 1 and rows[0] else None
