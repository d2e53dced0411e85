-- reuse_by_key: view cache_reuse with names for people: which share of the prompt tokens was found in a cache, by worker and by turn.
--
-- The thirty workers with most prompt tokens.
--
-- grain:   one row per (deployment, by, key)
-- needs:   cache_reuse, worker_labels
-- columns:
--   deployment     VARCHAR  deployment
--   by             VARCHAR  all, worker or turn
--   label          VARCHAR  short name of the worker; the turn; empty for all
--   place          BIGINT   order in its kind
--   requests       BIGINT   requests with known prompt and cached tokens
--   unknown        BIGINT   requests of this key without them
--   prompt_tokens  BIGINT   tokens  their prompt tokens
--   cached_tokens  BIGINT   tokens  of them found in a cache
--   reuse_ratio    DOUBLE   1       cached over prompt tokens
--   low_ratio      DOUBLE   1       95 % interval, lower end; NULL with fewer than 10 requests
--   high_ratio     DOUBLE   1       upper end
--   keys           BIGINT   workers, or turns, that there are
--   level          VARCHAR  C
WITH placed AS (
  SELECT *, count(*) OVER (PARTITION BY deployment, "by") AS keys,
    row_number() OVER (
      PARTITION BY deployment, "by"
      ORDER BY CASE WHEN "by" = 'turn' THEN try_cast(rtrim(key, '+') AS BIGINT) END,
        prompt_tokens DESC, key
    ) AS place
  FROM cache_reuse
)
SELECT p.deployment, p."by", CASE WHEN p."by" = 'worker' THEN coalesce(l.label, p.key) ELSE p.key END
    AS label, p.place, p.requests, p.unknown, p.prompt_tokens, p.cached_tokens, p.reuse_ratio,
  p.low_ratio, p.high_ratio, p.keys, 'C' AS level
FROM placed AS p
LEFT JOIN worker_labels AS l ON p."by" = 'worker' AND l.worker = p.key
WHERE p.place <= 30
ORDER BY p.deployment, p."by", p.place
