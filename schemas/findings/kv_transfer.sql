-- kv_transfer: how long requests waited for KV: transfer between workers, wait for it, load from a
-- cache tier.
--
-- Exposed time only: what is hidden behind computation is no wait. Where an engine cannot tell the
-- transfer from other waits on the decode side, the whole wait is an upper bound: then interval_low
-- is what is known to be KV time, interval_high (= value) includes the bound, and `bound` says that
-- more than half of value is such a bound. Where prefill and decode are split, the row is always
-- there: that KV costs little is an answer, too.
--
-- grain:   one row per deployment
-- needs:   phase_by_request, counted_requests, deployment_sources, transfers, workers
-- params:
--   min_ttft_ratio  0.05  a twentieth of the TTFT, below the scatter of most runs
--   min_e2e_ratio   0.05  likewise of the whole durations, where first tokens are unknown
--   min_wait_ms     50    where nine of ten requests wait less, nobody feels it: never a warning
-- columns:
--   deployment          VARCHAR    deployment
--   severity            VARCHAR    warning from a quarter of the TTFT and min_wait_ms on, info below
--   cost_s              DOUBLE     s  value: seconds that the requests spent there
--   level               VARCHAR    B: phases are positioned
--   value               DOUBLE     seconds that the requests spent there, summed
--   unit                VARCHAR    s
--   interval_low        DOUBLE     value without its upper-bound part
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
--   bound               BOOLEAN    value is mainly an upper bound
--   transfer_s          DOUBLE     s  part in a transfer that somebody states
--   wait_s              DOUBLE     s  part waiting for the transfer to begin or for KV space
--   upper_bound_s       DOUBLE     s  part that is an upper bound
--   load_s              DOUBLE     s  part loading a prefix from another cache tier
--   transfers           BIGINT     KV movements that workers state; NULL when none do
--   transferred_bytes   BIGINT     bytes  what they moved; NULL unknown
WITH wait AS (
  SELECT deployment, request, phase, duration_ms, ttft_part_ms, bound_ms
  FROM phase_by_request
  WHERE counted AND phase IN ('kv_transfer', 'kv_wait', 'kv_load')
),
request_wait AS (
  SELECT request,
    sum(duration_ms) AS wait_ms,
    sum(ttft_part_ms) AS wait_ttft_ms,
    sum(duration_ms) FILTER (phase = 'kv_transfer') AS transfer_ms,
    sum(duration_ms - bound_ms) FILTER (phase = 'kv_wait') AS kv_wait_ms,
    sum(bound_ms) AS bound_ms,
    sum(duration_ms) FILTER (phase = 'kv_load') AS load_ms
  FROM wait
  GROUP BY request
),
counted_wait AS (
  -- requests that did not wait count with 0
  SELECT c.deployment, c.request, c.decode_worker AS worker, c.mode,
    w.* EXCLUDE (request),
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
    sum(wait_ms) / 1e3 AS total_s,
    sum(wait_ttft_ms) / nullif(sum(ttft_ms), 0) AS ttft_ratio,
    sum(wait_ms) / nullif(sum(e2e_ms), 0) AS e2e_ratio,
    count(*) FILTER (wait_ms > 0) AS requests,
    count(*) AS seen, coalesce(bool_or(mode = 'disaggregated'), false) AS split,
    quantile_cont(coalesce(wait_ms, 0), [0.5, 0.9, 0.99]) AS waits_ms,
    coalesce(sum(transfer_ms), 0) / 1e3 AS transfer_s,
    coalesce(sum(kv_wait_ms), 0) / 1e3 AS kv_wait_s,
    coalesce(sum(bound_ms), 0) / 1e3 AS upper_bound_s,
    coalesce(sum(load_ms), 0) / 1e3 AS load_s,
    max_by({'request': request, 'value': wait_ms / 1e3}, wait_ms, 5) AS culprits
  FROM counted_wait
  GROUP BY deployment
),
moved AS (
  SELECT w.deployment, count(*) AS transfers, sum(t.bytes)::BIGINT AS transferred_bytes
  FROM transfers AS t
  JOIN workers AS w ON w.worker = coalesce(t.destination_worker, t.source_worker)
  GROUP BY w.deployment
)
SELECT d.deployment,
  CASE WHEN coalesce(ttft_ratio, e2e_ratio) >= 0.25 AND waits_ms[2] >= min_wait_ms
    THEN 'warning' ELSE 'info' END AS severity,
  total_s AS cost_s, 'B' AS level, total_s AS value, 's' AS unit,
  total_s - upper_bound_s AS interval_low, total_s AS interval_high,
  ttft_ratio AS share,
  requests,
  coalesce(w.workers, []) AS workers,
  coalesce(culprits, []) AS culprits,
  coalesce(s.paths, []) AS sources,
  seen, e2e_ratio AS share_of_e2e_ratio, waits_ms[1] AS wait_p50_ms,
  waits_ms[2] AS wait_p90_ms, waits_ms[3] AS wait_p99_ms,
  upper_bound_s > 0.5 * total_s AS bound,
  transfer_s, kv_wait_s AS wait_s, upper_bound_s, load_s, m.transfers, m.transferred_bytes
FROM deployment_wait AS d
LEFT JOIN leading_workers AS w ON w.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN moved AS m ON m.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = d.deployment AND s.evidence = 'requests'
WHERE total_s > 0
  AND (split OR coalesce(ttft_ratio, 0) >= min_ttft_ratio
    OR coalesce(e2e_ratio, 0) >= min_e2e_ratio)
