"""Conditions of queries, piece by piece."""

from __future__ import annotations

import duckdb
import pytest

from pdtrace import library
from pdtrace._conditions import Conditions


def asked(*tables: str) -> tuple[Conditions, list[str]]:
    """Conditions over tables t and u, of which these have a row; and what is asked of them."""
    connection = duckdb.connect()
    statements: list[str] = []
    for name in ("t", "u"):
        connection.execute(f"CREATE TABLE {name} (kind VARCHAR, n INTEGER)")
    for name in tables:
        connection.execute(f"INSERT INTO {name} VALUES ('a OR (b', 1)")

    def rows(statement: str) -> list[tuple[object, ...]]:
        statements.append(statement)
        return connection.execute(statement).fetchall()

    return Conditions(rows), statements


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("EXISTS (FROM t)", True),
        ("EXISTS (FROM u)", False),
        ("EXISTS (FROM u) OR EXISTS (FROM t)", True),
        ("EXISTS (FROM t) AND EXISTS (FROM u)", False),
        ("EXISTS (FROM t) AND EXISTS (FROM u) OR EXISTS (FROM t)", True),
        ("EXISTS (FROM t WHERE kind IN ('x', 'a OR (b'))", True),
        ("EXISTS (FROM t WHERE kind = 'x' OR abs(n) > 1)", False),
        ("EXISTS (FROM t WHERE kind = 'x' OR abs(n) = 1)", True),
        ("NOT EXISTS (FROM u)", True),
        ("(SELECT min(n) <> max(n) FROM (SELECT n FROM t UNION ALL SELECT 2))", True),
        ("(SELECT min(n) <> max(n) FROM u)", False),  # unknown: there is nothing
        ("EXISTS (FROM u)\n OR   EXISTS (FROM t\n WHERE n = 1)", True),
    ],
)
def test_a_condition_is_what_sql_says_it_is(condition: str, holds: bool) -> None:
    conditions, _ = asked("t")
    assert conditions.hold(condition) is holds


def test_a_piece_is_asked_once_and_only_when_it_decides() -> None:
    conditions, statements = asked("t")
    assert conditions.hold("EXISTS (FROM t) OR EXISTS (FROM u)")
    assert conditions.hold("EXISTS (FROM t WHERE n = 1) AND EXISTS (FROM t)")
    assert not conditions.hold("EXISTS (FROM u) AND EXISTS (FROM t)")
    assert statements == [f"SELECT 1 FROM {rows} LIMIT 1" for rows in ("t", "t WHERE n = 1", "u")]


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        ("EXISTS (FROM t)", True),
        ("EXISTS (FROM u)", None),
        ("EXISTS (FROM u) OR EXISTS (FROM t)", True),
        ("EXISTS (FROM u) AND EXISTS (FROM t)", None),
        ("EXISTS (FROM u) AND EXISTS (FROM t WHERE n = 2)", False),
        ("EXISTS (FROM t WHERE n = 2) OR EXISTS (FROM u)", None),
    ],
)
def test_a_condition_is_told_where_what_is_known_decides(condition: str, told: bool | None) -> None:
    conditions, statements = asked("t", "u")
    assert conditions.hold("EXISTS (FROM t)")
    assert not conditions.hold("EXISTS (FROM t WHERE n = 2)")
    assert conditions.told(condition) is told
    assert not any("FROM u" in statement for statement in statements)
    if told is not None:
        assert conditions.hold(condition) is told
        assert not any("FROM u" in statement for statement in statements)


def test_every_piece_of_a_header_is_a_condition_by_itself() -> None:
    asked_of: list[str] = []
    conditions = Conditions(lambda statement: asked_of.append(statement) or [])  # type: ignore[func-returns-value]
    for query in library.queries().values():
        if query.when:
            conditions.hold(query.when)
    for statement in asked_of:
        assert len(duckdb.extract_statements(statement)) == 1
