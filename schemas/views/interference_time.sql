-- interference_time: decode seconds lost to prefills over the time of the run, worker by worker.
--
-- At the best evidence level that shows interference on the worker and knows when: engine steps (A), else
-- token times (B: only stalls large enough to be called, so less than the total). Level C knows no instants.
--
-- grain:   one row per (deployment, worker, stretch of time); stretches without loss are zeros
-- needs:   interference_by_worker, interference_step_losses, interference_events, worker_labels, request_values
-- params:
--   bins  120  stretches
-- columns:
--   deployment      VARCHAR      deployment
--   worker          VARCHAR      the worker
--   worker_name     VARCHAR      its short name, unique in the deployment
--   start_ns        BIGINT   ns  start of the stretch
--   end_ns          BIGINT   ns  its end
--   lost_s          DOUBLE   s   decode seconds lost in it, summed over the requests held up
--   losses          BIGINT       steps (A) or stalls (B) in it
--   length_s        DOUBLE   s   length of the stretch
--   worker_lost_s   DOUBLE   s   all that is placed in time for this worker
--   total_lost_s    DOUBLE   s   what the worker lost as its best level estimates it, placed in time or not
--   level           VARCHAR      evidence level
WITH piece AS (
  SELECT b.deployment, b.worker, 'A' AS level, l.start_ns, l.lost_s, b.lost_s AS total_lost_s
  FROM interference_step_losses AS l
  JOIN interference_by_worker AS b ON b.worker = l.worker
  WHERE b.flagged AND b.level = 'A' AND l.start_ns IS NOT NULL AND l.lost_s > 0
  UNION ALL
  SELECT b.deployment, b.worker, 'B', e.end_ns, e.lost_ms / 1e3, b.lost_s
  FROM interference_events AS e
  JOIN interference_by_worker AS b ON b.worker = e.worker
  WHERE b.flagged AND b.level = 'B' AND e.end_ns IS NOT NULL
),
ends AS (
  SELECT deployment, min(first_ns) AS first_ns, max(last_ns) AS last_ns
  FROM (
    SELECT deployment, start_ns AS first_ns, start_ns AS last_ns
    FROM piece
    UNION ALL
    SELECT deployment, start_ns, end_ns
    FROM request_values
    WHERE deployment IN (SELECT deployment FROM piece)
  )
  GROUP BY deployment
),
span AS (
  SELECT deployment, first_ns, greatest(last_ns - first_ns + 1, bins) AS length_ns
  FROM ends
),
worker_of AS (
  SELECT DISTINCT deployment, worker, level, total_lost_s
  FROM piece
),
cell AS (
  SELECT w.*, s.first_ns, s.length_ns, b.bin
  FROM worker_of AS w
  JOIN span AS s ON s.deployment IS NOT DISTINCT FROM w.deployment
  CROSS JOIN range(CAST(bins AS BIGINT)) AS b(bin)
),
numbered AS (
  SELECT p.worker, p.lost_s,
    CAST(floor((p.start_ns - s.first_ns) / s.length_ns * bins) AS BIGINT) AS bin
  FROM piece AS p
  JOIN span AS s ON s.deployment IS NOT DISTINCT FROM p.deployment
),
binned AS (
  SELECT worker, bin, sum(lost_s) AS lost_s, count(*) AS losses
  FROM numbered
  GROUP BY worker, bin
)
SELECT c.deployment, c.worker, n.label AS worker_name,
  c.first_ns + CAST(c.bin * c.length_ns / bins AS BIGINT) AS start_ns,
  c.first_ns + CAST((c.bin + 1) * c.length_ns / bins AS BIGINT) AS end_ns,
  coalesce(b.lost_s, 0) AS lost_s, coalesce(b.losses, 0) AS losses,
  c.length_ns / bins / 1e9 AS length_s,
  sum(coalesce(b.lost_s, 0)) OVER (PARTITION BY c.worker) AS worker_lost_s,
  c.total_lost_s, c.level
FROM cell AS c
LEFT JOIN binned AS b ON b.worker = c.worker AND b.bin = c.bin
LEFT JOIN worker_labels AS n ON n.worker = c.worker
