-- transfer_summary: what is known of a deployment's KV movements, each figure by its own evidence.
--
-- Request by request where movements have instants (level B), else from counters (level D), else by
-- the size that the prompts' KV must have had (kv_sizes). Requests: completed ones whose prefill and
-- decode were split.
--
-- grain:   one row per deployment with split requests or movements
-- needs:   request_values, requests, transfer_times, transfer_requests, transfer_counters, kv_sizes
-- columns:
--   deployment           VARCHAR  deployment
--   requests             BIGINT   completed requests whose prefill and decode were split
--   origin               VARCHAR  who made their first delivered token: prefill, decode or mixed; NULL unknown
--   movements            BIGINT   movements that records tell one by one
--   bytes                BIGINT   bytes  of the completed ones; NULL when those of any are unknown
--   bytes_basis          VARCHAR  measured, config, formula or mixed
--   timed_requests       BIGINT   requests whose movements have start and end
--   moved_s              DOUBLE   s      time that their movements were under way, overlaps within a request once
--   hidden_s             DOUBLE   s      of it inside the request's own prefill steps; NULL when that of any is unknown
--   exposed_s            DOUBLE   s      time that they waited for it; at most, where hidden_s is NULL
--   counter_transfers    BIGINT   movements that counters tell of (each rank's own counts)
--   counter_s            DOUBLE   s      sum of their durations; NULL unknown
--   counter_bytes        BIGINT   bytes  their bytes; NULL unknown
--   counter_since_start  BOOLEAN  counters run from the start of a process, not of these data
--   expected_bytes       BIGINT   bytes  KV of all prompts in whole blocks, as if nothing was cached on the decode side; NULL unknown
--   expected_basis       VARCHAR  config or formula
--   size_note            VARCHAR  what the size of a token rests on, or why it is unknown
WITH split AS (
  SELECT v.deployment, v.request, v.prompt_tokens, r.first_token_origin, k.block_tokens,
    k.bytes_per_token, k.basis, k.note
  FROM request_values AS v
  JOIN requests AS r ON r.request = v.request
  LEFT JOIN kv_sizes AS k ON k.deployment = v.deployment AND k.model IS NOT DISTINCT FROM r.model
  WHERE v.counted AND v.mode = 'disaggregated'
),
split_total AS (
  SELECT deployment, count(*) AS requests,
    CASE WHEN count(DISTINCT first_token_origin) > 1 THEN 'mixed'
      ELSE min(first_token_origin) END AS origin,
    CASE WHEN count(prompt_tokens * bytes_per_token) = count(*)
      THEN sum(ceil(prompt_tokens / coalesce(block_tokens, 1)) * coalesce(block_tokens, 1)
        * bytes_per_token)::BIGINT END AS expected_bytes,
    CASE WHEN count(prompt_tokens * bytes_per_token) = count(*) THEN min(basis) END AS expected_basis,
    min(note) AS size_note
  FROM split
  GROUP BY deployment
),
move_total AS (
  SELECT deployment, count(*) AS movements,
    CASE WHEN count(bytes) FILTER (done) = count(*) FILTER (done)
      THEN sum(bytes) FILTER (done)::BIGINT END AS bytes,
    CASE WHEN count(DISTINCT bytes_basis) > 1 THEN 'mixed' ELSE min(bytes_basis) END AS bytes_basis
  FROM (SELECT *, coalesce(outcome, 'completed') = 'completed' AS done FROM transfer_times)
  GROUP BY deployment
),
timed AS (
  SELECT deployment, count(*) AS timed_requests, sum(moved_ms) / 1e3 AS moved_s,
    CASE WHEN count(hidden_ms) = count(*) THEN sum(hidden_ms) / 1e3 END AS hidden_s, sum(exposed_ms) / 1e3 AS exposed_s
  FROM transfer_requests
  GROUP BY deployment
),
counter AS (
  SELECT deployment, sum(transfers)::BIGINT AS counter_transfers,
    CASE WHEN count(total_s) = count(*) THEN sum(total_s) END AS counter_s,
    CASE WHEN count(bytes) = count(*) THEN sum(bytes)::BIGINT END AS counter_bytes,
    bool_or(since_start) AS counter_since_start
  FROM transfer_counters
  GROUP BY deployment
),
deployment_list AS (
  SELECT deployment FROM split_total
  UNION
  SELECT deployment FROM move_total
  UNION
  SELECT deployment FROM counter
)
SELECT d.deployment, coalesce(s.requests, 0) AS requests, s.origin, m.movements, m.bytes, m.bytes_basis,
  t.timed_requests, t.moved_s, t.hidden_s, t.exposed_s, c.counter_transfers, c.counter_s,
  c.counter_bytes, c.counter_since_start, s.expected_bytes, s.expected_basis, s.size_note
FROM deployment_list AS d
LEFT JOIN split_total AS s ON s.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN move_total AS m ON m.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN timed AS t ON t.deployment IS NOT DISTINCT FROM d.deployment
LEFT JOIN counter AS c ON c.deployment IS NOT DISTINCT FROM d.deployment
