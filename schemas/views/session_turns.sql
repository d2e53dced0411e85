-- session_turns: later turns of sessions: what they could have reused, what they did, and where.
--
-- A later turn repeats the conversation so far: reusable is the smaller of its prompt and of what the
-- turn before left (its prompt; where one worker does both, its answer too: behind a split the answer
-- was made on the decode side). Elsewhere is what a turn that went to another worker computed again
-- though the worker of the turn before had it, unless evicted: an upper bound of what staying would
-- have saved in prefill; the price of staying (that worker's queue) is not in it.
--
-- grain:   one row per later turn of a session with numbered turns; failed requests left out
-- needs:   prompt_reuse
-- columns:
--   deployment        VARCHAR  deployment
--   request           VARCHAR  the request
--   session           VARCHAR  its session
--   turn              BIGINT   its turn
--   worker            VARCHAR  worker that computed the prompt; NULL unknown
--   before_worker     VARCHAR  worker that computed the prompt of the turn before; NULL unknown
--   moved             BOOLEAN  they differ; NULL unknown
--   prompt_tokens     BIGINT   tokens  its prompt
--   cached_tokens     BIGINT   tokens  of it found in a cache; NULL unknown
--   reusable_tokens   BIGINT   tokens  what the turn before left; NULL unknown
--   reused_tokens     BIGINT   tokens  of that found in a cache; NULL unknown
--   elsewhere_tokens  BIGINT   tokens  computed again after a move; 0 without a move; NULL unknown
WITH turn AS (
  SELECT deployment, request, session, turn, worker, prompt_tokens, cached_tokens,
    lag(prompt_tokens + CASE WHEN mode = 'disaggregated' THEN 0 ELSE coalesce(output_tokens, 0) END)
      OVER turns AS before_tokens,
    lag(worker) OVER turns AS before_worker,
    row_number() OVER turns AS place
  FROM prompt_reuse
  WHERE session IS NOT NULL AND turn IS NOT NULL
  WINDOW turns AS (PARTITION BY deployment, session ORDER BY turn, start_ns, request)
),
later AS (
  SELECT *, CASE WHEN prompt_tokens IS NOT NULL AND before_tokens IS NOT NULL
      THEN least(prompt_tokens, before_tokens) END AS reusable_tokens,
    worker != before_worker AS moved
  FROM turn
  WHERE place > 1
)
SELECT deployment, request, session, turn, worker, before_worker, moved,
  prompt_tokens, cached_tokens, reusable_tokens,
  CASE WHEN cached_tokens IS NOT NULL AND reusable_tokens IS NOT NULL
    THEN least(cached_tokens, reusable_tokens) END AS reused_tokens,
  CASE WHEN cached_tokens IS NULL OR reusable_tokens IS NULL THEN NULL
    WHEN moved THEN reusable_tokens - least(cached_tokens, reusable_tokens)
    WHEN NOT moved THEN 0 END AS elsewhere_tokens
FROM later
