-- finding_times: when the trouble that a finding sums up happened, piece by piece.
--
-- Weights are what the finding counts: seconds beyond the typical (slow_first_token: of the first
-- token; slow_stream: of the mean gap, over all gaps), requests (failed_requests), decode seconds
-- lost (prefill_interference, from engine steps of flagged workers), events (preemption, kv_alarm),
-- seconds waited by requests that waited 50 ms or more (router_queue, engine_queue, kv_transfer;
-- below, those findings warn of nothing), movements (transfer_failures), seconds of steps, else
-- samples, with nine tenths of the KV cache in use (kv_pressure), seconds in which a decode worker
-- stood still with KV for it on its way (decode_idle: of all decode workers, also of those that the
-- finding leaves out for little of it). A request's piece lies at its
-- start. Limits are the run's own, as in request_marks.
--
-- grain:   one row per piece with an instant
-- needs:   request_values, value_quartiles, phase_sums, interference_step_losses, interference_steps, transfer_times, decode_idle_times, steps, kv_usage_samples, events, workers
-- columns:
--   deployment  VARCHAR      deployment
--   finding     VARCHAR      id of the finding
--   time_ns     BIGINT   ns  when
--   weight      DOUBLE       how much of the finding it is
WITH typical AS (
  SELECT deployment, model, measure,
    CASE WHEN p50 > 3 * p25 AND p45 <= 2 * p25 THEN p25 ELSE p50 END AS typical
  FROM value_quartiles
  WHERE n >= 5
),
excess AS (
  SELECT r.deployment, r.start_ns, r.ttft_ms, first.typical AS ttft_typical_ms, r.pace_ms,
    pace.typical AS pace_typical_ms, r.output_tokens
  FROM request_values AS r
  LEFT JOIN typical AS first ON first.deployment IS NOT DISTINCT FROM r.deployment
    AND first.model IS NOT DISTINCT FROM r.model AND first.measure = 'ttft'
  LEFT JOIN typical AS pace ON pace.deployment IS NOT DISTINCT FROM r.deployment
    AND pace.model IS NOT DISTINCT FROM r.model AND pace.measure = 'tpot'
  WHERE r.counted AND r.start_ns IS NOT NULL
),
wait AS (
  SELECT request, sum(duration_ns / 1e6) AS wait_ms,
    CASE WHEN phase = 'router' THEN 'router_queue'
      WHEN phase IN ('queue', 'decode_queue') THEN 'engine_queue'
      ELSE 'kv_transfer' END AS finding
  FROM phase_sums
  WHERE phase IN ('router', 'queue', 'decode_queue', 'kv_load', 'kv_transfer', 'kv_wait')
  GROUP BY ALL
  HAVING wait_ms >= 50
),
full_cache AS (
  SELECT worker, start_ns AS time_ns, coalesce(elapsed_ns, 1) / 1e9 AS weight
  FROM steps
  WHERE kv_usage_ratio >= 0.9 AND start_ns IS NOT NULL
  UNION ALL
  SELECT worker, time_ns, 1.0
  FROM kv_usage_samples
  WHERE usage_ratio >= 0.9 AND time_ns IS NOT NULL
    AND worker NOT IN (
      SELECT worker FROM steps WHERE kv_usage_ratio IS NOT NULL AND worker IS NOT NULL
    )
)
SELECT deployment, 'slow_first_token' AS finding, start_ns AS time_ns,
  (ttft_ms - ttft_typical_ms) / 1e3 AS weight
FROM excess
WHERE ttft_ms > 2 * ttft_typical_ms
UNION ALL
SELECT deployment, 'slow_stream', start_ns,
  (pace_ms - pace_typical_ms) * coalesce(output_tokens - 1, 1) / 1e3
FROM excess
WHERE pace_ms > 1.5 * pace_typical_ms
UNION ALL
SELECT deployment, 'failed_requests', start_ns, 1
FROM request_values
WHERE outcome IN ('failed', 'aborted') AND start_ns IS NOT NULL
UNION ALL
SELECT s.deployment, 'prefill_interference', l.start_ns, l.lost_s
FROM interference_step_losses AS l
JOIN interference_steps AS s ON s.worker = l.worker AND s.rank IS NOT DISTINCT FROM l.rank
WHERE s.flagged AND l.start_ns IS NOT NULL AND l.lost_s > 0
UNION ALL
SELECT w.deployment,
  CASE WHEN e.kind = 'preemption' THEN 'preemption' ELSE 'kv_alarm' END,
  e.time_ns, coalesce(e.count, 1)
FROM events AS e
JOIN workers AS w ON w.worker = e.worker
WHERE e.kind IN ('preemption', 'kv_expired', 'kv_invalid', 'kv_failure') AND e.time_ns IS NOT NULL
UNION ALL
SELECT r.deployment, w.finding, r.start_ns, w.wait_ms / 1e3
FROM wait AS w
JOIN request_values AS r ON r.request = w.request
WHERE r.counted AND r.start_ns IS NOT NULL
UNION ALL
SELECT deployment, 'transfer_failures', coalesce(end_ns, start_ns), 1
FROM transfer_times
WHERE outcome IN ('failed', 'expired') AND coalesce(end_ns, start_ns) IS NOT NULL
UNION ALL
SELECT w.deployment, 'kv_pressure', f.time_ns, f.weight
FROM full_cache AS f
JOIN workers AS w ON w.worker = f.worker
UNION ALL
SELECT deployment, 'decode_idle', start_ns, (end_ns - start_ns) / 1e9
FROM decode_idle_times
WHERE idle AND waiting > 0
