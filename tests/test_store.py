"""The store takes what fits its tables and says clearly what does not."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from pdtrace import _batches, _tables
from pdtrace._aside import LEAST_ROWS, Aside
from pdtrace.errors import SchemaMismatch, UnknownQuery, UnreadableInput
from pdtrace.store import Store


def test_columns_that_a_batch_lacks_become_null(store: Store) -> None:
    store.append("events", pl.DataFrame({"kind": ["abort"], "time_ns": [5]}))
    assert store.sql("SELECT kind, time_ns, worker FROM events").rows() == [("abort", 5, None)]


def test_an_unknown_column_is_named(store: Store) -> None:
    with pytest.raises(SchemaMismatch, match="table events has no column colour"):
        store.append("events", pl.DataFrame({"colour": ["red"]}))


def test_a_wrong_type_is_named_with_both_types(store: Store) -> None:
    with pytest.raises(SchemaMismatch, match="column time_ns: expected BIGINT, found VARCHAR"):
        store.append("events", pl.DataFrame({"time_ns": ["noon"]}))


def test_rows_of_nothing_but_null_fit_any_type(store: Store) -> None:
    assert store.append("events", [{"kind": "oom", "time_ns": None, "detail": None}]) == 1


def test_a_file_is_made_so_that_duckdb_1_5_can_open_it(tmp_path: Path) -> None:
    path = tmp_path / "a.duckdb"
    store = Store(path)
    store.install()
    store.close()
    with path.open("rb") as stream:
        assert stream.read(12)[8:] == b"DUCK"
        # The storage version stands behind the magic bytes; DuckDB 1.5 reads 64 to 68.
        assert int.from_bytes(stream.read(8), "little") <= 68


def test_comments_travel_in_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.duckdb")
    store.install()
    comment = store.scalar(
        "SELECT comment FROM duckdb_columns() WHERE table_name = 'requests' AND column_name = 'ttft_ms'"
    )
    assert "headline" in comment
    store.close()


def test_a_file_that_is_no_store_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "a.duckdb"
    path.write_bytes(b"x" * 5000)
    with pytest.raises(UnreadableInput, match="cannot be opened"):
        Store(path, read_only=True)


def test_unknown_names_and_bad_sql_are_told(con: Store) -> None:
    with pytest.raises(UnknownQuery, match="no query named nonsense"):
        con.query("nonsense")
    with pytest.raises(UnknownQuery, match="SQL"):
        con.user_sql("SELECT nonsense FROM requests")


def many(first: int, rows: int = LEAST_ROWS) -> pl.DataFrame:
    """So many intervals that a store in memory keeps them aside."""
    return pl.DataFrame({"leg": [f"l{n}" for n in range(first, first + rows)], "end_ns": first})


def test_rows_kept_aside_are_read_as_rows_of_their_table(store: Store) -> None:
    store.append("intervals", [{"leg": "small", "start_ns": 1}])
    store.append("intervals", many(0))
    store.append("intervals", many(LEAST_ROWS))
    assert store.count("intervals") == 2 * LEAST_ROWS + 1
    assert store.rows("SELECT sum(start_ns), max(end_ns) FROM intervals") == [(1, LEAST_ROWS)]
    with store.cursor() as cursor:
        assert cursor.execute("SELECT count(*) FROM intervals").fetchall() == [
            (2 * LEAST_ROWS + 1,)
        ]
    assert store.user_sql("SELECT count(*) AS n FROM intervals")["n"][0] == 2 * LEAST_ROWS + 1


def test_rows_kept_aside_can_be_changed_and_removed(store: Store) -> None:
    store.append("intervals", many(0))
    assert store.count("intervals") == LEAST_ROWS
    store.execute("UPDATE intervals SET end_ns = 7 WHERE leg = 'l3'")
    store.append("intervals", many(LEAST_ROWS))
    assert store.rows("SELECT end_ns FROM intervals WHERE leg = 'l3'") == [(7,)]
    store.execute("DELETE FROM intervals WHERE end_ns = 0")
    assert store.count("intervals") == LEAST_ROWS + 1
    store.clear("intervals")
    assert store.count("intervals") == 0


def test_what_is_made_last_stays_beside_a_file_that_goes_with_its_process(tmp_path: Path) -> None:
    pieces = pl.DataFrame({"request": [f"r{n}" for n in range(LEAST_ROWS)], "end_ns": 1})
    store, lasting = (
        Store(tmp_path / "my own.duckdb", scratch=True),
        Store(tmp_path / "theirs.duckdb"),
    )
    for one in (store, lasting):
        one.append("phases", [{"request": "small", "end_ns": 2}])
        one.append("phases", pieces)
        one.append("intervals", many(0))
        assert one.rows("SELECT count(*), sum(end_ns) FROM phases") == [
            (LEAST_ROWS + 1, LEAST_ROWS + 2)
        ]
    assert store._aside.names() == {"phases"}
    assert not lasting._aside.names()
    with suppress(ZeroDivisionError), store.as_one():
        store.append("phases", pieces)
        store.append("phases", [{"request": "another"}])
        raise ZeroDivisionError
    assert store.count("phases") == LEAST_ROWS + 1
    with store.cursor() as cursor:
        assert cursor.execute("SELECT max(request) FROM phases").fetchall() == [("small",)]
    assert store.user_sql("SELECT count(*) AS n FROM phases")["n"][0] == LEAST_ROWS + 1
    assert not store._aside.names()
    for one in (store, lasting):
        one.close()


def test_what_an_undone_transaction_kept_aside_is_forgotten() -> None:
    rows = many(0).to_arrow()
    aside = Aside()
    aside.add("intervals", rows)
    aside.keep()
    aside.add("intervals", rows)
    aside.add("phases", rows)
    aside.undo()
    connection = Store().connection
    assert aside.names() == {"intervals"}
    assert len(aside.pop(connection, "intervals")) == 1


def test_a_condition_leaves_no_unfinished_result_behind() -> None:
    store = Store()
    rows = pl.DataFrame({"request": [str(n) for n in range(30_000)]})
    assert not store.holds("EXISTS (FROM phase_sums)")
    store.append("phase_sums", rows)
    assert store.holds("EXISTS (FROM phase_sums)")
    store.append("observations", rows)  # kept aside: shown when it is named
    assert store.holds("EXISTS (FROM observations)")


def some_legs(first: int = 0) -> pl.DataFrame:
    """So many legs that a store in memory keeps them aside."""
    return pl.DataFrame({"leg": [f"l{n}" for n in range(first, first + LEAST_ROWS)], "attempt": 1})


def test_rows_aside_and_in_the_table_are_handed_out_together(store: Store) -> None:
    assert store.kept_aside("legs") is None
    store.append("legs", [{"leg": "small", "status": "failed"}])
    assert store.kept_aside("legs") is None
    store.append("legs", some_legs())
    legs = store.kept_aside("legs")
    assert legs is not None
    assert legs.height == store.count("legs") == LEAST_ROWS + 1
    assert legs.filter(pl.col("leg") == "small").select("status", "attempt").rows() == [
        ("failed", None)
    ]
    store.keep_aside("legs", legs.with_columns(pl.lit("r").alias("request")))
    assert store.count("legs WHERE request = 'r'") == LEAST_ROWS + 1


def test_sql_sees_rows_aside_and_in_the_table_whichever_came_first(store: Store) -> None:
    store.execute("INSERT INTO legs BY NAME SELECT 'written' AS leg")
    for number in range(2):
        store.append("legs", some_legs(number * LEAST_ROWS))
        assert store.scalar("SELECT count(*) FROM legs") == LEAST_ROWS * (number + 1) + number + 1
        with closing(store.beside()) as twin:  # another thread's: its rows go into the table
            twin.append("legs", [{"leg": f"small {number}"}])
            assert twin.scalar("SELECT count(DISTINCT leg) FROM legs") == store.scalar(
                "SELECT count(*) FROM legs"
            )
    store.append("observations", pl.DataFrame({"request": ["r"] * LEAST_ROWS}))
    assert store.scalar("SELECT count(*) FROM observations") == LEAST_ROWS
    store.append("observations", [{"request": "late"}])
    assert store.scalar("SELECT count(*) FROM observations") == LEAST_ROWS + 1


def test_tables_that_may_have_rows_are_told_at_once(store: Store, tmp_path: Path) -> None:
    assert store.filled() == set()
    store.append("workers", [{"worker": "pid:1"}])
    store.append("legs", some_legs())
    assert store.filled() == {"workers", "legs"}
    with store.bulk_load():
        store.append("facts", [{"key": "a"}])
        assert "facts" in store.filled()
    assert store.filled() == {"workers", "legs", "facts"}
    with closing(Store(tmp_path / "a.duckdb")) as made:
        made.append("workers", [{"worker": "pid:1"}])
    with closing(Store(tmp_path / "a.duckdb")) as again:
        assert again.filled() == {"workers"}


def test_a_statement_settles_what_it_changes_not_what_it_reads(store: Store) -> None:
    store.append("legs", some_legs())
    store.execute("INSERT INTO workers BY NAME SELECT DISTINCT leg AS worker FROM legs")
    assert store.kept_aside("legs") is not None
    store.execute("DELETE FROM\n  legs WHERE leg = 'l0'")
    assert store.kept_aside("legs") is None
    assert store.count("legs") == LEAST_ROWS - 1


def test_blocks_that_are_written_leave_memory_while_a_file_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tables, "LET_GO_ROWS", 10**9)
    values = np.random.default_rng(1).random(130_000)
    rows = pl.DataFrame({"record": np.arange(130_000), "value": values})
    held = "SELECT sum(memory_usage_bytes) FROM duckdb_memory() WHERE tag = 'BASE_TABLE'"
    with closing(Store(tmp_path / "x.duckdb")) as store:
        with store.bulk_load():
            limit = store.scalar("SELECT current_setting('memory_limit')")
            for _ in range(5):  # DuckDB writes five row groups at a time
                store.append("samples", rows)
            before = store.scalar(held)
            monkeypatch.setattr(_tables, "LET_GO_ROWS", 1)
            store.append("samples", rows)
            assert store.scalar(held) < before
            assert store.scalar("SELECT current_setting('memory_limit')") == limit
        ((count, total),) = store.rows("SELECT count(*), sum(record) FROM samples")
        assert (count, total) == (6 * 130_000, 6 * sum(range(130_000)))


def test_plain_arrow_types_are_named_as_duckdb_names_them() -> None:
    plain = [*_batches._OF_ARROW, pa.list_(pa.string()), pa.large_list(pa.list_(pa.int32()))]
    empty = pa.table({f"c{n}": pa.array([], kind) for n, kind in enumerate(plain)})
    with duckdb.connect() as connection:
        told = connection.execute("DESCRIBE SELECT * FROM empty").fetchall()
    assert [_batches.duckdb_type(field.type) for field in empty.schema] == [r[1] for r in told]
    assert _batches.duckdb_type(pa.list_(pa.timestamp("ns"))) is None


def test_short_answers_are_those_of_sql_in_every_type() -> None:
    store = Store()
    query = """SELECT $n AS n, 1.5::DOUBLE AS d, 'x' AS t, NULL::VARCHAR AS missing, [1, NULL] AS l, {'a': 'b'} AS s,
               true AS b, sum(i) AS wide, 0.5 AS exact FROM range(3) r(i)"""
    assert store.short(query, n=7).equals(store.sql(query, n=7))
    assert store.short(query, n=7).schema == store.sql(query, n=7).schema
    store.close()


def test_steps_of_planning_for_many_rows_return_when_much_has_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_tables, "FEW_BYTES", 2_000)
    setting = "SELECT current_setting('disabled_optimizers')"
    store = Store()
    store.append("facts", [{"key": "a", "value": "b"}])
    assert "statistics_propagation" in store.scalar(setting)
    store.append("facts", [{"key": "a", "value": "b" * 3_000}])
    assert store.scalar(setting) == ""
    store.close()
    path = tmp_path / "run.duckdb"
    Store(path).close()
    again = Store(path, scratch=True)  # nobody knows how much it holds
    assert again.scalar(setting) == ""
    again.close()


@pytest.mark.parametrize("rows", [5, _tables.FEW_ROWS, _tables.ROW_GROUP])
def test_statements_keep_to_one_thread_where_rows_fill_no_row_group(rows: int) -> None:
    def threads(store: Store) -> int:
        return int(store.scalar("SELECT current_setting('threads')"))

    with closing(Store()) as store:
        store.install()
        usual = threads(store)
        store.append("requests", pl.DataFrame({"request": [str(n) for n in range(rows)]}))
        inside = 1 if rows == _tables.FEW_ROWS else usual
        with store.computed_once("counted_requests"):
            assert threads(store) == inside
        assert threads(store) == usual
        with pytest.raises(ZeroDivisionError), store.alone(rows):
            assert threads(store) == inside
            raise ZeroDivisionError
        assert threads(store) == usual


def test_a_view_named_in_a_text_or_comment_is_not_made() -> None:
    """A method that looks for a phase named as a finding would make it beside the thread that asks it."""
    with closing(Store()) as store:
        store.install()
        store.sql("SELECT 'kv_transfer' AS phase -- kv_transfer isn't a name here\n")
        assert made(store) == set()
        store.sql("""SELECT 'it''s' AS a -- isn't it\n, "phase" FROM phase_summary""")
        assert "phase_summary" in made(store)


def made(store: Store) -> set[str]:
    names = "SELECT view_name FROM duckdb_views() WHERE NOT internal"
    macros = "SELECT function_name FROM duckdb_functions() WHERE NOT internal"
    return {name for (name,) in store.connection.execute(f"{names} UNION {macros}").fetchall()}
