-- data_checks: what in the data themselves should make a reader careful.
--
-- grain:   one row per (deployment, check); deployment NULL for checks of all inputs together
-- needs:   partition_checks, requests, phases, legs, intervals, spans, sources, skipped
-- columns:
--   deployment      VARCHAR     deployment; NULL: all inputs
--   check_name      VARCHAR     the check, lower_snake
--   affected        BIGINT      how many requests, spans, intervals or records it hits
--   examined        BIGINT      out of how many
--   affected_ratio  DOUBLE   1  affected / examined
--   amount_ms       DOUBLE   ms  time concerned; NULL where none is
--   alarm           BOOLEAN     worth telling; false also when there is nothing
--   meaning         VARCHAR     what is counted
WITH partitioned AS (
  SELECT r.deployment, k.*
  FROM partition_checks k
  JOIN requests r ON r.request = k.request
),
phase_sums AS (
  SELECT request, sum(end_ns - start_ns) AS phases_ns
  FROM phases
  GROUP BY request
),
request_checks AS (
  SELECT
    p.deployment,
    count(*) AS examined,
    count(*) FILTER (coalesce(s.phases_ns, 0) <> greatest(p.window_ns, 0)) AS inexact,
    sum(abs(coalesce(s.phases_ns, 0) - greatest(p.window_ns, 0))) AS inexact_ns,
    -- Clipping is routine: only what exceeds 1 % of the window and 5 ms is worth telling.
    count(*) FILTER (p.clip_ns > 0.01 * p.window_ns AND p.clip_ns > 5000000) AS clipped,
    sum(p.clip_ns) FILTER (p.clip_ns > 0.01 * p.window_ns AND p.clip_ns > 5000000) AS clipped_ns,
    count(*) FILTER (p.overlap_ns > 0.01 * p.window_ns AND p.overlap_ns > 5000000) AS doubled,
    sum(p.overlap_ns) FILTER (p.overlap_ns > 0.01 * p.window_ns AND p.overlap_ns > 5000000)
      AS doubled_ns,
    count(*) FILTER (p.negative_ns > 0) AS negative,
    sum(p.negative_ns) AS negative_ns,
    count(*) FILTER (p.negative_ns > 0.01 * p.window_ns AND p.negative_ns > 5000000) AS very_negative,
    count(*) FILTER (p.window_ns < 0) AS backwards
  FROM partitioned p
  LEFT JOIN phase_sums s ON s.request = p.request
  GROUP BY p.deployment
),
interval_checks AS (
  SELECT
    l.deployment,
    count(*) AS examined,
    count(*) FILTER (i.censored OR (i.start_ns IS NOT NULL AND i.end_ns IS NULL
                                    AND i.duration_ns IS NULL)) AS unended
  FROM intervals i
  JOIN legs l ON l.leg = i.leg
  GROUP BY l.deployment
),
leg_checks AS (
  SELECT
    deployment,
    count(*) AS examined,
    count(*) FILTER (request IS NULL) AS lone
  FROM legs
  WHERE container IS NOT TRUE
  GROUP BY deployment
),
end_checks AS (
  SELECT
    deployment,
    count(*) AS examined,
    count(*) FILTER (end_ns IS NULL) AS unended
  FROM requests
  WHERE start_ns IS NOT NULL
  GROUP BY deployment
),
span_checks AS (
  SELECT
    count(*) AS examined,
    count(*) FILTER (end_ns IS NULL) AS unended,
    count(*) FILTER (end_ns < start_ns) AS backwards,
    CAST(sum(start_ns - end_ns) FILTER (end_ns < start_ns) AS DOUBLE) / 1e6 AS backwards_ms
  FROM spans
),
source_checks AS (
  SELECT
    CAST(sum(rows_read) AS BIGINT) AS examined,
    CAST(sum(abs(rows_read - rows_kept - rows_skipped)) AS BIGINT) AS unbalanced
  FROM sources
),
skipped_checks AS (
  SELECT
    CAST(sum(records) AS BIGINT) AS records,
    CAST(sum(records) FILTER (contains(lower(reason), 'duplicate')) AS BIGINT) AS duplicates,
    CAST(sum(records) FILTER (contains(lower(reason), 'conflict')) AS BIGINT) AS conflicts
  FROM skipped
),
checks AS (
  SELECT deployment, 'partition_exact' AS check_name, inexact AS affected, examined,
         CAST(inexact_ns AS DOUBLE) / 1e6 AS amount_ms, inexact > 0 AS alarm,
         'requests whose phases do not add up to their window' AS meaning
  FROM request_checks
  UNION ALL
  SELECT deployment, 'clipped', clipped, examined, CAST(clipped_ns AS DOUBLE) / 1e6, clipped > 0,
         'requests with intervals that stick out of the window by more than 1 % of it and 5 ms'
  FROM request_checks
  UNION ALL
  SELECT deployment, 'covered_twice', doubled, examined, CAST(doubled_ns AS DOUBLE) / 1e6, false,
         'requests with more than 1 % of the window and 5 ms covered by several intervals; '
           || 'the order of precedence decides there'
  FROM request_checks
  UNION ALL
  SELECT deployment, 'negative_remainder', negative, examined, CAST(negative_ns AS DOUBLE) / 1e6,
         very_negative > 0,
         'requests with parts that exceed their whole, intervals or windows that run backwards'
  FROM request_checks
  UNION ALL
  SELECT deployment, 'window_backwards', backwards, examined, NULL, backwards > 0,
         'requests that end before they start: a clock problem'
  FROM request_checks
  UNION ALL
  SELECT deployment, 'interval_without_end', unended, examined, NULL, false,
         'kinds of time whose end was not seen; left out of the phases'
  FROM interval_checks
  UNION ALL
  SELECT deployment, 'request_without_end', unended, examined, NULL, unended > 0.01 * examined,
         'requests that started and whose end nobody saw; they have no phases'
  FROM end_checks
  UNION ALL
  SELECT deployment, 'leg_without_request', lone, examined, NULL, lone > 0,
         'records of a request that joined no request'
  FROM leg_checks
  UNION ALL
  SELECT NULL, 'span_without_end', unended, examined, NULL, unended > 0,
         'spans that never ended; kept, left out of sums'
  FROM span_checks
  UNION ALL
  SELECT NULL, 'span_backwards', backwards, examined, backwards_ms, backwards > 0,
         'spans that end before they start; kept as they are'
  FROM span_checks
  UNION ALL
  SELECT NULL, 'duplicate_records', coalesce(k.duplicates, 0), s.examined, NULL, false,
         'records that were given twice; counted once'
  FROM source_checks s, skipped_checks k
  UNION ALL
  SELECT NULL, 'conflicting_copies', coalesce(k.conflicts, 0), s.examined, NULL,
         coalesce(k.conflicts, 0) > 0, 'copies of one record that differ; the fuller one was kept'
  FROM source_checks s, skipped_checks k
  UNION ALL
  SELECT NULL, 'skipped_records', coalesce(k.records, 0), s.examined, NULL, false,
         'records that gave no row, with their reasons in the view source_summary'
  FROM source_checks s, skipped_checks k
  UNION ALL
  SELECT NULL, 'unbalanced_sources', coalesce(unbalanced, 0), examined, NULL,
         coalesce(unbalanced, 0) > 0, 'records that are neither kept nor skipped: an error of this tool'
  FROM source_checks
)
SELECT
  deployment,
  check_name,
  affected,
  coalesce(examined, 0) AS examined,
  affected / nullif(examined, 0) AS affected_ratio,
  amount_ms,
  alarm,
  meaning
FROM checks
