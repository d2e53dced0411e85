-- slow_first_token: which requests waited long for their first token, in which phase, and whether
-- their prompts explain it.
--
-- Slow: marked by request_marks (against the run's own typical TTFT), or above the limit that the
-- user gives. TTFT clearly follows the prompt when Spearman >= 0.5 with its lower bound above 0.3,
-- or when of at least 10 requests 4 in 5 slow ones have a long prompt and at most 1 in 5 of the
-- others (two groups: ranks inside the groups are noise). A row appears when at least
-- min_slow_ratio of the requests are slow and (without a limit) hold 1 % of the seconds before
-- first tokens in excess, or when TTFT clearly follows the prompt and spreads (p95 >= 2 x p50).
-- Level B, or C where any TTFT is a duration without instants. Severity: warning when a limit is
-- broken or the slow ones hold >= 10 % of all seconds before a first token; info otherwise. Never
-- critical: slow is not wrong.
--
-- grain:   one row per deployment
-- needs:   request_marks, value_quartiles, token_dependence, phase_sums, phase_totals, deployment_sources
-- params:
--   slo_ttft_ms     NULL  limit for the first token; NULL: relative to the run
--   min_slow_ratio  0.01  a smaller part of the requests is the tail that every run has
-- columns:
--   deployment        VARCHAR    deployment
--   severity          VARCHAR    warning or info
--   cost_s            DOUBLE     s  seconds of the slow requests' TTFT above the limit given, else above the typical TTFT
--   level             VARCHAR    evidence level B or C
--   value             DOUBLE     95th percentile of TTFT
--   unit              VARCHAR    ms
--   interval_low      DOUBLE     95 % interval of value from order statistics, lower end
--   interval_high     DOUBLE     upper end
--   share             DOUBLE     cost_s over the sum of all TTFT
--   requests          BIGINT     requests with a slow first token
--   workers           VARCHAR[]  workers that computed the slow requests' prompts
--   culprits          STRUCT(request VARCHAR, "value" DOUBLE)[]  the five slowest; value: TTFT in ms
--   sources           VARCHAR[]  files that the requests come from
--   measured          BIGINT     requests whose TTFT is known
--   limit_ms          DOUBLE     ms  above it a first token is slow
--   limit_given       BOOLEAN    the limit is the user's
--   typical_ms        DOUBLE     ms  typical TTFT (request_marks)
--   ttft_p50_ms       DOUBLE     ms  median TTFT
--   ttft_p90_ms       DOUBLE     ms  90th percentile
--   ttft_p99_ms       DOUBLE     ms  99th percentile
--   top_phase         VARCHAR    phase with most of the slow requests' TTFT; NULL without phases
--   top_phase_ratio   DOUBLE     1  its share of their TTFT
--   grown_phase       VARCHAR    phase that explains most of the difference between slow and other requests
--   grown_ratio       DOUBLE     1  its share of that difference
--   queue_apart       BOOLEAN    some phase tells the wait for the engine apart from the prefill; false: it may be in the prefill
--   bounded_phases    VARCHAR[]  phases whose time is mainly an upper bound: the wait may hold other things too
--   prompt_rho        DOUBLE     Spearman correlation of TTFT with uncached prompt tokens; NULL below 10 pairs
--   prompt_rho_low    DOUBLE     95 % interval, lower end
--   prompt_rho_high   DOUBLE     upper end
--   prompt_pairs      BIGINT     requests behind the correlation (a sample of about 10000 where there are more)
--   prompt_slope_ms   DOUBLE     ms  TTFT for each 1000 uncached prompt tokens more (least squares)
--   prompt_driven     BOOLEAN    TTFT clearly follows the prompt; false: surely not closely; NULL cannot tell
--   cached_known      BOOLEAN    cached tokens are known for 9 in 10 requests; else whole prompts stand for uncached ones
--   slow_long_input   BIGINT     slow requests with a long prompt (request_marks)
--   other_long_input  BIGINT     other requests with a long prompt
--   models            BIGINT     models that were judged each by itself; 1 where there is only one
--   prompts_known     BIGINT     of the measured requests, those whose prompt tokens are known
--   slow_prompt_tokens  DOUBLE  tokens  median prompt of the slow requests; NULL unknown
--   other_prompt_tokens  DOUBLE  tokens  median prompt of the others; NULL unknown
--   cached_ratio      DOUBLE     1  cached tokens over prompt tokens, where both are known; NULL unknown
--   split             BOOLEAN    some requests decoded on another worker than their prompt was computed on
WITH counted_request AS NOT MATERIALIZED (
  SELECT *
  FROM request_marks(slo_ttft_ms := slo_ttft_ms)
  WHERE counted
),
phase_total AS (
  SELECT deployment, phase, CAST(sum(requests) AS BIGINT) AS n, sum(ttft_part_ns) AS ttft_part_ns,
    sum(bound_ns) > 0.5 * sum(duration_ns) AS bounded
  FROM phase_totals
  WHERE counted
  GROUP BY deployment, phase
),
phase_apart AS (
  -- of those that are slow or of which that is not known, as a rule few
  SELECT p.deployment, p.phase, count(*) AS n, bool_or(m.told) AS told,
    coalesce(sum(p.ttft_part_ns), 0) AS ttft_part_ns,
    coalesce(sum(p.ttft_part_ns) FILTER (m.slow_first_token), 0) AS slow_ns,
    coalesce(sum(p.ttft_part_ns) FILTER (NOT m.slow_first_token), 0) AS other_ns
  FROM phase_sums AS p
  JOIN (
    SELECT request, slow_first_token, ttft_ms IS NOT NULL AND first_token_ns IS NOT NULL AS told
    FROM counted_request
    WHERE slow_first_token IS NOT FALSE OR ttft_ms IS NULL OR first_token_ns IS NULL
  ) AS m ON m.request = p.request
  GROUP BY p.deployment, p.phase
),
phase_parts AS (
  -- of each phase: the part before the first token, and how much of all of it is an upper bound
  SELECT t.deployment, t.phase, a.n IS NULL OR t.n > a.n OR a.told AS told,
    coalesce(a.slow_ns, 0) / 1e6 AS slow_ms,
    (coalesce(t.ttft_part_ns, 0) - coalesce(a.ttft_part_ns - a.other_ns, 0)) / 1e6 AS other_ms,
    t.bounded
  FROM phase_total AS t
  LEFT JOIN phase_apart AS a
    ON a.deployment IS NOT DISTINCT FROM t.deployment AND a.phase = t.phase
),
deployment_latency AS (
  SELECT deployment,
    count(*) AS measured,
    count(*) FILTER (slow_first_token) AS slow,
    count(*) FILTER (slow_first_token AND first_token_ns IS NOT NULL) AS slow_timed,
    count(*) FILTER (NOT slow_first_token AND first_token_ns IS NOT NULL) AS other_timed,
    CASE WHEN min(ttft_limit_ms) = max(ttft_limit_ms) THEN min(ttft_limit_ms) END AS limit_ms,
    min(ttft_typical_ms) AS typical_ms,
    quantile_cont(prompt_tokens, 0.5) FILTER (slow_first_token) AS slow_prompt_tokens,
    quantile_cont(prompt_tokens, 0.5) FILTER (slow_first_token IS NOT TRUE) AS other_prompt_tokens,
    sum(cached_tokens) / nullif(sum(prompt_tokens) FILTER (cached_tokens IS NOT NULL), 0)
      AS cached_ratio,
    quantile_cont(ttft_ms, [0.5, 0.9, 0.95, 0.99]) AS quantiles_ms,
    sum(ttft_ms) AS ttft_sum_ms,
    slo_ttft_ms IS NOT NULL AS limit_given,
    sum(ttft_ms - CASE WHEN slo_ttft_ms IS NULL THEN ttft_typical_ms ELSE ttft_limit_ms END)
      FILTER (slow_first_token) / 1e3 AS cost_s,
    list(ttft_ms ORDER BY ttft_ms) AS sorted_ms,
    CASE WHEN bool_and(first_token_ns IS NOT NULL) THEN 'B' ELSE 'C' END AS level,
    count(cached_tokens) >= 0.9 * count(*) AS cached_known,
    count(*) FILTER (slow_first_token AND long_input) AS slow_long_input,
    count(*) FILTER (NOT slow_first_token AND long_input) AS other_long_input,
    count(prompt_tokens) AS prompts_known,
    coalesce(bool_or(decode_worker <> prefill_worker), false) AS split,
    list_sort(list_distinct(list(prefill_worker) FILTER (
      slow_first_token AND prefill_worker IS NOT NULL
    ))) AS workers,
    min_by({'request': request, 'value': ttft_ms}, (-ttft_ms, request), 5)
      FILTER (slow_first_token) AS culprits
  FROM counted_request
  WHERE ttft_ms IS NOT NULL
  GROUP BY deployment
),
phase_means AS (
  SELECT s.deployment, s.phase, s.slow_ms, s.slow_ms / nullif(n.slow_timed, 0) AS slow_mean_ms,
    s.other_ms / nullif(n.other_timed, 0) AS other_mean_ms
  FROM phase_parts AS s
  JOIN deployment_latency AS n ON n.deployment IS NOT DISTINCT FROM s.deployment
  WHERE s.told
),
leading_phases AS (
  SELECT deployment,
    min_by(phase, (-slow_ms, phase)) FILTER (slow_ms IS NOT NULL) AS top_phase,
    max(slow_ms) / nullif(sum(slow_ms), 0) AS top_phase_ratio,
    min_by(phase, (other_mean_ms - slow_mean_ms, phase))
      FILTER (slow_mean_ms IS NOT NULL AND other_mean_ms IS NOT NULL) AS grown_phase,
    max(slow_mean_ms - other_mean_ms) / nullif(sum(slow_mean_ms - other_mean_ms), 0) AS grown_ratio
  FROM phase_means
  GROUP BY deployment
),
answering AS (
  -- models that such first tokens are known of; none is named where there is only one
  SELECT deployment, greatest(count(model), 1) AS models
  FROM value_quartiles
  WHERE measure = 'ttft' AND n > 0
  GROUP BY deployment
),
judged AS (
  SELECT l.* EXCLUDE (typical_ms), models, CASE WHEN models < 2 THEN typical_ms END AS typical_ms,
    quantiles_ms[1] AS ttft_p50_ms, quantiles_ms[2] AS ttft_p90_ms,
    quantiles_ms[3] AS ttft_p95_ms, quantiles_ms[4] AS ttft_p99_ms,
    p.rho AS prompt_rho, p.rho_low AS prompt_rho_low, p.rho_high AS prompt_rho_high,
    p.pairs AS prompt_pairs, p.slope_ms AS prompt_slope_ms,
    CASE WHEN prompts_known >= 10 AND slow >= 2 AND slow_long_input >= 0.8 * slow
      AND other_long_input <= 0.2 * (measured - slow) THEN true
      ELSE p.follows END AS prompt_driven
  FROM deployment_latency AS l
  JOIN answering AS a ON a.deployment IS NOT DISTINCT FROM l.deployment
  LEFT JOIN token_dependence AS p
    ON p.deployment IS NOT DISTINCT FROM l.deployment AND p.measure = 'ttft'
),
bounded AS (
  SELECT deployment, list(phase ORDER BY phase) AS phases
  FROM phase_parts
  WHERE bounded
  GROUP BY deployment
),
apart AS (
  SELECT deployment, bool_or(phase = 'queue' OR detail = 'prefill_exec') AS queue_apart
  FROM phase_totals
  GROUP BY deployment
)
SELECT j.deployment,
  CASE WHEN slow > 0 AND (limit_given OR cost_s * 1e3 >= 0.1 * ttft_sum_ms)
    THEN 'warning' ELSE 'info' END AS severity,
  coalesce(cost_s, 0) AS cost_s,
  level,
  ttft_p95_ms AS value,
  'ms' AS unit,
  -- the ranks that bracket the 95th percentile with 95 % confidence, whatever the distribution
  sorted_ms[greatest(1, floor(measured * 0.95 - 1.96 * sqrt(measured * 0.0475)))::BIGINT]
    AS interval_low,
  sorted_ms[least(measured, ceil(measured * 0.95 + 1.96 * sqrt(measured * 0.0475)) + 1)::BIGINT]
    AS interval_high,
  coalesce(cost_s, 0) * 1e3 / nullif(ttft_sum_ms, 0) AS share,
  slow AS requests,
  coalesce(workers, []) AS workers,
  coalesce(culprits, []) AS culprits,
  coalesce(s.paths, []) AS sources,
  measured, limit_ms, limit_given, typical_ms, ttft_p50_ms, ttft_p90_ms,
  ttft_p99_ms,
  CASE WHEN slow > 0 THEN f.top_phase END AS top_phase,
  CASE WHEN slow > 0 THEN f.top_phase_ratio END AS top_phase_ratio,
  CASE WHEN slow > 0 AND slow < measured THEN f.grown_phase END AS grown_phase,
  CASE WHEN slow > 0 AND slow < measured THEN f.grown_ratio END AS grown_ratio,
  coalesce(q.queue_apart, false) AS queue_apart, coalesce(b.phases, []) AS bounded_phases,
  prompt_rho, prompt_rho_low, prompt_rho_high, prompt_pairs, prompt_slope_ms, prompt_driven,
  cached_known, slow_long_input, other_long_input, models, prompts_known, slow_prompt_tokens,
  other_prompt_tokens, cached_ratio, split
FROM judged AS j
LEFT JOIN leading_phases AS f ON f.deployment IS NOT DISTINCT FROM j.deployment
LEFT JOIN bounded AS b ON b.deployment IS NOT DISTINCT FROM j.deployment
LEFT JOIN apart AS q ON q.deployment IS NOT DISTINCT FROM j.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = j.deployment AND s.evidence = 'requests'
WHERE (slow > 0 AND slow >= min_slow_ratio * measured
    AND (limit_given OR cost_s * 1e3 >= 0.01 * ttft_sum_ms))
  OR (prompt_driven AND ttft_p95_ms >= 2 * ttft_p50_ms)
