"""One DuckDB file or memory: its tables, what is asked of it, and many questions answered at once while tables are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import duckdb
import polars as pl

from pdtrace import _ahead, library
from pdtrace import _aside as aside
from pdtrace._conditions import Conditions
from pdtrace._filling import Filling
from pdtrace._questions import Queries, may_be_empty
from pdtrace._statements import Statements
from pdtrace._tables import FEW_ROWS, ROW_GROUP
from pdtrace.errors import PdtraceError, UnknownQuery, UnreadableInput
from pdtrace.records import dataclass

Asked = tuple[str, Mapping[str, object]]  # a query and its parameters


class Questions(NamedTuple):
    """What will be asked: views to hold, queries and statements to answer, and the conditions of the tables."""

    names: list[str]
    ask: list[Asked]
    conditions: Conditions
    statements: Sequence[str] = ()


class Store(Statements):
    """The tables of one analysis. Opens or creates `path`; without a path it lives in memory.

    `scratch`: the file is this process's own and goes with it.
    """

    def require_tables(self) -> None:
        """Raise UnreadableInput unless the file has the tables and columns that this version makes."""
        rows = self.rows("SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal")
        have = {(str(table), str(column)) for table, column in rows}
        wanted = {(t.name, c.name) for t in library.tables().values() for c in t.columns}
        if not have & wanted:
            raise UnreadableInput(
                f"{self.path}: a DuckDB file, but not one that pdtrace made",
                "make one from dumps with `pdtrace ingest PATH -o FILE.duckdb`",
            )
        if missing := sorted(wanted - have):
            raise UnreadableInput(
                f"{self.path}: made by another version of pdtrace (it has no {'.'.join(missing[0])})",
                "make it anew with `pdtrace ingest PATH -o FILE.duckdb`",
            )

    def _hand(self) -> _Hand:
        return _Hand(self._another(), self._aside.copy())

    def _is_small(self) -> bool:
        """Whether no table that questions read has more rows than DuckDB gives to one thread, or many more beside it."""
        most = self.scalar(
            """SELECT max(estimated_size) FROM duckdb_tables()
               WHERE NOT temporary AND table_name <> 'spans' AND database_name = current_database()"""
        )
        most = max(most or 0, 0 if self._filling is None else self._filling.height)
        return FEW_ROWS <= most < ROW_GROUP and self._aside.most() < 8 * ROW_GROUP

    @contextmanager
    def computed_once(
        self,
        *names: str,
        ask: Iterable[Asked] = (),
        conditions: Conditions | None = None,
        statements: Iterable[str] = (),
    ) -> Iterator[None]:
        """Hold views that many queries read as tables of the same name, for as long as the block runs.

        Views that these or the questions read and that can have no rows (`when:` of their header) are empty tables.
        `ask`: queries (name, parameters) that are answered meanwhile, several at a time; query() hands out what is
        known already, and short() that of `statements`. `conditions`: those that were asked of the same tables before.
        In a file that has no effect: only one connection has its tables, temporary ones, which
        DuckDB finds before views, inside other views and macros too.
        """
        ask = list(ask)
        conditions = conditions or self.conditions()
        if self.path is None:
            asked = self._asked(ask, statements)
            queries = self._begun or Queries(self._waiting, conditions)
            self._begun, self._conditions = None, None
            try:
                # Two statements at a time: one that hands parts to the other's thread gains nothing and writes rows twice.
                with self._in_one_thread(self._is_small()):
                    tasks = queries.tasks(self.connection, names, asked)
                    _ahead.run(self._hand, {name: _here(task) for name, task in tasks.items()})
                    self._answers.update(queries.found)
                    yield
            finally:
                queries.let_go(self.connection)
                for one in asked:
                    self._answers.pop(one, None)
            return
        empty = self._empty(names, ask, conditions)
        self._make(set(names) - empty)
        tables = [*empty, *(name for name in names if name not in empty)]
        for name in tables:
            what = library.queries()[name].empty if name in empty else f"AS FROM main.{name}"
            self.connection.execute(f"CREATE OR REPLACE TEMP TABLE {name} {what}")
        try:
            yield
        finally:
            for name in reversed(tables):
                self.connection.execute(f"DROP TABLE temp.{name}")

    def make(
        self,
        making: Mapping[str, _ahead.Task[Store]],
        questions: Questions | None = None,
    ) -> None:
        """Run what makes tables, each piece by the name of its table and with a store of its thread.

        Views and questions as computed_once() takes them are held and answered beside it, each as soon as what it
        reads is there; computed_once() goes on from there. In a file they are left to it.
        """
        tasks: dict[str, _ahead.Task[Store]] = {}
        small = self.path is None and self._is_small()
        if questions and self.path is None:
            names, ask, conditions, statements = questions
            self._begun, self._conditions = Queries(self._waiting, conditions), conditions
            asked = self._asked(ask, statements)
            begun = self._begun.tasks(self.connection, names, asked, making)
            tasks = {name: _tried(_here(task)) for name, task in begun.items()}
        if self._filling is not None:  # who reads this table waits for it
            self._filling.hide()
            tasks = {self._filling.table: _written(self._filling)} | tasks
        with self._in_one_thread(small):
            # One thread makes tables, the other one asks: numpy holds the interpreter, DuckDB does not.
            _ahead.run(
                self._twin,
                {name: self._with_what_is_made(task) for name, task in making.items()},
                {name: self._with_what_is_made(task) for name, task in tasks.items()},
            )
        self.settle_filling()

    def fill(self, table: str, rows: pl.DataFrame) -> None:
        """replace() by another thread, where the rows are many: who names the table meanwhile has the rows, or waits."""
        if rows.height < aside.LEAST_ROWS:
            self.replace(table, rows)
            return
        self.clear(table)
        twin = self._twin()

        def write() -> None:
            with closing(twin), twin.alone(rows.height):
                twin.append(table, rows)

        self._filling = Filling(self.connection, table, rows, write, shown=self.path is None)

    def _with_what_is_made(self, task: _ahead.Task[Store]) -> _ahead.Task[Store]:
        """The same with the rows that were kept aside since the thread began."""

        def work(mine: Store) -> None:
            mine._aside.follow(self._aside, task.after)
            task.work(mine)

        return _ahead.Task(task.after, work)

    def _asked(self, ask: Iterable[Asked], statements: Iterable[str] = ()) -> dict[_ahead.Key, str]:
        asked = {_ahead.key(name, given): self._from(name, given) for name, given in ask}
        return asked | {_ahead.key(text, {}): text for text in statements}

    def _empty(self, held: Iterable[str], ask: Iterable[Asked], conditions: Conditions) -> set[str]:
        """The views below these whose condition (`when:` of their header) does not hold: they have no rows."""
        known = library.queries()
        read = {*held, *(name for name, _ in ask)}
        return {
            name
            for name in known.keys() & read.union(*map(library.below, read))
            if (query := known[name]).when
            and may_be_empty(query)
            and not conditions.hold(query.when)
        }

    def user_sql(self, text: str, limit: int = 0) -> pl.DataFrame:
        """Run a user's SELECT, of at most `limit` rows when given.

        Raises UnknownQuery with DuckDB's words when it refuses, and for anything but one SELECT: it sees the
        tables of this store, no files, no settings, no variables of this program.
        """
        self._make(self._waiting)
        self.settle_aside()  # a user's statement has no access to anything outside
        try:
            text.encode()  # halves of pairs, as arguments that are no UTF-8 have them
            statements = duckdb.extract_statements(text)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise UnknownQuery(
                    "only one SELECT statement is run",
                    "to change tables or to read files, open the .duckdb file with duckdb",
                )
            self.connection.execute("SET python_enable_replacements = false")
            self.connection.execute("SET enable_external_access = false")
            rows = self.connection.sql(statements[0])
            found: pl.DataFrame = (rows.limit(limit) if limit else rows).pl()
        except (duckdb.Error, AttributeError, UnicodeError) as error:
            raise UnknownQuery(
                f"SQL: {str(error) or 'no rows to show'}",
                "`pdtrace schema` lists tables, views and columns",
            ) from error
        finally:
            self.connection.execute("SET python_enable_replacements = true")
        return found


def is_store(path: str | Path) -> bool:
    """Whether the path is a DuckDB file: its magic bytes stand at offset 8."""
    try:
        with Path(path).open("rb") as stream:
            return Path(path).is_file() and stream.read(12)[8:] == b"DUCK"
    except (OSError, ValueError):
        return False


class _Connected(Protocol):
    connection: duckdb.DuckDBPyConnection
    _aside: aside.Aside

    def close(self) -> None: ...


_Thread = TypeVar("_Thread", bound=_Connected)


@dataclass
class _Hand:
    """What a thread asks with: rows kept aside are shown to its connection when their tables are named."""

    connection: duckdb.DuckDBPyConnection
    _aside: aside.Aside

    def close(self) -> None:
        self.connection.close()


def _here(task: _ahead.Task[duckdb.DuckDBPyConnection]) -> _ahead.Task[_Thread]:
    """The same with what a thread has."""

    def work(mine: _Thread) -> None:
        mine._aside.show(mine.connection, task.after)
        task.work(mine.connection)

    return _ahead.Task(task.after, work)


def _written(filling: Filling) -> _ahead.Task[Store]:
    return _ahead.Task(frozenset(), lambda _: filling.wait())


def _tried(task: _ahead.Task[Store]) -> _ahead.Task[Store]:
    """The same; what fails is done again, and told, where it is asked for."""

    def work(store: Store) -> None:
        with suppress(duckdb.Error, PdtraceError):
            task.work(store)

    return _ahead.Task(task.after, work)
