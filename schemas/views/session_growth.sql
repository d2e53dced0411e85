-- session_growth: how the turns of sessions go on: prompts, first tokens, reuse and moves to other workers, turn by turn.
--
-- Turns are counted within their session; 10 and later are one. Failed requests are left out. Shares
-- are of the requests of which the thing is known.
--
-- grain:   one row per (deployment, turn)
-- needs:   prompt_reuse, request_values, session_turns
-- columns:
--   deployment         VARCHAR          deployment
--   place              BIGINT           turn, 1 the first of its session, 10 the tenth and later
--   turn               VARCHAR          the same in words
--   requests           BIGINT           requests
--   prompt_p50_tokens  DOUBLE   tokens  median prompt; NULL unknown
--   ttft_p50_ms        DOUBLE   ms      median time to first token; NULL unknown
--   ttft_p90_ms        DOUBLE   ms      90th percentile
--   reuse_ratio        DOUBLE   1       cached over prompt tokens; NULL unknown
--   moved_ratio        DOUBLE   1       share that went to another worker than the turn before; NULL for the first turn, or unknown
--   moves_known        BIGINT           requests of which moved or not is known
--   sessions           BIGINT           sessions of the deployment
--   level              VARCHAR          C
WITH counted AS (
  SELECT u.deployment, u.request, u.session, u.prompt_tokens, u.cached_tokens,
    least(row_number() OVER (
      PARTITION BY u.deployment, u.session ORDER BY u.turn, u.start_ns, u.request
    ), 10) AS place
  FROM prompt_reuse AS u
  WHERE u.session IS NOT NULL AND u.turn IS NOT NULL
),
seen AS (
  SELECT deployment, count(DISTINCT session) AS sessions FROM counted GROUP BY deployment
)
SELECT c.deployment, c.place, CASE WHEN c.place = 10 THEN '10+' ELSE c.place::VARCHAR END AS turn,
  count(*) AS requests, quantile_cont(c.prompt_tokens, 0.5)::DOUBLE AS prompt_p50_tokens,
  quantile_cont(v.ttft_ms, 0.5) AS ttft_p50_ms, quantile_cont(v.ttft_ms, 0.9) AS ttft_p90_ms,
  sum(c.cached_tokens) FILTER (c.cached_tokens IS NOT NULL AND c.prompt_tokens IS NOT NULL)
    / nullif(sum(c.prompt_tokens) FILTER (c.cached_tokens IS NOT NULL), 0) AS reuse_ratio,
  avg(t.moved::INTEGER) AS moved_ratio, count(t.moved) AS moves_known, any_value(s.sessions) AS sessions, 'C' AS level
FROM counted AS c
JOIN seen AS s ON s.deployment IS NOT DISTINCT FROM c.deployment
LEFT JOIN request_values AS v ON v.request = c.request
LEFT JOIN session_turns AS t ON t.request = c.request
GROUP BY c.deployment, c.place
ORDER BY c.deployment, c.place
