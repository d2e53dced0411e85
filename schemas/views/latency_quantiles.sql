-- latency_quantiles: latency of the counted requests by share: which time each share of them stayed below.
--
-- From 1 to 99 per cent, as far as at least one request lies beyond; no lines are drawn from fewer than
-- five requests.
--
-- grain:   one row per (deployment, metric, share)
-- needs:   request_values
-- columns:
--   deployment   VARCHAR     deployment
--   metric       VARCHAR     ttft_ms, tpot_ms or e2e_ms
--   share_ratio  DOUBLE   1  share of the requests
--   value_ms     DOUBLE   ms that many stayed at or below it
--   requests     BIGINT      requests of which it is known
WITH value AS (
  SELECT deployment, unnest([
      {'metric': 'ttft_ms', 'ms': ttft_ms}, {'metric': 'tpot_ms', 'ms': tpot_ms},
      {'metric': 'e2e_ms', 'ms': e2e_ms}
    ], recursive := true)
  FROM request_values
  WHERE counted
),
curve AS (
  SELECT deployment, metric, count(ms) AS requests,
    quantile_cont(ms, [
      0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75,
      0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99
    ]) AS ms
  FROM value
  WHERE ms IS NOT NULL
  GROUP BY deployment, metric
  HAVING count(ms) >= 5
),
point AS (
  SELECT deployment, metric, requests, unnest(ms) AS value_ms,
    unnest([
      0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75,
      0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99
    ])::DOUBLE AS share_ratio
  FROM curve
)
SELECT deployment, metric, share_ratio, value_ms, requests
FROM point
WHERE least(share_ratio, 1 - share_ratio) * requests >= 0.999
ORDER BY deployment, metric, share_ratio
