"""Requests that an engine's log tells beside the engine's own spans of them: the spans stay.

Only logs whose collector says (fact NOTE) that their requests hold nothing which the engine's spans lack. Both
write the engine's request id; the log's worker is the spans', where one of them tells nearly all of its requests.
A file of requests (fact FILE) names no server at all: it is the one whose spans or log tell nearly all requests that
both know. Its records stay, for they hold times of their own.
"""

from __future__ import annotations

from pdtrace import workers
from pdtrace.store import Store

NOTE = "_log_of_spanned_requests"
FILE = "_file_of_requests"
_NEAR_NS = 60 * 10**9  # one host's clock, but a log may stamp whole seconds at the end of a request
_MOST = 0.9

# Records of the workers with a fact, each with another record of the same request: by who may tell it, the first of them.
_TWINS = """
CREATE OR REPLACE TEMP TABLE log_twins AS
WITH noted AS (
  SELECT DISTINCT worker FROM facts WHERE key = '{fact}'
), told AS (
  SELECT leg, worker, role, request_id, start_ns, coalesce(end_ns, start_ns) AS end_ns, engine, span_id,
    worker IN (FROM noted) AS is_noted
  FROM legs l LEFT JOIN (SELECT worker, engine FROM workers) w USING (worker)
  WHERE observer = 'engine' AND request_id IS NOT NULL AND container IS NOT TRUE
)
SELECT l.leg AS outer_leg, i.leg AS inner_leg, l.worker AS log, i.worker AS spanned
FROM told l JOIN told i ON i.request_id = l.request_id AND i.engine = l.engine
WHERE l.is_noted AND l.span_id IS NULL AND ({other}) AND (l.role = i.role OR l.role IS NULL OR i.role IS NULL)
  AND coalesce(least(abs(l.start_ns - i.start_ns), abs(l.end_ns - i.end_ns)) <= {near}, true)
QUALIFY row_number() OVER (PARTITION BY l.leg ORDER BY i.span_id IS NULL, abs(l.start_ns - i.start_ns), i.leg) = 1
"""
_BESIDE_SPANS = _TWINS.format(fact=NOTE, other="i.span_id IS NOT NULL", near=_NEAR_NS)
_BESIDE_ANY = _TWINS.format(
    fact=FILE, other="NOT i.is_noted", near=_NEAR_NS
)  # spans before log lines
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
    """Leave the spans' record of logged requests; what the log reported of them goes with it. Files find their servers."""
    if _has(store, NOTE):
        store.execute(_BESIDE_SPANS)
        if store.count("log_twins"):
            _leave_spanned(store)
            workers.unite(store, _SAME)
        store.execute("DROP TABLE log_twins")
    if _has(store, FILE):
        store.execute(_BESIDE_ANY)
        workers.unite(store, _SAME)
        store.execute("DROP TABLE log_twins")


def _has(store: Store, fact: str) -> bool:
    return bool(store.scalar(f"SELECT count(*) FROM facts WHERE key = '{fact}'"))


def _leave_spanned(store: Store) -> None:
    outer = "SELECT outer_leg FROM log_twins"
    store.execute(f"DELETE FROM intervals WHERE leg IN ({outer})")
    for table in ("reported", "transfers"):
        store.execute(
            f"UPDATE {table} SET leg = t.inner_leg FROM log_twins t WHERE {table}.leg = t.outer_leg"
        )
    store.execute(f"DELETE FROM legs WHERE leg IN ({outer})")
