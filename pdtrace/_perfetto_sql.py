"""Events of a timeline as lines of JSON (Trace Event Format), written by DuckDB column by column.

Source of the format: "Trace Event Format" (Google, 2016) and Perfetto's importer of it: X slices with
start and length, i instants, C counters, M names, s/t/f flows; times in microseconds.
"""

from __future__ import annotations

MACROS = (
    # microseconds with three decimals: a double of epoch nanoseconds would round
    "CREATE OR REPLACE TEMP MACRO _us(ns) AS (ns // 1000) || '.' || lpad((ns % 1000)::VARCHAR, 3, '0')",
    "CREATE OR REPLACE TEMP MACRO _known(args) AS json_merge_patch('{}', args)",  # what is unknown is left out
    """CREATE OR REPLACE TEMP MACRO _slice(name, ns, length, pid, tid, args) AS
       '{"ph":"X","name":' || to_json(name) || ',"ts":' || _us(ns) || ',"dur":' || _us(length)
       || ',"pid":' || pid || ',"tid":' || tid || ',"args":' || _known(args) || '}'""",
    """CREATE OR REPLACE TEMP MACRO _instant(name, ns, pid, tid, args) AS
       '{"ph":"i","s":"t","name":' || to_json(name) || ',"ts":' || _us(ns)
       || ',"pid":' || pid || ',"tid":' || tid || ',"args":' || _known(args) || '}'""",
    """CREATE OR REPLACE TEMP MACRO _counter(name, ns, pid, key, value) AS
       '{"ph":"C","name":' || to_json(name) || ',"ts":' || _us(ns) || ',"pid":' || pid
       || ',"args":{' || to_json(key) || ':' || value || '}}'""",
    """CREATE OR REPLACE TEMP MACRO _flow(ph, id, ns, pid, tid) AS
       '{"ph":"' || ph || '","cat":"kv","name":"prefill to decode","id":' || id || ',"bp":"e","ts":'
       || _us(ns) || ',"pid":' || pid || ',"tid":' || tid || '}'""",
)

# What is drawn: requests that touch the stretch of time and have a window, the first `limit` of them.
CHOSEN = """
SELECT request, deployment, start_ns, end_ns, first_token_ns
FROM requests
WHERE end_ns >= start_ns AND ($from IS NULL OR end_ns >= $from) AND ($to IS NULL OR start_ns < $to)
ORDER BY start_ns, request
LIMIT $limit
"""
REFUSED = """
SELECT count(*) AS requests,
  count(*) FILTER (start_ns IS NULL OR end_ns IS NULL) AS without_window,
  count(*) FILTER (end_ns < start_ns) AS backwards
FROM requests
"""
VISITS = """
SELECT p.worker, p.request, min(p.start_ns) AS start_ns, max(p.end_ns) AS end_ns
FROM phases AS p JOIN _drawn AS d ON d.request = p.request
WHERE p.worker IS NOT NULL
GROUP BY p.worker, p.request
"""
# A step whose start is known to a second only has no place on a line.
STEPS = """
SELECT worker, coalesce(rank, '') AS rank, coalesce(seq, -1) AS seq, start_ns, start_ns + elapsed_ns AS end_ns
FROM steps
WHERE start_ns IS NOT NULL AND elapsed_ns >= 0 AND worker IS NOT NULL
  AND ($from IS NULL OR start_ns + elapsed_ns >= $from) AND ($to IS NULL OR start_ns < $to)
"""
MOVES = """
SELECT row_number() OVER (ORDER BY start_ns, end_ns, request_id, bytes) AS move, t.*
FROM transfer_times AS t
WHERE end_ns >= start_ns
  AND ($from IS NULL OR end_ns >= $from) AND ($to IS NULL OR start_ns < $to)
"""

REQUEST_SLICES = """
SELECT _slice(r.request, r.start_ns - $base, r.end_ns - r.start_ns, l.pid, l.tid, json_object(
  'outcome', r.outcome, 'ttft_ms', r.ttft_ms, 'e2e_ms', r.e2e_ms, 'tpot_ms', r.tpot_ms,
  'prompt_tokens', r.prompt_tokens, 'cached_tokens', r.cached_tokens, 'output_tokens', r.output_tokens,
  'model', r.model, 'prefill_worker', r.prefill_worker, 'decode_worker', r.decode_worker,
  'session', r.session, 'turn', r.turn, 'tenant', r.tenant, 'error', r.error,
  'window_seen_by', r.window_observer, 'instants_to_ns', r.resolution_ns))
FROM requests AS r JOIN _request_lane AS l ON l.request = r.request
ORDER BY r.start_ns, r.request
"""
_NAME = """CASE WHEN p.detail IN ('preempted', 'prefill_recompute', 'decode_stall', 'migration', 'failed_attempt', 'retry_backoff')
    THEN p.detail ELSE p.phase END || CASE WHEN p.basis = 'upper_bound' THEN ' (at most)' ELSE '' END"""
_ARGS = (
    "'detail', p.detail, 'basis', p.basis, 'worker', p.worker, 'remark', nullif(p.semantics, '')"
)
REQUEST_PHASES = f"""
SELECT _slice({_NAME}, p.start_ns - $base, p.end_ns - p.start_ns, l.pid, l.tid, json_object({_ARGS}))
FROM phases AS p JOIN _request_lane AS l ON l.request = p.request
WHERE p.end_ns > p.start_ns
ORDER BY p.start_ns, p.request
"""
FIRST_TOKENS = """
SELECT _instant('first token', r.first_token_ns - $base, l.pid, l.tid,
  json_object('seen_by', r.first_token_observer, 'made_by', r.first_token_origin))
FROM requests AS r JOIN _request_lane AS l ON l.request = r.request
WHERE r.first_token_ns BETWEEN r.start_ns AND r.end_ns
ORDER BY r.first_token_ns, r.request
"""
WORKER_PHASES = f"""
SELECT _slice({_NAME}, p.start_ns - $base, p.end_ns - p.start_ns, l.pid, l.tid,
  json_object('request', p.request, {_ARGS}))
FROM phases AS p JOIN _visit_lane AS l ON l.request = p.request AND l.worker = p.worker
WHERE p.end_ns > p.start_ns
ORDER BY p.start_ns, p.request
"""
STEP_SLICES = """
SELECT _slice(
  CASE WHEN s.prefill_tokens > 0 AND s.decode_requests > 0 THEN 'mixed step'
    WHEN s.prefill_tokens > 0 THEN 'prefill step' WHEN s.decode_requests > 0 THEN 'decode step'
    ELSE 'step' END,
  s.start_ns - $base, s.elapsed_ns, l.pid, l.tid, json_object(
    'seq', s.seq, 'prefill_requests', s.prefill_requests, 'prefill_tokens', s.prefill_tokens,
    'decode_requests', s.decode_requests, 'decode_tokens', s.decode_tokens,
    'decode_context_tokens', s.decode_kv_tokens, 'running', s.running, 'waiting', s.waiting,
    'kv_usage_ratio', s.kv_usage_ratio, 'start_between_ns', s.start_upper_ns - s.start_lower_ns))
FROM steps AS s JOIN _step_lane AS l ON l.worker = s.worker AND l.rank = coalesce(s.rank, '')
  AND l.seq = coalesce(s.seq, -1) AND l.start_ns = s.start_ns
ORDER BY s.start_ns, s.worker
"""
MOVE_SLICES = """
SELECT _slice(
  'KV ' || replace(coalesce(m.direction, 'movement'), '_', ' ')
    || CASE WHEN coalesce(m.outcome, 'completed') <> 'completed' THEN ' (' || m.outcome || ')' ELSE '' END,
  m.start_ns - $base, m.end_ns - m.start_ns, l.pid, l.tid, json_object(
    'request', coalesce(m.request, m.request_id), 'bytes', m.bytes, 'bytes_basis', m.bytes_basis,
    'from', m.source_worker, 'to', m.destination_worker, 'backend', m.backend, 'outcome', m.outcome))
FROM _move AS m JOIN _move_lane AS l ON l.move = m.move
ORDER BY m.start_ns, m.move
"""
# The value that holds where the timeline begins, and all later ones.
COUNTERS = """
WITH point AS (
  SELECT worker, rank, quantity, time_ns, max(value) AS value, max(resolution_ns) AS resolution_ns,
    lead(time_ns) OVER (PARTITION BY worker, rank, quantity ORDER BY time_ns) AS next_ns
  FROM load_points
  WHERE worker IN (SELECT key FROM _track) AND ($to IS NULL OR time_ns < $to)
  GROUP BY worker, rank, quantity, time_ns
),
series AS (
  SELECT worker, quantity, count(DISTINCT rank) AS ranks, max(resolution_ns) AS coarse
  FROM point
  GROUP BY worker, quantity
)
SELECT _counter(
  CASE WHEN p.quantity = 'kv_usage' THEN 'KV cache' ELSE 'requests' END
    || CASE WHEN s.ranks > 1 THEN ' of rank ' || p.rank ELSE '' END
    || CASE WHEN s.coarse >= 10000000 THEN ' (± ' || round(s.coarse / 1e9, 2) || ' s)' ELSE '' END,
  greatest(p.time_ns - $base, 0), t.pid,
  CASE p.quantity WHEN 'kv_usage' THEN 'used %' WHEN 'batch' THEN 'in the step' ELSE p.quantity END,
  CASE WHEN p.quantity = 'kv_usage' THEN round(100 * p.value, 3) ELSE round(p.value, 3) END)
FROM point AS p
JOIN series AS s ON s.worker = p.worker AND s.quantity = p.quantity
JOIN _track AS t ON t.key = p.worker
WHERE p.value IS NOT NULL
  AND (p.time_ns >= greatest($base, coalesce($from, $base)) OR p.next_ns > greatest($base, coalesce($from, $base)))
ORDER BY p.time_ns, t.pid, p.quantity, p.rank
"""
BEFORE = """
SELECT (SELECT count(*) FROM events WHERE time_ns IS NULL OR worker IS NULL OR (time_ns < $base AND ($from IS NULL OR time_ns >= $from)))
  + (SELECT count(*) FROM decisions WHERE time_ns IS NULL OR router IS NULL OR (time_ns < $base AND ($from IS NULL OR time_ns >= $from)))
"""
EVENTS = """
SELECT _instant(e.kind, e.time_ns - $base, t.pid, t.pid * 1000000, json_object(
  'severity', e.severity, 'request', e.request_id, 'count', e.count, 'detail', e.detail, 'instant_to_ns', e.resolution_ns))
FROM events AS e JOIN _track AS t ON t.key = e.worker
WHERE e.time_ns >= $base AND ($from IS NULL OR e.time_ns >= $from) AND ($to IS NULL OR e.time_ns < $to)
ORDER BY e.time_ns, e.kind
"""
DECISIONS = """
SELECT _instant('routed', o.time_ns - $base, t.pid, t.pid * 1000000 + 1, json_object(
  'request', o.request, 'to', o.worker, 'phase', o.phase, 'policy', o.policy, 'took_ms', o.duration_ms,
  'candidates', o.candidates, 'believed_cached_tokens', o.believed_tokens, 'cached_tokens', o.cached_tokens))
FROM decision_outcomes AS o JOIN _track AS t ON t.key = o.router
WHERE o.time_ns >= $base AND ($from IS NULL OR o.time_ns >= $from) AND ($to IS NULL OR o.time_ns < $to)
ORDER BY o.time_ns, o.request
"""
# From the last prefill through the movement (else the wait that is exposed) to the first decode: the middle
# of each slice, so that none of its neighbours is meant.
FLOWS = """
WITH piece AS (
  SELECT p.request, p.phase, p.start_ns + (p.end_ns - p.start_ns) // 2 AS at_ns, l.pid, l.tid, p.worker
  FROM phases AS p JOIN _visit_lane AS l ON l.request = p.request AND l.worker = p.worker
  WHERE p.end_ns > p.start_ns AND p.phase IN ('prefill', 'kv_transfer', 'decode')
),
ends AS (
  SELECT request,
    arg_max({'at_ns': at_ns, 'pid': pid, 'tid': tid, 'worker': worker}, at_ns) FILTER (phase = 'prefill') AS p,
    arg_min({'at_ns': at_ns, 'pid': pid, 'tid': tid}, at_ns) FILTER (phase = 'kv_transfer') AS wait
  FROM piece
  GROUP BY request
),
decode AS (
  SELECT d.request, arg_min({'at_ns': d.at_ns, 'pid': d.pid, 'tid': d.tid}, d.at_ns) AS d
  FROM piece AS d JOIN ends AS e ON e.request = d.request
  WHERE d.phase = 'decode' AND d.worker <> e.p.worker AND d.at_ns > e.p.at_ns
  GROUP BY d.request
),
moved AS (
  SELECT m.request, arg_max({'at_ns': m.start_ns + (m.end_ns - m.start_ns) // 2, 'pid': l.pid, 'tid': l.tid}, m.start_ns) AS m
  FROM _move AS m JOIN _move_lane AS l ON l.move = m.move
  WHERE m.request IS NOT NULL AND coalesce(m.direction, 'prefill_to_decode') = 'prefill_to_decode'
  GROUP BY m.request
),
chain AS (
  SELECT row_number() OVER (ORDER BY e.request) AS id, e.p, coalesce(m.m, e.wait) AS m, d.d
  FROM ends AS e JOIN decode AS d ON d.request = e.request
  LEFT JOIN moved AS m ON m.request = e.request
  WHERE e.p IS NOT NULL
)
SELECT line FROM (
  SELECT id, 0 AS place, _flow('s', id, p.at_ns - $base, p.pid, p.tid) AS line FROM chain
  UNION ALL
  SELECT id, 1, _flow('t', id, m.at_ns - $base, m.pid, m.tid) FROM chain
  WHERE m.at_ns BETWEEN p.at_ns AND d.at_ns
  UNION ALL
  SELECT id, 2, _flow('f', id, d.at_ns - $base, d.pid, d.tid) FROM chain
)
ORDER BY id, place
"""
# Every delivery of tokens, for requests that were asked for by name.
TOKENS = """
WITH gap AS (
  SELECT l.request, s.leg, s.stream, s.observer, s.first_ns, unnest(s.gaps_us) AS gap_us,
    generate_subscripts(s.gaps_us, 1) AS place
  FROM streams AS s JOIN legs AS l ON l.leg = s.leg
  WHERE l.request IN (SELECT request FROM _named) AND s.first_ns IS NOT NULL
),
delivery AS (
  SELECT request, observer, stream, place + 1 AS emission, gap_us / 1e3 AS gap_ms,
    first_ns + 1000 * sum(gap_us) OVER (PARTITION BY leg, stream ORDER BY place) AS time_ns
  FROM gap
)
SELECT _instant('tokens', (d.time_ns - $base)::BIGINT, l.pid, l.tid,
  json_object('emission', emission, 'gap_ms', gap_ms, 'stream', stream, 'seen_by', observer))
FROM delivery AS d JOIN _request_lane AS l ON l.request = d.request
WHERE d.time_ns >= $base
ORDER BY d.time_ns, d.request
"""
