-- prefill_interference: decode seconds that prompts of other requests took on the same worker, from
-- its engine steps.
--
-- Sums the workers for which interference is shown (flagged, see table interference_steps); workers
-- not flagged are not in it. The denominator of share is step-counted decode time (step duration x
-- requests decoding, summed) of the flagged workers, not the decode time of request spans. Removing
-- interference would make streams steadier; that is not the same as faster. Culprits are known only
-- where steps name their members. Severity: warning from 5 % of decode time on, info below. Level
-- A: engine steps, all of them.
--
-- grain:   one row per deployment
-- needs:   interference_steps, interference_step_losses, step_members, legs, requests, deployment_sources
-- when:    EXISTS (FROM interference_steps)
-- columns:
--   deployment          VARCHAR    deployment
--   severity            VARCHAR    warning or info
--   cost_s              DOUBLE     s  value
--   level               VARCHAR    A
--   value               DOUBLE     decode seconds lost, summed over the requests held up
--   unit                VARCHAR    s
--   interval_low        DOUBLE     95 % interval of the loss of this period, lower end
--   interval_high       DOUBLE     upper end
--   share               DOUBLE     value over step-counted decode time of the flagged workers
--   requests            BIGINT     requests decoded by the flagged workers; NULL unknown
--   workers             VARCHAR[]  flagged workers, the greatest loss first
--   culprits            STRUCT(request VARCHAR, "value" DOUBLE)[]  requests whose prompts took most, where steps name their members; value: seconds taken
--   sources             VARCHAR[]  files that the steps come from
--   decode_s            DOUBLE     s  step-counted decode time: the denominator of share
--   share_low           DOUBLE     95 % block bootstrap bound of the share over the flagged workers (smallest of them)
--   affected_steps      BIGINT     steps with prompt tokens during which requests were decoding
--   mixed_steps         BIGINT     steps that decoded and computed prompt tokens
--   prefill_only_steps  BIGINT     steps that only computed prompt tokens
--   decode_only_p50_ms  DOUBLE     ms  median decode-only step (of the worker that lost most)
--   mixed_p50_ms        DOUBLE     ms  median mixed step (of the worker that lost most)
--   plain_lost_s        DOUBLE     s  cross-check: plain excess of mixed steps over the decode-only median
--   capped_s            DOUBLE     s  excess not blamed on prefill, being far above what such prompts cost
--   longest_step_ms     DOUBLE     ms  longest step that held decodes up
--   workers_judged      BIGINT     workers (and ranks) with a sum, flagged or not
--   workers_unknown     BIGINT     workers (and ranks) that cannot be judged
--   notes               VARCHAR[]  what limits the numbers
WITH judged AS (
  SELECT deployment, count(flagged) AS workers_judged, count(*) - count(flagged) AS workers_unknown
  FROM interference_steps
  GROUP BY deployment
),
flagged_rank AS (
  SELECT *
  FROM interference_steps
  WHERE flagged
),
flagged_worker AS (
  SELECT deployment, worker, sum(lost_s) AS lost_s
  FROM flagged_rank
  GROUP BY deployment, worker
),
worker_list AS (
  SELECT deployment, list(worker ORDER BY lost_s DESC, worker) AS workers
  FROM flagged_worker
  GROUP BY deployment
),
decoded AS (
  SELECT r.deployment, count(*) AS requests
  FROM requests AS r
  JOIN flagged_worker AS f ON f.worker = r.decode_worker
  GROUP BY r.deployment
),
member_share AS (
  -- each step's loss is split by the prompt tokens in it
  SELECT m.worker, m.request_id,
    sum(l.lost_s * m.prefill_tokens / nullif(l.prefill_tokens, 0)) AS taken_s
  FROM interference_step_losses AS l
  JOIN step_members AS m ON m.worker = l.worker AND m.seq = l.seq
    AND m.rank IS NOT DISTINCT FROM l.rank
  WHERE m.prefill_tokens > 0
  GROUP BY m.worker, m.request_id
),
request_name AS (
  SELECT worker, request_id, min(request) AS request
  FROM legs
  WHERE request_id IS NOT NULL
  GROUP BY worker, request_id
),
culprit AS (
  SELECT f.deployment,
    min_by(
      {'request': coalesce(n.request, s.request_id), 'value': s.taken_s},
      (-s.taken_s, coalesce(n.request, s.request_id)), 5
    ) FILTER (s.taken_s IS NOT NULL) AS culprits
  FROM member_share AS s
  JOIN flagged_worker AS f ON f.worker = s.worker
  LEFT JOIN request_name AS n ON n.worker = s.worker AND n.request_id = s.request_id
  GROUP BY f.deployment
),
longest AS (
  SELECT f.deployment, max(l.elapsed_ms) AS longest_step_ms
  FROM interference_step_losses AS l
  JOIN flagged_worker AS f ON f.worker = l.worker
  GROUP BY f.deployment
),
total AS (
  SELECT deployment, sum(lost_s) AS lost_s, sum(lost_low_s) AS lost_low_s,
    sum(lost_high_s) AS lost_high_s, sum(decode_s) AS decode_s,
    min(lost_ratio_low) AS share_low,
    sum(affected_steps)::BIGINT AS affected_steps, sum(mixed_steps)::BIGINT AS mixed_steps,
    sum(prefill_only_steps)::BIGINT AS prefill_only_steps,
    min_by(decode_only_p50_ms, (-lost_s, worker)) AS decode_only_p50_ms,
    min_by(mixed_p50_ms, (-lost_s, worker)) AS mixed_p50_ms,
    sum(plain_lost_s) AS plain_lost_s, sum(capped_s) AS capped_s,
    list_sort(list_distinct(list(note) FILTER (note IS NOT NULL))) AS notes
  FROM flagged_rank
  GROUP BY deployment
)
SELECT t.deployment,
  CASE WHEN lost_s >= 0.05 * decode_s THEN 'warning' ELSE 'info' END AS severity,
  lost_s AS cost_s, 'A' AS level, lost_s AS value, 's' AS unit,
  lost_low_s AS interval_low, lost_high_s AS interval_high,
  lost_s / decode_s AS share,
  d.requests,
  coalesce(w.workers, []) AS workers,
  coalesce(c.culprits, []) AS culprits,
  coalesce(s.paths, []) AS sources,
  decode_s, share_low, affected_steps, mixed_steps, prefill_only_steps, decode_only_p50_ms,
  mixed_p50_ms, plain_lost_s, capped_s, longest_step_ms, workers_judged, workers_unknown,
  coalesce(notes, []) AS notes
FROM total AS t
JOIN judged AS j ON j.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN worker_list AS w ON w.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN decoded AS d ON d.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN culprit AS c ON c.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN longest AS l ON l.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = t.deployment AND s.evidence = 'steps'
