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
-- needs:   request_values, value_quartiles, phase_sums, engine_finding_times
-- columns:
--   deployment  VARCHAR      deployment
--   finding     VARCHAR      id of the finding
--   time_ns     BIGINT   ns  when
--   weight      DOUBLE       how much of the finding it is
WITH typical AS (
  SELECT deployment, model, max(typical) FILTER (measure = 'ttft') AS ttft_typical_ms,
    max(typical) FILTER (measure = 'tpot') AS pace_typical_ms
  FROM (
    SELECT *, CASE WHEN p50 > 3 * p25 AND p45 <= 2 * p25 THEN p25 ELSE p50 END AS typical
    FROM value_quartiles
    WHERE n >= 5
  )
  GROUP BY deployment, model
),
excess AS (
  SELECT r.deployment, r.start_ns, r.ttft_ms, t.ttft_typical_ms, r.pace_ms, t.pace_typical_ms,
    r.output_tokens
  FROM request_values AS r
  JOIN typical AS t ON t.deployment IS NOT DISTINCT FROM r.deployment
    AND t.model IS NOT DISTINCT FROM r.model
  WHERE r.counted AND r.start_ns IS NOT NULL
),
wait AS (
  SELECT request, sum(duration_ns / 1e6) AS wait_ms,
    CASE WHEN phase = 'router' THEN 1 WHEN phase IN ('queue', 'decode_queue') THEN 2 ELSE 3 END
      AS place
  FROM phase_sums
  WHERE phase IN ('router', 'queue', 'decode_queue', 'kv_load', 'kv_transfer', 'kv_wait')
  GROUP BY ALL
  HAVING wait_ms >= 50
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
SELECT r.deployment, ['router_queue', 'engine_queue', 'kv_transfer'][w.place], r.start_ns,
  w.wait_ms / 1e3
FROM wait AS w
JOIN request_values AS r ON r.request = w.request
WHERE r.counted AND r.start_ns IS NOT NULL
UNION ALL
FROM engine_finding_times
