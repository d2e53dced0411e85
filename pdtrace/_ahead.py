"""Queries answered ahead: views that many read are computed once, then several queries run at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import duckdb
import polars as pl

from pdtrace import library

CONNECTIONS = 2  # DuckDB shares its threads among them; a query over 100,000 rows keeps one busy

Another = Callable[[], duckdb.DuckDBPyConnection]  # makes another connection to the same tables
Key = tuple[str, tuple[tuple[str, object], ...]]


def key(name: str, parameters: Mapping[str, object]) -> Key:
    """What an answer is found by."""
    return name, tuple(sorted(parameters.items()))


@contextmanager
def held(
    connection: duckdb.DuckDBPyConnection, another: Another, names: Iterable[str]
) -> Iterator[None]:
    """Tables in place of these views of a store in memory, for as long as the block runs.

    Tables, not temporary ones: every connection to the store sees them.
    """
    swapped: list[str] = []
    try:
        for wave in _waves(list(names)):
            with ThreadPoolExecutor(CONNECTIONS, "pdtrace-held") as pool:
                list(pool.map(lambda name: _compute(another, name), wave))
            for name in wave:
                swapped.append(name)
                connection.execute(f"DROP VIEW {name}")
                connection.execute(f"ALTER TABLE _held_{name} RENAME TO {name}")
        yield
    finally:
        for name in reversed(swapped):
            connection.execute(f"DROP TABLE IF EXISTS {name}")
            connection.execute(library.queries()[name].ddl)


def _compute(another: Another, name: str) -> None:
    with another() as cursor:
        cursor.execute(f"CREATE OR REPLACE TABLE _held_{name} AS FROM {name}")


def _waves(names: list[str]) -> Iterator[list[str]]:
    """Names in groups, each after the groups that it needs."""
    while names:
        ready = [n for n in names if not library.below(n) & set(names)]
        yield ready or names
        names = [n for n in names if n not in (ready or names)]


def answers(another: Another, wanted: Mapping[Key, str]) -> dict[Key, pl.DataFrame]:
    """The rows of each query (SQL by key), run at the same time.

    Those that fail are left out: who asks for them runs them again and sees the error.
    """
    found: dict[Key, pl.DataFrame] = {}

    def answer(item: tuple[Key, str]) -> None:
        with suppress(duckdb.Error), another() as cursor:
            found[item[0]] = cursor.sql(item[1]).pl()

    with ThreadPoolExecutor(CONNECTIONS, "pdtrace-ahead") as pool:
        list(pool.map(answer, wanted.items()))
    return found
