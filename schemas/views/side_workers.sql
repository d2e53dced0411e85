-- side_workers: the workers that could get requests of a side, those that got none among them.
--
-- A worker without requests counts where it is known the way those with requests are: told by one of the
-- collectors that told of them. One that only a log or a scrape knows, while the requests come from
-- spans under other names, may be one of those and is no idle worker.
--
-- grain:   one row per (deployment, side, worker)
-- needs:   side_sums, workers, worker_aliases, sources
-- when:    (SELECT min(worker) <> max(worker) FROM (SELECT worker FROM workers
--          UNION ALL SELECT prefill_worker FROM requests UNION ALL SELECT decode_worker FROM requests))
-- columns:
--   deployment  VARCHAR  deployment
--   side        VARCHAR  prefill or decode
--   worker      VARCHAR  the worker
WITH busy AS (
  SELECT deployment, side, worker FROM side_sums
),
told AS (
  -- names without a source are those that spans bear
  SELECT DISTINCT a.worker, unnest(string_split(coalesce(s.collector, 'spans'), '+')) AS collector
  FROM worker_aliases AS a
  LEFT JOIN sources AS s ON s.source = a.source
),
busy_told AS (
  SELECT DISTINCT b.deployment, t.collector FROM busy AS b JOIN told AS t ON t.worker = b.worker
),
possible AS (
  SELECT w.deployment, s.side, w.worker
  FROM workers AS w
  JOIN (SELECT DISTINCT deployment, side FROM busy) AS s
    ON s.deployment IS NOT DISTINCT FROM w.deployment
  WHERE w.role = s.side OR (w.role = 'aggregated' AND s.side = 'prefill')
),
elsewhere AS (
  SELECT DISTINCT p.worker
  FROM possible AS p
  SEMI JOIN told AS t ON t.worker = p.worker
  SEMI JOIN busy_told AS b ON b.deployment IS NOT DISTINCT FROM p.deployment
  WHERE NOT EXISTS (
    SELECT 1
    FROM told AS t
    JOIN busy_told AS b ON b.collector = t.collector
    WHERE t.worker = p.worker AND b.deployment IS NOT DISTINCT FROM p.deployment
  )
)
FROM busy
UNION
SELECT deployment, side, worker FROM possible WHERE worker NOT IN (FROM elsewhere)
