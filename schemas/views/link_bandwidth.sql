-- link_bandwidth: what each KV link gave while it was busy, and the bandwidth fitted for it, with names for people.
--
-- grain:   one row per link with a known throughput, the twenty that carried most of each deployment
-- needs:   transfer_links, worker_labels
-- columns:
--   deployment        VARCHAR         deployment
--   link              VARCHAR         source → destination, with the mover or direction where there are several
--   transfers         BIGINT          movements
--   bytes             BIGINT   bytes  bytes of the completed ones; NULL when those of any are unknown
--   bytes_basis       VARCHAR         measured, config or formula; mixed
--   busy_s            DOUBLE   s      time during which at least one was under way
--   gave_bytes_per_second    DOUBLE   bytes over busy time; NULL unknown
--   median_bytes_per_second  DOUBLE   median of bytes over own time
--   fitted_bytes_per_second  DOUBLE   fitted bandwidth of large movements; NULL cannot tell
--   fitted_low        DOUBLE          95 % interval, lower end, bytes a second
--   fitted_high       DOUBLE          upper end
--   contention_ratio  DOUBLE   1      part of its own time that each other movement in flight adds; NULL cannot tell
--   contention_low_ratio   DOUBLE   1      95 % interval, lower end
--   contention_high_ratio  DOUBLE   1      upper end
--   most_at_once      BIGINT          most movements under way at one time
--   links             BIGINT          links of the deployment with a known throughput
WITH known AS (
  SELECT *, count(*) OVER (PARTITION BY deployment) AS links,
    count(*) OVER (PARTITION BY deployment, source_worker, destination_worker) AS alike,
    row_number() OVER (
      PARTITION BY deployment
      ORDER BY bytes DESC NULLS LAST, transfers DESC, source_worker, destination_worker
    ) AS place
  FROM transfer_links
  WHERE throughput_p50 IS NOT NULL
)
SELECT k.deployment,
  coalesce(a.label, k.source_worker, 'unknown') || ' → '
    || coalesce(b.label, k.destination_worker, 'unknown')
    || CASE WHEN alike > 1 THEN ' (' || concat_ws(', ', k.backend, replace(k.direction, '_', ' ')) || ')'
       ELSE '' END AS link,
  k.transfers, k.bytes, k.bytes_basis, k.busy_s,
  k.link_bytes_per_second AS gave_bytes_per_second, k.throughput_p50 AS median_bytes_per_second,
  k.bytes_per_second AS fitted_bytes_per_second, k.bytes_per_second_low AS fitted_low,
  k.bytes_per_second_high AS fitted_high, k.contention_ratio, k.contention_low_ratio,
  k.contention_high_ratio, k.most_at_once, k.links
FROM known AS k
LEFT JOIN worker_labels AS a ON a.worker = k.source_worker
LEFT JOIN worker_labels AS b ON b.worker = k.destination_worker
WHERE k.place <= 20
ORDER BY k.deployment, k.place
