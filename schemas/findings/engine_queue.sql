-- engine_queue: how long requests waited in or before the engine until their prompt, or their first
-- decode step, was worked on.
--
-- before_queue is the remainder between arrival and the engine's own queue where an engine states
-- durations only: front end + wait for the running step + hand-over, split unknown. It is counted
-- here with that assumption, never as a slow front end (before_queue_s says how much of value it
-- is). On a decode worker of a P/D pair the KV transfer is not in here (kv_transfer).
--
-- grain:   one row per deployment
-- needs:   phase_by_request, counted_requests, deployment_sources
-- params:
--   min_ttft_ratio  0.1  below a tenth of the TTFT other phases are the better question
--   min_e2e_ratio   0.1  likewise of the whole durations, where first tokens are unknown
--   min_wait_ms     50    where nine of ten requests wait less, nobody feels it: never a warning
-- columns:
--   deployment           VARCHAR    deployment
--   severity             VARCHAR    warning from a quarter of the TTFT and min_wait_ms on, info below
--   cost_s               DOUBLE     s  value: seconds that the requests spent there
--   level                VARCHAR    B: phases are positioned
--   value                DOUBLE     seconds that the requests spent there, summed
--   unit                 VARCHAR    s
--   interval_low         DOUBLE     value: the partition is exact
--   interval_high        DOUBLE     value
--   share                DOUBLE     over TTFT: sum of the part before first tokens over the sum of TTFT; NULL where no first token is known
--   requests             BIGINT     requests that spent time there
--   workers              VARCHAR[]  workers of at least a tenth of the seconds, the greatest first
--   culprits             STRUCT(request VARCHAR, "value" DOUBLE)[]  the five requests that spent most there; value: seconds
--   sources              VARCHAR[]  files that the requests come from
--   seen                 BIGINT     requests with a window
--   share_of_e2e_ratio   DOUBLE     1  value over the whole durations
--   wait_p50_ms          DOUBLE     ms  per request, median (0 counted)
--   wait_p90_ms          DOUBLE     ms  90th percentile
--   wait_p99_ms          DOUBLE     ms  99th percentile
--   before_queue_s       DOUBLE     s  part of value before the engine's own queue, split unknown
--   prefill_queue_s      DOUBLE     s  part in the engine's queue before the first prompt step
--   decode_queue_s       DOUBLE     s  part between KV on the decode worker and its first step there
--   before_queue_p99_ms  DOUBLE     ms  99th percentile of before_queue over all requests
--   placed_ratio         DOUBLE     1  part of value that is laid out from durations (basis placed), not measured
WITH wait AS (
  SELECT deployment, request, phase, detail, duration_ms, ttft_part_ms, placed_ms
  FROM phase_by_request
  WHERE counted AND phase IN ('queue', 'decode_queue')
),
request_wait AS (
  SELECT request,
    sum(duration_ms) AS wait_ms,
    sum(ttft_part_ms) AS wait_ttft_ms,
    sum(duration_ms) FILTER (detail = 'before_queue') AS before_ms,
    sum(duration_ms) FILTER (detail = 'prefill_queue') AS prefill_queue_ms,
    sum(duration_ms) FILTER (phase = 'decode_queue') AS decode_queue_ms,
    sum(placed_ms) AS placed_ms
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
    coalesce(sum(before_ms), 0) / 1e3 AS before_queue_s,
    coalesce(sum(prefill_queue_ms), 0) / 1e3 AS prefill_queue_s,
    coalesce(sum(decode_queue_ms), 0) / 1e3 AS decode_queue_s,
    quantile_cont(coalesce(before_ms, 0), 0.99) AS before_queue_p99_ms,
    coalesce(sum(placed_ms), 0) / nullif(sum(wait_ms), 0) AS placed_ratio,
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
  before_queue_s, prefill_queue_s, decode_queue_s, before_queue_p99_ms, placed_ratio
FROM deployment_wait AS d
LEFT JOIN leading_workers AS w ON w.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = d.deployment AND s.evidence = 'requests'
WHERE wait_s > 0
  AND (coalesce(ttft_ratio, 0) >= min_ttft_ratio OR coalesce(e2e_ratio, 0) >= min_e2e_ratio)
