-- side_requests: each request once for the worker that computed its prompt, once for another that decoded it.
--
-- Side prefill: the worker that computed the prompt (where one worker does both: both); side decode:
-- the worker that decoded, where another did. Tokens: prompt tokens not found in a cache (prefill; all
-- of them where that is known of no request of the deployment), output tokens (decode). Seconds: time
-- that the request spent in prefill or decode there. Only deployments with at least two workers.
--
-- grain:   one row per (request, side)
-- needs:   requests, workers, phase_by_request
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
spread_request AS (
  SELECT r.*
  FROM requests AS r
  SEMI JOIN several AS d ON d.deployment IS NOT DISTINCT FROM r.deployment
),
served AS (
  SELECT p.request, sum(p.duration_ms) FILTER (p.phase = 'prefill') / 1e3 AS prefill_s,
    sum(p.duration_ms) FILTER (p.phase = 'decode') / 1e3 AS decode_s
  FROM phase_by_request AS p
  SEMI JOIN several AS d ON d.deployment IS NOT DISTINCT FROM p.deployment
  WHERE p.phase IN ('prefill', 'decode')
  GROUP BY p.request
)
SELECT r.deployment, 'prefill' AS side, r.prefill_worker AS worker,
  (r.prompt_tokens
    -- known of some requests only: no sum; of none: whole prompts, and the words say so
    - CASE WHEN count(r.cached_tokens) OVER (PARTITION BY r.deployment) = 0 THEN 0
      ELSE r.cached_tokens END)::DOUBLE AS tokens,
  CASE WHEN r.decode_worker IS DISTINCT FROM r.prefill_worker AND r.decode_worker IS NOT NULL
    THEN s.prefill_s ELSE s.prefill_s + coalesce(s.decode_s, 0) END AS seconds,
  r.decode_worker IS DISTINCT FROM r.prefill_worker AND r.decode_worker IS NOT NULL AS split
FROM spread_request AS r
LEFT JOIN served AS s ON s.request = r.request
WHERE r.prefill_worker IS NOT NULL
UNION ALL
SELECT r.deployment, 'decode', r.decode_worker, r.output_tokens::DOUBLE, s.decode_s, true
FROM spread_request AS r
LEFT JOIN served AS s ON s.request = r.request
WHERE r.decode_worker IS NOT NULL AND r.decode_worker IS DISTINCT FROM r.prefill_worker
