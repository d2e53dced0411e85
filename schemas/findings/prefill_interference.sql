-- prefill_interference: decode seconds that prompts of other requests took on the same worker.
--
-- Sums the workers for which interference is shown (flagged, see view interference_by_worker), each
-- at the best evidence level that can judge it; workers not flagged are not in it. Where workers of
-- two levels are summed, `levels` names both and the row has the weaker one. The denominator of share
-- is the decode time of the flagged workers as their level counts it, not the decode time of request
-- spans. Removing interference would make streams steadier; that is not the same as faster. Culprits
-- and victims come from the steps where these name their members, else from token times (level B),
-- also where the sum comes from steps. Where steps show that preempted requests were computed again,
-- their part is in the value and told apart (again_lost_s). Severity: warning from 5 % of decode time on, info below.
-- Level A: engine steps, all of them. B: token times and prefill intervals. C: durations of requests.
--
-- grain:   one row per deployment
-- needs:   interference_by_worker, interference_steps, interference_step_losses, interference_gaps, interference_gap_losses, interference_requests, step_members, legs, requests, deployment_sources
-- when:    EXISTS (FROM interference_steps WHERE flagged) OR EXISTS (FROM interference_gaps WHERE flagged)
--          OR EXISTS (FROM interference_requests WHERE flagged)
-- columns:
--   deployment          VARCHAR    deployment
--   severity            VARCHAR    warning or info
--   cost_s              DOUBLE     s  value
--   level               VARCHAR    A, B or C: the weakest among the flagged workers
--   value               DOUBLE     decode seconds lost, summed over the requests held up; at level C a lower value
--   unit                VARCHAR    s
--   interval_low        DOUBLE     95 % interval of the loss of this period, lower end
--   interval_high       DOUBLE     upper end
--   share               DOUBLE     value over the decode time of the flagged workers
--   requests            BIGINT     requests decoded by the flagged workers; NULL unknown
--   workers             VARCHAR[]  flagged workers, the greatest loss first
--   culprits            STRUCT(request VARCHAR, "value" DOUBLE)[]  requests whose prompts took most; value: seconds taken
--   sources             VARCHAR[]  files that the steps or requests come from
--   victims             STRUCT(request VARCHAR, "value" DOUBLE)[]  requests that lost most; value: seconds lost
--   levels              VARCHAR[]  levels of the flagged workers
--   named_by            VARCHAR    what names culprits and victims: steps, token times, both, or NULL
--   ranks               BIGINT     most data-parallel ranks under one flagged worker's name, as its steps tell; NULL without steps
--   mixed_ranks         BIGINT     of these workers, those judged from token times or durations without telling their ranks apart: most ranks under one name; NULL none
--   decode_s            DOUBLE     s  decode time of the flagged workers: the denominator of share
--   share_low           DOUBLE     95 % bound of the share over the flagged workers (smallest of them)
--   affected_steps      BIGINT     steps with prompt tokens during which requests were decoding; NULL without steps
--   mixed_steps         BIGINT     steps that decoded and computed prompt tokens
--   prefill_only_steps  BIGINT     steps that only computed prompt tokens
--   decode_only_p50_ms  DOUBLE     ms  median decode-only step (of the worker that lost most)
--   mixed_p50_ms        DOUBLE     ms  median mixed step (of the worker that lost most)
--   plain_lost_s        DOUBLE     s  cross-check: plain excess of mixed steps over the decode-only median
--   capped_s            DOUBLE     s  excess not blamed on prefill, being far above what such prompts cost
--   again_lost_s        DOUBLE     s  of value: taken by preempted requests that were computed again, not by prompts; NULL without steps
--   longest_step_ms     DOUBLE     ms  longest step that held decodes up
--   events              BIGINT     single stalls called from token times; NULL without
--   event_ms            DOUBLE     ms  smallest loss that is called (of the worker that lost most)
--   tail_explained_ratio  DOUBLE   share of the excess of the longest hundredth of gaps that prefills explain (of the worker that lost most)
--   gaps_lost_s         DOUBLE     s  cross-check of level A: what token times say of the same workers; NULL where they cannot tell
--   best_shift_ms       DOUBLE     ms  check of the clocks: by how much prefills would have to move to fit the stalls best, the farthest of the flagged workers; 0 not; NULL unknown
--   shift_worker        VARCHAR    the worker of best_shift_ms; NULL where it is 0 or unknown
--   shift_label         VARCHAR    its short name
--   workers_judged      BIGINT     workers that a level can judge, flagged or not
--   workers_unknown     BIGINT     workers that none can judge
--   notes               VARCHAR[]  what limits the numbers
WITH judged AS (
  SELECT deployment, count(flagged) AS workers_judged, count(*) - count(flagged) AS workers_unknown
  FROM interference_by_worker
  GROUP BY deployment
),
flagged_worker AS (
  SELECT *
  FROM interference_by_worker
  WHERE flagged
),
decoded AS (
  SELECT r.deployment, count(*) AS requests
  FROM requests AS r
  JOIN flagged_worker AS f ON f.worker = r.decode_worker
  GROUP BY r.deployment
),
member AS (
  -- each step's loss: taken by the prompts in it by their tokens, borne by its decodes alike
  SELECT m.worker, m.request_id,
    sum(l.lost_s * coalesce(m.prefill_tokens, 0) / nullif(l.prefill_tokens, 0)) AS taken_s,
    sum(CASE WHEN m.decode_tokens > 0 THEN l.lost_s / nullif(l.residents, 0) END) AS borne_s
  FROM interference_step_losses AS l
  JOIN step_members AS m ON m.worker = l.worker AND m.seq = l.seq
    AND m.rank IS NOT DISTINCT FROM l.rank
  GROUP BY m.worker, m.request_id
),
request_name AS (
  SELECT worker, request_id, any_value(request) AS request
  FROM legs
  WHERE request_id IS NOT NULL
  GROUP BY worker, request_id
),
named AS (
  SELECT f.deployment, 'steps' AS named_by, coalesce(n.request, m.request_id) AS request,
    m.taken_s, m.borne_s
  FROM member AS m
  JOIN flagged_worker AS f ON f.worker = m.worker AND f.level = 'A'
  LEFT JOIN request_name AS n ON n.worker = m.worker AND n.request_id = m.request_id
  UNION ALL
  SELECT f.deployment, 'token times', p.request, p.taken_s, p.borne_s
  FROM (
    SELECT worker, culprit AS request, lost_s AS taken_s, NULL AS borne_s
    FROM interference_gap_losses
    UNION ALL
    SELECT worker, victim, NULL, lost_s
    FROM interference_gap_losses
  ) AS p
  JOIN flagged_worker AS f ON f.worker = p.worker AND f.level IN ('A', 'B')
  WHERE p.request IS NOT NULL
    AND NOT (f.level = 'A' AND p.worker IN (SELECT worker FROM member))
),
by_request AS (
  SELECT deployment, request, sum(taken_s) AS taken_s, sum(borne_s) AS borne_s
  FROM named
  GROUP BY deployment, request
),
named_request AS (
  SELECT b.deployment,
    list({'request': request, 'value': taken_s} ORDER BY taken_s DESC, request)
      FILTER (taken_s > 0)[1:5] AS culprits,
    list({'request': request, 'value': borne_s} ORDER BY borne_s DESC, request)
      FILTER (borne_s > 0)[1:5] AS victims
  FROM by_request AS b
  GROUP BY b.deployment
),
naming AS (
  SELECT deployment,
    CASE WHEN count(DISTINCT named_by) = 2 THEN 'both' ELSE any_value(named_by) END AS named_by
  FROM named
  GROUP BY deployment
),
parted AS (
  SELECT worker, 'C' AS level FROM interference_requests WHERE rank IS NOT NULL
  UNION
  SELECT worker, unnest(['A', 'B']) FROM interference_gaps
  WHERE rank IS NOT NULL OR note LIKE '%ranks wait for each other%'
),
rank_count AS (
  SELECT deployment, max(ranks) AS ranks, max(ranks) FILTER (mixed) AS mixed_ranks
  FROM (
    SELECT s.deployment, s.worker, count(DISTINCT s.rank) AS ranks,
      (any_value(f.worker), any_value(f.level)) NOT IN (FROM parted) AS mixed
    FROM interference_steps AS s
    JOIN flagged_worker AS f ON f.worker = s.worker
    GROUP BY s.deployment, s.worker
    HAVING count(DISTINCT s.rank) > 1
  )
  GROUP BY deployment
),
longest AS (
  SELECT f.deployment, max(l.elapsed_ms) AS longest_step_ms
  FROM interference_step_losses AS l
  JOIN flagged_worker AS f ON f.worker = l.worker AND f.level = 'A'
  GROUP BY f.deployment
),
stepwise AS (
  SELECT s.deployment, sum(s.affected_steps)::BIGINT AS affected_steps,
    sum(s.mixed_steps)::BIGINT AS mixed_steps,
    sum(s.prefill_only_steps)::BIGINT AS prefill_only_steps,
    arg_max(s.decode_only_p50_ms, s.lost_s) AS decode_only_p50_ms,
    arg_max(s.mixed_p50_ms, s.lost_s) AS mixed_p50_ms,
    sum(s.plain_lost_s) AS plain_lost_s, sum(s.capped_s) AS capped_s,
    sum(s.again_lost_s) AS again_lost_s
  FROM interference_steps AS s
  JOIN flagged_worker AS f ON f.worker = s.worker AND f.level = 'A'
  WHERE s.flagged
  GROUP BY s.deployment
),
file AS (
  SELECT f.deployment, list(DISTINCT path ORDER BY path) AS paths
  FROM (SELECT DISTINCT deployment, level FROM flagged_worker) AS f
  JOIN deployment_sources AS s ON s.deployment = f.deployment
    AND s.evidence = CASE WHEN f.level = 'A' THEN 'steps' ELSE 'requests' END
  CROSS JOIN unnest(s.paths) AS path_of(path)
  GROUP BY f.deployment
),
total AS (
  SELECT deployment, max(level) AS level, list(DISTINCT level ORDER BY level) AS levels,
    sum(lost_s) AS lost_s, sum(lost_low_s) AS lost_low_s, sum(lost_high_s) AS lost_high_s,
    sum(decode_s) AS decode_s, min(lost_ratio_low) AS share_low,
    list(worker ORDER BY lost_s DESC, worker) FILTER (worker IS NOT NULL) AS workers,
    sum(events)::BIGINT AS events, arg_max(event_ms, lost_s) AS event_ms,
    arg_max(tail_explained_ratio, lost_s) AS tail_explained_ratio,
    sum(gaps_lost_s) FILTER (level = 'A') AS gaps_lost_s,
    arg_max(best_shift_ms, abs(best_shift_ms)) AS best_shift_ms,
    arg_max(worker, abs(best_shift_ms)) FILTER (best_shift_ms != 0) AS shift_worker,
    arg_max(label, abs(best_shift_ms)) FILTER (best_shift_ms != 0) AS shift_label,
    list_sort(list_distinct(flatten(list(notes)))) AS notes
  FROM flagged_worker
  GROUP BY deployment
)
SELECT t.deployment,
  CASE WHEN lost_s >= 0.05 * decode_s THEN 'warning' ELSE 'info' END AS severity,
  lost_s AS cost_s, t.level, lost_s AS value, 's' AS unit,
  lost_low_s AS interval_low, lost_high_s AS interval_high,
  lost_s / decode_s AS share,
  d.requests,
  coalesce(workers, []) AS workers,
  coalesce(n.culprits, []) AS culprits,
  coalesce(s.paths, []) AS sources,
  coalesce(n.victims, []) AS victims,
  levels, g.named_by, k.ranks, k.mixed_ranks, decode_s, share_low,
  affected_steps, mixed_steps, prefill_only_steps, decode_only_p50_ms, mixed_p50_ms, plain_lost_s,
  capped_s, again_lost_s, longest_step_ms, events, event_ms, tail_explained_ratio, gaps_lost_s,
  best_shift_ms, shift_worker, shift_label, workers_judged, workers_unknown, coalesce(notes, []) AS notes
FROM total AS t
JOIN judged AS j ON j.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN rank_count AS k ON k.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN decoded AS d ON d.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN named_request AS n ON n.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN naming AS g ON g.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN longest AS l ON l.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN stepwise AS w ON w.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN file AS s ON s.deployment IS NOT DISTINCT FROM t.deployment
