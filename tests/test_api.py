"""The Python door: `pdtrace.open` gives frames, and says in words what it cannot read."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import polars as pl
import pytest

import pdtrace
from pdtrace.api import Trace
from pdtrace.errors import PdtraceError, UnknownFormat, UnknownQuery, UnreadableInput


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "requests.csv"
    path.write_text("request,ttft_ms,total_ms\na,100,900\nb,120,800\nc,90,700\n", "utf-8")
    return path


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    path = tmp_path_factory.mktemp("opened") / "requests.csv"
    path.write_text("request,ttft_ms\na,100\nb,120\n", "utf-8")
    with pdtrace.open(path) as trace:
        yield trace


def test_a_trace_gives_frames_and_closes_itself(table: Path) -> None:
    with pdtrace.open(table) as trace:
        assert trace.requests()["ttft_ms"].sort().to_list() == [90, 100, 120]
        assert isinstance(trace.phases(), pl.DataFrame)
        assert "id" in trace.findings().columns
        assert trace.diagnose().to_dict()["deployments"][0]["requests"]["count"] == 3
        assert trace.sql("SELECT count(*) AS n FROM requests")["n"].to_list() == [3]


def test_threads_may_share_a_trace(table: Path) -> None:
    """Diagnoses, which hold views as tables meanwhile, beside queries; all begin at once."""
    with pdtrace.open(table) as trace, ThreadPoolExecutor(4) as pool:
        start = Barrier(4)

        def ask(n: int) -> list[object]:
            start.wait()
            return [
                trace.requests().height, trace.diagnose().to_dict()["deployments"][0]["requests"]["count"],
                trace.sql(f"SELECT {n} AS n")["n"].item(), trace.phases().height >= 0,
            ]  # fmt: skip

        assert list(pool.map(ask, range(4))) == [[3, 3, n, True] for n in range(4)]


def test_strings_and_paths_open_the_same(table: Path) -> None:
    with pdtrace.open(table) as one, pdtrace.open(str(table)) as other:
        assert one.requests().equals(other.requests())


@pytest.mark.parametrize(
    "query", ["SELECT nothing", "DROP TABLE requests", "SELECT 1; SELECT 2", ""]
)
def test_sql_that_is_not_one_select_is_refused_in_words(opened: Trace, query: str) -> None:
    with pytest.raises(UnknownQuery) as caught:
        opened.sql(query)
    assert caught.value.message


def test_what_cannot_be_read_is_one_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    with pytest.raises(UnreadableInput, match="absent") as missing:
        pdtrace.open(tmp_path / "absent")
    with pytest.raises(UnknownFormat, match="empty") as nothing:
        pdtrace.open(tmp_path / "empty.log")
    with pytest.raises(PdtraceError) as none:
        pdtrace.open()
    assert all(caught.value.hint for caught in (missing, nothing, none))
