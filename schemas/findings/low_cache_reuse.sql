-- low_cache_reuse: whether prompts that begin as earlier ones did found that beginning in the cache.
--
-- Where hashes of prompt blocks are known, what an earlier request of the deployment began with could
-- be reused (basis prefix). Else only sessions with numbered turns are looked at (basis turns): a
-- later turn repeats the conversation so far. A low hit rate of unrelated prompts is no fault.
-- Cached tokens must be known. Severity: info; warning when less than a quarter is reused. Level C.
--
-- grain:   one row per deployment
-- needs:   session_turns, prefix_reuse, deployment_sources
-- when:    EXISTS (FROM requests WHERE turn IS NOT NULL) OR EXISTS (FROM prefix_blocks)
-- params:
--   max_reused_ratio  0.5  above half, eviction and new text explain the rest
--   min_turns         20   fewer later turns, or prompts that begin so, are an anecdote
-- columns:
--   deployment       VARCHAR    deployment
--   severity         VARCHAR    warning or info
--   cost_s           DOUBLE     s  NULL: not in seconds
--   level            VARCHAR    C
--   value            DOUBLE     prompt tokens of earlier turns that were computed again
--   unit             VARCHAR    tokens
--   interval_low     DOUBLE     NULL
--   interval_high    DOUBLE     NULL
--   share            DOUBLE     value over the prompt tokens that could have been reused
--   requests         BIGINT     later turns, or prompts that begin as an earlier one, looked at
--   workers          VARCHAR[]  workers that computed them again, most tokens first
--   culprits         STRUCT(request VARCHAR, "value" DOUBLE)[]  the five turns with most of them; value: tokens
--   sources          VARCHAR[]  files that the requests come from
--   reusable_tokens  BIGINT     tokens  what could be reused: the shared beginning, or prompt and answer of the turn before
--   reused_tokens    BIGINT     tokens  of them found in a cache
--   sessions         BIGINT     sessions; NULL with basis prefix
--   moved_turns      BIGINT     of requests, those computed by another worker than the turn before, or than those that had had it
--   stayed_ratio     DOUBLE     1  reused over reusable tokens of the others; NULL unknown
--   moved_ratio      DOUBLE     1  the same of those that moved
--   elsewhere_tokens  BIGINT    tokens  computed again after a move: at most so much could another placement have saved
--   basis            VARCHAR    prefix or turns
WITH told AS (
  SELECT deployment, request, session, worker, moved, reusable_tokens AS reusable,
    reused_tokens AS reused, elsewhere_tokens, 'turns' AS basis
  FROM session_turns
  WHERE reused_tokens IS NOT NULL
  UNION ALL
  SELECT deployment, request, NULL, worker, NOT kept, seen_tokens, found_tokens, elsewhere_tokens,
    'prefix'
  FROM prefix_reuse
  WHERE found_tokens IS NOT NULL AND seen_tokens > 0
),
reuse AS (
  SELECT *
  FROM told
  QUALIFY basis = CASE WHEN count(*) FILTER (basis = 'prefix') OVER (PARTITION BY deployment)
    >= min_turns THEN 'prefix' ELSE 'turns' END
),
worker_list AS (
  SELECT deployment, list(worker ORDER BY again DESC, worker) AS workers
  FROM (
    SELECT deployment, worker, sum(reusable - reused) AS again
    FROM reuse
    WHERE worker IS NOT NULL
    GROUP BY deployment, worker
  )
  WHERE again > 0
  GROUP BY deployment
),
total AS (
  SELECT deployment, any_value(basis) AS basis, count(*) AS requests,
    CASE WHEN any_value(basis) = 'turns' THEN count(DISTINCT session) END AS sessions,
    sum(reusable)::BIGINT AS reusable_tokens, sum(reused)::BIGINT AS reused_tokens,
    count(*) FILTER (moved) AS moved_turns,
    sum(reused) FILTER (NOT moved) / nullif(sum(reusable) FILTER (NOT moved), 0) AS stayed_ratio,
    sum(reused) FILTER (moved) / nullif(sum(reusable) FILTER (moved), 0) AS moved_ratio,
    sum(elsewhere_tokens)::BIGINT AS elsewhere_tokens,
    min_by(
      {'request': request, 'value': (reusable - reused)::DOUBLE}, (reused - reusable, request), 5
    ) AS culprits
  FROM reuse
  GROUP BY deployment
)
SELECT t.deployment,
  CASE WHEN reused_tokens < 0.25 * reusable_tokens THEN 'warning' ELSE 'info' END AS severity,
  NULL::DOUBLE AS cost_s, 'C' AS level, (reusable_tokens - reused_tokens)::DOUBLE AS value,
  'tokens' AS unit, NULL::DOUBLE AS interval_low, NULL::DOUBLE AS interval_high,
  1 - reused_tokens / reusable_tokens AS share, requests,
  coalesce(w.workers, []) AS workers, culprits, coalesce(s.paths, []) AS sources,
  reusable_tokens, reused_tokens, sessions, moved_turns, stayed_ratio, moved_ratio, elsewhere_tokens,
  basis
FROM total AS t
LEFT JOIN worker_list AS w ON w.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = t.deployment AND s.evidence = 'requests'
WHERE requests >= min_turns AND reusable_tokens > 0
  AND reused_tokens < max_reused_ratio * reusable_tokens
