"""OTLP in the store: copies count once, whatever the order; attributes as they are stored."""

from __future__ import annotations

import hashlib
import json

import duckdb
import polars as pl
import pytest
from otlp_made import (
    ONE,
    SPAN,
    START,
    TRACE,
    attributes,
    framed,
    lines,
    read,
    request,
    span,
)

from pdtrace import spans as span_sql
from pdtrace.collectors import _otlp_json, otlp
from pdtrace.store import Store


def fill(files: dict[str, bytes], order: list[str]) -> tuple[Store, pl.DataFrame]:
    store = Store()
    numbers = {name: i for i, name in enumerate(sorted(files))}
    for name in order:
        frame = read(files[name]).store.arrow("SELECT * EXCLUDE (source) FROM spans")
        store.append("spans", frame.append_column("source", [[numbers[name]] * frame.num_rows]))
        store.append(
            "sources",
            [{"source": numbers[name], "sha256": hashlib.sha256(name.encode()).hexdigest()}],
        )
    return store, span_sql.deduplicate(store.connection)


def test_without_duplicates_nothing_is_removed() -> None:
    store, removed = fill({"a": lines(ONE)}, ["a"])
    assert removed.height == 0
    assert store.count("spans") == 2


@pytest.mark.parametrize("at_once", [1, 1_000_000])
def test_copies_count_once_and_the_winner_does_not_depend_on_the_order(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_sql, "_SPANS_AT_ONCE", at_once)
    poor = request(span(attributes=attributes({"a": 1, "gen_ai.prompt": "secret"})))
    rich = request(span(attributes=attributes({"a": 1, "b": 2})), span(spanId="02" * 8))
    files = {"poor": lines(poor), "rich": lines(rich), "copy": framed(rich)}
    kept = []
    for order in (["poor", "rich", "copy"], ["copy", "rich", "poor"]):
        store, removed = fill(files, order)
        assert store.count("spans") == 2
        assert removed["records"].sum() == 3
        assert removed["conflicts"].sum() == 1
        assert set(removed["reason"]) == {span_sql.IN_ANOTHER_SOURCE}
        kept.append(sorted(store.rows("SELECT source, record, span_id, int_keys FROM spans")))
    assert kept[0] == kept[1]
    assert {row[3] for row in kept[0]} == {"a\x1fb", None}


def test_duplicates_within_a_source_and_spans_without_ids() -> None:
    bare = {"name": "no ids", "startTimeUnixNano": "5"}
    store, removed = fill({"a": lines(request(span(), bare), request(span(), bare))}, ["a"])
    assert store.count("spans") == 3
    assert removed.rows() == [(0, span_sql.IN_THE_SOURCE, 1, 0, [2])]


def test_a_span_rebuilt_from_logs_gives_way_to_the_exported_one() -> None:
    store, _ = fill({"a": lines(request(span()))}, ["a"])
    store.append(
        "spans",
        [
            {"source": 1, "record": 7, "trace_id": TRACE, "span_id": SPAN, "start_ns": START - 400, "name": "llm_request", "resolution_ns": 1_000_000},
            {"source": 1, "record": 8, "trace_id": TRACE, "span_id": "09" * 8, "start_ns": START, "name": "only in the log", "resolution_ns": 1_000_000},
        ],
    )  # fmt: skip
    removed = span_sql.deduplicate(store.connection)
    assert removed.rows() == [(1, span_sql.LOG_COPY, 1, 0, [7])]
    assert store.count("spans") == 2


def test_packed_maps_are_stored_as_keys_and_values() -> None:
    store = Store()
    rows = [
        {
            "trace_id": "1",
            "span_id": "2",
            "attributes_string": {"a": "x"},
            "attributes_int": {"n": 5},
        },
        {"trace_id": "3", "span_id": "4"},
    ]
    store.append("spans", span_sql.packed(rows))
    assert store.rows(
        "SELECT string_keys, string_values, int_keys, int_values FROM spans ORDER BY trace_id"
    ) == [("a", ["x"], "n", [5]), (None, None, None, None)]
    kinds = {span_sql.keys_of(texts) for _, _, *texts in span_sql.kinds(store.connection)}
    assert kinds == {frozenset({"a", "n"}), frozenset()}


def test_keys_with_quotes_are_safe_in_sql() -> None:
    sql = span_sql.attribute_sql("it's", str)
    duckdb.sql(
        f"SELECT {sql} FROM (SELECT 'it''s' AS string_keys, ['x'] AS string_values, NULL::VARCHAR AS int_keys, NULL::BIGINT[] AS int_values, NULL::VARCHAR AS double_keys, NULL::DOUBLE[] AS double_values, NULL::VARCHAR AS bool_keys, NULL::BOOLEAN[] AS bool_values, NULL::VARCHAR AS other_keys, NULL::VARCHAR[] AS other_values)"
    ).fetchall()


def test_attributes_are_found_at_one_place_and_span_by_span_alike() -> None:
    store = Store()
    store.append(
        "spans",
        [
            {
                "span_id": "a",
                "string_keys": "one\x1ftwo\x1fthree",
                "string_values": ["1", "2", "3"],
            },
            {"span_id": "b", "string_keys": "one\x1fthree", "string_values": ["4", "5"]},
            {"span_id": "c", "string_keys": None, "int_keys": "one", "int_values": [6]},
            {"span_id": "d", "string_keys": "one", "string_values": ["7"]},
        ],
    )
    held = span_sql.keys_held([texts for _, _, *texts in span_sql.kinds(store.connection)])
    assert held == {
        "one": {"string": 1, "int": 1},
        "two": {"string": None},
        "three": {"string": None},
    }
    for key, expected in {
        "one": ["1", "4", "6", "7"],
        "two": ["2", None, None, None],
        "three": ["3", "5", None, None],
    }.items():
        for places in (held[key], None):
            sql = span_sql.attribute_sql(key, str, places)
            rows = store.sql(f"SELECT {sql} AS v FROM spans ORDER BY span_id")
            assert rows["v"].to_list() == expected, key


def test_spans_of_many_small_blocks_are_stored_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(
        json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [
            {"traceId": f"{n:032x}", "spanId": f"{n:016x}", "name": "x", "startTimeUnixNano": "1",
             **({"parentSpanId": "f" * 16} if n % 5 == 0 else {})}
        ]}]}]}) + "\n"
        for n in range(1, 101)
    ).encode()  # fmt: skip
    whole = read(lines).frame()
    monkeypatch.setattr(_otlp_json, "BLOCK_BYTES", 300)
    monkeypatch.setattr(otlp, "GATHERED_ROWS", 7)
    assert whole.height == 100
    assert read(lines).frame().equals(whole)
