"""One DuckDB file or memory: creates the tables, takes checked batches, runs queries by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from threading import RLock
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa

from pdtrace import _ahead, library
from pdtrace import _aside as aside
from pdtrace._aside import Aside
from pdtrace._conditions import Conditions
from pdtrace.errors import SchemaMismatch, UnknownQuery, UnreadableInput

# Files are written in the format of DuckDB 1.5, which is supported until 2027-03: both majors open them.
STORAGE_VERSION = "v1.5.0"
_CONFIG = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}

LOADING_MEMORY = "400MB"
LET_GO_ROWS = 250_000  # after so many more rows in a file, blocks that are written leave memory
ROW_GROUP = 122_880  # rows that DuckDB stores, and scans, together
FEW_ROWS = 10_000  # below, the number of threads is not worth setting
COMPRESS_FROM = (
    "512MB"  # tables in memory are compressed after so many bytes of changes, not at once
)

# Up to so many bytes the steps of planning that pay on many rows are left out: over a few hundred requests they are a
# fifth of the time of a deep view, and what they save there is nothing. Joins and filters are ordered all the same.
FEW_BYTES = 4 << 20
_FOR_MANY_ROWS = (
    "aggregate_reuse", "column_lifetime", "common_subexpressions", "common_subplan", "compressed_materialization",
    "cte_filter_pusher", "duplicate_groups", "join_filter_pushdown", "late_materialization", "projection_placement",
    "projection_pullup", "self_join_aggregate", "statistics_propagation",
)  # fmt: skip

_INTEGERS = {
    "TINYINT",
    "SMALLINT",
    "INTEGER",
    "BIGINT",
    "UTINYINT",
    "USMALLINT",
    "UINTEGER",
    "UBIGINT",
}
_FLOATS = {"FLOAT", "DOUBLE"}
_POLARS: dict[str, Any] = {
    "VARCHAR": pl.String,
    "BIGINT": pl.Int64,
    "INTEGER": pl.Int32,
    "DOUBLE": pl.Float64,
    "BOOLEAN": pl.Boolean,
    "VARCHAR[]": pl.List(pl.String),
    "BIGINT[]": pl.List(pl.Int64),
    "INTEGER[]": pl.List(pl.Int32),
    "UBIGINT[]": pl.List(pl.UInt64),
}


_WORD = re.compile(r"\w+")
_WRITTEN = re.compile(
    r"\b(?:insert into|update|delete from|(?:alter|drop|truncate) (?:table )?(?:if exists )?)\s*(?:\w+\.)*(\w+)"
)  # the tables that statements change


Asked = tuple[str, Mapping[str, object]]  # a query and its parameters


class Store:
    """The tables of one analysis. Opens or creates `path`; without a path it lives in memory.

    `scratch`: the file is this process's own and goes with it.
    """

    def __init__(
        self, path: str | Path | None = None, *, read_only: bool = False, scratch: bool = False
    ) -> None:
        self.path = None if path is None else Path(path)
        self.read_only = read_only
        self._lasting = path is not None and not scratch
        self._taken_bytes = 0 if self.path is None or not self.path.exists() else FEW_BYTES
        config: dict[str, Any] = dict(_CONFIG)
        if self.path is not None and not read_only:
            config["storage_compatibility_version"] = STORAGE_VERSION
        try:
            self.connection = duckdb.connect(
                str(self.path or ":memory:"), read_only=read_only, config=config
            )
        except duckdb.Error as error:
            raise UnreadableInput(
                f"{self.path}: cannot be opened as a DuckDB file ({_first_line(error)})",
                "close the program that has it open, or make it anew with `pdtrace ingest`",
            ) from error
        self._checked: set[tuple[str, str]] = set()
        self._loading = False
        self._appended = 0
        self._answers: dict[_ahead.Key, pl.DataFrame] = {}
        self._waiting: set[str] = set()  # queries that are created when somebody names them
        self._aside = Aside() if self.path is None else Aside(self._own_place())
        self._making = RLock()  # views are made by one thread at a time
        if not read_only:
            self.connection.execute(_beginning(in_memory=self.path is None))
            if self._taken_bytes < FEW_BYTES:
                self._plan_for_few()

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

    def close(self) -> None:
        """Close the connection; a file is checkpointed by DuckDB."""
        self.connection.close()

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
        return Conditions(self._told)

    def _told(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of a query over tables alone."""
        self._make(library.tables().keys() & set(_WORD.findall(query.lower())))
        return self.connection.execute(query).fetchall()

    def stretches(self, table: str, columns: Sequence[str], rows: int) -> Iterator[pl.DataFrame]:
        """These columns of a table, so many rows at a time; batches kept aside come as they are, not copied."""
        place = f"{self._aside.place}.{table}" if table in self._aside.names() else table
        wanted = ", ".join(columns)
        last = self.scalar(f"SELECT coalesce(max(rowid), -1) FROM {place}")
        for low in range(0, last + 1, rows):
            inside = f"rowid >= {low} AND rowid < {low + rows}"
            yield self.sql(f"SELECT {wanted} FROM {place} WHERE {inside}")
        kinds = {
            c.name: _POLARS[c.type] for c in library.tables()[table].columns if c.name in columns
        }
        for frame in self._aside.frames(table, columns):
            yield frame.with_columns(
                pl.col(name).cast(kind) for name, kind in kinds.items() if kind != pl.String
            )

    def count(self, table: str) -> int:
        """Rows of a table."""
        if table in self._aside.names():
            return self._aside.count(self.connection, table)
        return int(self.scalar(f"SELECT count(*) FROM {table}"))

    def filled(self) -> frozenset[str]:
        """Tables that may have rows, in one statement for all; in the others there is nothing to look for.

        Inside a transaction that is all of them: DuckDB counts its rows at its end.
        """
        if self._loading:
            return frozenset(library.tables())
        empty = self.connection.execute(
            """SELECT table_name FROM duckdb_tables()
               WHERE estimated_size = 0 AND NOT temporary AND database_name = current_database()"""
        ).fetchall()
        return frozenset(
            library.tables().keys() - {name for (name,) in empty} | self._aside.names()
        )

    def append(self, table: str, batch: object) -> int:
        """Append rows (Polars, Arrow or a list of dicts) to a table; returns how many.

        Columns that the batch lacks become NULL. Raises SchemaMismatch for unknown columns and wrong types.
        """
        columns = {c.name: c.type for c in library.staging(table).columns}
        frame = _arrow(batch, columns)
        if frame.num_rows == 0:
            return 0
        self._check(table, frame, columns)
        self._count(frame.nbytes)
        if table in self._kept_aside() and frame.num_rows >= aside.LEAST_ROWS:
            self._aside.add(table, frame)
        else:
            place = f"{self._aside.place}.{table}" if table in self._aside.names() else table
            _insert(self.connection, place, frame)
            self._appended += frame.num_rows
            if self._loading and self.path is not None and self._appended >= LET_GO_ROWS:
                self._appended = 0
                self._let_go()
        return int(frame.num_rows)

    def _let_go(self) -> None:
        """Let blocks that are in the file leave memory, which DuckDB keeps up to its limit: no more is held of a longer file."""
        ((held, written),) = self.connection.execute(
            """SELECT coalesce(sum(memory_usage_bytes), 0)::BIGINT,
                      coalesce(sum(memory_usage_bytes) FILTER (tag = 'BASE_TABLE'), 0)::BIGINT
               FROM duckdb_memory()"""
        ).fetchall()
        if written:
            # What has lain there longest goes first: these blocks, not the rows that wait to be written.
            with suppress(duckdb.Error):
                self.connection.execute(f"SET memory_limit = '{held - written + (1 << 20)}B'")
            self.connection.execute(f"SET memory_limit = '{LOADING_MEMORY}'")

    def _plan_for_few(self) -> None:
        """Leave out the steps of planning for many rows, those of them that this version of DuckDB has."""
        names = ", ".join(f"'{name}'" for name in _FOR_MANY_ROWS)
        with suppress(duckdb.Error):
            ((known,),) = self.connection.execute(
                f"SELECT string_agg(name, ',') FROM duckdb_optimizers() WHERE name IN ({names})"
            ).fetchall()
            self.connection.execute(f"SET disabled_optimizers = '{known or ''}'")

    def _count(self, size: int) -> None:
        """Plan as for many rows from now on, when so much has come."""
        few = self._taken_bytes < FEW_BYTES
        self._taken_bytes += size
        if few and self._taken_bytes >= FEW_BYTES:
            self.connection.execute("SET disabled_optimizers = ''")

    def _kept_aside(self) -> frozenset[str]:
        """Tables whose large batches stay Arrow."""
        if self.path is None:
            return aside.TABLES
        return frozenset() if self._lasting or self.read_only else aside.BESIDE_FILES

    def _own_place(self) -> str:
        ((name,),) = self.connection.execute("SELECT current_database()").fetchall()
        return '"' + str(name).replace('"', '""') + '".main'

    def kept_aside(self, table: str) -> pl.DataFrame | None:
        """All rows of a table, when large batches of it are kept aside: nothing is copied."""
        if table not in self._aside.names():
            return None
        kinds = {c.name: _POLARS[c.type] for c in library.tables()[table].columns}
        return self._aside.frame(self.connection, table, kinds)

    def keep_aside(self, table: str, rows: pl.DataFrame) -> None:
        """Put these rows in place of those that kept_aside() gave."""
        self._aside.put(table, _arrow(rows, {}))

    def replace(self, table: str, batch: object) -> int:
        """Put these rows in place of all that the table has."""
        self.clear(table)
        return self.append(table, batch)

    def clear(self, table: str) -> None:
        """Remove all rows of a table."""
        if table in self._aside.names():
            self._aside.pop(self.connection, table)
        self.connection.execute(f"DELETE FROM {table}")

    def give(self, table: str, batch: object) -> None:
        """Fill a table that holds what this run was given (its `stage` says so).

        In a file a temporary table of that name stands before it: the file stays as it is.
        """
        if self.path is None:
            self.replace(table, batch)
            return
        inner = ", ".join(f'"{c.name}" {c.type}' for c in library.tables()[table].columns)
        self.connection.execute(f"CREATE OR REPLACE TEMP TABLE {table} ({inner})")
        self.append(table, batch)

    def _check(self, table: str, frame: pa.Table, columns: Mapping[str, str]) -> None:
        """Raise SchemaMismatch when the batch does not fit; each schema is looked at once."""
        mark = (table, str(frame.schema))
        if mark in self._checked:
            return
        unknown = [name for name in frame.column_names if name not in columns]
        if unknown:
            raise SchemaMismatch(f"table {table} has no column {', '.join(unknown)}")
        for name, found in self._kinds(frame).items():
            if not _fits(found, columns[name]):
                raise SchemaMismatch(
                    f"table {table}, column {name}: expected {columns[name]}, found {found}"
                )
        self._checked.add(mark)

    def _kinds(self, frame: pa.Table) -> dict[str, str]:
        """The DuckDB type of each column; DuckDB is asked for those that are not plain."""
        kinds = {field.name: _duckdb_type(field.type) for field in frame.schema}
        if odd := [name for name, kind in kinds.items() if kind is None]:
            empty = frame.select(odd).slice(0, 0)  # noqa: F841 -- found by DuckDB's replacement scan
            told = self.connection.execute("DESCRIBE SELECT * FROM empty").fetchall()
            kinds |= {str(name): str(kind) for name, kind, *_ in told}
        return {name: kind for name, kind in kinds.items() if kind is not None}

    def temporary(self, name: str, rows: pl.DataFrame | pa.Table) -> None:
        """Make (or make anew) a temporary table of these rows."""
        self.connection.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS SELECT * FROM rows")

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
        if not self._waiting and not self._aside.names():
            return
        text = statement.lower()
        if changed := aside.TABLES.intersection(_WRITTEN.findall(text)):
            self.settle_aside(*changed)
        self._make(_WORD.findall(text))

    def _make(self, names: Iterable[str]) -> None:
        """Create these views and findings and what they read, unless they are there."""
        wanted = set(names).union(*map(library.below, names))
        self._aside.show(self.connection, wanted)
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

    def settle_aside(self, *tables: str) -> None:
        """Put the rows that were kept aside into these tables, all without names: each connection sees them then."""
        names = tables or aside.TABLES
        for table in self._aside.names().intersection(names):
            for rows in self._aside.pop(self.connection, table):
                _insert(self.connection, table, rows)

    def beside(self) -> Store:
        """The same tables for another thread, as they are now; what is appended large is not seen by the other."""
        twin = copy(self)
        twin.connection = self.cursor()
        twin._aside = self._aside.copy()
        twin._checked, twin._answers = set(), {}
        return twin

    def share_queries(self, twin: Store) -> None:
        """Make the same views and findings as the other, each of them once."""
        self._waiting = twin._waiting

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """Another connection to the same tables, for another thread or an unfinished result."""
        cursor = self.connection.cursor()
        self._aside.show_all(cursor)
        return cursor

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

    @contextmanager
    def bulk_load(self) -> Iterator[None]:
        """Many appends as one transaction; into a file also with a small buffer, so that memory stays flat.

        Without it each small batch goes through the write-ahead log (measured: 92 instead of 71 bytes a span),
        and DuckDB compresses the last row group again after every few of them.
        """
        if self.path is not None:
            self.connection.execute(f"SET memory_limit = '{LOADING_MEMORY}'")
        # Collectors decode in other threads meanwhile: a second one for each small INSERT cost 20 % more CPU.
        self.connection.execute("SET threads = 1")
        self.connection.execute("BEGIN")
        self._loading = True
        try:
            yield
        finally:
            # Also after an error: what was read before it stays.
            self.settle()
            self._loading = False
            self.connection.execute("COMMIT")
            self.connection.execute("RESET threads")
            if self.path is not None:
                self.connection.execute("RESET memory_limit")

    @contextmanager
    def alone(self, rows: int) -> Iterator[None]:
        """Write so many rows while nobody else is at work here: in one thread when they fill no row group.

        DuckDB lets each thread gather such rows apart and then writes them again. 100,000 requests took 135 ms and
        20,000 page faults, in one thread 68 ms and 10,000.
        """
        with self._in_one_thread(FEW_ROWS <= rows < ROW_GROUP):
            yield

    @contextmanager
    def _in_one_thread(self, so: bool) -> Iterator[None]:
        """Let each statement keep to the thread that runs it."""
        if not so:
            yield
            return
        self.connection.execute("SET threads = 1")
        try:
            yield
        finally:
            self.connection.execute("RESET threads")

    def _is_small(self) -> bool:
        """Whether no table that questions read has more rows than DuckDB gives to one thread, or many more beside it."""
        most = self.scalar(
            """SELECT max(estimated_size) FROM duckdb_tables()
               WHERE NOT temporary AND table_name <> 'spans' AND database_name = current_database()"""
        )
        return FEW_ROWS <= (most or 0) < ROW_GROUP and self._aside.most() < 8 * ROW_GROUP

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Many appends into a file as one transaction: each alone goes through the write-ahead log."""
        if self.path is None:
            yield
            return
        self.connection.execute("BEGIN")
        self._aside.keep()
        try:
            yield
        except BaseException:
            self.connection.execute("ROLLBACK")
            self._aside.undo()
            raise
        self.connection.execute("COMMIT")

    def settle(self) -> str:
        """Keep what was appended since the last call; says why when an error has undone it all.

        In a transaction DuckDB takes back everything after one failed statement.
        """
        if not self._loading:
            return ""
        try:
            self.connection.execute("COMMIT")
            self._aside.keep()
        except duckdb.Error as error:
            self.take_back()
            return _first_line(error)
        self.connection.execute("BEGIN")
        return ""

    def take_back(self) -> None:
        """Undo what was appended since settle()."""
        if not self._loading:
            return
        with suppress(duckdb.Error):
            self.connection.execute("ROLLBACK")
        self._aside.undo()
        self.connection.execute("BEGIN")

    @contextmanager
    def computed_once(
        self, *names: str, ask: Iterable[Asked] = (), conditions: Conditions | None = None
    ) -> Iterator[None]:
        """Hold views that many queries read as tables of the same name, for as long as the block runs.

        Views that these or the questions read and that can have no rows (`when:` of their header) are empty tables.
        `ask`: queries (name, parameters) that are answered meanwhile, several at a time; query() hands out what is
        known already. `conditions`: those that were asked of the same tables before. In a file that has no effect: only one connection has its tables, temporary ones, which
        DuckDB finds before views, inside other views and macros too.
        """
        ask = list(ask)
        read = {*names, *(name for name, _ in ask)}
        below = read.union(*map(library.below, read))
        empty = self._empty(below, names, conditions or self.conditions())
        if self.path is None:
            asked = {_ahead.key(name, given): self._from(name, given) for name, given in ask}
            try:
                # Two statements at a time: one that hands parts to the other's thread gains nothing and writes rows twice.
                with (
                    self._in_one_thread(self._is_small()),
                    self._queries().held(self.connection, names, empty, asked) as answers,
                ):
                    self._answers.update(answers)
                    yield
            finally:
                self._answers.clear()
            return
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

    def _empty(self, names: Iterable[str], held: Iterable[str], conditions: Conditions) -> set[str]:
        """The views among these whose condition (`when:` of their header) does not hold: they have no rows.

        In memory only those that are `held` or not there yet: what stands in for them is let go with the block.
        """
        known = library.queries()
        free = {*held, *(self._waiting if self.path is None else known)}
        return {
            name
            for name in free.intersection(names, known)
            if (query := known[name]).when
            and not query.params
            and query.kind == "views"
            and not conditions.hold(query.when)
        }

    def _queries(self) -> _ahead.Queries:
        return _ahead.Queries(self.cursor, self._waiting)

    def user_sql(self, text: str, limit: int = 0) -> pl.DataFrame:
        """Run a user's SELECT, of at most `limit` rows when given.

        Raises UnknownQuery with DuckDB's words when it refuses, and for anything but one SELECT: it sees the
        tables of this store, no files, no settings, no variables of this program.
        """
        self._make(self._waiting)
        self.settle_aside()  # a user's statement has no access to anything outside
        try:
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


def _beginning(*, in_memory: bool) -> str:
    """The settings and tables of a store that may be written, as one script.

    One by one they wait for the interpreter fifty times, which another thread keeps busy with imports meanwhile.
    """
    settings = ["SET preserve_insertion_order = false"]
    if in_memory:
        settings.append(f"SET checkpoint_threshold = '{COMPRESS_FROM}'")
    tables = [table.ddl for table in library.tables().values()]
    logs = library.staging("log_records").ddl.replace("TABLE", "TEMP TABLE", 1)
    return ";\n".join([*settings, *tables, logs])


def _insert(connection: duckdb.DuckDBPyConnection, place: str, frame: pa.Table) -> None:
    names = ", ".join(f'"{name}"' for name in frame.column_names)
    # The name `batch_rows` is found by DuckDB's replacement scan of local variables.
    batch_rows = frame  # noqa: F841
    try:
        connection.execute(f"INSERT INTO {place} ({names}) SELECT {names} FROM batch_rows")
    except duckdb.ConversionException as error:
        table = place.rpartition(".")[2]
        raise SchemaMismatch(f"table {table}: {_first_line(error)}") from error


def _arrow(batch: object, columns: Mapping[str, str]) -> pa.Table:
    """Any batch as an Arrow table; lists of dicts get the table's types."""
    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, pa.RecordBatch):
        return pa.Table.from_batches([batch])
    if isinstance(batch, pl.DataFrame):
        # Texts as views: DuckDB copies them anyway.
        return batch.to_arrow(compat_level=pl.CompatLevel.newest())
    rows = list(batch)  # type: ignore[call-overload]
    names = list(dict.fromkeys(name for row in rows for name in row))
    known = {name: _POLARS[columns[name]] for name in names if columns.get(name) in _POLARS}
    return pl.DataFrame(
        rows, schema=names, schema_overrides=known, infer_schema_length=None
    ).to_arrow()


# DuckDB's types of plain Arrow columns.
_OF_ARROW = {
    pa.null(): '"NULL"', pa.bool_(): "BOOLEAN", pa.float32(): "FLOAT", pa.float64(): "DOUBLE",
    pa.int8(): "TINYINT", pa.int16(): "SMALLINT", pa.int32(): "INTEGER", pa.int64(): "BIGINT",
    pa.uint8(): "UTINYINT", pa.uint16(): "USMALLINT", pa.uint32(): "UINTEGER", pa.uint64(): "UBIGINT",
    pa.string(): "VARCHAR", pa.large_string(): "VARCHAR", pa.string_view(): "VARCHAR",
}  # fmt: skip


def _duckdb_type(kind: pa.DataType) -> str | None:
    """DuckDB's name of an Arrow type; None where it is not a plain one."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _duckdb_type(kind.value_type)
        return None if inner is None else f"{inner}[]"
    return _OF_ARROW.get(kind)


def _fits(found: str, expected: str) -> bool:
    """Whether a column of DuckDB type `found` may go into one of type `expected` without loss of meaning."""
    if found == expected or found == '"NULL"':
        return True
    if expected in _FLOATS:
        return found in _FLOATS | _INTEGERS
    if expected in _INTEGERS:
        return found in _INTEGERS
    if expected == "VARCHAR":
        return found.startswith("ENUM")
    if expected.endswith("[]") and found.endswith("[]"):
        return (
            found[:-2] == '"NULL"'
            or expected.startswith("STRUCT")
            or _fits(found[:-2], expected[:-2])
        )
    return expected.startswith(("MAP", "STRUCT")) and found.startswith(("MAP", "STRUCT"))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _first_line(error: Exception) -> str:
    return re.split(r"[\r\n]", str(error), maxsplit=1)[0]
