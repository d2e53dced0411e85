-- phase_totals: how much time all requests together spent in each kind of work or wait.
--
-- Summed once for all who ask for time by phase. HUGEINT: sums of nanoseconds over any number of requests.
--
-- grain:   one row per (deployment, mode, counted, phase, detail) that occurs
-- needs:   phase_sums
-- columns:
--   deployment    VARCHAR        deployment
--   mode          VARCHAR        aggregated, disaggregated or unknown
--   counted       BOOLEAN        the requests enter the latency and phase figures (view counted_requests)
--   phase         VARCHAR        phase
--   detail        VARCHAR        detail
--   requests      BIGINT         requests in which it occurs
--   duration_ns   HUGEINT   ns   time spent
--   ttft_part_ns  HUGEINT   ns   of it before the first delivered token; NULL when that is unknown of all
--   bound_ns      HUGEINT   ns   of it an upper bound
--   weakness      INTEGER        of the weakest among its pieces: 1 measured, 2 reported, 3 placed, 4 inferred, 5 upper_bound
--   durations_ms  DOUBLE[]  ms   time spent, of each of the requests
SELECT deployment, mode, counted, phase, detail,
  count(*) AS requests,
  sum(duration_ns) AS duration_ns,
  sum(ttft_part_ns) AS ttft_part_ns,
  sum(bound_ns) AS bound_ns,
  max(
    CASE basis
      WHEN 'measured' THEN 1 WHEN 'reported' THEN 2 WHEN 'placed' THEN 3
      WHEN 'inferred' THEN 4 WHEN 'upper_bound' THEN 5
    END
  ) AS weakness,
  list(duration_ns / 1e6) AS durations_ms
FROM phase_sums
GROUP BY deployment, mode, counted, phase, detail
