"""KV movements that are named by the room in which prefill and decode worker meet: whose they are, each once.

Both sides, their spans and their logs may each tell of the same movement: the instants of one, the bytes
of another. Told of a room, they are one movement.
"""

from __future__ import annotations

from pdtrace.store import Store

NAMED = "bootstrap_room="  # request_id of a movement that names nothing but its room

# The room of each movement of a pair: that of its leg, or as it names it itself.
_ROOMED = f"""
CREATE OR REPLACE TEMP TABLE _roomed AS
WITH single AS (
  SELECT bootstrap_room, min(deployment) AS deployment FROM legs WHERE bootstrap_room IS NOT NULL
  GROUP BY bootstrap_room HAVING count(DISTINCT deployment) = 1
), told AS (
  SELECT t.rowid AS row, t.leg, coalesce(l.bootstrap_room, substr(t.request_id, {len(NAMED) + 1})) AS room, l.deployment
  FROM transfers t LEFT JOIN legs l ON l.leg = t.leg
  WHERE coalesce(t.direction, 'prefill_to_decode') = 'prefill_to_decode'
    AND (l.bootstrap_room IS NOT NULL OR (t.leg IS NULL AND starts_with(t.request_id, '{NAMED}')))
)
SELECT row, room, coalesce(t.deployment, s.deployment, '') AS place
FROM told t LEFT JOIN single s ON t.leg IS NULL AND s.bootstrap_room = t.room"""
# A mover's own record says best when; then whoever has instants.
_MERGED = """
CREATE OR REPLACE TEMP TABLE _merged AS
WITH owner AS (
  SELECT bootstrap_room AS room, coalesce(deployment, '') AS place, min_by(leg, (role IS DISTINCT FROM 'prefill', leg)) AS leg
  FROM legs WHERE bootstrap_room IS NOT NULL AND container IS NOT TRUE AND observer = 'engine' GROUP BY ALL
), told AS (
  SELECT r.room, r.place, t.*, row_number() OVER (
    PARTITION BY r.room, r.place ORDER BY t.start_ns IS NULL, t.backend IS NULL, t.source, t.record, t.leg
  ) AS n
  FROM _roomed r JOIN transfers t ON t.rowid = r.row
), whole AS (
  SELECT room, place, min(source) AS source, min_by(record, n) AS record, min_by(leg, n) AS leg,
    min_by(request_id, n) AS request_id, min_by(source_worker, n) FILTER (source_worker IS NOT NULL) AS source_worker,
    min_by(destination_worker, n) FILTER (destination_worker IS NOT NULL) AS destination_worker,
    min_by(start_ns, n) AS start_ns, min_by(end_ns, n) AS end_ns,
    min_by(duration_ms, n) FILTER (duration_ms IS NOT NULL) AS duration_ms, max(bytes) AS bytes,
    min_by(backend, n) FILTER (backend IS NOT NULL) AS backend, min(direction) AS direction,
    CASE WHEN bool_or(outcome = 'failed') THEN 'failed' ELSE min(outcome) END AS outcome
  FROM told GROUP BY room, place
)
SELECT w.source, w.record, o.leg, coalesce(l.request_id, w.request_id) AS request_id, w.* EXCLUDE (room, place, source, record, leg, request_id)
FROM whole w LEFT JOIN owner o USING (room, place) LEFT JOIN legs l ON l.leg = o.leg
"""


def unite(store: Store) -> None:
    """Give movements that name a room their request, and make one of those that tell of the same room."""
    if "transfers" not in store.filled():
        return
    several = f"""SELECT count(*) FROM transfers t LEFT JOIN legs l ON l.leg = t.leg
                  WHERE starts_with(t.request_id, '{NAMED}') OR l.bootstrap_room IS NOT NULL"""
    if not store.scalar(several):
        return
    store.execute(_ROOMED)
    store.execute(_MERGED)
    columns = "source, record, leg, request_id, source_worker, destination_worker, start_ns, end_ns, duration_ms, bytes, backend, direction, outcome"
    store.execute("DELETE FROM transfers WHERE rowid IN (SELECT row FROM _roomed)")
    store.execute(f"INSERT INTO transfers ({columns}) SELECT {columns} FROM _merged")
    store.execute("DROP TABLE _roomed; DROP TABLE _merged")
