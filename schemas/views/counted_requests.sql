-- counted_requests: the requests that latency and phase figures are made of.
--
-- grain:   one row per completed request; in a deployment where no request is known to have completed,
--          one row per request of unknown outcome (failed and aborted ones never count)
-- needs:   requests
-- columns:
--   request         VARCHAR         the request
--   deployment      VARCHAR         its deployment
--   mode            VARCHAR         aggregated, disaggregated or unknown
--   outcome         VARCHAR         completed, or unknown where nothing better is known
--   start_ns        BIGINT   ns     start of its window
--   end_ns          BIGINT   ns     end of its window
--   first_token_ns  BIGINT   ns     first delivered token
WITH outcomes AS (
  SELECT deployment, count(*) FILTER (outcome = 'completed') AS completed
  FROM requests
  GROUP BY deployment
)
SELECT
  r.request,
  r.deployment,
  coalesce(r.mode, 'unknown') AS mode,
  coalesce(r.outcome, 'unknown') AS outcome,
  r.start_ns,
  r.end_ns,
  r.first_token_ns
FROM requests r
JOIN outcomes o ON o.deployment IS NOT DISTINCT FROM r.deployment
WHERE r.outcome = 'completed'
   OR (o.completed = 0 AND coalesce(r.outcome, 'unknown') = 'unknown')
