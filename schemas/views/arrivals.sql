-- arrivals: how many requests started in each stretch of time.
--
-- Without ends given the stretches run from the first to the last request of the deployment.
--
-- grain:   one row per (deployment, stretch) with a request
-- needs:   requests
-- params:
--   bins      120   stretches
--   from_ns   NULL  start of the first stretch
--   until_ns  NULL  end of the last one
-- columns:
--   deployment  VARCHAR      deployment
--   bin         BIGINT       number of the stretch, from 0
--   start_ns    BIGINT   ns  its start
--   end_ns      BIGINT   ns  its end
--   requests    BIGINT       requests that started in it
--   failed      BIGINT       of them, those that failed
WITH seen AS (
  SELECT deployment, min(start_ns) AS first_ns, max(start_ns) + 1 AS last_ns
  FROM requests
  WHERE start_ns IS NOT NULL
  GROUP BY deployment
),
ends AS (
  SELECT deployment, coalesce(from_ns, first_ns) AS first_ns,
    greatest(coalesce(until_ns, last_ns) - coalesce(from_ns, first_ns), 1) AS length_ns
  FROM seen
),
numbered AS (
  SELECT r.deployment, r.outcome, e.first_ns, e.length_ns,
    floor((r.start_ns - e.first_ns) / e.length_ns * bins)::BIGINT AS bin
  FROM requests AS r
  JOIN ends AS e ON e.deployment IS NOT DISTINCT FROM r.deployment
  WHERE r.start_ns >= e.first_ns AND r.start_ns < e.first_ns + e.length_ns
)
SELECT deployment, bin,
  any_value(first_ns) + (bin * any_value(length_ns) / bins)::BIGINT AS start_ns,
  any_value(first_ns) + ((bin + 1) * any_value(length_ns) / bins)::BIGINT AS end_ns,
  count(*) AS requests,
  count(*) FILTER (outcome = 'failed') AS failed
FROM numbered
GROUP BY deployment, bin
