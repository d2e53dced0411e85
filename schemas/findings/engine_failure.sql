-- engine_failure: an engine died, ran out of memory or lost its GPU, by its own log.
--
-- Events of kind oom, and of kind failure that name no request and are critical. Always critical:
-- an engine that died loses what it had in flight, and answers nothing until a restart. Which
-- requests it had is not asked: those of the whole deployment are counted that began before the first
-- of these events, had no end by then and did not succeed, where their times are known; that they
-- were lost to it is not in the data. A failed request without an end has the time of its error:
-- one that was refused before was not in flight. Level D: what the log says.
--
-- grain:   one row per deployment
-- needs:   events, requests, workers, deployment_sources
-- when:    EXISTS (FROM events WHERE kind IN ('oom', 'failure'))
-- columns:
--   deployment     VARCHAR    deployment
--   severity       VARCHAR    critical
--   cost_s         DOUBLE     s  NULL: the seconds of a dead engine are not in its log
--   level          VARCHAR    D
--   value          DOUBLE     events
--   unit           VARCHAR    events
--   interval_low   DOUBLE     NULL
--   interval_high  DOUBLE     NULL
--   share          DOUBLE     NULL
--   requests       BIGINT     requests of the deployment without success that were in flight at the first event; NULL where its time is unknown
--   workers        VARCHAR[]  workers with these events, most first
--   culprits       STRUCT(request VARCHAR, "value" DOUBLE)[]  empty
--   sources        VARCHAR[]  files that the events come from
--   kinds          STRUCT(detail VARCHAR, events BIGINT)[]  what the log said, most frequent first
--   first_ns       BIGINT     ns  earliest event; NULL unknown
--   last_ns        BIGINT     ns  latest event; NULL unknown
--   restarts       BIGINT     starts of these workers' deployment after the first event
WITH death AS (
  SELECT w.deployment, e.worker, e.detail, e.time_ns, coalesce(e.resolution_ns, 0) AS width_ns,
    coalesce(e.count, 1) AS n
  FROM events AS e
  JOIN workers AS w ON w.worker = e.worker
  WHERE e.kind = 'oom'
    OR (e.kind = 'failure' AND e.severity = 'critical' AND e.request_id IS NULL)
),
total AS (
  SELECT deployment, sum(n)::DOUBLE AS value, min(time_ns) AS first_ns, max(time_ns) AS last_ns,
    arg_min(width_ns, time_ns) AS width_ns
  FROM death
  GROUP BY deployment
),
kind_list AS (
  SELECT deployment, list({'detail': detail, 'events': n} ORDER BY n DESC, detail) AS kinds
  FROM (SELECT deployment, detail, sum(n)::BIGINT AS n FROM death GROUP BY ALL)
  GROUP BY deployment
),
worker_list AS (
  SELECT deployment, list(worker ORDER BY n DESC, worker) AS workers
  FROM (SELECT deployment, worker, sum(n) AS n FROM death GROUP BY ALL)
  GROUP BY deployment
),
in_flight AS (
  SELECT t.deployment, count(*) AS requests
  FROM total AS t
  JOIN requests AS r ON r.deployment IS NOT DISTINCT FROM t.deployment
    AND r.start_ns <= t.first_ns + t.width_ns
    AND coalesce(r.end_ns, CASE WHEN r.outcome = 'failed' THEN r.start_ns END, t.first_ns)
      >= t.first_ns - t.width_ns
    AND coalesce(r.outcome, 'unknown') <> 'completed'
  GROUP BY t.deployment
),
restart AS (
  SELECT t.deployment, count(*) AS restarts
  FROM total AS t
  JOIN workers AS w ON w.deployment IS NOT DISTINCT FROM t.deployment
  JOIN events AS e ON e.worker = w.worker
    AND e.kind IN ('started', 'restart') AND e.time_ns > t.first_ns
  GROUP BY t.deployment
)
SELECT t.deployment, 'critical' AS severity, NULL::DOUBLE AS cost_s, 'D' AS level,
  t.value, 'events' AS unit, NULL::DOUBLE AS interval_low, NULL::DOUBLE AS interval_high,
  NULL::DOUBLE AS share,
  CASE WHEN first_ns IS NOT NULL THEN coalesce(f.requests, 0) END AS requests, w.workers,
  []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  coalesce(s.paths, []) AS sources,
  k.kinds, first_ns, last_ns, coalesce(r.restarts, 0) AS restarts
FROM total AS t
JOIN kind_list AS k ON k.deployment IS NOT DISTINCT FROM t.deployment
JOIN worker_list AS w ON w.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN in_flight AS f ON f.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN restart AS r ON r.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = t.deployment AND s.evidence = 'events'
