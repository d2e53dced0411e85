-- worker_load: what each worker was given and how long it was busy.
--
-- grain:   one row per worker that saw a request; ratios compare it with the workers of its deployment
--          that have the same role and saw requests as the same observer
-- needs:   legs, workers
-- columns:
--   deployment           VARCHAR          deployment
--   worker               VARCHAR          the worker
--   name                 VARCHAR          short name for people
--   role                 VARCHAR          role of the worker, or of its legs where the worker's is unknown
--   observer             VARCHAR          as whom it saw the requests
--   requests             BIGINT           requests it saw (attempts count one by one)
--   prompt_tokens        BIGINT   tokens  their prompt tokens; NULL unknown
--   cached_tokens        BIGINT   tokens  of them found in a cache; NULL unknown
--   output_tokens        BIGINT   tokens  output tokens; NULL unknown
--   busy_s               DOUBLE   s       time with at least one request open
--   resident_s           DOUBLE   s       sum of the time that each request was open
--   requests_ratio       DOUBLE   1       its share of the requests of its peers
--   prompt_tokens_ratio  DOUBLE   1       its share of their prompt tokens
--   output_tokens_ratio  DOUBLE   1       its share of their output tokens
--   peers                BIGINT           workers it is compared with, itself included
--   start_ns             BIGINT   ns      first arrival
--   end_ns               BIGINT   ns      last end
WITH own AS (
  SELECT
    deployment, worker, observer, coalesce(request, leg) AS request, coalesce(attempt, 0) AS attempt,
    mode(role) AS role,
    -- The streams of one answer share their prompt.
    max(prompt_tokens) AS prompt_tokens,
    max(cached_tokens) AS cached_tokens,
    sum(output_tokens) AS output_tokens,
    min(start_ns) AS start_ns,
    max(end_ns) AS end_ns
  FROM legs
  WHERE worker IS NOT NULL AND container IS NOT TRUE
  GROUP BY ALL
),
edges AS (
  SELECT
    deployment, worker, observer, start_ns, end_ns,
    max(end_ns) OVER (
      PARTITION BY deployment, worker, observer ORDER BY start_ns, end_ns
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS covered_until_ns
  FROM own
  WHERE end_ns > start_ns
),
busy AS (
  SELECT
    deployment, worker, observer,
    CAST(sum(greatest(end_ns - greatest(start_ns, coalesce(covered_until_ns, start_ns)), 0)) AS DOUBLE)
      / 1e9 AS busy_s,
    CAST(sum(end_ns - start_ns) AS DOUBLE) / 1e9 AS resident_s
  FROM edges
  GROUP BY deployment, worker, observer
),
loads AS (
  SELECT
    o.deployment, o.worker, o.observer,
    any_value(w.name) AS name,
    coalesce(any_value(w.role), mode(o.role)) AS role,
    count(*) AS requests,
    CAST(sum(o.prompt_tokens) AS BIGINT) AS prompt_tokens,
    CAST(sum(o.cached_tokens) AS BIGINT) AS cached_tokens,
    CAST(sum(o.output_tokens) AS BIGINT) AS output_tokens,
    min(o.start_ns) AS start_ns,
    max(o.end_ns) AS end_ns
  FROM own o
  LEFT JOIN workers w ON w.worker = o.worker
  GROUP BY o.deployment, o.worker, o.observer
)
SELECT
  l.deployment,
  l.worker,
  l.name,
  l.role,
  l.observer,
  l.requests,
  l.prompt_tokens,
  l.cached_tokens,
  l.output_tokens,
  b.busy_s,
  b.resident_s,
  l.requests / sum(l.requests) OVER peers AS requests_ratio,
  l.prompt_tokens / nullif(sum(l.prompt_tokens) OVER peers, 0) AS prompt_tokens_ratio,
  l.output_tokens / nullif(sum(l.output_tokens) OVER peers, 0) AS output_tokens_ratio,
  count(*) OVER peers AS peers,
  l.start_ns,
  l.end_ns
FROM loads l
LEFT JOIN busy b
  ON b.deployment IS NOT DISTINCT FROM l.deployment
 AND b.worker = l.worker
 AND b.observer IS NOT DISTINCT FROM l.observer
WINDOW peers AS (PARTITION BY l.deployment, l.role, l.observer)
