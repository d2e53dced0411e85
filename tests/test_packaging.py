"""What is installed stays light to import, and the data files travel with it."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

HEAVY = ("duckdb", "polars", "altair", "pyarrow", "numpy")


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_pdtrace_loads_nothing_heavy() -> None:
    assert not loaded_after("import pdtrace").intersection(HEAVY)


def test_help_loads_nothing_heavy() -> None:
    code = "import pdtrace.cli; from click.testing import CliRunner; CliRunner().invoke(pdtrace.cli.cli, ['--help'])"
    assert not loaded_after(code).intersection(HEAVY)


def test_data_files_are_there() -> None:
    assert (files("pdtrace.schemas") / "tables.sql").is_file()
    assert (files("pdtrace.schemas") / "diagnosis.schema.json").is_file()
    assert (files("pdtrace") / "demo" / "ORIGIN.md").is_file()


def test_the_demo_dump_is_small() -> None:
    size = sum(len(entry.read_bytes()) for entry in (files("pdtrace") / "demo").iterdir())
    assert size <= 300_000
