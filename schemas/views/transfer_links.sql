-- transfer_links: how each link between workers carried KV: how much, how fast, how many at a time.
--
-- Throughput of a movement is its bytes over its own time; link_bytes_per_second is all bytes over
-- the time during which anything was under way, which is what the link gave. Setup time, bandwidth
-- and contention are fitted (table transfer_fits).
--
-- grain:   one row per link: deployment, source and destination worker, backend, direction
-- needs:   transfer_times, transfer_fits
-- columns:
--   deployment               VARCHAR  deployment
--   source_worker            VARCHAR  where the KV came from; NULL unknown
--   destination_worker       VARCHAR  where it went; NULL unknown
--   backend                  VARCHAR  name of the mover
--   direction                VARCHAR  prefill_to_decode, decode_to_prefill, load or store
--   transfers                BIGINT   movements
--   failed                   BIGINT   of them failed
--   expired                  BIGINT   of them expired
--   bytes                    BIGINT   bytes  bytes of the completed ones; NULL when those of any are unknown
--   bytes_basis              VARCHAR  measured, config or formula; mixed; NULL unknown
--   busy_s                   DOUBLE   s      time during which at least one was under way
--   duration_p50_ms          DOUBLE   ms     median duration of the completed ones
--   duration_p99_ms          DOUBLE   ms     99th percentile
--   bytes_p50                DOUBLE   median size, bytes
--   throughput_p50           DOUBLE   median of bytes over own time, bytes a second
--   link_bytes_per_second    DOUBLE   bytes over busy time; NULL unknown
--   most_at_once             BIGINT   most movements under way at one time
--   setup_ms                 DOUBLE   ms     fitted time of a movement of no bytes; NULL cannot tell
--   setup_low_ms             DOUBLE   ms     95 % interval, lower end
--   setup_high_ms            DOUBLE   ms     upper end
--   bytes_per_second         DOUBLE   fitted bandwidth of large movements; NULL cannot tell
--   bytes_per_second_low     DOUBLE   95 % interval, lower end
--   bytes_per_second_high    DOUBLE   upper end
--   contention_ratio         DOUBLE   1      part of its own time that each other movement in flight adds; NULL cannot tell
--   contention_low_ratio     DOUBLE   1      95 % interval, lower end
--   contention_high_ratio    DOUBLE   1      upper end
--   note                     VARCHAR  what limits the fit
WITH move AS (
  SELECT *,
    max(end_ns) OVER (
      PARTITION BY deployment, source_worker, destination_worker, backend, direction
      ORDER BY start_ns, end_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS covered_until_ns
  FROM transfer_times
),
change AS (
  SELECT deployment, source_worker, destination_worker, backend, direction, start_ns AS time_ns,
    1 AS change
  FROM transfer_times
  WHERE end_ns > start_ns
  UNION ALL
  SELECT deployment, source_worker, destination_worker, backend, direction, end_ns, -1
  FROM transfer_times
  WHERE end_ns > start_ns
),
running AS (
  SELECT deployment, source_worker, destination_worker, backend, direction,
    sum(change) OVER (
      PARTITION BY deployment, source_worker, destination_worker, backend, direction
      ORDER BY time_ns, change ROWS UNBOUNDED PRECEDING
    ) AS active
  FROM change
),
crowd AS (
  SELECT deployment, source_worker, destination_worker, backend, direction,
    max(active)::BIGINT AS most_at_once
  FROM running
  GROUP BY ALL
),
link AS (
  SELECT deployment, source_worker, destination_worker, backend, direction,
    count(*) AS transfers,
    count(*) FILTER (outcome = 'failed') AS failed,
    count(*) FILTER (outcome = 'expired') AS expired,
    CASE WHEN count(bytes) FILTER (done) = count(*) FILTER (done)
      THEN sum(bytes) FILTER (done)::BIGINT END AS bytes,
    CASE WHEN count(DISTINCT bytes_basis) > 1 THEN 'mixed' ELSE min(bytes_basis) END AS bytes_basis,
    sum(greatest(end_ns - greatest(start_ns, coalesce(covered_until_ns, start_ns)), 0)) / 1e9
      AS busy_s,
    quantile_cont(duration_ms, [0.5, 0.99]) FILTER (done) AS durations_ms,
    quantile_cont(bytes, 0.5) FILTER (done) AS bytes_p50,
    quantile_cont(bytes / nullif(duration_ms, 0) * 1e3, 0.5) FILTER (done) AS throughput_p50,
    -- only what has bytes and both instants tells what the link gave
    sum(bytes) FILTER (done) / nullif(busy_s, 0) AS gave,
    count(*) FILTER (done AND (bytes IS NULL OR end_ns IS NULL OR start_ns IS NULL)) AS incomplete
  FROM (SELECT *, coalesce(outcome, 'completed') = 'completed' AS done FROM move)
  GROUP BY ALL
)
SELECT l.deployment, l.source_worker, l.destination_worker, l.backend, l.direction, l.transfers,
  l.failed, l.expired, l.bytes, l.bytes_basis, l.busy_s, l.durations_ms[1] AS duration_p50_ms,
  l.durations_ms[2] AS duration_p99_ms, l.bytes_p50, l.throughput_p50,
  CASE WHEN l.incomplete = 0 AND l.failed + l.expired = 0 THEN l.gave END AS link_bytes_per_second,
  c.most_at_once, f.setup_ms, f.setup_low_ms, f.setup_high_ms, f.bytes_per_second,
  f.bytes_per_second_low, f.bytes_per_second_high, f.contention_ratio, f.contention_low_ratio,
  f.contention_high_ratio, f.note
FROM link AS l
LEFT JOIN crowd AS c ON c.deployment IS NOT DISTINCT FROM l.deployment
  AND c.source_worker IS NOT DISTINCT FROM l.source_worker
  AND c.destination_worker IS NOT DISTINCT FROM l.destination_worker
  AND c.backend IS NOT DISTINCT FROM l.backend AND c.direction IS NOT DISTINCT FROM l.direction
LEFT JOIN transfer_fits AS f ON f.deployment IS NOT DISTINCT FROM l.deployment
  AND f.source_worker IS NOT DISTINCT FROM l.source_worker
  AND f.destination_worker IS NOT DISTINCT FROM l.destination_worker
  AND f.backend IS NOT DISTINCT FROM l.backend AND f.direction IS NOT DISTINCT FROM l.direction
  AND f.bytes_basis IS NOT DISTINCT FROM l.bytes_basis
