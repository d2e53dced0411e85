-- worker_imbalance: whether workers of one role got unequal shares of requests or tokens.
--
-- Equal requests are not equal work: requests and tokens are both looked at (prefill: uncached
-- prompt tokens, decode: output tokens). Guard against small numbers: if each request went to a
-- worker at random, a worker's sum would have the variance n x mean(x^2) x (1/k)(1 - 1/k); the
-- greatest must exceed the mean by min_sigma of that. Workers of the role that got nothing count.
-- Severity: warning from 1.5 x the mean on, info below. A router that follows prefix caches is
-- uneven on purpose: unevenness alone is no fault. Level C.
--
-- grain:   one row per deployment and side (prefill or decode; one row where the same workers do both)
-- needs:   load_spread, deployment_sources
-- when:    (SELECT min(worker) <> max(worker) FROM (SELECT worker FROM workers
--          UNION ALL SELECT prefill_worker FROM requests UNION ALL SELECT decode_worker FROM requests))
-- params:
--   min_requests   20    fewer cannot be told from chance
--   min_over_mean  1.25  a quarter above the mean: below, headroom of any deployment covers it
--   min_sigma      3     distance from chance, in standard deviations
-- columns:
--   deployment          VARCHAR    deployment
--   severity            VARCHAR    warning or info
--   cost_s              DOUBLE     s  NULL: not in seconds
--   level               VARCHAR    C
--   value               DOUBLE     greatest worker over the mean of the role, by the measure that is more uneven
--   unit                VARCHAR    x
--   interval_low        DOUBLE     95 % interval of value over requests: would another such period show it
--   interval_high       DOUBLE     upper end
--   share               DOUBLE     share of all that the greatest worker got
--   requests            BIGINT     requests of this side
--   workers             VARCHAR[]  the worker that got most
--   culprits            STRUCT(request VARCHAR, "value" DOUBLE)[]  empty
--   sources             VARCHAR[]  files that the requests come from
--   side                VARCHAR    prefill, decode or both
--   measure             VARCHAR    requests or tokens: the more uneven one
--   workers_seen        BIGINT     workers of the side, those without a request included
--   idle_workers        BIGINT     of them without any request
--   requests_over_mean  DOUBLE     requests: greatest over mean
--   tokens_over_mean    DOUBLE     tokens: greatest over mean; NULL unknown
--   sigma               DOUBLE     distance of value from chance in standard deviations
--   least_over_mean     DOUBLE     the worker that got least over the mean, by the same measure
--   seconds_over_mean   DOUBLE     time spent there: greatest over mean; NULL unknown
WITH judged AS (
  SELECT *,
    max(over_mean) FILTER (measure = 'requests') OVER same_side AS requests_over_mean,
    max(over_mean) FILTER (measure = 'tokens') OVER same_side AS tokens_over_mean,
    max(over_mean) FILTER (measure = 'seconds') OVER same_side AS seconds_over_mean
  FROM load_spread
  WHERE requests >= min_requests
  WINDOW same_side AS (PARTITION BY deployment, side)
),
worst AS (
  -- seconds are told, not judged: a slow worker has more of them without having got more
  SELECT *,
    row_number() OVER (
      PARTITION BY deployment, side
      ORDER BY (sigma >= min_sigma AND over_mean >= min_over_mean) DESC, over_mean DESC, measure
    ) AS place
  FROM judged
  WHERE measure IN ('requests', 'tokens')
)
SELECT c.deployment,
  CASE WHEN over_mean >= 1.5 THEN 'warning' ELSE 'info' END AS severity,
  NULL::DOUBLE AS cost_s, 'C' AS level, over_mean AS value, 'x' AS unit,
  over_mean_low AS interval_low, over_mean_high AS interval_high,
  greatest_ratio AS share, c.requests, [greatest] AS workers,
  []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  coalesce(s.paths, []) AS sources,
  CASE WHEN unsplit THEN 'both' ELSE side END AS side,
  measure, c.workers AS workers_seen, idle_workers, requests_over_mean, tokens_over_mean, sigma,
  least_over_mean, seconds_over_mean
FROM worst AS c
LEFT JOIN deployment_sources AS s ON s.deployment = c.deployment AND s.evidence = 'requests'
WHERE place = 1 AND sigma >= min_sigma AND over_mean >= min_over_mean
