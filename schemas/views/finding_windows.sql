-- finding_windows: the shortest stretch of time that holds most of what a finding sums up.
--
-- Concentrated where that stretch is at most max_window_ratio of the deployment's time, at least
-- min_pieces pieces make up the sum (Kish's effective number), and it holds at most
-- max_request_ratio of the requests: 90 % of the trouble where 90 % of the traffic was is no news.
--
-- grain:   one row per (deployment, finding) with a piece that has an instant
-- needs:   finding_times, request_values
-- params:
--   min_ratio          0.9   most of it
--   max_window_ratio   0.25  a longer part of the run is no concentration
--   max_request_ratio  0.5   nor is a stretch in which half of the requests came
--   min_pieces         8     so few fall this close by chance once in a thousand runs
-- columns:
--   deployment     VARCHAR       deployment
--   finding        VARCHAR       id of the finding
--   start_ns       BIGINT   ns   start of the stretch
--   end_ns         BIGINT   ns   end of the stretch
--   weight_ratio   DOUBLE        share of the finding inside it
--   window_ratio   DOUBLE        share of the deployment's time that it is; NULL unknown
--   request_ratio  DOUBLE        share of the requests that start in it; NULL unknown
--   pieces         DOUBLE        effective number of pieces
--   concentrated   BOOLEAN       it happened then rather than all along
WITH piece AS (
  SELECT deployment, finding, time_ns, sum(weight) AS weight, sum(weight * weight) AS square
  FROM finding_times
  WHERE weight > 0
  GROUP BY deployment, finding, time_ns
),
running AS (
  SELECT *, sum(weight) OVER so_far AS upto, sum(weight) OVER everything AS total,
    sum(square) OVER everything AS squares
  FROM piece
  WINDOW so_far AS (PARTITION BY deployment, finding ORDER BY time_ns),
    everything AS (PARTITION BY deployment, finding)
),
reached AS (
  SELECT *, coalesce(deployment, '') AS key
  FROM running
),
stretch AS (
  -- rounding of sums must not push the wanted end behind the last piece
  SELECT w.deployment, w.finding, w.time_ns AS start_ns, r.time_ns AS end_ns,
    (r.upto - w.upto + w.weight) / w.total AS weight_ratio, w.total * w.total / w.squares AS pieces
  FROM (
    SELECT *, upto - weight + min_ratio * total * (1 - 1e-9) AS target
    FROM reached
    WHERE upto - weight <= (1 - min_ratio) * total * (1 + 1e-9)
  ) AS w
  ASOF JOIN reached AS r ON r.key = w.key AND r.finding = w.finding AND w.target <= r.upto
),
shortest AS (
  SELECT *
  FROM stretch
  QUALIFY row_number() OVER (
    PARTITION BY deployment, finding ORDER BY end_ns - start_ns, start_ns
  ) = 1
),
judged AS (
  SELECT s.deployment, s.finding, s.start_ns, s.end_ns, any_value(s.weight_ratio) AS weight_ratio,
    (s.end_ns - s.start_ns) / nullif(max(r.start_ns) - min(r.start_ns), 0) AS window_ratio,
    count(*) FILTER (r.start_ns BETWEEN s.start_ns AND s.end_ns) / nullif(count(r.start_ns), 0)
      AS request_ratio,
    any_value(s.pieces) AS pieces
  FROM shortest AS s
  LEFT JOIN request_values AS r ON r.deployment IS NOT DISTINCT FROM s.deployment
    AND r.start_ns IS NOT NULL
  GROUP BY s.deployment, s.finding, s.start_ns, s.end_ns
)
SELECT *,
  coalesce(
    window_ratio <= max_window_ratio AND request_ratio <= max_request_ratio
      AND pieces >= min_pieces, false
  ) AS concentrated
FROM judged
