"""Worker ids in tables: writing new names in place of old ones, and what a name is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

import polars as pl

from pdtrace.store import Store

# Columns that hold worker ids, in whatever table they stand.
WORKER_COLUMNS = (
    "worker", "router", "source_worker", "destination_worker", "prefill_worker", "decode_worker",
)  # fmt: skip


def rename(store: Store, names: Mapping[str, str], *, skip: Iterable[str] = ("workers",)) -> None:
    """Write new worker ids in place of old ones, in every table that holds them."""
    frame = pl.DataFrame(
        {"old": list(names), "new": list(names.values())},
        schema={"old": pl.String, "new": pl.String},
    )
    store.connection.register("_renamed", frame.to_arrow())
    left_out = {*skip, "worker_map"}
    for table, column in _worker_columns(store):
        if table in left_out:
            continue
        if table == "legs" and (kept := store.kept_aside("legs")) is not None:
            renamed = pl.col(column).replace(dict(names))
            store.keep_aside("legs", kept.with_columns(renamed))
            continue
        store.execute(
            f"UPDATE {table} SET {column} = r.new FROM _renamed r WHERE {table}.{column} = r.old"
        )
    store.connection.unregister("_renamed")


def _worker_columns(store: Store) -> list[tuple[str, str]]:
    """Tables with rows, by what DuckDB knows, and their columns of worker ids."""
    wanted = ", ".join(f"'{name}'" for name in WORKER_COLUMNS)
    return store.connection.execute(
        f"""SELECT c.table_name, c.column_name FROM duckdb_columns() c
            JOIN duckdb_tables() t USING (database_name, schema_name, table_name)
            WHERE c.column_name IN ({wanted}) AND (t.estimated_size > 0 OR c.table_name = 'legs')
            ORDER BY ALL"""
    ).fetchall()


def folder(path: str) -> str:
    """The folder of a source; members of an archive lie where the archive lies."""
    return str(PurePosixPath(path.partition("!")[0]).parent)


def plain(worker: str) -> str:
    """A service id without the deployment that an earlier run put behind it."""
    return re.sub(r"@[0-9a-f]{8,}$", "", worker) if worker.startswith("service:") else worker
