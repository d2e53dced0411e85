-- data_gaps: what is missing in the data in a way that limits the answers.
--
-- One entry a gap, with how many of how many: missing_first_token, missing_output_tokens,
-- missing_prompt_tokens, missing_worker, unknown_outcome (of requests); sampled_steps,
-- steps_without_sum (of steps); skipped_records, conflicting_copies (of the records of the files
-- that name this deployment); unjoined_legs (of legs). An entry is material from min_ratio on;
-- conflicting copies, sampled steps and files cut off always are. Severity: warning when a gap
-- covers half of its kind or more, info otherwise. Level D: absence is no measurement.
--
-- grain:   one row per deployment
-- needs:   request_values, legs, steps, workers, worker_aliases, skipped, sources, interference_steps, deployment_sources
-- params:
--   min_ratio  0.05  a twentieth missing does not move a median or a sum beyond its usual interval
-- columns:
--   deployment     VARCHAR    deployment
--   severity       VARCHAR    warning or info
--   cost_s         DOUBLE     s  NULL
--   level          VARCHAR    D
--   value          DOUBLE     largest share that is missing
--   unit           VARCHAR    1
--   interval_low   DOUBLE     NULL
--   interval_high  DOUBLE     NULL
--   share          DOUBLE     value
--   requests       BIGINT     requests with the largest gap among requests; NULL when none is among them
--   workers        VARCHAR[]  workers with sampled or unusable steps
--   culprits       STRUCT(request VARCHAR, "value" DOUBLE)[]  empty
--   sources        VARCHAR[]  files of the deployment
--   gaps           STRUCT(gap VARCHAR, missing BIGINT, total BIGINT, detail VARCHAR)[]  what is missing, largest share first; detail: commonest reason, or NULL
WITH request_gap AS (
  SELECT r.deployment, unnest([
    {'gap': 'missing_first_token',
      'missing': count(*) FILTER (r.ttft_ms IS NULL AND r.outcome IS DISTINCT FROM 'failed')},
    {'gap': 'missing_output_tokens',
      'missing': count(*) FILTER (r.output_tokens IS NULL AND r.outcome IS DISTINCT FROM 'failed')},
    {'gap': 'missing_prompt_tokens', 'missing': count(*) FILTER (r.prompt_tokens IS NULL)},
    -- where no request has a worker (a table from outside) there is none to miss
    {'gap': 'missing_worker',
      'missing': CASE WHEN count(coalesce(prefill_worker, decode_worker)) > 0
        THEN count(*) - count(coalesce(prefill_worker, decode_worker)) ELSE 0 END},
    {'gap': 'unknown_outcome',
      'missing': count(*) FILTER (coalesce(r.outcome, 'unknown') = 'unknown')}
  ]) AS entry, count(*) AS total
  FROM request_values AS r
  GROUP BY r.deployment
),
leg_gap AS (
  SELECT deployment, count(*) FILTER (request IS NULL) AS missing, count(*) AS total
  FROM legs
  WHERE container IS NOT TRUE
  GROUP BY deployment
),
step_gap AS (
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
),
deployment_source AS (
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
),
gap_entry AS (
  SELECT deployment, entry.gap AS gap, entry.missing AS missing, total, NULL::VARCHAR AS detail
  FROM request_gap
  UNION ALL
  SELECT deployment, 'unjoined_legs', missing, total, NULL FROM leg_gap
  UNION ALL
  SELECT deployment, 'sampled_steps', missing, total, NULL FROM step_gap
  UNION ALL
  SELECT deployment, 'steps_without_sum', missing, total, detail FROM unsummed_step
  UNION ALL
  SELECT deployment, gap, missing, total, detail FROM record_gap
),
material AS (
  SELECT *, missing / nullif(total, 0) AS ratio
  FROM gap_entry
  WHERE missing > 0
    AND (missing >= min_ratio * total OR gap IN ('sampled_steps', 'conflicting_copies')
      OR detail ILIKE 'cut %')
),
gap_list AS (
  SELECT deployment,
    list(
      {'gap': gap, 'missing': missing, 'total': total, 'detail': detail} ORDER BY ratio DESC, gap
    ) AS gaps,
    max(ratio) AS worst_ratio,
    max(missing) FILTER (starts_with(gap, 'missing_') OR gap = 'unknown_outcome') AS requests
  FROM material
  GROUP BY deployment
)
SELECT g.deployment,
  CASE WHEN worst_ratio >= 0.5 THEN 'warning' ELSE 'info' END AS severity,
  NULL::DOUBLE AS cost_s, 'D' AS level, worst_ratio AS value, '1' AS unit,
  NULL::DOUBLE AS interval_low, NULL::DOUBLE AS interval_high, worst_ratio AS share, requests,
  list_sort(list_distinct(list_concat(coalesce(t.workers, []), coalesce(u.workers, []))))
    AS workers,
  []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  list_sort(list_distinct(list_concat(coalesce(s.paths, []), coalesce(a.paths, [])))) AS sources,
  gaps
FROM gap_list AS g
LEFT JOIN step_gap AS t ON t.deployment IS NOT DISTINCT FROM g.deployment
LEFT JOIN unsummed_step AS u ON u.deployment IS NOT DISTINCT FROM g.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = g.deployment AND s.evidence = 'requests'
LEFT JOIN deployment_sources AS a ON a.deployment = g.deployment AND a.evidence = 'workers'
WHERE g.deployment IS NOT NULL
