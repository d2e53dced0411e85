"""Requests that an engine's log tells beside the engine's own spans of them: the spans stay.

Only logs whose collector says (fact NOTE) that their requests hold nothing which the engine's spans lack. Both
write the engine's request id; the log's worker is the spans', where one of them tells nearly all of its requests.
"""

from __future__ import annotations

from pdtrace import workers
from pdtrace.store import Store

NOTE = "_log_of_spanned_requests"
_NEAR_NS = 60 * 10**9  # one host's clock, but a log may stamp whole seconds at the end of a request
_MOST = 0.9

_TWINS = f"""
CREATE OR REPLACE TEMP TABLE log_twins AS
WITH noted AS (
  SELECT DISTINCT worker FROM facts WHERE key = '{NOTE}'
), told AS (
  SELECT leg, worker, role, request_id, start_ns, coalesce(end_ns, start_ns) AS end_ns, engine, span_id
  FROM legs l LEFT JOIN (SELECT worker, engine FROM workers) w USING (worker)
  WHERE observer = 'engine' AND request_id IS NOT NULL AND container IS NOT TRUE
)
SELECT l.leg AS outer_leg, i.leg AS inner_leg, l.worker AS log, i.worker AS spanned
FROM told l SEMI JOIN noted USING (worker)
JOIN told i ON i.request_id = l.request_id AND i.span_id IS NOT NULL AND i.engine = l.engine
WHERE l.span_id IS NULL AND (l.role = i.role OR l.role IS NULL OR i.role IS NULL)
  AND coalesce(least(abs(l.start_ns - i.start_ns), abs(l.end_ns - i.end_ns)) <= {_NEAR_NS}, true)
QUALIFY row_number() OVER (PARTITION BY l.leg ORDER BY abs(l.start_ns - i.start_ns), i.leg) = 1
"""
# The log's worker, and the one that spanned nearly all of what both tell; two logs of one server (its runs) both are.
_SAME = f"""
WITH pairs AS (
  SELECT log, arg_max(spanned, n) AS spanned
  FROM (SELECT log, spanned, count(*) AS n FROM log_twins WHERE log <> spanned GROUP BY ALL)
  GROUP BY log HAVING max(n) >= {_MOST} * sum(n)
)
SELECT unnest([log, spanned]) AS worker, 'process' AS kind, log || ' = ' || spanned AS value FROM pairs
"""


def unite(store: Store) -> None:
    """Leave the spans' record of such requests; what the log reported of them goes with it."""
    if not store.scalar(f"SELECT count(*) FROM facts WHERE key = '{NOTE}'"):
        return
    store.execute(_TWINS)
    if store.count("log_twins"):
        outer = "SELECT outer_leg FROM log_twins"
        store.execute(f"DELETE FROM intervals WHERE leg IN ({outer})")
        for table in ("reported", "transfers"):
            store.execute(
                f"UPDATE {table} SET leg = t.inner_leg FROM log_twins t WHERE {table}.leg = t.outer_leg"
            )
        store.execute(f"DELETE FROM legs WHERE leg IN ({outer})")
        same = store.sql(_SAME)
        if same.height:
            store.append("worker_aliases", same)
            workers.resolve(store)
    store.execute("DROP TABLE log_twins")
