-- ttft_by_prompt: time to first token against the length of the prompt, request by request, with its cache hit.
--
-- Of more than `points` requests a sample is given: one in n by a hash of its id (kept_one_in), and the
-- slowest 200 in any case.
--
-- grain:   one row per counted request with a known TTFT and prompt length, or a sample of them
-- needs:   request_values, prompt_reuse, token_dependence, observations, deployments
-- params:
--   points  3000  requests to give, about (200 more for the slowest)
-- columns:
--   deployment     VARCHAR          deployment
--   request        VARCHAR          request
--   start_ns       BIGINT   ns      its start
--   prompt_tokens  BIGINT   tokens  prompt tokens
--   cached_tokens  BIGINT   tokens  of them found in a cache; NULL unknown
--   cached_ratio   DOUBLE   1       cached / prompt tokens
--   cache          VARCHAR          unknown, none, below half, or half and more
--   ttft_ms        DOUBLE   ms      time to first token
--   model          VARCHAR          model; NULL where there is only one
--   requests       BIGINT           all such requests of the deployment
--   cache_known    BIGINT           of them, those whose cached tokens are known
--   cache_hits     BIGINT           of them, those with cached tokens
--   kept_one_in    BIGINT           one in so many requests is given, beside the slowest
--   rho            DOUBLE   1       rank correlation of TTFT with prompt tokens not found in a cache (view token_dependence)
--   rho_low        DOUBLE   1       95 % interval, lower end
--   rho_high       DOUBLE   1       upper end
--   slope_ms       DOUBLE   ms      milliseconds for each 1000 tokens more; NULL with several models
--   follows        BOOLEAN          TTFT follows the prompt; NULL cannot tell
--   level          VARCHAR          evidence level of the headline's TTFT
WITH known AS (
  -- behind a split the answer's count of cached tokens is not the prompt's
  SELECT v.deployment, v.request, v.start_ns, v.prompt_tokens, u.cached_tokens, v.ttft_ms, v.model
  FROM request_values AS v
  LEFT JOIN prompt_reuse AS u ON u.request = v.request
  WHERE v.counted AND v.ttft_ms IS NOT NULL AND v.prompt_tokens IS NOT NULL
),
size AS (
  SELECT deployment, count(*) AS requests, count(cached_tokens) AS cache_known,
    count(*) FILTER (cached_tokens > 0) AS cache_hits, list_min(max(ttft_ms, 200)) AS slow_ms
  FROM known
  GROUP BY deployment
),
kept AS (
  SELECT *, CAST(greatest(1, ceil(requests / points)) AS BIGINT) AS kept_one_in
  FROM size
),
headline AS (
  SELECT o.deployment, max(o.level) AS level
  FROM observations AS o
  JOIN deployments AS d ON d.deployment = o.deployment
  WHERE o.ttft_ms IS NOT NULL AND o.observer = coalesce(d.headline_observer, o.observer)
  GROUP BY o.deployment
)
SELECT k.deployment, k.request, k.start_ns, k.prompt_tokens, k.cached_tokens,
  k.cached_tokens / nullif(k.prompt_tokens, 0) AS cached_ratio,
  CASE
    WHEN k.cached_tokens IS NULL THEN 'unknown'
    WHEN k.cached_tokens <= 0 THEN 'none'
    WHEN k.cached_tokens < 0.5 * k.prompt_tokens THEN 'below half'
    ELSE 'half and more'
  END AS cache,
  k.ttft_ms, k.model, n.requests, n.cache_known, n.cache_hits, n.kept_one_in,
  d.rho, d.rho_low, d.rho_high, d.slope_ms, d.follows,
  coalesce(h.level, 'C') AS level
FROM known AS k
JOIN kept AS n ON n.deployment IS NOT DISTINCT FROM k.deployment
LEFT JOIN token_dependence AS d ON d.deployment IS NOT DISTINCT FROM k.deployment
  AND d.measure = 'ttft' AND d.tokens = 'input'
LEFT JOIN headline AS h ON h.deployment IS NOT DISTINCT FROM k.deployment
WHERE hash(k.request) % n.kept_one_in = 0 OR k.ttft_ms > n.slow_ms
