"""Traces whose ids were used again (seeded load generators, seeded servers): told apart by time.

Span ids of one trace are unique while it lasts. Where a (trace, span) stands twice with different
starts, the spans of that trace are cut where nothing of it was open.
"""

from __future__ import annotations

from pdtrace.store import Store

MARK = "~"
QUIET_NS = 10**9  # nothing of the trace was open for this long: what follows is another run

_FIND = f"""
CREATE OR REPLACE TEMP TABLE span_episodes AS
WITH again AS (
  SELECT DISTINCT trace_id FROM spans
  WHERE trace_id IS NOT NULL AND span_id IS NOT NULL AND hash(trace_id, span_id) IN (FROM span_twins)
  GROUP BY trace_id, span_id HAVING count(*) > 1
),
ordered AS (
  SELECT s.rowid AS span, s.trace_id, s.start_ns, s.span_id,
         max(greatest(s.start_ns, s.end_ns)) OVER (
           PARTITION BY s.trace_id ORDER BY s.start_ns, s.end_ns, s.span_id
           ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS until_ns
  FROM spans s SEMI JOIN again USING (trace_id)
)
SELECT span, sum(CAST(coalesce(start_ns > until_ns + {QUIET_NS}, false) AS BIGINT)) OVER (
         PARTITION BY trace_id ORDER BY start_ns, span_id) AS episode
FROM ordered
QUALIFY episode > 0
"""


def find(store: Store) -> bool:
    """Temp table span_episodes(span rowid, episode) of spans behind the first run of their ids.

    Looks at the spans of the temp table span_twins (spans.deduplicate) only, and drops it.
    """
    again = store.rows("SELECT 1 FROM span_twins LIMIT 1")
    if again:
        store.execute(_FIND)
        again = store.rows("SELECT 1 FROM span_episodes LIMIT 1")
    store.execute("DROP TABLE span_twins")
    return bool(again)


def trace_sql() -> str:
    """SQL for the trace id of a span `t` joined with span_episodes `e`."""
    return f"t.trace_id || coalesce('{MARK}' || e.episode, '')"


def forget(store: Store) -> None:
    """Give legs and decisions their traces' own ids back; leg ids stay apart."""
    for table in ("legs", "decisions"):
        store.execute(
            f"UPDATE {table} SET trace_id = regexp_replace(trace_id, '{MARK}[0-9]+$', '')"
            f" WHERE contains(trace_id, '{MARK}')"
        )
    store.execute("DROP TABLE IF EXISTS span_episodes")
