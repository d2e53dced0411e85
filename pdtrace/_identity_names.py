"""Workers that a router's choice or a KV movement names by a bare name: the worker of that deployment that has it."""

from __future__ import annotations

from pdtrace.store import Store

# A name that two workers of a deployment share (a service, a host) tells nothing.
_NAMES = """
CREATE OR REPLACE TEMP TABLE _bare_names AS
WITH named AS (
  SELECT worker, kind, value FROM worker_aliases WHERE kind NOT IN ('file', 'pid')
  -- a router knows a worker by its address alone
  UNION ALL SELECT worker, kind, 'address:' || value FROM worker_aliases WHERE kind = 'address'
)
SELECT w.deployment, a.value, min(a.worker) AS worker
FROM named a
JOIN workers w ON w.worker = a.worker
WHERE w.deployment IS NOT NULL
GROUP BY w.deployment, a.value
HAVING count(DISTINCT a.worker) = 1
"""
_COLUMNS = (
    ("decisions", "worker"),
    ("transfers", "source_worker"),
    ("transfers", "destination_worker"),
)


def resolve(store: Store) -> None:
    """Replace bare names in choices and movements of known requests by the workers' ids."""
    filled = store.filled()
    for table, column in _COLUMNS:
        if table not in filled:
            continue
        bare = f"""SELECT count(*) FROM {table} t WHERE t.leg IS NOT NULL AND t.{column} IS NOT NULL
                   AND t.{column} NOT IN (SELECT worker FROM workers)"""
        if not store.scalar(bare):
            continue
        store.execute(_NAMES)
        store.execute(
            f"""UPDATE {table} SET {column} = b.worker
                FROM legs l JOIN _bare_names b ON b.deployment = l.deployment
                WHERE {table}.leg = l.leg AND {table}.{column} = b.value
                  AND {table}.{column} NOT IN (SELECT worker FROM workers)"""
        )
        store.execute("DROP TABLE _bare_names")
