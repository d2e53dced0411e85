-- clock_skew: whether the clocks behind this deployment's records agree well enough for its
-- numbers.
--
-- Six signs: bounds on an offset cross in some minutes (a clock stepped, or messages were paired
-- wrongly); a worker's clock is off by more than its own uncertainty and min_offset_ms; an offset
-- is known only to a wide interval; messages one way alone put a clock surely off (they bound the
-- offset from one side, so the least that it can be counts); the partition met negative remainders or had to cut what stuck
-- out of a window; legs begin before the leg that caused them. Work that goes on after the last
-- token that the outermost observer saw is no sign, as long as most requests have none: servers
-- count tokens without text and what follows an abort. Nothing is clamped: the times stay as reported. Domains that are no wall clock (perf counters aligned by matching) are not skew.
-- Severity: warning when clocks are off by more than 5 ms beyond their uncertainty or effects
-- precede causes by as much; info otherwise. Level B.
--
-- grain:   one row per deployment
-- needs:   clocks, partition_checks, requests, legs, intervals, deployment_sources
-- when:    EXISTS (FROM clocks) OR EXISTS (FROM legs WHERE parent_span_id IS NOT NULL)
--          OR EXISTS (FROM partition_checks WHERE clip_ns > 5000000 OR abs(negative_ns) > 1000)
-- params:
--   min_offset_ms      1     below a millisecond no phase that is shown changes
--   max_half_width_ms  50    an offset known no better leaves phases across hosts open
--   min_clip_ratio     0.01  cutting less than a hundredth of a window (or 5 ms) moves no number
-- columns:
--   deployment         VARCHAR    deployment
--   severity           VARCHAR    warning or info
--   cost_s             DOUBLE     s  NULL: not in seconds
--   level              VARCHAR    B
--   value              DOUBLE     largest clock offset (of clocks bounded from one side the least that it can be), or where none is known the largest lead of an effect over its cause, or the largest cut
--   unit               VARCHAR    ms
--   interval_low       DOUBLE     value minus the half width of that offset; NULL unknown
--   interval_high      DOUBLE     value plus it; NULL unknown, or without end
--   share              DOUBLE     requests with negative remainders, cuts or effects before causes, over requests seen
--   requests           BIGINT     such requests
--   workers            VARCHAR[]  clock domains or workers that are off, the farthest first
--   culprits           STRUCT(request VARCHAR, "value" DOUBLE)[]  the five requests with the largest negative remainder, lead or cut; value: ms
--   sources            VARCHAR[]  files that the requests come from
--   clocks_off         BIGINT     clock domains that are off
--   clocks_wide        BIGINT     clock domains known only to more than max_half_width_ms
--   negative_requests  BIGINT     requests with negative remainders
--   clipped_requests   BIGINT     requests of which more than min_clip_ratio and 5 ms was cut
--   early_requests     BIGINT     requests with a leg that begins before the leg that caused it
--   worst_early_ms     DOUBLE     ms  largest such lead; NULL none
--   worst_clip_ms      DOUBLE     ms  most that was cut from one request; NULL none
--   drift_ppm          DOUBLE     largest drift; NULL unknown
--   infeasible_windows  BIGINT    stretches of a minute or more in which bounds cross, among clocks that were bounded otherwise
--   half_width_ms      DOUBLE     ms  uncertainty of the largest offset; NULL unknown, or bounded from one side only
--   at_least           BOOLEAN    value is a lower bound: messages went one way only
WITH offset_domain AS (
  SELECT deployment, domain, half_width_ns / 1e6 AS half_ms, offset_ns IS NULL AS at_least,
    -- bounded from one side: the least that it can be, 0 where it can be none
    coalesce(abs(offset_ns), greatest(lower_ns, -upper_ns, 0)) / 1e6 AS offset_ms,
    coalesce(greatest(lower_ns, -upper_ns), abs(offset_ns) - half_width_ns, abs(offset_ns)) / 1e6
      AS sure_ms,
    drift_ppm, CASE WHEN half_width_ns IS NOT NULL THEN infeasible_windows END AS infeasible,
    coalesce(half_width_ns > max_half_width_ms * 1e6, false) AS wide
  FROM clocks
  WHERE coalesce(offset_ns, lower_ns, upper_ns) IS NOT NULL AND NOT starts_with(domain, 'perf')
    AND domain IS DISTINCT FROM reference
),
off_domain AS (
  SELECT *, sure_ms > min_offset_ms AS off
  FROM offset_domain
),
deployment_clock AS (
  SELECT deployment, count(*) FILTER (off) AS clocks_off, count(*) FILTER (wide) AS clocks_wide,
    max(offset_ms) FILTER (off OR wide) AS offset_ms,
    -- arg_max alone passes over NULL
    arg_max({'half_ms': half_ms}, offset_ms) FILTER (off OR wide).half_ms AS half_ms,
    arg_max(at_least, offset_ms) FILTER (off OR wide) AS at_least,
    max(sure_ms) FILTER (off) AS sure_ms,
    max(abs(drift_ppm)) AS drift_ppm,
    coalesce(sum(infeasible), 0)::BIGINT AS infeasible_windows,
    list(domain ORDER BY offset_ms DESC, domain) FILTER (off OR wide) AS domains
  FROM off_domain
  GROUP BY deployment
),
early_leg AS (
  SELECT child.request, max(parent.start_ns - child.start_ns) / 1e6 AS early_ms
  FROM legs AS child
  JOIN legs AS parent ON parent.trace_id = child.trace_id AND parent.span_id = child.parent_span_id
    AND parent.deployment IS NOT DISTINCT FROM child.deployment
  WHERE child.request IS NOT NULL AND parent.worker IS DISTINCT FROM child.worker
    AND parent.start_ns - child.start_ns >
      greatest(1000000, coalesce(parent.resolution_ns, 0), coalesce(child.resolution_ns, 0))
  GROUP BY child.request
),
cut_request AS (
  SELECT request, clip_ns / 1e6 AS clip_ms
  FROM partition_checks
  WHERE clip_ns > min_clip_ratio * window_ns AND clip_ns > 5000000
),
cut_behind AS (
  SELECT c.request
  FROM cut_request AS c
  JOIN requests AS r ON r.request = c.request
  JOIN legs AS l ON l.request = c.request
  JOIN intervals AS i ON i.leg = l.leg
  GROUP BY c.request, r.start_ns, r.end_ns
  HAVING min(i.start_ns) > r.start_ns - 1000000 AND max(i.end_ns) > r.end_ns
),
shown AS (
  -- the few requests that show something, each once
  SELECT request, max(clip_ms) AS clip_ms, bool_or(behind) AS behind, max(negative_ns) AS negative_ns,
    max(early_ms) AS early_ms
  FROM (
    SELECT request, clip_ms FROM cut_request
    UNION ALL BY NAME
    SELECT request, true AS behind FROM cut_behind
    UNION ALL BY NAME
    SELECT request, abs(negative_ns) AS negative_ns FROM partition_checks WHERE negative_ns <> 0
    UNION ALL BY NAME
    SELECT request, early_ms FROM early_leg
  )
  GROUP BY request
),
shown_request AS (
  SELECT r.deployment, r.request, s.clip_ms, s.early_ms, coalesce(s.behind, false) AS behind,
    coalesce(s.negative_ns > 1000, false) AS negative,
    greatest(s.negative_ns / 1e6, s.early_ms) AS wrong_ms
  FROM shown AS s
  JOIN requests AS r ON r.request = s.request
),
population AS (
  SELECT deployment, count(*) AS seen
  FROM requests
  GROUP BY deployment
),
request_sign AS (
  SELECT s.* EXCLUDE (clip_ms),
    CASE WHEN NOT behind OR 2 * count(*) FILTER (behind) OVER (PARTITION BY s.deployment) > p.seen
      THEN clip_ms END AS clip_ms
  FROM shown_request AS s
  JOIN population AS p ON p.deployment IS NOT DISTINCT FROM s.deployment
),
deployment_sign AS (
  SELECT p.deployment, any_value(p.seen) AS seen,
    count(*) FILTER (negative) AS negative_requests, count(clip_ms) AS clipped_requests,
    max(clip_ms) AS worst_clip_ms,
    count(early_ms) AS early_requests, max(early_ms) AS worst_early_ms,
    count(*) FILTER (negative OR clip_ms IS NOT NULL OR early_ms IS NOT NULL) AS signs,
    min_by(
      {'request': request, 'value': greatest(wrong_ms, clip_ms)},
      (-greatest(wrong_ms, clip_ms), request), 5
    ) FILTER (greatest(wrong_ms, clip_ms) > 0) AS culprits
  FROM population AS p
  LEFT JOIN request_sign AS s ON s.deployment IS NOT DISTINCT FROM p.deployment
  GROUP BY p.deployment
),
joined AS (
  SELECT coalesce(c.deployment, g.deployment) AS deployment, c.* EXCLUDE (deployment),
    g.* EXCLUDE (deployment)
  FROM deployment_sign AS g
  FULL JOIN deployment_clock AS c ON c.deployment IS NOT DISTINCT FROM g.deployment
)
SELECT j.deployment,
  CASE WHEN greatest(coalesce(sure_ms, 0), coalesce(worst_early_ms, 0)) > 5
    THEN 'warning' ELSE 'info' END AS severity,
  NULL::DOUBLE AS cost_s, 'B' AS level,
  coalesce(offset_ms, worst_early_ms, worst_clip_ms) AS value, 'ms' AS unit,
  CASE WHEN at_least THEN offset_ms ELSE offset_ms - half_ms END AS interval_low,
  offset_ms + half_ms AS interval_high,
  signs / nullif(seen, 0) AS share, coalesce(signs, 0) AS requests,
  coalesce(domains, []) AS workers, coalesce(culprits, []) AS culprits,
  coalesce(s.paths, []) AS sources,
  coalesce(clocks_off, 0) AS clocks_off, coalesce(clocks_wide, 0) AS clocks_wide,
  coalesce(negative_requests, 0) AS negative_requests,
  coalesce(clipped_requests, 0) AS clipped_requests,
  coalesce(early_requests, 0) AS early_requests, worst_early_ms, worst_clip_ms, drift_ppm,
  coalesce(infeasible_windows, 0) AS infeasible_windows, half_ms AS half_width_ms,
  coalesce(at_least, false) AS at_least
FROM joined AS j
LEFT JOIN deployment_sources AS s ON s.deployment = j.deployment AND s.evidence = 'requests'
WHERE coalesce(clocks_off, 0) + coalesce(clocks_wide, 0) + coalesce(infeasible_windows, 0) > 0
  OR coalesce(signs, 0) > 0
