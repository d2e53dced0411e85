-- request_attributes: what each request asked for, where it was served, and what it met: the columns
-- by which requests are told apart.
--
-- Workers are named as people know them. What had arrived before a request and was still open counts
-- within its deployment; requests whose start or end nobody saw are in no such count.
--
-- grain:   one row per request
-- needs:   requests, request_values, workers, legs, decisions, phase_by_request
-- columns:
--   deployment            VARCHAR      deployment
--   request               VARCHAR      request
--   counted               BOOLEAN      it enters latency figures (view counted_requests)
--   outcome               VARCHAR      completed, failed, aborted or unknown
--   error                 VARCHAR      error kind or code
--   start_ns              BIGINT   ns  start
--   end_ns                BIGINT   ns  end
--   ttft_ms               DOUBLE   ms  headline time to first token
--   tpot_ms               DOUBLE   ms  time per output token after the first
--   e2e_ms                DOUBLE   ms  whole duration
--   prompt_tokens         BIGINT   tokens  prompt tokens
--   cached_tokens         BIGINT   tokens  of them found in a cache
--   cached_ratio          DOUBLE   1   cached / prompt tokens
--   output_tokens         BIGINT   tokens  output tokens
--   model                 VARCHAR      model
--   mode                  VARCHAR      aggregated, disaggregated or unknown
--   prefill_worker        VARCHAR      worker that computed the prompt
--   decode_worker         VARCHAR      worker that decoded
--   router                VARCHAR      router that chose
--   policy                VARCHAR      its policy
--   route                 VARCHAR      HTTP route
--   tenant                VARCHAR      user, team or customer
--   session               VARCHAR      session
--   turn                  BIGINT       turn in the session
--   streaming             BOOLEAN      the answer was streamed
--   streams               BIGINT       streams of the answer (n)
--   attempts              BIGINT       attempts
--   waiting_at_arrival    BIGINT       earlier requests without a first token yet
--   in_flight_at_arrival  BIGINT       earlier requests that had not ended
--   ttft_phase            VARCHAR      phase that took most of the time to the first token
--   main_phase            VARCHAR      phase that took most of the whole
--   external_id           VARCHAR      id that travelled between components
--   trace_id              VARCHAR      trace
--   note                  VARCHAR      remark of a table of requests
WITH named AS (
  SELECT
    worker,
    CASE WHEN name IS NOT NULL AND count(*) OVER (PARTITION BY deployment, name) = 1
      THEN name ELSE worker END AS label
  FROM workers
),
marks AS (
  SELECT deployment, request, start_ns AS time_ns, 1 AS arrived, 1 AS waits, 1 AS runs
  FROM requests
  WHERE start_ns IS NOT NULL AND end_ns IS NOT NULL
  UNION ALL
  SELECT deployment, request, greatest(coalesce(first_token_ns, end_ns), start_ns), 0, -1, 0
  FROM requests
  WHERE start_ns IS NOT NULL AND end_ns IS NOT NULL
  UNION ALL
  SELECT deployment, request, greatest(end_ns, start_ns), 0, 0, -1
  FROM requests
  WHERE start_ns IS NOT NULL AND end_ns IS NOT NULL
),
open AS (
  SELECT
    request, arrived,
    sum(waits) OVER so_far - 1 AS waiting,
    sum(runs) OVER so_far - 1 AS running
  FROM marks
  WINDOW so_far AS (
    PARTITION BY deployment ORDER BY time_ns, arrived, request ROWS UNBOUNDED PRECEDING
  )
),
chosen AS (
  SELECT
    l.request, arg_max(d.policy, d.time_ns) AS policy, arg_max(d.router, d.time_ns) AS router
  FROM decisions AS d
  JOIN legs AS l ON l.leg = d.leg
  WHERE l.request IS NOT NULL
  GROUP BY l.request
),
phase_times AS (
  SELECT request, phase, sum(duration_ms) AS duration_ms, sum(ttft_part_ms) AS ttft_part_ms
  FROM phase_by_request
  GROUP BY request, phase
),
longest AS (
  SELECT
    request, arg_max(phase, duration_ms) AS main_phase,
    arg_max(phase, ttft_part_ms) FILTER (ttft_part_ms > 0) AS ttft_phase
  FROM phase_times
  GROUP BY request
)
SELECT
  r.deployment, r.request, v.counted, r.outcome, r.error, r.start_ns, r.end_ns,
  v.ttft_ms, v.tpot_ms, v.e2e_ms, r.prompt_tokens, r.cached_tokens,
  CASE WHEN r.prompt_tokens > 0 THEN r.cached_tokens / r.prompt_tokens END AS cached_ratio,
  r.output_tokens, r.model, r.mode,
  coalesce(p.label, r.prefill_worker) AS prefill_worker,
  coalesce(d.label, r.decode_worker) AS decode_worker,
  coalesce(w.label, c.router) AS router,
  c.policy, r.route, r.tenant, r.session, r.turn, r.streaming, r.streams, r.attempts,
  CAST(o.waiting AS BIGINT) AS waiting_at_arrival,
  CAST(o.running AS BIGINT) AS in_flight_at_arrival,
  l.ttft_phase, l.main_phase, r.external_id, r.trace_id, r.note
FROM requests AS r
JOIN request_values AS v ON v.request = r.request
LEFT JOIN open AS o ON o.request = r.request AND o.arrived = 1
LEFT JOIN chosen AS c ON c.request = r.request
LEFT JOIN longest AS l ON l.request = r.request
LEFT JOIN named AS p ON p.worker = r.prefill_worker
LEFT JOIN named AS d ON d.worker = r.decode_worker
LEFT JOIN named AS w ON w.worker = c.router
