-- coverage_items: which information the data hold, and what each item would let one see.
--
-- grain:   one row per (deployment, item)
-- needs:   requests, request_values, phase_sums, deployments, legs, intervals, streams, workers, steps, samples, transfers, decisions, clocks, observations, side_workers
-- columns:
--   deployment     VARCHAR     deployment
--   item           VARCHAR     the item, lower_snake
--   applies        BOOLEAN     the item exists in such a deployment; NULL when that is unknown
--   present_ratio  DOUBLE   1  part of the requests (workers, clocks) that have it; NULL when there are none
--   present        BIGINT      how many have it
--   expected       BIGINT      out of how many
--   unit           VARCHAR     what is counted: requests, workers, clocks or transfers
--   evidence       VARCHAR     where it is looked for
--   enables        VARCHAR     what it lets one see
WITH request_items AS (
  SELECT
    deployment,
    count(*) AS requests,
    count(*) FILTER (mode = 'disaggregated') AS pairs,
    count(start_ns) AS arrivals,
    count(e2e_ms) AS durations,
    count(prompt_tokens) AS prompts,
    count(output_tokens) AS outputs,
    count(cached_tokens) AS cached,
    count(*) FILTER (coalesce(prefill_worker, decode_worker) IS NOT NULL) AS placed,
    count(*) FILTER (coalesce(outcome, 'unknown') <> 'unknown') AS outcomes,
    count(*) FILTER (mode <> 'unknown') AS modes,
    count(session) AS sessions
  FROM requests
  GROUP BY deployment
),
-- First tokens also those of the only observer where too few were seen for a headline. Phases fill
-- a request's window: 10 % of it left unexplained is what a reader would ask about.
value_items AS (
  SELECT
    r.deployment,
    count(r.ttft_ms) AS first_tokens,
    count(*) FILTER (r.end_ns > r.start_ns AND p.cut) AS windows,
    count(*) FILTER (
      r.end_ns > r.start_ns AND p.cut
        AND coalesce(u.duration_ns / 1e6, 0) < (r.end_ns - r.start_ns) / 1e7
    ) AS explained
  FROM request_values AS r
  CROSS JOIN (SELECT count(*) > 0 AS cut FROM (FROM phase_sums LIMIT 1)) AS p
  LEFT JOIN phase_sums AS u ON u.request = r.request AND u.detail = 'unattributed'
  GROUP BY r.deployment
),
-- What each leg tells: kinds of time, with or without a position, instants of tokens, a choice.
told AS (
  SELECT leg, CASE
      WHEN detail IN ('prefill_queue', 'decode_queue', 'before_queue') THEN 1
      WHEN detail IN ('prefill_exec', 'prefill_wall') THEN 2
      WHEN detail IN ('decode_exec', 'decode_wall') THEN 4
      WHEN detail IN ('router_queue', 'router_decide', 'dispatch') THEN 8
      WHEN detail = 'kv_transfer' THEN 16
      ELSE 0
    END AS kinds
  FROM intervals
  UNION ALL
  SELECT leg, 32 FROM streams WHERE len(gaps_us) > 0
  UNION ALL
  SELECT leg, 64 FROM decisions
),
timed AS (
  SELECT l.deployment, l.request, bit_or(t.kinds) AS kinds
  FROM (SELECT leg, bit_or(kinds) AS kinds FROM told GROUP BY leg) t
  JOIN legs l ON l.leg = t.leg
  WHERE l.request IS NOT NULL
  GROUP BY l.deployment, l.request
),
timed_items AS (
  SELECT
    deployment,
    count(*) FILTER (kinds & 1 > 0) AS queues,
    count(*) FILTER (kinds & 2 > 0) AS prefills,
    count(*) FILTER (kinds & 4 > 0) AS decodes,
    count(*) FILTER (kinds & 8 > 0) AS routers,
    count(*) FILTER (kinds & 16 > 0) AS transfers,
    count(*) FILTER (kinds & 32 > 0) AS streamed,
    count(*) FILTER (kinds & 64 > 0) AS decided
  FROM timed
  GROUP BY deployment
),
seen AS (
  SELECT deployment, count(DISTINCT request) AS clients
  FROM observations
  WHERE observer = 'client'
  GROUP BY deployment
),
stepped AS (
  SELECT worker, count(*) FILTER (kv_usage_ratio IS NOT NULL) > 0 AS kv_known
  FROM steps
  GROUP BY worker
),
sampled AS (
  SELECT
    worker,
    bool_or(regexp_matches(lower(metric), 'cache.*usage|usage.*cache|kv.*(usage|usage_perc|active|used)'))
      AS kv_known
  FROM (SELECT DISTINCT worker, metric FROM samples)
  GROUP BY worker
),
engine AS (
  SELECT
    w.deployment, w.role, s.worker AS stepped, m.worker AS sampled, s.kv_known OR m.kv_known AS kv_known,
    (w.role IN ('prefill', 'decode', 'aggregated') OR s.worker IS NOT NULL)
      -- one known by its log alone may be one that has requests under another name
      AND (
        s.worker IS NOT NULL OR m.worker IS NOT NULL
        OR w.worker IN (SELECT worker FROM side_workers)
        OR w.deployment NOT IN (SELECT deployment FROM side_workers)
      ) AS counted
  FROM workers w
  LEFT JOIN stepped s ON s.worker = w.worker
  LEFT JOIN sampled m ON m.worker = w.worker
),
worker_items AS (
  SELECT
    deployment,
    count(*) FILTER (counted) AS engines,
    count(stepped) FILTER (counted) AS stepped,
    count(sampled) FILTER (counted) AS sampled,
    count(*) FILTER (counted AND kv_known) AS kv_known,
    bool_or(role IN ('router', 'gateway', 'frontend')) AS has_router
  FROM engine
  GROUP BY deployment
),
-- A transfer belongs to the deployment of whichever end is known.
moved AS (
  SELECT w.deployment, count(*) AS moves, count(t.bytes) AS with_bytes
  FROM transfers t
  JOIN workers w ON w.worker = coalesce(t.destination_worker, t.source_worker)
  GROUP BY w.deployment
),
clock_items AS (
  SELECT deployment, count(*) AS clocks, count(offset_ns) AS aligned
  FROM clocks
  GROUP BY deployment
),
-- One row a deployment from each; rows put together are planned faster than ten joins.
facts_of_deployments AS (
  SELECT
    deployment, any_value(mode) AS mode, any_value(requests) AS requests,
    any_value(pairs) AS pairs, any_value(arrivals) AS arrivals,
    any_value(first_tokens) AS first_tokens, any_value(durations) AS durations,
    any_value(prompts) AS prompts, any_value(outputs) AS outputs, any_value(cached) AS cached,
    any_value(placed) AS placed, any_value(outcomes) AS outcomes, any_value(modes) AS modes,
    any_value(sessions) AS sessions, any_value(queues) AS queues, any_value(prefills) AS prefills,
    any_value(decodes) AS decodes, any_value(routers) AS routers,
    any_value(transfers) AS transfers, any_value(streamed) AS streamed,
    any_value(clients) AS clients, any_value(engines) AS engines, any_value(stepped) AS stepped,
    any_value(sampled) AS sampled, any_value(kv_known) AS kv_known,
    any_value(has_router) AS has_router, any_value(decided) AS decided, any_value(moves) AS moves,
    any_value(with_bytes) AS with_bytes, any_value(clocks) AS clocks,
    any_value(aligned) AS aligned, any_value(windows) AS windows,
    any_value(explained) AS explained
  FROM (
    SELECT deployment, mode, true AS there FROM deployments
    UNION ALL BY NAME SELECT * FROM request_items
    UNION ALL BY NAME SELECT * FROM value_items
    UNION ALL BY NAME SELECT * FROM timed_items
    UNION ALL BY NAME SELECT * FROM seen
    UNION ALL BY NAME SELECT * FROM worker_items
    UNION ALL BY NAME SELECT * FROM moved
    UNION ALL BY NAME SELECT * FROM clock_items
  )
  GROUP BY deployment
  HAVING bool_or(there)
),
items AS (
  SELECT
    deployment,
    unnest([
      {item: 'arrival_time', applies: true, present: arrivals, expected: requests, unit: 'requests',
       evidence: 'start of the request', enables: 'load over time, bursts, positions of phases'},
      {item: 'input_tokens', applies: true, present: prompts, expected: requests, unit: 'requests',
       evidence: 'prompt tokens', enables: 'whether long prompts drive the first token'},
      {item: 'output_tokens', applies: true, present: outputs, expected: requests, unit: 'requests',
       evidence: 'output tokens', enables: 'time per token, whether long answers drive the total'},
      {item: 'cached_tokens', applies: true, present: cached, expected: requests, unit: 'requests',
       evidence: 'cached prompt tokens', enables: 'prefix-cache reuse, the true prefill work'},
      {item: 'first_token', applies: true, present: first_tokens, expected: requests, unit: 'requests',
       evidence: 'time to first token', enables: 'slow first tokens apart from slow streams'},
      {item: 'total_time', applies: true, present: durations, expected: requests, unit: 'requests',
       evidence: 'whole duration', enables: 'share of each phase in the request'},
      {item: 'outcome', applies: true, present: outcomes, expected: requests, unit: 'requests',
       evidence: 'status or finish reason', enables: 'failures, aborts, goodput over all arrivals'},
      {item: 'queue_wait', applies: true, present: queues, expected: requests, unit: 'requests',
       evidence: 'time between arrival at the engine and its first step',
       enables: 'waiting apart from computing'},
      {item: 'prefill_time', applies: true, present: prefills, expected: requests, unit: 'requests',
       evidence: 'prefill time or execution', enables: 'prompt cost, culprits of interference'},
      {item: 'decode_time', applies: true, present: decodes, expected: requests, unit: 'requests',
       evidence: 'decode time or execution', enables: 'what follows the first token'},
      {item: 'token_times', applies: true, present: streamed, expected: requests, unit: 'requests',
       evidence: 'instants of tokens or chunks', enables: 'stutter, stalls, inter-token latency'},
      {item: 'worker_ids', applies: true, present: placed, expected: requests, unit: 'requests',
       evidence: 'worker that prefilled or decoded', enables: 'imbalance, who stalled whom'},
      {item: 'mode', applies: true, present: modes, expected: requests, unit: 'requests',
       evidence: 'prefill and decode legs', enables: 'disaggregated apart from aggregated requests'},
      {item: 'client_view', applies: true, present: clients, expected: requests, unit: 'requests',
       evidence: 'a client or load generator saw it', enables: 'latency as the user has it'},
      {item: 'session', applies: true, present: sessions, expected: requests, unit: 'requests',
       evidence: 'session or conversation id', enables: 'reuse from turn to turn'},
      {item: 'explained_time', applies: arrivals > 0, present: explained, expected: windows,
       unit: 'requests', evidence: 'at most 10 % of the request without a phase',
       enables: 'a complete answer to where the time went'},
      {item: 'engine_steps', applies: true, present: stepped, expected: engines, unit: 'workers',
       evidence: 'one record per engine iteration',
       enables: 'prefill interference and batch shape, step by step'},
      {item: 'engine_counters', applies: true, present: sampled, expected: engines, unit: 'workers',
       evidence: 'running, waiting and token counters over time',
       enables: 'pressure and load between requests'},
      {item: 'kv_usage', applies: true, present: kv_known, expected: engines, unit: 'workers',
       evidence: 'KV cache usage over time', enables: 'KV pressure, cause of preemption'},
      {item: 'router_time', applies: has_router, present: routers, expected: requests,
       unit: 'requests', evidence: 'queue, choice and dispatch of the router',
       enables: 'what routing costs'},
      {item: 'router_decisions', applies: has_router, present: decided, expected: requests,
       unit: 'requests', evidence: 'worker chosen with cost, overlap and load',
       enables: 'whether the router is smart'},
      {item: 'kv_transfer', applies: CASE WHEN mode <> 'unknown' THEN pairs > 0 END,
       present: transfers, expected: pairs, unit: 'requests', evidence: 'transfer start and end',
       enables: 'transfer apart from the wait for it'},
      {item: 'kv_transfer_bytes', applies: CASE WHEN mode <> 'unknown' THEN pairs > 0 END,
       present: with_bytes, expected: moves, unit: 'transfers', evidence: 'bytes of each transfer',
       enables: 'bandwidth by link'},
      {item: 'clocks', applies: clocks > 0, present: aligned, expected: clocks, unit: 'clocks',
       evidence: 'offset between clocks known', enables: 'phases that cross hosts'}
    ], recursive := true)
  FROM facts_of_deployments
)
SELECT
  deployment,
  item,
  CAST(applies AS BOOLEAN) AS applies,
  coalesce(present, 0) / nullif(expected, 0) AS present_ratio,
  CAST(coalesce(present, 0) AS BIGINT) AS present,
  CAST(coalesce(expected, 0) AS BIGINT) AS expected,
  unit,
  evidence,
  enables
FROM items
