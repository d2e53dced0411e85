"""What the partition reads: windows of requests and the intervals of their legs, batch by batch.

Here is what a failed attempt or a migration took; the rules of single legs are in `_phases_legs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from pdtrace import _phases_legs as of_legs
from pdtrace._phases_legs import NAMES
from pdtrace._phases_sums import POPULATION

if TYPE_CHECKING:
    from pdtrace.store import Store

BATCH_REQUESTS = 250_000
_BATCH_INTERVALS = 200_000  # of one batch, on average: arrays of a batch take some 100 MB
_READ_ROWS = 1_000_000  # intervals that are named at once

Batch = tuple[pl.DataFrame, pl.DataFrame]


def batches(store: Store, batch_requests: int) -> Iterator[Batch]:
    """The batches of a store, each a pair (windows, intervals) for phases.cut.

    A batch is a range of the numbers of requests. All intervals are named first, as categories and
    numbers: rows of one request may stand anywhere.
    """
    requests = of_legs.requests(store)
    counts = (requests.height / batch_requests, store.count("intervals") / _BATCH_INTERVALS)
    slices = max(1, math.ceil(max(counts)))
    numbers = requests["number"].to_numpy()
    each = math.ceil((int(numbers.max(initial=0)) + 1) / slices)
    named = [_by_batch(rows, each, slices) for rows in _named(store, requests)]
    windows = _windows(store, requests)
    for number, mine in enumerate(_by_batch(windows, each, slices)):
        yield mine, pl.concat([parts[number] for parts in named])
        for parts in named:
            parts[number] = parts[number].clear()


def _named(store: Store, requests: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """All intervals of these requests, some at a time."""
    legs = of_legs.legs(store, requests)
    yield of_legs.ways_out(legs)
    places = {"leg": legs["leg"]}
    for rows in store.stretches("intervals", of_legs.INTERVALS, _READ_ROWS, places):
        yield of_legs.named(rows, legs)
    if legs["again"].any():
        retries = store.sql(_RETRIES).join(requests.select("request", "number"), on="request")
        names = pl.col(NAMES).cast(pl.Categorical)
        yield retries.with_columns(names).select("number", *NAMES, "start_ns", "end_ns")


def _windows(store: Store, requests: pl.DataFrame) -> pl.DataFrame:
    windows = requests.select(
        "number", "request", "start_ns", "end_ns", "first_token_ns", *POPULATION
    )
    if not store.rows(f"SELECT 1 {_REMAINDERS} LIMIT 1"):
        return windows.with_columns(negative_ns=pl.lit(None, pl.Int64))
    negative = store.sql(_NEGATIVE)
    return windows.join(negative, on="request", how="left", maintain_order="left")


def _by_batch(rows: pl.DataFrame, each: int, slices: int) -> list[pl.DataFrame]:
    """The rows of each batch of so many requests."""
    if slices == 1:
        return [rows]
    batch = rows["number"].to_numpy() // each
    if (np.diff(batch) < 0).any():
        small = batch.astype(np.uint16 if slices < 2**16 else np.int64)  # sorted by its digits
        order = np.argsort(small, kind="stable")
        rows, batch = rows[order], batch[order]
    ends = np.searchsorted(batch, np.arange(slices), side="right")
    return [rows[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


# Legs whose request may have been tried more than once.
_SUSPECTS = f"SELECT request FROM legs WHERE {of_legs.AGAIN}"

# A failed attempt that was followed by another owns the time until the next one's first own
# interval. Tokens that had reached the user stay what they were: then the time from the last token
# to the next attempt's first token is a migration.
_RETRIES = f"""
WITH suspects AS ({_SUSPECTS}),
-- A leg belongs to the attempt that it counts itself, else to that of the hop that made it; engines
-- that nobody counted are counted here, by the failed legs of the same role and stream before them.
attempts AS (
  SELECT l.leg, l.request, l.worker, l.container, l.role, l.status, l.start_ns, l.end_ns,
         l.first_token_ns, l.last_token_ns, l.first_token_delivered,
         coalesce(l.attempt, hop.attempt, CASE
           WHEN l.observer = 'engine' AND l.container IS NOT TRUE
           THEN coalesce(sum(CAST(l.status = 'failed' AS BIGINT)) OVER (
                  PARTITION BY l.request, l.observer, l.container, l.role, l.stream
                  ORDER BY l.start_ns, l.leg ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)
         END) AS attempt
  FROM legs l
  LEFT JOIN (SELECT trace_id, span_id, max(attempt) AS attempt FROM legs
             WHERE attempt IS NOT NULL AND span_id IS NOT NULL GROUP BY ALL) hop
    ON hop.trace_id = l.trace_id AND hop.span_id = l.parent_span_id
  WHERE l.request IN (FROM suspects)
),
own AS (
  SELECT a.request, a.attempt, min(i.start_ns) AS begin_ns
  FROM attempts a JOIN intervals i USING (leg)
  WHERE i.detail NOT IN ('retry_backoff', 'migration', 'failed_attempt')
  GROUP BY ALL
),
tries AS (
  SELECT a.request, a.attempt,
         bool_or(status = 'failed') AS failed,
         min(start_ns) FILTER (status = 'failed') AS start_ns,
         max(end_ns) FILTER (status = 'failed') AS end_ns,
         coalesce(any_value(worker) FILTER (status = 'failed' AND container IS NOT TRUE),
                  any_value(worker) FILTER (status = 'failed')) AS worker,
         coalesce(any_value(o.begin_ns), min(start_ns)) AS begin_ns,
         min(first_token_ns) FILTER (delivers) AS first_token_ns,
         max(coalesce(last_token_ns, end_ns)) FILTER (delivers AND first_token_ns IS NOT NULL)
           AS last_token_ns
  FROM (SELECT *, coalesce(first_token_delivered, role IS DISTINCT FROM 'prefill') AS delivers
        FROM attempts WHERE attempt IS NOT NULL) a
  LEFT JOIN own o ON o.request = a.request AND o.attempt = a.attempt
  GROUP BY ALL
),
followed AS (
  SELECT t.*, n.begin_ns AS next_begin_ns, n.first_token_ns AS next_first_token_ns
  FROM tries t JOIN tries n ON n.request = t.request AND n.attempt > t.attempt
  WHERE t.failed AND t.start_ns IS NOT NULL AND n.begin_ns IS NOT NULL
  QUALIFY row_number() OVER (PARTITION BY t.request, t.attempt ORDER BY n.attempt) = 1
),
judged AS (
  SELECT f.*,
         coalesce(r.first_token_ns < f.next_begin_ns AND (
           f.first_token_ns IS NOT NULL OR r.first_token_ns BETWEEN f.start_ns AND f.end_ns
         ), false) AS delivered,
         f.request IN (
           SELECT a.request FROM attempts a JOIN intervals i USING (leg)
           WHERE i.detail = 'retry_backoff' AND i.start_ns IS NOT NULL
         ) AS backoff_known
  FROM followed f JOIN requests r USING (request)
)
SELECT request, 'failed_attempt' AS detail, start_ns,
       -- A backoff that somebody measured keeps its name.
       CASE WHEN backoff_known THEN least(end_ns, next_begin_ns) ELSE next_begin_ns END AS end_ns,
       worker, 'measured' AS basis, 'until the next attempt''s first own interval' AS semantics
FROM judged
WHERE NOT delivered AND next_begin_ns > start_ns
UNION ALL
SELECT request, 'migration', coalesce(last_token_ns, end_ns),
       coalesce(next_first_token_ns, next_begin_ns),
       worker, 'measured', 'last token of the failed attempt to the next token'
FROM judged
WHERE delivered AND coalesce(last_token_ns, end_ns) < coalesce(next_first_token_ns, next_begin_ns)
"""

# Remainders that came out negative (a system's parts exceed its whole), as a magnitude.
_REMAINDERS = "FROM reported WHERE quantity = 'negative_remainder_ms' AND value <> 0"
_NEGATIVE = f"""
SELECT l.request, TRY_CAST(round(sum(abs(r.value)) * 1e6) AS BIGINT) AS negative_ns
FROM (SELECT leg, value {_REMAINDERS}) r JOIN legs l USING (leg)
WHERE l.request IS NOT NULL
GROUP BY l.request
"""
