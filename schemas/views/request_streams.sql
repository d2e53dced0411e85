-- request_streams: the token streams of each request as the one observer saw them whose streams are used.
--
-- That observer is the deployment's headline where it has streams, else the outermost one that has.
--
-- grain:   one row per (request, stream, attempt) with at least one gap
-- needs:   streams, legs, deployments
-- columns:
--   deployment       VARCHAR    deployment
--   request          VARCHAR    the request
--   leg              VARCHAR    leg of the stream
--   observer         VARCHAR    who saw the stream
--   stream           BIGINT     index of the stream when n > 1
--   emission         VARCHAR    token or chunk: what one emission is; NULL unknown
--   gaps_us          INTEGER[]  gaps between emissions, microseconds
--   emission_tokens  INTEGER[]  tokens of each emission, the first included; NULL unknown
WITH seen AS (
  -- Where two records tell of one stream (a span and a log), the fuller one is taken.
  SELECT
    l.deployment, l.request, s.leg, coalesce(s.observer, l.observer) AS observer,
    coalesce(s.stream, 0) AS stream, s.emission, s.gaps_us, s.emission_tokens
  FROM streams AS s
  JOIN legs AS l ON l.leg = s.leg
  WHERE len(s.gaps_us) > 0 AND list_aggregate(s.gaps_us, 'count') = len(s.gaps_us)
    AND l.request IS NOT NULL
  QUALIFY row_number() OVER (
    PARTITION BY l.request, coalesce(s.observer, l.observer), coalesce(s.stream, 0), l.attempt
    ORDER BY len(s.gaps_us) DESC, s.leg
  ) = 1
),
chosen AS (
  SELECT
    s.deployment,
    arg_min(
      s.observer,
      CASE WHEN s.observer = d.headline_observer THEN 0
        ELSE list_position(['client', 'gateway', 'router', 'frontend', 'engine'], s.observer) END
    ) AS observer
  FROM (SELECT DISTINCT deployment, observer FROM seen) AS s
  LEFT JOIN deployments AS d ON d.deployment = s.deployment
  GROUP BY s.deployment
)
SELECT s.deployment, s.request, s.leg, s.observer, s.stream, s.emission, s.gaps_us, s.emission_tokens
FROM seen AS s
JOIN chosen AS c
  ON c.deployment IS NOT DISTINCT FROM s.deployment
 AND c.observer IS NOT DISTINCT FROM s.observer
