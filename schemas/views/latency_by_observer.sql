-- latency_by_observer: latency of the counted requests as each observer saw it; observers are never mixed.
--
-- grain:   one row per (deployment, observer, metric); inter-token latency also per kind of emission
-- needs:   observations, counted_requests, deployments, gap_summary
-- columns:
--   deployment  VARCHAR   deployment
--   observer    VARCHAR   client, gateway, router, frontend or engine
--   metric      VARCHAR   ttft_ms, e2e_ms, tpot_ms or itl_ms
--   headline    BOOLEAN   this observer is the deployment's headline
--   definition  VARCHAR   what the metric means here
--   basis       VARCHAR   the weakest among the values: measured, reported, placed, inferred, upper_bound
--   level       VARCHAR   evidence level, the weakest among the values
--   count       BIGINT    values; requests without one are not counted as 0 (gaps for itl_ms)
--   mean        DOUBLE    milliseconds, like the quantiles (linear interpolation)
--   p50         DOUBLE    median
--   p90         DOUBLE    90th percentile
--   p95         DOUBLE    95th percentile
--   p99         DOUBLE    99th percentile
--   max         DOUBLE    largest
WITH observed AS (
  SELECT o.*
  FROM observations o
  JOIN counted_requests c ON c.request = o.request
),
metrics AS (
  SELECT deployment, observer, 'ttft_ms' AS metric, ttft_ms AS value, definition, basis, level
  FROM observed
  UNION ALL
  SELECT
    deployment, observer, 'e2e_ms', e2e_ms,
    'start to end of the request as the ' || observer || ' saw it', basis, level
  FROM observed
  UNION ALL
  SELECT
    deployment, observer, 'tpot_ms', tpot_ms,
    'time after the first token / (output tokens - 1); mean over requests', basis, level
  FROM observed
),
summaries AS (
  SELECT
    deployment,
    observer,
    metric,
    string_agg(DISTINCT definition, '; ' ORDER BY definition) AS definition,
    ['measured', 'reported', 'placed', 'inferred', 'upper_bound'][max(
      list_position(['measured', 'reported', 'placed', 'inferred', 'upper_bound'], basis)
    )] AS basis,
    max(level) AS level,
    count(*) AS count,
    avg(value) AS mean,
    quantile_cont(value, [0.5, 0.9, 0.95, 0.99]) AS quantiles,
    max(value) AS max
  FROM metrics
  WHERE value IS NOT NULL
  GROUP BY deployment, observer, metric
),
latencies AS (
  SELECT
    deployment, observer, metric, definition, basis, level, count, mean,
    quantiles[1] AS p50, quantiles[2] AS p90, quantiles[3] AS p95, quantiles[4] AS p99, max
  FROM summaries
  UNION ALL
  SELECT
    deployment, observer, 'itl_ms',
    CASE emission
      WHEN 'token' THEN 'gap between two tokens'
      WHEN 'chunk' THEN 'gap between two chunks; a chunk may hold several tokens'
      ELSE 'gap between two emissions; whether one holds several tokens is unknown'
    END,
    'measured', 'B', count, mean_ms, p50_ms, p90_ms, p95_ms, p99_ms, max_ms
  FROM gap_summary
)
SELECT
  l.deployment,
  l.observer,
  l.metric,
  coalesce(l.observer = d.headline_observer, false) AS headline,
  l.definition,
  l.basis,
  l.level,
  l.count,
  l.mean,
  l.p50,
  l.p90,
  l.p95,
  l.p99,
  l.max
FROM latencies l
LEFT JOIN deployments d ON d.deployment = l.deployment
