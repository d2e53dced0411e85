-- kv_usage_samples: share of the KV cache in use, as metrics and log lines told it.
--
-- The unit comes from the metric's name: a share of one, also where the name ends in `perc`, as engines
-- write it. Only a name that ends in `percent` may mean either: it is read as percent where that metric
-- of that worker was ever above one, for no cache is fuller than full, and as a share otherwise, which is
-- a guess. A value above one of any other metric is neither, and unknown.
--
-- grain:   one row per sample of such a metric
-- needs:   samples
-- when:    EXISTS (FROM samples)
-- columns:
--   source         INTEGER      the source
--   record         BIGINT       ordinal of the record
--   worker         VARCHAR      worker that the sample describes
--   rank           VARCHAR      rank of the worker that it tells of; empty where labels name none
--   time_ns        BIGINT   ns  instant; NULL when the dump does not say
--   resolution_ns  BIGINT   ns  the instant is known to this; NULL unknown
--   kind           VARCHAR      gauge, counter or histogram
--   metric         VARCHAR      name as emitted
--   usage_ratio    DOUBLE   1   share in use; NULL where the unit contradicts the name
--   unit_guessed   BOOLEAN      the name says percent and no value is above one: read as a share
WITH told AS (
  SELECT source, record, worker, coalesce(labels ->> 'engine', labels ->> 'dp_rank', '') AS rank,
    time_ns, resolution_ns, kind, metric, value,
    regexp_matches(metric, '_percent(age)?$') AS named_percent,
    named_percent AND max(value) OVER (PARTITION BY worker, metric) > 1.001 AS in_percent
  FROM samples
  WHERE regexp_matches(
      metric, '(kv_cache_usage|gpu_cache_usage|kv_usage|token_usage)(_perc|_ratio|_percent|_percentage)?$'
    )
    AND value IS NOT NULL AND NOT isnan(value)
)
SELECT source, record, worker, rank, time_ns, resolution_ns, kind, metric,
  CASE WHEN in_percent THEN value / 100 WHEN value <= 1.001 THEN value END AS usage_ratio,
  named_percent AND NOT in_percent AS unit_guessed
FROM told
