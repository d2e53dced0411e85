"""Queries answered ahead: views that many read are computed once, then several queries run at the same time.

They need not wait for all tables: what reads none that is still being made is answered beside the making (`tasks`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition
from typing import Any, Generic, Protocol, TypeVar

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
_WORD = re.compile(r"\w+")
Key = tuple[str, tuple[tuple[str, object], ...]]


class _Closed(Protocol):
    def close(self) -> None: ...


Hand = TypeVar("Hand", bound=_Closed)  # what a thread works with: a connection, or a store on one


@dataclass(frozen=True)
class Task(Generic[Hand]):
    """A piece of work, and the names of what it waits for."""

    after: frozenset[str]
    work: Callable[[Hand], object]


def key(name: str, parameters: Mapping[str, object]) -> Key:
    """What an answer is found by."""
    return name, tuple(sorted(parameters.items()))


def create(connection: Connection, query: library.Query) -> None:
    """Make a view or macro."""
    try:
        connection.execute(query.ddl)
    except duckdb.Error as error:
        raise PdtraceError(f"schemas/{query.kind}/{query.name}.sql: {error}") from error


def run(another: Callable[[], Hand], tasks: Mapping[str, Task[Hand]]) -> None:
    """Run tasks, several at once, each as soon as what it waits for is done; of those that can begin, the first."""
    waiting = {name: set(task.after & tasks.keys()) for name, task in tasks.items()}
    change = Condition()
    running: set[str] = set()

    def following() -> str | None:
        """The next task, once there is one; None when nothing is left to begin."""
        with change:
            while waiting:
                name = next((name for name, after in waiting.items() if not after), None)
                if name is not None:
                    del waiting[name]
                    running.add(name)
                    return name
                if not running:
                    raise ValueError(f"{', '.join(waiting)} wait for each other")
                change.wait()
            return None

    def work(hand: Hand) -> None:
        while (name := following()) is not None:
            done = False
            try:
                tasks[name].work(hand)
                done = True
            finally:
                with change:
                    running.discard(name)
                    if not done:
                        waiting.clear()
                    for after in waiting.values():
                        after.discard(name)
                    change.notify_all()

    hands = [another() for _ in range(CONNECTIONS)]
    try:
        with ThreadPoolExecutor(CONNECTIONS, "pdtrace-ahead") as pool:
            try:
                for ended in [pool.submit(work, hand) for hand in hands]:
                    ended.result()
            finally:  # after an error, or Ctrl-C, nothing more is begun
                with change:
                    waiting.clear()
    finally:
        for hand in hands:
            hand.close()


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


def _read_by(one: Key) -> frozenset[str]:
    """The queries and tables that a question reads, also through others; it may be a statement of its own."""
    if one[0] in library.queries():
        return library.below(one[0])
    named = frozenset(_WORD.findall(one[0])) & (library.queries().keys() | library.tables().keys())
    return named.union(*map(library.below, named))


class Queries:
    """The views and findings of a store in memory, of which `waiting` do not exist yet.

    `found`: the rows of what was asked (by key). What fails is left out: who asks for it runs it again and sees the error.
    """

    def __init__(self, waiting: set[str]) -> None:
        self._waiting = waiting
        self._held: set[str] = set()
        self.found: dict[Key, pl.DataFrame] = {}

    def let_go(self, connection: Connection) -> None:
        """Drop the tables: their views wait to be made again."""
        for name in self._held:
            connection.execute(f"DROP TABLE IF EXISTS {name}")
        self._waiting |= self._held
        self._held.clear()

    def tasks(
        self,
        connection: Connection,
        names: Iterable[str],
        empty: set[str],
        asked: Mapping[Key, str],
    ) -> dict[str, Task[Connection]]:
        """What is left to do until these are held and what is asked is found, each as soon as what it reads is there.

        Tables, not temporary ones: every connection to the store sees them. Those of `empty` have no rows.
        """
        for name in empty - self._held:
            self._hold(connection, name, library.queries()[name].empty)
        held = [name for name in names if name not in self._held]
        left = [one for one in asked if one not in self.found]
        read = [name for name, _ in left if self._is_read(name, left)]
        below = frozenset().union(*map(_read_by, left))
        tasks = self._making([*held, *read, *below]) | {
            name: Task(library.below(name), lambda c, name=name: self._hold(c, name))  # type: ignore[misc]
            for name in held
        }
        for number, one in enumerate(left):
            tasks[f"{number} {one[0]}"] = Task(
                _read_by(one) | {one[0]},
                lambda c, one=one: self._answer(c, one, asked[one]),  # type: ignore[misc]
            )
        return tasks

    def _answer(self, cursor: Connection, one: Key, sql: str) -> None:
        query = library.queries().get(one[0])
        if query is not None and one[0] in self._waiting:
            sql = query.called(dict(one[1]))
        with suppress(duckdb.Error):
            self.found[one] = frame(cursor, sql)

    def _is_read(self, name: str, asked: Iterable[Key]) -> bool:
        """Whether the query must exist by its name; others are run without being created."""
        return any(name in _read_by(other) for other in asked)

    def _making(self, names: Iterable[str]) -> dict[str, Task[Connection]]:
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
