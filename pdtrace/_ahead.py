"""Several pieces of work at the same time, each as soon as what it waits for is done; answers of queries as frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any, Generic, Protocol, TypeVar

import duckdb
import polars as pl

from pdtrace import library
from pdtrace.errors import PdtraceError
from pdtrace.records import dataclass

CONNECTIONS = 2  # DuckDB shares its threads among them; a query over 100,000 rows keeps one busy

_PLAIN: dict[str, type[pl.DataType]] = {
    "varchar": pl.String,
    "bigint": pl.Int64,
    "integer": pl.Int32,
    "double": pl.Float64,
    "boolean": pl.Boolean,
}

Connection = duckdb.DuckDBPyConnection
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


def run(another: Callable[[], Hand], *queues: Mapping[str, Task[Hand]]) -> None:
    """Run tasks, several at once, each as soon as what it waits for is done; of those that can begin, the first.

    Each thread takes what can begin from its own queue, and from the next one where there is nothing.
    """
    tasks = {name: task for queue in queues for name, task in queue.items()}
    waiting = {name: set(task.after & tasks.keys()) for name, task in tasks.items()}
    change = Condition()
    running: set[str] = set()

    def following(order: Sequence[str]) -> str | None:
        """The next task, once there is one; None when nothing is left to begin."""
        with change:
            while waiting:
                ready = (name for name in order if name in waiting and not waiting[name])
                if (name := next(ready, None)) is not None:
                    del waiting[name]
                    running.add(name)
                    return name
                if not running:
                    raise ValueError(f"{', '.join(waiting)} wait for each other")
                change.wait()
            return None

    def work(hand: Hand, order: Sequence[str]) -> None:
        while (name := following(order)) is not None:
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
                ended = []
                for number, hand in enumerate(hands):
                    own = number % len(queues)
                    order = [name for queue in (*queues[own:], *queues[:own]) for name in queue]
                    ended.append(pool.submit(work, hand, order))
                for one in ended:
                    one.result()
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
