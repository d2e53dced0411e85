-- engine_stall: an engine had requests running and counted no token for a while.
--
-- Read from what engines say periodically: throughputs of prompt and answer that are both 0, or
-- token counters that stand still, while requests run. Where only one of prompt and answer is told, nothing is said:
-- the other may well move. Consecutive observations make a stretch;
-- stretches of min_s and more count. So do the seconds in which an engine says itself that a worker took
-- no work (events of kind stall), where requests ran by the observation before: at the start that is
-- ordinary. Where an engine has both, the longer of the two is told. A hung engine looks so; a compilation, a paused process or one
-- very long prompt does too, so it is said what was seen, not why. Critical where the last
-- observations of the worker are such a stretch of a minute or more: it did not come back. Level D.
--
-- grain:   one row per deployment
-- needs:   samples, events, workers, deployment_sources
-- params:
--   min_s          30         a shorter stretch is not counted
-- columns:
--   deployment     VARCHAR    deployment
--   severity       VARCHAR    critical or warning
--   cost_s         DOUBLE     s  NULL: how many requests waited through it is known only as a number that ran
--   level          VARCHAR    D
--   value          DOUBLE     s  time without a token, summed over engines
--   unit           VARCHAR    s
--   interval_low   DOUBLE     NULL
--   interval_high  DOUBLE     NULL
--   share          DOUBLE     NULL
--   requests       BIGINT     NULL: which requests ran is not said
--   workers        VARCHAR[]  workers with such stretches, longest first
--   culprits       STRUCT(request VARCHAR, "value" DOUBLE)[]  empty
--   sources        VARCHAR[]  files that the observations come from
--   stretches      BIGINT     stretches
--   longest_s      DOUBLE     s  the longest of them
--   first_ns       BIGINT     ns  end of the first observation without a token
--   running        DOUBLE     most requests that ran in them
--   lasting        BIGINT     engines that were still so when their observations end
--   lines          BIGINT     of the stretches told here, lines in which the engine says it itself
WITH told AS (
  SELECT source, worker, labels, time_ns, interval_ns, value,
    regexp_matches(metric, '(^|[:_])num_requests_running$') AS is_running,
    regexp_matches(metric, 'avg_(prompt|generation)_throughput_toks_per_s$') AS is_rate,
    regexp_matches(metric, '[:_](prompt|generation)_tokens_total$') AS is_counter,
    regexp_matches(metric, 'prompt_(throughput|tokens)') AS is_prompt
  FROM samples
  WHERE time_ns IS NOT NULL AND worker IS NOT NULL
    AND regexp_matches(
      metric,
      '(num_requests_running|avg_(prompt|generation)_throughput_toks_per_s|(prompt|generation)_tokens_total)$'
    )
),
point AS (
  -- one line or one scrape
  SELECT worker, labels, time_ns, max(value) FILTER (is_running) AS running,
    max(value) FILTER (is_rate AND is_prompt) AS prompt_rate,
    max(value) FILTER (is_rate AND NOT is_prompt) AS answer_rate,
    sum(value) FILTER (is_counter AND is_prompt) AS prompt_tokens,
    sum(value) FILTER (is_counter AND NOT is_prompt) AS answer_tokens,
    max(interval_ns) FILTER (is_rate) AS interval_ns
  FROM told
  GROUP BY worker, labels, time_ns
),
step AS (
  SELECT *, time_ns - lag(time_ns) OVER series AS since_ns,
    prompt_tokens - lag(prompt_tokens) OVER series AS prompt_made,
    answer_tokens - lag(answer_tokens) OVER series AS answer_made, lag(running) OVER series AS ran_before
  FROM point
  WHERE running IS NOT NULL
  WINDOW series AS (PARTITION BY worker, labels ORDER BY time_ns)
),
judged AS (
  SELECT *, coalesce(interval_ns, since_ns, 0) AS width_ns,
    -- both are told, in one way at least, and all that is told is 0
    coalesce(
      running > 0 AND (ran_before > 0 OR prompt_rate + answer_rate IS NOT NULL)
      AND coalesce(prompt_rate, prompt_made) = 0 AND coalesce(prompt_made, 0) = 0
      AND coalesce(answer_rate, answer_made) = 0 AND coalesce(answer_made, 0) = 0,
      false
    ) AS silent
  FROM step
),
island AS (
  SELECT *, row_number() OVER (PARTITION BY worker, labels ORDER BY time_ns)
    - row_number() OVER (PARTITION BY worker, labels, silent ORDER BY time_ns) AS island,
    max(time_ns) OVER (PARTITION BY worker, labels) AS last_ns
  FROM judged
),
silence AS (
  SELECT worker, labels, sum(width_ns) / 1e9 AS seconds, min(time_ns) AS first_ns,
    max(running) AS running, bool_or(time_ns = last_ns) AS lasting
  FROM island
  WHERE silent
  GROUP BY worker, labels, island
),
said AS (
  -- the engine's own lines; each tells of the time before it
  SELECT e.worker, e.time_ns, e.resolution_ns / 1e9 AS seconds, o.running,
    max(o.last_ns) OVER (PARTITION BY e.worker) AS last_ns
  FROM events AS e
  ASOF JOIN (
    SELECT worker, time_ns, sum(running) AS running, max(max(time_ns)) OVER (PARTITION BY worker) AS last_ns
    FROM point
    WHERE running IS NOT NULL
    GROUP BY worker, time_ns
  ) AS o ON o.worker = e.worker AND o.time_ns <= e.time_ns
  WHERE e.kind = 'stall' AND o.running > 0
),
told_stretch AS (
  SELECT worker, seconds, first_ns, running, lasting, 0 AS lines
  FROM silence
  WHERE seconds >= min_s
  UNION ALL
  SELECT worker, sum(seconds), min(time_ns) - max(seconds * 1e9)::BIGINT, max(running),
    max(time_ns) >= max(last_ns), count(*)
  FROM said
  GROUP BY worker
),
stretch AS (
  SELECT *,
    sum(seconds) FILTER (lines = 0) OVER (PARTITION BY worker) AS by_samples,
    sum(seconds) FILTER (lines > 0) OVER (PARTITION BY worker) AS by_lines
  FROM told_stretch
  QUALIFY CASE WHEN coalesce(by_lines, 0) > coalesce(by_samples, 0) THEN lines > 0 ELSE lines = 0 END
),
worker_list AS (
  SELECT deployment, list(worker ORDER BY seconds DESC, worker) AS workers
  FROM (
    SELECT w.deployment, s.worker, sum(s.seconds) AS seconds
    FROM stretch AS s
    JOIN workers AS w ON w.worker = s.worker
    GROUP BY ALL
  )
  GROUP BY deployment
),
total AS (
  SELECT w.deployment, sum(s.seconds) AS value, count(*) AS stretches, max(s.seconds) AS longest_s,
    min(s.first_ns) AS first_ns, max(s.running) AS running,
    count(*) FILTER (s.lasting) AS lasting, sum(s.lines)::BIGINT AS lines,
    coalesce(max(s.seconds) FILTER (s.lasting), 0) AS lasting_s
  FROM stretch AS s
  JOIN workers AS w ON w.worker = s.worker
  GROUP BY w.deployment
)
SELECT t.deployment, CASE WHEN t.lasting_s >= 60 THEN 'critical' ELSE 'warning' END AS severity,
  NULL::DOUBLE AS cost_s, 'D' AS level, t.value, 's' AS unit,
  NULL::DOUBLE AS interval_low, NULL::DOUBLE AS interval_high, NULL::DOUBLE AS share,
  NULL::BIGINT AS requests, w.workers,
  []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  coalesce(s.paths, []) AS sources,
  t.stretches, t.longest_s, t.first_ns, t.running, t.lasting, t.lines
FROM total AS t
JOIN worker_list AS w ON w.deployment IS NOT DISTINCT FROM t.deployment
LEFT JOIN deployment_sources AS s ON s.deployment = t.deployment AND s.evidence = 'samples'
