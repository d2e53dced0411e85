-- counted_requests: the requests that latency and phase figures are made of.
--
-- grain:   one row per completed request; in a deployment where no request is known to have completed,
--          one row per request of unknown outcome (failed and aborted ones never count)
-- needs:   request_values
-- columns:
--   request         VARCHAR         the request
--   deployment      VARCHAR         its deployment
--   mode            VARCHAR         aggregated, disaggregated or unknown
--   outcome         VARCHAR         completed, or unknown where nothing better is known
--   start_ns        BIGINT   ns     start of its window
--   end_ns          BIGINT   ns     end of its window
--   first_token_ns  BIGINT   ns     first delivered token
--   prefill_worker  VARCHAR         worker that computed the prompt
--   decode_worker   VARCHAR         worker that decoded
SELECT
  request,
  deployment,
  mode,
  coalesce(outcome, 'unknown') AS outcome,
  start_ns,
  end_ns,
  first_token_ns,
  prefill_worker,
  decode_worker
FROM request_values
WHERE counted
