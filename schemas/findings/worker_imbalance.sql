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
-- needs:   requests, workers, deployment_sources
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
--   interval_low        DOUBLE     NULL
--   interval_high       DOUBLE     NULL
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
WITH side_request AS (
  SELECT deployment, request, 'prefill' AS side, prefill_worker AS worker,
    (prompt_tokens - coalesce(cached_tokens, 0))::DOUBLE AS tokens
  FROM requests
  WHERE prefill_worker IS NOT NULL
  UNION ALL
  SELECT deployment, request, 'decode', decode_worker, output_tokens::DOUBLE
  FROM requests
  WHERE decode_worker IS NOT NULL AND decode_worker IS DISTINCT FROM prefill_worker
),
side_worker AS (
  SELECT DISTINCT deployment, side, worker
  FROM side_request
  UNION
  SELECT w.deployment, s.side, w.worker
  FROM workers AS w
  JOIN (SELECT DISTINCT deployment, side FROM side_request) AS s
    ON s.deployment IS NOT DISTINCT FROM w.deployment
  WHERE w.role = s.side OR (w.role = 'aggregated' AND s.side = 'prefill')
),
worker_sum AS (
  SELECT k.deployment, k.side, k.worker, count(r.request) AS requests,
    coalesce(sum(r.tokens), 0) AS tokens, coalesce(sum(r.tokens * r.tokens), 0) AS squares,
    count(r.request) - count(r.tokens) AS unknown
  FROM side_worker AS k
  LEFT JOIN side_request AS r ON r.deployment IS NOT DISTINCT FROM k.deployment
    AND r.side = k.side AND r.worker = k.worker
  GROUP BY k.deployment, k.side, k.worker
),
measured AS (
  SELECT deployment, side, 'requests' AS measure, worker, requests::DOUBLE AS amount,
    requests::DOUBLE AS squares, requests, 0 AS unknown
  FROM worker_sum
  UNION ALL
  SELECT deployment, side, 'tokens', worker, tokens, squares, requests, unknown
  FROM worker_sum
),
compared AS (
  SELECT deployment, side, measure, count(*) AS k, sum(requests)::BIGINT AS requests,
    count(*) FILTER (requests = 0) AS idle_workers,
    max(amount) / avg(amount) AS over_mean, min(amount) / avg(amount) AS least_over_mean,
    max(amount) / sum(amount) AS greatest_ratio, min_by(worker, (-amount, worker)) AS worker,
    (max(amount) - avg(amount)) / sqrt(sum(squares) * (1 / count(*)) * (1 - 1 / count(*))) AS sigma
  FROM measured
  GROUP BY deployment, side, measure
  HAVING count(*) >= 2 AND sum(amount) > 0 AND sum(unknown) = 0
),
worst AS (
  SELECT *,
    max(over_mean) FILTER (measure = 'requests') OVER same_side AS requests_over_mean,
    max(over_mean) FILTER (measure = 'tokens') OVER same_side AS tokens_over_mean,
    row_number() OVER (
      PARTITION BY deployment, side
      ORDER BY (sigma >= min_sigma AND over_mean >= min_over_mean) DESC, over_mean DESC, measure
    ) AS place
  FROM compared
  WHERE requests >= min_requests
  WINDOW same_side AS (PARTITION BY deployment, side)
)
SELECT c.deployment,
  CASE WHEN over_mean >= 1.5 THEN 'warning' ELSE 'info' END AS severity,
  NULL::DOUBLE AS cost_s, 'C' AS level, over_mean AS value, 'x' AS unit,
  NULL::DOUBLE AS interval_low, NULL::DOUBLE AS interval_high,
  greatest_ratio AS share, c.requests, [worker] AS workers,
  []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  coalesce(s.paths, []) AS sources,
  CASE WHEN side = 'prefill' AND NOT EXISTS (
    FROM side_request AS o
    WHERE o.deployment IS NOT DISTINCT FROM c.deployment AND o.side = 'decode'
  ) THEN 'both' ELSE side END AS side,
  measure, k AS workers_seen, idle_workers, requests_over_mean, tokens_over_mean, sigma,
  least_over_mean
FROM worst AS c
LEFT JOIN deployment_sources AS s ON s.deployment = c.deployment AND s.evidence = 'requests'
WHERE place = 1 AND sigma >= min_sigma AND over_mean >= min_over_mean
