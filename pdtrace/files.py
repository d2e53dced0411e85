"""Files that pdtrace makes when told to: a .duckdb from dumps, the demo dump, a simulated one."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, chdir, contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb

from pdtrace import library
from pdtrace._streams import words
from pdtrace.errors import BadOption, PdtraceError
from pdtrace.ingest import FINGERPRINT, Options, take
from pdtrace.inputs import DRAFT_PREFIX, Input, expand, shown
from pdtrace.store import Store, is_store


def make_store(
    paths: list[str], output: str, options: Options, *, force: bool = False
) -> list[dict[str, Any]]:
    """Read dumps into a new .duckdb file; it appears under its name only when it is whole.

    Raises PdtraceError when the file exists and force is not given. Returns the rows of `sources`.
    """
    target = Path(output)
    inputs = expand(paths)
    _check_target(target, inputs, force=force)
    folder = target.parent / f"{DRAFT_PREFIX}{uuid.uuid4().hex[:12]}"
    try:  # around the making of the folder too: a signal may come right behind it
        _make_folder(folder)
        draft = folder / "draft.duckdb"
        rows = _make(draft, inputs, options, output)
        draft.replace(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise PdtraceError(
            f"{shown(str(folder.parent))}: cannot be written: {words(error)}",
            "give -o a folder that you may write to",
        ) from error


def _check_target(target: Path, inputs: list[Input], *, force: bool) -> None:
    """Raise PdtraceError where the output would destroy something that pdtrace did not make."""
    name = shown(str(target))
    real = os.path.realpath(target)
    if any(os.path.realpath(item.path) == real for item in inputs) and not is_store(target):
        raise PdtraceError(f"{name}: is one of the inputs", "give the output another name")
    if name != str(target):
        raise PdtraceError(
            f"{name}: DuckDB opens no file whose path is not UTF-8", "give -o another name"
        )
    if target.is_dir():
        raise PdtraceError(f"{name}: is a folder", "give -o the name of a file, such as run.duckdb")
    if os.path.lexists(target) and not force:
        raise PdtraceError(f"{name}: exists already", "give another name, or --force to replace it")
    if target.exists() and target.stat().st_size and not is_store(target):
        raise PdtraceError(
            f"{name}: is no .duckdb file, so --force does not replace it", "give another name"
        )
    if not target.parent.is_dir():
        raise PdtraceError(f"{shown(str(target.parent))}: no such folder", "make it first")


def _make(draft: Path, inputs: list[Input], options: Options, output: str) -> list[dict[str, Any]]:
    store = Store(draft)
    try:
        _take(inputs, store, options, output)
        store.append("facts", [{"key": FINGERPRINT, "value": library.fingerprint()}])
        rows = store.sql(
            "SELECT * REPLACE (coalesce(why, '') AS why) FROM sources ORDER BY path"
        ).to_dicts()
        store.execute("CHECKPOINT")
    except duckdb.Error as error:
        if not isinstance(error, duckdb.IOException) and "No space left" not in str(error):
            raise
        raise PdtraceError(
            f"{shown(output)}: cannot be written: {words(error)}",
            "is the disk full? Nothing was left behind",
        ) from error
    finally:
        store.close()
    return rows


def _take(inputs: list[Input], store: Store, options: Options, output: str) -> None:
    """Read the inputs; a draft that cannot be written is told by the name that the user gave."""
    try:
        take(inputs, store, options)
    except PdtraceError as error:
        if not error.message.startswith(f"{store.path}: "):
            raise
        message = error.message.removeprefix(f"{store.path}: ")
        raise PdtraceError(
            f"{shown(output)}: {message}",
            "is the disk full? Nothing was left behind",
        ) from error


def any_demo(
    scenario: str | None, shape: str | None, seed: int | None, output: str | None = None
) -> AbstractContextManager[str]:
    """The folder of a simulated run when a scenario is named, else that of the real one.

    Raises BadOption when a shape or seed is given for the real one.
    """
    if scenario is not None:
        return scenario_folder(scenario, shape or "vllm", seed or 0, output)
    if shape is not None or seed is not None:
        raise BadOption(
            "--shape and --seed are about simulated runs",
            "add --scenario NAME; `pdtrace demo --list` names them",
        )
    return demo_folder(output)


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
        shutil.copytree(folder, _empty(output), dirs_exist_ok=True)
        yield output


@contextmanager
def scenario_folder(name: str, shape: str, seed: int, output: str | None = None) -> Iterator[str]:
    """A folder with the dumps of a simulated run: `output`, else one that is removed afterwards."""
    from pdtrace.simulator import simulate, write

    run = simulate(name, seed)
    if output is not None:
        write(run, _empty(output), shape)
        yield output
        return
    with TemporaryDirectory() as above:
        write(run, Path(above) / name, shape)
        with chdir(above):
            yield name


def scenario_list() -> list[dict[str, str]]:
    """The scenarios that can be simulated: name, kind, what it is."""
    from pdtrace.simulator import SCENARIOS

    return [{"name": s.name, "kind": s.kind, "title": s.title} for s in SCENARIOS.values()]


def _empty(output: str) -> Path:
    target = Path(output)
    if target.exists() and any(target.iterdir()):
        raise PdtraceError(f"{output}: exists and is not empty", "give another folder")
    return target
