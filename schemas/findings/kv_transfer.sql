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
-- needs:   waits, deployment_sources, transfers, workers
-- when:    EXISTS (FROM phase_sums WHERE phase IN ('kv_transfer', 'kv_wait', 'kv_load'))
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
WITH moved AS (
  SELECT w.deployment, count(*) AS transfers, sum(t.bytes)::BIGINT AS transferred_bytes
  FROM transfers AS t
  JOIN workers AS w ON w.worker = coalesce(t.destination_worker, t.source_worker)
  GROUP BY w.deployment
)
SELECT d.deployment,
  CASE WHEN coalesce(ttft_ratio, e2e_ratio) >= 0.25 AND wait_p90_ms >= min_wait_ms
    THEN 'warning' ELSE 'info' END AS severity,
  wait_s AS cost_s, 'B' AS level, wait_s AS value, 's' AS unit,
  wait_s - bound_s AS interval_low, wait_s AS interval_high,
  ttft_ratio AS share, requests, d.workers, d.culprits,
  coalesce(s.paths, []) AS sources,
  seen, e2e_ratio AS share_of_e2e_ratio, wait_p50_ms, wait_p90_ms, wait_p99_ms,
  bound_s > 0.5 * wait_s AS bound,
  coalesce(detail_s['kv_transfer'], 0) AS transfer_s,
  coalesce(detail_s['bridge_wait'] - bound_detail_s['bridge_wait'], 0)
    + coalesce(detail_s['kv_space_wait'] - bound_detail_s['kv_space_wait'], 0)
    + coalesce(detail_s['kv_wait_upper_bound'] - bound_detail_s['kv_wait_upper_bound'], 0) AS wait_s,
  bound_s AS upper_bound_s, coalesce(detail_s['kv_load'], 0) AS load_s,
  m.transfers, m.transferred_bytes
FROM waits(
  details := ['kv_load', 'kv_transfer', 'bridge_wait', 'kv_space_wait', 'kv_wait_upper_bound'],
  on_decode := true
) AS d
LEFT JOIN moved AS m ON m.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = d.deployment AND s.evidence = 'requests'
WHERE d.wait_s > 0
  AND (split OR coalesce(ttft_ratio, 0) >= min_ttft_ratio
    OR coalesce(e2e_ratio, 0) >= min_e2e_ratio)
