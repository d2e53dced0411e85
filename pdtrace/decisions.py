"""Router choices that two records tell (a span and a log line): one row, with what either knows."""

from __future__ import annotations

import polars as pl

from pdtrace.spans import NO_DUPLICATES
from pdtrace.store import Store

TOLD_TWICE = "router's choice, told by its span"
_NEAR_NS = 1_000_000_000  # a choice is logged within this of its span's end

# A log line has no leg, or one of a log's own. It goes with the nearest choice of the same worker for the same request;
# where only one of two records of the same router knows whom it chose, with the nearest.
_PAIRS = f"""
CREATE OR REPLACE TEMP TABLE decision_pairs AS
SELECT l.rowid AS told, s.rowid AS kept, l.source, l.record, l.cost, l.overlap_tokens, l.load,
       l.candidates, l.policy, l.worker
FROM decisions l
JOIN decisions s ON s.request_id = l.request_id
  AND (s.worker = l.worker OR (l.leg IS NOT NULL AND (s.worker IS NULL OR l.worker IS NULL)))
WHERE s.leg IS NOT NULL AND (l.leg IS NULL OR (l.trace_id IS NULL AND s.trace_id IS NOT NULL))
  AND abs(s.time_ns - l.time_ns) <= {_NEAR_NS}
  -- A log line may call the choice of the only worker one for decode.
  AND (s.phase = l.phase OR s.phase IS NULL OR l.phase IS NULL OR 'aggregated' IN (s.phase, l.phase))
QUALIFY row_number() OVER (
  PARTITION BY l.rowid ORDER BY s.phase IS DISTINCT FROM l.phase, abs(s.time_ns - l.time_ns), s.leg
) = 1
"""


def unite(store: Store) -> pl.DataFrame:
    """Give spans' choices what only the log says of them (cost, load) and drop the log's rows.

    Returns source, reason, records, conflicts, positions of the records that gave no row of their own.
    """
    if not store.count("decisions"):
        return NO_DUPLICATES
    store.execute(_PAIRS)
    store.execute(
        """UPDATE decisions SET cost = coalesce(decisions.cost, p.cost),
               overlap_tokens = coalesce(decisions.overlap_tokens, p.overlap_tokens),
               load = coalesce(decisions.load, p.load),
               candidates = coalesce(decisions.candidates, p.candidates),
               policy = coalesce(decisions.policy, p.policy),
               worker = coalesce(decisions.worker, p.worker)
           FROM decision_pairs p WHERE decisions.rowid = p.kept"""
    )
    removed = store.sql(
        f"""SELECT source, '{TOLD_TWICE.replace("'", "''")}' AS reason, count(*) AS records,
                   0::BIGINT AS conflicts, list_sort(min(record, 5)) AS positions
            FROM decision_pairs WHERE record IS NOT NULL GROUP BY source ORDER BY source"""
    )
    store.execute("DELETE FROM decisions WHERE rowid IN (SELECT told FROM decision_pairs)")
    store.execute("DROP TABLE decision_pairs")
    return removed
