"""What is asked of the tables: statements, queries by name, views and findings that are made when first named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from threading import RLock
from typing import Any, Self

import duckdb
import polars as pl
import pyarrow as pa

from pdtrace import _ahead, library
from pdtrace import _aside as aside
from pdtrace._batches import POLARS
from pdtrace._conditions import Conditions
from pdtrace._lookup import places
from pdtrace._questions import Queries
from pdtrace._tables import Tables
from pdtrace.errors import UnknownQuery

_WORD = re.compile(r"\w+")
_APART = re.compile(
    r"""--[^\n]*|'[^']*'|("[^"]*")"""
)  # a comment or text, where words name nothing
_WRITTEN = re.compile(
    r"\b(?:insert into|update|delete from|(?:alter|drop|truncate) (?:table )?(?:if exists )?)\s*(?:\w+\.)*(\w+)"
)  # the tables that statements change


class Statements(Tables):
    """Statements run here; the Store that this is part of answers many questions at once."""

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

    def beside(self) -> Self:
        """The same tables for another thread, as they are now; what is appended large is not seen by the other."""
        self.settle_filling()
        return self._twin()

    def _twin(self) -> Self:
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


def _words(statement: str) -> list[str]:
    """The words that may be names: a view named in a text, as a phase is, would be made beside who makes it."""
    return _WORD.findall(_APART.sub(lambda found: found[1] or " ", statement))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
