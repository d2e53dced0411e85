-- transfer_requests: how much of each request's KV movements was hidden behind its own prefill, how
-- much it waited for, and before which token.
--
-- The movements of a request are a union: layers or chunks that overlap count once. Hidden is what
-- lies inside steps of its own prefill (detail prefill_exec); exposed is what the partition gives to
-- kv_transfer and kv_load. What is neither lies under other work (a decode step, a prefill known as
-- wall time only: then hidden_ms is
-- NULL, for steps and gaps of that prefill are not told apart) or outside the request's window.
--
-- grain:   one row per request with at least one movement of known start and end
-- needs:   transfer_times, phases, requests
-- columns:
--   deployment          VARCHAR  deployment
--   request             VARCHAR  the request
--   movements           BIGINT   movements with start and end
--   bytes               BIGINT   bytes  bytes of all of them; NULL when those of any are unknown
--   moved_ms            DOUBLE   ms     time during which at least one was under way
--   hidden_ms           DOUBLE   ms     of it inside the request's own prefill steps; NULL where it met a prefill known as wall time only, or none is known
--   exposed_ms          DOUBLE   ms     time that the request waited for it: phases kv_transfer and kv_load
--   first_token_origin  VARCHAR  prefill or decode: who made the first delivered token
--   before_token        VARCHAR  first (TTFT) or second (the first gap): which token the P to D movement holds up; NULL unknown
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
  SELECT request, any_value(deployment) AS deployment, count(*) AS movements,
    min(start_ns) AS start_ns,
    CASE WHEN count(bytes) = count(*) THEN sum(bytes)::BIGINT END AS bytes
  FROM move
  GROUP BY request
),
union_time AS (
  SELECT request, sum(end_ns - start_ns) / 1e6 AS moved_ms
  FROM piece
  GROUP BY request
),
own_phase AS (
  SELECT p.request, p.phase, p.detail, p.start_ns, p.end_ns
  FROM phases AS p
  SEMI JOIN moved AS m ON m.request = p.request
  WHERE p.phase = 'prefill' OR p.detail IN ('kv_transfer', 'kv_load')
),
exposed AS (
  SELECT request, sum(end_ns - start_ns) / 1e6 AS exposed_ms
  FROM own_phase
  WHERE phase != 'prefill'
  GROUP BY request
),
prefill AS (
  -- a wall that ends where the movement begins was cut there by it, or ended there: cannot tell
  SELECT p.request,
    max(p.end_ns) FILTER (p.detail = 'prefill_wall') >= min(m.start_ns) AS met_wall
  FROM own_phase AS p
  JOIN moved AS m ON m.request = p.request
  WHERE p.phase = 'prefill'
  GROUP BY p.request
),
hidden AS (
  SELECT s.request,
    sum(greatest(least(p.end_ns, s.end_ns) - greatest(p.start_ns, s.start_ns), 0)) / 1e6 AS hidden_ms
  FROM own_phase AS p
  JOIN piece AS s ON s.request = p.request
  WHERE p.detail = 'prefill_exec'
  GROUP BY s.request
)
SELECT m.deployment, m.request, m.movements, m.bytes, u.moved_ms,
  CASE WHEN w.request IS NULL OR w.met_wall THEN NULL ELSE coalesce(h.hidden_ms, 0) END
    AS hidden_ms,
  coalesce(e.exposed_ms, 0) AS exposed_ms,
  r.first_token_origin,
  CASE r.first_token_origin WHEN 'decode' THEN 'first' WHEN 'prefill' THEN 'second' END AS before_token
FROM moved AS m
JOIN union_time AS u ON u.request = m.request
JOIN requests AS r ON r.request = m.request
LEFT JOIN prefill AS w ON w.request = m.request
LEFT JOIN hidden AS h ON h.request = m.request
LEFT JOIN exposed AS e ON e.request = m.request
