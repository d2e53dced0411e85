-- request_marks: which requests were slow to start or to stream, and which were long, against the
-- run itself.
--
-- The typical value of a deployment is its median, or its lower quartile where the run falls into
-- two groups (median > 3 x lower quartile, and 45 % of the values within 2 x lower quartile: half
-- of the requests being slow must not make slowness typical). A request is marked when it exceeds
-- factor x typical and typical + 3 sigma (sigma from the lower half of the values, which slow
-- requests cannot widen; (factor + 1) x typical always suffices), and the typical by at least 20 ms
-- (TTFT) or 2 ms (per token): below that, clocks and network jitter rule. A limit that the user
-- gives (SLO) takes the place of all that. Fewer than min_requests values: no marks (NULL).
-- Where several models answered, each is judged by itself: a larger one is not slow for being large.
-- The values are those of request_values.
--
-- grain:   one row per request
-- needs:   request_values, value_quartiles
-- params:
--   slo_ttft_ms   NULL  limit for the first token; NULL: relative to the run
--   slo_tpot_ms   NULL  limit for the mean time per output token; NULL: relative to the run
--   min_requests  5     fewer values have no typical one
--   slow_factor   2     a first token this many times the typical is slow: what a reader of the run calls twice as long
--   tpot_factor   1.5   likewise per output token, a mean over many tokens, which scatters less
--   long_factor   2     a prompt or answer this many times the typical is long
-- columns:
--   deployment        VARCHAR  deployment
--   request           VARCHAR  request
--   outcome           VARCHAR  completed, failed, aborted or unknown
--   counted           BOOLEAN  it enters the figures (view counted_requests): typical values are those of counted requests
--   ttft_ms           DOUBLE   ms  headline time to first token
--   tpot_ms           DOUBLE   ms  time per output token after the first; from TTFT, duration and tokens where not stated
--   e2e_ms            DOUBLE   ms  whole duration
--   model             VARCHAR  model by which it is judged; NULL where the deployment has only one
--   prompt_tokens     BIGINT   tokens  prompt tokens
--   uncached_tokens   BIGINT   tokens  prompt tokens not found in a cache; all of them where that is unknown
--   cached_tokens     BIGINT   tokens  prompt tokens found in a cache
--   output_tokens     BIGINT   tokens  output tokens
--   first_token_ns    BIGINT   ns  first delivered token
--   end_ns            BIGINT   ns  end of its window
--   prefill_worker    VARCHAR  worker that computed the prompt
--   decode_worker     VARCHAR  worker that decoded
--   ttft_typical_ms   DOUBLE   ms  typical TTFT of the deployment (of the model, where there are several)
--   ttft_limit_ms     DOUBLE   ms  above it a first token is slow
--   tpot_typical_ms   DOUBLE   ms  typical time per output token
--   tpot_limit_ms     DOUBLE   ms  above it a stream is slow
--   slow_first_token  BOOLEAN  first token slow; NULL cannot tell
--   slow_stream       BOOLEAN  stream slow; NULL cannot tell (also with fewer than 5 output tokens)
--   long_input        BOOLEAN  long prompt for this run; NULL cannot tell
--   long_output       BOOLEAN  long answer for this run; NULL cannot tell
WITH typical_values AS (
  SELECT deployment, model, measure,
    CASE WHEN n >= min_requests THEN CASE WHEN two_groups THEN p25 ELSE p50 END END AS typical,
    -- 0.6745 sigma lie between lower quartile and median of a normal distribution
    CASE WHEN two_groups THEN 0 ELSE (p50 - p25) / 0.6745 END AS sigma,
    CASE measure WHEN 'ttft' THEN slow_factor WHEN 'tpot' THEN tpot_factor ELSE long_factor END
      AS factor,
    CASE measure WHEN 'ttft' THEN 20 WHEN 'tpot' THEN 2 ELSE 0 END AS floor
  FROM (SELECT *, p50 > 3 * p25 AND p45 <= 2 * p25 AS two_groups FROM value_quartiles)
),
limits AS (
  -- factor + 1 times the typical is out of the ordinary however wide the values scatter
  SELECT deployment, model, measure, typical,
    greatest(factor * typical, least(typical + 3 * sigma, (factor + 1) * typical), typical + floor)
      AS upper
  FROM typical_values
),
relative_limits AS (
  SELECT deployment, model,
    max(typical) FILTER (measure = 'ttft') AS ttft_typical_ms,
    max(upper) FILTER (measure = 'ttft') AS ttft_upper_ms,
    max(typical) FILTER (measure = 'tpot') AS tpot_typical_ms,
    max(upper) FILTER (measure = 'tpot') AS tpot_upper_ms,
    max(upper) FILTER (measure = 'input') AS input_limit,
    max(upper) FILTER (measure = 'output') AS output_limit
  FROM limits
  GROUP BY deployment, model
),
thresholds AS (
  SELECT *, coalesce(slo_ttft_ms::DOUBLE, ttft_upper_ms) AS ttft_limit_ms,
    coalesce(slo_tpot_ms::DOUBLE, tpot_upper_ms) AS tpot_limit_ms
  FROM relative_limits
)
SELECT u.deployment, u.request, u.outcome, u.counted, u.ttft_ms, u.tpot_ms, u.e2e_ms,
  u.model, u.prompt_tokens, u.uncached_tokens, u.cached_tokens, u.output_tokens,
  u.first_token_ns, u.end_ns, u.prefill_worker, u.decode_worker,
  t.ttft_typical_ms, t.ttft_limit_ms, t.tpot_typical_ms, t.tpot_limit_ms,
  u.ttft_ms > t.ttft_limit_ms AS slow_first_token,
  u.pace_ms > t.tpot_limit_ms AS slow_stream,
  u.prompt_tokens > t.input_limit AS long_input,
  u.output_tokens > t.output_limit AS long_output
FROM request_values AS u
LEFT JOIN thresholds AS t
  ON t.deployment IS NOT DISTINCT FROM u.deployment AND t.model IS NOT DISTINCT FROM u.model
