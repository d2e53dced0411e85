-- step_classes: how the steps of each engine divide between decoding and prompts, and how long they took.
--
-- grain:   one row per (worker, class of step)
-- needs:   step_kinds
-- columns:
--   deployment       VARCHAR          deployment
--   worker           VARCHAR          worker
--   class            VARCHAR          decode_only, mixed, prefill_only, pulled, idle or unknown (view step_kinds)
--   count            BIGINT           steps
--   p50_ms           DOUBLE   ms      median duration
--   p99_ms           DOUBLE   ms      99th percentile
--   elapsed_s        DOUBLE   s       their summed duration
--   decode_s         DOUBLE   s       duration x decoding requests: what the decodes resident in them waited
--   prefill_tokens   BIGINT   tokens  prompt tokens computed
--   decode_tokens    BIGINT   tokens  tokens decoded
--   capture          VARCHAR          full, or sampled when any of them is
--   level            VARCHAR          evidence level
SELECT
  deployment,
  worker,
  class,
  count(*) AS count,
  quantile_cont(elapsed_ms, 0.5) AS p50_ms,
  quantile_cont(elapsed_ms, 0.99) AS p99_ms,
  sum(elapsed_ms) / 1e3 AS elapsed_s,
  sum(elapsed_ms * decode_requests) / 1e3 AS decode_s,
  CAST(sum(prefill_tokens) AS BIGINT) AS prefill_tokens,
  CAST(sum(decode_tokens) AS BIGINT) AS decode_tokens,
  max(capture) AS capture,
  'A' AS level
FROM step_kinds
GROUP BY deployment, worker, class
