"""Queries answered ahead: views that many read are computed once, then several queries run at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import local
from typing import Any

import duckdb
import polars as pl

from pdtrace import library
from pdtrace.errors import PdtraceError

CONNECTIONS = 2  # DuckDB shares its threads among them; a query over 100,000 rows keeps one busy

_PLAIN: dict[str, type[pl.DataType]] = {
    "varchar": pl.String,
    "bigint": pl.Int64,
    "integer": pl.Int32,
    "double": pl.Float64,
    "boolean": pl.Boolean,
}

Connection = duckdb.DuckDBPyConnection
Another = Callable[[], Connection]  # makes another connection to the same tables
Key = tuple[str, tuple[tuple[str, object], ...]]


@dataclass(frozen=True)
class Task:
    """A piece of work, and the names of what it waits for."""

    after: frozenset[str]
    work: Callable[[Connection], object]


def key(name: str, parameters: Mapping[str, object]) -> Key:
    """What an answer is found by."""
    return name, tuple(sorted(parameters.items()))


def create(connection: Connection, query: library.Query) -> None:
    """Make a view or macro."""
    try:
        connection.execute(query.ddl)
    except duckdb.Error as error:
        raise PdtraceError(f"schemas/{query.kind}/{query.name}.sql: {error}") from error


def run(another: Another, tasks: Mapping[str, Task]) -> None:
    """Run tasks, several at once, each as soon as what it waits for is done."""
    mine = local()
    cursors: list[Connection] = []

    def connect() -> None:
        mine.cursor = another()
        cursors.append(mine.cursor)

    def work(name: str) -> None:
        tasks[name].work(mine.cursor)

    waiting = {name: set(task.after & tasks.keys()) for name, task in tasks.items()}
    try:
        with ThreadPoolExecutor(CONNECTIONS, "pdtrace-ahead", connect) as pool:
            running: dict[Future[None], str] = {}
            while waiting or running:
                for name in [name for name, after in waiting.items() if not after]:
                    del waiting[name]
                    running[pool.submit(work, name)] = name
                if not running:
                    raise ValueError(f"{', '.join(waiting)} wait for each other")
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    name = running.pop(done)
                    done.result()
                    for after in waiting.values():
                        after.discard(name)
    finally:
        for cursor in cursors:
            cursor.close()


def frame(
    connection: Connection, statement: str, parameters: Mapping[str, object] | None = None
) -> pl.DataFrame:
    """The rows of a SELECT whose answer is short.

    Not by way of a relation: that plans the statement twice, a quarter of the time of a deep view over few rows.
    """
    connection.execute(statement, parameters)
    schema = _schema(connection.description)
    # Fetched where it is of no use, too: an unfinished result blocks the connection.
    rows = connection.fetchall()
    if schema is None:
        found: pl.DataFrame = connection.sql(statement, params=parameters).pl()
        return found
    return pl.DataFrame(rows, schema=schema, orient="row")


def _schema(description: Iterable[Sequence[Any]]) -> dict[str, pl.DataType] | None:
    """The columns of a result as Polars types; None where one has a type not known here."""
    try:
        return {name: _polars(kind) for name, kind, *_ in description}
    except KeyError:
        return None


def _polars(kind: Any) -> pl.DataType:
    if kind.id == "list":
        return pl.List(_polars(kind.children[0][1]))
    if kind.id == "struct":
        return pl.Struct({name: _polars(child) for name, child in kind.children})
    return _PLAIN[kind.id]()


class Queries:
    """The views and findings of a store in memory, of which `waiting` do not exist yet."""

    def __init__(self, another: Another, waiting: set[str]) -> None:
        self._another = another
        self._waiting = waiting
        self._held: set[str] = set()

    @contextmanager
    def held(
        self,
        connection: Connection,
        names: Iterable[str],
        empty: set[str],
        asked: Mapping[Key, str],
    ) -> Iterator[dict[Key, pl.DataFrame]]:
        """Tables in place of these views, for as long as the block runs; then they wait to be made again.

        Tables, not temporary ones: every connection to the store sees them. Those of `empty` have no rows.
        The block gets the rows of what is asked (SQL by key), each found as soon as what it reads is there. Those
        that fail are left out: who asks for them runs them again and sees the error.
        """
        found: dict[Key, pl.DataFrame] = {}
        try:
            for name in empty:
                self._hold(connection, name, library.queries()[name].empty)
            held = [name for name in names if name not in empty]
            read = [name for name, _ in asked if self._is_read(name, asked)]
            below = frozenset().union(*(library.below(name) for name, _ in asked))
            tasks = self._making([*held, *read, *below]) | {
                name: Task(library.below(name), lambda c, name=name: self._hold(c, name))  # type: ignore[misc]
                for name in held
            }
            for number, one in enumerate(asked):
                after = library.below(one[0]) | {one[0]}
                tasks[f"{number} {one[0]}"] = Task(
                    after,
                    lambda c, one=one: self._answer(c, one, asked[one], found),  # type: ignore[misc]
                )
            run(self._another, tasks)
            yield found
        finally:
            for name in self._held:
                connection.execute(f"DROP TABLE IF EXISTS {name}")
            self._waiting |= self._held
            self._held.clear()

    def _answer(
        self, cursor: Connection, one: Key, sql: str, found: dict[Key, pl.DataFrame]
    ) -> None:
        query = library.queries().get(one[0])
        if query is not None and one[0] in self._waiting:
            sql = query.called(dict(one[1]))
        with suppress(duckdb.Error):
            found[one] = frame(cursor, sql)

    def _is_read(self, name: str, asked: Iterable[Key]) -> bool:
        """Whether the query must exist by its name; others are run without being created."""
        return any(name in library.below(other) for other, _ in asked)

    def _making(self, names: Iterable[str]) -> dict[str, Task]:
        """Tasks that create what these queries read, and themselves, where it waits."""
        wanted = set(names)
        wanted = wanted.union(*map(library.below, wanted)) & self._waiting - self._held
        return {
            name: Task(library.below(name), lambda c, name=name: self._make(c, name))  # type: ignore[misc]
            for name in library.queries()
            if name in wanted
        }

    def _make(self, cursor: Connection, name: str) -> None:
        create(cursor, library.queries()[name])
        self._waiting.discard(name)

    def _hold(self, cursor: Connection, name: str, rows: str = "") -> None:
        """A table of the view's name with its rows."""
        table = name if name in self._waiting else f"_held_{name}"
        rows = rows or f"AS {library.queries()[name].body}"
        cursor.execute(f"CREATE OR REPLACE TABLE {table} {rows}")
        if table != name:
            cursor.execute(f"DROP VIEW {name}")
            cursor.execute(f"ALTER TABLE {table} RENAME TO {name}")
        self._waiting.discard(name)
        self._held.add(name)
