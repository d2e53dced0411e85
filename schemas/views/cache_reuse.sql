-- cache_reuse: which share of the prompt tokens was found in a cache: in all, by worker, by turn of a session.
--
-- Sum over sum, with the 95 % interval of a ratio of sums (linearised variance over requests). Only
-- requests whose prompt and cached tokens are both known; unknown is not 0. Level C.
--
-- grain:   one row per (deployment, by, key)
-- needs:   prompt_reuse
-- columns:
--   deployment     VARCHAR  deployment
--   by             VARCHAR  all, worker (that computed the prompt) or turn (1 the first of its session, 2, ..., 10+)
--   key            VARCHAR  the worker, the turn, or empty
--   requests       BIGINT   requests with known prompt and cached tokens
--   unknown        BIGINT   requests of this key without them
--   prompt_tokens  BIGINT   tokens  their prompt tokens
--   cached_tokens  BIGINT   tokens  of them found in a cache
--   reuse_ratio    DOUBLE   1       cached over prompt tokens
--   low_ratio      DOUBLE   1       95 % interval, lower end; NULL with fewer than 10 requests
--   high_ratio     DOUBLE   1       upper end
WITH told AS (
  SELECT deployment, worker, prompt_tokens, cached_tokens,
    CASE WHEN session IS NOT NULL AND turn IS NOT NULL THEN
      row_number() OVER (PARTITION BY deployment, session ORDER BY turn, start_ns, request) END AS place
  FROM prompt_reuse
),
keyed AS (
  SELECT deployment, unnest([
      {'by': 'all', 'key': ''},
      {'by': 'worker', 'key': worker},
      {'by': 'turn', 'key': CASE WHEN place >= 10 THEN '10+' ELSE place::VARCHAR END}
    ], recursive := true),
    prompt_tokens AS p, cached_tokens AS c, prompt_tokens > 0 AND cached_tokens IS NOT NULL AS known
  FROM told
),
summed AS (
  SELECT deployment, "by", key, count(*) FILTER (known) AS requests,
    count(*) FILTER (known IS NOT TRUE) AS unknown,
    sum(p) FILTER (known) AS p, sum(c) FILTER (known) AS c,
    sum(p * p) FILTER (known)::DOUBLE AS pp, sum(c * c) FILTER (known)::DOUBLE AS cc,
    sum(p * c) FILTER (known)::DOUBLE AS pc
  FROM keyed
  WHERE key IS NOT NULL
  GROUP BY deployment, "by", key
),
ratio AS (
  SELECT *, c / p AS r,
    CASE WHEN requests >= 10 THEN
      1.96 * sqrt(greatest(cc - 2 * (c / p) * pc + (c / p) * (c / p) * pp, 0)
        * requests / (requests - 1)) / p END AS half
  FROM summed
  WHERE requests > 0
)
SELECT deployment, "by", key, requests, unknown, p::BIGINT AS prompt_tokens, c::BIGINT AS cached_tokens,
  r AS reuse_ratio, greatest(r - half, 0) AS low_ratio, least(r + half, 1) AS high_ratio
FROM ratio
