-- preemption: running requests that were put off, and what it cost where that is known.
--
-- Counted from events, else from counters: increases between samples of one worker, or the total
-- since its start where there is one sample only (counter_total says so). Seconds only where phases
-- know them (detail preempted and prefill_recompute). Severity: warning when requests are known to
-- have lost time or at least one in a hundred was preempted; info otherwise. Level B with phases,
-- else D.
--
-- grain:   one row per deployment
-- needs:   events, samples, workers, requests, phase_by_request, deployment_sources
-- when:    EXISTS (FROM samples) OR EXISTS (FROM events WHERE kind = 'preemption')
--          OR EXISTS (FROM phase_sums WHERE detail IN ('preempted', 'prefill_recompute'))
-- columns:
--   deployment     VARCHAR    deployment
--   severity       VARCHAR    warning or info
--   cost_s         DOUBLE     s  seconds preempted and recomputing; NULL unknown
--   level          VARCHAR    B or D
--   value          DOUBLE     preemptions
--   unit           VARCHAR    preemptions
--   interval_low   DOUBLE     NULL
--   interval_high  DOUBLE     NULL
--   share          DOUBLE     value over the requests of the deployment (one request can be preempted several times)
--   requests       BIGINT     requests known to be preempted; NULL where events name none
--   workers        VARCHAR[]  workers with preemptions, most first
--   culprits       STRUCT(request VARCHAR, "value" DOUBLE)[]  victims that lost most; value: seconds
--   sources        VARCHAR[]  files that events or samples come from
--   from_events    BIGINT     preemptions that events tell of
--   from_counters  DOUBLE     increase of preemption counters; NULL without counters
--   counter_total  BOOLEAN    from_counters is a total since the start of a worker, not of this period
WITH worker_events AS (
  SELECT worker, sum(coalesce(count, 1))::DOUBLE AS events, count(DISTINCT request_id) AS named
  FROM events
  WHERE kind = 'preemption'
  GROUP BY worker
),
counter_step AS (
  SELECT worker, metric, labels, value,
    value - lag(value) OVER (
      PARTITION BY worker, metric, labels ORDER BY time_ns NULLS LAST, source, record
    ) AS increase,
    -- scrapes of unknown time have no order
    count(time_ns) OVER (PARTITION BY worker, metric, labels)
      < count(*) OVER (PARTITION BY worker, metric, labels) AS unordered
  FROM samples
  WHERE regexp_matches(metric, 'preemptions?(_total)?$') AND coalesce(kind, 'counter') = 'counter'
),
counter_series AS (
  SELECT worker, count(increase) = 0 AS single,
    CASE WHEN count(increase) = 0 THEN max(value)
      WHEN bool_or(unordered) THEN max(value) - min(value)
      ELSE sum(greatest(increase, 0)) END AS increase
  FROM counter_step
  GROUP BY worker, metric, labels
),
worker_counters AS (
  SELECT worker, sum(increase) AS counted, bool_or(single AND increase > 0) AS counter_total
  FROM counter_series
  GROUP BY worker
),
worker_preemptions AS (
  SELECT w.deployment, w.worker, e.events, e.named, c.counted, c.counter_total,
    -- both tell of the same preemptions
    coalesce(e.events, c.counted, 0) AS preemptions
  FROM workers AS w
  LEFT JOIN worker_events AS e ON e.worker = w.worker
  LEFT JOIN worker_counters AS c ON c.worker = w.worker
  WHERE coalesce(e.events, c.counted, 0) > 0
),
request_loss AS (
  SELECT deployment, request, sum(duration_ms) / 1e3 AS lost_s
  FROM phase_by_request
  WHERE detail IN ('preempted', 'prefill_recompute')
  GROUP BY deployment, request
),
deployment_loss AS (
  SELECT deployment, sum(lost_s) AS lost_s, count(*) AS victims,
    min_by({'request': request, 'value': lost_s}, (-lost_s, request), 5)
      FILTER (lost_s IS NOT NULL) AS culprits
  FROM request_loss
  WHERE lost_s > 0
  GROUP BY deployment
),
deployment_count AS (
  SELECT deployment, sum(preemptions) AS preemptions, sum(events)::BIGINT AS from_events,
    sum(counted) AS from_counters,
    coalesce(bool_or(counter_total AND events IS NULL), false) AS counter_total,
    sum(named)::BIGINT AS named, list(worker ORDER BY preemptions DESC, worker) AS workers
  FROM worker_preemptions
  GROUP BY deployment
),
request_count AS (
  SELECT deployment, count(*) AS requests
  FROM requests
  GROUP BY deployment
),
joined AS (
  SELECT coalesce(c.deployment, l.deployment) AS deployment, c.* EXCLUDE (deployment),
    l.* EXCLUDE (deployment), greatest(c.preemptions, l.victims) AS total
  FROM deployment_count AS c
  FULL JOIN deployment_loss AS l ON l.deployment IS NOT DISTINCT FROM c.deployment
)
SELECT j.deployment,
  CASE WHEN lost_s > 0 OR total >= 0.01 * r.requests THEN 'warning' ELSE 'info' END AS severity,
  lost_s AS cost_s,
  CASE WHEN lost_s IS NOT NULL THEN 'B' ELSE 'D' END AS level,
  total::DOUBLE AS value, 'preemptions' AS unit,
  NULL::DOUBLE AS interval_low, NULL::DOUBLE AS interval_high,
  total / nullif(r.requests, 0) AS share,
  coalesce(victims, nullif(named, 0)) AS requests,
  coalesce(workers, []) AS workers,
  coalesce(culprits, []) AS culprits,
  coalesce(s.paths, []) AS sources,
  coalesce(from_events, 0) AS from_events, from_counters,
  coalesce(counter_total, false) AS counter_total
FROM joined AS j
LEFT JOIN request_count AS r ON r.deployment IS NOT DISTINCT FROM j.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = j.deployment AND s.evidence =
  CASE WHEN from_events > 0 THEN 'events' WHEN from_counters > 0 THEN 'samples' ELSE 'requests' END
