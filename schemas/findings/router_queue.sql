-- router_queue: how long requests waited in the router: queueing, deciding and dispatching.
--
-- Only time that a router itself states or whose both ends are seen; a gap between router and
-- engine that nobody states is unattributed_time. Network time is not in here.
--
-- grain:   one row per deployment
-- needs:   waits, deployment_sources
-- when:    EXISTS (FROM phase_sums WHERE phase = 'router')
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
SELECT d.deployment,
  CASE WHEN coalesce(ttft_ratio, e2e_ratio) >= 0.25 AND wait_p90_ms >= min_wait_ms
    THEN 'warning' ELSE 'info' END AS severity,
  wait_s AS cost_s, 'B' AS level, wait_s AS value, 's' AS unit,
  wait_s AS interval_low, wait_s AS interval_high,
  ttft_ratio AS share, requests, workers, culprits,
  coalesce(s.paths, []) AS sources,
  seen, e2e_ratio AS share_of_e2e_ratio, wait_p50_ms, wait_p90_ms, wait_p99_ms,
  coalesce(detail_s['router_queue'], 0) AS router_queue_s,
  coalesce(detail_s['router_decide'], 0) AS router_decide_s,
  coalesce(detail_s['dispatch'], 0) AS dispatch_s
FROM waits(details := ['router_queue', 'router_decide', 'dispatch']) AS d
LEFT JOIN deployment_sources AS s ON s.deployment = d.deployment AND s.evidence = 'requests'
WHERE d.wait_s > 0
  AND (coalesce(ttft_ratio, 0) >= min_ttft_ratio OR coalesce(e2e_ratio, 0) >= min_e2e_ratio)
