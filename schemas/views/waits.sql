-- waits: how long the requests of each deployment spent in some kinds of work or wait, and who most.
--
-- Counted requests with a window; those that did not wait count with 0 in the quantiles.
--
-- grain:   one row per deployment in which any counted request spent time there
-- needs:   phase_by_request, counted_requests
-- params:
--   details     []         phase details to sum up, e.g. ['router_queue', 'dispatch']
--   apart       NULL       one of them whose 99th percentile is wanted by itself
--   on_decode   false      whom the seconds are laid to: the decode worker, or (false) the prefill worker
-- columns:
--   deployment    VARCHAR       deployment
--   wait_s        DOUBLE    s   seconds spent there, summed
--   ttft_ratio    DOUBLE    1   sum of the part before first tokens over that part of the windows; NULL where no first token is known
--   e2e_ratio     DOUBLE    1   wait_s over the whole durations
--   requests      BIGINT        requests that spent time there
--   seen          BIGINT        requests with a window
--   split         BOOLEAN       prefill and decode are split in at least one of them
--   wait_p50_ms   DOUBLE    ms  per request, median (0 counted)
--   wait_p90_ms   DOUBLE    ms  90th percentile
--   wait_p99_ms   DOUBLE    ms  99th percentile
--   apart_p99_ms  DOUBLE    ms  99th percentile of the detail `apart` alone, over all requests
--   placed_ratio  DOUBLE    1   part of wait_s neither measured nor reported
--   bound_s       DOUBLE    s   part of wait_s that is an upper bound
--   detail_s      MAP(VARCHAR, DOUBLE)  s  seconds by detail, details that occur
--   bound_detail_s  MAP(VARCHAR, DOUBLE)  s  of them an upper bound
--   workers       VARCHAR[]     workers of at least a tenth of the seconds, the greatest first
--   culprits      STRUCT(request VARCHAR, "value" DOUBLE)[]  the five requests that spent most there; value: seconds
WITH wait AS (
  -- whole nanoseconds add up the same in any order
  SELECT deployment, request, detail, duration_ns, ttft_part_ns,
    CAST(round(placed_ms * 1e6) AS BIGINT) AS placed_ns,
    CAST(round(bound_ms * 1e6) AS BIGINT) AS bound_ns
  FROM phase_by_request
  WHERE counted AND list_contains(details, detail)
),
detail_sum AS (
  SELECT deployment, detail, CAST(sum(duration_ns) AS DOUBLE) / 1e9 AS total_s,
    CAST(sum(bound_ns) AS DOUBLE) / 1e9 AS bound_s
  FROM wait
  GROUP BY deployment, detail
),
deployment_detail AS (
  SELECT deployment, map_from_entries(list((detail, total_s) ORDER BY detail)) AS detail_s,
    map_from_entries(list((detail, bound_s) ORDER BY detail)) AS bound_detail_s
  FROM detail_sum
  GROUP BY deployment
),
request_wait AS (
  SELECT request, sum(duration_ns) AS wait_ns, sum(ttft_part_ns) AS wait_ttft_ns,
    sum(placed_ns) AS placed_ns, sum(bound_ns) AS bound_ns,
    CAST(sum(duration_ns) AS DOUBLE) / 1e6 AS wait_ms,
    CAST(sum(duration_ns) FILTER (detail = apart) AS DOUBLE) / 1e6 AS apart_ms
  FROM wait
  GROUP BY request
),
counted_wait AS (
  SELECT c.deployment, c.request, c.mode, w.* EXCLUDE (request),
    CASE WHEN on_decode THEN c.decode_worker ELSE c.prefill_worker END AS worker,
    c.end_ns - c.start_ns AS e2e_ns,
    -- the part of the window that phases can tell: clocks that disagree put first tokens outside it
    CASE WHEN c.first_token_ns >= c.start_ns THEN least(c.first_token_ns, c.end_ns) - c.start_ns
      END AS ttft_ns
  FROM counted_requests AS c
  LEFT JOIN request_wait AS w ON w.request = c.request
  WHERE c.end_ns > c.start_ns
),
worker_wait AS (
  SELECT deployment, worker, sum(wait_ns) AS wait_ns,
    sum(wait_ns) / nullif(sum(sum(wait_ns)) OVER (PARTITION BY deployment), 0) AS ratio
  FROM counted_wait
  GROUP BY deployment, worker
),
leading_workers AS (
  SELECT deployment, list(worker ORDER BY wait_ns DESC, worker) AS workers
  FROM worker_wait
  WHERE worker IS NOT NULL AND ratio >= 0.1
  GROUP BY deployment
),
deployment_wait AS (
  SELECT deployment,
    CAST(sum(wait_ns) AS DOUBLE) / 1e9 AS wait_s,
    -- first tokens before starts are clocks apart, no time
    CASE WHEN sum(ttft_ns) > 0 THEN sum(wait_ttft_ns) / sum(ttft_ns) END AS ttft_ratio,
    sum(wait_ns) / nullif(sum(e2e_ns), 0) AS e2e_ratio,
    count(*) FILTER (wait_ms > 0) AS requests,
    count(*) AS seen,
    coalesce(bool_or(mode = 'disaggregated'), false) AS split,
    quantile_cont(coalesce(wait_ms, 0), [0.5, 0.9, 0.99]) AS waits_ms,
    quantile_cont(coalesce(apart_ms, 0), 0.99) AS apart_p99_ms,
    coalesce(sum(placed_ns), 0) / nullif(sum(wait_ns), 0) AS placed_ratio,
    CAST(coalesce(sum(bound_ns), 0) AS DOUBLE) / 1e9 AS bound_s,
    min_by({'request': request, 'value': wait_ms / 1e3}, (-wait_ms, request), 5)
      FILTER (wait_ms IS NOT NULL) AS culprits
  FROM counted_wait
  GROUP BY deployment
)
SELECT d.deployment, wait_s, ttft_ratio, e2e_ratio, requests, seen, split,
  waits_ms[1] AS wait_p50_ms, waits_ms[2] AS wait_p90_ms, waits_ms[3] AS wait_p99_ms, apart_p99_ms,
  placed_ratio, bound_s, s.detail_s, s.bound_detail_s, coalesce(w.workers, []) AS workers,
  coalesce(culprits, []) AS culprits
FROM deployment_wait AS d
JOIN deployment_detail AS s ON s.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN leading_workers AS w ON w.deployment IS NOT DISTINCT FROM d.deployment
