-- transfer_points: KV movements with size and time for a picture: all of them, or an even sample, beside the fitted line of their link.
--
-- Sampled by a hash of the request and the start, so that the same data give the same points; shown
-- and total say how many of how many.
--
-- grain:   one row per KV movement shown
-- needs:   transfer_times, transfer_fits, worker_labels
-- params:
--   most  2000  movements of a deployment
-- columns:
--   deployment   VARCHAR         deployment
--   link         VARCHAR         source → destination
--   request      VARCHAR         request that it served; NULL unknown
--   start_ns     BIGINT   ns     start; NULL unknown
--   bytes        BIGINT   bytes  bytes moved
--   bytes_basis  VARCHAR         measured, config or formula
--   duration_ms  DOUBLE   ms     how long it took
--   fitted_ms    DOUBLE   ms     how long the fit of its link says that it takes alone; NULL no fit
--   bytes_per_second  DOUBLE     fitted bandwidth of its link; NULL no fit
--   setup_ms     DOUBLE   ms     fitted time of a movement of no bytes; NULL no fit
--   outcome      VARCHAR         completed, failed or expired; NULL unknown
--   shown        BIGINT          movements shown
--   total        BIGINT          movements with size and time
--   links        BIGINT          links of them
--   p50_bytes    DOUBLE   bytes  median size of all of them
--   p50_ms       DOUBLE   ms     median time of all of them
--   max_ms       DOUBLE   ms     longest of all of them
--   level        VARCHAR         B (with instants) or C (durations only)
WITH known AS (
  SELECT *, count(*) OVER (PARTITION BY deployment) AS total,
    row_number() OVER (
      PARTITION BY deployment ORDER BY hash(coalesce(request, request_id, ''), start_ns, bytes), bytes
    ) AS place
  FROM transfer_times
  WHERE bytes IS NOT NULL AND duration_ms IS NOT NULL
),
-- of all: the longest is seldom in a sample
summed AS (
  SELECT deployment, count(DISTINCT (source_worker, destination_worker)) AS links,
    quantile_cont(bytes, 0.5)::DOUBLE AS p50_bytes, quantile_cont(duration_ms, 0.5) AS p50_ms,
    max(duration_ms) AS max_ms
  FROM known
  GROUP BY deployment
)
SELECT k.deployment,
  coalesce(a.label, k.source_worker, 'unknown') || ' → '
    || coalesce(b.label, k.destination_worker, 'unknown') AS link,
  k.request, k.start_ns, k.bytes, k.bytes_basis, k.duration_ms,
  f.setup_ms + k.bytes / f.bytes_per_second * 1e3 AS fitted_ms, f.bytes_per_second, f.setup_ms,
  k.outcome, count(*) OVER (PARTITION BY k.deployment) AS shown, k.total,
  m.links, m.p50_bytes, m.p50_ms, m.max_ms,
  CASE WHEN k.start_ns IS NULL OR k.end_ns IS NULL THEN 'C' ELSE 'B' END AS level
FROM known AS k
JOIN summed AS m ON m.deployment IS NOT DISTINCT FROM k.deployment
LEFT JOIN worker_labels AS a ON a.worker = k.source_worker
LEFT JOIN worker_labels AS b ON b.worker = k.destination_worker
LEFT JOIN transfer_fits AS f ON f.deployment IS NOT DISTINCT FROM k.deployment
  AND f.source_worker IS NOT DISTINCT FROM k.source_worker
  AND f.destination_worker IS NOT DISTINCT FROM k.destination_worker
  AND f.backend IS NOT DISTINCT FROM k.backend AND f.direction IS NOT DISTINCT FROM k.direction
  AND f.bytes_basis IS NOT DISTINCT FROM k.bytes_basis
WHERE k.place <= most
ORDER BY k.deployment, link, k.bytes, k.start_ns
