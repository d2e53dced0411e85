-- warm_up: the first requests of the run were slower than any other stretch of as many was.
--
-- Cold caches, compilation, or a start-up burst: how fast requests came tells these
-- apart only in part. The figures without these requests stand beside those with them. Severity:
-- warning when they make the 99th percentile worse by half or more, info otherwise. Level C:
-- durations of requests in the order of arrival.
--
-- grain:   one row per deployment
-- needs:   changes, deployment_sources
-- when:    EXISTS (FROM changes)
-- columns:
--   deployment        VARCHAR    deployment
--   severity          VARCHAR    warning or info
--   cost_s            DOUBLE     s  seconds of these requests' TTFT above the median of the rest; NULL when only time per token is slower
--   level             VARCHAR    C
--   value             DOUBLE     requests that belong to the warm-up
--   unit              VARCHAR    requests
--   interval_low      DOUBLE     NULL
--   interval_high     DOUBLE     NULL
--   share             DOUBLE     these over all requests measured
--   requests          BIGINT     value
--   workers           VARCHAR[]  workers that show it while the deployment as a whole does not
--   culprits          STRUCT(request VARCHAR, "value" DOUBLE)[]  empty
--   sources           VARCHAR[]  files that the requests come from
--   metric            VARCHAR    ttft or tpot: what was slower (ttft where both were)
--   until_ns          BIGINT     ns  start of the first request after the warm-up
--   warm_up_s         DOUBLE     s  from the first request to that
--   level_before      DOUBLE     ms  median during the warm-up
--   level_after       DOUBLE     ms  median after it
--   p99_ms            DOUBLE     ms  99th percentile of all
--   p99_without_ms    DOUBLE     ms  99th percentile without the warm-up
--   arrival_rate_before  DOUBLE  requests/s  arrivals during the warm-up; NULL unknown
--   arrival_rate_after   DOUBLE  requests/s  and after it
WITH chosen AS (
  SELECT *
  FROM changes
  WHERE kind = 'warm_up'
  QUALIFY row_number() OVER (
    PARTITION BY deployment ORDER BY worker NULLS FIRST, metric = 'ttft' DESC
  ) = 1
),
workers_of AS (
  SELECT deployment, list_sort(list_distinct(list(worker) FILTER (worker IS NOT NULL))) AS workers
  FROM changes
  WHERE kind = 'warm_up'
  GROUP BY deployment
)
SELECT c.deployment,
  CASE WHEN p99_ms >= 1.5 * p99_without_ms THEN 'warning' ELSE 'info' END AS severity,
  cost_s, 'C' AS level, requests_before::DOUBLE AS value, 'requests' AS unit,
  NULL::DOUBLE AS interval_low, NULL::DOUBLE AS interval_high,
  requests_before / (requests_before + requests_after) AS share,
  requests_before AS requests, coalesce(w.workers, []) AS workers,
  []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  coalesce(s.paths, []) AS sources,
  metric, at_ns AS until_ns, (at_ns - from_ns) / 1e9 AS warm_up_s, level_before, level_after, p99_ms,
  p99_without_ms, arrival_rate_before, arrival_rate_after
FROM chosen AS c
LEFT JOIN workers_of AS w ON w.deployment IS NOT DISTINCT FROM c.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = c.deployment AND s.evidence = 'requests'
