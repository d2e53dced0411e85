-- slo_window: the time over which good requests are counted per second: from the first arrival to the
-- last end of the deployment's requests, whatever became of them.
--
-- Where a bench tool's own clock is the only one, the window is measured on that clock.
--
-- grain:   one row per deployment with requests
-- needs:   requests, legs
-- columns:
--   deployment  VARCHAR      deployment
--   requests    BIGINT       requests in it
--   placed      BIGINT       of them those whose start is known
--   start_ns    BIGINT   ns  first arrival; NULL where only another clock than the wall's is known
--   end_ns      BIGINT   ns  last end, likewise
--   window_s    DOUBLE   s   its length; NULL where starts are not known, or on several clocks
WITH own_clock AS (
  SELECT
    deployment, request, clock, min(clock_start_ns) AS begun,
    max(clock_start_ns + CAST(coalesce(e2e_ms, 0) * 1e6 AS BIGINT)) AS ended
  FROM legs
  WHERE clock_start_ns IS NOT NULL AND container IS NOT TRUE
  GROUP BY ALL
),
-- A request without a start of its own on the wall clock leaves the wall's window incomplete.
clocks AS (
  SELECT
    deployment, count(DISTINCT request) AS placed, max(ended) - min(begun) AS window_ns,
    count(DISTINCT clock) AS clocks
  FROM own_clock
  GROUP BY deployment
),
wall AS (
  SELECT
    deployment, count(*) AS requests, count(start_ns) AS placed, min(start_ns) AS start_ns,
    max(greatest(coalesce(end_ns, start_ns), start_ns)) AS end_ns
  FROM requests
  GROUP BY deployment
)
SELECT
  w.deployment,
  w.requests,
  greatest(w.placed, CASE WHEN c.clocks = 1 THEN c.placed ELSE 0 END) AS placed,
  w.start_ns,
  w.end_ns,
  CASE WHEN w.placed = w.requests AND w.end_ns > w.start_ns THEN (w.end_ns - w.start_ns) / 1e9
    WHEN c.clocks = 1 AND c.placed = w.requests AND c.window_ns > 0 THEN c.window_ns / 1e9
  END AS window_s
FROM wall AS w
LEFT JOIN clocks AS c ON c.deployment IS NOT DISTINCT FROM w.deployment
