-- kv_alarm: signs that answers may rest on KV that was wrong, expired or lost.
--
-- Events of kind kv_invalid, kv_expired and kv_failure, or counters of expired KV or failed
-- transfers that rose where no event tells of it. Always critical: a request can end with status 200 and a wrong answer.
-- Level D: what the logs say, whether an answer was in fact wrong is not in the data.
--
-- grain:   one row per deployment
-- needs:   events, samples, workers, legs, deployment_sources
-- when:    EXISTS (FROM samples)
--          OR EXISTS (FROM events WHERE kind IN ('kv_invalid', 'kv_expired', 'kv_failure'))
-- columns:
--   deployment     VARCHAR    deployment
--   severity       VARCHAR    critical
--   cost_s         DOUBLE     s  NULL: correctness has no seconds
--   level          VARCHAR    D
--   value          DOUBLE     alarms
--   unit           VARCHAR    events
--   interval_low   DOUBLE     NULL
--   interval_high  DOUBLE     NULL
--   share          DOUBLE     NULL
--   requests       BIGINT     requests that alarms name; NULL where they name none
--   workers        VARCHAR[]  workers with alarms, most first
--   culprits       STRUCT(request VARCHAR, "value" DOUBLE)[]  requests named most often; value: alarms
--   sources        VARCHAR[]  files that events or samples come from
--   kinds          STRUCT(kind VARCHAR, alarms BIGINT)[]  alarms by kind, most frequent first
--   first_ns       BIGINT     ns  earliest alarm; NULL unknown
--   last_ns        BIGINT     ns  latest alarm; NULL unknown
WITH alarm_event AS (
  SELECT worker, kind, time_ns, request_id, coalesce(count, 1) AS n, 'events' AS evidence
  FROM events
  WHERE kind IN ('kv_invalid', 'kv_expired', 'kv_failure')
),
counter_step AS (
  SELECT worker, metric, labels, time_ns, value,
    value - lag(value) OVER (
      PARTITION BY worker, metric, labels ORDER BY time_ns NULLS LAST, source, record
    ) AS increase,
    -- scrapes of unknown time have no order
    count(time_ns) OVER (PARTITION BY worker, metric, labels)
      < count(*) OVER (PARTITION BY worker, metric, labels) AS unordered
  FROM samples
  WHERE regexp_matches(
      metric, '(kv_expired(_reqs|_requests)?|num_failed_(transfers|recvs|notifications))(_total)?$'
    )
    AND coalesce(kind, 'counter') = 'counter'
),
counter_alarm AS (
  SELECT worker, CASE WHEN contains(metric, 'expired') THEN 'kv_expired' ELSE 'kv_failure' END AS kind,
    max(time_ns) AS time_ns, NULL::VARCHAR AS request_id,
    (CASE WHEN count(increase) = 0 THEN max(value)
      WHEN bool_or(unordered) THEN max(value) - min(value)
      ELSE sum(greatest(increase, 0)) END)::BIGINT
      AS n,
    'samples' AS evidence
  FROM counter_step AS c
  WHERE NOT EXISTS (
    SELECT 1 FROM alarm_event AS e
    WHERE e.worker = c.worker AND (e.kind = 'kv_expired') = contains(c.metric, 'expired')
  )
  GROUP BY worker, metric, labels
),
alarm AS (
  SELECT w.deployment, a.*
  FROM (FROM alarm_event UNION ALL FROM counter_alarm WHERE n > 0) AS a
  JOIN workers AS w ON w.worker = a.worker
),
kind_list AS (
  SELECT deployment, list({'kind': kind, 'alarms': n} ORDER BY n DESC, kind) AS kinds
  FROM (SELECT deployment, kind, sum(n)::BIGINT AS n FROM alarm GROUP BY ALL)
  GROUP BY deployment
),
worker_list AS (
  SELECT deployment, list(worker ORDER BY n DESC, worker) AS workers
  FROM (SELECT deployment, worker, sum(n) AS n FROM alarm GROUP BY ALL)
  GROUP BY deployment
),
request_name AS (
  SELECT deployment, request_id, min(request) AS request
  FROM legs
  WHERE request_id IN (SELECT request_id FROM alarm)
  GROUP BY deployment, request_id
),
request_alarm AS (
  SELECT a.deployment, coalesce(n.request, a.request_id) AS request, sum(a.n)::DOUBLE AS n
  FROM alarm AS a
  LEFT JOIN request_name AS n ON n.deployment IS NOT DISTINCT FROM a.deployment
    AND n.request_id = a.request_id
  WHERE a.request_id IS NOT NULL
  GROUP BY ALL
),
request_list AS (
  SELECT deployment, count(*) AS requests,
    min_by({'request': request, 'value': n}, (-n, request), 5) AS culprits
  FROM request_alarm
  GROUP BY deployment
),
total AS (
  SELECT deployment, sum(n)::DOUBLE AS alarms, min(time_ns) AS first_ns, max(time_ns) AS last_ns,
    min(evidence) AS evidence
  FROM alarm
  GROUP BY deployment
)
SELECT t.deployment, 'critical' AS severity, NULL::DOUBLE AS cost_s, 'D' AS level,
  alarms AS value, 'events' AS unit, NULL::DOUBLE AS interval_low, NULL::DOUBLE AS interval_high,
  NULL::DOUBLE AS share, r.requests, w.workers,
  coalesce(r.culprits, []) AS culprits,
  coalesce(s.paths, []) AS sources,
  k.kinds, first_ns, last_ns
FROM total AS t
JOIN kind_list AS k ON k.deployment IS NOT DISTINCT FROM t.deployment
JOIN worker_list AS w ON w.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN request_list AS r ON r.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = t.deployment AND s.evidence = t.evidence
