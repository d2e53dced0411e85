-- itl_distribution: how long the gaps between emissions of the streams are, and how many of the long ones prefills explain.
--
-- Gaps of counted requests as the observer nearest to the engine saw them, in ranges on a logarithmic
-- scale. A gap is explained where it is one of the stalls that prefills of others made (table
-- interference_events; only where interference is shown from token times). Gaps on workers that could
-- not be judged are unknown, not unexplained: how many they are stands in unjudged_gaps. Workers that
-- only decode are none of them: no prompt of others is computed there.
--
-- grain:   one row per (deployment, range of lengths)
-- needs:   gap_lengths, streams, legs, requests, counted_requests, interference_events, interference_gaps
-- params:
--   per_decade  12  ranges for each power of ten
-- columns:
--   deployment       VARCHAR      deployment
--   observer         VARCHAR      who saw the gaps
--   emission         VARCHAR      token or chunk: what one emission is; NULL unknown or both
--   low_ms           DOUBLE   ms  shortest gap of the range
--   high_ms          DOUBLE   ms  longest gap of the range, itself not included
--   gaps             BIGINT       gaps in it
--   total_s          DOUBLE   s   their summed length
--   explained_gaps   BIGINT       of them, those that a prefill of another request made
--   explained_s      DOUBLE   s   the part of their length that prefills explain
--   all_gaps         BIGINT       all gaps of the deployment
--   all_s            DOUBLE   s   their summed length
--   p50_ms           DOUBLE   ms  median gap
--   p99_ms           DOUBLE   ms  99th percentile
--   max_ms           DOUBLE   ms  longest gap
--   judged           BOOLEAN      prefills were laid over the gaps (level B could judge a worker)
--   unjudged_gaps    BIGINT       of all_gaps those on workers that could not be judged
--   unjudged_s       DOUBLE   s   their summed length
--   tail_explained_ratio  DOUBLE  1  share of the excess of the longest hundredth of gaps that prefills explain, on the worker that lost most
--   level            VARCHAR      evidence level
WITH nearest AS (
  -- one observer a deployment: the nearest to the engine
  SELECT deployment, arg_min(observer, coalesce(
    list_position(['engine', 'frontend', 'router', 'gateway', 'client'], observer), 9
  )) AS observer
  FROM gap_lengths
  GROUP BY deployment
),
seen AS (
  SELECT n.deployment, n.observer,
    CASE WHEN count(DISTINCT l.emission) = 1 AND count(l.emission) = count(*)
      THEN min(l.emission) END AS emission
  FROM gap_lengths AS l
  JOIN nearest AS n ON n.deployment IS NOT DISTINCT FROM l.deployment
    AND n.observer IS NOT DISTINCT FROM l.observer
  GROUP BY n.deployment, n.observer
),
counted AS (
  SELECT n.deployment, l.gap_us, CAST(sum(l.count) AS BIGINT) AS gaps
  FROM gap_lengths AS l
  JOIN nearest AS n ON n.deployment IS NOT DISTINCT FROM l.deployment
    AND n.observer IS NOT DISTINCT FROM l.observer
  GROUP BY n.deployment, l.gap_us
),
ordered AS (
  SELECT *, sum(gaps) OVER (PARTITION BY deployment ORDER BY gap_us) AS up_to,
    sum(gaps) OVER (PARTITION BY deployment) AS all_gaps
  FROM counted
),
-- quantile_cont: between the values at the two ranks around share * (gaps - 1).
ranks AS (
  SELECT deployment, share, max(share * (all_gaps - 1)) AS place,
    min(gap_us) FILTER (up_to > floor(share * (all_gaps - 1))) AS low_us,
    min(gap_us) FILTER (up_to > ceil(share * (all_gaps - 1))) AS high_us
  FROM ordered
  CROSS JOIN (VALUES (0.5), (0.99)) AS shares(share)
  GROUP BY deployment, share
),
quantile AS (
  SELECT deployment, share,
    (low_us + (place - floor(place)) * (coalesce(high_us, low_us) - low_us)) / 1e3 AS gap_ms
  FROM ranks
),
summed AS (
  SELECT o.deployment, CAST(max(o.all_gaps) AS BIGINT) AS all_gaps,
    CAST(sum(CAST(o.gaps AS DOUBLE) * o.gap_us) AS DOUBLE) / 1e6 AS all_s,
    max(o.gap_us) / 1e3 AS max_ms,
    any_value(m.gap_ms) AS p50_ms, any_value(t.gap_ms) AS p99_ms
  FROM ordered AS o
  JOIN quantile AS m ON m.deployment IS NOT DISTINCT FROM o.deployment AND m.share = 0.5
  JOIN quantile AS t ON t.deployment IS NOT DISTINCT FROM o.deployment AND t.share = 0.99
  GROUP BY o.deployment
),
-- Below 10 microseconds gaps are one range: tokens that came together.
ranged AS (
  SELECT deployment, gap_us, gaps,
    CAST(floor(log10(greatest(gap_us, 10)) * per_decade) AS BIGINT) AS step
  FROM counted
),
range_of AS (
  SELECT deployment, step, CAST(sum(gaps) AS BIGINT) AS gaps,
    sum(CAST(gaps AS DOUBLE) * gap_us) / 1e6 AS total_s
  FROM ranged
  GROUP BY deployment, step
),
stall AS (
  SELECT g.deployment, e.lost_ms,
    CAST(floor(log10(greatest(round(e.gap_ms * 1e3), 10)) * per_decade) AS BIGINT) AS step
  FROM interference_events AS e
  JOIN (SELECT DISTINCT deployment, worker FROM interference_gaps WHERE flagged) AS g
    ON g.worker = e.worker
  WHERE e.gap_ms > 0
    AND e.victim IN (SELECT request FROM counted_requests)
),
explained AS (
  SELECT deployment, step, count(*) AS gaps, sum(lost_ms) / 1e3 AS explained_s
  FROM stall
  GROUP BY deployment, step
),
judged AS (
  SELECT deployment, bool_or(flagged IS NOT NULL) AS judged,
    arg_max(tail_explained_ratio, lost_s) FILTER (flagged) AS tail_explained_ratio
  FROM interference_gaps
  GROUP BY deployment
),
stream AS (
  -- where two records tell of one stream, the fuller one, as in gap_lengths
  SELECT c.deployment, r.decode_worker AS worker, s.gaps_us
  FROM streams AS s
  JOIN legs AS l ON l.leg = s.leg
  JOIN counted_requests AS c ON c.request = l.request
  JOIN requests AS r ON r.request = l.request
  JOIN nearest AS n ON n.deployment IS NOT DISTINCT FROM c.deployment
    AND n.observer IS NOT DISTINCT FROM coalesce(s.observer, l.observer)
  WHERE len(s.gaps_us) > 0
    AND c.deployment IN (SELECT deployment FROM judged WHERE judged)
  QUALIFY row_number() OVER (
    PARTITION BY l.request, coalesce(s.stream, 0), l.attempt ORDER BY len(s.gaps_us) DESC, l.leg
  ) = 1
),
unjudged AS (
  SELECT s.deployment, CAST(sum(len(s.gaps_us)) AS BIGINT) AS gaps,
    CAST(sum(list_sum(s.gaps_us)) AS DOUBLE) / 1e6 AS seconds
  FROM stream AS s
  LEFT JOIN (
    SELECT worker, bool_or(flagged) AS flagged, any_value(role) AS role
    FROM interference_gaps
    GROUP BY worker
  ) AS g ON g.worker = s.worker
  WHERE g.flagged IS NULL AND g.role IS DISTINCT FROM 'decode'
  GROUP BY s.deployment
)
SELECT r.deployment, s.observer, s.emission,
  pow(10, r.step / per_decade) / 1e3 AS low_ms,
  pow(10, (r.step + 1) / per_decade) / 1e3 AS high_ms,
  r.gaps, r.total_s,
  CASE WHEN coalesce(j.judged, false) THEN coalesce(e.gaps, 0) END AS explained_gaps,
  CASE WHEN coalesce(j.judged, false) THEN coalesce(e.explained_s, 0) END AS explained_s,
  t.all_gaps, t.all_s, t.p50_ms, t.p99_ms, t.max_ms,
  coalesce(j.judged, false) AS judged,
  CASE WHEN j.judged THEN coalesce(u.gaps, 0) ELSE t.all_gaps END AS unjudged_gaps,
  CASE WHEN j.judged THEN coalesce(u.seconds, 0) ELSE t.all_s END AS unjudged_s,
  j.tail_explained_ratio,
  'B' AS level
FROM range_of AS r
JOIN seen AS s ON s.deployment IS NOT DISTINCT FROM r.deployment
JOIN summed AS t ON t.deployment IS NOT DISTINCT FROM r.deployment
LEFT JOIN explained AS e ON e.deployment IS NOT DISTINCT FROM r.deployment AND e.step = r.step
LEFT JOIN judged AS j ON j.deployment IS NOT DISTINCT FROM r.deployment
LEFT JOIN unjudged AS u ON u.deployment IS NOT DISTINCT FROM r.deployment
