-- router_belief: whether what the router believed cached on the worker it chose was there.
--
-- Choices whose believed and found tokens are both known. Where the found tokens stand only in the
-- answers and equal the belief in every case, they may be the belief itself: then nothing is said.
-- Differences of less than a block (min_error_tokens) are rounding. Too high a belief (evicted since,
-- or not computed yet) sends requests to workers that must compute the prompt after all; too low a
-- one misses reuse. Appears where a belief can be checked; warning when more than max_error_ratio of
-- what was believed was not there. Level C.
--
-- grain:   one row per deployment
-- needs:   decision_outcomes, deployment_sources
-- when:    EXISTS (FROM decisions WHERE overlap_tokens IS NOT NULL)
-- params:
--   min_decisions     20    fewer choices are an anecdote
--   min_error_tokens  64    a few blocks: engines and routers count in blocks and keep the last token back
--   max_error_ratio   0.2   a fifth of the belief wrong: routing by it is then partly routing by chance
-- columns:
--   deployment         VARCHAR    deployment
--   severity           VARCHAR    warning or info
--   cost_s             DOUBLE     s  NULL: not in seconds
--   level              VARCHAR    C
--   value              DOUBLE     tokens believed cached that the worker did not have, summed
--   unit               VARCHAR    tokens
--   interval_low       DOUBLE     95 % interval over choices (sum of independent choices), lower end
--   interval_high      DOUBLE     upper end
--   share              DOUBLE     value over all tokens believed cached; NULL when none were
--   requests           BIGINT     choices compared
--   workers            VARCHAR[]  workers of whom too much was believed, most tokens first
--   culprits           STRUCT(request VARCHAR, "value" DOUBLE)[]  the five requests most was wrongly believed of; value: tokens
--   sources            VARCHAR[]  files that the requests come from
--   believed_tokens    BIGINT     tokens  believed cached
--   found_tokens       BIGINT     tokens  found cached
--   missed_tokens      BIGINT     tokens  found though not believed
--   too_high           BIGINT     choices that believed at least min_error_tokens too much
--   too_low            BIGINT     choices that believed at least min_error_tokens too little
--   bias_tokens        DOUBLE     tokens  mean of believed - found per choice
--   error_p90_tokens   DOUBLE     tokens  90th percentile of the absolute difference
--   cached_basis       VARCHAR    engine (the engine's own record) or answer (what the answer says, which may pass through the router)
WITH compared AS (
  SELECT *, greatest(error_tokens, 0)::DOUBLE AS over, greatest(-error_tokens, 0)::DOUBLE AS under
  FROM decision_outcomes
  WHERE error_tokens IS NOT NULL
),
total AS (
  SELECT deployment, count(*) AS n, sum(over) AS over, sum(under)::BIGINT AS missed_tokens,
    1.96 * stddev_samp(over) * sqrt(count(*)) AS half,
    sum(believed_tokens)::BIGINT AS believed_tokens, sum(cached_tokens)::BIGINT AS found_tokens,
    count(*) FILTER (error_tokens >= min_error_tokens) AS too_high,
    count(*) FILTER (error_tokens <= -min_error_tokens) AS too_low,
    avg(error_tokens) AS bias_tokens, quantile_cont(abs(error_tokens), 0.9) AS error_p90_tokens,
    CASE WHEN count(*) FILTER (cached_basis = 'engine') = count(*) THEN 'engine'
      ELSE 'answer' END AS cached_basis,
    bool_and(error_tokens = 0) AS equal,
    coalesce(
      min_by({'request': request, 'value': over}, (-over, request), 5)
        FILTER (over >= min_error_tokens AND request IS NOT NULL), []
    ) AS culprits
  FROM compared
  GROUP BY deployment
),
worker_list AS (
  SELECT deployment, list(worker ORDER BY over DESC, worker) AS workers
  FROM (SELECT deployment, worker, sum(over) AS over FROM compared GROUP BY deployment, worker)
  WHERE over > 0 AND worker IS NOT NULL
  GROUP BY deployment
)
SELECT t.deployment,
  CASE WHEN over > max_error_ratio * believed_tokens AND too_high >= 5 THEN 'warning'
    ELSE 'info' END AS severity,
  NULL::DOUBLE AS cost_s, 'C' AS level, over AS value, 'tokens' AS unit,
  greatest(over - half, 0) AS interval_low, over + half AS interval_high,
  over / nullif(believed_tokens, 0) AS share, n AS requests, coalesce(w.workers, []) AS workers,
  culprits, coalesce(s.paths, []) AS sources, believed_tokens, found_tokens, missed_tokens, too_high,
  too_low, bias_tokens, error_p90_tokens, cached_basis
FROM total AS t
LEFT JOIN worker_list AS w ON w.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = t.deployment AND s.evidence = 'requests'
WHERE n >= min_decisions AND believed_tokens + found_tokens > 0
  AND (cached_basis = 'engine' OR NOT equal)
