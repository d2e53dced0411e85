-- load_over_time: what each worker carried over time, in equal stretches: requests waiting and running, KV cache in use.
--
-- Means weigh each value by the time that it held (view load_points); NULL in stretches in which
-- nothing is known. At most so many workers of a deployment, those with most requests running in the
-- mean; the stretches are the wider, the more series there are, so that a picture stays small. Requests
-- in the step stand for those running where nothing tells of these.
--
-- grain:   one row per (deployment, worker, rank, quantity, stretch)
-- needs:   load_points, worker_labels
-- params:
--   bins          120  stretches, where there are few series
--   most_workers  8    workers of a deployment
-- columns:
--   deployment     VARCHAR      deployment
--   worker         VARCHAR      the worker
--   label          VARCHAR      its short name, with its rank where there are several
--   quantity       VARCHAR      waiting, running or batch (requests), kv_usage (share)
--   start_ns       BIGINT   ns  start of the stretch
--   end_ns         BIGINT   ns  its end
--   mean           DOUBLE       mean over that time of the stretch for which it is known; NULL unknown
--   low            DOUBLE       least in it
--   high           DOUBLE       greatest in it
--   resolution_ns  BIGINT   ns  instants are known to this
--   level          VARCHAR      A (steps), B (counted from requests) or D (samples)
--   workers        BIGINT       workers of the deployment of which anything is known
WITH known AS MATERIALIZED (
  FROM load_points
),
busy AS (
  SELECT deployment, worker,
    avg(value) FILTER (quantity IN ('running', 'batch')) AS busy,
    bool_or(quantity = 'running') AS runs
  FROM known
  GROUP BY deployment, worker
),
ranked AS (
  SELECT *, count(*) OVER (PARTITION BY deployment) AS workers,
    row_number() OVER (PARTITION BY deployment ORDER BY busy DESC NULLS LAST, worker) AS place
  FROM busy
),
chosen AS (
  SELECT p.*, r.workers
  FROM known AS p
  JOIN ranked AS r ON r.worker = p.worker
  WHERE r.place <= most_workers AND (p.quantity <> 'batch' OR NOT r.runs)
),
span AS (
  SELECT deployment, min(time_ns) AS first_ns, greatest(max(time_ns) - min(time_ns), 1) AS length_ns,
    greatest(4500 // count(DISTINCT (worker, rank, quantity)), 12) AS room
  FROM chosen
  GROUP BY deployment
),
cut AS (
  SELECT *, least(bins::BIGINT, room) AS stretches
  FROM span
),
series AS (
  SELECT deployment, worker, rank, quantity, any_value(level) AS level, any_value(workers) AS workers,
    max(resolution_ns) AS resolution_ns
  FROM chosen
  GROUP BY deployment, worker, rank, quantity
),
-- several values of one instant: the last cannot be told, so the greatest
instant AS (
  SELECT worker, rank, quantity, time_ns, max(value) AS value
  FROM chosen
  GROUP BY worker, rank, quantity, time_ns
),
edge AS (
  SELECT s.worker, s.rank, s.quantity,
    t.first_ns + (i.n * t.length_ns // t.stretches) AS time_ns
  FROM series AS s
  JOIN cut AS t ON t.deployment IS NOT DISTINCT FROM s.deployment
  JOIN (SELECT unnest(range(bins::BIGINT + 1)) AS n) AS i ON i.n <= t.stretches
),
held AS (
  SELECT e.worker, e.rank, e.quantity, e.time_ns, p.value
  FROM edge AS e
  ASOF JOIN instant AS p ON p.worker = e.worker AND p.rank = e.rank AND p.quantity = e.quantity
    AND e.time_ns >= p.time_ns
),
piece AS (
  SELECT *, lead(time_ns) OVER (
      PARTITION BY worker, rank, quantity ORDER BY time_ns
    ) - time_ns AS length_ns
  FROM (FROM instant UNION ALL FROM held)
),
stretch AS (
  SELECT p.worker, p.rank, p.quantity,
    least((p.time_ns - t.first_ns) * t.stretches // t.length_ns, t.stretches - 1) AS bin,
    sum(p.value * p.length_ns) FILTER (p.value IS NOT NULL)
      / sum(p.length_ns) FILTER (p.value IS NOT NULL) AS mean,
    min(p.value) AS low, max(p.value) AS high
  FROM piece AS p
  JOIN series AS s ON s.worker = p.worker AND s.rank = p.rank AND s.quantity = p.quantity
  JOIN cut AS t ON t.deployment IS NOT DISTINCT FROM s.deployment
  WHERE p.length_ns > 0
  GROUP BY ALL
)
SELECT s.deployment, s.worker,
  l.label || CASE WHEN count(DISTINCT s.rank) OVER (PARTITION BY s.worker, s.quantity) > 1
    THEN ' rank ' || s.rank ELSE '' END AS label,
  s.quantity, t.first_ns + p.bin * t.length_ns // t.stretches AS start_ns,
  t.first_ns + (p.bin + 1) * t.length_ns // t.stretches AS end_ns,
  p.mean, p.low, p.high, s.resolution_ns, s.level, s.workers
FROM stretch AS p
JOIN series AS s ON s.worker = p.worker AND s.rank = p.rank AND s.quantity = p.quantity
JOIN cut AS t ON t.deployment IS NOT DISTINCT FROM s.deployment
JOIN worker_labels AS l ON l.worker = s.worker
ORDER BY s.deployment, s.quantity, label, start_ns
