-- step_gaps: engine steps that were only sampled, or that give no sum of what prefill took.
--
-- grain:   one row per (deployment, gap)
-- needs:   steps, workers, interference_steps
-- when:    EXISTS (FROM steps) OR EXISTS (FROM interference_steps)
-- columns:
--   deployment  VARCHAR    deployment
--   gap         VARCHAR    sampled_steps or steps_without_sum
--   missing     BIGINT     steps it is true of
--   total       BIGINT     out of how many
--   detail      VARCHAR    commonest reason, or NULL
--   workers     VARCHAR[]  workers with such steps
WITH step_gap AS (
  SELECT w.deployment, count(*) FILTER (s.capture = 'sampled') AS missing, count(*) AS total,
    list_sort(list_distinct(list(s.worker) FILTER (s.capture = 'sampled'))) AS workers
  FROM steps AS s
  JOIN workers AS w ON w.worker = s.worker
  GROUP BY w.deployment
),
unsummed_step AS (
  SELECT deployment, sum(steps) FILTER (lost_s IS NULL)::BIGINT AS missing,
    sum(steps)::BIGINT AS total,
    mode(note) FILTER (lost_s IS NULL) AS detail,
    list_sort(list_distinct(list(worker) FILTER (lost_s IS NULL))) AS workers
  FROM interference_steps
  -- a worker that only prefills or only decodes has nothing to lose to prefill
  WHERE role IS DISTINCT FROM 'prefill' AND decode_only_steps + mixed_steps > 0
  GROUP BY deployment
)
SELECT deployment, 'sampled_steps' AS gap, missing, total, NULL::VARCHAR AS detail, workers
FROM step_gap
UNION ALL
SELECT deployment, 'steps_without_sum', missing, total, detail, workers
FROM unsummed_step
