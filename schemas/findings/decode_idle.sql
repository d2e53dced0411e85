-- decode_idle: decode workers that stood still while requests were on their way to them.
--
-- Over the time from a worker's first step to its last: what steps with decodes do not fill is
-- idle. Counted are workers with role decode whose steps are all there and have starts, that were
-- idle for more than min_idle_ratio and whose requests waited for KV (phase kv_wait or kv_transfer)
-- for at least min_wait_ratio of that; whether they waited in the very idle moments is not looked
-- at. Idle decode workers are waste only where KV or prefill is the bottleneck; with a light load
-- they are headroom. Severity: info. Level A.
--
-- grain:   one row per deployment
-- needs:   steps, workers, phases, requests, deployment_sources
-- when:    EXISTS (FROM steps)
-- params:
--   min_idle_ratio  0.2  a fifth of a worker's time
--   min_wait_ratio  0.1  waits of a tenth of the idle time: below, idleness has another reason
-- columns:
--   deployment     VARCHAR    deployment
--   severity       VARCHAR    info
--   cost_s         DOUBLE     s  NULL: idle time of a worker is not time of a request
--   level          VARCHAR    A
--   value          DOUBLE     seconds in which decode workers ran no decode step, summed
--   unit           VARCHAR    s
--   interval_low   DOUBLE     value
--   interval_high  DOUBLE     value
--   share          DOUBLE     value over the time between first and last steps
--   requests       BIGINT     requests decoded by these workers that waited for KV
--   workers        VARCHAR[]  idle workers, the greatest first
--   culprits       STRUCT(request VARCHAR, "value" DOUBLE)[]  empty
--   sources        VARCHAR[]  files that steps come from
--   observed_s     DOUBLE     s  time between first and last steps, summed over the workers
--   kv_waited_s    DOUBLE     s  time that their requests waited for KV
WITH decode_rank AS (
  SELECT w.deployment, s.worker, s.rank,
    (max(s.start_ns + s.elapsed_ns) - min(s.start_ns)) / 1e9 AS observed_s,
    coalesce(sum(s.elapsed_ns) FILTER (s.decode_requests > 0), 0) / 1e9 AS decoding_s
  FROM steps AS s
  JOIN workers AS w ON w.worker = s.worker
  WHERE w.role = 'decode'
  GROUP BY w.deployment, s.worker, s.rank
  HAVING bool_and(s.capture = 'full') AND count(s.start_ns) = count(*) AND count(*) >= 30
),
idle AS (
  SELECT deployment, worker, sum(observed_s) AS observed_s,
    sum(greatest(0, observed_s - decoding_s)) AS idle_s
  FROM decode_rank
  GROUP BY deployment, worker
),
waited AS (
  SELECT r.decode_worker AS worker, count(DISTINCT r.request) AS requests,
    sum(p.end_ns - p.start_ns) / 1e9 AS kv_waited_s
  FROM phases AS p
  JOIN requests AS r ON r.request = p.request
  WHERE p.phase IN ('kv_wait', 'kv_transfer')
  GROUP BY r.decode_worker
),
total AS (
  SELECT i.deployment, sum(idle_s) AS idle_s, sum(observed_s) AS observed_s,
    sum(kv_waited_s) AS kv_waited_s, sum(requests)::BIGINT AS requests,
    list(i.worker ORDER BY idle_s DESC, i.worker) AS workers
  FROM idle AS i
  JOIN waited AS w ON w.worker = i.worker
  WHERE idle_s > min_idle_ratio * observed_s AND kv_waited_s >= min_wait_ratio * idle_s
  GROUP BY i.deployment
)
SELECT t.deployment, 'info' AS severity, NULL::DOUBLE AS cost_s, 'A' AS level, idle_s AS value,
  's' AS unit, idle_s AS interval_low, idle_s AS interval_high, idle_s / observed_s AS share,
  requests, workers, []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  coalesce(s.paths, []) AS sources, observed_s, kv_waited_s
FROM total AS t
LEFT JOIN deployment_sources AS s ON s.deployment = t.deployment AND s.evidence = 'steps'
