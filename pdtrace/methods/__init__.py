"""Statistics that SQL cannot do, one file a method: frames in, frames of a derived table out.

A method says which tables it makes and which it needs. `run` makes those that take no parameter;
whoever runs a query first runs the methods in the query's `needs` (`making` finds them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import polars as pl

from pdtrace.methods import (
    _gap_inputs,
    _gap_ranks,
    _observed,
    changes,
    interference_gaps,
    interference_requests,
    interference_steps,
    kv_sizes,
    prefix_reuse,
    transfer_fit,
    transfer_requests,
    transfer_waits,
)
from pdtrace.records import dataclass


class Tables(Protocol):
    """What a method may ask of the store."""

    def sql(self, query: str, **params: Any) -> pl.DataFrame:
        """Rows of a query."""

    def short(self, query: str, **params: Any) -> pl.DataFrame:
        """The same for an answer of few rows."""

    def temporary(self, name: str, rows: pl.DataFrame) -> None:
        """Make a temporary table of these rows."""

    def replace(self, table: str, frame: pl.DataFrame) -> Any:
        """Put these rows in the place of the table's rows."""


@dataclass(frozen=True)
class Method:
    """A method: the tables it makes and needs, and the function that turns one into the other."""

    name: str
    makes: tuple[str, ...]
    needs: tuple[str, ...]
    function: Callable[[Tables], dict[str, pl.DataFrame]]


def _interference_steps(tables: Tables) -> dict[str, pl.DataFrame]:
    """Rank after rank of each worker, so that never more than one rank's steps are in memory."""
    results = [pl.DataFrame(schema=interference_steps.RESULT_SCHEMA)]
    losses = [pl.DataFrame(schema=interference_steps.LOSSES_SCHEMA)]
    for worker in tables.short(interference_steps.WORKERS).iter_rows(named=True):
        named = {"worker": worker["worker"]}
        for rank in tables.short(interference_steps.RANKS, **named)["rank"].to_list():
            steps = tables.sql(interference_steps.STEPS, **named, rank=rank)
            result, lost = interference_steps.interference(steps, **worker)
            results.append(result)
            losses.append(lost)
    return {
        "interference_steps": pl.concat(results),
        "interference_step_losses": pl.concat(losses),
    }


def _interference_gaps(tables: Tables) -> dict[str, pl.DataFrame]:
    """Worker after worker; token gaps are read a stretch at a time."""
    judged = [j for given in _gap_inputs.workers(tables) for j in _gap_ranks.judged(**given)]
    return {
        name: _gap_inputs.named(tables, frame)
        for name, frame in interference_gaps.tables(judged).items()
    }


def _interference_requests(tables: Tables) -> dict[str, pl.DataFrame]:
    """All workers' requests are read at once; two workers, or two ranks, are judged at a time."""
    workers = tables.short(interference_requests.WORKERS).to_dicts()
    requests = _observed.requests(tables)
    seen = tables.sql(_observed.OBSERVATIONS)
    mine = dict(_observed.by_worker(requests, seen))
    nothing = pl.concat([requests.clear(), seen.clear().drop("request")], how="horizontal")
    ranks: dict[tuple[Any, ...], list[str | None]] = {}
    for *whose, rank in sorted(mine, key=str):
        if rank is not None:
            ranks.setdefault(tuple(whose), []).append(rank)

    def judge(worker: dict[str, Any]) -> pl.DataFrame:
        rows = mine.get((worker["deployment"], worker["worker"], worker["rank"]), nothing)
        return interference_requests.interference(rows, **worker)

    each = [
        worker | {"rank": rank}
        for worker in workers
        for rank in ranks.get((worker["deployment"], worker["worker"]), [None])
    ]
    with ThreadPoolExecutor(2, "pdtrace-requests") as pool:
        results = list(pool.map(judge, each))
    return {
        "interference_requests": pl.concat(
            [pl.DataFrame(schema=interference_requests.RESULT_SCHEMA), *results]
        )
    }


def _kv_sizes(tables: Tables) -> dict[str, pl.DataFrame]:
    return {"kv_sizes": kv_sizes.sizes(tables.short(kv_sizes.MODELS), tables.short(kv_sizes.FACTS))}


def _any_transfer(tables: Tables) -> bool:
    return not tables.short("SELECT 1 FROM transfers LIMIT 1").is_empty()


def _transfer_fit(tables: Tables) -> dict[str, pl.DataFrame]:
    """Nothing is read where nothing moved: views and phases stay unmade."""
    if not _any_transfer(tables):
        return {"transfer_fits": pl.DataFrame(schema=transfer_fit.SCHEMA)}
    return {"transfer_fits": transfer_fit.fits(tables.sql(transfer_fit.TRANSFERS))}


def _transfer_requests(tables: Tables) -> dict[str, pl.DataFrame]:
    if not _any_transfer(tables):
        return {
            "transfer_requests": pl.DataFrame(schema=transfer_requests.SCHEMA),
            "transfer_waits": pl.DataFrame(schema=transfer_waits.SCHEMA),
        }
    moved = tables.sql(transfer_requests.REQUESTS)
    waited = transfer_waits.waits(
        tables.sql(transfer_waits.MOVES), tables.sql(transfer_waits.WAITS)
    )
    return {"transfer_requests": moved, "transfer_waits": waited}


def _prefix_reuse(tables: Tables) -> dict[str, pl.DataFrame]:
    """Deployment after deployment; without block hashes nothing is read."""
    requests = [pl.DataFrame(schema=prefix_reuse.REQUESTS_SCHEMA)]
    segments = [pl.DataFrame(schema=prefix_reuse.SEGMENTS_SCHEMA)]
    if not tables.short("SELECT 1 FROM prefix_blocks LIMIT 1").is_empty():
        for row in tables.short(prefix_reuse.DEPLOYMENTS).iter_rows(named=True):
            every = prefix_reuse.stride(row["blocks"])
            rows = tables.sql(prefix_reuse.REQUESTS, deployment=row["deployment"], stride=every)
            told, shared = prefix_reuse.prefixes(rows, row["deployment"], every)
            requests.append(told)
            segments.append(shared)
    return {"prefix_requests": pl.concat(requests), "prefix_segments": pl.concat(segments)}


def _changes(tables: Tables) -> dict[str, pl.DataFrame]:
    """Deployment after deployment; restarts of all workers at the end."""
    found = []
    for deployment in tables.short(changes.DEPLOYMENTS)["deployment"].to_list():
        requests = tables.sql(changes.REQUESTS, deployment=deployment)
        found.append(changes.changes(changes.ordered(requests), deployment))
    if any(not tables.short(query).is_empty() for query in changes.ANY_SIGN):
        found.append(changes.restarts(tables.short(changes.RESTARTS)))
    return {"changes": pl.concat([pl.DataFrame(schema=changes.RESULT_SCHEMA), *found])}


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="interference_steps",
            makes=("interference_steps", "interference_step_losses"),
            needs=("steps", "workers", "facts"),
            function=_interference_steps,
        ),
        Method(
            name="interference_gaps",
            makes=("interference_gaps", "interference_gap_losses", "interference_events"),
            needs=("streams", "intervals", "legs", "requests", "workers", "facts", "request_ranks"),
            function=_interference_gaps,
        ),
        Method(
            name="interference_requests",
            makes=("interference_requests",),
            needs=("requests", "observations", "workers", "facts", "request_ranks"),
            function=_interference_requests,
        ),
        Method(
            name="kv_sizes",
            makes=("kv_sizes",),
            needs=("requests", "facts", "workers"),
            function=_kv_sizes,
        ),
        Method(  # after kv_sizes: bytes that nobody measured come from there
            name="transfer_fit",
            makes=("transfer_fits",),
            needs=("transfers", "transfer_times", "kv_sizes"),
            function=_transfer_fit,
        ),
        Method(
            name="transfer_requests",
            makes=("transfer_requests", "transfer_waits"),
            needs=("transfers", "transfer_times", "phases", "requests"),
            function=_transfer_requests,
        ),
        Method(
            name="prefix_reuse",
            makes=("prefix_requests", "prefix_segments"),
            needs=("prefix_blocks", "legs", "requests"),
            function=_prefix_reuse,
        ),
        Method(
            name="changes",
            makes=("changes",),
            needs=("request_values", "samples", "events", "legs", "workers"),
            function=_changes,
        ),
    )
}


def making(tables: Iterable[str]) -> list[Method]:
    """The methods that make any of these tables."""
    wanted = set(tables)
    return [method for method in METHODS.values() if wanted & set(method.makes)]


def run(store: Tables, methods: Iterable[Method] | None = None) -> None:
    """Run the methods (all without parameters by default) and keep their tables."""
    for method in METHODS.values() if methods is None else methods:
        for table, frame in method.function(store).items():
            store.replace(table, frame)
