-- failed_requests: requests that failed or were aborted, and HTTP errors that belong to no request
-- seen.
--
-- Aborted requests (the client or the server gave up) are a class of their own: not counted as
-- failures, not as good. Severity: critical when the lower bound of the failed share is 5 % or
-- more; warning when anything failed, or an error of the server (5xx) was logged; info when only
-- aborts or client errors were seen. Level C (outcomes of requests), D when only events tell.
-- Where no request but failed ones is known, and they are those that the access lines of a log
-- count among more calls, the share is that of the calls: failed requests do not stand for all.
-- Counts of calls cannot be cut to a stretch of time: where the requests were, no share is known.
--
-- grain:   one row per deployment
-- needs:   requests, events, workers, legs, facts, deployment_sources
-- when:    EXISTS (FROM requests WHERE outcome IN ('failed', 'aborted'))
--          OR EXISTS (FROM events WHERE kind = 'http_error')
-- columns:
--   deployment     VARCHAR    deployment
--   severity       VARCHAR    critical, warning or info
--   cost_s         DOUBLE     s  seconds that failed requests lasted; NULL unknown
--   level          VARCHAR    C or D
--   value          DOUBLE     failed requests
--   unit           VARCHAR    requests
--   interval_low   DOUBLE     95 % Wilson interval of the failed share x requests seen (calls counted), lower end
--   interval_high  DOUBLE     upper end
--   share          DOUBLE     failed over all requests seen, or over all calls counted
--   requests       BIGINT     failed and aborted requests
--   workers        VARCHAR[]  workers of the failed requests, most first
--   culprits       STRUCT(request VARCHAR, "value" DOUBLE)[]  the five failed or aborted requests that lasted longest; value: seconds
--   sources        VARCHAR[]  files that requests or events come from
--   seen           BIGINT     requests seen
--   failed         BIGINT     requests that failed
--   aborted        BIGINT     requests that were aborted
--   retried        BIGINT     requests with more than one attempt, whatever their outcome
--   http_errors    BIGINT     HTTP errors logged that belong to no failed request or attempt
--   server_errors  BIGINT     of them 5xx
--   calls          BIGINT     calls for an answer in the access lines, where only the failed ones are known as requests; else NULL
--   calls_failed   BIGINT     of them, answered with an error
--   calls_whole_log  BOOLEAN  the calls are those of the whole log, the requests those of a stretch of it; NULL without calls
--   errors         STRUCT("error" VARCHAR, requests BIGINT)[]  kinds of error, most frequent first
WITH outcome_count AS (
  SELECT deployment, count(*) AS seen,
    count(*) FILTER (outcome = 'failed') AS failed,
    count(*) FILTER (outcome = 'aborted') AS aborted,
    count(*) FILTER (attempts > 1) AS retried,
    sum(coalesce(e2e_ms, (end_ns - start_ns) / 1e6)) FILTER (outcome = 'failed') / 1e3 AS cost_s,
    min_by(
      {'request': request, 'value': coalesce(e2e_ms, (end_ns - start_ns) / 1e6, 0) / 1e3},
      (-coalesce(e2e_ms, (end_ns - start_ns) / 1e6, 0), request), 5
    ) FILTER (outcome IN ('failed', 'aborted')) AS culprits
  FROM requests
  GROUP BY deployment
),
error_count AS (
  SELECT deployment, coalesce(error, outcome) AS error, count(*) AS n
  FROM requests
  WHERE outcome IN ('failed', 'aborted')
  GROUP BY ALL
),
error_list AS (
  SELECT deployment, list({'error': error, 'requests': n} ORDER BY n DESC, error) AS errors
  FROM error_count
  GROUP BY deployment
),
worker_count AS (
  SELECT deployment, coalesce(decode_worker, prefill_worker) AS worker, count(*) AS n
  FROM requests
  WHERE outcome = 'failed'
  GROUP BY ALL
),
worker_list AS (
  SELECT deployment, list(worker ORDER BY n DESC, worker) AS workers
  FROM worker_count
  WHERE worker IS NOT NULL
  GROUP BY deployment
),
failed_name AS (
  SELECT l.deployment, l.request_id AS name
  FROM legs AS l
  JOIN requests AS r ON r.request = l.request
  -- an attempt that failed has its error even where another one completed the request
  WHERE r.outcome IN ('failed', 'aborted') OR l.status = 'failed'
  UNION
  SELECT r.deployment, r.external_id
  FROM requests AS r
  WHERE r.outcome IN ('failed', 'aborted')
),
failed_record AS (
  -- the record of an error may itself be all that is known of the request
  SELECT DISTINCT l.source, l.record
  FROM legs AS l
  JOIN requests AS r ON r.request = l.request
  WHERE (r.outcome IN ('failed', 'aborted') OR l.status = 'failed') AND l.record IS NOT NULL
),
http_count AS (
  SELECT w.deployment, sum(coalesce(e.count, 1))::BIGINT AS http_errors,
    coalesce(
      sum(coalesce(e.count, 1)) FILTER (regexp_matches(e.detail, '\b5[0-9][0-9]\b')), 0
    )::BIGINT AS server_errors
  FROM events AS e
  JOIN workers AS w ON w.worker = e.worker
  LEFT JOIN failed_name AS f ON f.deployment IS NOT DISTINCT FROM w.deployment
    AND f.name = e.request_id
  LEFT JOIN failed_record AS k ON k.source = e.source AND k.record = e.record
  WHERE e.kind = 'http_error' AND f.name IS NULL AND k.record IS NULL
  GROUP BY w.deployment
),
call_count AS (
  SELECT w.deployment,
    sum(TRY_CAST(f.value AS BIGINT)) FILTER (f.key = 'http_calls')::BIGINT AS calls,
    sum(TRY_CAST(f.value AS BIGINT)) FILTER (f.key = 'http_calls_failed')::BIGINT AS calls_failed,
    bool_or(f.key = 'http_calls_whole_log') AS whole_log
  FROM facts AS f
  JOIN workers AS w ON w.worker = f.worker
  WHERE f.key IN ('http_calls', 'http_calls_failed', 'http_calls_whole_log')
  GROUP BY w.deployment
),
counted AS (
  SELECT o.deployment, c.calls, c.calls_failed, c.whole_log
  FROM outcome_count AS o
  JOIN call_count AS c ON c.deployment IS NOT DISTINCT FROM o.deployment
  WHERE o.failed = o.seen AND (o.failed = c.calls_failed OR c.whole_log) AND c.calls > o.failed
),
joined AS (
  SELECT coalesce(o.deployment, h.deployment) AS deployment, o.* EXCLUDE (deployment),
    coalesce(h.http_errors, 0) AS http_errors, coalesce(h.server_errors, 0) AS server_errors,
    c.calls, c.calls_failed, c.whole_log AS calls_whole_log,
    CASE WHEN c.whole_log IS NOT TRUE THEN coalesce(c.calls, o.seen) END AS n,
    CASE WHEN c.whole_log IS NOT TRUE THEN coalesce(c.calls_failed / c.calls, o.failed / o.seen)
      END AS p
  FROM outcome_count AS o
  FULL JOIN http_count AS h ON h.deployment IS NOT DISTINCT FROM o.deployment
  LEFT JOIN counted AS c ON c.deployment IS NOT DISTINCT FROM o.deployment
),
bounded AS (
  -- Wilson (1927), z = 1.96
  SELECT *,
    (p + 1.92 / n - 1.96 * sqrt(p * (1 - p) / n + 0.96 / n / n)) / (1 + 3.84 / n)
      AS low,
    (p + 1.92 / n + 1.96 * sqrt(p * (1 - p) / n + 0.96 / n / n)) / (1 + 3.84 / n)
      AS high
  FROM joined
)
SELECT b.deployment,
  CASE WHEN low >= 0.05 THEN 'critical'
    WHEN failed > 0 OR server_errors > 0 THEN 'warning' ELSE 'info' END AS severity,
  cost_s,
  CASE WHEN coalesce(failed + aborted, 0) > 0 THEN 'C' ELSE 'D' END AS level,
  coalesce(failed, 0)::DOUBLE AS value, 'requests' AS unit,
  CASE WHEN n > 0 THEN greatest(0, low) * n END AS interval_low,
  CASE WHEN n > 0 THEN least(1, high) * n END AS interval_high,
  p AS share, coalesce(failed + aborted, 0) AS requests,
  coalesce(w.workers, []) AS workers,
  coalesce(culprits, []) AS culprits,
  coalesce(s.paths, []) AS sources,
  coalesce(seen, 0) AS seen, coalesce(failed, 0) AS failed, coalesce(aborted, 0) AS aborted,
  coalesce(retried, 0) AS retried, http_errors, server_errors, calls, calls_failed,
  calls_whole_log,
  coalesce(e.errors, []) AS errors
FROM bounded AS b
LEFT JOIN error_list AS e ON e.deployment IS NOT DISTINCT FROM b.deployment
LEFT JOIN worker_list AS w ON w.deployment IS NOT DISTINCT FROM b.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = b.deployment
  AND s.evidence = CASE WHEN coalesce(failed + aborted, 0) > 0 THEN 'requests' ELSE 'events' END
WHERE coalesce(failed + aborted, 0) > 0 OR http_errors > 0
