-- load_spread: how evenly the workers of a role were loaded, by several measures.
--
-- Side prefill: the worker that computed the prompt (where one worker does both: both); side decode:
-- the worker that decoded, where another did. Tokens: prompt tokens not found in a cache (prefill; all
-- of them where that is known of no request of the deployment), output tokens (decode). Seconds: time
-- that requests spent in prefill or decode there: a slow worker has more of them for the same work.
-- Workers of the role that got nothing count with 0. A worker that another of its name follows, or is followed by, with
-- no time in common (a restart) was not there to be chosen all along: it is left out. A measure that is unknown for any request is left
-- out. The interval of over_mean is that of a share of a sum (linearised variance over requests):
-- would another such period show it.
--
-- grain:   one row per (deployment, side, measure) with at least two workers
-- needs:   side_sums, side_workers, workers
-- when:    (SELECT min(worker) <> max(worker) FROM (SELECT worker FROM workers
--          UNION ALL SELECT prefill_worker FROM requests UNION ALL SELECT decode_worker FROM requests))
-- columns:
--   deployment       VARCHAR  deployment
--   side             VARCHAR  prefill or decode
--   unsplit          BOOLEAN  the same workers do prefill and decode
--   measure          VARCHAR  requests, tokens or seconds
--   workers          BIGINT   workers of the side
--   idle_workers     BIGINT   of them without any request
--   requests         BIGINT   requests
--   total            DOUBLE   sum over all workers
--   greatest         VARCHAR  the worker that got most
--   greatest_ratio   DOUBLE   1  its share of the total
--   over_mean        DOUBLE   greatest over mean: 1 is even
--   over_mean_low    DOUBLE   95 % interval, lower end
--   over_mean_high   DOUBLE   upper end
--   least_over_mean  DOUBLE   the worker that got least over the mean
--   variation_ratio  DOUBLE   1  standard deviation over the workers over their mean
--   sigma            DOUBLE   how far the greatest is from what random placement gives, in standard deviations
WITH side_both AS (
  SELECT deployment, side, NOT bool_or(split) AND side = 'prefill' AS unsplit
  FROM side_sums
  GROUP BY deployment, side
),
in_turn AS (
  SELECT DISTINCT a.worker
  FROM workers AS a
  JOIN workers AS b ON b.deployment IS NOT DISTINCT FROM a.deployment
    AND b.name = a.name AND b.role = a.role
  WHERE a.end_ns < b.start_ns OR b.end_ns < a.start_ns
),
measured AS (
  SELECT k.deployment, k.side, k.worker, coalesce(r.requests, 0) AS requests, unnest([
      {'measure': 'requests', 'amount': coalesce(r.requests, 0)::DOUBLE,
       'squares': coalesce(r.requests, 0)::DOUBLE, 'missing': 0::BIGINT},
      {'measure': 'tokens', 'amount': coalesce(r.tokens, 0),
       'squares': coalesce(r.token_squares, 0), 'missing': coalesce(r.tokens_unknown, 0)},
      {'measure': 'seconds', 'amount': coalesce(r.seconds, 0),
       'squares': coalesce(r.second_squares, 0), 'missing': coalesce(r.seconds_unknown, 0)}
    ], recursive := true)
  FROM side_workers AS k
  LEFT JOIN side_sums AS r ON r.deployment IS NOT DISTINCT FROM k.deployment
    AND r.side = k.side AND r.worker = k.worker
  WHERE k.worker NOT IN (FROM in_turn)
),
compared AS (
  SELECT deployment, side, measure, count(*) AS k, sum(requests)::BIGINT AS requests,
    count(*) FILTER (requests = 0) AS idle_workers, sum(amount) AS total, max(amount) AS most,
    min(amount) AS least, avg(amount) AS mean, stddev_pop(amount) AS deviation,
    min_by(worker, (-amount, worker)) AS greatest,
    min_by(squares, (-amount, worker)) AS own_squares, sum(squares) AS squares
  FROM measured
  GROUP BY deployment, side, measure
  HAVING count(*) >= 2 AND sum(amount) > 0 AND sum(missing) = 0
),
spread AS (
  SELECT *, most / total AS share,
    1.96 * sqrt(own_squares * (1 - most / total) * (1 - most / total)
      + (squares - own_squares) * (most / total) * (most / total)) / total AS half
  FROM compared
)
SELECT s.deployment, s.side, b.unsplit, s.measure, k AS workers, idle_workers, requests, total, greatest,
  share AS greatest_ratio, most / mean AS over_mean, k * (share - half) AS over_mean_low,
  k * (share + half) AS over_mean_high, least / mean AS least_over_mean,
  deviation / mean AS variation_ratio,
  (most - mean) / sqrt(squares * (1 / k) * (1 - 1 / k)) AS sigma
FROM spread AS s
JOIN side_both AS b ON b.deployment IS NOT DISTINCT FROM s.deployment AND b.side = s.side
