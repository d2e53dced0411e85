-- router_queue: how long requests waited in the router: queueing, deciding and dispatching.
--
-- Only time that a router itself states or whose both ends are seen; a gap between router and
-- engine that nobody states is unattributed_time. Network time is not in here.
--
-- grain:   one row per deployment
-- needs:   phase_by_request, counted_requests, deployment_sources
-- params:
--   min_ttft_ratio  0.05  a router is expected to cost next to nothing: a twentieth of the TTFT is worth a look
--   min_e2e_ratio   0.05  likewise of the whole durations, where first tokens are unknown
--   min_wait_ms     50    where nine of ten requests wait less, nobody feels it: never a warning
-- columns:
--   deployment          VARCHAR    deployment
--   severity            VARCHAR    warning from a quarter of the TTFT and min_wait_ms on, info below
--   cost_s              DOUBLE     s  value: seconds that the requests spent there
--   level               VARCHAR    B: phases are positioned
--   value               DOUBLE     seconds that the requests spent there, summed
--   unit                VARCHAR    s
--   interval_low        DOUBLE     value: the partition is exact
--   interval_high       DOUBLE     value
--   share               DOUBLE     over TTFT: sum of the part before first tokens over the sum of TTFT; NULL where no first token is known
--   requests            BIGINT     requests that spent time there
--   workers             VARCHAR[]  workers of at least a tenth of the seconds, the greatest first
--   culprits            STRUCT(request VARCHAR, "value" DOUBLE)[]  the five requests that spent most there; value: seconds
--   sources             VARCHAR[]  files that the requests come from
--   seen                BIGINT     requests with a window
--   share_of_e2e_ratio  DOUBLE     1  value over the whole durations
--   wait_p50_ms         DOUBLE     ms  per request, median (0 counted)
--   wait_p90_ms         DOUBLE     ms  90th percentile
--   wait_p99_ms         DOUBLE     ms  99th percentile
--   router_queue_s      DOUBLE     s  part of value waiting to be decided on
--   router_decide_s     DOUBLE     s  part deciding
--   dispatch_s          DOUBLE     s  part between the decision and the worker
WITH wait AS (
  SELECT deployment, request, detail, duration_ms, ttft_part_ms
  FROM phase_by_request
  WHERE counted AND phase = 'router'
),
request_wait AS (
  SELECT request,
    sum(duration_ms) AS wait_ms,
    sum(ttft_part_ms) AS wait_ttft_ms,
    sum(duration_ms) FILTER (detail = 'router_queue') AS queue_ms,
    sum(duration_ms) FILTER (detail = 'router_decide') AS decide_ms,
    sum(duration_ms) FILTER (detail = 'dispatch') AS dispatch_ms
  FROM wait
  GROUP BY request
),
counted_wait AS (
  -- requests that did not wait count with 0
  SELECT c.deployment, c.request, c.prefill_worker AS worker, w.* EXCLUDE (request),
    (c.end_ns - c.start_ns) / 1e6 AS e2e_ms,
    (c.first_token_ns - c.start_ns) / 1e6 AS ttft_ms
  FROM counted_requests AS c
  SEMI JOIN wait AS d ON d.deployment IS NOT DISTINCT FROM c.deployment
  LEFT JOIN request_wait AS w ON w.request = c.request
  WHERE c.end_ns > c.start_ns
),
worker_wait AS (
  SELECT deployment, worker, sum(wait_ms) AS wait_ms,
    sum(wait_ms) / nullif(sum(sum(wait_ms)) OVER (PARTITION BY deployment), 0) AS ratio
  FROM counted_wait
  GROUP BY deployment, worker
),
leading_workers AS (
  SELECT deployment, list(worker ORDER BY wait_ms DESC) AS workers
  FROM worker_wait
  WHERE worker IS NOT NULL AND ratio >= 0.1
  GROUP BY deployment
),
deployment_wait AS (
  SELECT deployment,
    sum(wait_ms) / 1e3 AS wait_s,
    sum(wait_ttft_ms) / nullif(sum(ttft_ms), 0) AS ttft_ratio,
    sum(wait_ms) / nullif(sum(e2e_ms), 0) AS e2e_ratio,
    count(*) FILTER (wait_ms > 0) AS requests,
    count(*) AS seen,
    quantile_cont(coalesce(wait_ms, 0), [0.5, 0.9, 0.99]) AS waits_ms,
    coalesce(sum(queue_ms), 0) / 1e3 AS router_queue_s,
    coalesce(sum(decide_ms), 0) / 1e3 AS router_decide_s,
    coalesce(sum(dispatch_ms), 0) / 1e3 AS dispatch_s,
    max_by({'request': request, 'value': wait_ms / 1e3}, wait_ms, 5) AS culprits
  FROM counted_wait
  GROUP BY deployment
)
SELECT d.deployment,
  CASE WHEN coalesce(ttft_ratio, e2e_ratio) >= 0.25 AND waits_ms[2] >= min_wait_ms
    THEN 'warning' ELSE 'info' END AS severity,
  wait_s AS cost_s, 'B' AS level, wait_s AS value, 's' AS unit,
  wait_s AS interval_low, wait_s AS interval_high,
  ttft_ratio AS share,
  requests,
  coalesce(w.workers, []) AS workers,
  coalesce(culprits, []) AS culprits,
  coalesce(s.paths, []) AS sources,
  seen, e2e_ratio AS share_of_e2e_ratio, waits_ms[1] AS wait_p50_ms,
  waits_ms[2] AS wait_p90_ms, waits_ms[3] AS wait_p99_ms,
  router_queue_s, router_decide_s, dispatch_s
FROM deployment_wait AS d
LEFT JOIN leading_workers AS w ON w.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = d.deployment AND s.evidence = 'requests'
WHERE wait_s > 0
  AND (coalesce(ttft_ratio, 0) >= min_ttft_ratio OR coalesce(e2e_ratio, 0) >= min_e2e_ratio)
