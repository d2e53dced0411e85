-- value_quartiles: how first tokens, paces and lengths are distributed over the counted requests.
--
-- grain:   one row per (deployment, model, measure)
-- needs:   request_values
-- columns:
--   deployment  VARCHAR  deployment
--   model       VARCHAR  model; NULL where the deployment has only one
--   measure     VARCHAR  ttft and tpot (milliseconds), input and output (tokens)
--   n           BIGINT   requests that have a value
--   p25         DOUBLE   lower quartile
--   p45         DOUBLE   45th percentile
--   p50         DOUBLE   median
WITH wide AS (
  SELECT deployment, model,
    unnest([
      {'measure': 'ttft', 'n': count(ttft_ms),
        'quantiles': quantile_cont(ttft_ms, [0.25, 0.45, 0.5])},
      {'measure': 'tpot', 'n': count(pace_ms),
        'quantiles': quantile_cont(pace_ms, [0.25, 0.45, 0.5])},
      {'measure': 'input', 'n': count(prompt_tokens),
        'quantiles': quantile_cont(prompt_tokens::DOUBLE, [0.25, 0.45, 0.5])},
      {'measure': 'output', 'n': count(output_tokens),
        'quantiles': quantile_cont(output_tokens::DOUBLE, [0.25, 0.45, 0.5])}
    ]) AS entry
  FROM request_values
  WHERE counted
  GROUP BY deployment, model
)
SELECT deployment, model, entry.measure AS measure, entry.n AS n, entry.quantiles[1] AS p25,
  entry.quantiles[2] AS p45, entry.quantiles[3] AS p50
FROM wide
