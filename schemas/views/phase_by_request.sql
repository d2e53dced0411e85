-- phase_by_request: how long each request spent in each kind of work or wait.
--
-- grain:   one row per (request, phase, detail) that occurs
-- needs:   phase_sums, request_values
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
  r.deployment,
  s.request,
  r.mode,
  r.counted,
  s.phase,
  s.detail,
  s.duration_ns / 1e6 AS duration_ms,
  s.ttft_part_ns / 1e6 AS ttft_part_ms,
  s.duration_ns,
  s.ttft_part_ns,
  s.basis,
  s.placed_ns / 1e6 AS placed_ms,
  s.bound_ns / 1e6 AS bound_ms
FROM phase_sums s
JOIN request_values r ON r.request = s.request
