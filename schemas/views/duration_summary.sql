-- duration_summary: kinds of work or wait known only as durations, without a position in the request.
--
-- grain:   one row per (deployment, phase detail); such durations may overlap and never enter the partition
-- needs:   intervals, legs, counted_requests
-- columns:
--   deployment  VARCHAR         deployment
--   detail      VARCHAR         phase detail
--   count       BIGINT          requests that have it
--   p50_ms      DOUBLE   ms     median over the requests that have it
--   p90_ms      DOUBLE   ms     90th percentile
--   p99_ms      DOUBLE   ms     99th percentile
--   total_ms    DOUBLE   ms     sum over requests
--   basis       VARCHAR         the weakest among its values
--   level       VARCHAR         evidence level
WITH durations AS (
  SELECT
    c.deployment, c.request, i.detail,
    sum(i.duration_ns) AS duration_ns, CAST(sum(i.duration_ns) AS DOUBLE) / 1e6 AS duration_ms,
    max(list_position(
      ['measured', 'reported', 'placed', 'inferred', 'upper_bound'], i.basis
    )) AS weakest
  FROM intervals i
  JOIN legs l ON l.leg = i.leg
  JOIN counted_requests c ON c.request = l.request
  WHERE i.start_ns IS NULL AND i.end_ns IS NULL AND i.duration_ns IS NOT NULL
  GROUP BY c.deployment, c.request, i.detail
)
SELECT
  deployment,
  detail,
  count(*) AS count,
  quantile_cont(duration_ms, 0.5) AS p50_ms,
  quantile_cont(duration_ms, 0.9) AS p90_ms,
  quantile_cont(duration_ms, 0.99) AS p99_ms,
  CAST(sum(duration_ns) AS DOUBLE) / 1e6 AS total_ms,
  ['measured', 'reported', 'placed', 'inferred', 'upper_bound'][max(weakest)] AS basis,
  'C' AS level
FROM durations
GROUP BY deployment, detail
