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
-- needs:   decode_idle_times, phases, requests, deployment_sources
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
WITH idle AS (
  SELECT deployment, worker, sum(end_ns - start_ns) / 1e9 AS observed_s,
    coalesce(sum(end_ns - start_ns) FILTER (idle), 0) / 1e9 AS idle_s,
    coalesce(sum(end_ns - start_ns) FILTER (idle AND waiting > 0), 0) / 1e9 AS idle_waiting_s,
    sum(waiting::DOUBLE * (end_ns - start_ns)) / 1e9 AS kv_waited_s,
    sum(waiting_at_most::DOUBLE * (end_ns - start_ns)) / 1e9 AS bound_s,
    min(start_ns) AS start_ns, max(end_ns) AS end_ns
  FROM decode_idle_times
  GROUP BY deployment, worker
),
waited AS (
  SELECT i.worker, count(DISTINCT p.request) AS requests
  FROM idle AS i
  JOIN requests AS r ON r.decode_worker = i.worker
  JOIN phases AS p ON p.request = r.request
  WHERE p.phase IN ('kv_wait', 'kv_transfer') AND p.end_ns > i.start_ns AND p.start_ns < i.end_ns
  GROUP BY i.worker
),
total AS (
  SELECT i.deployment, sum(idle_s) AS idle_s, sum(idle_waiting_s) AS idle_waiting_s,
    sum(observed_s) AS observed_s, sum(kv_waited_s) AS kv_waited_s,
    sum(bound_s) > 0.5 * sum(kv_waited_s) AS bound,
    sum(w.requests)::BIGINT AS requests,
    list(i.worker ORDER BY idle_waiting_s DESC, i.worker) AS workers
  FROM idle AS i
  JOIN waited AS w ON w.worker = i.worker
  WHERE idle_waiting_s > min_idle_ratio * observed_s
  GROUP BY i.deployment
)
SELECT t.deployment, 'info' AS severity, NULL::DOUBLE AS cost_s, 'A' AS level,
  idle_waiting_s AS value, 's' AS unit,
  CASE WHEN bound THEN 0 ELSE idle_waiting_s END AS interval_low, idle_waiting_s AS interval_high,
  idle_waiting_s / observed_s AS share,
  requests, workers, []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  coalesce(s.paths, []) AS sources, observed_s, idle_s, kv_waited_s, bound
FROM total AS t
LEFT JOIN deployment_sources AS s ON s.deployment = t.deployment AND s.evidence = 'steps'
