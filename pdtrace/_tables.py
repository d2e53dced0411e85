"""The tables of one DuckDB file or memory: takes checked batches, keeps large ones as Arrow, loads in transactions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa

from pdtrace import _aside as aside
from pdtrace import library
from pdtrace._aside import Aside
from pdtrace._batches import POLARS, as_arrow, duckdb_type, first_line, fits, insert
from pdtrace._filling import Filling
from pdtrace.errors import SchemaMismatch, UnreadableInput

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


def _require_utf8(path: Path | None) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UnreadableInput(
            f"{path}: DuckDB opens no file whose path is not UTF-8", "rename it"
        ) from error


class Tables:
    """Rows go in here; questions are asked of the Store that this is part of."""

    _filling: Filling | None = None  # a table that another thread writes

    def __init__(
        self, path: str | Path | None = None, *, read_only: bool = False, scratch: bool = False
    ) -> None:
        self.path = None if path is None else Path(path)
        self.read_only = read_only
        self._lasting = path is not None and not scratch
        self._taken_bytes = 0 if self.path is None or not self.path.exists() else FEW_BYTES
        _require_utf8(self.path)
        config: dict[str, Any] = dict(_CONFIG)
        if self.path is not None and not read_only:
            config["storage_compatibility_version"] = STORAGE_VERSION
        try:
            self.connection = duckdb.connect(
                str(self.path or ":memory:"), read_only=read_only, config=config
            )
        except duckdb.Error as error:
            raise UnreadableInput(
                f"{self.path}: cannot be opened as a DuckDB file ({first_line(error)})",
                "close the program that has it open, or make it anew with `pdtrace ingest`",
            ) from error
        self._checked: set[tuple[str, str]] = set()
        self._loading = False
        self._appended = 0
        self._aside = Aside()
        if self.path is not None:  # which may have had rows before
            self._aside = Aside(self._own_place(), written=library.tables())
        self._alone = _Alone()
        if not read_only:
            self.connection.execute(_beginning(in_memory=self.path is None))
            if self._taken_bytes < FEW_BYTES:
                self._plan_for_few()

    def close(self) -> None:
        """Close the connection; a file is checkpointed by DuckDB."""
        try:
            with suppress(duckdb.Error):
                self.settle_filling()
        finally:
            self.connection.close()

    def append(self, table: str, batch: object) -> int:
        """Append rows (Polars, Arrow or a list of dicts) to a table; returns how many.

        Columns that the batch lacks become NULL. Raises SchemaMismatch for unknown columns and wrong types.
        """
        self.settle_filling(table)
        columns = {c.name: c.type for c in library.staging(table).columns}
        frame = as_arrow(batch, columns)
        if frame.num_rows == 0:
            return 0
        self._check(table, frame, columns)
        self._count(frame.nbytes)
        if table in self._kept_aside() and self._aside.takes(table, frame.num_rows):
            if table == "spans":  # made of bytes: what DuckDB would refuse is refused here
                frame.validate(full=True)
            self._aside.add(table, frame)
        else:
            place = f"{self._aside.place}.{table}" if table in self._aside.names() else table
            insert(self.connection, place, frame)
            self._aside.wrote(table)
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
        kinds = {c.name: POLARS[c.type] for c in library.tables()[table].columns}
        return self._aside.frame(self.connection, table, kinds)

    def batches_aside(self, table: str) -> list[pa.Table]:
        """The same as the Arrow tables that they are; none when no batch is kept aside."""
        if table not in self._aside.names():
            return []
        return self._aside.batches(self.connection, table)

    def keep_aside(self, table: str, rows: pl.DataFrame) -> None:
        """Put these rows in place of those that kept_aside() gave."""
        self._aside.put(table, as_arrow(rows, {}), rows)

    def settle_aside(self, *tables: str) -> None:
        """Put the rows that were kept aside into these tables, all without names: each connection sees them then."""
        names = tables or aside.TABLES
        for table in self._aside.names().intersection(names):
            for rows in self._aside.pop(self.connection, table):
                insert(self.connection, table, rows)
                self._aside.wrote(table)

    def replace(self, table: str, batch: object) -> int:
        """Put these rows in place of all that the table has."""
        self.clear(table)
        return self.append(table, batch)

    def clear(self, table: str) -> None:
        """Remove all rows of a table."""
        self.settle_filling(table)
        if table in self._aside.names():
            self._aside.pop(self.connection, table)
        self.connection.execute(f"DELETE FROM {table}")

    def settle_filling(self, table: str | None = None) -> None:
        """Wait until all rows of this table, or of any, are there: somebody is about to change it."""
        if self._filling is not None and table in {None, self._filling.table}:
            filling, self._filling = self._filling, None
            filling.end()

    def take_filling(self, table: str) -> pl.DataFrame | None:
        """The rows of a table that another thread still writes, in their order; for one reader."""
        if self._filling is None or self._filling.table != table:
            return None
        return self._filling.take()

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

    def temporary(self, name: str, rows: pl.DataFrame | pa.Table) -> None:
        """Make (or make anew) a temporary table of these rows."""
        self.connection.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS SELECT * FROM rows")

    def _check(self, table: str, frame: pa.Table, columns: Mapping[str, str]) -> None:
        """Raise SchemaMismatch when the batch does not fit; each schema is looked at once."""
        mark = (table, str(frame.schema))
        if mark in self._checked:
            return
        unknown = [name for name in frame.column_names if name not in columns]
        if unknown:
            raise SchemaMismatch(f"table {table} has no column {', '.join(unknown)}")
        for name, found in self._kinds(frame).items():
            if not fits(found, columns[name]):
                raise SchemaMismatch(
                    f"table {table}, column {name}: expected {columns[name]}, found {found}"
                )
        self._checked.add(mark)

    def _kinds(self, frame: pa.Table) -> dict[str, str]:
        """The DuckDB type of each column; DuckDB is asked for those that are not plain."""
        kinds = {field.name: duckdb_type(field.type) for field in frame.schema}
        if odd := [name for name, kind in kinds.items() if kind is None]:
            empty = frame.select(odd).slice(0, 0)  # noqa: F841 -- found by DuckDB's replacement scan
            told = self.connection.execute("DESCRIBE SELECT * FROM empty").fetchall()
            kinds |= {str(name): str(kind) for name, kind, *_ in told}
        return {name: kind for name, kind in kinds.items() if kind is not None}

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
        filled = library.tables().keys() - {name for (name,) in empty} | self._aside.names()
        return frozenset(filled if self._filling is None else filled | {self._filling.table})

    def may_tell(self, table: str, column: str) -> bool:
        """Whether a row of a table may have a value in a column: not where all are kept aside and have none."""
        return table not in self._aside.names() or self._aside.tells(self.connection, table, column)

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
        self._alone.begin(self.connection)
        try:
            yield
        finally:
            self._alone.end(self.connection)

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
            return first_line(error)
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


class _Alone:
    """How many want each statement to keep to its thread: a setting that all connections share."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = 0

    def begin(self, connection: duckdb.DuckDBPyConnection) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                connection.execute("SET threads = 1")

    def end(self, connection: duckdb.DuckDBPyConnection) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                connection.execute("RESET threads")


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
