-- fluidity_summary: whether tokens came in time for a reader, by class of limits: both indices that are
-- called fluidity, never mixed.
--
-- Deadlines are the class's limits: the first token's, then the time per token (the limit on gaps where
-- there is none). An early token leaves its time to the next ones.
--
-- grain:   one row per (deployment, class) with requests whose token gaps are known
-- needs:   slo_fluidity, slo_requests, request_streams
-- columns:
--   deployment         VARCHAR      deployment
--   position           INTEGER      place of the class in the list
--   class              VARCHAR      name of the class
--   first_deadline_ms  DOUBLE   ms  deadline of the first token
--   deadline_ms        DOUBLE   ms  deadline of each later one
--   requests           BIGINT       completed requests judged
--   without            BIGINT       completed requests of the class without token gaps or first-token time: not judged
--   emission           VARCHAR      token; chunk where a chunk's tokens are not known: each counts as one
--   doc_mean           DOUBLE       fluidity_doc (tokens on time / tokens), mean over requests
--   doc_90_ratio       DOUBLE   1   share of requests with fluidity_doc of at least 0.9
--   code_mean          DOUBLE       fluidity_code (1 - missed / (met + missed deadlines)), mean over requests
--   code_90_ratio      DOUBLE   1   share of requests with fluidity_code of at least 0.9
WITH told AS (
  SELECT request, bool_or(emission = 'chunk' AND emission_tokens IS NULL) AS chunks
  FROM request_streams
  GROUP BY request
)
SELECT
  r.deployment, r.position, r.class,
  any_value(r.ttft_limit_ms) AS first_deadline_ms,
  any_value(coalesce(r.tpot_limit_ms, r.itl_limit_ms)) AS deadline_ms,
  count(f.request) AS requests,
  count(*) - count(f.request) AS without,
  CASE WHEN bool_or(t.chunks) FILTER (f.request IS NOT NULL) THEN 'chunk' ELSE 'token' END AS emission,
  avg(f.fluidity_doc) AS doc_mean,
  avg(CASE WHEN f.fluidity_doc >= 0.9 THEN 1.0::DOUBLE WHEN f.fluidity_doc < 0.9 THEN 0 END) AS doc_90_ratio,
  avg(f.fluidity_code) AS code_mean,
  avg(CASE WHEN f.fluidity_code >= 0.9 THEN 1.0::DOUBLE WHEN f.fluidity_code < 0.9 THEN 0 END)
    AS code_90_ratio
FROM slo_requests AS r
LEFT JOIN slo_fluidity AS f ON f.request = r.request
LEFT JOIN told AS t ON t.request = r.request
WHERE r.ended = 'completed' AND r.position IS NOT NULL
GROUP BY r.deployment, r.position, r.class
HAVING count(f.request) > 0
