-- counter_intervals: what a worker's periodic counters say of each stretch of time: prompt tokens, tokens made, mean gap.
--
-- From scrapes (growth of counters between one and the next, summed over bins; a value below the one
-- before it is a restart and counts from 0), or, where a worker has more of them, from log lines that
-- state rates over an interval. Only workers that may do both prefill and decode. Level D.
--
-- grain:   one row per (worker, stretch) with prompt tokens or tokens made known
-- needs:   samples, workers
-- params:
--   bin_s  5  seconds of a stretch of scrapes
-- columns:
--   deployment     VARCHAR          deployment
--   worker         VARCHAR          the worker
--   basis          VARCHAR          scrapes or lines
--   start_ns       BIGINT   ns      start of the stretch
--   seconds        DOUBLE           its length
--   prompt_tokens  DOUBLE   tokens  prompt tokens computed; NULL unknown
--   made_tokens    DOUBLE   tokens  tokens made; NULL unknown
--   gap_mean_ms    DOUBLE   ms      mean gap between tokens; NULL unknown
--   running        DOUBLE           requests running, mean of what was seen; NULL unknown
WITH told AS (
  SELECT w.deployment, s.worker, s.time_ns, s.source, s.record, s.metric, s.labels, s.value,
    s.interval_ns,
    CASE WHEN regexp_matches(s.metric, '(^|[:_])prompt_tokens(_total)?$') THEN 'prompt'
      WHEN regexp_matches(s.metric, '(^|[:_])(generation|output)_tokens(_total)?$') THEN 'made'
      WHEN regexp_matches(
        s.metric, '(^|[:_])inter_token_latency_seconds_sum$|(^|:)time_per_output_token_seconds_sum$'
      ) THEN 'gap_s'
      WHEN regexp_matches(
        s.metric, '(^|[:_])inter_token_latency_seconds_count$|(^|:)time_per_output_token_seconds_count$'
      ) THEN 'gaps'
      WHEN regexp_matches(s.metric, 'prompt_throughput(_toks_per_s)?$') THEN 'prompt_rate'
      WHEN regexp_matches(s.metric, 'generation_throughput(_toks_per_s)?$') THEN 'made_rate'
      WHEN regexp_matches(s.metric, '(num_requests_running|num_running_reqs|requests_running)$')
        THEN 'running' END AS what
  FROM samples AS s
  JOIN workers AS w ON w.worker = s.worker
  WHERE s.time_ns IS NOT NULL AND isfinite(s.value) AND (w.role IS NULL OR w.role = 'aggregated')
),
grown AS (
  SELECT *, lag(value) OVER series AS before, lag(time_ns) OVER series AS before_ns
  FROM told
  WHERE what IN ('prompt', 'made', 'gap_s', 'gaps')
  WINDOW series AS (PARTITION BY worker, metric, labels ORDER BY time_ns, source, record)
),
scraped AS (
  SELECT deployment, worker, 'scrapes' AS basis, (time_ns // (bin_s * 1e9)::BIGINT) AS bin,
    min(before_ns) AS start_ns, (max(time_ns) - min(before_ns)) / 1e9 AS seconds,
    sum(CASE WHEN value < before THEN value ELSE value - before END) FILTER (what = 'prompt')
      AS prompt_tokens,
    sum(CASE WHEN value < before THEN value ELSE value - before END) FILTER (what = 'made')
      AS made_tokens,
    1e3 * sum(CASE WHEN value < before THEN value ELSE value - before END) FILTER (what = 'gap_s')
      / nullif(sum(CASE WHEN value < before THEN value ELSE value - before END)
        FILTER (what = 'gaps'), 0) AS gap_mean_ms
  FROM grown
  -- scrapes farther apart than two stretches say nothing of any one
  WHERE before IS NOT NULL AND time_ns > before_ns AND time_ns - before_ns <= 2e9 * bin_s
  GROUP BY deployment, worker, bin
),
ran AS (
  SELECT worker, (time_ns // (bin_s * 1e9)::BIGINT) AS bin, avg(value) AS running
  FROM told
  WHERE what = 'running' AND interval_ns IS NULL
  GROUP BY worker, bin
),
line AS (
  SELECT deployment, worker, 'lines' AS basis, time_ns, source, record, max(interval_ns) AS length_ns,
    max(value) FILTER (what = 'prompt_rate') AS prompt_rate,
    max(value) FILTER (what = 'made_rate') AS made_rate,
    max(value) FILTER (what = 'running') AS running
  FROM told
  WHERE what IN ('prompt_rate', 'made_rate', 'running')
  GROUP BY deployment, worker, time_ns, source, record, labels
),
stretch AS (
  SELECT s.* EXCLUDE (bin), r.running
  FROM scraped AS s
  LEFT JOIN ran AS r ON r.worker = s.worker AND r.bin = s.bin
  UNION ALL
  SELECT deployment, worker, basis, time_ns - length_ns, length_ns / 1e9,
    prompt_rate * length_ns / 1e9, made_rate * length_ns / 1e9, NULL, running
  FROM line
  WHERE length_ns > 0
),
known AS (
  SELECT *, count(*) OVER (PARTITION BY worker, basis) AS n
  FROM stretch
  WHERE coalesce(prompt_tokens, made_tokens) IS NOT NULL
)
SELECT deployment, worker, basis, start_ns, seconds, prompt_tokens, made_tokens, gap_mean_ms, running
FROM known
QUALIFY dense_rank() OVER (PARTITION BY worker ORDER BY n DESC, basis DESC) = 1
