-- phase_by_request: how long each request spent in each kind of work or wait.
--
-- grain:   one row per (request, phase, detail) that occurs
-- needs:   phase_sums
-- columns:
--   deployment    VARCHAR         deployment
--   request       VARCHAR         the request
--   mode          VARCHAR         aggregated, disaggregated or unknown
--   counted       BOOLEAN         it enters the latency and phase figures (view counted_requests)
--   phase         VARCHAR         phase
--   detail        VARCHAR         detail
--   duration_ms   DOUBLE   ms     time spent
--   ttft_part_ms  DOUBLE   ms     of it before the first delivered token; NULL when that is unknown
--   duration_ns   BIGINT   ns     time spent, to be summed: whole numbers add up the same in any order
--   ttft_part_ns  BIGINT   ns     of it before the first delivered token
--   basis         VARCHAR         the weakest among its pieces
--   placed_ms     DOUBLE   ms     of it neither measured nor reported
--   bound_ms      DOUBLE   ms     of it an upper bound
SELECT
  deployment,
  request,
  mode,
  counted,
  phase,
  detail,
  duration_ns / 1e6 AS duration_ms,
  ttft_part_ns / 1e6 AS ttft_part_ms,
  duration_ns,
  ttft_part_ns,
  basis,
  placed_ns / 1e6 AS placed_ms,
  bound_ns / 1e6 AS bound_ms
FROM phase_sums
