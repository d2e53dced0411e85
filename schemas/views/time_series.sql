-- time_series: what went on in each stretch of time: arrivals, latency, failures, load.
--
-- Requests belong to the stretch in which they started. The deployment's time, from its first to
-- its last request, is cut into equal stretches.
--
-- grain:   one row per (deployment, worker, stretch) with a request; worker NULL: all of them
-- needs:   request_values, interference_steps, interference_step_losses
-- params:
--   bins  40  stretches
-- columns:
--   deployment   VARCHAR           deployment
--   worker       VARCHAR           decode worker; NULL: the whole deployment
--   bin          BIGINT            number of the stretch, from 0
--   start_ns     BIGINT   ns       its start
--   end_ns       BIGINT   ns       its end
--   arrivals     BIGINT            requests that started in it
--   arrival_rate  DOUBLE  requests/s  requests a second
--   ttft_p50_ms  DOUBLE   ms       median TTFT
--   ttft_p90_ms  DOUBLE   ms       90th percentile
--   tpot_p50_ms  DOUBLE   ms       median time per output token
--   failed       BIGINT            of the arrivals, those that failed
--   in_flight    DOUBLE  1  requests in flight in the mean, were each in flight from its start in its stretch
--   prompt_p50_tokens  BIGINT  tokens  median prompt
--   lost_s       DOUBLE   s        decode seconds lost to prefill, from engine steps; NULL unknown
WITH deployment_time AS (
  SELECT deployment, min(start_ns) AS first_ns,
    greatest(max(start_ns) - min(start_ns) + 1, 1) AS length_ns
  FROM request_values
  GROUP BY deployment
),
numbered AS (
  SELECT r.*, t.first_ns, t.length_ns,
    floor((r.start_ns - t.first_ns) / t.length_ns * bins)::BIGINT AS bin
  FROM request_values AS r
  JOIN deployment_time AS t ON t.deployment IS NOT DISTINCT FROM r.deployment
  WHERE r.start_ns IS NOT NULL
),
counted AS (
  SELECT deployment, decode_worker AS worker, GROUPING(decode_worker) AS whole, bin,
    any_value(first_ns) AS first_ns, any_value(length_ns) AS length_ns,
    count(*) AS arrivals,
    quantile_cont(ttft_ms, 0.5) FILTER (counted) AS ttft_p50_ms,
    quantile_cont(ttft_ms, 0.9) FILTER (counted) AS ttft_p90_ms,
    quantile_cont(pace_ms, 0.5) FILTER (counted) AS tpot_p50_ms,
    count(*) FILTER (outcome = 'failed') AS failed,
    sum(coalesce(e2e_ms, (end_ns - start_ns) / 1e6)) AS busy_ms,
    quantile_disc(prompt_tokens, 0.5) AS prompt_p50_tokens
  FROM numbered
  GROUP BY GROUPING SETS ((deployment, bin), (deployment, decode_worker, bin))
),
lost AS (
  SELECT s.deployment, s.worker, GROUPING(s.worker) AS whole,
    floor((l.start_ns - t.first_ns) / t.length_ns * bins)::BIGINT AS bin, sum(l.lost_s) AS lost_s
  FROM interference_step_losses AS l
  JOIN interference_steps AS s ON s.worker = l.worker AND s.rank IS NOT DISTINCT FROM l.rank
  JOIN deployment_time AS t ON t.deployment IS NOT DISTINCT FROM s.deployment
  GROUP BY GROUPING SETS (
    (s.deployment, floor((l.start_ns - t.first_ns) / t.length_ns * bins)),
    (s.deployment, s.worker, floor((l.start_ns - t.first_ns) / t.length_ns * bins))
  )
)
SELECT c.deployment, c.worker, c.bin,
  c.first_ns + (c.bin * c.length_ns / bins)::BIGINT AS start_ns,
  c.first_ns + ((c.bin + 1) * c.length_ns / bins)::BIGINT AS end_ns,
  c.arrivals, c.arrivals / (c.length_ns / bins / 1e9) AS arrival_rate,
  c.ttft_p50_ms, c.ttft_p90_ms, c.tpot_p50_ms, c.failed,
  c.busy_ms / (c.length_ns / bins / 1e6) AS in_flight,
  c.prompt_p50_tokens, l.lost_s
FROM counted AS c
LEFT JOIN lost AS l ON l.deployment IS NOT DISTINCT FROM c.deployment
  AND l.worker IS NOT DISTINCT FROM c.worker AND l.whole = c.whole AND l.bin = c.bin
WHERE c.whole = 1 OR c.worker IS NOT NULL
