-- request_waterfall: single requests piece by piece, as their time went over router, prefill, link and decode.
--
-- Without a request the slowest ones are given: those with the longest duration, and those with the latest
-- first token. Of a request with more than `pieces` pieces the longest are given (left_out_ms: the others).
--
-- grain:   one row per piece of a request's time
-- needs:   phases, requests, request_values, workers, worker_labels
-- params:
--   of_request  NULL  the request; NULL: the slowest
--   slowest     6     so many by duration, and as many by time to first token
--   pieces      300   pieces of a request, at most
-- columns:
--   deployment      VARCHAR      deployment
--   request         VARCHAR      the request
--   place           BIGINT       its place: the longest first
--   chosen_by       VARCHAR      duration, first token, or name
--   phase           VARCHAR      phase
--   detail          VARCHAR      detail
--   worker          VARCHAR      worker that the time belongs to; NULL unknown
--   lane            VARCHAR      who: name and role of that worker, or on the way where there is none
--   start_ns        BIGINT   ns  start
--   end_ns          BIGINT   ns  end
--   from_ms         DOUBLE   ms  start, from the start of the request
--   to_ms           DOUBLE   ms  end, likewise
--   duration_ms     DOUBLE   ms  length
--   basis           VARCHAR      measured, reported, placed, inferred or upper_bound
--   ttft_ms         DOUBLE   ms  from the start of the request to its first token as its window has it; NULL unknown
--   e2e_ms          DOUBLE   ms  length of the request's window
--   prompt_tokens   BIGINT   tokens  prompt tokens
--   cached_tokens   BIGINT   tokens  of them cached; NULL unknown
--   output_tokens   BIGINT   tokens  output tokens
--   left_out_ms     DOUBLE   ms  time in pieces that are not given
--   level           VARCHAR      evidence level
WITH placed AS (
  SELECT r.*, v.ttft_ms AS headline_ttft_ms, v.counted,
    row_number() OVER (
      PARTITION BY r.deployment ORDER BY r.end_ns - r.start_ns DESC, r.request
    ) AS by_duration,
    row_number() OVER (
      PARTITION BY r.deployment ORDER BY v.ttft_ms DESC NULLS LAST, r.request
    ) AS by_first_token
  FROM requests AS r
  JOIN request_values AS v ON v.request = r.request
  WHERE r.end_ns > r.start_ns
),
chosen AS (
  SELECT *,
    CASE WHEN of_request IS NOT NULL THEN 'name' WHEN by_duration <= slowest THEN 'duration'
      ELSE 'first token' END AS chosen_by
  FROM placed
  WHERE CASE WHEN of_request IS NOT NULL THEN request = CAST(of_request AS VARCHAR)
    ELSE by_duration <= slowest OR (by_first_token <= slowest AND headline_ttft_ms IS NOT NULL) END
),
piece AS (
  SELECT p.*, c.deployment, c.chosen_by, c.start_ns AS request_start_ns,
    c.end_ns AS request_end_ns, c.first_token_ns, c.prompt_tokens, c.cached_tokens, c.output_tokens,
    dense_rank() OVER (
      PARTITION BY c.deployment ORDER BY c.end_ns - c.start_ns DESC, c.request
    ) AS place,
    row_number() OVER (
      PARTITION BY p.request ORDER BY p.end_ns - p.start_ns DESC, p.start_ns
    ) AS length_place
  FROM phases AS p
  JOIN chosen AS c ON c.request = p.request
  WHERE p.end_ns > p.start_ns
)
SELECT p.deployment, p.request, p.place, p.chosen_by, p.phase, p.detail, p.worker,
  CASE
    WHEN p.worker IS NULL THEN 'on the way'
    WHEN w.role IS NULL THEN coalesce(w.name, p.worker)
    WHEN w.name IS NULL OR w.name = w.role THEN coalesce(l.label, w.role)
    ELSE w.name || ' (' || w.role || ')'
  END AS lane,
  p.start_ns, p.end_ns,
  (p.start_ns - p.request_start_ns) / 1e6 AS from_ms,
  (p.end_ns - p.request_start_ns) / 1e6 AS to_ms,
  (p.end_ns - p.start_ns) / 1e6 AS duration_ms,
  p.basis,
  (p.first_token_ns - p.request_start_ns) / 1e6 AS ttft_ms,
  (p.request_end_ns - p.request_start_ns) / 1e6 AS e2e_ms,
  p.prompt_tokens, p.cached_tokens, p.output_tokens,
  coalesce(sum((p.end_ns - p.start_ns) / 1e6) FILTER (p.length_place > pieces)
    OVER (PARTITION BY p.request), 0) AS left_out_ms,
  'B' AS level
FROM piece AS p
LEFT JOIN workers AS w ON w.worker = p.worker
LEFT JOIN worker_labels AS l ON l.worker = p.worker
QUALIFY p.length_place <= pieces
