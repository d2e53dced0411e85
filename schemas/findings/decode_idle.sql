-- decode_idle: decode workers that stood still while KV for their requests was on its way.
--
-- Idle is the time between a worker's first step and its last that no step with decodes fills, on
-- any of its ranks. Counted is the part of it during which at least one request of that worker waited
-- for KV (phase kv_wait or kv_transfer), instant by instant. Only workers with role decode whose steps
-- are all there and have starts. Where most of those waits are upper bounds, so is value (`bound`).
-- Idle decode workers are waste only where KV or prefill is the bottleneck; with a light load they
-- are headroom. Severity: info. Level A.
--
-- grain:   one row per deployment
-- needs:   steps, workers, phases, requests, deployment_sources
-- when:    EXISTS (FROM steps) AND EXISTS (FROM phase_sums WHERE phase IN ('kv_wait', 'kv_transfer'))
-- params:
--   min_idle_ratio  0.1  a tenth of the worker's time idle with KV on its way: below, nobody gains by it
-- columns:
--   deployment     VARCHAR    deployment
--   severity       VARCHAR    info
--   cost_s         DOUBLE     s  NULL: idle time of a worker is not time of a request
--   level          VARCHAR    A
--   value          DOUBLE     seconds in which a decode worker ran no decode step while KV for it was awaited, summed
--   unit           VARCHAR    s
--   interval_low   DOUBLE     value; 0 where it is an upper bound
--   interval_high  DOUBLE     value
--   share          DOUBLE     value over the time between first and last steps
--   requests       BIGINT     requests decoded by these workers that waited for KV
--   workers        VARCHAR[]  idle workers, the greatest first
--   culprits       STRUCT(request VARCHAR, "value" DOUBLE)[]  empty
--   sources        VARCHAR[]  files that steps come from
--   observed_s     DOUBLE     s  time between first and last steps, summed over the workers
--   idle_s         DOUBLE     s  time without a decode step, KV on its way or not
--   kv_waited_s    DOUBLE     s  time that their requests waited for KV, summed over the requests
--   bound          BOOLEAN    most of those waits are upper bounds
WITH decode_worker AS (
  SELECT w.deployment, s.worker, min(s.start_ns) AS start_ns, max(s.start_ns + s.elapsed_ns) AS end_ns
  FROM steps AS s
  JOIN workers AS w ON w.worker = s.worker
  WHERE w.role = 'decode'
  GROUP BY w.deployment, s.worker
  HAVING bool_and(s.capture = 'full') AND count(s.start_ns) = count(*) AND count(*) >= 30
),
kv_wait AS (
  SELECT r.decode_worker AS worker, p.request, p.basis,
    greatest(p.start_ns, d.start_ns) AS start_ns, least(p.end_ns, d.end_ns) AS end_ns
  FROM phases AS p
  JOIN requests AS r ON r.request = p.request
  JOIN decode_worker AS d ON d.worker = r.decode_worker
  WHERE p.phase IN ('kv_wait', 'kv_transfer') AND p.end_ns > d.start_ns AND p.start_ns < d.end_ns
),
waited AS (
  SELECT worker, count(DISTINCT request) AS requests, sum(end_ns - start_ns) / 1e9 AS kv_waited_s,
    sum(end_ns - start_ns) FILTER (basis = 'upper_bound') / 1e9 AS bound_s
  FROM kv_wait
  GROUP BY worker
),
change AS (
  SELECT s.worker, s.start_ns AS time_ns, 1 AS decoding, 0 AS waiting
  FROM steps AS s
  SEMI JOIN waited AS w ON w.worker = s.worker
  WHERE s.decode_requests > 0
  UNION ALL
  SELECT s.worker, s.start_ns + s.elapsed_ns, -1, 0
  FROM steps AS s
  SEMI JOIN waited AS w ON w.worker = s.worker
  WHERE s.decode_requests > 0
  UNION ALL
  SELECT worker, start_ns, 0, 1 FROM kv_wait
  UNION ALL
  SELECT worker, end_ns, 0, -1 FROM kv_wait
  UNION ALL
  SELECT d.worker, unnest([d.start_ns, d.end_ns]), 0, 0
  FROM decode_worker AS d
  SEMI JOIN waited AS w ON w.worker = d.worker
),
instant AS (
  SELECT worker, time_ns, sum(decoding) AS decoding, sum(waiting) AS waiting
  FROM change
  GROUP BY worker, time_ns
),
stretch AS (
  SELECT worker,
    lead(time_ns) OVER by_time - time_ns AS length_ns,
    sum(decoding) OVER by_time AS decoding,
    sum(waiting) OVER by_time AS waiting
  FROM instant
  WINDOW by_time AS (PARTITION BY worker ORDER BY time_ns)
),
idle AS (
  SELECT worker,
    coalesce(sum(length_ns) FILTER (decoding <= 0), 0) / 1e9 AS idle_s,
    coalesce(sum(length_ns) FILTER (decoding <= 0 AND waiting > 0), 0) / 1e9 AS idle_waiting_s
  FROM stretch
  GROUP BY worker
),
total AS (
  SELECT d.deployment, sum(idle_s) AS idle_s, sum(idle_waiting_s) AS idle_waiting_s,
    sum(d.end_ns - d.start_ns) / 1e9 AS observed_s, sum(kv_waited_s) AS kv_waited_s,
    sum(coalesce(bound_s, 0)) > 0.5 * sum(kv_waited_s) AS bound,
    sum(requests)::BIGINT AS requests,
    list(d.worker ORDER BY idle_waiting_s DESC, d.worker) AS workers
  FROM decode_worker AS d
  JOIN idle AS i ON i.worker = d.worker
  JOIN waited AS w ON w.worker = d.worker
  WHERE idle_waiting_s > min_idle_ratio * (d.end_ns - d.start_ns) / 1e9
  GROUP BY d.deployment
)
SELECT t.deployment, 'info' AS severity, NULL::DOUBLE AS cost_s, 'A' AS level,
  idle_waiting_s AS value, 's' AS unit,
  CASE WHEN bound THEN 0 ELSE idle_waiting_s END AS interval_low, idle_waiting_s AS interval_high,
  idle_waiting_s / observed_s AS share,
  requests, workers, []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  coalesce(s.paths, []) AS sources, observed_s, idle_s, kv_waited_s, bound
FROM total AS t
LEFT JOIN deployment_sources AS s ON s.deployment = t.deployment AND s.evidence = 'steps'
