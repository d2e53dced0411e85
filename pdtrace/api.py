"""The Python door: Trace opens dumps or a .duckdb file and hands out frames."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Self

from pdtrace import library, registry
from pdtrace.errors import BadOption, PdtraceError
from pdtrace.ingest import FINGERPRINT, Options, cut_to_window, take
from pdtrace.inputs import Input, expand, shown
from pdtrace.slo import policy
from pdtrace.store import Store, is_store

if TYPE_CHECKING:
    import polars as pl

    from pdtrace.diagnosis import Diagnosis
    from pdtrace.model import Slo, SloPolicy
    from pdtrace.slow import Answer

# Above this much input the tables live in a temporary file, so that DuckDB may spill and memory stays bounded.
IN_MEMORY_BYTES = 512 << 20


class Trace:
    """The tables, views and findings of one set of inputs.

    Several threads may ask the same Trace; they are answered one after the other.
    """

    def __init__(
        self, store: Store, folder: tempfile.TemporaryDirectory[str] | None = None
    ) -> None:
        self.store = store
        self._folder = folder
        self._asking = RLock()  # a DuckDB connection serves one thread at a time

    @classmethod
    def read(cls, paths: Iterable[str | Path], options: Options | None = None) -> Trace:
        """Read files, folders, globs or one .duckdb file.

        Raises UnreadableInput, UnknownFormat.
        """
        names = [str(path) for path in paths]
        stores = [name for name in names if is_store(name)]
        if stores and len(names) > 1:
            raise BadOption(
                f"{shown(stores[0])}: a .duckdb file cannot be combined with other files",
                "give it alone, or make one file of all dumps with `pdtrace ingest PATH... -o FILE.duckdb`",
            )
        if stores:
            return cls._reopened(names[0], options or Options())
        inputs = expand(names)
        folder = None
        if _size(inputs) > IN_MEMORY_BYTES:
            folder = tempfile.TemporaryDirectory(prefix="pdtrace-")
        path = None if folder is None else Path(folder.name) / "trace.duckdb"
        with ThreadPoolExecutor(1, "pdtrace-store") as pool, suppress(PdtraceError):
            made = pool.submit(Store, path, scratch=True)
            registry.collectors()  # loaded while DuckDB makes the tables; what fails fails again when it is asked
        trace = cls(made.result(), folder)
        try:
            take(inputs, trace.store, options)
        except BaseException:
            trace.close()
            raise
        return trace

    @classmethod
    def _reopened(cls, path: str, options: Options) -> Trace:
        """A .duckdb file; a copy of it where it is to be cut, or where its queries are another version's."""
        if options.recognised is not None:
            options.recognised()
        store = Store(path, read_only=True)
        try:
            store.require_tables()
            same = store.scalar(f"SELECT value FROM facts WHERE key = '{FINGERPRINT}'")
        except BaseException:
            store.close()
            raise
        if same == library.fingerprint() and options.since_ns is None and options.until_ns is None:
            return cls(store)
        store.close()
        folder = tempfile.TemporaryDirectory(prefix="pdtrace-")
        copy = Path(folder.name) / "trace.duckdb"
        shutil.copyfile(path, copy)
        trace = cls(Store(copy, scratch=True), folder)
        try:
            cut_to_window(trace.store, options)
        except BaseException:
            trace.close()
            raise
        return trace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store and remove the temporary file, if there is one."""
        with self._asking:
            self.store.close()
            if self._folder is not None:
                self._folder.cleanup()

    def requests(self) -> pl.DataFrame:
        """One row per request: windows, latencies in ms, tokens, workers, outcome."""
        with self._asking:
            return self.store.query("requests")

    def phases(self) -> pl.DataFrame:
        """The partition: request, phase, detail, start_ns, end_ns, worker, basis."""
        with self._asking:
            return self.store.query("phases")

    def diagnose(self, slo: str | Slo | SloPolicy | None = None) -> Diagnosis:
        """The whole diagnosis; `.to_dict()` gives the documented JSON.

        `slo`: limits as after --slo (`ttft=500ms,tpot=50ms`, or the path of a TOML file), or as objects.
        """
        from pdtrace.diagnose import diagnose

        with self._asking:
            return diagnose(self.store, policy(slo) if isinstance(slo, str) else slo)

    def slow(self, where: str | None = None, slo: str | SloPolicy | None = None) -> Answer:
        """What sets slow requests apart: those of a condition, those that miss limits, or the slowest tenth."""
        from pdtrace.slow import slow

        with self._asking:
            return slow(self.store, where, policy(slo) if isinstance(slo, str) else slo)

    def findings(self, slo: str | Slo | SloPolicy | None = None) -> pl.DataFrame:
        """One row per finding and deployment, in the order of the diagnosis, with the fields of the JSON."""
        import polars as pl

        rows = [
            {"deployment": deployment["name"], **finding}
            for deployment in self.diagnose(slo).to_dict()["deployments"]
            for finding in deployment["findings"]
        ]
        texts = pl.List(pl.String)
        return pl.DataFrame(
            rows,
            schema={
                "deployment": pl.String, "id": pl.String, "severity": pl.String, "cost_s": pl.Float64,
                "title": pl.String, "detail": pl.String, "level": pl.String, "value": pl.Float64,
                "unit": pl.String, "interval": pl.List(pl.Float64), "share": pl.Float64, "requests": pl.Int64,
                "workers": texts, "culprits": pl.List(pl.Struct({"request": pl.String, "value": pl.Float64})),
                "sources": texts, "assumptions": texts, "suggestions": texts,
            },
        )  # fmt: skip

    def sql(self, query: str) -> pl.DataFrame:
        """Rows of a SELECT over tables, views and findings.

        Raises UnknownQuery when DuckDB refuses it.
        """
        with self._asking:
            return self.store.user_sql(query)


def _size(inputs: list[Input]) -> int:
    """Bytes of the inputs on disk; compressed ones count as ten times their size."""
    return sum(
        (item.size or 0) * (10 if item.path.endswith((".gz", ".zst", ".xz", ".bz2")) else 1)
        for item in inputs
    )
