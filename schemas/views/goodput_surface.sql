-- goodput_surface: what the same requests would have attained under other limits: goodput and
-- attainment by limit on the first token and on the time per token.
--
-- The grid is 1/4 to 4 times the limits of each class, and no limit; other limits of the class (gaps,
-- whole duration) stay in force. Latencies are those of this load: no capacity is in it.
--
-- grain:   one row per (deployment, class, limit on the first token, limit on the time per token)
-- needs:   slo_requests, slo_window
-- columns:
--   deployment      VARCHAR      deployment
--   position        INTEGER      place of the class in the list
--   class           VARCHAR      name of the class
--   ttft_limit_ms   DOUBLE   ms  limit on the first token; NULL none
--   tpot_limit_ms   DOUBLE   ms  limit on the time per token; NULL none
--   given           BOOLEAN      these are the limits that were given
--   good            BIGINT       requests known to meet all limits
--   unknown         BIGINT       requests of which that is not known
--   arrivals        BIGINT       requests of the class
--   attainment      DOUBLE       good / arrivals
--   low             DOUBLE       Wilson interval (95 %), lower end
--   high            DOUBLE       upper end
--   good_per_s      DOUBLE       good requests per second of the window (view slo_window)
WITH factors AS (
  SELECT * FROM (VALUES (1, 0.25), (2, 0.5), (3, 1), (4, 2), (5, 4), (6, NULL)) AS f(step, factor)
),
-- The first step of the grid that a request meets; 6 is no limit, NULL unknown.
steps AS (
  SELECT
    deployment, position, class, ttft_limit_ms, tpot_limit_ms,
    CASE WHEN ended <> 'completed' THEN ended = 'unknown' ELSE itl_met AND e2e_met END AS rest_met,
    ended,
    CASE WHEN ttft_limit_ms IS NULL THEN 6 WHEN ttft_ms IS NULL THEN NULL
      WHEN ttft_ms <= ttft_limit_ms / 4 THEN 1 WHEN ttft_ms <= ttft_limit_ms / 2 THEN 2
      WHEN ttft_ms <= ttft_limit_ms THEN 3 WHEN ttft_ms <= ttft_limit_ms * 2 THEN 4
      WHEN ttft_ms <= ttft_limit_ms * 4 THEN 5 ELSE 6 END AS ttft_step,
    CASE WHEN tpot_limit_ms IS NULL THEN 6 WHEN single THEN 1 WHEN tpot_ms IS NULL THEN NULL
      WHEN tpot_ms <= tpot_limit_ms / 4 THEN 1 WHEN tpot_ms <= tpot_limit_ms / 2 THEN 2
      WHEN tpot_ms <= tpot_limit_ms THEN 3 WHEN tpot_ms <= tpot_limit_ms * 2 THEN 4
      WHEN tpot_ms <= tpot_limit_ms * 4 THEN 5 ELSE 6 END AS tpot_step
  FROM slo_requests
  WHERE position IS NOT NULL
),
cells AS (
  SELECT
    deployment, position, class, ttft_limit_ms, tpot_limit_ms, ended, rest_met, ttft_step, tpot_step,
    count(*) AS requests
  FROM steps
  GROUP BY ALL
),
judged AS (
  SELECT
    c.deployment, c.position, c.class,
    a.factor * c.ttft_limit_ms AS ttft_limit_ms,
    b.factor * c.tpot_limit_ms AS tpot_limit_ms,
    bool_and(
      (a.step = 3 OR c.ttft_limit_ms IS NULL) AND (b.step = 3 OR c.tpot_limit_ms IS NULL)
    ) AS given,
    coalesce(sum(c.requests) FILTER (
      c.ended = 'completed' AND c.rest_met
      AND (a.step = 6 OR c.ttft_step <= a.step) AND (b.step = 6 OR c.tpot_step <= b.step)
    ), 0) AS good,
    coalesce(sum(c.requests) FILTER (
      c.ended IN ('completed', 'unknown') AND c.rest_met IS NOT FALSE
      AND (a.step = 6 OR c.ttft_step <= a.step) IS NOT FALSE
      AND (b.step = 6 OR c.tpot_step <= b.step) IS NOT FALSE
    ), 0) AS possible,
    sum(c.requests) AS arrivals
  FROM cells AS c
  JOIN factors AS a ON a.step = 6 OR c.ttft_limit_ms IS NOT NULL
  JOIN factors AS b ON b.step = 6 OR c.tpot_limit_ms IS NOT NULL
  GROUP BY ALL
),
shares AS (
  SELECT *, good / arrivals AS share, 3.841458820694124 AS z2
  FROM judged
)
SELECT
  s.deployment, s.position, s.class, s.ttft_limit_ms, s.tpot_limit_ms, s.given,
  CAST(s.good AS BIGINT) AS good,
  CAST(s.possible - s.good AS BIGINT) AS unknown,
  CAST(s.arrivals AS BIGINT) AS arrivals,
  share AS attainment,
  greatest(0, (share + z2 / (2 * arrivals)
    - sqrt(z2 * (share * (1 - share) + z2 / (4 * arrivals)) / arrivals)) / (1 + z2 / arrivals)) AS low,
  least(1, (share + z2 / (2 * arrivals)
    + sqrt(z2 * (share * (1 - share) + z2 / (4 * arrivals)) / arrivals)) / (1 + z2 / arrivals)) AS high,
  CAST(s.good AS DOUBLE) / w.window_s AS good_per_s
FROM shares AS s
LEFT JOIN slo_window AS w ON w.deployment IS NOT DISTINCT FROM s.deployment
