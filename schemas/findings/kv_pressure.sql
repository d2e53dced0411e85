-- kv_pressure: whether the KV cache was nearly full, and whether requests waited meanwhile.
--
-- From engine steps where they say the usage (weighted by duration, level A), else from samples
-- (level D; whose gauges may lag). A worker counts when it
-- was at or above high_ratio for at least min_time_ratio of what was seen, or once while requests
-- waited. Ranks of one server (data parallel: label engine, rank of a step) have caches of their own
-- and are judged one by one. Severity: warning when requests waited while the cache was nearly full, info otherwise.
-- No seconds: what the pressure cost shows in queue and preemption.
--
-- grain:   one row per deployment
-- needs:   steps, samples, kv_usage_samples, workers, deployment_sources
-- when:    EXISTS (FROM steps) OR EXISTS (FROM samples)
-- params:
--   high_ratio      0.9   above it an engine soon refuses or preempts; schedulers keep a few per cent free
--   min_time_ratio  0.05  shorter peaks without waiting requests hurt nobody
-- columns:
--   deployment       VARCHAR    deployment
--   severity         VARCHAR    warning or info
--   cost_s           DOUBLE     s  NULL: not in seconds
--   level            VARCHAR    A (steps) or D (samples)
--   value            DOUBLE     share of the observed time at or above high_ratio, of the fullest worker (of its fullest rank)
--   unit             VARCHAR    1
--   interval_low     DOUBLE     NULL
--   interval_high    DOUBLE     NULL
--   share            DOUBLE     value
--   requests         BIGINT     NULL unknown
--   workers          VARCHAR[]  workers under pressure, the fullest first
--   culprits         STRUCT(request VARCHAR, "value" DOUBLE)[]  empty
--   sources          VARCHAR[]  files that steps or samples come from
--   usage_p50_ratio  DOUBLE     1  median usage of the fullest worker
--   usage_max_ratio  DOUBLE     1  greatest usage seen
--   waiting_max      DOUBLE     most requests waiting while a cache was at or above high_ratio; NULL unknown
--   observations     BIGINT     steps or samples seen of the workers under pressure
--   ranks_pressed    BIGINT     ranks under pressure of servers with several
--   ranks            BIGINT     ranks of these servers
--   high_from_ratio  DOUBLE     1  the usage that counts as high
--   guessed_metrics  VARCHAR[]  metrics of workers under pressure whose name says percent, read as shares of one
WITH step_usage AS (
  SELECT worker, coalesce(rank::VARCHAR, '') AS rank, kv_usage_ratio AS usage, waiting::DOUBLE AS waiting,
    coalesce(elapsed_ns, 1)::DOUBLE AS weight, 'A' AS level,
    NULL::VARCHAR AS guessed
  FROM steps
  WHERE kv_usage_ratio IS NOT NULL
),
told_sample AS (
  SELECT *, coalesce(labels ->> 'engine', labels ->> 'dp_rank', '') AS rank
  FROM samples
),
waiting_sample AS (
  SELECT source, record, worker, rank, time_ns, max(value) AS waiting
  FROM told_sample
  WHERE regexp_matches(
    metric, '(^|[:_])(num_requests_waiting|num_queue_reqs|waiting_requests|requests_waiting)$'
  )
  GROUP BY source, record, worker, rank, time_ns
),
sample_usage AS (
  SELECT m.worker, m.rank, m.usage_ratio AS usage,
    -- one line or one scrape says both
    w.waiting, 1.0 AS weight, 'D' AS level, CASE WHEN m.unit_guessed THEN m.metric END AS guessed
  FROM kv_usage_samples AS m
  LEFT JOIN (
    SELECT source, worker, rank, time_ns, max(waiting) AS waiting
    FROM waiting_sample
    GROUP BY source, worker, rank, time_ns
  ) AS w ON w.source = m.source AND w.worker = m.worker AND w.rank = m.rank AND w.time_ns IS NOT DISTINCT FROM m.time_ns
  WHERE m.usage_ratio IS NOT NULL
    AND m.worker NOT IN (SELECT worker FROM step_usage)
),
usage_seen AS (
  SELECT * FROM step_usage
  UNION ALL
  SELECT * FROM sample_usage
),
rank_pressure AS (
  SELECT worker, rank, any_value(level) AS level, count(*) AS observations,
    -- steps without any duration say nothing of how long it was so
    coalesce(sum(weight) FILTER (usage >= high_ratio), 0) / nullif(sum(weight), 0) AS high_time_ratio,
    quantile_cont(usage, 0.5) AS usage_p50_ratio, max(usage) AS usage_max_ratio,
    max(waiting) FILTER (usage >= high_ratio) AS waiting_max, any_value(guessed) AS guessed
  FROM usage_seen
  GROUP BY worker, rank
),
pressed AS (
  -- figures without a rank beside those of ranks (a log's line of all engines) are of none more
  SELECT w.deployment, p.*, count(*) FILTER (p.rank <> '') OVER (PARTITION BY p.worker) AS ranks
  FROM rank_pressure AS p
  JOIN workers AS w ON w.worker = p.worker
  QUALIFY p.high_time_ratio >= min_time_ratio OR (p.high_time_ratio > 0 AND p.waiting_max > 0)
),
worker_list AS (
  SELECT deployment, list(worker ORDER BY high_time_ratio DESC, worker) AS workers,
    coalesce(sum(ranks) FILTER (ranks > 1), 0)::BIGINT AS ranks
  FROM (
    SELECT deployment, worker, max(high_time_ratio) AS high_time_ratio, max(ranks) AS ranks
    FROM pressed
    GROUP BY deployment, worker
  )
  GROUP BY deployment
),
deployment_pressure AS (
  SELECT deployment, max(level) AS level, max(high_time_ratio) AS high_time_ratio,
    min_by(usage_p50_ratio, (-high_time_ratio, worker, rank)) AS usage_p50_ratio,
    max(usage_max_ratio) AS usage_max_ratio, max(waiting_max) AS waiting_max,
    sum(observations)::BIGINT AS observations,
    count(*) FILTER (ranks > 1 AND rank <> '') AS ranks_pressed,
    list(DISTINCT guessed ORDER BY guessed) FILTER (guessed IS NOT NULL) AS guessed_metrics
  FROM pressed
  GROUP BY deployment
)
SELECT d.deployment,
  CASE WHEN waiting_max > 0 THEN 'warning' ELSE 'info' END AS severity,
  NULL::DOUBLE AS cost_s, level, high_time_ratio AS value, '1' AS unit,
  NULL::DOUBLE AS interval_low, NULL::DOUBLE AS interval_high,
  high_time_ratio AS share, NULL::BIGINT AS requests, l.workers,
  []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  coalesce(s.paths, []) AS sources,
  usage_p50_ratio, usage_max_ratio, waiting_max, observations, ranks_pressed, l.ranks,
  high_ratio::DOUBLE AS high_from_ratio, coalesce(guessed_metrics, []) AS guessed_metrics
FROM deployment_pressure AS d
LEFT JOIN worker_list AS l ON l.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = d.deployment
  AND s.evidence = CASE WHEN d.level = 'A' THEN 'steps' ELSE 'samples' END
