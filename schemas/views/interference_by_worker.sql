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
WITH mixed_up AS (
  -- several engines under one name: prompts of one would be laid over the tokens of another
  SELECT DISTINCT worker
  FROM interference_steps
  WHERE note LIKE 'step numbers of several engines%'
),
judged_rank AS (
  SELECT deployment, worker, role, 'A' AS level, flagged, lost_s, lost_low_s, lost_high_s, decode_s,
    lost_ratio_low, note, NULL::DOUBLE AS tail_explained_ratio, NULL::BIGINT AS events,
    NULL::DOUBLE AS event_ms, NULL::DOUBLE AS best_shift_ms
  FROM interference_steps
  UNION ALL
  SELECT deployment, worker, role, 'B', flagged, lost_s, lost_low_s, lost_high_s, decode_s,
    lost_ratio_low, note, tail_explained_ratio, events, event_ms, best_shift_ms
  FROM interference_gaps
  ANTI JOIN mixed_up USING (worker)
  UNION ALL
  SELECT deployment, worker, role, 'C', flagged, lost_s, lost_low_s, lost_high_s, decode_s,
    lost_ratio_low, note, NULL, NULL, NULL, NULL
  FROM interference_requests
  WHERE worker IS NULL OR worker NOT IN (FROM mixed_up)
),
rank_sum AS (
  -- a worker's ranks: those that show interference where one does, else all that were judged
  SELECT *, bool_or(flagged) OVER (PARTITION BY deployment, worker, level) AS shown
  FROM judged_rank
),
level_sum AS (
  SELECT deployment, worker, any_value(role) AS role, level,
    any_value(shown) AS flagged, sum(lost_s) FILTER (flagged = shown) AS lost_s,
    sum(lost_low_s) FILTER (flagged = shown) AS lost_low_s,
    sum(lost_high_s) FILTER (flagged = shown) AS lost_high_s,
    sum(decode_s) FILTER (flagged = shown) AS decode_s, sum(decode_s) AS seen_decode_s,
    sum(lost_s) FILTER (flagged = shown) / nullif(sum(decode_s) FILTER (flagged = shown), 0)
      AS lost_ratio,
    min(lost_ratio_low) FILTER (flagged = shown) AS lost_ratio_low,
    list(note) FILTER (flagged = shown AND note IS NOT NULL) AS notes,
    list(note) FILTER (note IS NOT NULL) AS seen_notes,
    arg_max(tail_explained_ratio, lost_s) FILTER (flagged = shown) AS tail_explained_ratio,
    sum(events)::BIGINT AS events, arg_max(event_ms, lost_s) AS event_ms,
    arg_max(best_shift_ms, abs(best_shift_ms)) AS best_shift_ms
  FROM rank_sum
  GROUP BY deployment, worker, level
),
worker_seen AS (
  SELECT deployment, worker, arg_min(role, level) AS role, flatten(list(seen_notes)) AS notes,
    -- the best level that can judge
    arg_min({
      'level': level, 'flagged': flagged, 'lost_s': lost_s, 'lost_low_s': lost_low_s,
      'lost_high_s': lost_high_s, 'decode_s': decode_s, 'lost_ratio': lost_ratio,
      'lost_ratio_low': lost_ratio_low, 'notes': notes
    }, level) FILTER (flagged IS NOT NULL) AS best,
    any_value(lost_s) FILTER (level = 'A') AS steps_lost_s,
    any_value(lost_s) FILTER (level = 'B') AS gaps_lost_s,
    any_value(lost_s) FILTER (level = 'C') AS requests_lost_s,
    any_value(tail_explained_ratio) AS tail_explained_ratio, any_value(events) AS events,
    any_value(event_ms) AS event_ms, any_value(best_shift_ms) AS best_shift_ms,
    -- token times of a sample of the requests neither check the sum of the steps nor explain its tail
    coalesce(
      any_value(seen_decode_s) FILTER (level = 'B') < 0.8 * any_value(seen_decode_s) FILTER (level = 'A'),
      false
    ) AS sampled,
    -- steps under a name that no request bears, requests under a name that no step bears
    worker IS NOT NULL AND best IS NOT NULL AND min(level) = 'A' AND max(level) = 'A' AS by_steps,
    worker IS NOT NULL AND best IS NOT NULL AND min(level) <> 'A' AS by_requests
  FROM level_sum
  GROUP BY deployment, worker
),
sided AS (
  SELECT *, count(*) FILTER (by_steps) OVER in_deployment AS step_names,
    count(*) FILTER (by_requests) OVER in_deployment AS request_names
  FROM worker_seen
  WINDOW in_deployment AS (PARTITION BY deployment)
),
counted AS (
  -- of two names that may be one server the side with fewer is not counted
  SELECT * EXCLUDE (best), CASE WHEN NOT doubled THEN best END AS best
  FROM (
    SELECT *, step_names > 0 AND request_names > 0
      AND CASE WHEN step_names >= request_names THEN by_requests ELSE by_steps END AS doubled
    FROM sided
  )
)
SELECT s.deployment, s.worker, s.role, n.label, best.level, best.flagged, best.lost_s,
  best.lost_low_s, best.lost_high_s, best.decode_s, best.lost_ratio, best.lost_ratio_low,
  steps_lost_s, CASE WHEN NOT sampled THEN gaps_lost_s END AS gaps_lost_s, requests_lost_s,
  CASE WHEN NOT sampled THEN tail_explained_ratio END AS tail_explained_ratio,
  CASE WHEN NOT sampled THEN events END AS events,
  CASE WHEN NOT sampled THEN event_ms END AS event_ms,
  CASE WHEN NOT sampled THEN best_shift_ms END AS best_shift_ms,
  CASE WHEN doubled
    THEN ['its steps and its requests may stand under two names: counted under the other']
    ELSE list_sort(list_distinct(coalesce(CASE WHEN best IS NULL THEN s.notes ELSE best.notes END, [])))
    END AS notes
FROM counted AS s
LEFT JOIN worker_labels AS n ON n.worker = s.worker
