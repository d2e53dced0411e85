"""What is loaded, and when: a command loads the rooms behind reading in another thread."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from pdtrace import registry
from pdtrace._meanwhile import loading


def loaded_by(code: str) -> set[str]:
    """The modules of a new interpreter after this code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def module(folder: Path, name: str, code: str) -> str:
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    return name


def wait() -> None:
    """Until the thread that loads has ended."""
    for thread in threading.enumerate():
        if thread.name == "pdtrace-loading":
            thread.join()


def test_reading_loads_nothing_of_what_follows_it() -> None:
    loaded = loaded_by("import pdtrace.api")
    assert "pdtrace.reading" in loaded
    assert not loaded & {"pdtrace.methods", "pdtrace.identity", "pdtrace.phases", "rich", "altair"}


def test_what_reads_a_table_or_a_vllm_log_is_loaded_only_for_such_a_file() -> None:
    loaded = loaded_by(
        "from pdtrace import _no_pandas, registry; _no_pandas.leave_out(); registry.collectors()"
    )
    assert {"pdtrace.collectors.table", "pdtrace.collectors.vllm_log"} <= loaded
    assert not [name for name in loaded if name.startswith("pdtrace.collectors._table")]
    assert not loaded & {"pdtrace.collectors._vllm_log_reader", "pyarrow.compute"}


def test_modules_are_loaded_in_another_thread_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = "__import__('threading').current_thread().name"
    code = f"THREAD = {thread}\ncalled = []\ndef call():\n    called.append({thread})"
    names = [module(tmp_path, f"pdtrace_test_{n}", code) for n in ("one", "two")]
    monkeypatch.syspath_prepend(str(tmp_path))
    with loading(names[0], f"{names[1]}:call") as begin:
        assert not {*names} & sys.modules.keys()
        begin()
        wait()
    assert [sys.modules[name].THREAD for name in names] == ["pdtrace-loading"] * 2
    assert [sys.modules[name].called for name in names] == [[], ["pdtrace-loading"]]


def test_a_module_that_cannot_be_loaded_fails_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = module(tmp_path, "pdtrace_test_broken", "raise ValueError('no')")
    behind = module(tmp_path, "pdtrace_test_behind", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    with loading(broken, behind) as begin:
        begin()
        wait()
    assert behind in sys.modules
    with pytest.raises(ValueError, match="no"):
        __import__(broken)


def test_functions_of_pyarrow_are_made_when_they_are_asked_for() -> None:
    answers = [
        "import pyarrow as pa, pyarrow.compute as pc",
        "texts = pa.array([1, None]).cast(pa.string())",
        "print(pc.and_(pc.equal(texts, '1'), pc.is_in(texts, value_set=pa.array(['1']))).to_pylist(), texts.fill_null('x'))",
        "print(pc.binary_join_element_wise('<', texts, '>', '', null_handling='skip'), pc.add(pc.field('a'), 1))",
        "print(pc.match_substring.__doc__, pc.utf8_zfill.__name__, pc.function_registry().get_function('add'))",
        "print(hasattr(pc, 'no_such_function'), pc.index(texts, '1'), pc.equal.__signature__)",
    ]
    ours = "from pdtrace import _no_pandas, _few_functions; _no_pandas.leave_out(); _few_functions.make_when_asked()"
    seldom = "print('hour' in vars(pc), file=sys.stderr)"
    few, whole = (
        subprocess.run(
            [sys.executable, "-c", "\n".join(["import sys", first, *answers, seldom])],
            check=True, capture_output=True, text=True,
        )
        for first in (ours, "pass")
    )  # fmt: skip
    assert few.stdout == whole.stdout
    assert (few.stderr.strip(), whole.stderr.strip()) == ("False", "True")


def test_a_collector_of_another_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(tmp_path, "stranger_collector", "TITLE = 'Stranger'\ndef sniff(head): return None\n")
    told = tmp_path / "stranger-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text("[other.group]\nx = y\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not list(registry._strangers())
    (told / "entry_points.txt").write_text("[pdtrace.collectors]\nstranger = stranger_collector\n")
    (point,) = registry._strangers()
    assert point.load().TITLE == "Stranger"
    told.rename(tmp_path / "moved")
    assert not list(registry._strangers())
    with zipfile.ZipFile(tmp_path / "stranger.zip", "w") as packed:
        for name in ("METADATA", "entry_points.txt"):
            packed.write(tmp_path / "moved" / name, f"stranger-1.0.dist-info/{name}")
    monkeypatch.syspath_prepend(str(tmp_path / "stranger.zip"))
    assert [point.value for point in registry._strangers()] == ["stranger_collector"]
