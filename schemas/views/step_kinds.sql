-- step_kinds: every engine step with its class.
--
-- pulled: prompts whose KV came from elsewhere took over and no prompt was computed, with or without decodes
-- beside them.
--
-- grain:   one row per engine step
-- needs:   steps, workers
-- columns:
--   deployment             VARCHAR          deployment
--   worker                 VARCHAR          worker that ran the step
--   rank                   VARCHAR          rank inside the worker
--   seq                    BIGINT           iteration number
--   class                  VARCHAR          decode_only, mixed, prefill_only, pulled, idle or unknown
--   elapsed_ms             DOUBLE   ms      duration
--   own_prefill_requests   BIGINT           requests whose prompt was computed, pulled ones left out
--   pulled_requests        BIGINT           requests that only took over pulled KV
--   decode_requests        BIGINT           requests that decoded
--   prefill_tokens         BIGINT   tokens  prompt tokens computed (one for each pulled request)
--   decode_tokens          BIGINT   tokens  tokens decoded
--   capture                VARCHAR          full or sampled
WITH counted AS (
  SELECT
    s.*,
    w.deployment,
    coalesce(s.prefill_requests, CASE WHEN s.prefill_tokens > 0 THEN 1 ELSE s.prefill_tokens END)
      AS prompts,
    -- On a decode worker a step that computes one prompt token for each admitted request recomputes the
    -- last token of prompts that came with their KV: no prefill.
    coalesce(
      s.pulled_requests,
      CASE WHEN w.role = 'decode' AND s.prefill_requests > 0 AND s.prefill_tokens = s.prefill_requests
           THEN s.prefill_requests ELSE 0 END
    ) AS pulled
  FROM steps s
  LEFT JOIN workers w ON w.worker = s.worker
)
SELECT
  deployment,
  worker,
  rank,
  seq,
  CASE
    WHEN prompts IS NULL AND decode_requests IS NULL AND decode_tokens IS NULL THEN 'unknown'
    WHEN prompts > pulled AND greatest(decode_requests, decode_tokens) > 0 THEN 'mixed'
    WHEN prompts > pulled THEN 'prefill_only'
    WHEN pulled > 0 THEN 'pulled'
    WHEN greatest(decode_requests, decode_tokens) > 0 THEN 'decode_only'
    ELSE 'idle'
  END AS class,
  elapsed_ns / 1e6 AS elapsed_ms,
  prompts - pulled AS own_prefill_requests,
  pulled AS pulled_requests,
  decode_requests,
  prefill_tokens,
  decode_tokens,
  capture
FROM counted
