"""What is installed stays light to import, and the data files travel with it."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

HEAVY = ("duckdb", "polars", "altair", "pyarrow", "numpy", "opentelemetry", "google.protobuf")
ROOT = Path(__file__).resolve().parents[1]


def loaded_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture
def project() -> dict[str, Any]:
    """pyproject.toml of the checkout."""
    if not (ROOT / "pdtrace").is_dir():
        pytest.skip("the tests run away from the checkout")
    with (ROOT / "pyproject.toml").open("rb") as stream:
        return tomllib.load(stream)


def test_import_pdtrace_loads_nothing_heavy() -> None:
    assert not loaded_after("import pdtrace").intersection(HEAVY)


def test_help_loads_nothing_heavy() -> None:
    code = "import pdtrace.cli; from click.testing import CliRunner; CliRunner().invoke(pdtrace.cli.cli, ['--help'])"
    assert not loaded_after(code).intersection(HEAVY)


def test_reading_loads_neither_pictures_nor_instrumentation(tmp_path: Path) -> None:
    table = tmp_path / "requests.csv"
    table.write_text("request,ttft_ms,total_ms\na,100,900\nb,120,800\n", "utf-8")
    loaded = loaded_after(f"import pdtrace; pdtrace.open({str(table)!r}).diagnose()")
    assert "duckdb" in loaded
    assert not loaded.intersection({"altair", "opentelemetry.sdk"})


def test_data_files_are_there() -> None:
    assert (files("pdtrace.schemas") / "tables.sql").is_file()
    assert (files("pdtrace.schemas") / "diagnosis.schema.json").is_file()
    assert (files("pdtrace") / "demo" / "ORIGIN.md").is_file()
    assert (files("pdtrace") / "py.typed").is_file()


def test_the_demo_dump_is_small() -> None:
    size = sum(
        len(entry.read_bytes())
        for entry in (files("pdtrace") / "demo").iterdir()
        if entry.is_file()
    )
    assert size <= 300_000


def test_the_version_is_one() -> None:
    import pdtrace

    assert importlib.metadata.version("pdtrace") == pdtrace.__version__


def test_every_folder_with_code_or_sql_is_packed(project: dict[str, Any]) -> None:
    setup = project["tool"]["setuptools"]
    home = {name: ROOT / folder for name, folder in setup["package-dir"].items()}
    packed = set()
    for name in setup["packages"]:
        root = max((r for r in home if name == r or name.startswith(f"{r}.")), key=len)
        packed.add(home[root].joinpath(*name.removeprefix(root).strip(".").split(".")))
    found = {
        path.parent
        for folder in home.values()
        for path in folder.rglob("*")
        if path.suffix in {".py", ".sql", ".json", ".yaml"} and "__pycache__" not in path.parts
    }
    assert found <= packed


def test_every_dependency_has_a_lower_bound_no_upper_one_and_its_reason() -> None:
    if not (ROOT / "pdtrace").is_dir():
        pytest.skip("the tests run away from the checkout")
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    for line in block[1].splitlines():
        assert re.fullmatch(r'  "[a-z-]+>=[\d.]+(; [^"]+)?", +# \S.+', line), line


def test_linear_algebra_of_a_command_has_one_thread_and_processes_it_starts_are_not_told() -> None:
    program = (
        "import os, sys; os.environ.pop('OPENBLAS_NUM_THREADS', None)\n"
        "from pdtrace import _own_process; _own_process.prepare(); import numpy\n"
        "with open('/proc/self/status') as told: text = told.read()\n"
        "sys.exit('Threads:\t1\\n' not in text or 'OPENBLAS_NUM_THREADS' in os.environ)"
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("threads are counted where Linux tells them")
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_files_that_the_wheel_leaves_out_exist(request: pytest.FixtureRequest) -> None:
    names = request.config.getini("same_in_wheel")
    assert names
    assert not [n for n in names if not Path(__file__).with_name(f"test_{n}.py").is_file()]


def test_a_command_does_not_import_pandas() -> None:
    pytest.importorskip("pandas")
    program = (
        "import sys; from pdtrace import _no_pandas; _no_pandas.leave_out()\n"
        "import numpy as np, pyarrow as pa\n"
        "pa.array([1]), pa.array([[1], []]), pa.array(np.arange(2)).to_numpy(), pa.scalar(1)\n"
        "sys.exit('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
