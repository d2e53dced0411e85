-- deployment_sources: which files a deployment's requests and workers were read from.
--
-- grain:   one row per deployment and kind of evidence
-- needs:   legs, sources, worker_aliases, workers, steps, events, samples
-- columns:
--   deployment  VARCHAR    deployment
--   evidence    VARCHAR    requests (legs), workers (whatever named one of its workers), steps, events or samples
--   paths       VARCHAR[]  paths of the sources, in order
WITH evidence_of_source AS (
  SELECT DISTINCT deployment, 'requests' AS evidence, source
  FROM legs
  UNION ALL
  SELECT DISTINCT w.deployment, 'workers', a.source
  FROM worker_aliases AS a
  JOIN workers AS w ON w.worker = a.worker
  UNION ALL
  SELECT DISTINCT w.deployment, 'steps', s.source
  FROM (SELECT DISTINCT worker, source FROM steps) AS s
  JOIN workers AS w ON w.worker = s.worker
  UNION ALL
  SELECT DISTINCT w.deployment, 'events', e.source
  FROM (SELECT DISTINCT worker, source FROM events) AS e
  JOIN workers AS w ON w.worker = e.worker
  UNION ALL
  SELECT DISTINCT w.deployment, 'samples', m.source
  FROM (SELECT DISTINCT worker, source FROM samples) AS m
  JOIN workers AS w ON w.worker = m.worker
)
SELECT e.deployment, e.evidence, list(DISTINCT s.path ORDER BY s.path) AS paths
FROM evidence_of_source AS e
JOIN sources AS s ON s.source = e.source
WHERE e.deployment IS NOT NULL
GROUP BY e.deployment, e.evidence
