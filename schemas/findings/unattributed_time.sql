-- unattributed_time: how much of the requests' time nobody accounts for.
--
-- The part of the windows that no interval covers. It is shown, not blamed on a component: it can
-- be network, an uninstrumented hop, a front end that states nothing, or clocks. Severity: warning
-- from half of the time on, info below. Where nothing at all is accounted for (a client's view
-- alone), `observed` is false and the severity info: nothing was there to account for it.
--
-- grain:   one row per deployment
-- needs:   phase_sums, phase_totals, counted_requests, deployment_sources
-- when:    EXISTS (FROM phase_sums WHERE phase = 'unattributed')
-- params:
--   min_e2e_ratio  0.1  a tenth of the time in the dark can hide any other finding
-- columns:
--   deployment      VARCHAR    deployment
--   severity        VARCHAR    warning or info
--   cost_s          DOUBLE     s  NULL: unknown time is no known loss
--   level           VARCHAR    B
--   value           DOUBLE     seconds unattributed
--   unit            VARCHAR    s
--   interval_low    DOUBLE     value: the partition is exact
--   interval_high   DOUBLE     value
--   share           DOUBLE     value over the sum of the windows
--   requests        BIGINT     requests with unattributed time
--   workers         VARCHAR[]  empty
--   culprits        STRUCT(request VARCHAR, "value" DOUBLE)[]  the five requests with most of it; value: seconds
--   sources         VARCHAR[]  files that the requests come from
--   seen            BIGINT     requests with a window
--   ttft_ratio      DOUBLE     1  unattributed before first tokens over TTFT; NULL unknown
--   unknown_p50_ms  DOUBLE     ms  per request, median
--   unknown_p99_ms  DOUBLE     ms  99th percentile
--   before_first_s  DOUBLE     s  part before first tokens; NULL unknown
--   observed        BOOLEAN    something is accounted for
WITH unattributed AS (
  SELECT request, sum(duration_ns / 1e6) AS unknown_ms, sum(ttft_part_ns / 1e6) AS unknown_ttft_ms
  FROM phase_sums
  WHERE phase = 'unattributed'
  GROUP BY request
),
noticeable AS (
  -- phases fill the windows: where their sums say that little is unknown, no request is looked up
  SELECT deployment
  FROM (
    SELECT deployment, coalesce(sum(duration_ns) FILTER (phase = 'unattributed'), 0) AS unknown_ns,
      sum(duration_ns) AS all_ns
    FROM phase_totals
    WHERE counted
    GROUP BY deployment
  )
  WHERE unknown_ns >= 0.999 * min_e2e_ratio * all_ns
),
request_unknown AS (
  SELECT c.deployment, c.request, coalesce(u.unknown_ms, 0) AS unknown_ms, u.unknown_ttft_ms,
    (c.end_ns - c.start_ns) / 1e6 AS window_ms,
    -- clocks that disagree put first tokens outside the window, where no phase is
    CASE WHEN c.first_token_ns >= c.start_ns
      THEN (least(c.first_token_ns, c.end_ns) - c.start_ns) / 1e6 END AS ttft_ms
  FROM counted_requests AS c
  SEMI JOIN noticeable AS n ON n.deployment IS NOT DISTINCT FROM c.deployment
  LEFT JOIN unattributed AS u ON u.request = c.request
  WHERE c.end_ns > c.start_ns
),
deployment_unknown AS (
  SELECT deployment, sum(unknown_ms) / 1e3 AS unknown_s, sum(window_ms) / 1e3 AS window_s,
    sum(unknown_ttft_ms) / nullif(sum(ttft_ms), 0) AS ttft_ratio,
    sum(unknown_ttft_ms) / 1e3 AS before_first_s,
    count(*) AS seen, count(*) FILTER (unknown_ms > 0) AS requests,
    quantile_cont(unknown_ms, 0.5) AS unknown_p50_ms,
    quantile_cont(unknown_ms, 0.99) AS unknown_p99_ms,
    min_by({'request': request, 'value': unknown_ms / 1e3}, (-unknown_ms, request), 5)
      FILTER (unknown_ms IS NOT NULL) AS culprits
  FROM request_unknown
  GROUP BY deployment
)
SELECT d.deployment,
  CASE WHEN unknown_s >= 0.5 * window_s AND unknown_s < window_s THEN 'warning' ELSE 'info' END
    AS severity,
  NULL::DOUBLE AS cost_s, 'B' AS level, unknown_s AS value, 's' AS unit,
  unknown_s AS interval_low, unknown_s AS interval_high,
  unknown_s / window_s AS share, requests, []::VARCHAR[] AS workers, culprits,
  coalesce(s.paths, []) AS sources,
  seen, ttft_ratio, unknown_p50_ms, unknown_p99_ms, before_first_s,
  unknown_s < window_s AS observed
FROM deployment_unknown AS d
LEFT JOIN deployment_sources AS s ON s.deployment = d.deployment AND s.evidence = 'requests'
WHERE window_s > 0 AND unknown_s >= min_e2e_ratio * window_s
