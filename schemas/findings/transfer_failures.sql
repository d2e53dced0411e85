-- transfer_failures: KV movements that failed or expired.
--
-- Severity: warning; critical from one in a hundred on. Level D: what workers state of their
-- transfers.
--
-- grain:   one row per deployment
-- needs:   transfer_times, deployment_sources
-- when:    EXISTS (FROM transfers)
-- columns:
--   deployment     VARCHAR    deployment
--   severity       VARCHAR    critical or warning
--   cost_s         DOUBLE     s  seconds that failed movements lasted; NULL unknown
--   level          VARCHAR    D
--   value          DOUBLE     failed and expired movements
--   unit           VARCHAR    transfers
--   interval_low   DOUBLE     NULL
--   interval_high  DOUBLE     NULL
--   share          DOUBLE     value over all movements stated
--   requests       BIGINT     requests that they name; NULL where they name none
--   workers        VARCHAR[]  workers they were to reach, most first
--   culprits       STRUCT(request VARCHAR, "value" DOUBLE)[]  the five requests named most often; value: failures
--   sources        VARCHAR[]  files that name the workers
--   transfers      BIGINT     movements stated
--   failed         BIGINT     of them failed
--   expired        BIGINT     of them expired
WITH known_transfer AS (
  SELECT deployment, coalesce(destination_worker, source_worker) AS worker, outcome,
    coalesce(request, request_id) AS request, duration_ms
  FROM transfer_times
  WHERE deployment IS NOT NULL
),
deployment_total AS (
  SELECT deployment, count(*) AS transfers, count(*) FILTER (outcome = 'failed') AS failed,
    count(*) FILTER (outcome = 'expired') AS expired,
    count(DISTINCT request) FILTER (outcome IN ('failed', 'expired')) AS requests,
    sum(duration_ms) FILTER (outcome IN ('failed', 'expired')) / 1e3 AS cost_s
  FROM known_transfer
  GROUP BY deployment
),
worker_list AS (
  SELECT deployment, list(worker ORDER BY n DESC, worker) AS workers
  FROM (
    SELECT deployment, worker, count(*) AS n
    FROM known_transfer
    WHERE outcome IN ('failed', 'expired') AND worker IS NOT NULL
    GROUP BY deployment, worker
  )
  GROUP BY deployment
),
request_list AS (
  SELECT deployment, min_by({'request': request, 'value': n}, (-n, request), 5) AS culprits
  FROM (
    SELECT deployment, request, count(*)::DOUBLE AS n
    FROM known_transfer
    WHERE outcome IN ('failed', 'expired') AND request IS NOT NULL
    GROUP BY deployment, request
  )
  GROUP BY deployment
)
SELECT t.deployment,
  CASE WHEN failed + expired >= 0.01 * transfers THEN 'critical' ELSE 'warning' END AS severity,
  cost_s, 'D' AS level, (failed + expired)::DOUBLE AS value, 'transfers' AS unit,
  NULL::DOUBLE AS interval_low, NULL::DOUBLE AS interval_high,
  (failed + expired) / transfers AS share, nullif(requests, 0) AS requests,
  coalesce(w.workers, []) AS workers,
  coalesce(r.culprits, []) AS culprits,
  coalesce(s.paths, []) AS sources,
  transfers, failed, expired
FROM deployment_total AS t
LEFT JOIN worker_list AS w ON w.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN request_list AS r ON r.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = t.deployment AND s.evidence = 'workers'
WHERE failed + expired > 0
