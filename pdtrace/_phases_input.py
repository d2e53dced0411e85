"""What the partition reads: windows of requests and the intervals of their legs, batch by batch.

Here the rules that need legs are applied: which detail an interval has on the decode leg of a P/D
pair, that decode never starts before its leg's first token, and what a failed attempt or a
migration took.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from pdtrace.store import Store

# Log lines of whole seconds say nothing about the way of a token.
_COARSE_NS = 100_000_000
_ON_ITS_WAY = "first token made to first token seen"

BATCH_REQUESTS = 250_000
_BATCH_INTERVALS = 200_000  # of one batch, on average: arrays of a batch take some 100 MB

# A batch is a range of row numbers of `requests`: their number is what intervals are joined by.
_WINDOWS = """
SELECT rowid AS number, request, start_ns, end_ns, first_token_ns
FROM requests
WHERE start_ns IS NOT NULL AND end_ns IS NOT NULL AND {range}
"""

# Once for all batches. A table, not a CTE: DuckDB then knows that it is smaller than `intervals`
# and builds its hash table on this side (measured on 100,000 requests: 0.25 s of 0.5).
_REQUEST_LEGS = """
CREATE OR REPLACE TEMP TABLE request_legs AS
SELECT l.leg, l.request, r.rowid AS number, l.worker, l.role, l.first_token_ns, r.mode,
       r.first_token_ns AS seen_ns,
       l.container IS NOT TRUE AND coalesce(l.resolution_ns, 1) < {coarse_ns}
         AND coalesce(l.first_token_delivered, l.role IS DISTINCT FROM 'prefill') AS delivers,
       -- What a front end or router saw of the work of engines is the engines' time.
       CASE WHEN l.observer IN ('frontend', 'router') THEN r.prefill_worker END AS prefill_worker,
       CASE WHEN l.observer IN ('frontend', 'router') THEN r.decode_worker END AS decode_worker
FROM legs l JOIN requests r USING (request)
WHERE r.start_ns IS NOT NULL AND r.end_ns IS NOT NULL
"""

# The decode leg of a P/D pair: a prefill leg of the same request ran elsewhere. A pair whose
# workers are not both known counts as two workers, since two roles were told apart.
_INTERVALS = """
WITH prefill_workers AS (
  SELECT number, min(worker) AS first_worker, max(worker) AS last_worker,
         count(*) > count(worker) AS some_unknown
  FROM request_legs WHERE role = 'prefill' GROUP BY number
),
roles AS (
  SELECT l.*, l.role = 'decode' AND (
           l.mode = 'disaggregated'
           OR (p.number IS NOT NULL AND (p.some_unknown OR l.worker IS NULL
               OR p.first_worker <> l.worker OR p.last_worker <> l.worker))
         ) AS pair_decode,
         -- The decode side of a pair whose other leg is not on record: its wait may hold the transfer.
         l.role = 'decode' AND l.mode = 'unknown' AND p.number IS NULL AS lone_decode
  FROM request_legs l LEFT JOIN prefill_workers p USING (number)
),
named AS (
  SELECT l.number, l.first_token_ns,
         CASE WHEN i.detail IN ('prefill_exec', 'prefill_gap', 'prefill_wall', 'prefill_queue')
              THEN coalesce(l.prefill_worker, l.worker)
              WHEN i.detail IN ('decode_exec', 'decode_wall', 'decode_queue', 'kv_transfer', 'bridge_wait',
                                'kv_space_wait', 'kv_wait_upper_bound')
              THEN coalesce(l.decode_worker, l.worker)
              ELSE l.worker END AS worker,
         coalesce(l.pair_decode AND i.decode_detail <> i.detail, false) AS renamed,
         CASE WHEN coalesce(l.pair_decode OR (l.lone_decode AND i.detail = 'prefill_queue'), false)
              THEN coalesce(i.decode_detail, i.detail)
              ELSE i.detail END AS detail,
         coalesce(i.start_ns, i.end_ns - i.duration_ns) AS start_ns,
         coalesce(i.end_ns, i.start_ns + i.duration_ns) AS end_ns,
         -- However well its instants are known, such a wait contains other things.
         CASE WHEN (l.pair_decode OR (l.lone_decode AND i.detail = 'prefill_queue'))
                   AND i.decode_detail = 'kv_wait_upper_bound' THEN 'upper_bound'
              ELSE i.basis END AS basis,
         i.semantics
  FROM intervals i JOIN roles l USING (leg)
  UNION ALL
  -- From the first token as its maker saw it to the first token as the user's side saw it: a proxy
  -- that buffers is not decoding.
  SELECT number, NULL, NULL, false, 'stream_out', min(first_token_ns), any_value(seen_ns), 'inferred',
         '{on_its_way}'
  FROM request_legs
  WHERE delivers AND first_token_ns < seen_ns
  GROUP BY number
)
SELECT number, {names},
       -- The first decode step of a pulled request makes its first token, hence starts before it.
       CASE WHEN detail IN ('decode_exec', 'decode_stall', 'decode_wall') AND NOT renamed
                 AND end_ns >= start_ns
                 -- One that was stamped to end with that token made it: an engine's own record of the same step.
                 AND NOT coalesce(detail = 'decode_exec' AND basis = 'measured' AND end_ns = first_token_ns, false)
            THEN least(greatest(start_ns, first_token_ns), end_ns)
            ELSE start_ns END AS start_ns,
       end_ns
FROM named
WHERE start_ns IS NOT NULL AND end_ns IS NOT NULL
"""

# A failed attempt that was followed by another owns the time until the next one's first own
# interval. Tokens that had reached the user stay what they were: then the time from the last token
# to the next attempt's first token is a migration.
_RETRIES = """
WITH suspects AS (
  SELECT request FROM legs
  WHERE attempt > 0 OR (status = 'failed' AND observer = 'engine' AND container IS NOT TRUE)
),
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
_NEGATIVE = """
SELECT l.request, TRY_CAST(round(sum(abs(r.value)) * 1e6) AS BIGINT) AS negative_ns
FROM reported r JOIN legs l USING (leg)
WHERE r.quantity = 'negative_remainder_ms' AND r.value <> 0 AND l.request IS NOT NULL
GROUP BY l.request
"""


# Names repeat millions of times: they travel as codes of an ENUM.
_NAMES = """
SELECT 'detail' AS name, list(DISTINCT detail) AS found FROM intervals
UNION ALL SELECT 'detail', list_append(list(DISTINCT decode_detail), 'stream_out') FROM intervals
UNION ALL SELECT 'basis', list(DISTINCT basis) || ['inferred', 'upper_bound'] FROM intervals
UNION ALL SELECT 'semantics', list_append(list(DISTINCT semantics), '{on_its_way}') FROM intervals
UNION ALL SELECT 'worker', list(DISTINCT worker) FROM legs
UNION ALL SELECT 'worker', list(DISTINCT prefill_worker) FROM requests
UNION ALL SELECT 'worker', list(DISTINCT decode_worker) FROM requests
"""


Batch = tuple[pl.DataFrame, pl.DataFrame]


@contextmanager
def batches(store: Store, batch_requests: int) -> Iterator[Iterator[Batch]]:
    """The batches of a store, each a pair (windows, intervals) for phases.cut."""
    counts = (store.count("requests") / batch_requests, store.count("intervals") / _BATCH_INTERVALS)
    slices = max(1, math.ceil(max(counts)))
    store.execute(_REQUEST_LEGS.format(coarse_ns=_COARSE_NS))
    intervals = _INTERVALS.format(names=_coded(store), on_its_way=_ON_ITS_WAY)
    if slices > 1:  # joined once for all batches, not once for each
        store.execute(f"CREATE OR REPLACE TEMP TABLE request_intervals AS {intervals}")
        intervals = "FROM request_intervals"
    try:
        yield _batches(store, intervals, slices)
    finally:
        store.execute("DROP TABLE IF EXISTS request_intervals")
        store.execute("DROP TABLE request_legs")


def _batches(store: Store, query: str, slices: int) -> Iterator[Batch]:
    all_retries, negative = store.sql(_RETRIES), store.sql(_NEGATIVE)
    rows = store.scalar("SELECT max(rowid) + 1 FROM requests") or 0
    edges = [rows * n // slices for n in range(slices + 1)]
    for low, high in itertools.pairwise(edges):
        windows = store.sql(_WINDOWS.format(range=f"rowid >= {low} AND rowid < {high}"))
        part = f"WHERE number >= {low} AND number < {high}" if slices > 1 else ""
        intervals = store.sql(f"FROM ({query}) {part}")
        retries = all_retries.join(windows.select("request", "number"), on="request")
        if retries.height:
            texts = pl.col("detail", "worker", "basis", "semantics").cast(pl.String)
            retries = retries.select(intervals.columns)
            intervals = pl.concat([intervals.with_columns(texts), retries])
        yield windows.join(negative, on="request", how="left", maintain_order="left"), intervals


def _coded(store: Store) -> str:
    """The names of intervals as ENUM expressions over the values that occur."""
    values: dict[str, set[str]] = {
        "detail": set(),
        "worker": set(),
        "basis": set(),
        "semantics": set(),
    }
    for name, found in store.rows(_NAMES.format(on_its_way=_ON_ITS_WAY)):
        values[name] |= {value for value in found or () if value is not None}
    return ", ".join(
        f"CAST({name} AS ENUM ({', '.join(_literal(v) for v in sorted(found) or [''])})) AS {name}"
        for name, found in values.items()
    )


def _literal(value: str) -> str:
    """A text as a SQL literal."""
    return "'" + value.replace("'", "''") + "'"
