"""Large batches that stay Arrow: a view over them and over their table stands in for it until something is written there.

DuckDB reads Arrow where it lies. In a store in memory such rows take less room than in a table, and nothing is copied;
beside a file that goes with its process this holds for what is made last and read at once (measured on 14 million rows:
writing them took 10 s of CPU).
A table costs by its columns, empty ones too: 100,000 legs of 49 columns took 0.3 s of CPU to write, and nobody gained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa

from pdtrace import library
from pdtrace._batches import duckdb_type
from pdtrace._lookup import NOWHERE, places

BESIDE_FILES = frozenset(
    {"identity_edges", "observations", "phases", "phase_sums", "partition_checks"}
)  # of a process's own file
TABLES = BESIDE_FILES | {"legs", "intervals", "reported", "spans"}
LEAST_ROWS = 20_000  # below, a table costs nothing
LEAST_SPANS = 2_500  # lists cost more, and readers give a file in blocks
PLACE = "memory.main"  # of the tables of a store in memory; plain `main` is also a schema of temporary things
_SCAN_ROWS = 122_880  # a row group of DuckDB: what one thread scans at a time


class Aside:
    """The batches that were kept aside, by table."""

    def __init__(self, place: str = PLACE, *, written: Iterable[str] = ()) -> None:
        self.place = place
        self._written = set(written)  # tables that may have rows of their own; shared by copies
        self._joined: set[str] = set()  # those of which these are shown too
        self._parts: dict[str, list[pa.Table]] = {}
        self._kept: dict[str, int] = {}
        self._changed: set[str] = set()
        self._frames: dict[str, pl.DataFrame] = {}  # as last handed out

    def copy(self) -> Aside:
        """The same batches, for a connection to which none was shown yet."""
        other = Aside(self.place)
        other._written = self._written
        other._parts = {table: list(parts) for table, parts in self._parts.items()}
        other._changed = set(other._parts)
        return other

    def follow(self, other: Aside, names: Iterable[str]) -> None:
        """Have what the other one has of these tables by now."""
        for table in other.names().intersection(names):
            parts = other._parts[table]
            if list(map(id, self._parts.get(table, ()))) != list(map(id, parts)):
                self._parts[table] = list(parts)
                self._changed.add(table)

    def wrote(self, *tables: str) -> None:
        """Rows were written into these tables themselves."""
        self._written.update(tables)

    def names(self) -> frozenset[str]:
        """Tables that have rows here."""
        return frozenset(self._parts)

    def count(self, connection: duckdb.DuckDBPyConnection, table: str) -> int:
        """Rows of a table: of its batches, and those that stand in it."""
        ((rest,),) = connection.execute(f"SELECT count(*) FROM {self.place}.{table}").fetchall()
        return int(rest) + sum(int(rows.num_rows) for rows in self._parts[table])

    def takes(self, table: str, rows: int) -> bool:
        """Whether a batch of so many rows is kept here."""
        return rows >= (LEAST_SPANS if table == "spans" else LEAST_ROWS)

    def most(self) -> int:
        """The rows of the longest of them that questions read."""
        lengths = (
            sum(r.num_rows for r in parts) for name, parts in self._parts.items() if name != "spans"
        )
        return max(lengths, default=0)

    def frames(
        self, table: str, columns: Sequence[str], among: Mapping[str, pl.Series]
    ) -> Iterator[pl.DataFrame]:
        """Columns of each batch of a table; NULLs where a batch lacks one. Those of `among` as places in these lists."""
        for rows in self._parts.get(table, []):
            told = [name for name in columns if name in rows.column_names]
            frame = pl.DataFrame(
                _places(rows.column(name), among[name]).alias(name)
                if name in among
                else pl.Series(name, rows.column(name))
                for name in told
            )
            yield frame.with_columns(
                pl.lit(None, pl.String).alias(name) for name in columns if name not in told
            ).select(columns)

    def add(self, table: str, rows: pa.Table) -> None:
        """Keep a batch."""
        slices = pa.Table.from_batches(rows.to_batches(max_chunksize=_SCAN_ROWS), rows.schema)
        self._parts.setdefault(table, []).append(slices)
        self._changed.add(table)
        self._frames.pop(table, None)

    def batches(self, connection: duckdb.DuckDBPyConnection, table: str) -> list[pa.Table]:
        """All rows of a table; those that its table had lie here too from now on."""
        name = f"{self.place}.{table}"
        if connection.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchall():
            self.add(table, connection.sql(f"FROM {name}").to_arrow_table())
            connection.execute(f"DELETE FROM {name}")
        return self._parts[table]

    def tells(self, connection: duckdb.DuckDBPyConnection, table: str, column: str) -> bool:
        """Whether a row has a value in a column."""
        return any(
            column in rows.column_names and rows.column(column).null_count < rows.num_rows
            for rows in self.batches(connection, table)
        )

    def frame(
        self, connection: duckdb.DuckDBPyConnection, table: str, kinds: Mapping[str, Any]
    ) -> pl.DataFrame:
        """The same as one frame, with columns of these kinds."""
        parts = self.batches(connection, table)
        if table in self._frames and self._frames[table].schema == kinds:
            return self._frames[table]
        frames = []
        for rows in parts:
            frame = pl.DataFrame(pl.from_arrow(rows))
            if frame.schema != kinds:
                frame = frame.select(
                    (pl.col(name) if name in frame.columns else pl.lit(None)).cast(kind).alias(name)
                    for name, kind in kinds.items()
                )
            frames.append(frame)
        self._frames[table] = pl.concat(frames)
        return self._frames[table]

    def put(self, table: str, rows: pa.Table, frame: pl.DataFrame) -> None:
        """These rows in place of all that are here; `frame` has the same."""
        self._parts[table] = []
        self.add(table, rows)
        self._frames[table] = frame

    def pop(self, connection: duckdb.DuckDBPyConnection, table: str) -> list[pa.Table]:
        """Hand out the batches of a table; its name means the table alone again."""
        connection.execute(f"DROP VIEW IF EXISTS temp.{table}")
        self._kept.pop(table, None)
        self._changed.discard(table)
        self._joined.discard(table)
        self._frames.pop(table, None)
        return self._parts.pop(table, [])

    def keep(self) -> None:
        """What is here now outlives undo()."""
        self._kept = {table: len(parts) for table, parts in self._parts.items()}

    def undo(self) -> None:
        """Forget what was added since keep(); the views went with the transaction."""
        self._parts = {table: self._parts[table][:count] for table, count in self._kept.items()}
        self._changed = set(self._parts)
        self._frames.clear()

    def show(self, connection: duckdb.DuckDBPyConnection, names: Iterable[str]) -> None:
        """Let the names of these tables mean the rows here too, on the store's own connection."""
        late = self._written.intersection(self._parts) - self._joined
        for table in (self._changed | late).intersection(names):
            self._joined.discard(table)
            if table in self._written:
                self._joined.add(table)
            self._view(connection, table, joined=table in self._joined)
            self._changed.discard(table)

    def show_all(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """The same for every table on another connection to the store: views like these are each one's own."""
        for table in self._parts:
            self._view(cursor, table, joined=True)

    def _view(self, connection: duckdb.DuckDBPyConnection, table: str, *, joined: bool) -> None:
        """`joined`: with the rows of the table itself. Without, and without casts to the same type, who reads is planned sooner."""
        columns = library.tables()[table].columns
        selects = []
        if joined or not self._parts[table]:
            selects = [f"SELECT {', '.join(c.name for c in columns)} FROM {self.place}.{table}"]
        for number, rows in enumerate(_together(self._parts[table])):
            connection.register(f"_{table}_{number}", rows)
            kinds = {field.name: duckdb_type(field.type) for field in rows.schema}
            told = ", ".join(
                c.name
                if kinds.get(c.name) == c.type
                else f"CAST({c.name if c.name in kinds else 'NULL'} AS {c.type}) AS {c.name}"
                for c in columns
            )
            selects.append(f"SELECT {told} FROM _{table}_{number}")
        union = " UNION ALL ".join(selects)
        connection.execute(f"CREATE OR REPLACE TEMP VIEW {table} AS {union}")


def _places(column: pa.ChunkedArray, among: pl.Series) -> pl.Series:
    """Where the texts of a column stand in a list; each that it holds once is looked up once."""
    if not pa.types.is_dictionary(column.type):
        return pl.Series(places(pl.Series(values=column), among))
    whole = column.combine_chunks()
    found = pl.Series(places(pl.Series(values=whole.dictionary), among))
    return found.gather(pl.Series(values=whole.indices)).fill_null(NOWHERE)


def _together(parts: list[pa.Table]) -> list[pa.Table]:
    """The batches, those of one shape as one."""
    alike: dict[str, list[pa.Table]] = {}
    for rows in parts:
        alike.setdefault(str(rows.schema), []).append(rows)
    return [pa.concat_tables(rows) for rows in alike.values()]
