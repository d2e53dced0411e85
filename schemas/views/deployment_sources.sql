-- deployment_sources: which files a deployment's requests and workers were read from.
--
-- grain:   one row per deployment and kind of evidence
-- needs:   legs, sources, worker_aliases, workers, steps, events, samples
-- columns:
--   deployment  VARCHAR    deployment
--   evidence    VARCHAR    requests (legs), workers (whatever named one of its workers), steps, events or samples
--   paths       VARCHAR[]  paths of the sources, in order
WITH told_of_worker AS (
  SELECT 'workers' AS evidence, worker, source FROM worker_aliases
  UNION ALL
  SELECT DISTINCT 'steps', worker, source FROM steps
  UNION ALL
  SELECT DISTINCT 'events', worker, source FROM events
  UNION ALL
  SELECT DISTINCT 'samples', worker, source FROM samples
),
evidence_of_source AS (
  SELECT DISTINCT deployment, 'requests' AS evidence, source
  FROM legs
  UNION ALL
  SELECT w.deployment, t.evidence, t.source
  FROM told_of_worker AS t
  JOIN workers AS w ON w.worker = t.worker
)
SELECT e.deployment, e.evidence, list_sort(list_distinct(list(s.path))) AS paths
FROM evidence_of_source AS e
JOIN sources AS s ON s.source = e.source
WHERE e.deployment IS NOT NULL
GROUP BY e.deployment, e.evidence
