-- ttft_phase_summary: what the time to first token is made of, phase by phase.
--
-- grain:   one row per (deployment, phase, detail) that occurs before a first token
-- needs:   phase_by_request, counted_requests
-- columns:
--   deployment     VARCHAR         deployment
--   phase          VARCHAR         phase
--   detail         VARCHAR         detail
--   count          BIGINT          requests in which it occurs before the first token
--   requests       BIGINT          requests in which it could occur (view phase_summary), with a known first token
--   p50_ms         DOUBLE   ms     median over the requests in which it could occur
--   p90_ms         DOUBLE   ms     90th percentile
--   p99_ms         DOUBLE   ms     99th percentile
--   total_ms       DOUBLE   ms     sum over all counted requests
--   share_of_ttft  DOUBLE          total_ms / sum of all windows up to the first token
--   basis          VARCHAR         the weakest among its pieces
--   level          VARCHAR         evidence level
WITH parts AS (
  SELECT *
  FROM phase_by_request
  WHERE counted AND ttft_part_ms > 0
),
population AS (
  SELECT deployment, mode, count(*) AS requests
  FROM counted_requests
  WHERE end_ns > start_ns AND first_token_ns > start_ns
  GROUP BY deployment, mode
),
could_occur AS (
  SELECT d.deployment, d.phase, d.detail, sum(p.requests) AS requests
  FROM (SELECT DISTINCT deployment, mode, phase, detail FROM parts) d
  JOIN population p ON p.deployment IS NOT DISTINCT FROM d.deployment AND p.mode = d.mode
  GROUP BY d.deployment, d.phase, d.detail
),
totals AS (
  SELECT deployment, CAST(sum(ttft_part_ns) AS DOUBLE) AS ttft_ns
  FROM parts
  GROUP BY deployment
),
details AS (
  SELECT
    deployment, phase, detail,
    count(*) AS count,
    list(ttft_part_ms) AS durations,
    CAST(sum(ttft_part_ns) AS DOUBLE) AS total_ns,
    ['measured', 'reported', 'placed', 'inferred', 'upper_bound'][max(
      CASE basis
        WHEN 'measured' THEN 1 WHEN 'reported' THEN 2 WHEN 'placed' THEN 3
        WHEN 'inferred' THEN 4 WHEN 'upper_bound' THEN 5
      END
    )] AS basis
  FROM parts
  GROUP BY deployment, phase, detail
),
distributions AS (
  SELECT
    d.*, CAST(o.requests AS BIGINT) AS requests,
    list_aggregate(list_resize(d.durations, o.requests, 0.0), 'quantile_cont', [0.5, 0.9, 0.99]) AS q
  FROM details d
  JOIN could_occur o
    ON o.deployment IS NOT DISTINCT FROM d.deployment AND o.phase = d.phase AND o.detail = d.detail
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
  d.total_ns / t.ttft_ns AS share_of_ttft,
  d.basis,
  'B' AS level
FROM distributions d
JOIN totals t ON t.deployment IS NOT DISTINCT FROM d.deployment
