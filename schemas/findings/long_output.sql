-- long_output: whether the length of the answers explains how long requests take.
--
-- A row appears when output tokens explain at least min_explained_ratio of the variance of the
-- whole duration (r squared of a line through at least 10 requests). That is a statement about the
-- workload, not a fault: severity is always info. A correlation, not a cause: long prompts and long
-- answers may come together (prompt_explained_ratio). Level C: durations do.
--
-- grain:   one row per deployment
-- needs:   request_marks, deployment_sources
-- params:
--   min_explained_ratio  0.5  half of the variance: more than all else together
-- columns:
--   deployment              VARCHAR    deployment
--   severity                VARCHAR    info
--   cost_s                  DOUBLE     s  NULL: long answers are no loss
--   level                   VARCHAR    C
--   value                   DOUBLE     duration for each output token more (slope)
--   unit                    VARCHAR    ms/token
--   interval_low            DOUBLE     95 % interval of the slope, lower end
--   interval_high           DOUBLE     upper end
--   share                   DOUBLE     variance of the duration that output tokens explain (r squared)
--   requests                BIGINT     requests behind it
--   workers                 VARCHAR[]  empty
--   culprits                STRUCT(request VARCHAR, "value" DOUBLE)[]  the five longest answers; value: output tokens
--   sources                 VARCHAR[]  files that the requests come from
--   output_p50_tokens       DOUBLE     tokens  median answer
--   output_p95_tokens       DOUBLE     tokens  95th percentile
--   e2e_p50_ms              DOUBLE     ms  median duration
--   prompt_explained_ratio  DOUBLE     1  variance of the duration that prompt tokens explain; NULL unknown
--   long_outputs            BIGINT     requests with a long answer (request_marks)
--   long_output_time_ratio  DOUBLE     1  their share of the sum of all durations
WITH finished_request AS (
  SELECT m.*
  FROM request_marks() AS m
  WHERE m.counted AND m.e2e_ms IS NOT NULL AND m.output_tokens IS NOT NULL
),
fitted AS (
  SELECT deployment, count(*) AS n,
    CASE WHEN stddev_pop(output_tokens) > 0 AND stddev_pop(e2e_ms) > 0
      THEN corr(e2e_ms, output_tokens) END AS r,
    CASE WHEN stddev_pop(output_tokens) > 0 THEN regr_slope(e2e_ms, output_tokens) END AS slope,
    stddev_samp(e2e_ms) AS e2e_sd, stddev_samp(output_tokens) AS output_sd,
    CASE WHEN stddev_pop(prompt_tokens) > 0 AND stddev_pop(e2e_ms) > 0
      THEN corr(e2e_ms, prompt_tokens) ** 2 END AS prompt_explained_ratio,
    quantile_cont(output_tokens, 0.5) AS output_p50_tokens,
    quantile_cont(output_tokens, 0.95) AS output_p95_tokens,
    quantile_cont(e2e_ms, 0.5) AS e2e_p50_ms,
    count(*) FILTER (long_output) AS long_outputs,
    coalesce(sum(e2e_ms) FILTER (long_output), 0) / sum(e2e_ms) AS long_output_time_ratio,
    min_by({'request': request, 'value': output_tokens::DOUBLE}, (-output_tokens, request), 5)
      FILTER (output_tokens IS NOT NULL) AS culprits
  FROM finished_request
  GROUP BY deployment
  HAVING count(*) >= 10
)
SELECT f.deployment, 'info' AS severity, NULL::DOUBLE AS cost_s, 'C' AS level,
  slope AS value, 'ms/token' AS unit,
  slope - 1.96 * sqrt((1 - r * r) / (n - 2)) * e2e_sd / output_sd AS interval_low,
  slope + 1.96 * sqrt((1 - r * r) / (n - 2)) * e2e_sd / output_sd AS interval_high,
  r * r AS share,
  n AS requests,
  []::VARCHAR[] AS workers,
  culprits,
  coalesce(s.paths, []) AS sources,
  output_p50_tokens, output_p95_tokens, e2e_p50_ms, prompt_explained_ratio, long_outputs,
  long_output_time_ratio
FROM fitted AS f
LEFT JOIN deployment_sources AS s ON s.deployment = f.deployment AND s.evidence = 'requests'
WHERE r > 0 AND r * r >= min_explained_ratio
