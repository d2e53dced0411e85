-- request_ranks: which data-parallel rank of a worker served a request, where that can part the worker's requests.
--
-- A rank has a scheduler and a KV cache of its own: a prompt on one does not stand in the steps of another. Known from
-- what routers and tables of requests say (legs), and from steps that name their members. Only workers under whose
-- name two ranks or more served requests, and of whose decoded requests nine in ten have one known rank: what is
-- known of fewer cannot part them. A request that two ranks of one worker served (a retry) has none.
--
-- grain:   one row per (request, worker)
-- needs:   legs, steps, step_members, requests
-- columns:
--   request  VARCHAR  request
--   worker   VARCHAR  worker that served it
--   rank     VARCHAR  data-parallel rank or engine index inside the worker
WITH stepping AS (
  SELECT worker
  FROM steps
  WHERE rank IS NOT NULL
  GROUP BY worker
  HAVING count(DISTINCT rank) > 1
),
member AS (
  SELECT DISTINCT worker, rank, request_id
  FROM step_members
  WHERE rank IS NOT NULL AND request_id IS NOT NULL AND worker IN (FROM stepping)
),
told AS (
  SELECT request, worker, rank
  FROM legs
  WHERE rank IS NOT NULL AND request IS NOT NULL AND worker IS NOT NULL
  UNION ALL
  SELECT l.request, l.worker, m.rank
  FROM member AS m
  JOIN legs AS l ON l.worker = m.worker AND l.request_id = m.request_id
  WHERE l.request IS NOT NULL
),
several AS (
  SELECT worker
  FROM told
  GROUP BY worker
  HAVING count(DISTINCT rank) > 1
),
one AS (
  SELECT request, worker, any_value(rank) AS rank
  FROM told
  WHERE worker IN (FROM several)
  GROUP BY request, worker
  HAVING count(DISTINCT rank) = 1
),
parted AS (
  SELECT r.decode_worker AS worker
  FROM requests AS r
  LEFT JOIN one AS o ON o.request = r.request AND o.worker = r.decode_worker
  WHERE r.decode_worker IN (FROM several)
  GROUP BY r.decode_worker
  HAVING count(o.rank) >= 0.9 * count(*) AND count(DISTINCT o.rank) > 1
)
SELECT request, worker, rank
FROM one
WHERE worker IN (FROM parted)
