-- slow_worker: a worker whose decode steps take longer than its peers' do at the same batch.
--
-- Peers: workers of the deployment in the same role with the same model. Of each the fitted duration of a
-- decode-only step (interference_steps) is taken at the same batches, those in the middle and at the ends of
-- what all of them ran, with the same context where all say it: load and prompts are so accounted for.
-- The interval is the ratio over these batches, wider by 8 %: of 605 workers in 200 simulated runs without a
-- slow one, routed in three ways, 99 % lay within 8 % of their peers. Severity: warning from 1.3
-- times on, info below. Level A: engine steps, all of them.
--
-- grain:   one row per deployment
-- needs:   interference_steps, steps, facts, requests, worker_labels, deployment_sources
-- when:    (SELECT count(baseline_ms) > 1 FROM interference_steps)
-- params:
--   min_ratio  1.2  of 605 workers in 200 simulated runs without a slow one the greatest was at 1.18
--   min_steps  200   decode-only steps; of fewer a fit moves by a few per cent
--   max_noise_ratio  0.12  scatter of its steps around their fit over their median; beyond it the fit tells no pace
-- columns:
--   deployment     VARCHAR    deployment
--   severity       VARCHAR    warning or info
--   cost_s         DOUBLE     s  decode seconds above the peers' pace, summed over the slow workers' requests
--   level          VARCHAR    A
--   value          DOUBLE     a decode step of the slowest worker over its peers' at the same batch
--   unit           VARCHAR    x
--   interval_low   DOUBLE     over the batches that were run and the scatter of such fits, lower end
--   interval_high  DOUBLE     upper end
--   share          DOUBLE     NULL
--   requests       BIGINT     requests that the slow workers decoded; NULL unknown
--   workers        VARCHAR[]  slow workers, the slowest first
--   culprits       STRUCT(request VARCHAR, "value" DOUBLE)[]  empty
--   sources        VARCHAR[]  files that the steps come from
--   label          VARCHAR    short name of the slowest; NULL unknown
--   peers          BIGINT     workers (or ranks) it was compared with
--   step_ms        DOUBLE     ms  its decode-only step at the middle batch
--   peer_ms        DOUBLE     ms  the same step on its peers (median of them)
--   batch          DOUBLE     requests in that step
--   steps          BIGINT     its decode-only steps
--   context_known  BOOLEAN    the steps say the context of their batch
WITH model AS (
  SELECT worker, string_agg(DISTINCT value, ', ' ORDER BY value) AS models
  FROM facts
  WHERE key = 'model'
  GROUP BY worker
),
fitted AS (
  SELECT s.worker, s.rank, s.deployment, s.role, m.models, s.decode_only_steps, s.decode_s, s.lost_s,
    s.baseline_ms, s.baseline_per_request_ms, s.baseline_per_kv_token_ms,
    s.baseline_per_kv_token_ms IS NOT NULL AS context_known
  FROM interference_steps AS s
  LEFT JOIN model AS m ON m.worker = s.worker
  WHERE s.capture = 'full' AND s.baseline_ms IS NOT NULL AND s.decode_only_steps >= min_steps
    -- steps of two kinds (a warm-up and the time after it) have no one line through them
    AND coalesce(s.noise_ms <= max_noise_ratio * s.decode_only_p50_ms, true)
),
run AS (
  SELECT f.deployment, f.role, f.models, f.context_known,
    quantile_cont(s.decode_requests, [0.1, 0.5, 0.9]) AS batches,
    quantile_cont(s.decode_kv_tokens / s.decode_requests, 0.5) AS context
  FROM steps AS s
  JOIN fitted AS f ON f.worker = s.worker AND f.rank IS NOT DISTINCT FROM s.rank
  WHERE s.decode_requests > 0 AND coalesce(s.prefill_tokens, 0) = 0
  GROUP BY f.deployment, f.role, f.models, f.context_known
),
sloped AS (
  SELECT f.*, r.batches,
    f.baseline_per_request_ms + coalesce(f.baseline_per_kv_token_ms * r.context, 0) AS slope_ms
  FROM fitted AS f
  JOIN run AS r ON r.deployment IS NOT DISTINCT FROM f.deployment
    AND r.role IS NOT DISTINCT FROM f.role AND r.models IS NOT DISTINCT FROM f.models
    AND r.context_known = f.context_known
),
took AS (
  SELECT *, batches[2] AS batch, baseline_ms + batches[1] * slope_ms AS few_ms,
    baseline_ms + batches[2] * slope_ms AS step_ms, baseline_ms + batches[3] * slope_ms AS many_ms
  FROM sloped
),
compared AS (
  SELECT t.deployment, t.worker, t.rank, count(*) AS peers, median(p.step_ms) AS peer_ms,
    any_value(t.few_ms) / median(p.few_ms) AS at_few,
    any_value(t.step_ms) / median(p.step_ms) AS ratio,
    any_value(t.many_ms) / median(p.many_ms) AS at_many,
    any_value(t.step_ms) AS step_ms, any_value(t.batch) AS batch,
    any_value(t.decode_only_steps) AS steps, any_value(t.context_known) AS context_known,
    any_value(t.decode_s - coalesce(t.lost_s, 0)) AS decode_s
  FROM took AS t
  JOIN took AS p ON p.deployment IS NOT DISTINCT FROM t.deployment
    AND p.role IS NOT DISTINCT FROM t.role AND p.models IS NOT DISTINCT FROM t.models
    AND p.context_known = t.context_known
    AND (p.worker <> t.worker OR p.rank IS DISTINCT FROM t.rank)
  GROUP BY t.deployment, t.worker, t.rank
),
slow AS (
  SELECT *, least(at_few, ratio, at_many) AS least_ratio,
    greatest(at_few, ratio, at_many) AS most_ratio
  FROM compared
  WHERE ratio >= min_ratio AND least(at_few, at_many) >= (1 + min_ratio) / 2
),
worst AS (
  SELECT *
  FROM slow
  QUALIFY row_number() OVER (PARTITION BY deployment ORDER BY ratio DESC, worker, rank) = 1
),
by_worker AS (
  SELECT deployment, worker, max(ratio) AS ratio, sum(decode_s * (1 - 1 / ratio)) AS cost_s
  FROM slow
  GROUP BY deployment, worker
),
together AS (
  SELECT deployment, sum(cost_s) AS cost_s,
    list(worker ORDER BY ratio DESC, worker) AS slow_workers
  FROM by_worker
  GROUP BY deployment
),
decoded AS (
  SELECT r.deployment, count(*) AS requests
  FROM requests AS r
  SEMI JOIN slow AS s ON s.worker = r.decode_worker
  GROUP BY r.deployment
)
SELECT w.deployment,
  CASE WHEN w.ratio >= 1.3 THEN 'warning' ELSE 'info' END AS severity,
  t.cost_s, 'A' AS level, w.ratio AS value, 'x' AS unit,
  0.92 * w.least_ratio AS interval_low, 1.08 * w.most_ratio AS interval_high,
  NULL::DOUBLE AS share, d.requests, t.slow_workers AS workers,
  []::STRUCT(request VARCHAR, "value" DOUBLE)[] AS culprits,
  coalesce(s.paths, []) AS sources,
  n.label, w.peers, w.step_ms, w.peer_ms, w.batch, w.steps, w.context_known
FROM worst AS w
JOIN together AS t ON t.deployment IS NOT DISTINCT FROM w.deployment
LEFT JOIN decoded AS d ON d.deployment IS NOT DISTINCT FROM w.deployment
LEFT JOIN worker_labels AS n ON n.worker = w.worker
LEFT JOIN deployment_sources AS s ON s.deployment = w.deployment AND s.evidence = 'steps'
