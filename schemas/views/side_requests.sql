-- side_requests: each request once for the worker that computed its prompt, once for another that decoded it.
--
-- Side prefill: the worker that computed the prompt (where one worker does both: both); side decode:
-- the worker that decoded, where another did. Tokens: prompt tokens not found in a cache (prefill; all
-- of them where that is known of no request of the deployment), output tokens (decode). Seconds: time
-- that the request spent in prefill or decode there. Only deployments with at least two workers.
--
-- grain:   one row per (request, side)
-- needs:   requests, workers, phase_sums
-- when:    (SELECT min(worker) <> max(worker) FROM (SELECT worker FROM workers
--          UNION ALL SELECT prefill_worker FROM requests UNION ALL SELECT decode_worker FROM requests))
-- columns:
--   deployment  VARCHAR     deployment
--   side        VARCHAR     prefill or decode
--   worker      VARCHAR     the worker
--   tokens      DOUBLE      what it had to compute; NULL unknown
--   seconds     DOUBLE      what the request spent there; NULL unknown
--   split       BOOLEAN     another worker did the other half
WITH several AS (
  -- where one worker had it all, nothing is summed up
  SELECT deployment
  FROM (
    SELECT DISTINCT deployment, worker FROM workers
    UNION SELECT DISTINCT deployment, prefill_worker FROM requests
    UNION SELECT DISTINCT deployment, decode_worker FROM requests
  )
  GROUP BY deployment
  HAVING count(worker) >= 2
),
spread AS (
  SELECT d.deployment, count(r.cached_tokens) = 0 AS none_cached
  FROM several AS d
  LEFT JOIN requests AS r ON r.deployment IS NOT DISTINCT FROM d.deployment
    AND r.prefill_worker IS NOT NULL
  GROUP BY d.deployment
),
served AS (
  SELECT request, sum(duration_ns / 1e6) FILTER (phase = 'prefill') / 1e3 AS prefill_s,
    sum(duration_ns / 1e6) FILTER (phase = 'decode') / 1e3 AS decode_s
  FROM phase_sums
  WHERE phase IN ('prefill', 'decode')
  GROUP BY request
),
served_request AS (
  SELECT r.deployment, r.prefill_worker, r.decode_worker, r.prompt_tokens, r.cached_tokens,
    r.output_tokens, d.none_cached, s.prefill_s, s.decode_s,
    r.decode_worker IS DISTINCT FROM r.prefill_worker AND r.decode_worker IS NOT NULL AS split
  FROM requests AS r
  JOIN spread AS d ON d.deployment IS NOT DISTINCT FROM r.deployment
  LEFT JOIN served AS s ON s.request = r.request
)
SELECT deployment, 'prefill' AS side, prefill_worker AS worker,
  -- known of some requests only: no sum; of none: whole prompts, and the words say so
  (prompt_tokens - CASE WHEN none_cached THEN 0 ELSE cached_tokens END)::DOUBLE AS tokens,
  CASE WHEN split THEN prefill_s ELSE prefill_s + coalesce(decode_s, 0) END AS seconds,
  split
FROM served_request
WHERE prefill_worker IS NOT NULL
UNION ALL
SELECT deployment, 'decode', decode_worker, output_tokens::DOUBLE, decode_s, true
FROM served_request
WHERE split
