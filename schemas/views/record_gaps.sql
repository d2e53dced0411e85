-- record_gaps: records of a deployment's files that could not be taken, or that contradict their copies.
--
-- grain:   one row per (deployment, gap)
-- needs:   legs, workers, worker_aliases, skipped, sources
-- when:    EXISTS (FROM skipped)
-- columns:
--   deployment  VARCHAR  deployment
--   gap         VARCHAR  skipped_records or conflicting_copies
--   missing     BIGINT   records
--   total       BIGINT   records of the files that name the deployment
--   detail      VARCHAR  commonest reason
WITH deployment_source AS (
  SELECT DISTINCT deployment, source
  FROM legs
  UNION
  SELECT w.deployment, a.source
  FROM worker_aliases AS a
  JOIN workers AS w ON w.worker = a.worker
),
reason_count AS (
  SELECT d.deployment,
    CASE WHEN k.reason ILIKE '%conflict%' THEN 'conflicting_copies' ELSE 'skipped_records' END
      AS gap,
    k.reason, sum(k.records) AS records
  FROM deployment_source AS d
  JOIN skipped AS k ON k.source = d.source
  -- Lines that say nothing and duplicates lose nothing: only what could not be taken counts.
  WHERE regexp_matches(
    k.reason,
    'cut |not json|not an |not a sample|could not|cannot|unread|longer than|damage|corrupt|decod'
    || '|trunc|malformed|invalid|broken|conflict|without (an? )?(trace|span|request|record) ?id',
    'i'
  )
  GROUP BY ALL
),
record_total AS (
  SELECT d.deployment, sum(s.rows_read)::BIGINT AS total
  FROM deployment_source AS d
  JOIN sources AS s ON s.source = d.source
  GROUP BY d.deployment
),
record_gap AS (
  SELECT r.deployment, r.gap, sum(r.records)::BIGINT AS missing, any_value(t.total) AS total,
    min_by(r.reason, (-r.records, r.reason)) AS detail
  FROM reason_count AS r
  JOIN record_total AS t ON t.deployment IS NOT DISTINCT FROM r.deployment
  GROUP BY r.deployment, r.gap
)
SELECT deployment, gap, missing, total, detail
FROM record_gap
