"""Each worker's requests as one observer saw them, so that all their instants are on one clock.

The observer is the innermost one that saw nine in ten of the worker's requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from pdtrace._lookup import NOWHERE, Ints, places

if TYPE_CHECKING:
    from pdtrace.methods import Tables

_REQUESTS = """
SELECT r.deployment, r.decode_worker AS worker, {rank} AS rank, r.request, r.prompt_tokens, r.cached_tokens,
  r.output_tokens, r.streams, r.outcome, hash(r.request) AS place
FROM requests AS r {ranks}
WHERE r.decode_worker IS NOT NULL
"""
_RANKS = "LEFT JOIN request_ranks AS k ON k.request = r.request AND k.worker = r.decode_worker"
# Without one of these the view request_ranks has no rows, and is not asked.
_ANY_RANK = (
    "SELECT 1 FROM legs WHERE rank IS NOT NULL LIMIT 1",
    "SELECT 1 FROM step_members WHERE rank IS NOT NULL LIMIT 1",
)

OBSERVATIONS = """
SELECT request, observer, start_ns, ttft_ms, e2e_ms, resolution_ns
FROM observations
WHERE ttft_ms IS NOT NULL AND start_ns IS NOT NULL
"""

SEEN = 0.9  # of a worker's requests
NEAREST = ("engine", "frontend", "router", "gateway", "client")


def requests(tables: Tables) -> pl.DataFrame:
    """The requests that a known worker decoded."""
    told = any(not tables.short(query).is_empty() for query in _ANY_RANK)
    rank, ranks = ("k.rank", _RANKS) if told else ("NULL::VARCHAR", "")
    return tables.sql(_REQUESTS.format(rank=rank, ranks=ranks))


def by_worker(
    requests: pl.DataFrame, observations: pl.DataFrame
) -> Iterator[tuple[tuple[Any, ...], pl.DataFrame]]:
    """((deployment, worker, rank), its requests by start) for each worker, and each of its ranks, that decoded.

    What the chosen observer did not see is NULL.
    """
    rows_of = _rows_of(requests["request"], observations)
    numbered = requests.drop("request").with_row_index("number")
    told = observations.drop("request")
    for whose, mine in numbered.partition_by(
        "deployment", "worker", "rank", as_dict=True, include_key=False
    ).items():
        number = mine["number"].to_numpy()
        rows = pl.Series(_chosen([rows[number] for rows in rows_of], mine.height))
        row = rows.replace(NOWHERE, None)
        seen = told.select(pl.all().gather(row))
        yield whose, mine.drop("number").hstack(seen).sort("start_ns", "place")


def _rows_of(requests: pl.Series, observations: pl.DataFrame) -> list[Ints]:
    """For each observer, the nearest first: the row of each request in `observations`, or NOWHERE."""
    place, observer = places(observations["request"], requests), observations["observer"]
    names = observer.drop_nulls().unique().to_list()
    found = []
    for name in sorted(names, key=lambda name: (_nearness(name), name)):
        its_own = (observer == name).fill_null(value=False).to_numpy()
        rows = np.flatnonzero(its_own & (place != NOWHERE))
        mine = np.full(len(requests), NOWHERE, dtype=np.int64)
        mine[place[rows]] = rows
        found.append(mine)
    return found


def _nearness(observer: str) -> int:
    return NEAREST.index(observer) if observer in NEAREST else len(NEAREST)


def _chosen(rows_of: list[Ints], requests: int) -> Ints:
    """The rows of the nearest observer that saw enough, else of the nearest that saw any."""
    ratios = [float((rows != NOWHERE).mean()) for rows in rows_of]
    for least in (SEEN, 1 / max(requests, 1)):
        for rows, ratio in zip(rows_of, ratios, strict=True):
            if ratio >= least:
                return rows
    return np.full(requests, NOWHERE, dtype=np.int64)
