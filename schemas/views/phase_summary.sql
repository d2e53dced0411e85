-- phase_summary: where the time of the counted requests went, phase by phase.
--
-- A phase could occur in a request when it occurs in any counted request of the same deployment and mode
-- (aggregated, disaggregated, unknown): the engines there emit it. Requests where it did not are zeros.
--
-- grain:   one row per (deployment, phase, detail)
-- needs:   phase_totals, counted_requests
-- columns:
--   deployment     VARCHAR         deployment
--   phase          VARCHAR         phase
--   detail         VARCHAR         detail
--   count          BIGINT          requests in which it occurs
--   requests       BIGINT          requests in which it could occur: those of the modes in which it occurs at all
--   p50_ms         DOUBLE   ms     median over the requests in which it could occur
--   p90_ms         DOUBLE   ms     90th percentile
--   p99_ms         DOUBLE   ms     99th percentile
--   total_ms       DOUBLE   ms     sum over all counted requests
--   share_of_e2e   DOUBLE          total_ms / sum of all request windows
--   ttft_total_ms  DOUBLE   ms     sum of the part before the first token
--   share_of_ttft  DOUBLE          ttft_total_ms / sum of all windows up to the first token
--   basis          VARCHAR         the weakest among its pieces
--   level          VARCHAR         evidence level
WITH population AS (
  SELECT deployment, mode, count(*) AS requests
  FROM counted_requests
  WHERE end_ns > start_ns
  GROUP BY deployment, mode
),
by_mode AS (
  SELECT *
  FROM phase_totals
  WHERE counted
),
totals AS (
  SELECT deployment, sum(duration_ns) AS window_ns, sum(ttft_part_ns) AS ttft_ns
  FROM by_mode
  GROUP BY deployment
),
details AS (
  SELECT
    m.deployment, m.phase, m.detail,
    CAST(sum(m.requests) AS BIGINT) AS count,
    CAST(sum(p.requests) AS BIGINT) AS requests,
    flatten(list(m.durations_ms)) AS durations,
    CAST(sum(m.duration_ns) AS DOUBLE) AS total_ns,
    CAST(sum(m.ttft_part_ns) AS DOUBLE) AS ttft_total_ns,
    ['measured', 'reported', 'placed', 'inferred', 'upper_bound'][max(m.weakness)] AS basis
  FROM by_mode m
  LEFT JOIN population p ON p.deployment IS NOT DISTINCT FROM m.deployment AND p.mode = m.mode
  GROUP BY m.deployment, m.phase, m.detail
),
-- The requests in which it could have occurred and did not are zeros of the distribution.
distributions AS (
  SELECT
    *,
    list_aggregate(list_resize(durations, requests, 0.0), 'quantile_cont', [0.5, 0.9, 0.99]) AS q
  FROM details
  WHERE requests IS NOT NULL
)
SELECT
  d.deployment,
  d.phase,
  d.detail,
  d.count,
  d.requests,
  d.q[1] AS p50_ms,
  d.q[2] AS p90_ms,
  d.q[3] AS p99_ms,
  d.total_ns / 1e6 AS total_ms,
  d.total_ns / nullif(CAST(t.window_ns AS DOUBLE), 0) AS share_of_e2e,
  d.ttft_total_ns / 1e6 AS ttft_total_ms,
  d.ttft_total_ns / nullif(CAST(t.ttft_ns AS DOUBLE), 0) AS share_of_ttft,
  d.basis,
  'B' AS level
FROM distributions d
JOIN totals t ON t.deployment IS NOT DISTINCT FROM d.deployment
