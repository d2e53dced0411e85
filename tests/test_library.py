"""The SQL files keep the promises of their headers."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import pytest

from pdtrace import library
from pdtrace.store import Store

QUERIES = sorted(library.queries())
ENGINES = re.compile(
    r"\b(vllm|sglang|dynamo|tensorrt|trt-llm|llm-d|mooncake|lmcache|nixl|aiperf)\b", re.IGNORECASE
)
SUFFIX_TYPES = {
    "_ns": "BIGINT",
    "_ms": "DOUBLE",
    "_ratio": "DOUBLE",
    "_tokens": "BIGINT",
    "_bytes": "BIGINT",
}


@pytest.mark.parametrize("name", QUERIES)
def test_every_query_has_a_title_a_grain_and_described_columns(name: str) -> None:
    query = library.queries()[name]
    assert query.title
    assert query.grain
    assert query.columns
    assert all(column.text for column in query.columns), [
        c.name for c in query.columns if not c.text
    ]
    assert all(parameter.text for parameter in query.params)


@pytest.mark.parametrize("name", QUERIES)
def test_header_columns_are_the_columns_of_the_query(name: str, con: Store) -> None:
    query = library.queries()[name]
    call = f"{name}()" if query.params else name
    found = [(row[0], row[1]) for row in con.rows(f"DESCRIBE FROM {call}")]
    assert [(c.name, c.type) for c in query.columns] == found


@pytest.mark.parametrize("name", QUERIES)
def test_needs_are_the_tables_and_macros_that_the_body_reads(name: str, con: Store) -> None:
    query = library.queries()[name]
    tree = json.loads(con.rows("SELECT json_serialize_sql(?)", [query.body])[0][0])
    assert not tree["error"], tree
    read: set[str] = set()
    ctes: set[str] = set()

    def walk(node: object) -> None:
        if isinstance(node, dict):
            if node.get("type") == "BASE_TABLE":
                read.add(node["table_name"])
            if node.get("type") == "TABLE_FUNCTION":
                read.add(node["function"]["function_name"])
            for entry in (node.get("cte_map") or {}).get("map", []):
                ctes.add(entry["key"])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(tree)
    known = set(library.tables()) | set(QUERIES)
    assert set(query.needs) == (read - ctes) & known


@pytest.mark.parametrize("name", QUERIES)
def test_body_is_one_select(name: str) -> None:
    body = library.queries()[name].body
    assert ";" not in re.sub(r"'[^']*'|--[^\n]*", "", body)
    assert re.match(r"(WITH|SELECT|FROM)\b", re.sub(r"^(\s*--[^\n]*\n)+", "", body).strip())


@pytest.mark.parametrize("name", QUERIES)
def test_findings_begin_with_the_standard_columns(name: str) -> None:
    query = library.queries()[name]
    if query.kind == "findings":
        standard = ("deployment", "severity", "cost_s", "level", "value", "unit", "interval_low",
                    "interval_high", "share", "requests", "workers", "culprits", "sources")  # fmt: skip
        assert tuple(c.name for c in query.columns[: len(standard)]) == standard


def test_suffixes_of_table_columns_fit_their_types() -> None:
    for table in library.tables().values():
        for column in table.columns:
            for suffix, kind in SUFFIX_TYPES.items():
                if column.name.endswith(suffix):
                    assert column.type.removesuffix("[]") in {kind, "INTEGER"}, (
                        f"{table.name}.{column.name}"
                    )


def test_every_table_and_column_is_described() -> None:
    assert len(library.tables()) > 20
    for table in library.tables().values():
        assert table.text, table.name
        assert all(column.text for column in table.columns), table.name


def test_no_engine_is_named_in_the_schemas() -> None:
    root = files("pdtrace.schemas")
    for folder in (root, root / "views", root / "findings"):
        for entry in folder.iterdir():
            if entry.name.endswith(".sql"):
                assert not ENGINES.search(entry.read_text("utf-8")), entry.name


def test_a_header_without_its_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"views/x\.sql"):
        library.parse_query("x", "views", "-- y: something\nSELECT 1")


def test_a_header_that_says_a_thing_twice_is_refused() -> None:
    text = "-- x: something\n-- grain: one row\n-- when: a\n-- when: b\nSELECT 1"
    with pytest.raises(ValueError, match=r"views/x\.sql: the header says when twice"):
        library.parse_query("x", "views", text)


def test_parameters_become_macro_defaults() -> None:
    text = "-- x: title\n--\n-- grain: one row\n-- params:\n--   least_ms  50  no less\n-- columns:\n--   a  INTEGER  a number\nSELECT 1 AS a"
    query = library.parse_query("x", "views", text)
    assert query.ddl == "CREATE OR REPLACE MACRO x(least_ms := 50) AS TABLE SELECT 1 AS a"


@pytest.mark.parametrize("name", [name for name in QUERIES if library.queries()[name].when])
def test_a_condition_reads_tables_only_and_is_one_value(name: str, con: Store) -> None:
    condition = library.queries()[name].when
    words = set(re.findall(r"\w+", re.sub(r"'[^']*'", "", condition)))
    assert not words & set(QUERIES)
    assert con.holds(condition) is False


@pytest.mark.parametrize(
    "name", [q.name for q in library.queries().values() if q.when and not q.params]
)
def test_without_rows_a_table_of_the_same_columns_stands_in(name: str, con: Store) -> None:
    columns = [(c.name, c.type) for c in library.queries()[name].columns]
    with con.computed_once(name):
        found = [(row[0], row[1]) for row in con.rows(f"DESCRIBE FROM {name}")]
        assert con.count(name) == 0
    assert found == columns
    assert con.rows(f"DESCRIBE FROM {name}")  # the view again


@pytest.mark.parametrize("name", [name for name in QUERIES if library.queries()[name].params])
def test_a_call_puts_values_where_the_parameters_stand_and_nowhere_else(
    name: str, con: Store
) -> None:
    query = library.queries()[name]
    names = [p.name for p in query.params]
    texts = {name: f"value {n}" for n, name in enumerate(names)}

    def tree(sql: str) -> Any:
        read = json.loads(con.rows("SELECT json_serialize_sql(?)", [sql])[0][0])
        assert not read["error"], read
        return read["statements"]

    values = {
        name: tree(f"SELECT ('{text}')")[0]["node"]["select_list"][0]
        for name, text in texts.items()
    }

    def put(node: Any) -> Any:
        if isinstance(node, list):
            return [put(value) for value in node]
        if not isinstance(node, dict):
            return node
        column = node["column_names"] if node.get("class") == "COLUMN_REF" else []
        if len(column) == 1 and column[0] in values:
            return plain(values[column[0]] | {"alias": node["alias"]})
        return plain({key: put(value) for key, value in node.items()})

    def plain(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: plain(v) for key, v in node.items() if "location" not in key}
        return [plain(value) for value in node] if isinstance(node, list) else node

    assert plain(tree(query.called(texts))) == put(tree(query.body))
    assert query.called({}).count("(NULL)") >= sum(p.default == "NULL" for p in query.params)
