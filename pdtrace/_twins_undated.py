"""A worker's work told by its own records and again by its router's, on one clock without a date.

The same id, the same start and the same last token to the microsecond are one piece of work. The worker's own
record stays: what its router repeats has passed through headers and is never more.
"""

from __future__ import annotations

from pdtrace import _twins_dated, workers
from pdtrace.model import UNDATED
from pdtrace.store import Store

_SAME_NS = 1_000
# The router's own leg names the record that repeats.
_PAIRS = f"""
CREATE OR REPLACE TEMP TABLE undated_twins AS
WITH told AS (
  SELECT leg, source, record, worker, observer, external_id, start_ns, end_ns FROM legs
  WHERE starts_with(clock, '{UNDATED}') AND external_id IS NOT NULL AND start_ns IS NOT NULL
)
SELECT a.leg AS repeated, b.leg AS own, a.worker AS named, b.worker AS process
FROM told a
JOIN told r ON r.source = a.source AND r.record = a.record AND r.observer = 'router'
JOIN told b ON b.external_id = a.external_id AND b.source <> a.source AND b.observer = 'engine'
  AND abs(b.start_ns - a.start_ns) <= {_SAME_NS} AND abs(b.end_ns - a.end_ns) <= {_SAME_NS}
LEFT JOIN told x ON x.source = b.source AND x.record = b.record AND x.observer = 'router'
WHERE a.observer = 'engine' AND x.leg IS NULL
QUALIFY row_number() OVER (PARTITION BY a.leg ORDER BY b.leg) = 1
  AND row_number() OVER (PARTITION BY b.leg ORDER BY a.leg) = 1
"""
# A name of one process only; one that two processes' work bears is a load balancer's.
_SAME = """
WITH pairs AS (SELECT DISTINCT named, process FROM undated_twins WHERE named IS NOT NULL AND process IS NOT NULL)
SELECT unnest([named, process]) AS worker, 'process' AS kind, named || ' = ' || process AS value FROM pairs
QUALIFY count(*) OVER (PARTITION BY named) = 1 AND count(*) OVER (PARTITION BY process) = 1
"""


def _is_any(store: Store) -> bool:
    """Whether a leg has such a clock."""
    if (kept := store.kept_aside("legs")) is not None:
        return bool(kept["clock"].str.starts_with(UNDATED).any())
    return bool(store.rows(f"SELECT 1 FROM legs WHERE starts_with(clock, '{UNDATED}') LIMIT 1"))


def unite(store: Store) -> None:
    """Leave the worker's own record; what only its router knew of the same work goes to it."""
    if not _is_any(store):
        return
    dated = _twins_dated.find(store)
    _unite_repeats(store)
    if dated:
        _twins_dated.unite(store)


def _unite_repeats(store: Store) -> None:
    store.execute(_PAIRS)
    if store.count("undated_twins"):
        store.execute(
            """UPDATE legs SET first_token_delivered = coalesce(legs.first_token_delivered, r.first_token_delivered)
               FROM undated_twins t JOIN legs r ON r.leg = t.repeated WHERE legs.leg = t.own"""
        )
        store.execute(
            """UPDATE transfers SET source_worker = coalesce(transfers.source_worker, r.source_worker)
               FROM undated_twins t JOIN transfers r ON r.leg = t.repeated WHERE transfers.leg = t.own"""
        )
        store.execute(
            "UPDATE intervals SET end_leg = t.own FROM undated_twins t WHERE intervals.end_leg = t.repeated"
        )
        for table in ("intervals", "streams", "transfers", "reported", "legs"):
            store.execute(f"DELETE FROM {table} WHERE leg IN (SELECT repeated FROM undated_twins)")
        workers.unite(store, _SAME)
    store.execute("DROP TABLE undated_twins")
