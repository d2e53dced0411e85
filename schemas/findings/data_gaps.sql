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
-- needs:   request_values, legs, step_gaps, record_gaps, deployment_sources
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
gap_entry AS (
  SELECT deployment, entry.gap AS gap, entry.missing AS missing, total, NULL::VARCHAR AS detail,
    NULL::VARCHAR[] AS workers
  FROM request_gap
  UNION ALL
  SELECT deployment, 'unjoined_legs', missing, total, NULL, NULL FROM leg_gap
  UNION ALL
  SELECT deployment, gap, missing, total, detail, workers FROM step_gaps
  UNION ALL
  SELECT deployment, gap, missing, total, detail, NULL FROM record_gaps
),
judged AS (
  SELECT *, missing / nullif(total, 0) AS ratio,
    missing > 0
      AND (missing >= min_ratio * total OR gap IN ('sampled_steps', 'conflicting_copies')
        OR detail ILIKE 'cut %') AS material
  FROM gap_entry
),
gap_list AS (
  SELECT deployment,
    list(
      {'gap': gap, 'missing': missing, 'total': total, 'detail': detail} ORDER BY ratio DESC, gap
    ) FILTER (material) AS gaps,
    max(ratio) FILTER (material) AS worst_ratio,
    max(missing) FILTER (material AND (starts_with(gap, 'missing_') OR gap = 'unknown_outcome'))
      AS requests,
    list_sort(list_distinct(flatten(list(workers) FILTER (workers IS NOT NULL)))) AS workers
  FROM judged
  WHERE deployment IS NOT NULL
  GROUP BY deployment
  HAVING bool_or(material)
),
file AS (
  SELECT deployment, list_sort(list_distinct(flatten(list(paths)))) AS paths
  FROM deployment_sources
  WHERE evidence IN ('requests', 'workers')
  GROUP BY deployment
)
SELECT g.deployment,
  CASE WHEN worst_ratio >= 0.5 THEN 'warning' ELSE 'info' END AS severity,
  NULL::DOUBLE AS cost_s, 'D' AS level, worst_ratio AS value, '1' AS unit,
  NULL::DOUBLE AS interval_low, NULL::DOUBLE AS interval_high, worst_ratio AS share, requests,
  coalesce(workers, []) AS workers,
  []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  coalesce(f.paths, []) AS sources,
  gaps
FROM gap_list AS g
LEFT JOIN file AS f ON f.deployment = g.deployment
