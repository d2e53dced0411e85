-- phase_shares: how the phases share the time to first token, and the whole time, of the counted requests.
--
-- grain:   one row per (deployment, window, phase) with time in it
-- needs:   phase_by_request
-- columns:
--   deployment      VARCHAR         deployment
--   window          VARCHAR         first_token (start to first token) or whole (start to end)
--   phase           VARCHAR         phase
--   requests        BIGINT          requests in which it occurs in that window
--   total_ms        DOUBLE   ms     time in it, summed over the requests
--   share           DOUBLE          total_ms over all phases of that window
--   mean_ms         DOUBLE   ms     total_ms over the requests that have such a window: the parts add up to the mean
--   window_requests  BIGINT         requests that have such a window
--   window_mean_ms  DOUBLE   ms     its mean length
--   basis           VARCHAR         the weakest among the pieces
--   level           VARCHAR         evidence level
WITH piece AS (
  SELECT deployment, request, 'whole' AS "window", phase, duration_ns, basis
  FROM phase_by_request
  WHERE counted
  UNION ALL
  SELECT deployment, request, 'first_token', phase, ttft_part_ns, basis
  FROM phase_by_request
  WHERE counted AND ttft_part_ns IS NOT NULL
),
total AS (
  SELECT deployment, "window", count(DISTINCT request) AS window_requests,
    CAST(sum(duration_ns) AS DOUBLE) / 1e6 AS window_ms
  FROM piece
  GROUP BY deployment, "window"
),
summed AS (
  SELECT deployment, "window", phase, count(DISTINCT request) AS requests,
    CAST(sum(duration_ns) AS DOUBLE) / 1e6 AS total_ms,
    ['measured', 'reported', 'placed', 'inferred', 'upper_bound'][max(
      CASE basis
        WHEN 'measured' THEN 1 WHEN 'reported' THEN 2 WHEN 'placed' THEN 3
        WHEN 'inferred' THEN 4 WHEN 'upper_bound' THEN 5
      END
    )] AS basis
  FROM piece
  WHERE duration_ns > 0
  GROUP BY deployment, "window", phase
)
SELECT s.deployment, s."window", s.phase, s.requests, s.total_ms,
  s.total_ms / nullif(t.window_ms, 0) AS share,
  s.total_ms / t.window_requests AS mean_ms,
  t.window_requests, t.window_ms / t.window_requests AS window_mean_ms,
  s.basis, 'B' AS level
FROM summed AS s
JOIN total AS t ON t.deployment IS NOT DISTINCT FROM s.deployment AND t."window" = s."window"
