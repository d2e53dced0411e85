"""Token streams and prefill intervals of each worker, as the tables tell them."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import Any, Protocol

import numpy as np
import polars as pl

RESOLUTION_NS = 20_000_000  # instants known no better than this are not laid over each other
EMISSIONS_AT_ONCE = 32_000_000  # 128 MB of gaps

# Requests go by the number of their row: no text is joined, grouped or sorted. The sums over a stream's
# gaps are taken before the joins, through which lists would be carried.
_STREAMS = """
WITH told AS (
  SELECT rowid AS row, leg, coalesce(stream, 0) AS stream, first_ns, observer,
    first_ns + 1000 * CAST(list_sum(gaps_us) AS BIGINT) AS last_ns, len(gaps_us) + 1 AS emissions
  FROM streams
  WHERE first_ns IS NOT NULL AND len(gaps_us) > 0 AND list_count(gaps_us) = len(gaps_us)
),
seen AS (
  SELECT t.row, r.rowid AS request, t.stream, t.first_ns, t.last_ns, t.emissions,
    coalesce(t.observer, l.observer) AS observer, r.prompt_tokens,
    -- A stream that several attempts made has no single worker, unless the engine itself saw it.
    CASE WHEN coalesce(t.observer, l.observer) = 'engine' THEN coalesce(l.worker, r.decode_worker)
         WHEN coalesce(r.attempts, 1) <= 1 THEN r.decode_worker END AS worker
  FROM told AS t
  JOIN legs AS l ON l.leg = t.leg
  JOIN requests AS r ON r.request = l.request
  WHERE coalesce(l.resolution_ns, 1) <= $resolution_ns
)
SELECT *,
  list_position(['engine', 'frontend', 'router', 'gateway', 'client'], observer) AS nearness
FROM seen
WHERE worker IS NOT NULL
"""

_LISTS = """
SELECT s.rowid AS row, s.gaps_us, s.emission_tokens
FROM streams AS s SEMI JOIN _streams_wanted AS w ON w.row = s.rowid
WHERE s.rowid BETWEEN $low AND $high
"""

# Where a prompt was computed is what its leg says, never where its answer was decoded: remote
# prefills taken for local ones would flag every decode worker. What a router or front end saw of a
# prefill belongs to the request's prefill worker.
_PREFILLS = """
WITH seen AS (
  SELECT r.rowid AS request, l.rowid AS leg, i.detail = 'prefill_recompute' AS again,
    CASE WHEN l.observer = 'engine' AND l.worker IS NOT NULL THEN l.worker
         ELSE r.prefill_worker END AS worker,
    coalesce(i.start_ns, i.end_ns - i.duration_ns) AS start_ns,
    coalesce(i.end_ns, i.start_ns + i.duration_ns) AS end_ns,
    CAST(greatest(coalesce(l.prompt_tokens, r.prompt_tokens)
      - coalesce(l.cached_tokens, r.cached_tokens, 0), 0) AS DOUBLE) AS tokens,
    -- the engine's own word before others', steps before wall time
    100 * CAST(l.observer <> 'engine' AS BIGINT) + 10 * CAST(i.detail = 'prefill_wall' AS INTEGER)
      + coalesce(list_position(['measured', 'reported', 'placed', 'inferred'], i.basis), 9) AS place
  FROM intervals AS i
  JOIN legs AS l ON l.leg = i.leg
  JOIN requests AS r ON r.request = l.request
  WHERE i.detail IN ('prefill_exec', 'prefill_wall', 'prefill_recompute')
    AND i.basis <> 'upper_bound' AND i.censored IS NOT TRUE
    AND coalesce(i.clock, 'wall') = 'wall' AND coalesce(i.resolution_ns, 1) <= $resolution_ns
    AND l.role IS DISTINCT FROM 'decode' AND l.container IS NOT TRUE
)
SELECT *
FROM seen
WHERE worker IS NOT NULL AND end_ns > start_ns
"""

_NAMES = """
SELECT r.rowid AS number, r.request
FROM requests AS r SEMI JOIN _requests_wanted AS w ON w.number = r.rowid
"""

_WORKERS = """
SELECT w.worker, w.deployment, w.role,
  coalesce(bool_or(f.value ILIKE '%consumer%'), false) AS kv_consumer,
  any_value(d.decoded) AS decoded
FROM workers AS w
LEFT JOIN facts AS f ON f.worker = w.worker AND f.key = 'kv_role'
LEFT JOIN (
  SELECT decode_worker AS worker, count(*) AS decoded FROM requests
  WHERE output_tokens IS NULL OR output_tokens > 1 GROUP BY decode_worker
) AS d ON d.worker = w.worker
GROUP BY w.worker, w.deployment, w.role
ORDER BY w.worker
"""


class Tables(Protocol):
    """What is asked of the store."""

    def sql(self, query: str, **params: Any) -> pl.DataFrame:
        """Rows of a query."""

    def short(self, query: str, **params: Any) -> pl.DataFrame:
        """The same for an answer of few rows."""

    def temporary(self, name: str, rows: pl.DataFrame) -> None:
        """Make a temporary table of these rows."""


def workers(tables: Tables) -> Iterator[dict[str, Any]]:
    """What `interference_gaps.interference` asks for, worker after worker that has token times.

    Requests are numbers; `named` turns them into names.
    """
    streams = _nearest(tables.sql(_STREAMS, resolution_ns=RESOLUTION_NS))
    if not streams.height:
        return
    prefills = _told_once(tables.sql(_PREFILLS, resolution_ns=RESOLUTION_NS))
    known = {row["worker"]: row for row in tables.short(_WORKERS).iter_rows(named=True)}
    lists = _Lists(tables, streams.select("row", "emissions"))
    for worker in streams["worker"].unique(maintain_order=True).to_list():
        about = known.get(worker, {})
        yield {
            "worker": worker,
            "deployment": about.get("deployment"),
            "role": about.get("role"),
            "kv_consumer": bool(about.get("kv_consumer")),
            "decoded": about.get("decoded"),
            "streams": streams.filter(pl.col("worker") == worker),
            "prefills": prefills.filter(pl.col("worker") == worker),
            "load": lists.of,
        }


def _nearest(streams: pl.DataFrame) -> pl.DataFrame:
    """One row per stream, as the observer nearest to the engine saw it; by worker and time."""
    key = ["request", "stream"]
    if streams.height and streams.select(pl.struct(key).n_unique()).item() < streams.height:
        streams = streams.sort(
            "nearness", "emissions", "first_ns", "row",
            descending=[False, True, False, False], nulls_last=True,
        ).unique(key, keep="first")  # fmt: skip
    return streams.sort("worker", "first_ns", *key)


def _told_once(prefills: pl.DataFrame) -> pl.DataFrame:
    """The prefills of the leg that tells best of a request's prompt, by worker and time.

    A prompt computed in pieces has its tokens shared among them by their time.
    """
    key = ["worker", "request", "again"]
    if prefills.height and prefills.select(pl.struct(key).n_unique()).item() < prefills.height:
        said, length = (
            pl.col("place") * 2**40 + pl.col("leg"),
            pl.col("end_ns") - pl.col("start_ns"),
        )
        prefills = prefills.filter(said == said.min().over(key))
        prefills = prefills.with_columns(pl.col("tokens") * length / length.sum().over(key))
    return prefills.sort("worker", "start_ns", "request")


def named(tables: Tables, numbers: pl.DataFrame) -> pl.DataFrame:
    """The same rows with the names of requests for their numbers."""
    columns = [c for c in ("culprit", "victim") if c in numbers.columns and numbers.height]
    if not columns:
        return numbers
    wanted = pl.concat([numbers[c].alias("number") for c in columns]).drop_nulls().unique()
    tables.temporary("_requests_wanted", wanted.to_frame())
    names = tables.sql(_NAMES)
    for column in columns:
        found = numbers.select(number=column).join(
            names, on="number", how="left", maintain_order="left"
        )
        numbers = numbers.with_columns(found["request"].alias(column))
    return numbers


class _Lists:
    """Gaps of streams, read many streams at a time: those asked for and those that follow them."""

    def __init__(self, tables: Tables, streams: pl.DataFrame) -> None:
        self._tables, self._streams = tables, streams
        rows = streams["row"].to_numpy()
        self._place = np.zeros(int(rows.max()) + 1, dtype=np.int64)  # by row of the table
        self._place[rows] = np.arange(len(rows))
        self._total = np.cumsum(streams["emissions"].to_numpy())
        self._lock = Lock()
        self._held = (0, 0, pl.DataFrame())  # places from, to, and their lists in order of place

    def of(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The streams with their gaps; may be called from several threads."""
        places = self._place[rows["row"].to_numpy()]
        with self._lock:
            low, high = int(places.min()), int(places.max()) + 1
            if low < self._held[0] or high > self._held[1]:
                self._held = (0, 0, pl.DataFrame())  # not two at a time
                self._held = self._read(low, high)
            begin, _, lists = self._held
        return rows.hstack(lists[places - begin])

    def _read(self, low: int, high: int) -> tuple[int, int, pl.DataFrame]:
        full = self._total[low - 1] + EMISSIONS_AT_ONCE if low else EMISSIONS_AT_ONCE
        high = max(high, int(np.searchsorted(self._total, full, side="right")))
        wanted = self._streams[low:high].select("row")
        self._tables.temporary("_streams_wanted", wanted)
        found = self._tables.sql(_LISTS, low=wanted["row"].min(), high=wanted["row"].max())
        order = np.argsort(self._place[found["row"].to_numpy()])
        return low, high, found.drop("row")[order]
