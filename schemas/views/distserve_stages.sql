-- distserve_stages: the five stages of a split request as DistServe's evaluation computes them from
-- seven instants.
--
-- Zhong et al. 2024 (DistServe, OSDI '24) stamp: issued, context begin and end, migration begin and
-- end, decoding begin and end. 1 prefill queuing = context begin - issued; 2 prefill execution =
-- context end - context begin; 3 transmission = migration end - migration begin; 4 decoding queuing =
-- (migration begin - context end) + (decoding begin - migration end); 5 decoding execution = decoding
-- end - decoding begin. Stage 4 therefore holds the wait in front of the transfer (the bridge queue:
-- no KV space on the decode side), stage 5 all stalls between steps; a transfer that begins before
-- its prefill ends makes the first part of stage 4 negative, kept as it is. Here: issued = start of
-- the request's window, context = first to last instant of its prefill phases, migration = first
-- start to last end of its completed movements from prefill to decode, decoding = first to last
-- instant of its decode phases. Stages 1 to 5 add up to decoding end - issued.
--
-- grain:   one row per completed request of which all seven instants are known
-- needs:   request_values, phases, transfer_times
-- columns:
--   deployment             VARCHAR  deployment
--   request                VARCHAR  the request
--   issued_ns              BIGINT   ns  start of the request's window
--   context_begin_ns       BIGINT   ns  first instant of its prefill
--   context_end_ns         BIGINT   ns  last instant of its prefill
--   migration_begin_ns     BIGINT   ns  start of the first movement
--   migration_end_ns       BIGINT   ns  end of the last movement
--   decoding_begin_ns      BIGINT   ns  first instant of its decoding
--   decoding_end_ns        BIGINT   ns  last instant of its decoding
--   prefill_queuing_ms     DOUBLE   ms  stage 1
--   prefill_execution_ms   DOUBLE   ms  stage 2
--   transmission_ms        DOUBLE   ms  stage 3
--   decoding_queuing_ms    DOUBLE   ms  stage 4, the wait in front of the transfer among it
--   decoding_execution_ms  DOUBLE   ms  stage 5
--   bridge_ms              DOUBLE   ms  part of stage 4 between prefill and transfer
--   placed                 BOOLEAN  prefill or decode is laid out from durations, not measured
WITH migration AS (
  SELECT request, min(start_ns) AS migration_begin_ns, max(end_ns) AS migration_end_ns
  FROM transfer_times
  WHERE direction = 'prefill_to_decode' AND coalesce(outcome, 'completed') = 'completed'
    AND request IS NOT NULL
  GROUP BY request
  HAVING count(start_ns) = count(*) AND count(end_ns) = count(*)
),
work AS (
  SELECT p.request,
    min(p.start_ns) FILTER (p.phase = 'prefill') AS context_begin_ns,
    max(p.end_ns) FILTER (p.phase = 'prefill') AS context_end_ns,
    min(p.start_ns) FILTER (p.phase = 'decode') AS decoding_begin_ns,
    max(p.end_ns) FILTER (p.phase = 'decode') AS decoding_end_ns,
    bool_or(p.basis NOT IN ('measured', 'reported')) AS placed
  FROM phases AS p
  SEMI JOIN migration AS m ON m.request = p.request
  WHERE p.phase IN ('prefill', 'decode')
  GROUP BY p.request
)
SELECT r.deployment, r.request, r.start_ns AS issued_ns, w.context_begin_ns, w.context_end_ns,
  m.migration_begin_ns, m.migration_end_ns, w.decoding_begin_ns, w.decoding_end_ns,
  (w.context_begin_ns - r.start_ns) / 1e6 AS prefill_queuing_ms,
  (w.context_end_ns - w.context_begin_ns) / 1e6 AS prefill_execution_ms,
  (m.migration_end_ns - m.migration_begin_ns) / 1e6 AS transmission_ms,
  ((m.migration_begin_ns - w.context_end_ns) + (w.decoding_begin_ns - m.migration_end_ns)) / 1e6
    AS decoding_queuing_ms,
  (w.decoding_end_ns - w.decoding_begin_ns) / 1e6 AS decoding_execution_ms,
  (m.migration_begin_ns - w.context_end_ns) / 1e6 AS bridge_ms,
  coalesce(w.placed, false) AS placed
FROM request_values AS r
JOIN migration AS m ON m.request = r.request
JOIN work AS w ON w.request = r.request
WHERE r.counted AND r.mode = 'disaggregated' AND r.start_ns IS NOT NULL
  AND w.context_begin_ns IS NOT NULL AND w.decoding_begin_ns IS NOT NULL
