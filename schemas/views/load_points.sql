-- load_points: what each worker carried at a time: requests waiting, running and in the step, share of the KV cache in use.
--
-- From engine steps where they say it (level A), else from metrics and log lines (level D), else counted
-- from the requests that stand in queue, prefill or decode on the worker (level B: only those that the
-- data hold). A value holds until the next one of its series; a row without a value ends it: nobody
-- knows what was between (steps: 5 s without one, samples: 60 s). Where every step is recorded, no batch
-- runs between two of them: 0; and none was running through a pause of 0.1 s and more behind which the
-- next step decodes nobody: an engine steps on while it has running requests.
-- A sample of several series of one worker (ranks) is their sum,
-- of usage the greatest.
--
-- grain:   one row per (worker, rank, quantity, instant)
-- needs:   steps, samples, kv_usage_samples, workers, phases, requests
-- columns:
--   deployment     VARCHAR      deployment
--   worker         VARCHAR      the worker
--   rank           VARCHAR      rank inside the worker; empty where there is none
--   quantity       VARCHAR      waiting, running or batch (requests), kv_usage (share)
--   time_ns        BIGINT   ns  from when on
--   value          DOUBLE       the value; NULL from here on unknown
--   resolution_ns  BIGINT   ns  the instant is known to this
--   level          VARCHAR      A (steps), B (counted from requests) or D (samples)
WITH step AS (
  SELECT worker, coalesce(rank, '') AS rank, coalesce(start_ns, start_lower_ns) AS time_ns,
    coalesce(start_upper_ns - start_lower_ns, 0) AS resolution_ns, elapsed_ns, capture,
    waiting, running, kv_usage_ratio,
    CASE WHEN prefill_requests IS NOT NULL OR decode_requests IS NOT NULL
      THEN coalesce(prefill_requests, 0) + coalesce(decode_requests, 0) END AS batch,
    lead(coalesce(start_ns, start_lower_ns)) OVER in_order AS next_ns,
    lead(decode_requests) OVER in_order AS next_decode_requests
  FROM steps
  WHERE worker IS NOT NULL AND coalesce(start_ns, start_lower_ns) IS NOT NULL
  WINDOW in_order AS (
    PARTITION BY worker, rank ORDER BY coalesce(start_ns, start_lower_ns), seq
  )
),
told_step AS (
  SELECT worker, rank, time_ns, resolution_ns, coalesce(elapsed_ns, 0) AS elapsed_ns,
    capture = 'full' AND elapsed_ns IS NOT NULL AS told_all, next_decode_requests,
    next_ns - time_ns - coalesce(elapsed_ns, 0) - resolution_ns AS pause_ns, unnest([
      {'quantity': 'waiting', 'value': waiting::DOUBLE},
      {'quantity': 'running', 'value': running::DOUBLE},
      {'quantity': 'batch', 'value': batch::DOUBLE},
      {'quantity': 'kv_usage', 'value': kv_usage_ratio}
    ], recursive := true)
  FROM step
),
step_point AS (
  SELECT worker, rank, quantity, time_ns, value, resolution_ns, 'A' AS level
  FROM told_step
  WHERE value IS NOT NULL
  UNION ALL
  SELECT worker, rank, quantity, time_ns + elapsed_ns,
    CASE WHEN quantity = 'batch' AND told_all THEN 0.0
      WHEN quantity = 'running' AND told_all AND next_decode_requests = 0 THEN 0.0 END,
    resolution_ns, 'A'
  FROM told_step
  WHERE value IS NOT NULL
    AND (pause_ns IS NULL OR pause_ns > CASE
      WHEN quantity = 'batch' AND told_all THEN 1000000
      WHEN quantity = 'running' AND told_all AND next_decode_requests = 0 THEN 100000000
      ELSE 5000000000 END)
),
named_sample AS (
  SELECT source, worker, time_ns, coalesce(resolution_ns, 1) AS resolution_ns,
    CASE WHEN regexp_matches(
        metric, '(^|[:_])(num_requests_waiting|num_queue_reqs|waiting_requests|requests_waiting)$'
      ) THEN 'waiting'
      WHEN regexp_matches(
        metric,
        '(^|[:_])(num_requests_running|num_running_reqs|running_requests|requests_running)$'
      ) THEN 'running' END AS quantity,
    metric, value
  FROM samples
  WHERE worker IS NOT NULL AND time_ns IS NOT NULL AND value IS NOT NULL AND NOT isnan(value)
    AND kind = 'gauge'
),
one_metric AS (
  SELECT source, worker, quantity, time_ns, metric, max(resolution_ns) AS resolution_ns,
    sum(value) AS value
  FROM named_sample
  WHERE quantity IS NOT NULL
  GROUP BY source, worker, quantity, time_ns, metric
  UNION ALL
  SELECT source, worker, 'kv_usage', time_ns, metric, max(coalesce(resolution_ns, 1)),
    max(usage_ratio)
  FROM kv_usage_samples
  WHERE worker IS NOT NULL AND time_ns IS NOT NULL AND usage_ratio IS NOT NULL AND kind = 'gauge'
  GROUP BY source, worker, time_ns, metric
),
sample AS (
  SELECT worker, quantity, time_ns, max(value) AS value, max(resolution_ns) AS resolution_ns,
    lead(time_ns) OVER (PARTITION BY worker, quantity ORDER BY time_ns) AS next_ns
  FROM one_metric
  GROUP BY worker, quantity, time_ns
),
sample_point AS (
  SELECT worker, '' AS rank, quantity, time_ns, value, resolution_ns, 'D' AS level
  FROM sample
  UNION ALL
  SELECT worker, '', quantity, least(time_ns + 60000000000, next_ns), NULL, resolution_ns, 'D'
  FROM sample
  WHERE next_ns - time_ns > 60000000000
),
point AS (
  FROM step_point
  UNION ALL
  FROM sample_point AS s
  WHERE NOT EXISTS (
    FROM step_point AS o WHERE o.worker = s.worker AND o.quantity = s.quantity
  )
),
told AS (
  SELECT DISTINCT worker, quantity FROM point
),
stay AS (
  SELECT p.worker, p.start_ns, p.end_ns, coalesce(r.resolution_ns, 1) AS resolution_ns, k.quantity
  FROM phases AS p
  JOIN (VALUES
    ('queue', 'waiting'), ('decode_queue', 'waiting'), ('prefill', 'running'), ('decode', 'running')
  ) AS k(phase, quantity) ON k.phase = p.phase
  JOIN requests AS r ON r.request = p.request
  WHERE p.worker IS NOT NULL AND p.end_ns > p.start_ns
    AND NOT EXISTS (FROM told AS o WHERE o.worker = p.worker AND o.quantity = k.quantity)
),
change AS (
  SELECT worker, quantity, start_ns AS time_ns, 1 AS change, resolution_ns FROM stay
  UNION ALL
  SELECT worker, quantity, end_ns, -1, resolution_ns FROM stay
),
instant AS (
  SELECT worker, quantity, time_ns, sum(change) AS change, max(resolution_ns) AS resolution_ns
  FROM change
  GROUP BY worker, quantity, time_ns
  HAVING sum(change) <> 0
),
request_point AS (
  SELECT worker, '' AS rank, quantity, time_ns,
    sum(change) OVER (PARTITION BY worker, quantity ORDER BY time_ns)::DOUBLE AS value,
    resolution_ns, 'B' AS level
  FROM instant
),
all_points AS (
  FROM point
  UNION ALL
  FROM request_point
)
SELECT w.deployment, p.*
FROM all_points AS p
JOIN workers AS w ON w.worker = p.worker
