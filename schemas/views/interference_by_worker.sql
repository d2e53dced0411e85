-- interference_by_worker: decode seconds lost to prefill, worker by worker, at the best evidence level
-- that can judge the worker.
--
-- Level A (engine steps) where it has a sum, else B (token times and prefill intervals), else C
-- (durations of requests). What the other levels say stands beside it; seconds of two levels are
-- two estimates of one thing and are never added. Nor are those of two names that may be one server:
-- where steps name no request and requests lie on workers without steps, the more numerous side counts.
--
-- grain:   one row per worker that any level looked at; worker NULL where nobody says who served the
--          requests of the deployment
-- needs:   interference_steps, interference_gaps, interference_requests, worker_labels
-- columns:
--   deployment            VARCHAR       deployment
--   worker                VARCHAR       the worker; NULL unknown
--   role                  VARCHAR       its role
--   label                 VARCHAR       its short name; NULL unknown
--   level                 VARCHAR       A, B or C: the level of the numbers; NULL where no level can judge
--   flagged               BOOLEAN       interference is shown; NULL cannot tell
--   lost_s                DOUBLE    s   decode seconds lost; at level C a lower value
--   lost_low_s            DOUBLE    s   95 % interval of the loss of this period, lower end
--   lost_high_s           DOUBLE    s   upper end
--   decode_s              DOUBLE    s   decode time as that level counts it: the denominator
--   lost_ratio            DOUBLE        lost_s / decode_s
--   lost_ratio_low        DOUBLE        lower bound of the share
--   steps_lost_s          DOUBLE    s   what level A says; NULL cannot tell
--   gaps_lost_s           DOUBLE    s   what level B says; NULL cannot tell
--   requests_lost_s       DOUBLE    s   what level C says; NULL cannot tell
--   tail_explained_ratio  DOUBLE        level B: share of the excess of the longest hundredth of gaps that prefills explain
--   events                BIGINT        level B: single stalls called; NULL where it flags nothing
--   event_ms              DOUBLE    ms  level B: smallest loss that is called
--   best_shift_ms         DOUBLE    ms  level B, check: by how much prefills would have to move to fit the stalls best
--   notes                 VARCHAR[]     what limits the numbers of that level, or why no level can judge
WITH rank_sum AS (
  -- a worker's ranks: those that show interference where one does, else all that were judged
  SELECT *, bool_or(flagged) OVER (PARTITION BY worker) AS shown
  FROM interference_steps
),
by_steps AS (
  SELECT any_value(deployment) AS deployment, worker, any_value(role) AS role, 'A' AS level,
    any_value(shown) AS flagged, sum(lost_s) AS lost_s, sum(lost_low_s) AS lost_low_s,
    sum(lost_high_s) AS lost_high_s, sum(decode_s) AS decode_s,
    sum(lost_s) / nullif(sum(decode_s), 0) AS lost_ratio, min(lost_ratio_low) AS lost_ratio_low,
    list_sort(list_distinct(list(note) FILTER (note IS NOT NULL))) AS notes
  FROM rank_sum
  WHERE flagged = shown
  GROUP BY worker
),
judged AS (
  SELECT * FROM by_steps
  UNION ALL
  SELECT deployment, worker, role, 'B', flagged, lost_s, lost_low_s, lost_high_s, decode_s,
    lost_ratio, lost_ratio_low, CASE WHEN note IS NULL THEN [] ELSE [note] END
  FROM interference_gaps
  WHERE flagged IS NOT NULL
  UNION ALL
  SELECT deployment, worker, role, 'C', flagged, lost_s, lost_low_s, lost_high_s, decode_s,
    lost_ratio, lost_ratio_low, CASE WHEN note IS NULL THEN [] ELSE [note] END
  FROM interference_requests
  WHERE flagged IS NOT NULL
),
looked_at AS (
  SELECT deployment, worker, role, note, 1 AS place FROM interference_steps
  UNION ALL
  SELECT deployment, worker, role, note, 2 FROM interference_gaps
  UNION ALL
  SELECT deployment, worker, role, note, 3 FROM interference_requests
),
worker_seen AS (
  SELECT deployment, worker, any_value(role) AS role,
    list(DISTINCT note ORDER BY note) FILTER (note IS NOT NULL) AS notes
  FROM looked_at
  GROUP BY deployment, worker
),
best AS (
  SELECT *
  FROM judged
  QUALIFY row_number() OVER (PARTITION BY deployment, worker ORDER BY level) = 1
),
served AS (
  SELECT worker FROM interference_gaps WHERE worker IS NOT NULL
  UNION
  SELECT worker FROM interference_requests WHERE worker IS NOT NULL
),
half_known AS (
  -- steps under a name that no request bears, requests under a name that no step bears
  SELECT b.deployment, b.worker, b.level = 'A' AS steps
  FROM best AS b
  WHERE b.worker IS NOT NULL AND (
    (b.level = 'A' AND b.worker NOT IN (FROM served))
    OR (b.level <> 'A' AND b.worker NOT IN (SELECT worker FROM interference_steps))
  )
),
side AS (
  SELECT deployment, count(*) FILTER (steps) >= count(*) FILTER (NOT steps) AS by_steps
  FROM half_known
  GROUP BY deployment
  HAVING bool_or(steps) AND bool_or(NOT steps)
),
doubled AS (
  SELECT h.worker
  FROM half_known AS h
  JOIN side AS d ON d.deployment IS NOT DISTINCT FROM h.deployment AND d.by_steps <> h.steps
),
counted AS (
  FROM best WHERE worker IS NULL OR worker NOT IN (FROM doubled)
)
SELECT s.deployment, s.worker, s.role, n.label, b.level, b.flagged, b.lost_s, b.lost_low_s, b.lost_high_s,
  b.decode_s, b.lost_ratio, b.lost_ratio_low,
  a.lost_s AS steps_lost_s, g.lost_s AS gaps_lost_s, r.lost_s AS requests_lost_s,
  g.tail_explained_ratio, g.events, g.event_ms, g.best_shift_ms,
  CASE WHEN s.worker IN (FROM doubled)
    THEN ['its steps and its requests may stand under two names: counted under the other']
    ELSE coalesce(CASE WHEN b.level IS NULL THEN s.notes ELSE b.notes END, []) END AS notes
FROM worker_seen AS s
LEFT JOIN counted AS b ON b.worker IS NOT DISTINCT FROM s.worker
  AND b.deployment IS NOT DISTINCT FROM s.deployment
LEFT JOIN by_steps AS a ON a.worker = s.worker
LEFT JOIN interference_gaps AS g ON g.worker = s.worker
LEFT JOIN interference_requests AS r ON r.worker IS NOT DISTINCT FROM s.worker
  AND r.deployment IS NOT DISTINCT FROM s.deployment
LEFT JOIN worker_labels AS n ON n.worker = s.worker
