-- request_latency: latency and size of every request, as the headline observer saw it.
--
-- grain:   one row per request
-- needs:   requests, counted_requests
-- columns:
--   deployment       VARCHAR          deployment
--   request          VARCHAR          the request
--   outcome          VARCHAR          completed, failed, aborted or unknown
--   counted          BOOLEAN          it enters the latency and phase figures (view counted_requests)
--   start_ns         BIGINT   ns      start of its window
--   end_ns           BIGINT   ns      end of its window
--   ttft_ms          DOUBLE   ms      time to first token
--   e2e_ms           DOUBLE   ms      whole duration
--   tpot_ms          DOUBLE   ms      mean time per output token after the first
--   decode_ms        DOUBLE   ms      time after the first token: e2e_ms - ttft_ms
--   prompt_tokens    BIGINT   tokens  prompt tokens
--   cached_tokens    BIGINT   tokens  of them found in a cache
--   output_tokens    BIGINT   tokens  output tokens, summed over streams
--   streams          BIGINT           streams of the answer
--   mode             VARCHAR          aggregated, disaggregated or unknown
--   model            VARCHAR          model
--   prefill_worker   VARCHAR          worker that computed the prompt
--   decode_worker    VARCHAR          worker that decoded
--   session          VARCHAR          session
--   turn             BIGINT           turn in the session
--   note             VARCHAR          remark of a table of requests
SELECT
  r.deployment,
  r.request,
  coalesce(r.outcome, 'unknown') AS outcome,
  c.request IS NOT NULL AS counted,
  r.start_ns,
  r.end_ns,
  r.ttft_ms,
  r.e2e_ms,
  r.tpot_ms,
  r.e2e_ms - r.ttft_ms AS decode_ms,
  r.prompt_tokens,
  r.cached_tokens,
  r.output_tokens,
  r.streams,
  coalesce(r.mode, 'unknown') AS mode,
  r.model,
  r.prefill_worker,
  r.decode_worker,
  r.session,
  r.turn,
  r.note
FROM requests r
LEFT JOIN counted_requests c ON c.request = r.request
