"""Token streams and prefill intervals of each worker, as the tables tell them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import polars as pl

RESOLUTION_NS = 20_000_000  # instants known no better than this are not laid over each other
Sql = Callable[..., pl.DataFrame]

# One row per stream, as the observer nearest to the engine saw it. A stream that several attempts
# made has no single worker, unless the engine itself saw it.
_STREAMS = """
WITH seen AS (
  SELECT s.rowid AS row, l.request, coalesce(s.stream, 0) AS stream, s.first_ns,
    coalesce(s.observer, l.observer) AS observer, l.attempt, r.prompt_tokens,
    CASE WHEN coalesce(s.observer, l.observer) = 'engine' THEN coalesce(l.worker, r.decode_worker)
         WHEN coalesce(r.attempts, 1) <= 1 THEN r.decode_worker END AS worker,
    s.first_ns + 1000 * CAST(list_sum(s.gaps_us) AS BIGINT) AS last_ns,
    len(s.gaps_us) + 1 AS emissions
  FROM streams AS s
  JOIN legs AS l ON l.leg = s.leg
  JOIN requests AS r ON r.request = l.request
  WHERE s.first_ns IS NOT NULL AND len(s.gaps_us) > 0 AND list_count(s.gaps_us) = len(s.gaps_us)
    AND coalesce(l.resolution_ns, 1) <= $resolution_ns
)
SELECT row, worker, request, stream, first_ns, last_ns, emissions, prompt_tokens, observer
FROM seen
WHERE worker IS NOT NULL
QUALIFY row_number() OVER (
  PARTITION BY request, stream
  ORDER BY list_position(['engine', 'frontend', 'router', 'gateway', 'client'], observer),
    emissions DESC, first_ns, row
) = 1
ORDER BY worker, first_ns, request, stream
"""

_LISTS = """
SELECT s.rowid AS row, s.gaps_us, s.emission_tokens
FROM streams AS s
WHERE s.rowid BETWEEN $low AND $high AND s.rowid IN (SELECT unnest($rows))
"""

# Where a prompt was computed is what its leg says, never where its answer was decoded: remote
# prefills taken for local ones would flag every decode worker. What a router or front end saw of a
# prefill belongs to the request's prefill worker. One leg tells of a request's prompt: the engine's
# own before others', steps before wall time.
_PREFILLS = """
WITH seen AS (
  SELECT r.request, i.leg, i.detail,
    CASE WHEN l.observer = 'engine' AND l.worker IS NOT NULL THEN l.worker
         ELSE r.prefill_worker END AS worker,
    coalesce(i.start_ns, i.end_ns - i.duration_ns) AS start_ns,
    coalesce(i.end_ns, i.start_ns + i.duration_ns) AS end_ns,
    coalesce(l.prompt_tokens, r.prompt_tokens) - coalesce(l.cached_tokens, r.cached_tokens, 0)
      AS tokens,
    [CAST(l.observer <> 'engine' AS INTEGER), CAST(i.detail = 'prefill_wall' AS INTEGER),
     list_position(['measured', 'reported', 'placed', 'inferred'], i.basis)] AS place
  FROM intervals AS i
  JOIN legs AS l ON l.leg = i.leg
  JOIN requests AS r ON r.request = l.request
  WHERE i.detail IN ('prefill_exec', 'prefill_wall', 'prefill_recompute')
    AND i.basis <> 'upper_bound' AND i.censored IS NOT TRUE
    AND coalesce(i.clock, 'wall') = 'wall' AND coalesce(i.resolution_ns, 1) <= $resolution_ns
    AND l.role IS DISTINCT FROM 'decode' AND l.container IS NOT TRUE
),
chosen AS (
  SELECT *
  FROM seen
  WHERE worker IS NOT NULL AND end_ns > start_ns
  QUALIFY dense_rank() OVER (
    PARTITION BY worker, request, detail = 'prefill_recompute' ORDER BY place, leg
  ) = 1
)
SELECT worker, request, start_ns, end_ns,
  -- a prompt computed in pieces: its tokens by their time
  greatest(tokens, 0) * (end_ns - start_ns)
    / sum(end_ns - start_ns) OVER (PARTITION BY worker, request, detail = 'prefill_recompute')
    AS tokens
FROM chosen
ORDER BY worker, start_ns, request
"""

_WORKERS = """
SELECT w.worker, w.deployment, w.role,
  coalesce(bool_or(f.value ILIKE '%consumer%'), false) AS kv_consumer,
  any_value(d.decoded) AS decoded
FROM workers AS w
LEFT JOIN facts AS f ON f.worker = w.worker AND f.key = 'kv_role'
LEFT JOIN (
  SELECT decode_worker AS worker, count(*) AS decoded FROM requests
  WHERE output_tokens IS NULL OR output_tokens > 1 GROUP BY decode_worker
) AS d ON d.worker = w.worker
GROUP BY w.worker, w.deployment, w.role
ORDER BY w.worker
"""


def workers(sql: Sql) -> Iterator[dict[str, Any]]:
    """What `interference_gaps.interference` asks for, worker after worker that has token times."""
    streams = sql(_STREAMS, resolution_ns=RESOLUTION_NS)
    if not streams.height:
        return
    prefills = sql(_PREFILLS, resolution_ns=RESOLUTION_NS)
    known = {row["worker"]: row for row in sql(_WORKERS).iter_rows(named=True)}
    for worker in streams["worker"].unique(maintain_order=True).to_list():
        about = known.get(worker, {})
        yield {
            "worker": worker,
            "deployment": about.get("deployment"),
            "role": about.get("role"),
            "kv_consumer": bool(about.get("kv_consumer")),
            "decoded": about.get("decoded"),
            "streams": streams.filter(pl.col("worker") == worker),
            "prefills": prefills.filter(pl.col("worker") == worker),
            "load": lambda rows: _with_lists(sql, rows),
        }


def _with_lists(sql: Sql, rows: pl.DataFrame) -> pl.DataFrame:
    """The streams with their gaps."""
    numbers = rows["row"].to_list()
    lists = sql(_LISTS, rows=numbers, low=min(numbers), high=max(numbers))
    return rows.join(lists, on="row", how="left", maintain_order="left")
