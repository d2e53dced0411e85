-- transfer_times: every KV movement with its link, its request, how long it took and how many bytes.
--
-- Bytes that nobody measured are the prompt (in whole blocks) times the KV size of a token (table
-- kv_sizes) where one movement carried the whole prompt from prefill to decode; else unknown. A
-- prefix that was there already makes such bytes too many. Workers that the record does not name are
-- taken from the request.
--
-- grain:   one row per KV movement
-- needs:   transfers, legs, requests, workers, kv_sizes
-- when:    EXISTS (FROM transfers)
-- columns:
--   deployment          VARCHAR   deployment; NULL when neither end is known
--   request             VARCHAR   request that it served; NULL unknown
--   request_id          VARCHAR   request in the spelling of whoever recorded it; NULL unknown
--   source_worker       VARCHAR   where the KV came from
--   destination_worker  VARCHAR   where it went
--   backend             VARCHAR   name of the mover
--   direction           VARCHAR   prefill_to_decode, decode_to_prefill, load or store; from the workers' roles where not stated
--   outcome             VARCHAR   completed, failed or expired; NULL unknown
--   start_ns            BIGINT    ns     start
--   end_ns              BIGINT    ns     end
--   duration_ms         DOUBLE    ms     how long it took
--   bytes               BIGINT    bytes  bytes moved
--   bytes_basis         VARCHAR   measured (the record states them), config or formula (kv_sizes); NULL unknown
WITH named AS (
  -- records without a leg name the request in the spelling of the worker that received it
  SELECT worker, request_id, min(request) AS request, min(deployment) AS deployment
  FROM legs
  WHERE request IS NOT NULL
    AND request_id IN (SELECT request_id FROM transfers WHERE leg IS NULL)
  GROUP BY worker, request_id
),
joined AS (
  SELECT t.*, coalesce(l.request, n.request, m.request) AS request,
    coalesce(l.deployment, n.deployment, m.deployment) AS leg_deployment
  FROM transfers AS t
  LEFT JOIN legs AS l ON l.leg = t.leg
  LEFT JOIN named AS n ON t.leg IS NULL AND n.worker = t.destination_worker
    AND n.request_id = t.request_id
  LEFT JOIN named AS m ON t.leg IS NULL AND m.worker = t.source_worker
    AND m.request_id = t.request_id
),
placed AS (
  SELECT j.*, r.prompt_tokens, r.model, r.mode,
    coalesce(j.leg_deployment, d.deployment, s.deployment) AS in_deployment,
    coalesce(
      j.direction,
      CASE WHEN s.role = 'prefill' AND d.role = 'decode' THEN 'prefill_to_decode'
        WHEN s.role = 'decode' AND d.role = 'prefill' THEN 'decode_to_prefill' END
    ) AS way,
    r.prefill_worker, r.decode_worker
  FROM joined AS j
  LEFT JOIN requests AS r ON r.request = j.request
  LEFT JOIN workers AS s ON s.worker = j.source_worker
  LEFT JOIN workers AS d ON d.worker = j.destination_worker
),
counted AS (
  SELECT *, count(*) OVER (PARTITION BY request, way) = 1 AND request IS NOT NULL AS whole
  FROM placed
)
SELECT in_deployment AS deployment, request, request_id,
  coalesce(
    source_worker,
    CASE way WHEN 'prefill_to_decode' THEN prefill_worker WHEN 'decode_to_prefill' THEN decode_worker END
  ) AS source_worker,
  coalesce(
    destination_worker,
    CASE way WHEN 'prefill_to_decode' THEN decode_worker WHEN 'decode_to_prefill' THEN prefill_worker END
  ) AS destination_worker,
  backend, way AS direction, outcome, start_ns, end_ns,
  coalesce((end_ns - start_ns) / 1e6, duration_ms) AS duration_ms,
  coalesce(
    bytes,
    CASE WHEN whole AND way = 'prefill_to_decode' AND coalesce(outcome, 'completed') = 'completed'
      THEN (ceil(prompt_tokens / coalesce(k.block_tokens, 1)) * coalesce(k.block_tokens, 1)
        * k.bytes_per_token)::BIGINT END
  ) AS bytes,
  CASE WHEN bytes IS NOT NULL THEN 'measured'
    WHEN whole AND way = 'prefill_to_decode' AND coalesce(outcome, 'completed') = 'completed'
      AND prompt_tokens IS NOT NULL AND k.bytes_per_token IS NOT NULL THEN k.basis
  END AS bytes_basis
FROM counted AS c
LEFT JOIN kv_sizes AS k ON k.deployment = c.in_deployment
  AND k.model IS NOT DISTINCT FROM c.model
