"""A large table that another thread writes: its rows are there at once, who needs the table in DuckDB waits."""

from __future__ import annotations

from contextlib import closing
from threading import Event
from typing import TYPE_CHECKING, Any

import duckdb
import polars as pl
import pytest

from pdtrace import _aside, _tables, phases
from pdtrace._ahead import Task
from pdtrace.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REQUESTS = pl.DataFrame({"request": ["a", "b", "c"], "start_ns": [3, 1, 2]})


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Few rows are many, and none is written before this is set."""
    opened = Event()

    def insert(connection: duckdb.DuckDBPyConnection, place: str, rows: Any) -> None:
        if place == "requests":
            opened.wait()
        original(connection, place, rows)

    original = _tables.insert
    monkeypatch.setattr(_tables, "insert", insert)
    monkeypatch.setattr(_aside, "LEAST_ROWS", 1)
    yield opened
    opened.set()


def test_the_rows_stand_for_a_table_that_is_not_written_yet(gate: Event) -> None:
    store = Store()
    store.connection.execute("INSERT INTO requests (request) VALUES ('before')")
    store.fill("requests", REQUESTS)
    assert store.sql("SELECT request, mode FROM requests ORDER BY start_ns").rows() == [
        ("b", None), ("c", None), ("a", None),
    ]  # fmt: skip
    assert store.count("requests") == 3
    assert "requests" in store.filled()
    taken = store.take_filling("requests")
    assert taken is not None
    assert taken.equals(REQUESTS)
    assert store.take_filling("requests") is None
    gate.set()
    with closing(
        store.cursor()
    ) as cursor:  # another connection has no such name: it is made to wait
        assert cursor.execute("SELECT count(*) FROM requests").fetchall() == [(3,)]
    assert store.rows("SELECT rowid, request FROM requests ORDER BY rowid")[1][1] == "b"
    store.close()


def test_who_makes_tables_from_it_waits_and_the_first_piece_does_not(gate: Event) -> None:
    store = Store()
    store.fill("requests", REQUESTS)
    seen: list[object] = []

    def first(_: Store) -> None:
        seen.append(store.take_filling("requests"))
        gate.set()

    def second(mine: Store) -> None:
        seen.append(mine.connection.execute("SELECT count(*) FROM requests").fetchall())

    none: frozenset[str] = frozenset()
    store.make({"phases": Task(none, first), "changes": Task(frozenset({"requests"}), second)})
    assert isinstance(seen[0], pl.DataFrame)
    assert seen[1] == [(3,)]
    store.close()


def test_what_changes_the_table_comes_behind_its_rows(gate: Event) -> None:
    gate.set()
    store = Store()
    for change in (
        lambda: store.execute("DELETE FROM requests WHERE start_ns > 1"),
        lambda: store.replace("requests", REQUESTS[1:2]),
        lambda: store.fill("requests", REQUESTS[1:2]),
    ):
        store.fill("requests", REQUESTS)
        change()
        assert store.rows("SELECT request FROM requests") == [("b",)]
    store.close()


def test_in_a_file_who_names_the_table_waits_for_it(gate: Event, tmp_path: Path) -> None:
    gate.set()
    store = Store(tmp_path / "a.duckdb")
    store.fill("requests", REQUESTS)
    assert store.count("requests") == 3
    store.close()


def test_rows_that_cannot_be_written_are_an_error_for_who_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def insert(*_: object) -> None:
        raise duckdb.Error("disk full")

    monkeypatch.setattr(_aside, "LEAST_ROWS", 1)
    monkeypatch.setattr(_tables, "insert", insert)
    store = Store()
    store.fill("requests", REQUESTS)
    with pytest.raises(duckdb.Error, match="disk full"):
        store.make({"phases": Task(frozenset(), lambda _: None)})
    store.close()


def test_a_store_is_closed_whatever_became_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def insert(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(_tables, "insert", insert)
    monkeypatch.setattr(_aside, "LEAST_ROWS", 1)
    store = Store()
    store.fill("requests", REQUESTS)
    with pytest.raises(MemoryError, match="no room"):
        store.close()
    with pytest.raises(duckdb.ConnectionException):
        store.connection.execute("SELECT 1")


def test_the_partition_of_rows_is_that_of_their_table(gate: Event) -> None:
    """Windows that are not known, outcomes that are not, deployments without a name and without one that completed."""
    gate.set()
    requests = pl.DataFrame(
        {
            "request": [f"r{n}" for n in range(8)],
            "deployment": ["d", "d", "d", None, None, "e", "e", "d"],
            "start_ns": [0, 10, None, 30, 40, 50, 60, 70],
            "end_ns": [100, 110, 120, 130, 140, 150, None, 170],
            "first_token_ns": [50, None, 70, 80, 90, 100, 110, 120],
            "prefill_worker": ["p", "p", None, "q", None, None, "p", "p"],
            "decode_worker": ["w", None, "w", "q", None, "w", "w", "w"],
            "mode": ["disaggregated", "unknown", None, "aggregated", None, "unknown", None, None],
            "outcome": ["completed", None, "failed", "unknown", None, None, "aborted", "failed"],
        }
    )
    legs = [
        {"leg": f"{role}{n}", "request": f"r{n}", "observer": "engine", "role": role, "worker": role[0],
         "first_token_ns": 40 + 5 * n, "status": "failed" if n == 7 else "completed", "attempt": n % 2 or None,
         "container": n == 5 or None, "resolution_ns": 10**9 if n == 4 else None,
         "start_ns": 10 * n, "end_ns": 60 + 10 * n}
        for n in range(8) for role in ("prefill", "decode")
    ]  # fmt: skip
    intervals = [
        {"leg": leg["leg"], "detail": "prefill_exec" if leg["role"] == "prefill" else "prefill_queue",
         "decode_detail": "kv_wait_upper_bound", "start_ns": leg["start_ns"], "end_ns": leg["end_ns"],
         "basis": "measured"}
        for leg in legs
    ]  # fmt: skip
    found = []
    for beside in (True, False):
        with closing(Store()) as store:
            if beside:
                store.fill("requests", requests)
                store.append("legs", pl.DataFrame(legs))
            else:
                store.append("requests", requests)
                store.append("legs", legs)
                store.settle_aside("legs")
            store.append("intervals", intervals)
            phases.partition(store)
            found.append(
                [store.sql(f"FROM {table} ORDER BY ALL") for table in sorted(phases.MAKES)]
            )
    assert found[0][1]["request"].n_unique() == 6
    for one, other in zip(*found, strict=True):
        assert one.equals(other)
    counted = (
        found[0][sorted(phases.MAKES).index("phase_sums")].select("request", "counted").unique()
    )
    assert dict(counted.iter_rows()) == {
        "r0": True, "r1": False, "r3": True, "r4": True, "r5": True, "r7": False,
    }  # fmt: skip
