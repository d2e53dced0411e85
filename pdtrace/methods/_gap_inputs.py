"""Token streams and prefill intervals of each worker, as the tables tell them."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import Any, Protocol

import numpy as np
import polars as pl

from pdtrace._lookup import NOWHERE, places

RESOLUTION_NS = 20_000_000  # instants known no better than this are not laid over each other
EMISSIONS_AT_ONCE = 32_000_000  # 128 MB of gaps

# Requests go by the number of their row, legs by their place among the legs: texts are compared once, by hashes. The
# sums over a stream's gaps are taken where the gaps lie. Rows of a table stand in any order: what begins at the same
# instant is put in the order of `mark`, lest two runs add up in different orders.
_REQUESTS = """
SELECT rowid AS request, request AS name, prefill_worker, decode_worker,
  coalesce(attempts, 1) <= 1 AS tried_once, prompt_tokens, cached_tokens, hash(request) AS mark
FROM requests
"""

_LEGS = """
SELECT hash(leg) AS number, leg, request, worker, observer, coalesce(observer = 'engine', false) AS of_engine,
  coalesce(resolution_ns, 1) <= $resolution_ns AS sharp,
  role IS DISTINCT FROM 'decode' AND container IS NOT TRUE AS prefills,
  prompt_tokens AS leg_prompt_tokens, cached_tokens AS leg_cached_tokens, coalesce(stream, 0) AS number_of_stream
FROM legs
WHERE request IS NOT NULL
"""

_STREAMS = """
SELECT rowid AS row, leg, coalesce(stream, 0) AS stream, first_ns, observer AS told_by,
  first_ns + 1000 * CAST(list_sum(gaps_us) AS BIGINT) AS last_ns, len(gaps_us) + 1 AS emissions
FROM streams
WHERE first_ns IS NOT NULL AND len(gaps_us) > 0 AND list_count(gaps_us) = len(gaps_us)
"""
_NEAREST = ("engine", "frontend", "router", "gateway", "client")

_LISTS = """
SELECT s.rowid AS row, s.gaps_us, s.emission_tokens
FROM streams AS s SEMI JOIN _streams_wanted AS w ON w.row = s.rowid
WHERE s.rowid BETWEEN $low AND $high
"""

_PREFILLS = """
SELECT leg, detail = 'prefill_recompute' AS again,
  coalesce(start_ns, end_ns - duration_ns) AS start_ns,
  coalesce(end_ns, start_ns + duration_ns) AS end_ns,
  -- steps before wall time
  10 * CAST(detail = 'prefill_wall' AS BIGINT)
    + coalesce(list_position(['measured', 'reported', 'placed', 'inferred'], basis), 9) AS place
FROM intervals
WHERE detail IN ('prefill_exec', 'prefill_wall', 'prefill_recompute')
  AND basis <> 'upper_bound' AND censored IS NOT TRUE
  AND (coalesce(clock, 'wall') = 'wall' OR starts_with(clock, 'steady:'))
  AND coalesce(resolution_ns, 1) <= $resolution_ns
"""

_NAMES = """
SELECT r.rowid AS number, r.request
FROM requests AS r SEMI JOIN _requests_wanted AS w ON w.number = r.rowid
"""

# Which rank served whom, of workers with several (view request_ranks); decoded: likewise.
_RANKS = """
SELECT q.rowid AS request, r.worker, r.rank,
  q.decode_worker = r.worker AND (q.output_tokens IS NULL OR q.output_tokens > 1) AS decoded
FROM request_ranks AS r
JOIN requests AS q ON q.request = r.request
ORDER BY q.rowid, r.worker
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
    """What `_gap_ranks.judged` asks for, worker after worker that has token times.

    Requests are numbers; `named` turns them into names.
    """
    told = tables.sql(_STREAMS)
    if not told.height:
        return
    legs = _legs(tables)
    streams = _nearest(_streams(told, legs))
    if not streams.height:
        return
    prefills = _told_once(_prefills(tables.sql(_PREFILLS, resolution_ns=RESOLUTION_NS), legs))
    known = {row["worker"]: row for row in tables.short(_WORKERS).iter_rows(named=True)}
    lists = _Lists(tables, streams.select("row", "emissions"))
    computed = _by_worker(prefills)
    ranks = tables.sql(_RANKS)
    for worker, mine in _by_worker(streams).items():
        about = known.get(worker, {})
        yield {
            "worker": worker,
            "deployment": about.get("deployment"),
            "role": about.get("role"),
            "kv_consumer": bool(about.get("kv_consumer")),
            "decoded": about.get("decoded"),
            "streams": mine,
            "prefills": computed.get(worker, prefills.clear()),
            "load": lists.of,
            "ranks": ranks.filter(pl.col("worker") == worker).drop("worker"),
        }


def _legs(tables: Tables) -> pl.DataFrame:
    """The legs of requests with the numbers of these and what is asked of both."""
    legs = tables.sql(_LEGS, resolution_ns=RESOLUTION_NS)
    requests = tables.sql(_REQUESTS)
    place = places(legs["request"], requests["name"])
    known = place != NOWHERE
    if not known.all():
        legs, place = legs.filter(pl.Series(known)), place[known]
    names = pl.col("worker", "observer", "prefill_worker", "decode_worker").cast(pl.Categorical)
    of_requests = requests.drop("name").with_columns(
        pl.col("prefill_worker", "decode_worker").cast(pl.Categorical)
    )
    return legs.drop("request").hstack(of_requests[place]).with_columns(names)


def _on_legs(rows: pl.DataFrame, legs: pl.DataFrame, *of_legs: str) -> pl.DataFrame:
    """The rows whose leg is known, with these columns of it."""
    place = places(rows["leg"], legs["leg"])
    known = place != NOWHERE
    if not known.all():
        rows, place = rows.filter(pl.Series(known)), place[known]
    return rows.drop("leg").hstack(legs.select(of_legs)[place])


def _streams(told: pl.DataFrame, legs: pl.DataFrame) -> pl.DataFrame:
    """Streams with the request and worker they belong to."""
    told = told.with_columns(pl.col("told_by").cast(pl.Categorical))
    rows = _on_legs(
        told, legs, "request", "mark", "worker", "observer", "sharp", "tried_once", "decode_worker",
        "prompt_tokens",
    )  # fmt: skip
    observer = pl.coalesce("told_by", "observer")
    by_engine = (observer == "engine").fill_null(value=False)
    # A stream that several attempts made has no single worker, unless the engine itself saw it.
    worker = pl.when(by_engine).then(pl.coalesce("worker", "decode_worker"))
    rows = rows.filter("sharp").select(
        "row", "request", "mark", "stream", "first_ns", "last_ns", "emissions", observer.alias("observer"),
        "prompt_tokens", worker.when("tried_once").then("decode_worker").alias("worker"),
    )  # fmt: skip
    return _numbered_workers(rows.drop_nulls("worker"))


def _prefills(rows: pl.DataFrame, legs: pl.DataFrame) -> pl.DataFrame:
    """Prefill intervals with their request and worker, what the leg says of the prompt, and how well it tells.

    Where a prompt was computed is what its leg says, never where its answer was decoded: remote prefills taken for local
    ones would flag every decode worker. What a router or front end saw of a prefill belongs to the request's prefill worker.
    """
    rows = _on_legs(
        rows, legs, "request", "mark", "number", "worker", "of_engine",
        "prefills", "prefill_worker", "prompt_tokens", "cached_tokens", "leg_prompt_tokens",
        "leg_cached_tokens", "number_of_stream",
    )  # fmt: skip
    here = pl.col("of_engine") & pl.col("worker").is_not_null()
    prompt = pl.coalesce("leg_prompt_tokens", "prompt_tokens")
    cached = pl.coalesce("leg_cached_tokens", "cached_tokens")
    rows = rows.filter(pl.col("prefills") & (pl.col("end_ns") > pl.col("start_ns"))).select(
        "request", "mark", pl.col("number").alias("leg"), "again",
        pl.when(here).then("worker").otherwise("prefill_worker").alias("worker"),
        "start_ns", "end_ns",
        (prompt - cached.fill_null(0)).clip(lower_bound=0).fill_null(0).cast(pl.Float64).alias("tokens"),
        cached.is_not_null().alias("sure"), pl.col("number_of_stream").alias("stream"),
        # the engine's own word before others'
        (100 * pl.col("of_engine").not_().cast(pl.Int64) + pl.col("place")).alias("place"),
    )  # fmt: skip
    return _numbered_workers(rows.drop_nulls("worker"))


def _numbered_workers(rows: pl.DataFrame) -> pl.DataFrame:
    """The same with workers as an Enum in the order of their names."""
    names = rows["worker"].unique().cast(pl.String).sort()
    return rows.with_columns(pl.col("worker").cast(pl.Enum(names)))


def _by_worker(rows: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Rows that stand in the order of workers, by the name of each."""
    number = rows["worker"].to_physical().to_numpy()
    workers = rows.schema["worker"]
    names = workers.categories.to_list() if isinstance(workers, pl.Enum) else []
    ends = np.searchsorted(number, np.arange(len(names)), side="right").tolist()
    return {
        name: rows[begin:end] for name, begin, end in zip(names, [0, *ends[:-1]], ends, strict=True)
    }


def _nearest(streams: pl.DataFrame) -> pl.DataFrame:
    """One row per stream, as the observer nearest to the engine saw it; by worker and time."""
    if _repeated(streams, "request", "stream"):
        nearness = pl.col("observer").replace_strict(
            _NEAREST, range(len(_NEAREST)), default=None, return_dtype=pl.Int64
        )
        streams = streams.sort(
            nearness, "emissions", "first_ns", "last_ns", "row",
            descending=[False, True, False, False, False], nulls_last=True,
        ).unique(["request", "stream"], keep="first")  # fmt: skip
    return _in_order(streams, "worker", "first_ns", "mark", "stream").drop("mark")


def _told_once(prefills: pl.DataFrame) -> pl.DataFrame:
    """The prefills of the leg that tells best of a prompt (of equals the one with most tokens), by worker and time.

    Each stream of a request (n > 1) is a prompt to its engine: the first computes it, the others find most of it in
    the cache. A prompt computed in pieces has its tokens shared among them by their time.
    """
    key = ["worker", "request", "again", "stream"]
    if _repeated(prefills, *key):
        for said in (pl.col("place"), -pl.col("tokens"), pl.col("leg")):
            prefills = prefills.filter(said == said.min().over(key))
        length = pl.col("end_ns") - pl.col("start_ns")
        prefills = prefills.with_columns(pl.col("tokens") * length / length.sum().over(key))
    return _in_order(prefills, "worker", "start_ns", "mark", "stream").drop("mark", "stream")


def _repeated(rows: pl.DataFrame, *key: str) -> bool:
    """Whether two rows have the same whole numbers in these columns."""
    one = np.zeros(rows.height, dtype=np.int64)
    for name in key:
        column = rows[name].to_physical().cast(pl.Int64).to_numpy()
        one = one * (int(column.max(initial=0)) + 1) + column
    return bool(pl.Series(one).n_unique() < rows.height)


def _in_order(rows: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Sorted by whole numbers; mostly they are in order already, which a stable sort makes use of."""
    return rows[np.lexsort([rows[name].to_physical().to_numpy() for name in reversed(by)])]


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
