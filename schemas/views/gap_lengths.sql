-- gap_lengths: how many gaps between emissions have each length, as each observer saw them.
--
-- Gaps are whole microseconds: counted by length they stay few however many tokens there are, and
-- sums and exact quantiles come from the counts. Gaps of counted requests; where two records tell of
-- one stream (a span and a log), the fuller one is taken.
--
-- grain:   one row per (deployment, observer, emission, gap_us)
-- needs:   streams, legs, counted_requests
-- when:    EXISTS (FROM streams)
-- columns:
--   deployment  VARCHAR         deployment
--   observer    VARCHAR         who saw the streams
--   emission    VARCHAR         token or chunk: what one emission is; NULL unknown
--   requests    BIGINT          requests with at least one gap of that observer and emission
--   gap_us      INTEGER   us    length
--   count       BIGINT          gaps of that length
WITH told AS (
  SELECT
    c.deployment, l.request, coalesce(s.observer, l.observer) AS observer, s.emission, s.leg,
    coalesce(s.stream, 0) AS stream, l.attempt, s.gaps_us,
    hash(l.request, coalesce(s.observer, l.observer), coalesce(s.stream, 0), l.attempt) AS place
  FROM streams s
  JOIN legs l ON l.leg = s.leg
  JOIN counted_requests c ON c.request = l.request
  WHERE len(s.gaps_us) > 0
),
-- Few streams are told of twice: only those that may be are ordered.
doubtful AS (
  SELECT place
  FROM told
  GROUP BY place
  HAVING count(*) > 1
),
less_full AS (
  SELECT t.leg, t.stream
  FROM told t
  SEMI JOIN doubtful d ON d.place = t.place
  QUALIFY row_number() OVER (
    PARTITION BY t.request, t.observer, t.stream, t.attempt ORDER BY len(t.gaps_us) DESC, t.leg
  ) > 1
),
counted AS (
  SELECT deployment, request, observer, emission, gaps_us
  FROM told
  ANTI JOIN less_full USING (leg, stream)
),
kinds AS (
  SELECT
    row_number() OVER () AS kind, deployment, observer, emission,
    count(DISTINCT request) AS requests
  FROM counted
  GROUP BY deployment, observer, emission
),
-- By numbers: names at each of the gaps would take most of the time.
lengths AS (
  SELECT kind, gap_us, count(*) AS count
  FROM (
    SELECT k.kind, unnest(c.gaps_us) AS gap_us
    FROM counted c
    JOIN kinds k
      ON k.deployment IS NOT DISTINCT FROM c.deployment
     AND k.observer IS NOT DISTINCT FROM c.observer
     AND k.emission IS NOT DISTINCT FROM c.emission
  )
  WHERE gap_us IS NOT NULL
  GROUP BY ALL
)
SELECT k.deployment, k.observer, k.emission, k.requests, n.gap_us, n.count
FROM lengths n
JOIN kinds k ON k.kind = n.kind
