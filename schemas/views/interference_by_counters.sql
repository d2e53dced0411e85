-- interference_by_counters: whether tokens came slower in stretches with more prompt tokens, by periodic counters.
--
-- Words, never a flag: on simulated runs such counters find two in five cases of interference and
-- see it in one of seven runs without any. Slower is the mean gap between tokens where counters
-- state it, else the time that each running request took for a token. Stretches in which tokens
-- were made; the third with most prompt tokens a second against the third with fewest. Larger batches come
-- with more prompts, too: a sign is consistent with interference and with load. Level D.
--
-- grain:   one row per worker with stretches in which tokens were made
-- needs:   counter_intervals
-- columns:
--   deployment      VARCHAR      deployment
--   worker          VARCHAR      the worker
--   basis           VARCHAR      scrapes or lines
--   measure         VARCHAR      gap (mean gap) or pace (running requests over tokens made)
--   stretches       BIGINT       stretches compared
--   stretch_s       DOUBLE   s   their median length
--   few_ms          DOUBLE   ms  the measure in the third with fewest prompt tokens (median)
--   many_ms         DOUBLE   ms  in the third with most
--   correlation     DOUBLE       rank correlation (Spearman) of prompt tokens and the measure; NULL where one of them never changes
--   correlation_p   DOUBLE       chance of one so far from 0 without any connection (normal approximation)
WITH paced AS (
  SELECT *, 1e3 * running * seconds / nullif(made_tokens, 0) AS pace_ms,
    count(gap_mean_ms) OVER (PARTITION BY worker) >= 0.5 * count(*) OVER (PARTITION BY worker) AS by_gap
  FROM counter_intervals()
  WHERE prompt_tokens IS NOT NULL AND made_tokens > 0
),
measured AS (
  -- rounded: sums of fractions must not make ranks of equal values
  SELECT deployment, worker, basis, seconds, round(prompt_tokens / seconds, 6) AS prompt_rate,
    CASE WHEN by_gap THEN 'gap' ELSE 'pace' END AS measure,
    round(CASE WHEN by_gap THEN gap_mean_ms ELSE pace_ms END, 6) AS ms
  FROM paced
  WHERE CASE WHEN by_gap THEN gap_mean_ms ELSE pace_ms END > 0
),
placed AS (
  SELECT *, percent_rank() OVER (PARTITION BY worker ORDER BY prompt_rate) AS place,
    rank() OVER (PARTITION BY worker ORDER BY prompt_rate)
      + (count(*) OVER (PARTITION BY worker, prompt_rate) - 1) / 2 AS prompt_rank,
    rank() OVER (PARTITION BY worker ORDER BY ms)
      + (count(*) OVER (PARTITION BY worker, ms) - 1) / 2 AS ms_rank
  FROM measured
),
summed AS (
  SELECT deployment, worker, any_value(basis) AS basis, any_value(measure) AS measure,
    count(*) AS stretches, quantile_cont(seconds, 0.5) AS stretch_s,
    quantile_cont(ms, 0.5) FILTER (place <= 1 / 3) AS few_ms,
    quantile_cont(ms, 0.5) FILTER (place >= 2 / 3) AS many_ms,
    CASE WHEN stddev_pop(prompt_rank) > 0 AND stddev_pop(ms_rank) > 0
      THEN corr(prompt_rank, ms_rank) END AS correlation
  FROM placed
  GROUP BY deployment, worker
)
SELECT * EXCLUDE (z, t),
  -- two-sided tail of a normal variable (Abramowitz & Stegun 7.1.26)
  CASE WHEN correlation IS NOT NULL AND stretches > 1 THEN
    least(1.0, (0.254829592 * t - 0.284496736 * t ** 2 + 1.421413741 * t ** 3 - 1.453152027 * t ** 4
      + 1.061405429 * t ** 5) * exp(-z * z)) END AS correlation_p
FROM (
  SELECT *, abs(correlation) * sqrt(stretches - 1) / sqrt(2) AS z,
    1 / (1 + 0.3275911 * abs(correlation) * sqrt(stretches - 1) / sqrt(2)) AS t
  FROM summed
)
