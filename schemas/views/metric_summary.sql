-- metric_summary: means of histograms and ranges of gauges, for data that hold metrics and no requests.
--
-- A histogram gives its mean only: sum over count. Between scrapes both grow; a value below the one
-- before it is a restart and counts from 0. One scrape alone gives the mean since the start of the
-- process, and so do scrapes of unknown times. No quantile is made of means. Gauges are what a scrape happened to see: highs between
-- scrapes are missed. Only metrics of requests, tokens, queues, caches, speculation and transfers; those that no
-- request touched are left out, but for waiting requests: that none waited while some ran is an answer.
-- Level D: no metric names a request.
--
-- grain:   one row per (deployment, metric)
-- needs:   samples, workers
-- columns:
--   deployment   VARCHAR     deployment
--   metric       VARCHAR     name as emitted, for histograms without _sum and _count
--   kind         VARCHAR     mean (of a histogram) or range (of a gauge)
--   unit         VARCHAR     s, ms, us, tokens, MB, a rate (tokens/s, ...), 1 or empty, from the end of the name; `percent` may mean either and gives none
--   count        BIGINT      values behind a mean; samples behind a range
--   mean         DOUBLE      mean
--   low          DOUBLE      smallest sample of a gauge; NULL for histograms
--   high         DOUBLE      largest sample of a gauge; NULL for histograms
--   since_start  BOOLEAN     the mean is since the start of the process (one scrape); NULL for gauges
WITH told_sample AS (
  SELECT w.deployment, s.worker, s.source, s.record, s.metric, s.labels, s.value, s.kind, s.time_ns
  FROM samples AS s
  JOIN workers AS w ON w.worker = s.worker
  WHERE w.deployment IS NOT NULL AND s.value IS NOT NULL AND NOT isnan(s.value)
    -- a mean over positions of a draft means nothing
    -- nor does one over the parts of a gauge that a label tells apart (waiting by reason)
    AND NOT regexp_matches(s.metric, '_(created|info|bucket|position_acceptance_rate|by_[a-z]+)$')
    AND regexp_matches(
      s.metric,
      'token|queue|prefill|decode|latency|ttft|transfer|xfer|kv_|cache|running|waiting|request_duration'
      || '|request.*seconds|inflight|preempt|throughput|accept|draft'
    )
),
grown AS (
  SELECT *, regexp_replace(metric, '_(sum|count)$', '') AS base,
    regexp_extract(metric, '_(sum|count)$', 1) AS part,
    lag(value) OVER series AS before,
    -- scrapes of unknown time have no order: the greatest is taken, as if it were the only one
    count(*) OVER of_series = 1 OR count(time_ns) OVER of_series < count(*) OVER of_series AS alone
  FROM told_sample
  WHERE kind = 'histogram'
  WINDOW series AS (
    PARTITION BY worker, metric, labels ORDER BY time_ns, source, record
  ),
  of_series AS (PARTITION BY worker, metric, labels)
  QUALIFY NOT alone OR row_number() OVER (
    PARTITION BY worker, metric, labels ORDER BY value DESC, source, record
  ) = 1
),
increase AS (
  SELECT deployment, base, part, alone AS since_start,
    CASE WHEN alone OR value < before THEN value ELSE value - before END AS added
  FROM grown
  WHERE alone OR before IS NOT NULL
),
histogram_mean AS (
  SELECT deployment, base AS metric, 'mean' AS kind,
    sum(added) FILTER (part = 'count')::BIGINT AS count,
    sum(added) FILTER (part = 'sum') / nullif(sum(added) FILTER (part = 'count'), 0) AS mean,
    NULL::DOUBLE AS low, NULL::DOUBLE AS high, bool_and(since_start) AS since_start
  FROM increase
  GROUP BY deployment, base
  HAVING sum(added) FILTER (part = 'count') > 0
),
gauge_range AS (
  SELECT deployment, metric, 'range' AS kind, count(*) AS count, avg(value) AS mean,
    min(value) AS low, max(value) AS high, NULL::BOOLEAN AS since_start
  FROM told_sample
  WHERE kind = 'gauge'
  GROUP BY deployment, metric
  QUALIFY max(value) <> 0 OR min(value) <> 0
    OR (
      regexp_matches(metric, '(^|[:_])num_requests_waiting$')
      AND bool_or(max(value) > 0 AND regexp_matches(metric, '(^|[:_])num_requests_running$')) OVER (PARTITION BY deployment)
    )
),
summary AS (
  FROM histogram_mean
  UNION ALL
  FROM gauge_range
)
SELECT deployment, metric, kind,
  CASE WHEN regexp_matches(metric, '_per_(s|sec|second)$')
      THEN CASE regexp_extract(metric, '(tokens|toks|requests|bytes|mb|gb)_per_s', 1)
        WHEN '' THEN '1' WHEN 'toks' THEN 'tokens' WHEN 'mb' THEN 'MB' WHEN 'gb' THEN 'GB'
        ELSE regexp_extract(metric, '(tokens|requests|bytes)_per_s', 1) END || '/s'
    WHEN regexp_matches(metric, '_mb_per_transfer$') THEN 'MB'
    WHEN regexp_matches(metric, '_(seconds|s)$') THEN 's'
    WHEN regexp_matches(metric, '_(microseconds|us)$') THEN 'us'
    WHEN regexp_matches(metric, '_(milliseconds|ms)$') THEN 'ms'
    WHEN regexp_matches(metric, 'tokens$') THEN 'tokens'
    WHEN regexp_matches(metric, '_(perc|ratio|hit_rate|acceptance_rate)$') AND low >= 0 AND high <= 1 THEN '1'
    ELSE '' END AS unit,
  count, mean, low, high, since_start
FROM summary
