"""How much of each request's KV movements was hidden behind its own prefill, how much it waited for.

The movements of a request are a union: layers or chunks that overlap count once. Hidden is what lies
inside steps of its own prefill (detail prefill_exec); exposed is what the partition gives to kv_transfer
and kv_load; what of that lies inside a prefill known as wall time is an upper bound. What is neither lies under other work, or outside the request's window. A table and no view:
phases are large, and only data in which KV moved need them here.
"""

from __future__ import annotations

import polars as pl

SCHEMA = {
    "deployment": pl.String, "request": pl.String, "movements": pl.Int64, "bytes": pl.Int64,
    "moved_ms": pl.Float64, "hidden_ms": pl.Float64, "exposed_ms": pl.Float64,
    "bound_ms": pl.Float64,
}  # fmt: skip

# A prefill known as wall time that ends where the movement begins was cut there by it, or ended there:
# what was hidden cannot be told. Nor can it for a request whose prefill nobody states.
REQUESTS = """
WITH move AS (
  SELECT deployment, request, start_ns, end_ns, bytes,
    max(end_ns) OVER (
      PARTITION BY request ORDER BY start_ns, end_ns
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS covered_until_ns
  FROM transfer_times
  WHERE request IS NOT NULL AND end_ns > start_ns AND direction IS DISTINCT FROM 'store'
),
piece AS (
  -- what a movement adds to those that began before it
  SELECT request, greatest(start_ns, coalesce(covered_until_ns, start_ns)) AS start_ns, end_ns
  FROM move
  WHERE end_ns > coalesce(covered_until_ns, start_ns)
),
moved AS (
  SELECT request, min(deployment) AS deployment, count(*) AS movements, min(start_ns) AS start_ns,
    CASE WHEN count(bytes) = count(*) THEN sum(bytes)::BIGINT END AS bytes
  FROM move
  GROUP BY request
),
under_way AS (
  SELECT request, sum(end_ns - start_ns) / 1e6 AS moved_ms
  FROM piece
  GROUP BY request
),
own_phase AS (
  SELECT p.request, p.phase, p.detail, p.start_ns, p.end_ns, p.basis, m.start_ns AS move_ns
  FROM phases AS p
  JOIN moved AS m ON m.request = p.request
  WHERE p.phase = 'prefill' OR p.detail IN ('kv_transfer', 'kv_load')
),
own AS (
  SELECT request, bool_or(phase = 'prefill') AS prefill_known,
    coalesce(bool_or(detail = 'prefill_wall' AND end_ns >= move_ns), false)
      OR coalesce(bool_or(phase != 'prefill' AND basis = 'upper_bound'), false) AS met_wall,
    coalesce(sum(end_ns - start_ns) FILTER (phase != 'prefill' AND basis = 'upper_bound'), 0)
      / 1e6 AS bound_ms,
    coalesce(sum(end_ns - start_ns) FILTER (phase != 'prefill'), 0) / 1e6 AS exposed_ms
  FROM own_phase
  GROUP BY request
),
hidden AS (
  SELECT s.request, sum(greatest(
      least(p.end_ns, s.end_ns) - greatest(p.start_ns, s.start_ns), 0
    )) / 1e6 AS hidden_ms
  FROM own_phase AS p
  JOIN piece AS s ON s.request = p.request
  WHERE p.detail = 'prefill_exec'
  GROUP BY s.request
)
SELECT m.deployment, m.request, m.movements, m.bytes, u.moved_ms,
  CASE WHEN o.prefill_known AND NOT o.met_wall THEN coalesce(h.hidden_ms, 0) END AS hidden_ms,
  coalesce(o.exposed_ms, 0) AS exposed_ms, coalesce(o.bound_ms, 0) AS bound_ms
FROM moved AS m
JOIN under_way AS u ON u.request = m.request
LEFT JOIN own AS o ON o.request = m.request
LEFT JOIN hidden AS h ON h.request = m.request
ORDER BY m.deployment, m.request
"""
