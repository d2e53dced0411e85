-- routing: how requests were placed: what the choices cost, how even the load, whether sessions stayed,
-- and what another placement could have saved at most.
--
-- What could have been saved is a bound, never a promise: prompt tokens that were computed though
-- another worker had them. Three kinds of data show it: hashes of prompt blocks (view prefix_reuse;
-- where nine in ten prompts have them, turns are not guessed from), turns of a session that moved
-- (view session_turns), and routers that count the best prefix match among the workers they could
-- choose beside the one they took; the greatest is value. Taking the better match would have loaded
-- that worker more: this price is not in it. Appears where there is a choice of at least two workers,
-- and a router's choices, later turns of sessions or prompts that begin alike are known. Severity:
-- info; warning when a fifth of all prompt tokens is such a bound. Level C; D where only counters tell.
--
-- grain:   one row per deployment
-- needs:   decision_outcomes, session_turns, prompt_reuse, prefix_reuse, hot_prefixes, load_spread, samples, workers, counted_requests, deployment_sources
-- when:    EXISTS (FROM decisions) OR EXISTS (FROM requests WHERE turn IS NOT NULL)
--          OR EXISTS (FROM prefix_blocks)
-- params:
--   min_requests     20   fewer are an anecdote
--   min_saved_ratio  0.2  a fifth of the prompt tokens: above it, affinity may be worth its price
-- columns:
--   deployment           VARCHAR    deployment
--   severity             VARCHAR    warning or info
--   cost_s               DOUBLE     s  NULL: tokens, not seconds
--   level                VARCHAR    C, or D
--   value                DOUBLE     prompt tokens computed though another worker had them, at most; NULL unknown
--   unit                 VARCHAR    tokens
--   interval_low         DOUBLE     0 where value is known: all of it may have been evicted
--   interval_high        DOUBLE     value
--   share                DOUBLE     value over all prompt tokens; NULL unknown
--   requests             BIGINT     requests placed
--   workers              VARCHAR[]  the worker with the greatest share of requests, where there are several
--   culprits             STRUCT(request VARCHAR, "value" DOUBLE)[]  the five moved turns with most of them; value: tokens
--   sources              VARCHAR[]  files that the requests come from
--   decisions            BIGINT     router choices seen
--   policies             VARCHAR    their policies, joined
--   decide_p50_ms        DOUBLE     ms  median time of a choice; NULL unknown
--   decide_p99_ms        DOUBLE     ms  99th percentile
--   decide_s             DOUBLE     s   sum
--   decide_ttft_ratio    DOUBLE     1   sum over the TTFT of the requests; NULL unknown
--   workers_seen         BIGINT     workers of the side that computes prompts; NULL where unknown
--   requests_over_mean   DOUBLE     requests: greatest worker over mean
--   requests_low         DOUBLE     95 % interval, lower end
--   requests_high        DOUBLE     upper end
--   tokens_over_mean     DOUBLE     uncached prompt tokens: greatest worker over mean
--   tokens_low           DOUBLE     95 % interval, lower end
--   tokens_high          DOUBLE     upper end
--   seconds_over_mean    DOUBLE     time spent there: greatest worker over mean
--   decode_workers       BIGINT     workers of the decode side, where it is another; NULL unknown
--   decode_over_mean     DOUBLE     requests there: greatest worker over mean
--   decode_tokens_over_mean  DOUBLE  output tokens there: greatest worker over mean
--   decode_idle_workers  BIGINT     decode workers that got no request
--   idle_workers         BIGINT     workers of the prompt side that got no request
--   later_turns          BIGINT     later turns of sessions with known workers
--   kept_ratio           DOUBLE     1   of them to the worker of the turn before
--   kept_low_ratio       DOUBLE     1   95 % interval (Wilson), lower end
--   kept_high_ratio      DOUBLE     1   upper end
--   chance_ratio         DOUBLE     1   the same had turns been placed without regard to sessions
--   moved_saved_tokens   BIGINT     tokens  computed again after moves, at most; NULL unknown
--   index_saved_tokens   BIGINT     tokens  best match less chosen match, as the router counts them; NULL unknown
--   prefix_requests      BIGINT     requests whose prompt blocks are known
--   repeated_requests    BIGINT     of them, those that begin as an earlier one did, with known worker
--   prefix_kept_ratio    DOUBLE     1   of those, the share that went to a worker which had had most of the beginning
--   prefix_kept_low_ratio   DOUBLE  1   95 % interval (Wilson), lower end
--   prefix_kept_high_ratio  DOUBLE  1   upper end
--   prefix_chance_ratio  DOUBLE     1   the same had they been placed without regard to prompts
--   prefix_seen_tokens   BIGINT     tokens  of all prompts, what an earlier one began with; NULL unknown
--   prefix_saved_tokens  BIGINT     tokens  of those computed again though another worker had had them, at most; NULL unknown
--   hot_prefix_tokens    BIGINT     tokens  the beginning with most to share: its length; NULL none
--   hot_prefix_requests  BIGINT     requests that begin with it
--   hot_prefix_workers   BIGINT     workers that computed it
--   belief               VARCHAR    engine (checked against the engines, see router_belief), answer, copy (the answers repeat the belief), none
WITH decided AS (
  SELECT deployment, count(*) AS decisions,
    string_agg(DISTINCT policy, ', ' ORDER BY policy) AS policies,
    quantile_cont(duration_ms, [0.5, 0.99]) AS choice_ms, sum(duration_ms) / 1e3 AS decide_s,
    CASE WHEN count(believed_tokens) = 0 OR count(error_tokens) = 0 THEN 'none'
      WHEN count(error_tokens) FILTER (cached_basis = 'engine') = count(error_tokens) THEN 'engine'
      WHEN bool_and(error_tokens = 0) AND sum(believed_tokens) > 0 THEN 'copy'
      ELSE 'answer' END AS belief
  FROM decision_outcomes
  GROUP BY deployment
),
first_token AS (
  -- clocks that disagree put first tokens before the start: these tell no share
  SELECT deployment, sum(first_token_ns - start_ns) / 1e9 AS ttft_s
  FROM counted_requests
  GROUP BY deployment
  HAVING count(first_token_ns) FILTER (first_token_ns >= start_ns) >= 0.9 * count(*)
),
placed AS (
  SELECT deployment, worker, count(*) AS n
  FROM prompt_reuse
  WHERE worker IS NOT NULL
  GROUP BY deployment, worker
),
chance AS (
  SELECT deployment, sum(n)::BIGINT AS n, count(*) AS workers_used,
    sum(n * n) / (sum(n) * sum(n)) AS chance_ratio
  FROM placed
  GROUP BY deployment
),
prompt AS (
  SELECT deployment, count(*) AS n,
    CASE WHEN count(prompt_tokens) = count(*) THEN sum(prompt_tokens) END AS prompt_tokens
  FROM prompt_reuse
  GROUP BY deployment
),
turns AS (
  SELECT deployment, count(moved) AS later_turns, count(*) FILTER (NOT moved) AS kept,
    CASE WHEN count(elsewhere_tokens) FILTER (moved) > 0
      OR (count(moved) > 0 AND count(*) FILTER (moved) = 0)
      THEN coalesce(sum(elsewhere_tokens), 0)::BIGINT END AS moved_saved_tokens,
    coalesce(
      min_by({'request': request, 'value': elsewhere_tokens::DOUBLE}, (-elsewhere_tokens, request), 5)
        FILTER (elsewhere_tokens > 0), []
    ) AS culprits
  FROM session_turns
  GROUP BY deployment
),
prefix_count AS (
  SELECT w.deployment, s.worker, s.labels,
    regexp_extract(s.metric, '(best_eligible|selected)_cached_prefix_tokens', 1) AS part,
    -- dumps of unknown times: what grew between them, or all since the start
    CASE WHEN count(*) = 1 THEN max(s.value) ELSE max(s.value) - min(s.value) END AS tokens
  FROM samples AS s
  JOIN workers AS w ON w.worker = s.worker
  WHERE regexp_matches(s.metric, '(best_eligible|selected)_cached_prefix_tokens(_total)?$')
    AND w.role IS NOT NULL AND isfinite(s.value)
  GROUP BY w.deployment, s.worker, s.labels, s.metric
),
prefix AS (
  SELECT deployment, greatest(sum(tokens) FILTER (part = 'best_eligible')
      - sum(tokens) FILTER (part = 'selected'), 0)::BIGINT AS index_saved_tokens
  FROM prefix_count
  GROUP BY deployment
),
spread AS (
  SELECT deployment, max(workers) AS workers_seen, max(greatest) FILTER (measure = 'requests') AS greatest,
    max(over_mean) FILTER (measure = 'requests') AS requests_over_mean,
    max(over_mean_low) FILTER (measure = 'requests') AS requests_low,
    max(over_mean_high) FILTER (measure = 'requests') AS requests_high,
    max(over_mean) FILTER (measure = 'tokens') AS tokens_over_mean,
    max(over_mean_low) FILTER (measure = 'tokens') AS tokens_low,
    max(over_mean_high) FILTER (measure = 'tokens') AS tokens_high,
    max(over_mean) FILTER (measure = 'seconds') AS seconds_over_mean,
    max(idle_workers) AS idle_workers
  FROM load_spread
  WHERE side = 'prefill'
  GROUP BY deployment
),
decode_spread AS (
  SELECT deployment, max(workers) AS decode_workers,
    max(over_mean) FILTER (measure = 'requests') AS decode_over_mean,
    max(over_mean) FILTER (measure = 'tokens') AS decode_tokens_over_mean,
    max(idle_workers) AS decode_idle_workers
  FROM load_spread
  WHERE side = 'decode'
  GROUP BY deployment
),
begun AS (
  SELECT deployment, count(*) AS prefix_requests, count(kept) AS repeated_requests,
    count(*) FILTER (kept) / nullif(count(kept), 0) AS prefix_kept,
    avg(holders_ratio) FILTER (kept IS NOT NULL) AS prefix_chance_ratio,
    sum(seen_tokens)::BIGINT AS prefix_seen_tokens,
    CASE WHEN count(elsewhere_tokens) > 0 THEN sum(elsewhere_tokens)::BIGINT END
      AS prefix_saved_tokens,
    coalesce(
      min_by({'request': request, 'value': elsewhere_tokens::DOUBLE}, (-elsewhere_tokens, request), 5)
        FILTER (elsewhere_tokens > 0), []
    ) AS prefix_culprits
  FROM prefix_reuse
  GROUP BY deployment
),
hot AS (
  SELECT deployment, prefix_tokens AS hot_prefix_tokens, requests AS hot_prefix_requests,
    len(workers) AS hot_prefix_workers
  FROM hot_prefixes
  WHERE place = 1
),
joined AS (
  SELECT p.deployment, p.n AS requests, p.prompt_tokens, d.* EXCLUDE (deployment),
    f.ttft_s, s.* EXCLUDE (deployment), q.* EXCLUDE (deployment), t.later_turns, t.kept / nullif(t.later_turns, 0) AS kept,
    c.chance_ratio, c.workers_used, t.moved_saved_tokens, x.index_saved_tokens,
    CASE WHEN coalesce(b.prefix_requests, 0) >= 0.9 * p.n OR t.moved_saved_tokens IS NULL
        OR b.prefix_saved_tokens > t.moved_saved_tokens
      THEN coalesce(b.prefix_culprits, []) ELSE coalesce(t.culprits, []) END AS culprits,
    -- what prompts really begin with is better than what turns are taken to
    CASE WHEN coalesce(b.prefix_requests, 0) >= 0.9 * p.n AND b.prefix_saved_tokens IS NOT NULL
      THEN b.prefix_saved_tokens
      ELSE greatest(t.moved_saved_tokens, b.prefix_saved_tokens) END AS by_prompts,
    b.* EXCLUDE (deployment, prefix_culprits), h.* EXCLUDE (deployment)
  FROM prompt AS p
  LEFT JOIN decided AS d ON d.deployment IS NOT DISTINCT FROM p.deployment
  LEFT JOIN first_token AS f ON f.deployment IS NOT DISTINCT FROM p.deployment
  LEFT JOIN spread AS s ON s.deployment IS NOT DISTINCT FROM p.deployment
  LEFT JOIN decode_spread AS q ON q.deployment IS NOT DISTINCT FROM p.deployment
  LEFT JOIN turns AS t ON t.deployment IS NOT DISTINCT FROM p.deployment
  LEFT JOIN chance AS c ON c.deployment IS NOT DISTINCT FROM p.deployment
  LEFT JOIN prefix AS x ON x.deployment IS NOT DISTINCT FROM p.deployment
  LEFT JOIN begun AS b ON b.deployment IS NOT DISTINCT FROM p.deployment
  LEFT JOIN hot AS h ON h.deployment IS NOT DISTINCT FROM p.deployment
),
bounded AS (
  SELECT *, greatest(by_prompts, index_saved_tokens)::DOUBLE AS saved,
    index_saved_tokens > coalesce(by_prompts, -1) AS from_counters
  FROM joined
)
SELECT j.deployment,
  CASE WHEN saved >= min_saved_ratio * prompt_tokens THEN 'warning' ELSE 'info' END AS severity,
  NULL::DOUBLE AS cost_s, CASE WHEN coalesce(from_counters, false) THEN 'D' ELSE 'C' END AS level,
  saved AS value, 'tokens' AS unit, CASE WHEN saved IS NOT NULL THEN 0::DOUBLE END AS interval_low,
  saved AS interval_high, saved / nullif(prompt_tokens, 0) AS share, requests,
  CASE WHEN greatest IS NULL THEN [] ELSE [greatest] END AS workers, culprits,
  coalesce(f.paths, []) AS sources, coalesce(decisions, 0) AS decisions, policies,
  choice_ms[1] AS decide_p50_ms, choice_ms[2] AS decide_p99_ms, decide_s,
  decide_s / nullif(ttft_s, 0) AS decide_ttft_ratio, workers_seen, requests_over_mean, requests_low,
  requests_high, tokens_over_mean, tokens_low, tokens_high, seconds_over_mean,
  decode_workers, decode_over_mean, decode_tokens_over_mean, decode_idle_workers, idle_workers,
  coalesce(later_turns, 0) AS later_turns, kept AS kept_ratio,
  (kept + 1.9208 / later_turns - 1.96 * sqrt(kept * (1 - kept) / later_turns
    + 0.9604 / (later_turns * later_turns))) / (1 + 3.8416 / later_turns) AS kept_low_ratio,
  (kept + 1.9208 / later_turns + 1.96 * sqrt(kept * (1 - kept) / later_turns
    + 0.9604 / (later_turns * later_turns))) / (1 + 3.8416 / later_turns) AS kept_high_ratio,
  chance_ratio, moved_saved_tokens, index_saved_tokens,
  coalesce(prefix_requests, 0) AS prefix_requests, coalesce(repeated_requests, 0) AS repeated_requests,
  prefix_kept AS prefix_kept_ratio,
  (prefix_kept + 1.9208 / repeated_requests - 1.96 * sqrt(prefix_kept * (1 - prefix_kept)
    / repeated_requests + 0.9604 / (repeated_requests * repeated_requests)))
    / (1 + 3.8416 / repeated_requests) AS prefix_kept_low_ratio,
  (prefix_kept + 1.9208 / repeated_requests + 1.96 * sqrt(prefix_kept * (1 - prefix_kept)
    / repeated_requests + 0.9604 / (repeated_requests * repeated_requests)))
    / (1 + 3.8416 / repeated_requests) AS prefix_kept_high_ratio,
  prefix_chance_ratio, prefix_seen_tokens, prefix_saved_tokens, hot_prefix_tokens,
  hot_prefix_requests, hot_prefix_workers, coalesce(belief, 'none') AS belief
FROM bounded AS j
LEFT JOIN deployment_sources AS f ON f.deployment = j.deployment AND f.evidence = 'requests'
WHERE requests >= min_requests
  -- with one worker of each kind there is nothing to choose
  AND greatest(workers_seen, decode_workers, workers_used) >= 2
  AND greatest(decisions, later_turns, repeated_requests) >= min_requests
