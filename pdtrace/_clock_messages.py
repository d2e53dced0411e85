"""Messages between clocks: what was sent and received by whom, out of records of requests.

Columns (deployment, a, b, sent, back, received, answered, resolution): `a` is the clock of `sent` and `back`,
`b` that of `received` and `answered`. Nothing is received before it is sent, nor back before it is answered.
"""

from __future__ import annotations

import polars as pl

from pdtrace._clock_windows import LEAST_PAIRS
from pdtrace.model import OBSERVERS
from pdtrace.store import Store

# Legs of requests whose instants are finer than the offsets that are looked for.
_FINE = """fine AS (
  FROM legs
  WHERE request IS NOT NULL AND container IS NOT TRUE AND start_ns IS NOT NULL AND end_ns IS NOT NULL
    AND coalesce(clock, 'wall') = 'wall' AND coalesce(resolution_ns, 1) <= 1000000
)"""


def _between(a: str, b: str) -> str:
    """SQL that joins the workers of two legs and keeps pairs that are not known to share a host (and so its clock)."""
    return f"""LEFT JOIN workers AS wa ON wa.worker = {a}.worker
LEFT JOIN workers AS wb ON wb.worker = {b}.worker
WHERE {a}.worker <> {b}.worker AND coalesce(wa.host <> wb.host, true)"""


# Where no engine leg names the hop that asked for it, the one hop of a request encloses its one engine leg.
_ENCLOSED = f"""
WITH hop AS (
  SELECT request, any_value(deployment) AS deployment, any_value(worker) AS worker,
    any_value(start_ns) AS start_ns, any_value(end_ns) AS end_ns, any_value(resolution_ns) AS resolution_ns
  FROM legs
  WHERE container AND request IS NOT NULL AND coalesce(clock, 'wall') = 'wall' AND start_ns IS NOT NULL
  GROUP BY request HAVING count(*) = 1
),
engine AS (
  SELECT request, any_value(worker) AS worker, any_value(start_ns) AS start_ns, any_value(end_ns) AS end_ns,
    any_value(resolution_ns) AS resolution_ns
  FROM legs
  WHERE observer = 'engine' AND container IS NOT TRUE AND status = 'completed' AND parent_span_id IS NULL
    AND coalesce(clock, 'wall') = 'wall' AND start_ns IS NOT NULL
    AND coalesce(resolution_ns, 1) <= 1000000
  GROUP BY request HAVING count(*) = 1
)
SELECT p.deployment, p.worker AS a, c.worker AS b, p.start_ns AS sent, p.end_ns AS back,
  c.start_ns AS received, c.end_ns AS answered,
  coalesce(greatest(p.resolution_ns, c.resolution_ns), 1) AS resolution
FROM hop AS p
JOIN engine AS c ON c.request = p.request
{_between("p", "c")} AND coalesce(p.resolution_ns, 1) <= 1000000
ORDER BY ALL
"""
# The engines of a request under one outer record: none works before it begins, P is done when its first
# token is seen, D (or the one that does both) when it ends. Wider than hops, so only what lies clear of its own width
# counts. A record that ends with the headers says nothing of the engine's end: its stream, or the whole of it, is shorter
# than theirs then, on whatever clock. A lone engine below a client: see _CLIENTS.
_HALVES = f"""
WITH {_FINE},
outermost AS (
  FROM fine
  WHERE observer <> 'engine' AND status = 'completed'
  QUALIFY row_number() OVER (
    PARTITION BY request ORDER BY list_position({list(OBSERVERS)}, observer) DESC, start_ns, leg) = 1
),
told AS (
  -- roles are not all known yet: a lone token is a prefill worker's
  SELECT f.* EXCLUDE (role),
    coalesce(f.role, w.role, CASE WHEN f.output_tokens = 1 THEN 'prefill' ELSE 'decode' END) AS role
  FROM fine AS f
  LEFT JOIN workers AS w ON w.worker = f.worker
  WHERE f.observer = 'engine' AND f.status = 'completed'
),
half AS (
  -- one record of each part at each worker: spans and a file of requests may both tell it, as of two workers even
  FROM told
  QUALIFY row_number() OVER (PARTITION BY request, role, worker ORDER BY span_id IS NULL, start_ns, leg) = 1
    AND min(role) OVER (PARTITION BY request, worker) = max(role) OVER (PARTITION BY request, worker)
),
lasted AS (
  SELECT request, role = 'prefill' AS of_prompt, bool_or(bootstrap_room IS NOT NULL) AS room,
    max(CASE WHEN role = 'prefill' THEN coalesce(first_token_ns, end_ns) ELSE coalesce(last_token_ns, end_ns) END
      - start_ns) AS parts
  FROM half
  GROUP BY ALL
),
whole AS (
  -- how long an outer record lasts at least that holds all: one part after the other, or at once where they meet in a room
  SELECT request, CASE WHEN bool_or(room) THEN max(parts) ELSE sum(parts) END AS lasting
  FROM lasted
  GROUP BY ALL
)
SELECT o.deployment, o.worker AS a, h.worker AS b, o.start_ns AS sent,
  CASE WHEN h.role = 'prefill' THEN coalesce(o.first_token_ns, o.end_ns)
    WHEN 2 * (o.end_ns - o.first_token_ns) >= coalesce(h.last_token_ns, h.end_ns) - h.first_token_ns
      OR bool_and(o.end_ns - o.start_ns >= lasting) OVER (PARTITION BY o.worker, h.worker, h.role) THEN o.end_ns
  END AS back,
  h.start_ns AS received,
  CASE WHEN h.role = 'prefill' THEN coalesce(h.first_token_ns, h.end_ns)
    ELSE coalesce(h.last_token_ns, h.end_ns) END AS answered,
  coalesce(greatest(o.resolution_ns, h.resolution_ns), 1) AS resolution
FROM outermost AS o
JOIN half AS h ON h.request = o.request
JOIN whole ON whole.request = o.request
{_between("o", "h")} AND (o.observer <> 'client' OR h.role IN ('prefill', 'decode'))
ORDER BY ALL
"""
# Gateway, router and front end of one request, each inside the one before: an end inside counts where no record of the
# inner one lasts longer than the outer one's.
_LAYERS = f"""
WITH {_FINE},
layer AS (
  SELECT *, dense_rank() OVER (PARTITION BY request ORDER BY list_position({list(OBSERVERS)}, observer)) AS depth FROM fine
  WHERE observer NOT IN ('client', 'engine') AND status = 'completed'
  QUALIFY row_number() OVER (PARTITION BY request, observer, worker ORDER BY start_ns, leg) = 1
)
SELECT o.deployment, o.worker AS a, i.worker AS b, o.start_ns AS sent,
  CASE WHEN bool_and(o.end_ns - o.start_ns >= i.end_ns - i.start_ns) OVER (PARTITION BY o.worker, i.worker)
    THEN o.end_ns END AS back,
  i.start_ns AS received, i.end_ns AS answered, coalesce(greatest(o.resolution_ns, i.resolution_ns), 1) AS resolution
FROM layer AS i
JOIN layer AS o ON o.request = i.request AND o.depth = i.depth - 1
{_between("o", "i")}
ORDER BY ALL
"""
# The two workers of a request that meet in a room: KV leaves P when the prompt is computed, and has arrived when D's
# wait for it ends; P hears of D's room for it after D gave that. Records with less of it say as much of the whole: D's KV
# has arrived after P began, and P is done after D began.
_ROOMS = f"""
WITH {_FINE},
side AS (
  FROM fine
  WHERE observer = 'engine' AND bootstrap_room IS NOT NULL AND status = 'completed'
    AND role IN ('prefill', 'decode')
  QUALIFY row_number() OVER (PARTITION BY request, role, worker ORDER BY span_id IS NULL, start_ns, leg) = 1
),
told AS (
  SELECT leg, min(start_ns) FILTER (detail = 'kv_transfer') AS leaves_ns,
    max(end_ns) FILTER (detail = 'kv_transfer') AS sent_ns,
    max(end_ns) FILTER (detail = 'kv_wait_upper_bound') AS arrived_ns,
    max(end_ns) FILTER (detail = 'kv_space_wait') AS room_ns
  FROM intervals SEMI JOIN side USING (leg)
  WHERE start_ns IS NOT NULL AND coalesce(clock, 'wall') = 'wall' AND coalesce(resolution_ns, 1) <= 1000000
  GROUP BY leg
)
SELECT p.deployment, p.worker AS a, d.worker AS b, coalesce(tp.leaves_ns, p.start_ns) AS sent,
  coalesce(tp.room_ns, tp.sent_ns, p.end_ns) AS back,
  td.arrived_ns AS received, coalesce(td.room_ns, d.start_ns) AS answered,
  coalesce(greatest(p.resolution_ns, d.resolution_ns), 1) AS resolution
FROM side AS p
JOIN side AS d ON d.request = p.request AND d.bootstrap_room = p.bootstrap_room AND d.role = 'decode'
LEFT JOIN told AS tp ON tp.leg = p.leg
JOIN told AS td ON td.leg = d.leg
{_between("p", "d")} AND p.role = 'prefill' AND td.arrived_ns IS NOT NULL
ORDER BY ALL
"""
# A client's own record and the outermost one of a server, of the same request. The client's clock is the one
# that moves: as if the server had sent the end and got back the start. Servers may end their record after the client
# has the answer (gateways that log first): the first token counts where it allows more, `ends_alone` where none is known.
_CLIENTS = f"""
WITH {_FINE},
client AS (
  FROM fine
  WHERE observer = 'client' AND status = 'completed'
  QUALIFY count(*) OVER (PARTITION BY request) = 1
),
server AS (
  FROM fine
  WHERE observer <> 'client' AND status = 'completed'
  -- two records of one server (its span, its log) are one, of two servers nobody knows which answered
  QUALIFY min(worker) OVER (PARTITION BY request, observer) = max(worker) OVER (PARTITION BY request, observer)
    AND row_number() OVER (
      PARTITION BY request ORDER BY list_position({list(OBSERVERS)}, observer), span_id IS NULL, start_ns, leg) = 1
)
SELECT c.deployment, s.worker AS a, c.worker AS b,
  CASE WHEN c.first_token_ns - s.first_token_ns > c.end_ns - s.end_ns THEN s.first_token_ns ELSE s.end_ns END AS sent,
  s.start_ns AS back,
  CASE WHEN c.first_token_ns - s.first_token_ns > c.end_ns - s.end_ns THEN c.first_token_ns ELSE c.end_ns END AS received,
  c.start_ns AS answered, (c.first_token_ns - s.first_token_ns) IS NULL AS ends_alone,
  coalesce(greatest(s.resolution_ns, c.resolution_ns), 1) AS resolution
FROM client AS c
JOIN server AS s ON s.request = c.request
{_between("s", "c")}
ORDER BY ALL
"""


def recorded(store: Store) -> pl.DataFrame:
    """Messages between workers: hops on record and the requests below them."""
    hops = store.sql(
        """SELECT p.deployment, p.worker AS a, c.worker AS b, p.start_ns AS sent,
                  -- who breaks off does not wait for an answer
                  CASE WHEN coalesce(p.status, '') NOT IN ('aborted', 'failed')
                    AND coalesce(c.status, '') NOT IN ('aborted', 'failed') THEN p.end_ns END AS back,
                  c.start_ns AS received, c.end_ns AS answered,
                  coalesce(greatest(p.resolution_ns, c.resolution_ns), 1) AS resolution
           FROM legs c JOIN legs p ON p.trace_id = c.trace_id AND p.span_id = c.parent_span_id
             AND p.request IS NOT DISTINCT FROM c.request
           LEFT JOIN workers wa ON wa.worker = p.worker LEFT JOIN workers wb ON wb.worker = c.worker
           WHERE p.container AND p.worker <> c.worker
             AND p.start_ns IS NOT NULL AND c.start_ns IS NOT NULL
             AND coalesce(p.clock, 'wall') = 'wall' AND coalesce(c.clock, 'wall') = 'wall'
             AND coalesce(greatest(p.resolution_ns, c.resolution_ns), 1) <= 1000000
             AND coalesce(wa.host <> wb.host, true)
           ORDER BY ALL"""
    )
    return hops if hops.height >= LEAST_PAIRS else store.sql(_ENCLOSED)


def halves(store: Store) -> pl.DataFrame:
    """Messages between engines and the record right above them."""
    return store.sql(_HALVES)


def layers(store: Store) -> pl.DataFrame:
    """Messages between gateways, routers and front ends of the same requests."""
    return store.sql(_LAYERS)


def rooms(store: Store) -> pl.DataFrame:
    """Messages between the prefill and the decode workers of requests that meet in a room."""
    return store.sql(_ROOMS)


def clients(store: Store) -> pl.DataFrame:
    """Messages between clients on the wall clock and the servers that they asked."""
    return store.sql(_CLIENTS)
