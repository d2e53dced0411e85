-- waiting_with_room: requests waited to be admitted while the KV cache had room.
--
-- From what engines say periodically: one line or one scrape that names running and waiting requests.
-- Requests that wait for something of their own (KV on its way, a grammar: reason deferred) are taken
-- off where they are told apart; where they are not, a decode worker of a P/D pair is not judged: most
-- of them wait for KV. Room: the cache below high_ratio; an observation without its usage is not counted. What held the
-- requests is not in such numbers, only whether a limit on requests at once was reached, where the log
-- states one. Not for a deployment whose requests tell how long they waited (engine_queue). Level D;
-- gauges may lag.
--
-- grain:   one row per deployment
-- needs:   samples, kv_usage_samples, workers, facts, requests, phase_sums, deployment_sources
-- when:    EXISTS (FROM samples WHERE value > 0 AND regexp_matches(metric, 'waiting|num_queue_reqs'))
-- params:
--   high_ratio        0.9   above it kv_pressure tells
--   min_observations  3     fewer are a moment
--   min_share         0.05  what is seen less often hurts nobody
-- columns:
--   deployment          VARCHAR    deployment
--   severity            VARCHAR    warning from a fifth of the observations and min_observations on, info below
--   cost_s              DOUBLE     s  NULL: how long each request waited is not known
--   level               VARCHAR    D
--   value               DOUBLE     share of the observations in which requests waited and the cache had room
--   unit                VARCHAR    1
--   interval_low        DOUBLE     NULL
--   interval_high       DOUBLE     NULL
--   share               DOUBLE     value
--   requests            BIGINT     NULL: which requests waited is not said
--   workers             VARCHAR[]  workers with such observations, most first
--   culprits            STRUCT(request VARCHAR, "value" DOUBLE)[]  empty
--   sources             VARCHAR[]  files that the observations come from
--   observations        BIGINT     observations of these workers
--   seen                BIGINT     of them, with waiting requests and room
--   waiting_max         DOUBLE     most requests that waited then
--   waiting_p50         DOUBLE     their median
--   running_min         DOUBLE     fewest requests that ran then
--   running_max         DOUBLE     most
--   usage_min_ratio     DOUBLE     1  emptiest cache then
--   usage_max_ratio     DOUBLE     1  fullest
--   prompt_rate_p50     DOUBLE     median of the prompt tokens per second then; NULL where not told
--   limit_requests      DOUBLE     limit on requests at once that the workers' settings state (max_num_seqs); NULL unknown or several
--   at_limit            BIGINT     observations of seen in which nine tenths of it or more ran (a snapshot misses those just gone)
--   deferred_told       BOOLEAN    requests that wait for something of their own are told apart
WITH told AS (
  SELECT source, worker, coalesce(labels ->> 'engine', labels ->> 'dp_rank', '') AS rank, time_ns, value,
    regexp_matches(metric, '(^|[:_])(num_requests_waiting|num_queue_reqs|waiting_requests|requests_waiting)$') AS is_waiting,
    regexp_matches(metric, '(^|[:_])num_requests_waiting_by_reason$') AND labels ->> 'reason' = 'deferred' AS is_deferred,
    regexp_matches(metric, '(^|[:_])(num_requests_running|num_running_reqs)$') AS is_running,
    regexp_matches(metric, 'avg_prompt_throughput_toks_per_s$') AS is_prompt_rate
  FROM samples
  WHERE worker IS NOT NULL AND value IS NOT NULL AND NOT isnan(value)
),
point AS (
  -- one line or one scrape
  SELECT source, worker, rank, time_ns,
    max(value) FILTER (is_waiting) - coalesce(max(value) FILTER (is_deferred), 0) AS waiting,
    max(value) FILTER (is_running) AS running, max(value) FILTER (is_prompt_rate) AS prompt_rate,
    bool_or(is_deferred) AS deferred_told
  FROM told
  GROUP BY source, worker, rank, time_ns
),
usage AS (
  SELECT source, worker, rank, time_ns, max(usage_ratio) AS usage_ratio
  FROM kv_usage_samples
  GROUP BY source, worker, rank, time_ns
),
observation AS (
  SELECT w.deployment, p.*, u.usage_ratio,
    coalesce(p.waiting > 0 AND u.usage_ratio < high_ratio, false) AS held,
    coalesce(p.waiting > 0 AND u.usage_ratio >= high_ratio, false) AS pressed
  FROM point AS p
  JOIN workers AS w ON w.worker = p.worker
  LEFT JOIN usage AS u ON u.source = p.source AND u.worker = p.worker AND u.rank = p.rank
    AND u.time_ns IS NOT DISTINCT FROM p.time_ns
  WHERE p.running IS NOT NULL AND p.waiting IS NOT NULL AND w.deployment IS NOT NULL
    AND (w.role IS DISTINCT FROM 'decode' OR p.deferred_told)
),
stated AS (
  SELECT worker, max(TRY_CAST(value AS DOUBLE)) AS limit_requests
  FROM facts
  WHERE key = 'max_num_seqs'
  GROUP BY worker
),
limited AS (
  SELECT o.*, s.limit_requests
  FROM observation AS o
  LEFT JOIN stated AS s ON s.worker = o.worker
  QUALIFY bool_or(held) OVER (PARTITION BY o.worker)
),
worker_list AS (
  SELECT deployment, list(worker ORDER BY n DESC, worker) AS workers
  FROM (SELECT deployment, worker, count(*) FILTER (held) AS n FROM limited GROUP BY ALL)
  GROUP BY deployment
),
total AS (
  SELECT deployment, count(*) AS observations, count(*) FILTER (held) AS seen, count(*) FILTER (pressed) AS pressed,
    max(waiting) FILTER (held) AS waiting_max,
    quantile_cont(waiting, 0.5) FILTER (held) AS waiting_p50,
    min(running) FILTER (held) AS running_min, max(running) FILTER (held) AS running_max,
    min(usage_ratio) FILTER (held) AS usage_min_ratio,
    max(usage_ratio) FILTER (held) AS usage_max_ratio,
    quantile_cont(prompt_rate, 0.5) FILTER (held) AS prompt_rate_p50,
    CASE WHEN count(DISTINCT limit_requests) = 1 THEN max(limit_requests) END AS limit_requests,
    count(*) FILTER (held AND running >= 0.9 * limit_requests) AS at_limit,
    coalesce(bool_or(deferred_told), false) AS deferred_told
  FROM limited
  GROUP BY deployment
)
SELECT t.deployment, CASE WHEN seen >= 0.2 * observations AND seen >= min_observations THEN 'warning' ELSE 'info' END AS severity,
  NULL::DOUBLE AS cost_s, 'D' AS level, seen / observations AS value, '1' AS unit,
  NULL::DOUBLE AS interval_low, NULL::DOUBLE AS interval_high, seen / observations AS share,
  NULL::BIGINT AS requests, w.workers,
  []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  coalesce(s.paths, []) AS sources,
  observations, seen, waiting_max, waiting_p50, running_min, running_max, usage_min_ratio, usage_max_ratio,
  prompt_rate_p50, limit_requests, at_limit, deferred_told
FROM total AS t
JOIN worker_list AS w ON w.deployment = t.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = t.deployment AND s.evidence = 'samples'
-- where more waited behind a full cache, that is the answer
WHERE observations >= min_observations AND seen >= min_share * observations AND seen > pressed
  AND NOT EXISTS (
    FROM phase_sums AS p
    JOIN requests AS r ON r.request = p.request
    WHERE r.deployment = t.deployment AND p.phase IN ('queue', 'decode_queue')
  )
