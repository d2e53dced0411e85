-- gap_summary: inter-token latency as each observer saw it, over the gaps of counted requests.
--
-- grain:   one row per (deployment, observer, emission)
-- needs:   gap_lengths
-- when:    EXISTS (FROM streams)
-- columns:
--   deployment  VARCHAR         deployment
--   observer    VARCHAR         who saw the streams
--   emission    VARCHAR         token or chunk: what one emission is; NULL unknown
--   requests    BIGINT          requests with at least one gap
--   count       BIGINT          gaps
--   total_ms    DOUBLE   ms     sum of the gaps
--   mean_ms     DOUBLE   ms     mean gap (weights long answers)
--   p50_ms      DOUBLE   ms     median, linear interpolation
--   p90_ms      DOUBLE   ms     90th percentile
--   p95_ms      DOUBLE   ms     95th percentile
--   p99_ms      DOUBLE   ms     99th percentile
--   max_ms      DOUBLE   ms     longest gap
WITH lengths AS (
  SELECT deployment, observer, emission, requests, gap_us, count AS gaps
  FROM gap_lengths
),
ordered AS (
  SELECT *, sum(gaps) OVER (
    PARTITION BY deployment, observer, emission ORDER BY gap_us
  ) AS up_to
  FROM lengths
),
sums AS (
  SELECT
    deployment, observer, emission, any_value(requests) AS requests, sum(gaps) AS total,
    sum(gaps * gap_us) AS total_us, max(gap_us) AS max_us
  FROM lengths
  GROUP BY ALL
),
-- quantile_cont: between the values at the two ranks around share * (total - 1).
ranks AS (
  SELECT s.*, share, floor(share * (total - 1)) AS low, ceil(share * (total - 1)) AS high
  FROM sums s, (VALUES (0.5), (0.9), (0.95), (0.99)) shares(share)
),
quantiles AS (
  SELECT
    r.deployment, r.observer, r.emission, r.share,
    min(o.gap_us) FILTER (o.up_to > r.low) AS low_us,
    min(o.gap_us) FILTER (o.up_to > r.high) AS high_us,
    any_value(r.share * (r.total - 1) - r.low) AS fraction
  FROM ranks r
  JOIN ordered o
    ON o.deployment IS NOT DISTINCT FROM r.deployment
   AND o.observer IS NOT DISTINCT FROM r.observer
   AND o.emission IS NOT DISTINCT FROM r.emission
  GROUP BY ALL
),
wide AS (
  SELECT
    deployment, observer, emission,
    max((low_us + fraction * (high_us - low_us)) / 1e3) FILTER (share = 0.5) AS p50_ms,
    max((low_us + fraction * (high_us - low_us)) / 1e3) FILTER (share = 0.9) AS p90_ms,
    max((low_us + fraction * (high_us - low_us)) / 1e3) FILTER (share = 0.95) AS p95_ms,
    max((low_us + fraction * (high_us - low_us)) / 1e3) FILTER (share = 0.99) AS p99_ms
  FROM quantiles
  GROUP BY ALL
)
SELECT
  s.deployment,
  s.observer,
  s.emission,
  s.requests,
  CAST(s.total AS BIGINT) AS count,
  CAST(s.total_us AS DOUBLE) / 1e3 AS total_ms,
  CAST(s.total_us AS DOUBLE) / 1e3 / CAST(s.total AS DOUBLE) AS mean_ms,
  w.p50_ms,
  w.p90_ms,
  w.p95_ms,
  w.p99_ms,
  s.max_us / 1e3 AS max_ms
FROM sums s
JOIN wide w
  ON w.deployment IS NOT DISTINCT FROM s.deployment
 AND w.observer IS NOT DISTINCT FROM s.observer
 AND w.emission IS NOT DISTINCT FROM s.emission
