-- request_choices: by what requests can be chosen, and how many each choice has.
--
-- Attributes are model, worker, tenant, prompt and output (lengths in bands), and slo where limits were
-- given (met, missed, open). A request whose prompt one worker computed and that another decoded counts
-- with both.
--
-- grain:   one row per (deployment, attribute, value) that some request has
-- needs:   requests, workers, slo_requests
-- columns:
--   deployment   VARCHAR          deployment
--   attribute    VARCHAR          model, worker, tenant, prompt, output or slo
--   value        VARCHAR          the value; of bands `from-below`; NULL unknown
--   label        VARCHAR          the value for people: name of the worker; NULL as value
--   from_tokens  BIGINT   tokens  start of a band
--   below_tokens  BIGINT   tokens  its end, which is not in it; NULL open
--   requests     BIGINT           requests that have it
WITH lengths AS (
  SELECT deployment, 'prompt' AS attribute, prompt_tokens AS length_tokens FROM requests
  UNION ALL
  SELECT deployment, 'output', output_tokens FROM requests
),
banded AS (
  SELECT deployment, attribute,
    CASE WHEN length_tokens < 128 THEN 0 WHEN length_tokens < 512 THEN 128
      WHEN length_tokens < 2048 THEN 512 WHEN length_tokens < 8192 THEN 2048
      WHEN length_tokens < 32768 THEN 8192 WHEN length_tokens >= 32768 THEN 32768 END AS from_tokens
  FROM lengths
),
served AS (
  SELECT deployment,
    unnest(
      CASE WHEN prefill_worker IS NULL AND decode_worker IS NULL THEN [NULL]
        ELSE list_distinct([prefill_worker, decode_worker]) END
    ) AS worker
  FROM requests
),
told AS (
  SELECT deployment, 'model' AS attribute, nullif(model, '') AS value, NULL::VARCHAR AS label,
    NULL::BIGINT AS from_tokens, NULL::BIGINT AS below_tokens
  FROM requests
  UNION ALL
  SELECT s.deployment, 'worker', s.worker, w.name, NULL, NULL
  FROM served AS s
  LEFT JOIN workers AS w ON w.worker = s.worker
  UNION ALL
  SELECT deployment, 'tenant', nullif(tenant, ''), NULL, NULL, NULL
  FROM requests
  UNION ALL
  SELECT deployment, attribute,
    CASE WHEN from_tokens = 32768 THEN '32768-'
      ELSE from_tokens || '-' || greatest(from_tokens * 4, 128) END,
    NULL, from_tokens,
    CASE WHEN from_tokens < 32768 THEN greatest(from_tokens * 4, 128) END
  FROM banded
  UNION ALL
  SELECT deployment, 'slo',
    CASE WHEN good THEN 'met' WHEN NOT good THEN 'missed' ELSE 'open' END, NULL, NULL, NULL
  FROM slo_requests
)
SELECT deployment, attribute, value, label, from_tokens, below_tokens, count(*) AS requests
FROM told
GROUP BY deployment, attribute, value, label, from_tokens, below_tokens
