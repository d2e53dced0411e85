-- source_summary: what each input was, what was taken from it, and what was not and why.
--
-- grain:   one row per source
-- needs:   sources, skipped
-- columns:
--   source           INTEGER                  number of the source
--   path             VARCHAR                  path as given
--   collector        VARCHAR                  collectors that read it
--   used             BOOLEAN                  at least one of its records gave a table row
--   why              VARCHAR                  what it is, or why it was not used
--   record_unit      VARCHAR                  what one record is
--   size_bytes       BIGINT                bytes  size after decompression
--   rows_read        BIGINT                   records seen
--   rows_kept        BIGINT                   records that gave at least one row
--   rows_skipped     BIGINT                   all others
--   balanced         BOOLEAN                  read = kept + skipped; NULL for sources that were not read
--   skipped_reasons  MAP(VARCHAR, BIGINT)     records by reason
WITH reasons AS (
  SELECT source, map_from_entries(list((reason, records) ORDER BY records DESC, reason)) AS by_reason
  FROM skipped
  GROUP BY source
)
SELECT
  s.source,
  s.path,
  s.collector,
  s.used,
  s.why,
  s.record_unit,
  s.bytes AS size_bytes,
  s.rows_read,
  s.rows_kept,
  s.rows_skipped,
  s.rows_read = s.rows_kept + s.rows_skipped AS balanced,
  r.by_reason AS skipped_reasons
FROM sources s
LEFT JOIN reasons r ON r.source = s.source
