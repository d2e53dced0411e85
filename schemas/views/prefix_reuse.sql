-- prefix_reuse: how much of each prompt earlier prompts began with, what of it was found in a cache, what was not and why.
--
-- From hashes of prompt blocks (table prefix_blocks); without them no rows: token counts alone cannot
-- say which prompts begin alike. Seen is what an earlier request of the deployment began with, here
-- what an earlier one of the same worker did: what an endless cache, in all or on this worker, could
-- have given. Elsewhere is what was computed again because this worker had not had it while another
-- had: the most that a better placement could have saved; gone is what this worker had had and
-- computed again: evicted, or not ready when the request came. Caches filled before the record began
-- can give more than seen.
--
-- grain:   one row per request that did not fail and whose blocks are known
-- needs:   prefix_requests, prompt_reuse
-- when:    EXISTS (FROM prefix_requests)
-- columns:
--   deployment        VARCHAR  deployment
--   request           VARCHAR  the request
--   worker            VARCHAR  worker that computed the prompt; NULL unknown
--   prompt_tokens     BIGINT   tokens  its prompt; NULL unknown
--   cached_tokens     BIGINT   tokens  of it found in a cache; NULL unknown
--   cached_basis      VARCHAR  engine or answer; NULL unknown
--   step_tokens       BIGINT   tokens  prefixes are told apart to so many tokens; NULL unknown
--   seen_tokens       BIGINT   tokens  of the prompt that an earlier request began with; NULL unknown
--   here_tokens       BIGINT   tokens  of the prompt that an earlier request of this worker began with; NULL unknown
--   found_tokens      BIGINT   tokens  of seen found in a cache; NULL unknown
--   elsewhere_tokens  BIGINT   tokens  of seen computed again though another worker had had it, at most; NULL without worker
--   gone_tokens       BIGINT   tokens  of here computed again all the same; NULL unknown
--   kept              BOOLEAN  the worker was one of those that had had most of it; NULL when nothing was seen before, or without worker
--   holders           BIGINT   workers that had had all of seen
--   holders_ratio     DOUBLE   1       share of all requests that those got: kept by chance
WITH told AS (
  SELECT p.*, u.prompt_tokens, u.cached_tokens, u.cached_basis,
    least(u.cached_tokens, p.seen_tokens) AS found
  FROM prefix_requests AS p
  JOIN prompt_reuse AS u ON u.request = p.request AND u.deployment IS NOT DISTINCT FROM p.deployment
)
SELECT deployment, request, worker, prompt_tokens, cached_tokens, cached_basis, step_tokens,
  seen_tokens, here_tokens,
  CASE WHEN cached_tokens IS NOT NULL AND seen_tokens IS NOT NULL THEN found END AS found_tokens,
  greatest(seen_tokens - greatest(here_tokens, CASE WHEN cached_tokens IS NOT NULL THEN found END), 0)
    + CASE WHEN here_tokens IS NULL THEN NULL ELSE 0 END AS elsewhere_tokens,
  CASE WHEN cached_tokens IS NOT NULL AND here_tokens IS NOT NULL
    THEN greatest(here_tokens - cached_tokens, 0) END AS gone_tokens,
  CASE WHEN seen_steps > 0 THEN here_steps = seen_steps END AS kept,
  holders, holders_ratio
FROM told
