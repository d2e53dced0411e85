-- belief_points: router choices for a picture: prompt tokens it took for cached against those that were found.
--
-- Equal pairs are one point with its number; at most so many points, those with most choices. Where the
-- number found comes from the answer (cached_basis), it may be the router's own estimate: equal numbers
-- do not confirm each other then.
--
-- grain:   one row per (deployment, believed, found, basis)
-- needs:   decision_outcomes
-- params:
--   most  1500  points of a deployment
-- columns:
--   deployment       VARCHAR          deployment
--   believed_tokens  BIGINT   tokens  believed cached on the chosen worker
--   cached_tokens    BIGINT   tokens  found cached
--   cached_basis     VARCHAR          engine or answer
--   choices          BIGINT           router choices with these numbers
--   kind             VARCHAR          as believed, fewer found or more found
--   shown            BIGINT           choices shown
--   total            BIGINT           choices of which both numbers are known
--   believed_sum_tokens  BIGINT  tokens  all that was believed, over the total
--   cached_sum_tokens    BIGINT  tokens  all that was found, over the total
--   fewer            BIGINT           choices with fewer found than believed, over the total
--   level            VARCHAR          C
WITH known AS (
  SELECT deployment, believed_tokens, cached_tokens, cached_basis
  FROM decision_outcomes
  WHERE believed_tokens IS NOT NULL AND cached_tokens IS NOT NULL
),
pair AS (
  SELECT deployment, believed_tokens, cached_tokens, cached_basis, count(*) AS choices
  FROM known
  GROUP BY ALL
),
ranked AS (
  SELECT *, sum(choices) OVER (PARTITION BY deployment) AS total,
    sum(choices * believed_tokens) OVER (PARTITION BY deployment) AS believed_sum,
    sum(choices * cached_tokens) OVER (PARTITION BY deployment) AS cached_sum,
    coalesce(sum(choices) FILTER (believed_tokens > cached_tokens) OVER (PARTITION BY deployment), 0)
      AS fewer,
    row_number() OVER (
      PARTITION BY deployment
      ORDER BY choices DESC, hash(believed_tokens, cached_tokens), believed_tokens, cached_tokens,
        cached_basis
    ) AS place
  FROM pair
)
SELECT deployment, believed_tokens, cached_tokens, cached_basis, choices,
  CASE WHEN believed_tokens > cached_tokens THEN 'fewer found'
    WHEN believed_tokens < cached_tokens THEN 'more found' ELSE 'as believed' END AS kind,
  (sum(choices) OVER (PARTITION BY deployment))::BIGINT AS shown, total::BIGINT AS total,
  believed_sum::BIGINT AS believed_sum_tokens, cached_sum::BIGINT AS cached_sum_tokens,
  fewer::BIGINT AS fewer, 'C' AS level
FROM ranked
WHERE place <= most
ORDER BY deployment, place
