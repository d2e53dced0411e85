-- transfer_counters: what workers' counters and periodic log lines tell of KV movements, all requests in one.
--
-- total_s sums the durations of all movements; those at the same time, and those of several ranks
-- for one request, count each. So it is more than the time that any request can have waited for its
-- transfer, and bytes over total_s is a mean rate of single movements, not the speed of a link.
-- Where counters and lines tell of the same worker, what tells of more movements is taken. Counters
-- grow: between known instants a smaller value is a restart; among unknown ones the greatest less the
-- smallest counts, and one alone counts from the start of the process. Series of dumps that name no
-- process are left out: two of them may be the same process.
--
-- grain:   one row per worker whose counters or lines tell of a movement
-- needs:   samples, workers
-- columns:
--   deployment   VARCHAR  deployment
--   worker       VARCHAR  the worker
--   basis        VARCHAR  counters or lines
--   transfers    BIGINT   movements (each rank's own counts)
--   total_s      DOUBLE   s      sum of their durations; NULL unknown
--   bytes        BIGINT   bytes  bytes moved; NULL unknown
--   since_start  BOOLEAN  counted from the start of the process, not of these data
WITH told_sample AS (
  SELECT w.deployment, s.worker, s.source, s.record, s.metric, s.labels, s.value, s.time_ns,
    regexp_extract(
      s.metric,
      '(xfer_time_us|xfer_time_seconds|kv_transfer_latency_seconds|bytes_transferred'
      || '|kv_transfer_bytes|rx_bytes)_(sum|count|total)$', ['quantity', 'part']
    ) AS name
  FROM samples AS s
  JOIN workers AS w ON w.worker = s.worker
  WHERE isfinite(s.value) AND w.role IS NOT NULL
    AND regexp_matches(s.metric, '(xfer_time|kv_transfer|bytes_transferred|rx_bytes)')
),
grown AS (
  SELECT *, lag(value) OVER (PARTITION BY worker, metric, labels ORDER BY time_ns, source, record) AS before,
    count(*) OVER of_series AS seen, count(time_ns) OVER of_series AS timed,
    min(value) OVER of_series AS least, max(value) OVER of_series AS most
  FROM told_sample
  WHERE name.quantity != ''
  WINDOW of_series AS (PARTITION BY worker, metric, labels)
),
series AS (
  SELECT deployment, worker, metric, labels, any_value(name.quantity) AS quantity,
    any_value(name.part) AS part, bool_and(seen = 1) AS since_start,
    CASE WHEN any_value(seen) = 1 THEN any_value(value)
      WHEN any_value(timed) < any_value(seen) THEN any_value(most - least)
      ELSE sum(CASE WHEN value < before THEN value ELSE value - before END) END AS added
  FROM grown
  GROUP BY deployment, worker, metric, labels
),
metric_total AS (
  SELECT deployment, worker, metric, any_value(quantity) AS quantity, any_value(part) AS part,
    bool_or(since_start) AS since_start, sum(added) AS added
  FROM series
  GROUP BY deployment, worker, metric
),
counted AS (
  -- several libraries may count the same movements: the greatest of a kind, not their sum
  SELECT deployment, worker, 'counters' AS basis,
    max(added) FILTER (part = 'count')::BIGINT AS transfers,
    max(added * CASE WHEN quantity = 'xfer_time_us' THEN 1e-6 ELSE 1 END)
      FILTER (part = 'sum' AND regexp_matches(quantity, 'time|latency')) AS total_s,
    max(added) FILTER (
      part IN ('sum', 'total') AND regexp_matches(quantity, 'bytes')
    )::BIGINT AS bytes,
    bool_or(since_start) AS since_start
  FROM metric_total
  GROUP BY deployment, worker
),
line AS (
  SELECT w.deployment, s.worker, s.source, s.record, s.labels,
    max(value) FILTER (metric = 'log:kv_num_successful_transfers') AS n,
    max(value) FILTER (metric = 'log:kv_avg_xfer_time_ms') AS mean_ms,
    max(value) FILTER (metric = 'log:kv_avg_mb_per_transfer') AS mean_mib
  FROM samples AS s
  JOIN workers AS w ON w.worker = s.worker
  WHERE metric IN (
    'log:kv_num_successful_transfers', 'log:kv_avg_xfer_time_ms', 'log:kv_avg_mb_per_transfer'
  ) AND isfinite(value)
  GROUP BY ALL
),
said AS (
  SELECT deployment, worker, 'lines' AS basis, sum(n)::BIGINT AS transfers,
    CASE WHEN count(mean_ms) FILTER (n > 0) = count(*) FILTER (n > 0)
      THEN sum(n * mean_ms) / 1e3 END AS total_s,
    CASE WHEN count(mean_mib) FILTER (n > 0) = count(*) FILTER (n > 0)
      THEN (sum(n * mean_mib) * 1048576)::BIGINT END AS bytes,
    false AS since_start
  FROM line
  GROUP BY deployment, worker
),
known AS (
  FROM counted
  UNION ALL BY NAME
  FROM said
)
SELECT deployment, worker, basis, transfers, total_s, bytes, since_start
FROM known
WHERE transfers > 0
QUALIFY row_number() OVER (
  PARTITION BY worker ORDER BY transfers DESC, since_start, basis
) = 1
