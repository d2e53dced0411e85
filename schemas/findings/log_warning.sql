-- log_warning: what servers warn of in their own logs, in few words, most frequent first.
--
-- Events of kind warning that a collector knows and calls more than a remark (severity warning or
-- critical): a KV transfer that was asked for and cannot be, hand-shakes that timed out, prefill that
-- failed and was done again on the decode side. Where a request is named the same may stand in other
-- findings by its effect. What it cost is not in the log. Level D.
--
-- grain:   one row per deployment
-- needs:   events, workers, deployment_sources
-- when:    EXISTS (FROM events WHERE kind = 'warning' AND severity <> 'info')
-- columns:
--   deployment     VARCHAR    deployment
--   severity       VARCHAR    warning
--   cost_s         DOUBLE     s  NULL: what it cost is not in the log
--   level          VARCHAR    D
--   value          DOUBLE     events
--   unit           VARCHAR    events
--   interval_low   DOUBLE     NULL
--   interval_high  DOUBLE     NULL
--   share          DOUBLE     NULL
--   requests       BIGINT     requests that the warnings name; NULL where they name none
--   workers        VARCHAR[]  workers that warned, most first
--   culprits       STRUCT(request VARCHAR, "value" DOUBLE)[]  empty
--   sources        VARCHAR[]  files that the events come from
--   kinds          STRUCT(detail VARCHAR, events BIGINT)[]  what is warned of, most frequent first
--   first_ns       BIGINT     ns  earliest event; NULL unknown
WITH warned AS (
  SELECT w.deployment, e.worker, e.detail, e.time_ns, e.request_id, coalesce(e.count, 1) AS n
  FROM events AS e
  JOIN workers AS w ON w.worker = e.worker
  WHERE e.kind = 'warning' AND e.severity <> 'info' AND e.detail IS NOT NULL
),
kind_list AS (
  SELECT deployment, list({'detail': detail, 'events': n} ORDER BY n DESC, detail) AS kinds
  FROM (SELECT deployment, detail, sum(n)::BIGINT AS n FROM warned GROUP BY ALL)
  GROUP BY deployment
),
worker_list AS (
  SELECT deployment, list(worker ORDER BY n DESC, worker) AS workers
  FROM (SELECT deployment, worker, sum(n) AS n FROM warned GROUP BY ALL)
  GROUP BY deployment
),
total AS (
  SELECT deployment, sum(n)::DOUBLE AS value, nullif(count(DISTINCT request_id), 0) AS requests,
    min(time_ns) AS first_ns
  FROM warned
  GROUP BY deployment
)
SELECT t.deployment, 'warning' AS severity, NULL::DOUBLE AS cost_s, 'D' AS level,
  t.value, 'events' AS unit,
  NULL::DOUBLE AS interval_low, NULL::DOUBLE AS interval_high, NULL::DOUBLE AS share,
  t.requests, l.workers,
  []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  coalesce(s.paths, []) AS sources,
  k.kinds, t.first_ns
FROM total AS t
LEFT JOIN kind_list AS k ON k.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN worker_list AS l ON l.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = t.deployment AND s.evidence = 'events'
