-- transfer_exposure: how much of the KV movement of requests was hidden behind their own prefill, how much they waited for, by prompt length.
--
-- Fifths of the requests by prompt length (all in one where lengths are unknown or the same). Hidden is
-- inside the request's own prefill steps; exposed is time that the request waited for it; a movement
-- that is neither went on beside other waits.
--
-- grain:   one row per (deployment, fifth, part)
-- needs:   transfer_requests, requests
-- columns:
--   deployment     VARCHAR          deployment
--   place          BIGINT           1 for the shortest prompts
--   prompts        VARCHAR          their prompt lengths in words
--   part           VARCHAR          hidden, exposed or moved (at all)
--   requests       BIGINT           requests of the fifth
--   known          BIGINT           of them, those of which this part is known
--   mean_ms        DOUBLE   ms      mean over those; NULL unknown
--   total_s        DOUBLE   s       sum over those
--   bound_s        DOUBLE   s       of total_s what is only an upper bound: inside a prefill known as wall time only
--   bytes          BIGINT   bytes   bytes moved; NULL when those of any are unknown
--   level          VARCHAR          B
WITH numbered AS (
  SELECT t.deployment, t.request, t.bytes, t.moved_ms, t.hidden_ms, t.exposed_ms, t.bound_ms, r.prompt_tokens,
    CASE WHEN r.prompt_tokens IS NULL THEN NULL
      ELSE ntile(5) OVER (
        PARTITION BY t.deployment, r.prompt_tokens IS NULL ORDER BY r.prompt_tokens, t.request
      ) END AS fifth
  FROM transfer_requests AS t
  LEFT JOIN requests AS r ON r.request = t.request
),
-- equal lengths stay together: the fifth in which they begin
banded AS (
  SELECT *, min(fifth) OVER (PARTITION BY deployment, prompt_tokens) AS band FROM numbered
),
part AS (
  SELECT deployment, band, prompt_tokens, bytes, unnest([
      {'part': 'exposed', 'ms': exposed_ms, 'most_ms': bound_ms},
      {'part': 'hidden', 'ms': hidden_ms, 'most_ms': 0.0},
      {'part': 'moved', 'ms': moved_ms, 'most_ms': 0.0}
    ], recursive := true)
  FROM banded
)
SELECT deployment, coalesce(band, 6)::BIGINT AS place,
  CASE WHEN band IS NULL THEN 'prompt length unknown'
    WHEN min(prompt_tokens) = max(prompt_tokens) THEN format('{:,}', min(prompt_tokens)) || ' tokens'
    ELSE format('{:,}', min(prompt_tokens)) || '–' || format('{:,}', max(prompt_tokens)) || ' tokens'
  END AS prompts,
  part, count(*) AS requests, count(ms) AS known, avg(ms) AS mean_ms, sum(ms) / 1e3 AS total_s,
  coalesce(sum(most_ms), 0) / 1e3 AS bound_s,
  CASE WHEN count(bytes) = count(*) THEN sum(bytes)::BIGINT END AS bytes, 'B' AS level
FROM part
GROUP BY deployment, band, part
ORDER BY deployment, place, part
