-- step_batches: how long engine steps take by what is in them: decoding requests and prompt tokens.
--
-- Steps of a worker are put into cells of (class, decoding requests, prompt tokens); steps with many of
-- either are put together in ranges that double, so that a run of any length gives few rows.
--
-- grain:   one row per (deployment, worker, class, range of decoding requests, range of prompt tokens)
-- needs:   step_kinds, worker_labels
-- columns:
--   deployment       VARCHAR      deployment
--   worker           VARCHAR      the worker
--   worker_name      VARCHAR      its short name, unique in the deployment
--   class            VARCHAR      decode_only, mixed or prefill_only (view step_kinds)
--   steps            BIGINT       steps in the cell
--   decode_requests  DOUBLE       mean number of requests that decoded in them
--   prefill_tokens   DOUBLE   tokens  mean prompt tokens computed in them
--   p50_ms           DOUBLE   ms  median duration
--   p90_ms           DOUBLE   ms  90th percentile
--   max_ms           DOUBLE   ms  longest
--   total_s          DOUBLE   s   their summed duration
--   decode_wait_s    DOUBLE   s   duration x decoding requests, summed: what streams waited in them
--   worker_s         DOUBLE   s   summed duration of all steps of the deployment in these classes
--   class_p50_ms     DOUBLE   ms  median duration of the class on this worker
--   class_steps      BIGINT       steps of the class on this worker
--   capture          VARCHAR      full, or sampled when any step of the worker is
--   level            VARCHAR      evidence level
WITH step AS (
  SELECT k.deployment, k.worker, k.class, k.elapsed_ms, k.capture,
    coalesce(k.decode_requests, k.decode_tokens, 0) AS decode_requests,
    CASE WHEN k.class = 'decode_only' THEN 0 ELSE coalesce(k.prefill_tokens, 0) END AS prefill_tokens
  FROM step_kinds AS k
  WHERE k.class IN ('decode_only', 'mixed', 'prefill_only') AND k.elapsed_ms IS NOT NULL
),
ranged AS (
  SELECT *,
    CASE WHEN decode_requests < 32 THEN CAST(decode_requests AS DOUBLE)
      ELSE 32 + floor(8 * log2(decode_requests / 32)) END AS decode_range,
    CASE WHEN prefill_tokens <= 0 THEN 0.0 ELSE floor(3 * log2(prefill_tokens)) END AS prefill_range
  FROM step
),
class_of AS (
  SELECT deployment, worker, class, quantile_cont(elapsed_ms, 0.5) AS class_p50_ms,
    count(*) AS class_steps
  FROM step
  GROUP BY deployment, worker, class
),
cell AS (
  SELECT deployment, worker, class, decode_range, prefill_range, count(*) AS steps,
    avg(decode_requests) AS decode_requests, avg(prefill_tokens) AS prefill_tokens,
    quantile_cont(elapsed_ms, 0.5) AS p50_ms, quantile_cont(elapsed_ms, 0.9) AS p90_ms,
    max(elapsed_ms) AS max_ms, sum(elapsed_ms) / 1e3 AS total_s,
    sum(elapsed_ms * decode_requests) / 1e3 AS decode_wait_s, max(capture) AS capture
  FROM ranged
  GROUP BY deployment, worker, class, decode_range, prefill_range
)
SELECT c.deployment, c.worker, w.label AS worker_name, c.class, c.steps,
  c.decode_requests, c.prefill_tokens, c.p50_ms, c.p90_ms, c.max_ms, c.total_s, c.decode_wait_s,
  sum(c.total_s) OVER (PARTITION BY c.deployment) AS worker_s,
  k.class_p50_ms, k.class_steps,
  max(c.capture) OVER (PARTITION BY c.worker) AS capture,
  'A' AS level
FROM cell AS c
JOIN class_of AS k ON k.worker IS NOT DISTINCT FROM c.worker AND k.class = c.class
  AND k.deployment IS NOT DISTINCT FROM c.deployment
LEFT JOIN worker_labels AS w ON w.worker = c.worker
