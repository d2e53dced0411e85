-- slo_attainment: how many requests met each limit and all of them, class by class.
--
-- Over all arrivals a request that failed, was rejected, timed out or was aborted is not good, nor
-- is one whose latency is unknown: `attainment` is the lower bound and `attainment_high_ratio` what
-- it were if all unknown ones were good. Requests that their client aborted are also told apart.
-- Intervals are Wilson's (95 %): what another such period at this load could show, no capacity.
--
-- grain:   one row per (deployment, class, metric); metric `all` is all limits of the class together;
--          class NULL, metric `none`: requests that no class takes
-- needs:   slo_requests, slo_window
-- columns:
--   deployment               VARCHAR      deployment
--   position                 INTEGER      place of the class in the list
--   class                    VARCHAR      name of the class
--   metric                   VARCHAR      ttft_ms, tpot_ms, itl_ms, e2e_ms or all
--   limit_ms                 DOUBLE   ms  the limit; NULL for all
--   good                     BIGINT       completed and known to have met it
--   arrivals                 BIGINT       all requests of the class
--   completed                BIGINT       of them completed
--   failed                   BIGINT       failed, rejected, timed out or aborted by the server
--   client_aborts            BIGINT       aborted, and nothing says that the server did it
--   unknown                  BIGINT       whether they met it is not known
--   single                   BIGINT       good ones that have one token only, which meets any limit on pace or gaps
--   undecided                BIGINT       requests of the class of which an earlier class asks something unknown
--   attainment               DOUBLE       good / arrivals
--   attainment_low           DOUBLE       Wilson interval, lower end
--   attainment_high          DOUBLE       upper end
--   attainment_high_ratio    DOUBLE   1   (good + unknown) / arrivals
--   completed_ratio          DOUBLE   1   good / completed
--   completed_low            DOUBLE       Wilson interval, lower end
--   completed_high           DOUBLE       upper end
--   without_aborts_ratio     DOUBLE   1   good / (arrivals - client aborts)
--   good_per_s               DOUBLE       good requests per second of the window; NULL where its length is unknown
--   window_s                 DOUBLE   s   that window: first arrival to last end of the deployment's requests
WITH metrics AS (
  SELECT
    r.deployment, r.position, r.class, r.ended, r.undecided, m.metric,
    CASE m.metric WHEN 'ttft_ms' THEN ttft_limit_ms WHEN 'tpot_ms' THEN tpot_limit_ms
      WHEN 'itl_ms' THEN itl_limit_ms WHEN 'e2e_ms' THEN e2e_limit_ms END AS limit_ms,
    CASE m.metric WHEN 'ttft_ms' THEN ttft_met WHEN 'tpot_ms' THEN tpot_met
      WHEN 'itl_ms' THEN itl_met WHEN 'e2e_ms' THEN e2e_met ELSE all_met END AS met,
    r.single AND (
      m.metric IN ('tpot_ms', 'itl_ms')
      OR (m.metric = 'all' AND coalesce(r.tpot_limit_ms, r.itl_limit_ms) IS NOT NULL)
    ) AS single
  FROM slo_requests AS r
  CROSS JOIN (VALUES ('ttft_ms'), ('tpot_ms'), ('itl_ms'), ('e2e_ms'), ('all')) AS m(metric)
  WHERE r.position IS NOT NULL
  UNION ALL
  SELECT deployment, NULL, NULL, ended, undecided, 'none', NULL, NULL, false
  FROM slo_requests
  WHERE position IS NULL
),
counts AS (
  SELECT
    deployment, position, class, metric, limit_ms,
    count(*) FILTER (ended = 'completed' AND met) AS good,
    count(*) AS arrivals,
    count(*) FILTER (ended = 'completed') AS completed,
    count(*) FILTER (ended = 'failed') AS failed,
    count(*) FILTER (ended = 'client_abort') AS client_aborts,
    count(*) FILTER (
      (ended = 'completed' AND met IS NULL) OR (ended = 'unknown' AND met IS NOT FALSE)
    ) AS unknown,
    count(*) FILTER (ended = 'completed' AND met AND single) AS single,
    count(*) FILTER (undecided) AS undecided
  FROM metrics
  WHERE limit_ms IS NOT NULL OR metric IN ('all', 'none')
  GROUP BY ALL
),
shares AS (
  SELECT
    *, CASE WHEN metric <> 'none' THEN good / arrivals END AS share,
    CASE WHEN metric <> 'none' AND completed > 0 THEN good / completed END AS share_completed,
    3.841458820694124 AS z2
  FROM counts
)
SELECT
  s.deployment, s.position, s.class, s.metric, s.limit_ms, s.good, s.arrivals, s.completed, s.failed,
  s.client_aborts, s.unknown, s.single, s.undecided,
  share AS attainment,
  greatest(0, (share + z2 / (2 * arrivals)
    - sqrt(z2 * (share * (1 - share) + z2 / (4 * arrivals)) / arrivals)) / (1 + z2 / arrivals))
    AS attainment_low,
  least(1, (share + z2 / (2 * arrivals)
    + sqrt(z2 * (share * (1 - share) + z2 / (4 * arrivals)) / arrivals)) / (1 + z2 / arrivals))
    AS attainment_high,
  CASE WHEN metric <> 'none' THEN (good + unknown) / arrivals END AS attainment_high_ratio,
  share_completed AS completed_ratio,
  greatest(0, (share_completed + z2 / (2 * completed)
    - sqrt(z2 * (share_completed * (1 - share_completed) + z2 / (4 * completed)) / completed))
    / (1 + z2 / completed)) AS completed_low,
  least(1, (share_completed + z2 / (2 * completed)
    + sqrt(z2 * (share_completed * (1 - share_completed) + z2 / (4 * completed)) / completed))
    / (1 + z2 / completed)) AS completed_high,
  CASE WHEN metric <> 'none' AND arrivals > client_aborts THEN good / (arrivals - client_aborts) END
    AS without_aborts_ratio,
  CASE WHEN metric <> 'none' THEN good / w.window_s END AS good_per_s,
  w.window_s
FROM shares AS s
LEFT JOIN slo_window AS w ON w.deployment IS NOT DISTINCT FROM s.deployment
