-- token_dependence: whether first tokens follow the length of the prompt, and streams and totals the
-- length of the answer.
--
-- Rank correlation (Spearman) over the counted requests; each value is taken relative to the typical
-- one of its model, so that two models in one run do not make a correlation. None below 10 pairs:
-- so few points show one by chance. A correlation is no cause.
--
-- grain:   one row per (deployment, measure) with at least 10 pairs
-- needs:   request_marks, request_values
-- columns:
--   deployment  VARCHAR       deployment
--   measure     VARCHAR       ttft, tpot or e2e
--   tokens      VARCHAR       what it is held against: input (prompt tokens not found in a cache) or output
--   pairs       BIGINT        requests behind it (a sample of about 10000 where there are more)
--   rho         DOUBLE     1  rank correlation; NULL when either side is constant
--   rho_low     DOUBLE     1  95 % interval, lower end
--   rho_high    DOUBLE     1  upper end
--   slope_ms    DOUBLE     ms  least squares: milliseconds for each 1000 tokens more; NULL with several models
--   follows     BOOLEAN       rho >= 0.5 and surely above 0.3; false when surely below 0.5 or with one length only; NULL cannot tell
WITH known AS (
  SELECT deployment,
    count(*) FILTER (ttft_ms IS NOT NULL AND uncached_tokens IS NOT NULL) AS ttft_pairs,
    -- the mean over a handful of gaps is not a stream's pace
    count(*) FILTER (tpot_ms IS NOT NULL AND output_tokens >= 5) AS tpot_pairs,
    count(*) FILTER (e2e_ms IS NOT NULL AND output_tokens IS NOT NULL) AS e2e_pairs,
    3 * row_number() OVER () AS part
  FROM request_values
  WHERE counted
  GROUP BY deployment
),
numbered AS (
  SELECT m.deployment, m.model, m.ttft_ms, m.tpot_ms, m.e2e_ms, m.uncached_tokens, m.output_tokens,
    nullif(coalesce(m.ttft_typical_ms, 1), 0) AS ttft_scale_ms,
    nullif(coalesce(m.tpot_typical_ms, 1), 0) AS tpot_scale_ms,
    k.* EXCLUDE (deployment), hash(m.request) AS place
  FROM request_marks() AS m
  JOIN known AS k ON k.deployment IS NOT DISTINCT FROM m.deployment
  WHERE m.counted
),
sampled_pair AS (
  -- ranks of ten thousand requests say what those of millions would
  SELECT deployment, model, 'ttft' AS measure, ttft_ms AS value_ms,
    ttft_ms / ttft_scale_ms AS scaled, uncached_tokens AS length, part
  FROM numbered
  WHERE ttft_ms IS NOT NULL AND uncached_tokens IS NOT NULL AND ttft_pairs >= 10
    AND place % greatest(1, ttft_pairs // 10000)::UBIGINT = 0
  UNION ALL
  SELECT deployment, model, 'tpot', tpot_ms, tpot_ms / tpot_scale_ms, output_tokens, part + 1
  FROM numbered
  WHERE tpot_ms IS NOT NULL AND output_tokens >= 5 AND tpot_pairs >= 10
    AND place % greatest(1, tpot_pairs // 10000)::UBIGINT = 0
  UNION ALL
  SELECT deployment, model, 'e2e', e2e_ms, e2e_ms / tpot_scale_ms, output_tokens, part + 2
  FROM numbered
  WHERE e2e_ms IS NOT NULL AND output_tokens IS NOT NULL AND e2e_pairs >= 10
    AND place % greatest(1, e2e_pairs // 10000)::UBIGINT = 0
),
ranked_pair AS (
  -- equal values share the mean of their ranks, the first and the last; a number to part by is half the work of a text
  SELECT *,
    (rank() OVER by_value + count(*) OVER by_value) / 2 AS value_rank,
    (rank() OVER by_length + count(*) OVER by_length) / 2 AS length_rank
  FROM sampled_pair
  WINDOW by_value AS (PARTITION BY part ORDER BY scaled),
    by_length AS (PARTITION BY part ORDER BY length)
),
correlated AS (
  SELECT deployment, measure, count(*) AS pairs,
    CASE WHEN stddev_pop(value_rank) > 0 AND stddev_pop(length_rank) > 0
      THEN corr(value_rank, length_rank) END AS rho,
    stddev_pop(length) = 0 AND stddev_pop(scaled) > 0 AS one_length,
    CASE WHEN stddev_pop(length) > 0 AND min(model) IS NOT DISTINCT FROM max(model)
      THEN 1000 * regr_slope(value_ms, length) END AS slope_ms
  FROM ranked_pair
  GROUP BY deployment, measure
),
bounded AS (
  -- Fisher's z with the variance of Bonett and Wright (2000) for rank correlations
  SELECT *, atanh(greatest(-0.999999, least(0.999999, rho))) AS z,
    1.96 * sqrt((1 + rho * rho / 2) / (pairs - 3)) AS z_half_width
  FROM correlated
)
SELECT deployment, measure, CASE measure WHEN 'ttft' THEN 'input' ELSE 'output' END AS tokens, pairs,
  rho, tanh(z - z_half_width) AS rho_low, tanh(z + z_half_width) AS rho_high, slope_ms,
  CASE WHEN rho >= 0.5 AND tanh(z - z_half_width) > 0.3 THEN true
    WHEN one_length OR tanh(z + z_half_width) < 0.5 THEN false END AS follows
FROM bounded
