-- prompt_reuse: how much of each prompt was found in a cache, as far as somebody who knows says so.
--
-- First the record of the engine that computed the prompt, then what the answer says of the request.
-- Behind a split the answer is the decode side's: its count is not the prompt's (it may be 0, or all
-- that was pulled), so there only what a router or proxy saw of the prefill side's answer counts. A
-- front end may fill in its router's estimate: equal numbers do not confirm each other.
--
-- grain:   one row per request that did not fail
-- needs:   requests, legs
-- columns:
--   deployment      VARCHAR  deployment
--   request         VARCHAR  the request
--   mode            VARCHAR  aggregated, disaggregated or unknown
--   worker          VARCHAR  worker that computed the prompt; NULL unknown
--   session         VARCHAR  its session
--   turn            BIGINT   its turn
--   start_ns        BIGINT   ns      start of its window
--   prompt_tokens   BIGINT   tokens  prompt tokens
--   output_tokens   BIGINT   tokens  output tokens
--   cached_tokens   BIGINT   tokens  of the prompt found in a cache; NULL unknown
--   cached_basis    VARCHAR  engine or answer; NULL unknown
WITH told AS (
  SELECT request,
    max(cached_tokens) FILTER (observer = 'engine' AND role IS DISTINCT FROM 'decode') AS by_engine,
    max(cached_tokens) FILTER (observer = 'router') AS by_router
  FROM legs
  WHERE cached_tokens IS NOT NULL AND observer IN ('engine', 'router') AND request IS NOT NULL
  GROUP BY request
)
SELECT r.deployment, r.request, r.mode, r.prefill_worker AS worker, r.session, r.turn, r.start_ns,
  r.prompt_tokens, r.output_tokens,
  coalesce(
    t.by_engine, CASE WHEN r.mode = 'disaggregated' THEN t.by_router ELSE r.cached_tokens END
  ) AS cached_tokens,
  CASE WHEN t.by_engine IS NOT NULL THEN 'engine'
    WHEN CASE WHEN r.mode = 'disaggregated' THEN t.by_router ELSE r.cached_tokens END IS NOT NULL
      THEN 'answer' END AS cached_basis
FROM requests AS r
LEFT JOIN told AS t ON t.request = r.request
WHERE r.outcome IS DISTINCT FROM 'failed'
