-- engine_queue: how long requests waited in or before the engine until their prompt, or their first
-- decode step, was worked on.
--
-- before_queue is the remainder between arrival and the engine's own queue where an engine states
-- durations only: front end + wait for the running step + hand-over, split unknown. It is counted
-- here with that assumption, never as a slow front end (before_queue_s says how much of value it
-- is). On a decode worker of a P/D pair the KV transfer is not in here (kv_transfer).
--
-- grain:   one row per deployment
-- needs:   waits, deployment_sources
-- when:    EXISTS (FROM phase_sums WHERE phase IN ('queue', 'decode_queue'))
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
SELECT d.deployment,
  CASE WHEN coalesce(ttft_ratio, e2e_ratio) >= 0.25 AND wait_p90_ms >= min_wait_ms
    THEN 'warning' ELSE 'info' END AS severity,
  wait_s AS cost_s, 'B' AS level, wait_s AS value, 's' AS unit,
  wait_s AS interval_low, wait_s AS interval_high,
  ttft_ratio AS share, requests, workers, culprits,
  coalesce(s.paths, []) AS sources,
  seen, e2e_ratio AS share_of_e2e_ratio, wait_p50_ms, wait_p90_ms, wait_p99_ms,
  coalesce(detail_s['before_queue'], 0) AS before_queue_s,
  coalesce(detail_s['prefill_queue'], 0) AS prefill_queue_s,
  coalesce(detail_s['decode_queue'], 0) AS decode_queue_s,
  apart_p99_ms AS before_queue_p99_ms, placed_ratio
FROM waits(
  details := ['before_queue', 'prefill_queue', 'decode_queue'], apart := 'before_queue'
) AS d
LEFT JOIN deployment_sources AS s ON s.deployment = d.deployment AND s.evidence = 'requests'
WHERE d.wait_s > 0
  AND (coalesce(ttft_ratio, 0) >= min_ttft_ratio OR coalesce(e2e_ratio, 0) >= min_e2e_ratio)
