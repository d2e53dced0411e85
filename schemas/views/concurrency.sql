-- concurrency: how many intervals of a set are open at a time.
--
-- grain:   one row per stretch of time in which the number does not change
-- needs:   -
-- params:
--   intervals  'phases'  name of any table or view with start_ns and end_ns
-- columns:
--   start_ns  BIGINT  ns  start of the stretch
--   end_ns    BIGINT  ns  its end
--   active    BIGINT      intervals that are open; one without an end or that runs backwards is left out
WITH changes AS (
  SELECT start_ns AS time_ns, 1 AS change FROM query_table(intervals) WHERE end_ns > start_ns
  UNION ALL
  SELECT end_ns, -1 FROM query_table(intervals) WHERE end_ns > start_ns
),
instants AS (
  SELECT time_ns, sum(change) AS change FROM changes GROUP BY time_ns HAVING sum(change) <> 0
),
stretches AS (
  SELECT
    time_ns AS start_ns,
    lead(time_ns) OVER (ORDER BY time_ns) AS end_ns,
    CAST(sum(change) OVER (ORDER BY time_ns) AS BIGINT) AS active
  FROM instants
)
SELECT start_ns, end_ns, active
FROM stretches
WHERE end_ns IS NOT NULL
