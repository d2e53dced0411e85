"""The condition of `slow --where`: one SQL condition over the columns of a request, nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pdtrace import library
from pdtrace.errors import BadOption, printable

if TYPE_CHECKING:
    import polars as pl

    from pdtrace.store import Store

REQUESTS = "request_attributes"
_EXAMPLE = 'write it like "ttft_ms > 2000" or "model = \'llama\' AND prompt_tokens > 8000"'
_NOT_ALLOWED = {"SUBQUERY": "a query of its own", "WINDOW": "a window", "STAR": "*"}


def columns() -> tuple[str, ...]:
    """The columns that a condition may name."""
    return tuple(c.name for c in library.queries()[REQUESTS].columns)


def named(store: Store, text: str) -> frozenset[str]:
    """The columns that the condition names; raises BadOption unless it is one condition over known columns."""
    if printable(text) != text:
        raise BadOption(f"--where: {text!r} holds signs that are no text", _EXAMPLE)
    (row,) = store.rows("SELECT json_serialize_sql(?)", [f"SELECT ({text}\n)"])
    tree = json.loads(row[0])
    if tree["error"]:
        problem = str(tree.get("error_message", "")).partition("\n")[0]
        raise BadOption(f"--where: {text!r} is not SQL: {problem}", _EXAMPLE)
    if not _is_one(tree["statements"]):
        raise BadOption(f"--where: {text!r} is more than one condition", _EXAMPLE)
    names: set[str] = set()
    _walk(tree["statements"][0]["node"]["select_list"][0], names, text)
    known = {name.lower(): name for name in columns()}
    if unknown := sorted(name for name in names if name.lower() not in known):
        raise BadOption(
            f"--where: a request has no column {unknown[0]}",
            f"its columns: {', '.join(columns())}; texts stand in single quotes",
        )
    if not names:
        raise BadOption(f"--where: {text!r} names no column of a request", _EXAMPLE)
    return frozenset(known[name.lower()] for name in names)


def _is_one(statements: list[Any]) -> bool:
    node = statements[0]["node"] if len(statements) == 1 else {}
    return (
        node.get("type") == "SELECT_NODE"
        and len(node["select_list"]) == 1
        and node["from_table"]["type"] == "EMPTY"
        and not node["modifiers"]
        and not any(node[key] for key in ("where_clause", "group_expressions", "having", "qualify", "sample"))
        and not node["cte_map"]["map"]
    )  # fmt: skip


def _walk(node: Any, names: set[str], text: str) -> None:
    if isinstance(node, list):
        for item in node:
            _walk(item, names, text)
        return
    if not isinstance(node, dict):
        return
    if node.get("class") in _NOT_ALLOWED:
        raise BadOption(f"--where: {text!r} has {_NOT_ALLOWED[node['class']]} in it", _EXAMPLE)
    if node.get("class") == "COLUMN_REF":
        names.add(node["column_names"][-1])
    for value in node.values():
        _walk(value, names, text)


def chosen(store: Store, text: str, wanted: str) -> pl.DataFrame:
    """These columns of every request, and `selected`: whether the condition holds, NULL where it cannot be told."""
    rows = store.user_sql(f"SELECT {wanted}, ({text}\n) AS selected FROM {REQUESTS}")
    if str(rows.schema["selected"]) not in ("Boolean", "Null"):
        raise BadOption(f"--where: {text!r} is a value, no condition", _EXAMPLE)
    return rows
