-- phase_by_request: how long each request spent in each kind of work or wait.
--
-- grain:   one row per (request, phase, detail) that occurs
-- needs:   phases, request_values
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
--   placed_ms     DOUBLE   ms     of it neither measured nor reported
--   bound_ms      DOUBLE   ms     of it an upper bound
-- Request and detail are the key; what depends on them is taken from any piece (grouping by it costs twice).
SELECT
  r.deployment,
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
  CASE max(
    CASE p.basis
      WHEN 'measured' THEN 1 WHEN 'reported' THEN 2 WHEN 'placed' THEN 3
      WHEN 'inferred' THEN 4 WHEN 'upper_bound' THEN 5
    END
  ) WHEN 1 THEN 'measured' WHEN 2 THEN 'reported' WHEN 3 THEN 'placed' WHEN 4 THEN 'inferred'
    WHEN 5 THEN 'upper_bound' END AS basis,
  CAST(sum(CASE WHEN p.basis IN ('measured', 'reported') THEN 0 ELSE p.end_ns - p.start_ns END) AS DOUBLE) / 1e6
    AS placed_ms,
  CAST(sum(CASE WHEN p.basis = 'upper_bound' THEN p.end_ns - p.start_ns ELSE 0 END) AS DOUBLE) / 1e6
    AS bound_ms
FROM phases p
JOIN request_values r ON r.request = p.request
GROUP BY r.deployment, p.request, p.detail
