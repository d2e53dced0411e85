"""A large table that another thread writes while others work: who needs it in DuckDB waits, the rows are there at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import duckdb
import polars as pl

from pdtrace import library
from pdtrace._batches import as_arrow


class Filling:
    """One table while it is written.

    `shown`: on the store's own connection its name means the rows, until hide(); else who names it waits.
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        table: str,
        rows: pl.DataFrame,
        write: Callable[[], object],
        *,
        shown: bool,
    ) -> None:
        self.table = table
        self.height = rows.height
        self._rows: pl.DataFrame | None = rows
        self._connection = connection
        self._shown = shown
        if shown:
            self._show(rows)
        pool = ThreadPoolExecutor(1, f"pdtrace-{table}")
        self._written = pool.submit(write)
        pool.shutdown(wait=False)

    def _show(self, rows: pl.DataFrame) -> None:
        self._connection.register(f"_{self.table}_rows", as_arrow(rows, {}))
        columns = ", ".join(
            f"CAST({c.name if c.name in rows.columns else 'NULL'} AS {c.type}) AS {c.name}"
            for c in library.tables()[self.table].columns
        )
        self._connection.execute(
            f"CREATE TEMP VIEW {self.table} AS SELECT {columns} FROM _{self.table}_rows"
        )

    def take(self) -> pl.DataFrame | None:
        """The rows, to who asks first; nobody else holds them when the table is written."""
        rows, self._rows = self._rows, None
        return rows

    def hide(self) -> None:
        """The name means the table again: whoever reads it from now on waits for it."""
        if self._shown:
            self._connection.execute(f"DROP VIEW temp.{self.table}")
            self._connection.unregister(f"_{self.table}_rows")
            self._shown = False

    def ready(self) -> None:
        """Return when the name can be read on the store's own connection."""
        if not self._shown:
            self.wait()

    def wait(self) -> None:
        """Return when the table is written."""
        self._written.result()

    def end(self) -> None:
        """The table alone, with all its rows."""
        self.hide()
        self.wait()
