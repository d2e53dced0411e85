-- phase_by_request: how long each request spent in each kind of work or wait.
--
-- grain:   one row per (request, phase, detail) that occurs
-- needs:   phases, requests, counted_requests
-- columns:
--   deployment    VARCHAR         deployment
--   request       VARCHAR         the request
--   mode          VARCHAR         aggregated, disaggregated or unknown
--   counted       BOOLEAN         it enters the latency and phase figures (view counted_requests)
--   phase         VARCHAR         phase
--   detail        VARCHAR         detail
--   duration_ms   DOUBLE   ms     time spent
--   ttft_part_ms  DOUBLE   ms     of it before the first delivered token; NULL when that is unknown
--   basis         VARCHAR         the weakest among its pieces
WITH flagged AS (
  SELECT
    r.request, r.deployment, coalesce(r.mode, 'unknown') AS mode, r.first_token_ns,
    c.request IS NOT NULL AS counted
  FROM requests r
  LEFT JOIN counted_requests c ON c.request = r.request
)
-- Request and detail are the key; what depends on them is taken from any piece (grouping by it costs twice).
SELECT
  any_value(r.deployment) AS deployment,
  p.request,
  any_value(r.mode) AS mode,
  any_value(r.counted) AS counted,
  any_value(p.phase) AS phase,
  p.detail,
  CAST(sum(p.end_ns - p.start_ns) AS DOUBLE) / 1e6 AS duration_ms,
  -- NULL first tokens make every term NULL, and with them the sum.
  CAST(sum(
    CASE WHEN r.first_token_ns IS NOT NULL
         THEN greatest(least(p.end_ns, r.first_token_ns) - p.start_ns, 0) END
  ) AS DOUBLE) / 1e6 AS ttft_part_ms,
  ['measured', 'reported', 'placed', 'inferred', 'upper_bound'][max(
    CASE p.basis
      WHEN 'measured' THEN 1 WHEN 'reported' THEN 2 WHEN 'placed' THEN 3
      WHEN 'inferred' THEN 4 WHEN 'upper_bound' THEN 5
    END
  )] AS basis
FROM phases p
JOIN flagged r ON r.request = p.request
GROUP BY p.request, p.detail
