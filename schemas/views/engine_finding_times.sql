-- engine_finding_times: when engines, their caches and transfers did what findings are about.
--
-- grain:   one row per event or stretch
-- needs:   interference_step_losses, interference_steps, transfer_times, decode_idle_times, steps, kv_usage_samples, events, workers
-- when:    EXISTS (FROM steps) OR EXISTS (FROM samples) OR EXISTS (FROM events) OR EXISTS (FROM transfers)
--          OR EXISTS (FROM interference_step_losses)
-- columns:
--   deployment  VARCHAR      deployment
--   finding     VARCHAR      id of the finding
--   time_ns     BIGINT   ns  when
--   weight      DOUBLE       how much of the finding it is
WITH full_cache AS (
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
SELECT s.deployment, 'prefill_interference' AS finding, l.start_ns AS time_ns, l.lost_s AS weight
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
