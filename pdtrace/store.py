"""One DuckDB file or memory and what is asked of it: statements, queries by name, views made when first named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from copy import copy
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, Protocol, TypeVar

import duckdb
import polars as pl
import pyarrow as pa

from pdtrace import _ahead, library
from pdtrace import _aside as aside
from pdtrace._batches import POLARS
from pdtrace._conditions import Conditions
from pdtrace._filling import Filling
from pdtrace._lookup import places
from pdtrace._questions import Queries, may_be_empty
from pdtrace._tables import FEW_ROWS, ROW_GROUP, Tables
from pdtrace.errors import PdtraceError, UnknownQuery, UnreadableInput
from pdtrace.records import dataclass

_WORD = re.compile(r"\w+")
_APART = re.compile(
    r"""--[^\n]*|'[^']*'|("[^"]*")"""
)  # a comment or text, where words name nothing
_WRITTEN = re.compile(
    r"\b(?:insert into|update|delete from|(?:alter|drop|truncate) (?:table )?(?:if exists )?)\s*(?:\w+\.)*(\w+)"
)  # the tables that statements change


Asked = tuple[str, Mapping[str, object]]  # a query and its parameters


class Questions(NamedTuple):
    """What will be asked: views to hold, queries and statements to answer, and the conditions of the tables."""

    names: list[str]
    ask: list[Asked]
    conditions: Conditions
    statements: Sequence[str] = ()


class Store(Tables):
    """The tables of one analysis. Opens or creates `path`; without a path it lives in memory.

    `scratch`: the file is this process's own and goes with it.
    """

    def __init__(
        self, path: str | Path | None = None, *, read_only: bool = False, scratch: bool = False
    ) -> None:
        super().__init__(path, read_only=read_only, scratch=scratch)
        self._answers: dict[_ahead.Key, pl.DataFrame] = {}
        # What was held and answered beside the making of tables.
        self._begun: Queries | None = None
        self._conditions: Conditions | None = None  # asked with it
        self._waiting: set[str] = set()  # queries that are created when somebody names them
        self._making = RLock()  # views are made by one thread at a time

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

    def execute(self, statement: str, parameters: Sequence[object] | None = None) -> None:
        """Run a statement that has no result."""
        self.prepare(statement)
        self.connection.execute(statement, parameters or [])

    def sql(self, query: str, **parameters: object) -> pl.DataFrame:
        """Run SQL with $name parameters and return the rows."""
        self.prepare(query)
        rows: pl.DataFrame = self.connection.sql(query, params=parameters or None).pl()
        return rows

    def short(self, query: str, **parameters: object) -> pl.DataFrame:
        """The same for an answer of at most some hundred rows, however many are there: the statement is planned once."""
        if (answer := self._answers.get(_ahead.key(query, parameters))) is not None:
            return answer
        self.prepare(query)
        return _ahead.frame(self.connection, query, parameters or None)

    def arrow(self, query: str) -> pa.Table:
        """Run SQL and return an Arrow table."""
        self.prepare(query)
        return self.connection.sql(query).to_arrow_table()

    def scalar(self, query: str) -> Any:
        """The single value of a query, None when there is no row."""
        rows = self.rows(query)
        return rows[0][0] if rows else None

    def rows(self, query: str, parameters: Sequence[object] | None = None) -> list[tuple[Any, ...]]:
        """Run SQL with ? parameters and return plain tuples, for the few rows that Python looks at."""
        self.prepare(query)
        return self.connection.execute(query, parameters or []).fetchall()

    def holds(self, condition: str) -> bool:
        """Whether a condition over tables alone is true; no view or finding is made for a word in it."""
        return self.conditions().hold(condition)

    def conditions(self) -> Conditions:
        """Asks conditions over tables, each piece of them once: for as long as nobody changes the tables."""
        return self._conditions or Conditions(self._told)

    def _told(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of a query over tables alone."""
        self._make(library.tables().keys() & set(_words(query.lower())))
        return self.connection.execute(query).fetchall()

    def stretches(
        self, table: str, columns: Sequence[str], rows: int, among: Mapping[str, pl.Series]
    ) -> Iterator[pl.DataFrame]:
        """These columns of a table, so many rows at a time; batches kept aside come as they are, not copied.

        Columns of `among` come as the places of their texts in these lists of distinct texts, NOWHERE where they stand
        in none.
        """
        place = f"{self._aside.place}.{table}" if table in self._aside.names() else table
        wanted = ", ".join(columns)
        last = self.scalar(f"SELECT coalesce(max(rowid), -1) FROM {place}")
        for low in range(0, last + 1, rows):
            inside = f"rowid >= {low} AND rowid < {low + rows}"
            frame = self.sql(f"SELECT {wanted} FROM {place} WHERE {inside}")
            yield frame.with_columns(
                pl.Series(name, places(frame[name], texts)) for name, texts in among.items()
            )
        kinds = {
            c.name: POLARS[c.type]
            for c in library.tables()[table].columns
            if c.name in columns and c.name not in among
        }
        for frame in self._aside.frames(table, columns, among):
            yield frame.with_columns(
                pl.col(name).cast(kind) for name, kind in kinds.items() if kind != pl.String
            )

    def count(self, table: str) -> int:
        """Rows of a table."""
        if table in self._aside.names():
            return self._aside.count(self.connection, table)
        return int(self.scalar(f"SELECT count(*) FROM {table}"))

    def install(self, *, comments: bool | None = None) -> None:
        """Create all views and findings, in order of need; comments go into files.

        Where nobody else opens the file each is created when it is first named: planning all of them takes longer
        than asking the few that a command wants (measured: 0.3 s in memory, 1.4 s in a file).
        """
        self._waiting = set(library.queries())
        if self._lasting:
            self._make(self._waiting)
        if comments if comments is not None else self._lasting:
            self._comment()

    def prepare(self, statement: str) -> None:
        """Make what a statement names: views and findings that wait, rows that were kept aside."""
        text = statement.lower()
        written = _WRITTEN.findall(text)
        for table in written:
            self.settle_filling(table)
        if changed := aside.TABLES.intersection(written):
            self._aside.wrote(*changed)
            self.settle_aside(*changed)
        if self._waiting or self._aside.names() or self._filling is not None:
            self._make(_words(text))

    def _make(self, names: Iterable[str]) -> None:
        """Create these views and findings and what they read, unless they are there."""
        wanted = set(names).union(*map(library.below, names))
        self._aside.show(self.connection, wanted)
        if self._filling is not None and self._filling.table in wanted:
            self._filling.ready()
        if not wanted & self._waiting:
            return
        with self._making:
            self._make_waiting(wanted)

    def _make_waiting(self, wanted: set[str]) -> None:
        for name, query in library.queries().items():
            if name not in wanted & self._waiting:
                continue
            _ahead.create(self.connection, query)
        self._waiting -= wanted

    def beside(self) -> Store:
        """The same tables for another thread, as they are now; what is appended large is not seen by the other."""
        self.settle_filling()
        return self._twin()

    def _twin(self) -> Store:
        twin = copy(self)
        twin.connection = self._another()
        twin._aside = self._aside.copy()
        twin._checked, twin._answers, twin._begun = set(), {}, None
        twin._conditions = None
        return twin

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """Another connection to the same tables, for another thread or an unfinished result."""
        self.settle_filling()
        cursor = self._another()
        self._aside.show_all(cursor)
        return cursor

    def _another(self) -> duckdb.DuckDBPyConnection:
        """The same without what is kept aside."""
        return self.connection.cursor()

    def _hand(self) -> _Hand:
        return _Hand(self._another(), self._aside.copy())

    def _comment(self) -> None:
        """COMMENT ON every table, view, macro and column."""
        self._make(self._waiting)
        for table in library.tables().values():
            self.connection.execute(f"COMMENT ON TABLE {table.name} IS {_quoted(table.text)}")
            self._comment_columns(table.name, table.columns)
        for query in library.queries().values():
            kind = "MACRO TABLE" if query.params else "VIEW"
            self.connection.execute(f"COMMENT ON {kind} {query.name} IS {_quoted(query.title)}")
            if not query.params:
                self._comment_columns(query.name, query.columns)

    def _comment_columns(self, name: str, columns: Iterable[library.Column]) -> None:
        for column in columns:
            text = f"{column.text} [{column.unit}]" if column.unit else column.text
            self.connection.execute(f'COMMENT ON COLUMN {name}."{column.name}" IS {_quoted(text)}')

    def query(self, name: str, **parameters: object) -> pl.DataFrame:
        """Rows of a view, finding or table by name; parameters of a finding by keyword."""
        if (answer := self._answers.get(_ahead.key(name, parameters))) is not None:
            return answer
        return self.sql(self._from(name, parameters))

    def _from(self, name: str, parameters: Mapping[str, object]) -> str:
        """The SQL that reads a query or table."""
        known = library.queries()
        if name not in known and name not in library.tables():
            raise UnknownQuery(f"no query named {name}", "`pdtrace schema` lists them")
        if name in known and known[name].params:
            wanted = {p.name for p in known[name].params}
            unknown = set(parameters) - wanted
            if unknown:
                raise UnknownQuery(
                    f"{name} has no parameter {', '.join(sorted(unknown))}",
                    f"it takes: {', '.join(sorted(wanted))}",
                )
            inner = ", ".join(
                f"{key} := {library.literal(value)}" for key, value in parameters.items()
            )
            return f"FROM {name}({inner})"
        return f"FROM {name}"

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


def _words(statement: str) -> list[str]:
    """The words that may be names: a view named in a text, as a phase is, would be made beside who makes it."""
    return _WORD.findall(_APART.sub(lambda found: found[1] or " ", statement))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
