"""Requests told on a clock without a date and again by spans: the date is the spans', the stamps are one server's.

A server that writes its request metrics on its process clock (TensorRT-LLM) writes spans of the same stamps. Their
durations from arrival to first and last token agree to rounding, request after request, at one offset: nothing else
does. Then the clock has its date, and what both tell counts once: the metrics' record stays, which has more stamps.
"""

from __future__ import annotations

from pdtrace import workers
from pdtrace.model import UNDATED
from pdtrace.store import Store

_STEP_NS = 2_000  # seconds as doubles on one side, differences of them on the other
_APART_NS = 10**9  # clocks drift apart over a run, but not by this
_LEAST = 0.5  # of the requests of the side that tells fewer: records are dropped, spans are sampled

_PAIRS = f"""
CREATE OR REPLACE TEMP TABLE dated_twins AS
WITH entered AS (
  -- a server's own record begins before the executor's, with its front end
  SELECT leg, max(end_ns) AS entered_ns FROM intervals WHERE detail = 'frontend' AND end_leg IS NULL GROUP BY leg
), placed AS (
  SELECT l.leg, l.worker, l.clock, w.engine, coalesce(e.entered_ns, l.start_ns) AS start_ns, l.first_token_ns,
    coalesce(l.last_token_ns, l.end_ns) AS last_ns, l.span_id IS NOT NULL AS spanned
  FROM legs l JOIN workers w ON w.worker = l.worker LEFT JOIN entered e ON e.leg = l.leg
  WHERE l.observer = 'engine' AND l.container IS NOT TRUE
), told AS (
  SELECT leg, worker, clock, engine, spanned, start_ns, last_ns - start_ns AS lasted, first_token_ns - start_ns AS first
  FROM placed WHERE first_token_ns > start_ns
), undated AS (
  SELECT *, unnest([lasted // {_STEP_NS} - 1, lasted // {_STEP_NS}, lasted // {_STEP_NS} + 1]) AS bin
  FROM told WHERE starts_with(clock, '{UNDATED}')
), dated AS (
  SELECT *, lasted // {_STEP_NS} AS bin FROM told WHERE coalesce(clock, 'wall') = 'wall' AND spanned
), alike AS (
  SELECT u.leg AS undated_leg, d.leg AS dated_leg, u.clock, u.worker AS undated_worker, d.worker AS dated_worker,
    d.start_ns - u.start_ns AS offset_ns
  FROM undated u JOIN dated d ON d.engine = u.engine AND d.bin = u.bin
  WHERE abs(d.lasted - u.lasted) <= {_STEP_NS} AND abs(d.first - u.first) <= {_STEP_NS}
), steady AS (
  SELECT *, median(offset_ns) OVER (PARTITION BY clock, dated_worker)::BIGINT AS middle_ns,
    count(*) OVER (PARTITION BY clock, dated_worker) AS n
  FROM alike
), kept AS (
  FROM steady WHERE abs(offset_ns - middle_ns) <= {_APART_NS}
  QUALIFY count(*) OVER (PARTITION BY undated_leg, dated_worker) = 1 AND count(*) OVER (PARTITION BY dated_leg, clock) = 1
), sizes AS (
  SELECT k.undated_worker, k.dated_worker, k.clock, count(*) AS n,
    (SELECT count(*) FROM told t WHERE t.clock = k.clock AND t.worker = k.undated_worker) AS undated,
    (SELECT count(*) FROM told t WHERE t.spanned AND t.worker = k.dated_worker) AS dated
  FROM kept k GROUP BY ALL
)
SELECT k.* FROM kept k JOIN sizes s USING (clock, undated_worker, dated_worker)
WHERE s.n >= {_LEAST} * least(s.undated, s.dated)
-- of several servers that fit the one that most requests tell; where two fit alike nothing tells which it is
QUALIFY rank() OVER (PARTITION BY undated_leg ORDER BY s.n DESC) = 1
  AND count(*) OVER (PARTITION BY undated_leg, s.n) = 1
"""
# Processes whose clocks were aligned write one clock, each to its own file: records of one request tell which.
_ALIGNED = f"""
WITH named AS (
  SELECT l.clock, l.external_id, l.start_ns FROM legs l SEMI JOIN sources s ON l.clock = '{UNDATED}' || s.path
  WHERE l.external_id IS NOT NULL AND l.start_ns IS NOT NULL
)
SELECT DISTINCT a.clock, b.clock FROM named a JOIN named b ON b.external_id = a.external_id AND b.clock > a.clock
WHERE abs(a.start_ns - b.start_ns) <= {600 * _APART_NS} ORDER BY ALL
"""
_OFFSETS = """
SELECT clock, median(offset_ns)::BIGINT, count(*) FROM dated_twins GROUP BY clock ORDER BY count(*) DESC, clock
"""
_MOVES = {
    "transfers": ("start_ns", "end_ns"),
    "intervals": ("start_ns", "end_ns"),
    "streams": ("first_ns",),
    "legs": ("start_ns", "first_token_ns", "last_token_ns", "end_ns"),
}
_FROM_SPAN = (
    "trace_id", "span_id", "parent_span_id", "trace_alone_ok", "model", "prompt_tokens", "output_tokens", "max_tokens", "role", "finish_reason",
)  # fmt: skip
_SAME = """
WITH pairs AS (SELECT DISTINCT undated_worker, dated_worker FROM dated_twins WHERE undated_leg IN (SELECT leg FROM legs))
SELECT unnest([undated_worker, dated_worker]) AS worker, 'process' AS kind, undated_worker || ' = ' || dated_worker AS value
FROM pairs QUALIFY count(*) OVER (PARTITION BY undated_worker) = 1 AND count(*) OVER (PARTITION BY dated_worker) = 1
"""


def find(store: Store) -> bool:
    """Which records of such clocks are spans' too; before repeats of them are dropped, whose clocks get a date as well."""
    store.execute(_PAIRS)
    if not store.count("dated_twins"):
        store.execute("DROP TABLE dated_twins")
        return False
    return True


def _dates(store: Store) -> dict[str, int]:
    """Offset of each clock; one for all that are one clock, so that what was aligned stays aligned: spans' hosts may not be."""
    offsets = {clock: offset for clock, offset, _ in store.rows(_OFFSETS)}
    of: dict[str, str] = {}

    def first(clock: str) -> str:
        while of.setdefault(clock, clock) != clock:
            clock = of[clock]
        return clock

    for a, b in store.rows(_ALIGNED):
        of[first(b)] = first(a)
    common: dict[str, int] = {}
    for clock, offset in offsets.items():  # the one that most requests tell comes first
        common.setdefault(first(clock), offset)
    return {clock: common[first(clock)] for clock in {*offsets, *of} if first(clock) in common}


def unite(store: Store) -> None:
    """Give the clocks that spans date their date, and leave one record of what both tell."""
    store.execute("CREATE OR REPLACE TEMP TABLE dates (clock VARCHAR, offset_ns BIGINT)")
    store.connection.executemany("INSERT INTO dates VALUES (?, ?)", list(_dates(store).items()))
    store.execute(
        "CREATE OR REPLACE TEMP TABLE dated_legs AS SELECT l.leg, d.offset_ns FROM legs l JOIN dates d ON d.clock = l.clock"
    )
    for table, columns in _MOVES.items():
        moved = ", ".join(f"{c} = {table}.{c} + d.offset_ns" for c in columns)
        clock = "" if table == "transfers" else ", clock = 'wall'"
        store.execute(
            f"UPDATE {table} SET {moved}{clock} FROM dated_legs d WHERE d.leg = {table}.leg"
        )
    store.execute(
        f"""UPDATE sources SET start_ns = sources.start_ns + d.offset_ns, end_ns = sources.end_ns + d.offset_ns, clock = 'wall'
            FROM (SELECT l.source, any_value(d.offset_ns) AS offset_ns FROM legs l JOIN dated_legs d USING (leg) GROUP BY l.source) d
            WHERE sources.source = d.source AND starts_with(sources.clock, '{UNDATED}')"""
    )
    sets = ", ".join(f"{c} = coalesce(legs.{c}, s.{c})" for c in _FROM_SPAN)
    store.execute(
        f"UPDATE legs SET {sets} FROM dated_twins t JOIN legs s ON s.leg = t.dated_leg WHERE legs.leg = t.undated_leg"
    )
    twice = "FROM dated_twins t WHERE t.undated_leg IN (SELECT leg FROM legs)"
    store.execute(
        f"UPDATE intervals SET end_leg = t.undated_leg FROM (SELECT * {twice}) t WHERE intervals.end_leg = t.dated_leg"
    )
    for table in ("intervals", "streams", "transfers", "reported", "legs"):
        store.execute(f"DELETE FROM {table} WHERE leg IN (SELECT dated_leg {twice})")
    workers.unite(store, _SAME)
    store.execute("DROP TABLE dated_twins; DROP TABLE dates; DROP TABLE dated_legs")
