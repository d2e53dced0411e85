-- distserve_breakdown: the five stages of distserve_stages over a deployment, with both ways to make a share.
--
-- DistServe's published breakdown is the mean over requests of each request's percentages
-- (mean_of_shares_ratio), which weighs short requests as much as long ones; the share of the summed time
-- (share_of_sum_ratio) answers where the time went. The two differ; a comparison must use one.
--
-- grain:   one row per (deployment, stage)
-- needs:   distserve_stages
-- columns:
--   deployment            VARCHAR  deployment
--   stage                 BIGINT   1 to 5
--   name                  VARCHAR  prefill queuing, prefill execution, transmission, decoding queuing or decoding execution
--   requests              BIGINT   requests of which all seven instants are known
--   total_s               DOUBLE   s   sum
--   p50_ms                DOUBLE   ms  median
--   p99_ms                DOUBLE   ms  99th percentile
--   share_of_sum_ratio    DOUBLE   1   total over the sum of all five stages
--   mean_of_shares_ratio  DOUBLE   1   mean over requests of the stage's share of the request, as published
WITH stage AS (
  SELECT deployment, request,
    unnest([
      {'stage': 1, 'name': 'prefill queuing', 'ms': prefill_queuing_ms},
      {'stage': 2, 'name': 'prefill execution', 'ms': prefill_execution_ms},
      {'stage': 3, 'name': 'transmission', 'ms': transmission_ms},
      {'stage': 4, 'name': 'decoding queuing', 'ms': decoding_queuing_ms},
      {'stage': 5, 'name': 'decoding execution', 'ms': decoding_execution_ms}
    ], recursive := true),
    (decoding_end_ns - issued_ns) / 1e6 AS whole_ms
  FROM distserve_stages
)
SELECT deployment, stage::BIGINT AS stage, any_value(name) AS name, count(*) AS requests,
  sum(ms) / 1e3 AS total_s, quantile_cont(ms, 0.5) AS p50_ms, quantile_cont(ms, 0.99) AS p99_ms,
  sum(ms) / nullif(sum(whole_ms), 0) AS share_of_sum_ratio,
  avg(ms / nullif(whole_ms, 0)) AS mean_of_shares_ratio
FROM stage
GROUP BY deployment, stage
