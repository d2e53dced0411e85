-- slow_stream: which answers came slowly after their first token, and how much of the streams stood
-- still.
--
-- Two signs: requests whose mean time per output token is out of the run's ordinary (request_marks)
-- or above the limit given; and stalls: the part of gaps between emissions that exceeds 3 x the
-- median gap and the median by 20 ms (nobody sees less, and network and event loops cause it), or
-- slo_itl_ms. A mean hides stalls, a median hides them wholly, so both are looked at. Gaps are
-- those of the outermost observer that has any; per chunk they are no token gaps and are said to be
-- chunks. A row appears when at least min_slow_ratio of the requests are slow and (without a limit)
-- cost 1 % of the stream time, or stalls hold at least min_stall_ratio of it. Level B where gaps
-- are known or the instants of first token and end are, else C. Severity: warning when a limit is
-- broken or at least 10 % of stream time is lost; info otherwise.
--
-- grain:   one row per deployment
-- needs:   request_marks, value_quartiles, token_dependence, gap_summary, gap_lengths, deployment_sources, worker_labels
-- params:
--   slo_tpot_ms      NULL  limit for the mean time per output token; NULL: relative to the run
--   slo_itl_ms       NULL  a gap above it is a stall; NULL: relative to the median gap
--   min_slow_ratio   0.01  a smaller part of the requests is the tail that every run has
--   min_stall_ratio  0.05  below a twentieth of the stream time, readers do not see it
-- columns:
--   deployment        VARCHAR    deployment
--   severity          VARCHAR    warning or info
--   cost_s            DOUBLE     s  the greater of slow_s and stall_s
--   level             VARCHAR    evidence level B or C
--   value             DOUBLE     95th percentile of the time per output token
--   unit              VARCHAR    ms
--   interval_low      DOUBLE     95 % interval of value from order statistics, lower end
--   interval_high     DOUBLE     upper end
--   share             DOUBLE     cost_s over the time between first tokens and ends
--   requests          BIGINT     requests with a slow stream
--   workers           VARCHAR[]  workers that decoded the slow requests
--   culprits          STRUCT(request VARCHAR, "value" DOUBLE)[]  the five slowest; value: ms per output token
--   sources           VARCHAR[]  files that the requests come from
--   measured          BIGINT     requests whose time per output token is known
--   limit_ms          DOUBLE     ms  above it a stream is slow
--   limit_given       BOOLEAN    the limit is the user's
--   typical_ms        DOUBLE     ms  typical time per output token (request_marks)
--   tpot_p50_ms       DOUBLE     ms  median
--   tpot_p99_ms       DOUBLE     ms  99th percentile
--   slow_s            DOUBLE     s  time of the slow requests above the limit given, else above the typical
--   gaps              BIGINT     gaps between emissions; NULL without streams
--   gap_p50_ms        DOUBLE     ms  median gap
--   gap_p99_ms        DOUBLE     ms  99th percentile
--   gap_max_ms        DOUBLE     ms  longest gap
--   stall_limit_ms    DOUBLE     ms  a gap above it is a stall; NULL without gaps
--   stall_s           DOUBLE     s  sum of what gaps exceed the stall limit by
--   stall_ratio       DOUBLE     1  stall_s over the sum of gaps
--   gap_observer      VARCHAR    who saw the gaps
--   gap_emission      VARCHAR    token, chunk or mixed
--   output_rho        DOUBLE     Spearman correlation of time per output token with output tokens; NULL below 10 pairs
--   output_rho_low    DOUBLE     95 % interval, lower end
--   output_rho_high   DOUBLE     upper end
--   output_pairs      BIGINT     requests behind the correlation (a sample of about 10000 where there are more)
--   slow_long_output  BIGINT     slow requests with a long answer (request_marks)
--   output_driven     BOOLEAN    the time per token clearly grows with the answer: as prompt_driven in slow_first_token; NULL cannot tell
--   models            BIGINT     models that were judged each by itself; 1 where there is only one
--   other_long_output  BIGINT    other requests with a long answer
--   slow_worker       VARCHAR    the worker that decoded at least half of the slow ones, far more than its share of the requests would give (4 standard deviations); NULL where none stands out
--   slow_worker_label  VARCHAR   its short name
--   slow_worker_slow  BIGINT     slow requests that it decoded
--   slow_worker_requests  BIGINT  requests that it decoded
--   other_slow_ratio  DOUBLE     1  share of slow requests on the other workers
WITH marked_request AS (
  SELECT m.*, slo_tpot_ms IS NOT NULL AS limit_given,
    (m.tpot_ms - CASE WHEN slo_tpot_ms IS NULL THEN m.tpot_typical_ms ELSE m.tpot_limit_ms END)
      * coalesce(m.output_tokens - 1, (m.e2e_ms - m.ttft_ms) / nullif(m.tpot_ms, 0)) AS excess_ms,
    coalesce(m.e2e_ms - m.ttft_ms, m.tpot_ms * (m.output_tokens - 1)) AS stream_ms
  FROM request_marks(slo_tpot_ms := slo_tpot_ms) AS m
  WHERE m.counted AND m.tpot_ms IS NOT NULL AND coalesce(m.output_tokens, 5) >= 5
),
outermost AS (
  SELECT deployment, observer AS gap_observer,
    CASE WHEN min(emission) = max(emission) THEN min(emission) ELSE 'mixed' END AS gap_emission,
    sum(count)::BIGINT AS gaps, sum(total_ms) AS gap_sum_ms, max(max_ms) AS gap_max_ms,
    arg_max(p50_ms, count) AS gap_p50_ms, arg_max(p99_ms, count) AS gap_p99_ms
  FROM gap_summary
  GROUP BY deployment, observer
  QUALIFY row_number() OVER (
    PARTITION BY deployment
    ORDER BY array_position(['client', 'gateway', 'router', 'frontend', 'engine'], observer)
  ) = 1
),
gap_length AS (
  SELECT g.deployment, g.gap_us / 1e3 AS gap_ms, g.count AS n
  FROM gap_lengths AS g
  JOIN outermost AS o ON o.deployment = g.deployment AND o.gap_observer = g.observer
),
gap_limit AS (
  -- chunks that arrive together make the median meaningless
  SELECT *, CASE WHEN slo_itl_ms IS NOT NULL THEN slo_itl_ms::DOUBLE
    WHEN gap_p50_ms > 0.5 THEN greatest(3 * gap_p50_ms, gap_p50_ms + 20) END AS stall_limit_ms
  FROM outermost
),
stall_summary AS (
  SELECT g.deployment, any_value(o.stall_limit_ms) AS stall_limit_ms,
    sum(g.n * greatest(0, g.gap_ms - o.stall_limit_ms)) / 1e3 AS stall_s
  FROM gap_length AS g
  JOIN gap_limit AS o ON o.deployment = g.deployment
  WHERE o.stall_limit_ms IS NOT NULL
  GROUP BY g.deployment
),
deployment_pace AS (
  SELECT deployment,
    count(*) AS measured,
    count(*) FILTER (slow_stream) AS slow,
    any_value(limit_given) AS limit_given,
    CASE WHEN min(tpot_limit_ms) = max(tpot_limit_ms) THEN min(tpot_limit_ms) END AS limit_ms,
    min(tpot_typical_ms) AS typical_ms,
    quantile_cont(tpot_ms, [0.5, 0.95, 0.99]) AS quantiles_ms,
    sum(stream_ms) / 1e3 AS stream_s,
    coalesce(sum(excess_ms) FILTER (slow_stream), 0) / 1e3 AS slow_s,
    list(tpot_ms ORDER BY tpot_ms) AS sorted_ms,
    bool_and(first_token_ns IS NOT NULL AND end_ns IS NOT NULL) AS instants_known,
    count(*) FILTER (slow_stream AND long_output) AS slow_long_output,
    count(*) FILTER (slow_stream IS NOT TRUE AND long_output) AS other_long_output,
    count(output_tokens) AS outputs_known,
    list_sort(list_distinct(list(decode_worker) FILTER (
      slow_stream AND decode_worker IS NOT NULL
    ))) AS workers,
    min_by({'request': request, 'value': tpot_ms}, (-tpot_ms, request), 5) FILTER (slow_stream) AS culprits
  FROM marked_request
  GROUP BY deployment
),
answering AS (
  -- models that such a pace is known of; none is named where there is only one
  SELECT deployment, greatest(count(model), 1) AS models
  FROM value_quartiles
  WHERE measure = 'tpot' AND n > 0
  GROUP BY deployment
),
worker_pace AS (
  SELECT deployment, decode_worker AS worker, count(*) AS n,
    count(*) FILTER (slow_stream) AS slow_n
  FROM marked_request
  WHERE decode_worker IS NOT NULL
  GROUP BY deployment, decode_worker
),
stands_out AS (
  SELECT *, sum(n) OVER (PARTITION BY deployment) AS all_n,
    sum(slow_n) OVER (PARTITION BY deployment) AS all_slow
  FROM worker_pace
  QUALIFY row_number() OVER (PARTITION BY deployment ORDER BY slow_n DESC, worker) = 1
    AND slow_n >= 0.5 * all_slow AND all_slow BETWEEN 1 AND all_n - 1 AND n < all_n
    AND slow_n - n * all_slow / all_n
      > 4 * sqrt(n * (all_slow / all_n) * (1 - all_slow / all_n))
),
judged AS (
  SELECT p.* EXCLUDE (typical_ms), models, CASE WHEN models < 2 THEN typical_ms END AS typical_ms,
    quantiles_ms[1] AS tpot_p50_ms, quantiles_ms[2] AS tpot_p95_ms,
    quantiles_ms[3] AS tpot_p99_ms, g.* EXCLUDE (deployment, gap_sum_ms), s.stall_limit_ms, s.stall_s,
    s.stall_s * 1e3 / nullif(g.gap_sum_ms, 0) AS stall_ratio,
    o.rho AS output_rho, o.rho_low AS output_rho_low, o.rho_high AS output_rho_high,
    o.pairs AS output_pairs,
    CASE WHEN outputs_known >= 10 AND slow >= 2 AND slow_long_output >= 0.8 * slow
      AND other_long_output <= 0.2 * (measured - slow) THEN true
      ELSE o.follows END AS output_driven,
    greatest(p.slow_s, s.stall_s) AS cost_s
  FROM deployment_pace AS p
  JOIN answering AS a ON a.deployment IS NOT DISTINCT FROM p.deployment
  LEFT JOIN outermost AS g ON g.deployment IS NOT DISTINCT FROM p.deployment
  LEFT JOIN stall_summary AS s ON s.deployment IS NOT DISTINCT FROM p.deployment
  LEFT JOIN token_dependence AS o
    ON o.deployment IS NOT DISTINCT FROM p.deployment AND o.measure = 'tpot'
)
SELECT j.deployment,
  CASE WHEN (limit_given AND slow > 0) OR cost_s >= 0.1 * stream_s OR stall_ratio >= 0.1
    THEN 'warning' ELSE 'info' END AS severity,
  cost_s,
  CASE WHEN gaps IS NOT NULL OR instants_known THEN 'B' ELSE 'C' END AS level,
  tpot_p95_ms AS value,
  'ms' AS unit,
  -- the ranks that bracket the 95th percentile with 95 % confidence, whatever the distribution
  sorted_ms[greatest(1, floor(measured * 0.95 - 1.96 * sqrt(measured * 0.0475)))::BIGINT]
    AS interval_low,
  sorted_ms[least(measured, ceil(measured * 0.95 + 1.96 * sqrt(measured * 0.0475)) + 1)::BIGINT]
    AS interval_high,
  cost_s / nullif(stream_s, 0) AS share,
  slow AS requests,
  coalesce(workers, []) AS workers,
  coalesce(culprits, []) AS culprits,
  coalesce(s.paths, []) AS sources,
  measured, limit_ms, limit_given, typical_ms, tpot_p50_ms, tpot_p99_ms, slow_s, gaps, gap_p50_ms,
  gap_p99_ms, gap_max_ms, stall_limit_ms, stall_s, stall_ratio, gap_observer, gap_emission,
  output_rho, output_rho_low, output_rho_high, output_pairs, slow_long_output,
  output_driven, models, other_long_output,
  w.worker AS slow_worker, b.label AS slow_worker_label, w.slow_n AS slow_worker_slow,
  w.n AS slow_worker_requests,
  ((w.all_slow - w.slow_n) / (w.all_n - w.n))::DOUBLE AS other_slow_ratio
FROM judged AS j
LEFT JOIN stands_out AS w ON w.deployment = j.deployment
LEFT JOIN worker_labels AS b ON b.worker = w.worker
LEFT JOIN deployment_sources AS s ON s.deployment = j.deployment AND s.evidence = 'requests'
WHERE stall_ratio >= min_stall_ratio
  OR (slow > 0 AND slow >= min_slow_ratio * measured AND (limit_given OR cost_s >= 0.01 * stream_s))
