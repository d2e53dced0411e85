-- decode_idle_times: what decode workers did stretch by stretch: decode steps, and requests that waited for KV.
--
-- From a worker's first step to its last, on any of its ranks. Only workers with role decode whose steps are
-- all there and have starts (at least 30), and whose requests waited for KV at some time (phase kv_wait or
-- kv_transfer).
--
-- grain:   one row per (worker, stretch between two changes)
-- needs:   steps, workers, phases, requests
-- when:    EXISTS (FROM steps)
-- columns:
--   deployment       VARCHAR      deployment
--   worker           VARCHAR      the worker
--   start_ns         BIGINT   ns  start
--   end_ns           BIGINT   ns  end
--   idle             BOOLEAN      no step with decodes ran
--   waiting          BIGINT       requests of the worker that waited for KV
--   waiting_at_most  BIGINT       of them those whose waits are upper bounds
WITH decode_worker AS (
  SELECT w.deployment, s.worker, min(s.start_ns) AS start_ns, max(s.start_ns + s.elapsed_ns) AS end_ns
  FROM steps AS s
  JOIN workers AS w ON w.worker = s.worker
  WHERE w.role = 'decode'
  GROUP BY w.deployment, s.worker
  HAVING bool_and(s.capture = 'full') AND count(s.start_ns) = count(*) AND count(*) >= 30
),
kv_wait AS (
  SELECT d.deployment, d.worker, p.basis = 'upper_bound' AS at_most,
    greatest(p.start_ns, d.start_ns) AS start_ns, least(p.end_ns, d.end_ns) AS end_ns
  FROM phases AS p
  JOIN requests AS r ON r.request = p.request
  JOIN decode_worker AS d ON d.worker = r.decode_worker
  WHERE p.phase IN ('kv_wait', 'kv_transfer') AND p.end_ns > d.start_ns AND p.start_ns < d.end_ns
),
waited AS (
  SELECT d.*
  FROM decode_worker AS d
  SEMI JOIN kv_wait AS k ON k.worker = d.worker
),
change AS (
  SELECT w.deployment, s.worker, s.start_ns AS time_ns, 1 AS decoding, 0 AS waiting, 0 AS at_most
  FROM steps AS s
  JOIN waited AS w ON w.worker = s.worker
  WHERE s.decode_requests > 0
  UNION ALL
  SELECT w.deployment, s.worker, s.start_ns + s.elapsed_ns, -1, 0, 0
  FROM steps AS s
  JOIN waited AS w ON w.worker = s.worker
  WHERE s.decode_requests > 0
  UNION ALL
  SELECT deployment, worker, start_ns, 0, 1, at_most::INTEGER FROM kv_wait
  UNION ALL
  SELECT deployment, worker, end_ns, 0, -1, -at_most::INTEGER FROM kv_wait
  UNION ALL
  SELECT deployment, worker, unnest([start_ns, end_ns]), 0, 0, 0 FROM waited
),
instant AS (
  SELECT deployment, worker, time_ns, sum(decoding) AS decoding, sum(waiting) AS waiting,
    sum(at_most) AS at_most
  FROM change
  GROUP BY deployment, worker, time_ns
),
stretch AS (
  SELECT deployment, worker, time_ns AS start_ns, lead(time_ns) OVER by_time AS end_ns,
    sum(decoding) OVER by_time <= 0 AS idle, (sum(waiting) OVER by_time)::BIGINT AS waiting,
    (sum(at_most) OVER by_time)::BIGINT AS waiting_at_most
  FROM instant
  WINDOW by_time AS (PARTITION BY deployment, worker ORDER BY time_ns)
)
FROM stretch
WHERE end_ns IS NOT NULL
