"""Fixtures: a store in memory, one collector run over one file, the full captures where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest
from hypothesis import settings
from recorded import Kept

import pdtrace
from pdtrace import library
from pdtrace.inputs import expand
from pdtrace.sink import Account, Reading, SourceSink
from pdtrace.store import Store

FIXTURES = Path(__file__).parent / "fixtures"
SHARED = Path(__file__).resolve().parents[2] / "shared"
CHROMIUM = Path("/usr/bin/chromium")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip


# The same cases in every run: who looks for new ones passes --hypothesis-profile=default.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden",
        action="store_true",
        help="write *.expected.json anew; read them before you commit",
    )
    parser.addoption(
        "--wheel",
        action="store_true",
        help="only what may differ between a checkout and a wheel (same_in_wheel in pyproject.toml)",
    )
    parser.addini("same_in_wheel", "names of files that --wheel leaves out", type="args")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is the same in a wheel, where only its differences are asked for."""
    names = config.getini("same_in_wheel") if config.getoption("wheel") else ()
    return collection_path.stem.removeprefix("test_") in names or None


@pytest.fixture
def shared() -> Path:
    """The folder of full captures; the test is skipped where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip("the full captures are not beside this checkout")
    return SHARED


@pytest.fixture
def store() -> Store:
    """A store in memory with its tables, views and findings."""
    store = Store()
    store.install()
    return store


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A running Chromium; the test is skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip("no Chromium here")
    with sync_api.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=str(CHROMIUM), args=list(QUIET))
        yield running
        running.close()


@pytest.fixture
def kept() -> Iterator[Kept]:
    """What instrumented code records meanwhile."""
    exporter = Kept()
    pdtrace.instrument(exporter=exporter)
    yield exporter
    pdtrace.uninstrument()


# What the partition sums up itself, for phases written by hand.
PHASE_SUMS = """
SELECT request, any_value(deployment) AS deployment, any_value(mode) AS mode, any_value(counted) AS counted,
       any_value(phase) AS phase, detail,
       CAST(sum(p.end_ns - p.start_ns) AS BIGINT) AS duration_ns,
       CAST(sum(CASE WHEN r.first_token_ns IS NOT NULL
                     THEN greatest(least(p.end_ns, r.first_token_ns) - p.start_ns, 0) END) AS BIGINT) AS ttft_part_ns,
       ['measured', 'reported', 'placed', 'inferred', 'upper_bound'][
         max(list_position(['measured', 'reported', 'placed', 'inferred', 'upper_bound'], basis))] AS basis,
       CAST(sum(CASE WHEN basis IN ('measured', 'reported') THEN 0 ELSE p.end_ns - p.start_ns END) AS BIGINT) AS placed_ns,
       CAST(sum(CASE WHEN basis = 'upper_bound' THEN p.end_ns - p.start_ns ELSE 0 END) AS BIGINT) AS bound_ns
FROM phases p LEFT JOIN request_values r USING (request)
GROUP BY request, detail
"""


@pytest.fixture(scope="session")
def phase_sums() -> str:
    """SQL for the rows of phase_sums from phases and requests."""
    return PHASE_SUMS


class CheckedStore(Store):
    """A store of hand-made rows that holds findings to their headers.

    Phases are summed up as the partition does it; no rows where the condition (`when:`) does not hold.
    """

    _summed = True

    def append(self, table: str, batch: object) -> int:
        self._summed = self._summed and table not in {"phases", "requests"}
        return super().append(table, batch)

    def prepare(self, statement: str) -> None:
        if not self._summed:
            self._summed = True
            self.replace("phase_sums", self.sql(PHASE_SUMS))
        super().prepare(statement)

    def query(self, name: str, **parameters: object) -> pl.DataFrame:
        rows = super().query(name, **parameters)
        when = library.queries()[name].when if name in library.queries() else ""
        assert not when or rows.is_empty() or self.scalar(f"SELECT {when}"), f"{name}: {when}"
        return rows


@pytest.fixture
def con() -> Store:
    """A store in memory with tables, views and findings."""
    store = CheckedStore()
    store.install()
    return store


class Collected:
    """What a collector gave: frames by table, and the account of the source."""

    def __init__(self, store: Store, account: Account) -> None:
        self.store = store
        self.account = account

    def __getitem__(self, table: str) -> pl.DataFrame:
        return self.store.sql(f"FROM {table}")


@pytest.fixture
def collect(store: Store) -> Callable[[ModuleType, Path | str], Collected]:
    """Run one collector's read() over a file."""

    def run(module: ModuleType, path: Path | str) -> Collected:
        item = expand([str(path)])[0]
        account = Account(item)
        sink = SourceSink(store, account)
        reading = Reading(item, lambda _: None)
        module.read(reading, sink)
        sink.close()
        account.sha256, account.size = reading.fingerprint()
        return Collected(store, account)

    return run
