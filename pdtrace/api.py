"""The Python door: Trace opens dumps or a .duckdb file and hands out frames."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pdtrace.ingest import Options, ingest
from pdtrace.inputs import STDIN
from pdtrace.store import Store

if TYPE_CHECKING:
    import polars as pl

    from pdtrace.diagnose import Diagnosis
    from pdtrace.model import Slo

# Above this much input the tables live in a temporary file, so that DuckDB may spill and memory stays bounded.
IN_MEMORY_BYTES = 512 << 20


class Trace:
    """The tables, views and findings of one set of inputs."""

    def __init__(
        self, store: Store, folder: tempfile.TemporaryDirectory[str] | None = None
    ) -> None:
        self.store = store
        self._folder = folder

    @classmethod
    def read(cls, paths: Iterable[str | Path], options: Options | None = None) -> Trace:
        """Read files, folders, globs or one .duckdb file.

        Raises UnreadableInput, UnknownFormat.
        """
        names = [str(path) for path in paths]
        if len(names) == 1 and is_store(names[0]):
            return cls(Store(names[0], read_only=True))
        folder = None
        if _size(names) > IN_MEMORY_BYTES:
            folder = tempfile.TemporaryDirectory(prefix="pdtrace-")
        store = Store(None if folder is None else Path(folder.name) / "trace.duckdb")
        ingest(names, store, options)
        return cls(store, folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store and remove the temporary file, if there is one."""
        self.store.close()
        if self._folder is not None:
            self._folder.cleanup()

    def requests(self) -> pl.DataFrame:
        """One row per request: windows, latencies in ms, tokens, workers, outcome."""
        return self.store.query("requests")

    def phases(self) -> pl.DataFrame:
        """The partition: request, phase, detail, start_ns, end_ns, worker, basis."""
        return self.store.query("phases")

    def diagnose(self, slo: Slo | None = None) -> Diagnosis:
        """The whole diagnosis; `.to_dict()` gives the documented JSON."""
        from pdtrace.diagnose import diagnose

        return diagnose(self.store, slo)

    def findings(self, slo: Slo | None = None) -> pl.DataFrame:
        """One row per finding and deployment, in the order of the diagnosis, with the fields of the JSON."""
        import polars as pl

        rows = [
            {"deployment": deployment["name"], **finding}
            for deployment in self.diagnose(slo).to_dict()["deployments"]
            for finding in deployment["findings"]
        ]
        return pl.DataFrame(rows, infer_schema_length=None)

    def sql(self, query: str) -> pl.DataFrame:
        """Rows of a SELECT over tables, views and findings.

        Raises UnknownQuery when DuckDB refuses it.
        """
        return self.store.user_sql(query)


def is_store(path: str) -> bool:
    """Whether the path is a DuckDB file: its magic bytes stand at offset 8."""
    try:
        with Path(path).open("rb") as stream:
            return stream.read(12)[8:] == b"DUCK"
    except OSError:
        return False


def _size(paths: list[str]) -> int:
    """Bytes on disk below the paths; compressed files count as ten times their size."""
    total = 0
    for name in paths:
        path = Path(name)
        files = (
            [path] if path.is_file() else path.rglob("*") if path.is_dir() and name != STDIN else []
        )
        for file in files:
            if file.is_file():
                total += file.stat().st_size * (
                    10 if file.suffix in {".gz", ".zst", ".xz", ".bz2"} else 1
                )
    return total
