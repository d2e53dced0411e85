-- regime_change: the run was not one: arrivals, latency or failures changed level or drifted, or
-- workers began anew.
--
-- Changes are found in the order of arrival and judged by shuffling (table changes); warm-up is a
-- finding of its own. What changed at the same time is shown, which is no proof of a cause. Figures
-- over the whole run mix what was before and after. Severity: warning when TTFT, time per token or
-- failures were 1.5 times as bad in one part as in the other, or a worker restarted; info otherwise.
-- Level C: durations of requests at their arrival; D when only restarts are seen.
--
-- grain:   one row per deployment
-- needs:   changes, deployment_sources
-- when:    EXISTS (FROM changes)
-- columns:
--   deployment     VARCHAR    deployment
--   severity       VARCHAR    warning or info
--   cost_s         DOUBLE     s  seconds of TTFT in the worse part above the mean of the better (largest change); NULL unknown
--   level          VARCHAR    C or D
--   value          DOUBLE     largest change as a factor, larger over smaller (of shares: of the upper over the lower); NULL when only restarts are seen or the smaller is 0
--   unit           VARCHAR    times
--   interval_low   DOUBLE     smallest factor that the intervals of both sides allow
--   interval_high  DOUBLE     largest such
--   share          DOUBLE     requests after the largest change over those on both sides; NULL unknown
--   requests       BIGINT     requests on both sides of the largest change; NULL unknown
--   workers        VARCHAR[]  workers that changed by themselves or restarted
--   culprits       STRUCT(request VARCHAR, "value" DOUBLE)[]  empty
--   sources        VARCHAR[]  files that the requests come from
--   at_ns          BIGINT     ns  when the largest change happened; of a drift its middle
--   changes        STRUCT(worker VARCHAR, kind VARCHAR, metric VARCHAR, at_ns BIGINT, at_low_ns BIGINT, at_high_ns BIGINT, level_before DOUBLE, before_low DOUBLE, before_high DOUBLE, level_after DOUBLE, after_low DOUBLE, after_high DOUBLE, unit VARCHAR, arrival_rate_before DOUBLE, arrival_rate_after DOUBLE, in_flight_before DOUBLE, in_flight_after DOUBLE, prompt_tokens_before DOUBLE, prompt_tokens_after DOUBLE, note VARCHAR)[]  all of them, in the order of time
WITH listed AS (
  SELECT *, greatest(level_before, level_after) / nullif(least(level_before, level_after), 0) AS factor,
    metric IN ('ttft', 'turn', 'tpot', 'failures') AS felt
  FROM changes
  WHERE kind IN ('change', 'drift', 'restart')
),
largest AS (
  SELECT *
  FROM listed
  QUALIFY row_number() OVER (
    PARTITION BY deployment
    ORDER BY kind = 'restart', felt DESC NULLS LAST, worker IS NOT NULL,
      coalesce(factor, 1e9) DESC, at_ns
  ) = 1
),
gathered AS (
  SELECT deployment,
    bool_or((felt AND coalesce(factor, 1e9) >= 1.5) OR kind = 'restart') AS hurt,
    list_sort(list_distinct(list(worker) FILTER (worker IS NOT NULL))) AS workers,
    list({
      'worker': worker, 'kind': kind, 'metric': metric, 'at_ns': at_ns, 'at_low_ns': at_low_ns,
      'at_high_ns': at_high_ns, 'level_before': level_before, 'before_low': before_low,
      'before_high': before_high, 'level_after': level_after, 'after_low': after_low,
      'after_high': after_high, 'unit': unit, 'arrival_rate_before': arrival_rate_before,
      'arrival_rate_after': arrival_rate_after, 'in_flight_before': in_flight_before,
      'in_flight_after': in_flight_after, 'prompt_tokens_before': prompt_tokens_before,
      'prompt_tokens_after': prompt_tokens_after, 'note': note
    } ORDER BY at_ns, metric, worker) AS changes
  FROM listed
  GROUP BY deployment
)
SELECT l.deployment,
  CASE WHEN g.hurt THEN 'warning' ELSE 'info' END AS severity,
  l.cost_s, CASE WHEN l.kind = 'restart' THEN 'D' ELSE 'C' END AS level,
  l.factor AS value, 'times' AS unit,
  CASE WHEN l.level_after > l.level_before THEN l.after_low / nullif(l.before_high, 0)
    ELSE l.before_low / nullif(l.after_high, 0) END AS interval_low,
  CASE WHEN l.level_after > l.level_before THEN l.after_high / nullif(l.before_low, 0)
    ELSE l.before_high / nullif(l.after_low, 0) END AS interval_high,
  l.requests_after / nullif(l.requests_before + l.requests_after, 0) AS share,
  l.requests_before + l.requests_after AS requests,
  coalesce(g.workers, []) AS workers,
  []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  coalesce(s.paths, []) AS sources,
  l.at_ns, g.changes
FROM largest AS l
JOIN gathered AS g ON g.deployment IS NOT DISTINCT FROM l.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = l.deployment AND s.evidence = 'requests'
