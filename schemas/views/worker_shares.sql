-- worker_shares: which share of requests, tokens and seconds each worker got, beside the even share.
--
-- The measures of view load_spread: tokens are prompt tokens not found in a cache (prefill) or output
-- tokens (decode), seconds what requests spent in prefill or decode there. A measure that is unknown
-- for any request is left out. The thirty workers with most requests of a side, and the
-- one that got most of the measure.
--
-- grain:   one row per (deployment, side, measure, worker)
-- needs:   load_spread, side_sums, side_workers, worker_labels
-- columns:
--   deployment   VARCHAR     deployment
--   side         VARCHAR     prefill or decode
--   unsplit      BOOLEAN     the same workers do both
--   measure      VARCHAR     requests, tokens or seconds
--   worker       VARCHAR     the worker
--   label        VARCHAR     its short name
--   amount       DOUBLE      what it got
--   share_ratio  DOUBLE   1  over the sum of all workers of the side
--   even_ratio   DOUBLE   1  one over the workers of the side
--   over_mean    DOUBLE      greatest of the side over mean: 1 is even
--   over_mean_low   DOUBLE   95 % interval, lower end
--   over_mean_high  DOUBLE   upper end
--   workers      BIGINT      workers of the side
--   level        VARCHAR     C (requests and tokens) or B (seconds)
WITH ranked AS (
  SELECT k.deployment, k.side, k.worker, coalesce(s.requests, 0)::DOUBLE AS requests,
    coalesce(s.tokens, 0) AS tokens, coalesce(s.seconds, 0) AS seconds,
    row_number() OVER (
      PARTITION BY k.deployment, k.side ORDER BY s.requests DESC NULLS LAST, k.worker
    ) AS place
  FROM side_workers AS k
  LEFT JOIN side_sums AS s ON s.deployment IS NOT DISTINCT FROM k.deployment AND s.side = k.side
    AND s.worker = k.worker
)
SELECT p.deployment, p.side, p.unsplit, p.measure, r.worker, coalesce(l.label, r.worker) AS label,
  CASE p.measure WHEN 'requests' THEN r.requests WHEN 'tokens' THEN r.tokens ELSE r.seconds END
    AS amount,
  CASE p.measure WHEN 'requests' THEN r.requests WHEN 'tokens' THEN r.tokens ELSE r.seconds END
    / p.total AS share_ratio,
  1 / p.workers AS even_ratio, p.over_mean, p.over_mean_low, p.over_mean_high, p.workers,
  CASE WHEN p.measure = 'seconds' THEN 'B' ELSE 'C' END AS level
FROM load_spread AS p
JOIN ranked AS r ON r.deployment IS NOT DISTINCT FROM p.deployment AND r.side = p.side
LEFT JOIN worker_labels AS l ON l.worker = r.worker
WHERE r.place <= 30 OR r.worker = p.greatest
ORDER BY p.deployment, p.side, p.measure, label
