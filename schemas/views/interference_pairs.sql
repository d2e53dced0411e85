-- interference_pairs: who took decode seconds from whom: the requests that took most against those that lost most.
--
-- From token times (evidence level B). Named are the requests whose prompts took most, and those that
-- lost most to them; the others are summed in rows without a name, and so are pairs whose names are unknown.
--
-- grain:   one row per (deployment, culprit, victim)
-- needs:   interference_gap_losses, interference_gaps, requests
-- params:
--   culprits  12  requests that are named as culprits, at most
--   victims   20  requests that are named as victims, at most
-- columns:
--   deployment      VARCHAR      deployment
--   culprit         VARCHAR      request whose prompt was computed; NULL: all that are not named
--   victim          VARCHAR      request that was held up; NULL: likewise
--   culprit_place   BIGINT       place of the culprit by seconds taken; others last
--   victim_place    BIGINT       place of the victim by seconds lost to the named culprits; others last
--   lost_s          DOUBLE   s   decode seconds
--   culprit_tokens  BIGINT   tokens  prompt of the culprit; NULL for others or unknown
--   culprit_lost_s  DOUBLE   s   all that the culprit took
--   victim_lost_s   DOUBLE   s   all that the victim lost
--   total_lost_s    DOUBLE   s   all of the deployment
--   worst_victim    VARCHAR      request that lost most of all, drawn or not
--   worst_lost_s    DOUBLE   s   what it lost
--   level           VARCHAR      evidence level
WITH pair AS (
  SELECT g.deployment, l.culprit, l.victim, l.lost_s
  FROM interference_gap_losses AS l
  JOIN (SELECT DISTINCT deployment, worker FROM interference_gaps WHERE flagged) AS g ON g.worker = l.worker
  WHERE l.lost_s > 0
),
taker AS (
  SELECT deployment, culprit,
    row_number() OVER (
      PARTITION BY deployment ORDER BY culprit IS NULL, sum(lost_s) DESC, culprit
    ) AS place
  FROM pair
  GROUP BY deployment, culprit
),
-- Victims are ranked by what the named culprits took: the worst of all may have lost to many others.
loser AS (
  SELECT p.deployment, p.victim,
    row_number() OVER (
      PARTITION BY p.deployment
      ORDER BY p.victim IS NULL,
        coalesce(sum(p.lost_s) FILTER (t.place <= culprits AND p.culprit IS NOT NULL), 0) DESC,
        sum(p.lost_s) DESC, p.victim
    ) AS place
  FROM pair AS p
  JOIN taker AS t ON t.deployment IS NOT DISTINCT FROM p.deployment
    AND t.culprit IS NOT DISTINCT FROM p.culprit
  GROUP BY p.deployment, p.victim
),
worst AS (
  SELECT deployment, arg_max(victim, lost_s) AS victim, max(lost_s) AS lost_s
  FROM (
    SELECT deployment, victim, sum(lost_s) AS lost_s
    FROM pair
    WHERE victim IS NOT NULL
    GROUP BY deployment, victim
    ORDER BY victim
  )
  GROUP BY deployment
),
named AS (
  SELECT p.deployment,
    CASE WHEN t.place <= culprits THEN p.culprit END AS culprit,
    CASE WHEN l.place <= victims THEN p.victim END AS victim,
    p.lost_s
  FROM pair AS p
  JOIN taker AS t ON t.deployment IS NOT DISTINCT FROM p.deployment
    AND t.culprit IS NOT DISTINCT FROM p.culprit
  JOIN loser AS l ON l.deployment IS NOT DISTINCT FROM p.deployment
    AND l.victim IS NOT DISTINCT FROM p.victim
),
summed AS (
  SELECT deployment, culprit, victim, sum(lost_s) AS lost_s
  FROM named
  GROUP BY deployment, culprit, victim
),
placed AS (
  SELECT *,
    sum(lost_s) OVER (PARTITION BY deployment, culprit) AS culprit_lost_s,
    sum(lost_s) OVER (PARTITION BY deployment, victim) AS victim_lost_s,
    sum(lost_s) OVER (PARTITION BY deployment) AS total_lost_s
  FROM summed
)
SELECT p.deployment, p.culprit, p.victim,
  dense_rank() OVER (
    PARTITION BY p.deployment
    ORDER BY p.culprit IS NULL, p.culprit_lost_s DESC, p.culprit
  ) AS culprit_place,
  dense_rank() OVER (
    PARTITION BY p.deployment
    ORDER BY p.victim IS NULL, p.victim_lost_s DESC, p.victim
  ) AS victim_place,
  p.lost_s, r.prompt_tokens AS culprit_tokens, p.culprit_lost_s, p.victim_lost_s, p.total_lost_s,
  m.victim AS worst_victim, m.lost_s AS worst_lost_s,
  'B' AS level
FROM placed AS p
LEFT JOIN worst AS m ON m.deployment IS NOT DISTINCT FROM p.deployment
LEFT JOIN requests AS r ON r.request = p.culprit AND r.deployment IS NOT DISTINCT FROM p.deployment
