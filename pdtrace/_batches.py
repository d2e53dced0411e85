"""Batches on their way into a table: as Arrow, of the table's types, inserted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa

from pdtrace.errors import SchemaMismatch

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
POLARS: dict[str, Any] = {
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


def insert(connection: duckdb.DuckDBPyConnection, place: str, frame: pa.Table) -> None:
    """Insert a batch into a table by the names of its columns."""
    names = ", ".join(f'"{name}"' for name in frame.column_names)
    # The name `batch_rows` is found by DuckDB's replacement scan of local variables.
    batch_rows = frame  # noqa: F841
    try:
        connection.execute(f"INSERT INTO {place} ({names}) SELECT {names} FROM batch_rows")
    except duckdb.ConversionException as error:
        table = place.rpartition(".")[2]
        raise SchemaMismatch(f"table {table}: {first_line(error)}") from error


def as_arrow(batch: object, columns: Mapping[str, str]) -> pa.Table:
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
    known = {name: POLARS[columns[name]] for name in names if columns.get(name) in POLARS}
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


def duckdb_type(kind: pa.DataType) -> str | None:
    """DuckDB's name of an Arrow type; None where it is not a plain one."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = duckdb_type(kind.value_type)
        return None if inner is None else f"{inner}[]"
    if pa.types.is_dictionary(kind):
        return duckdb_type(kind.value_type)
    return _OF_ARROW.get(kind)


def fits(found: str, expected: str) -> bool:
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
            or fits(found[:-2], expected[:-2])
        )
    return expected.startswith(("MAP", "STRUCT")) and found.startswith(("MAP", "STRUCT"))


def first_line(error: Exception) -> str:
    """What an error says, without its details."""
    return re.split(r"[\r\n]", str(error), maxsplit=1)[0]
