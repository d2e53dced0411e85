"""One engine's work told by two recorders: its own request span or step log, and pdtrace's inside the engine.

An engine that writes its request spans in its API server, while pdtrace's scheduler records the
same requests in the engine's process, would count as two engines. The inner record has the steps
and instants; of the outer one the window stays, as that of a front end, unless pdtrace recorded
the front end too. Of steps that both tell, those with instants stay: a step twice is twice the work.
"""

from __future__ import annotations

from pdtrace import _twins_logged, _twins_undated, workers
from pdtrace.semconv import SPAN_REQUEST
from pdtrace.store import Store

_SLACK_NS = 50_000_000  # the API server's clock and the engine's are one host's
_MOST = 0.9

# The same name but for the random digits that an engine may put behind it, one inside the other, as long. The outer
# record may be that of a worker around the engine, which has a name of the request of its own beside the caller's
# (Dynamo); where it counts no tokens, no other engine or worker may fit. A record that is no span is one of many
# observers' (a request trace): it goes where a front end tells the request too, and else stays.
# An engine's own id that is the one that travels (SGLang's rid) names the same work where tokens agree, and nearly all
# that the inner one shares with others is one other's: the same id at two workers is a retry or a hedge.
_PAIRS = f"""
CREATE OR REPLACE TEMP TABLE leg_twins AS
WITH told AS (
  SELECT l.leg, l.worker, l.observer, l.role, l.request_id, l.external_id, l.start_ns, l.end_ns, l.prompt_tokens, l.output_tokens,
         s.name IS NOT NULL AS spanned, coalesce(s.name = '{SPAN_REQUEST}', FALSE) AS inner_record
  FROM legs l LEFT JOIN spans s ON s.trace_id = l.trace_id AND s.span_id = l.span_id
  WHERE l.external_id IS NOT NULL AND l.container IS NOT TRUE AND l.start_ns IS NOT NULL AND l.end_ns IS NOT NULL
), inside AS (
  SELECT *, request_id = external_id AS plain,
    unnest(list_distinct([request_id, regexp_replace(request_id, '-[0-9a-f]{{8}}$', '')])) AS name
  FROM told WHERE inner_record AND observer = 'engine'
), pairs AS (
  SELECT o.leg AS outer_leg, o.worker AS outer_worker, i.leg AS inner_leg, i.worker AS inner_worker,
         abs(i.start_ns - o.start_ns) AS away_ns, o.spanned, o.start_ns, o.end_ns, o.external_id, o.request_id,
         o.prompt_tokens IS NOT NULL AND o.output_tokens IS NOT NULL AS counted, i.plain
  FROM told o JOIN inside i ON i.name = o.request_id
  WHERE NOT o.inner_record AND o.observer = 'engine' AND i.external_id IN (o.external_id, o.request_id)
    AND i.start_ns >= o.start_ns - {_SLACK_NS} AND i.end_ns <= o.end_ns + {_SLACK_NS}
    AND i.prompt_tokens = coalesce(o.prompt_tokens, i.prompt_tokens)
    AND i.output_tokens = coalesce(o.output_tokens, i.output_tokens)
    AND (o.role IS NULL OR i.role IS NULL OR o.role = i.role OR 'aggregated' IN (o.role, i.role))
    AND (NOT i.plain OR (o.request_id = i.request_id AND o.prompt_tokens = i.prompt_tokens AND o.output_tokens = i.output_tokens))
), steady AS (
  SELECT outer_worker, inner_worker FROM pairs WHERE plain GROUP BY outer_worker, inner_worker
  QUALIFY count(*) >= {_MOST} * sum(count(*)) OVER (PARTITION BY inner_worker)
), fronts AS (
  SELECT outer_leg FROM pairs p JOIN told f USING (external_id)
  WHERE f.observer = 'frontend' AND f.start_ns <= p.end_ns AND f.end_ns >= p.start_ns
  UNION
  SELECT outer_leg FROM pairs p JOIN told f USING (request_id)
  WHERE f.observer = 'frontend' AND f.start_ns <= p.end_ns AND f.end_ns >= p.start_ns
)
SELECT outer_leg, inner_leg, fronts.outer_leg IS NOT NULL AS fronted, plain
FROM pairs LEFT JOIN fronts USING (outer_leg)
WHERE (spanned OR fronts.outer_leg IS NOT NULL)
  AND (NOT plain OR (outer_worker, inner_worker) IN (FROM steady))
QUALIFY row_number() OVER (PARTITION BY outer_leg ORDER BY away_ns, inner_leg) = 1
  AND (counted OR (
    min(inner_worker) OVER (PARTITION BY outer_leg) = max(inner_worker) OVER (PARTITION BY outer_leg)
    AND min(outer_worker) OVER (PARTITION BY inner_leg, counted) = max(outer_worker) OVER (PARTITION BY inner_leg, counted)))
"""

# The line with which an engine's log greets a request, long before its scheduler sees it where a step is long.
_WAITED_NS = 600 * 10**9
_LOGGED = f"""
CREATE OR REPLACE TEMP TABLE logged_twins AS
SELECT l.leg AS outer_leg, i.leg AS inner_leg
FROM legs l JOIN legs i ON i.worker = l.worker AND i.external_id = l.external_id
JOIN spans s ON s.trace_id = i.trace_id AND s.span_id = i.span_id AND s.name = '{SPAN_REQUEST}'
WHERE l.span_id IS NULL AND l.observer = 'engine' AND i.observer = 'engine' AND i.request_id <> i.external_id
  AND l.end_ns IS NULL AND coalesce(l.status, 'unknown') = 'unknown'
  AND l.request_id IN (i.request_id, regexp_replace(i.request_id, '-[0-9a-f]{{8}}$', ''))
  AND l.start_ns BETWEEN i.start_ns - {_WAITED_NS} AND i.end_ns
QUALIFY row_number() OVER (PARTITION BY l.leg ORDER BY abs(i.start_ns - l.start_ns), i.leg) = 1
"""
# Who recorded the same work is one worker under several instance ids: engine and engine, and the front end above it.
_SAME = """
WITH pairs AS (
  SELECT o.worker AS known, i.worker AS other
  FROM leg_twins t JOIN legs o ON o.leg = t.outer_leg JOIN legs i ON i.leg = t.inner_leg
  UNION ALL
  SELECT o.worker, f.worker
  FROM leg_twins t JOIN legs o ON o.leg = t.outer_leg
  JOIN legs f ON f.trace_id = o.trace_id AND f.span_id = o.parent_span_id AND f.observer = 'frontend'
), distinct_pairs AS (
  SELECT DISTINCT known, other FROM pairs WHERE known <> other AND other LIKE 'instance:%'
)
SELECT known AS worker, 'instance' AS kind, substr(other, 10) AS value FROM distinct_pairs
QUALIFY count(*) OVER (PARTITION BY other, known LIKE 'instance:%') = 1
"""
# Steps without a start (log lines of a second's resolution), in the time in which others of the same worker have one.
_STEPS = """
DELETE FROM steps WHERE start_ns IS NULL AND EXISTS (
  SELECT 1 FROM (
    SELECT worker, min(start_ns) AS first_ns, max(start_ns + coalesce(elapsed_ns, 0)) AS last_ns
    FROM steps WHERE start_ns IS NOT NULL AND capture = 'full' GROUP BY worker) w
  WHERE w.worker = steps.worker
    AND coalesce(steps.start_upper_ns, steps.start_lower_ns) >= w.first_ns
    AND coalesce(steps.start_lower_ns, steps.start_upper_ns) <= w.last_ns)
"""
# Steps of one worker and rank from two recorders, both with starts and all of them, in the time that both tell: those
# stay that say who was in a step, else those of the recorder whose name comes first. A recorder that knows no ranks
# tells the same as one that knows a single rank.
_RECORDERS = """
CREATE OR REPLACE TEMP TABLE step_recorders AS
WITH told AS (
  SELECT st.worker, st.rank, coalesce(s.collector, '') AS recorder, min(st.start_ns) AS first_ns,
         max(st.start_ns + coalesce(st.elapsed_ns, 0)) AS last_ns
  FROM steps st LEFT JOIN sources s ON s.source = st.source
  WHERE st.start_ns IS NOT NULL AND st.capture = 'full' AND st.worker IS NOT NULL
  GROUP BY ALL
), members AS (
  SELECT DISTINCT m.worker, coalesce(s.collector, '') AS recorder
  FROM step_members m LEFT JOIN sources s ON s.source = m.source
)
SELECT t.*, m.worker IS NOT NULL AS names, count(*) OVER (PARTITION BY t.worker, t.recorder) AS ranks
FROM told t LEFT JOIN members m ON m.worker = t.worker AND m.recorder = t.recorder
WHERE t.worker IN (SELECT worker FROM told GROUP BY worker HAVING count(DISTINCT recorder) > 1)
"""
_STEPS_TWICE = """
DELETE FROM steps WHERE start_ns IS NOT NULL AND EXISTS (
  SELECT 1
  FROM step_recorders o JOIN step_recorders i ON i.worker = o.worker AND i.recorder <> o.recorder
  WHERE o.worker = steps.worker AND o.rank IS NOT DISTINCT FROM steps.rank
    AND o.recorder = coalesce((SELECT s.collector FROM sources s WHERE s.source = steps.source), '')
    AND (i.rank IS NOT DISTINCT FROM o.rank OR ((i.rank IS NULL OR o.rank IS NULL) AND i.ranks = 1 AND o.ranks = 1))
    AND (i.names, o.recorder) > (o.names, i.recorder)
    AND steps.start_ns BETWEEN i.first_ns AND i.last_ns)
"""


def unite(store: Store) -> None:
    """Leave one record of the engine's work; what the other one reported of itself goes with it."""
    _twins_undated.unite(store)
    _twins_logged.unite(store)
    if store.rows(f"SELECT 1 FROM spans WHERE name = '{SPAN_REQUEST}' LIMIT 1"):
        _unite_legs(store)
        _unite_logged(store)
    if not store.count("steps"):
        return
    store.execute(_STEPS)
    store.execute(_RECORDERS)
    if store.count("step_recorders"):
        store.execute(_STEPS_TWICE)
    store.execute("DROP TABLE step_recorders")


def _unite_legs(store: Store) -> None:
    store.execute(_PAIRS)
    if store.count("leg_twins"):
        workers.unite(store, _SAME)
        _keep_own(store)
        outer = "leg IN (SELECT outer_leg FROM leg_twins WHERE NOT plain)"
        fronted = "leg IN (SELECT outer_leg FROM leg_twins WHERE fronted AND NOT plain)"
        store.execute(f"DELETE FROM intervals WHERE {outer}")
        store.execute(
            """UPDATE reported SET leg = t.inner_leg FROM leg_twins t WHERE reported.leg = t.outer_leg AND NOT t.plain"""
        )
        store.execute(f"DELETE FROM legs WHERE {fronted}")
        store.execute(
            f"""UPDATE legs SET observer = 'frontend', role = 'frontend', role_basis = 'span'
                WHERE {outer}"""
        )
    store.execute("DROP TABLE leg_twins")


def _keep_own(store: Store) -> None:
    """Of the same engine's two records under one id its own stays, with parents, rooms and phases; it gets what it lacks."""
    if not store.scalar("SELECT count(*) FROM leg_twins WHERE plain"):
        return
    told = "SELECT t.inner_leg FROM leg_twins t JOIN {0} o ON o.leg = t.outer_leg WHERE t.plain"
    for table in ("streams", "intervals", "transfers"):
        store.execute(f"DELETE FROM {table} WHERE leg IN ({told.format(table)})")
    for table in ("streams", "intervals", "transfers", "reported"):
        store.execute(
            f"UPDATE {table} SET leg = t.outer_leg FROM leg_twins t WHERE {table}.leg = t.inner_leg AND t.plain"
        )
    lacking = (
        "first_token_ns",
        "last_token_ns",
        "cached_tokens",
        "model",
        "finish_reason",
        "bootstrap_room",
    )
    sets = ", ".join(f"{c} = coalesce(legs.{c}, i.{c})" for c in lacking)
    store.execute(
        f"UPDATE legs SET {sets} FROM leg_twins t JOIN legs i ON i.leg = t.inner_leg WHERE legs.leg = t.outer_leg AND t.plain"
    )
    store.execute("DELETE FROM legs WHERE leg IN (SELECT inner_leg FROM leg_twins WHERE plain)")


def _unite_logged(store: Store) -> None:
    """A log's greeting of a request that the engine's own record tells whole adds only what it reports."""
    store.execute(_LOGGED)
    if store.count("logged_twins"):
        for table in ("reported", "intervals"):
            store.execute(
                f"UPDATE {table} SET leg = t.inner_leg FROM logged_twins t WHERE {table}.leg = t.outer_leg"
            )
        store.execute("DELETE FROM legs WHERE leg IN (SELECT outer_leg FROM logged_twins)")
    store.execute("DROP TABLE logged_twins")
