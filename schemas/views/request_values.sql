-- request_values: what each request is judged by.
--
-- Where no observer saw enough first tokens to be the headline, the only one that saw any stands in.
--
-- grain:   one row per request
-- needs:   requests, observations, deployments
-- columns:
--   deployment       VARCHAR  deployment
--   request          VARCHAR  request
--   mode             VARCHAR  aggregated, disaggregated or unknown
--   outcome          VARCHAR  completed, failed, aborted or unknown
--   counted          BOOLEAN  it enters latency and phase figures: completed; where no request of the deployment is known to have completed, of unknown outcome
--   model            VARCHAR  model by which it is judged; NULL where the deployment has only one
--   start_ns         BIGINT   ns  start of its window
--   end_ns           BIGINT   ns  end of its window
--   first_token_ns   BIGINT   ns  first delivered token
--   ttft_ms          DOUBLE   ms  headline time to first token
--   tpot_ms          DOUBLE   ms  time per output token after the first; from TTFT, duration and tokens where not stated
--   pace_ms          DOUBLE   ms  tpot_ms; NULL with fewer than 5 output tokens
--   e2e_ms           DOUBLE   ms  whole duration
--   prompt_tokens    BIGINT   tokens  prompt tokens
--   cached_tokens    BIGINT   tokens  of them found in a cache
--   uncached_tokens  BIGINT   tokens  prompt tokens not found in a cache; all of them where that is unknown
--   output_tokens    BIGINT   tokens  output tokens
--   prefill_worker   VARCHAR  worker that computed the prompt
--   decode_worker    VARCHAR  worker that decoded
WITH deployment_requests AS (
  SELECT deployment, min(model) <> max(model) AS several_models,
    count(*) FILTER (outcome = 'completed') = 0 AS none_completed
  FROM requests
  GROUP BY deployment
),
only_observer AS (
  SELECT o.deployment, min(o.observer) AS observer
  FROM observations AS o
  JOIN deployments AS d ON d.deployment = o.deployment
  WHERE d.headline_observer IS NULL AND o.ttft_ms IS NOT NULL
  GROUP BY o.deployment
  HAVING min(o.observer) = max(o.observer)
),
stand_in AS (
  SELECT o.request, o.ttft_ms, o.e2e_ms, o.tpot_ms
  FROM observations AS o
  JOIN only_observer AS n ON n.deployment = o.deployment AND n.observer = o.observer
),
joined AS (
  SELECT r.* EXCLUDE (mode, outcome, model, ttft_ms, tpot_ms, e2e_ms),
    coalesce(r.mode, 'unknown') AS mode,
    r.outcome,
    coalesce(r.outcome = 'completed', false)
      OR (d.none_completed AND coalesce(r.outcome, 'unknown') = 'unknown') AS counted,
    CASE WHEN d.several_models AND r.deployment IS NOT NULL
      THEN coalesce(r.model, 'unknown') END AS model,
    coalesce(r.ttft_ms, i.ttft_ms) AS ttft_ms,
    coalesce(r.e2e_ms, i.e2e_ms) AS e2e_ms,
    coalesce(
      r.tpot_ms, i.tpot_ms,
      CASE WHEN r.output_tokens > 1 THEN (r.e2e_ms - r.ttft_ms) / (r.output_tokens - 1) END
    ) AS tpot_ms
  FROM requests AS r
  JOIN deployment_requests AS d ON d.deployment IS NOT DISTINCT FROM r.deployment
  LEFT JOIN stand_in AS i ON i.request = r.request
)
SELECT deployment, request, mode, outcome, counted, model, start_ns, end_ns, first_token_ns, ttft_ms,
  tpot_ms,
  -- the mean over a handful of gaps is not a stream's pace
  CASE WHEN output_tokens IS NULL OR output_tokens >= 5 THEN tpot_ms END AS pace_ms,
  e2e_ms, prompt_tokens, cached_tokens,
  prompt_tokens - coalesce(cached_tokens, 0) AS uncached_tokens,
  output_tokens, prefill_worker, decode_worker
FROM joined
