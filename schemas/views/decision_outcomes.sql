-- decision_outcomes: each router choice with what the engine then found in its cache.
--
-- believed_tokens is what the router took for cached on the worker it chose. cached_tokens is what
-- that worker's own record says (cached_basis engine), else what the answer says of the request
-- (answer): that number may pass through, or come from, the router itself.
--
-- grain:   one row per router choice
-- needs:   decisions, legs, prompt_reuse, workers
-- when:    EXISTS (FROM decisions)
-- columns:
--   deployment       VARCHAR  deployment
--   request          VARCHAR  the request; NULL unknown
--   router           VARCHAR  worker that decided
--   phase            VARCHAR  prefill, decode, aggregated or NULL
--   policy           VARCHAR  policy by name
--   worker           VARCHAR  the worker chosen
--   time_ns          BIGINT   ns      when
--   duration_ms      DOUBLE   ms      how long the choice took; NULL unknown
--   candidates       BIGINT   workers that could be chosen; NULL unknown
--   prompt_tokens    BIGINT   tokens  prompt of the request; NULL for choices of a decode worker
--   believed_tokens  BIGINT   tokens  believed cached on the chosen worker; NULL unknown
--   cached_tokens    BIGINT   tokens  found cached; NULL unknown
--   cached_basis     VARCHAR  engine or answer; NULL unknown
--   error_tokens     BIGINT   tokens  believed - cached: above 0 the router expected more than there was
WITH named AS (
  SELECT worker, request_id, min(request) AS request, min(deployment) AS deployment
  FROM legs
  WHERE request IS NOT NULL
    AND request_id IN (SELECT request_id FROM decisions WHERE leg IS NULL)
  GROUP BY worker, request_id
),
joined AS (
  SELECT d.*, coalesce(l.request, n.request) AS request,
    coalesce(l.deployment, n.deployment, w.deployment) AS deployment
  FROM decisions AS d
  LEFT JOIN legs AS l ON l.leg = d.leg
  LEFT JOIN named AS n ON d.leg IS NULL AND n.worker = d.router AND n.request_id = d.request_id
  LEFT JOIN workers AS w ON w.worker = d.router
),
engine AS (
  SELECT request, worker, max(cached_tokens) AS cached_tokens
  FROM legs
  WHERE observer = 'engine' AND cached_tokens IS NOT NULL
    AND worker IN (SELECT worker FROM decisions)
  GROUP BY request, worker
),
told AS (
  SELECT j.deployment, j.request, j.router, j.phase, j.policy, j.worker, j.time_ns, j.duration_ms,
    j.candidates, r.prompt_tokens, j.overlap_tokens AS believed_tokens,
    -- an answer tells of the prompt's computation, not of what the decode side had
    coalesce(e.cached_tokens, CASE WHEN r.cached_basis = 'answer' THEN r.cached_tokens END)
      AS cached_tokens,
    CASE WHEN e.cached_tokens IS NOT NULL THEN 'engine' WHEN r.cached_basis = 'answer' THEN 'answer'
    END AS cached_basis
  FROM joined AS j
  LEFT JOIN prompt_reuse AS r ON r.request = j.request AND j.phase IS DISTINCT FROM 'decode'
  LEFT JOIN engine AS e ON e.request = j.request AND e.worker = j.worker
)
SELECT *, believed_tokens - cached_tokens AS error_tokens
FROM told
