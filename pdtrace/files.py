"""Files that pdtrace makes when told to: a .duckdb from dumps, a copy of the demo dump."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from pdtrace.errors import PdtraceError
from pdtrace.ingest import Options, ingest
from pdtrace.store import Store


def make_store(
    paths: list[str], output: str, options: Options, *, force: bool = False
) -> list[dict[str, Any]]:
    """Read dumps into a new .duckdb file; it appears under its name only when it is whole.

    Raises PdtraceError when the file exists and force is not given. Returns the rows of `sources`.
    """
    target = Path(output)
    if target.exists() and not force:
        raise PdtraceError(
            f"{output}: exists already", "give another name, or --force to replace it"
        )
    if not target.parent.is_dir():
        raise PdtraceError(f"{target.parent}: no such folder", "make it first")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pdtrace-") as folder:
        draft = Path(folder) / "draft.duckdb"
        store = Store(draft)
        try:
            ingest(paths, store, options)
            rows = store.sql(
                "SELECT * REPLACE (coalesce(why, '') AS why) FROM sources ORDER BY path"
            ).to_dicts()
            store.execute("CHECKPOINT")
        finally:
            store.close()
        draft.replace(target)
    return rows


@contextmanager
def demo_folder(output: str | None = None) -> Iterator[str]:
    """The folder of the demo dump; copied to `output` when given.

    Else the working folder is the one above it meanwhile, so that the report names its files shortly.
    """
    with as_file(files("pdtrace") / "demo") as folder:
        if output is None:
            with chdir(folder.parent):
                yield folder.name
            return
        target = Path(output)
        if target.exists() and any(target.iterdir()):
            raise PdtraceError(f"{output}: exists and is not empty", "give another folder")
        shutil.copytree(folder, target, dirs_exist_ok=True)
        yield str(target)
