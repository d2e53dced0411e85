-- latency_by_observer: latency of the counted requests as each observer saw it; observers are never mixed.
--
-- grain:   one row per (deployment, observer, metric); inter-token latency also per kind of emission
-- needs:   observations, request_values, deployments, legs, facts, gap_summary
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
--   resolution_ms  DOUBLE  ms  the values are differences of stamps no finer than this (said from 10 ms on); NULL finer, or not from stamps
-- Each observation is of a request; those left out are few as a rule, and looked up sooner than all others.
WITH left_out AS (
  SELECT request
  FROM request_values
  WHERE NOT counted
),
observed AS NOT MATERIALIZED (
  SELECT o.*
  FROM observations o
  ANTI JOIN left_out l ON l.request = o.request
  WHERE o.request IS NOT NULL
),
-- How the values were found: few combinations of texts.
kinds AS (
  SELECT
    deployment, observer, definition, level, coalesce(tpot_stated, false) AS stated,
    list_position(['measured', 'reported', 'placed', 'inferred', 'upper_bound'], basis) AS weakness,
    count(ttft_ms) > 0 AS ttft, count(e2e_ms) > 0 AS e2e, count(tpot_ms) > 0 AS tpot
  FROM observed
  GROUP BY ALL
),
found AS (
  SELECT
    deployment, observer,
    nullif(array_to_string(list_sort(list_distinct(list(definition) FILTER (ttft))), '; '), '')
      AS ttft_definition,
    max(weakness) FILTER (ttft) AS ttft_weakness, max(level) FILTER (ttft) AS ttft_level,
    max(weakness) FILTER (e2e) AS e2e_weakness, max(level) FILTER (e2e) AS e2e_level,
    -- a source's own figure is reported, whatever instants stand beside it
    max(CASE WHEN stated THEN greatest(weakness, 2) ELSE weakness END) FILTER (tpot)
      AS tpot_weakness,
    max(CASE WHEN stated THEN 'C' ELSE level END) FILTER (tpot) AS tpot_level,
    bool_or(stated) FILTER (tpot) AS tpot_stated, bool_or(NOT stated) FILTER (tpot) AS tpot_computed
  FROM kinds
  GROUP BY deployment, observer
),
rated AS (
  SELECT DISTINCT deployment, observer
  FROM legs
  WHERE source IN (SELECT source FROM facts WHERE key = 'pace_from_rate')
),
distributions AS (
  SELECT
    deployment, observer,
    count(ttft_ms) AS ttfts, avg(ttft_ms) AS ttft_mean, max(ttft_ms) AS ttft_max,
    quantile_cont(ttft_ms, [0.5, 0.9, 0.95, 0.99]) AS ttft_quantiles,
    count(e2e_ms) AS e2es, avg(e2e_ms) AS e2e_mean, max(e2e_ms) AS e2e_max,
    quantile_cont(e2e_ms, [0.5, 0.9, 0.95, 0.99]) AS e2e_quantiles,
    count(tpot_ms) AS tpots, avg(tpot_ms) AS tpot_mean, max(tpot_ms) AS tpot_max,
    quantile_cont(tpot_ms, [0.5, 0.9, 0.95, 0.99]) AS tpot_quantiles,
    -- durations that stand beside coarse stamps are finer than these: only whole multiples come from them
    max(resolution_ns) FILTER (resolution_ns >= 10000000) / 1e6 AS coarse_ms,
    bool_and(coalesce(resolution_ns >= 10000000
      AND CAST(round(ttft_ms * 1e6) AS BIGINT) % resolution_ns = 0, false))
      FILTER (ttft_ms IS NOT NULL) AS ttft_coarse,
    bool_and(coalesce(resolution_ns >= 10000000
      AND CAST(round(e2e_ms * 1e6) AS BIGINT) % resolution_ns = 0, false))
      FILTER (e2e_ms IS NOT NULL) AS e2e_coarse
  FROM observed
  GROUP BY deployment, observer
),
summaries AS (
  SELECT
    d.deployment, d.observer,
    unnest([
      {metric: 'ttft_ms', definition: ttft_definition, weakness: ttft_weakness, level: ttft_level,
       count: ttfts, mean: ttft_mean, quantiles: ttft_quantiles, max: ttft_max,
       resolution_ms: CASE WHEN ttft_coarse THEN coarse_ms END},
      {metric: 'e2e_ms',
       definition: 'start to end of the request as the ' || d.observer || ' saw it',
       weakness: e2e_weakness, level: e2e_level,
       count: e2es, mean: e2e_mean, quantiles: e2e_quantiles, max: e2e_max,
       resolution_ms: CASE WHEN e2e_coarse THEN coarse_ms END},
      {metric: 'tpot_ms',
       definition: concat_ws('; ',
         CASE WHEN tpot_computed
           THEN 'time after the first token / (output tokens - 1); mean over requests' END,
         CASE WHEN tpot_stated AND r.observer IS NULL
           THEN 'mean time per token as the source states it (its formula is not known)' END,
         CASE WHEN r.observer IS NOT NULL
           THEN 'inverse of the tokens per second that the source states'
             || ' (the wait for the first token may be in it)' END),
       weakness: tpot_weakness, level: tpot_level,
       count: tpots, mean: tpot_mean, quantiles: tpot_quantiles, max: tpot_max,
       resolution_ms: CASE WHEN (ttft_coarse OR e2e_coarse) AND NOT tpot_stated THEN coarse_ms END}
    ], recursive := true)
  FROM distributions d
  JOIN found f
    ON f.deployment IS NOT DISTINCT FROM d.deployment AND f.observer IS NOT DISTINCT FROM d.observer
  LEFT JOIN rated r ON r.deployment IS NOT DISTINCT FROM d.deployment AND r.observer = d.observer
),
latencies AS (
  SELECT
    deployment, observer, metric, definition,
    ['measured', 'reported', 'placed', 'inferred', 'upper_bound'][weakness] AS basis,
    level, count, mean,
    quantiles[1] AS p50, quantiles[2] AS p90, quantiles[3] AS p95, quantiles[4] AS p99, max,
    resolution_ms
  FROM summaries
  WHERE count > 0
  UNION ALL
  SELECT
    deployment, observer, 'itl_ms',
    CASE emission
      WHEN 'token' THEN 'gap between two tokens'
      WHEN 'chunk' THEN 'gap between two chunks; a chunk may hold several tokens'
      ELSE 'gap between two emissions; whether one holds several tokens is unknown'
    END,
    'measured', 'B', count, mean_ms, p50_ms, p90_ms, p95_ms, p99_ms, max_ms, NULL
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
  l.max,
  l.resolution_ms
FROM latencies l
LEFT JOIN deployments d ON d.deployment = l.deployment
