"""Queries by name or as SQL, and descriptions of the library for `schema` and `sources`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pdtrace import library, registry
from pdtrace.errors import BadOption, UnknownQuery

if TYPE_CHECKING:
    import polars as pl

    from pdtrace.store import Store

_NAME = re.compile(r"^\w+$")


def run(store: Store, text: str, parameters: Sequence[str] = (), limit: int = 0) -> pl.DataFrame:
    """Rows of a named query with NAME=VALUE parameters, or of one SELECT; one more than `limit` when given.

    Raises UnknownQuery. SQL that would write or read files is refused: the store is the only thing it sees.
    """
    values = dict(map(_parameter, parameters))
    text = text.strip().rstrip(";").rstrip()
    if _NAME.match(text):
        return store.query(text, **values)
    if values:
        raise BadOption("--param is for named queries", "write the values into the SQL")
    return store.user_sql(text, limit + 1 if limit else 0)


def _parameter(text: str) -> tuple[str, object]:
    name, separator, value = text.partition("=")
    if not separator:
        raise BadOption(f"--param: {text!r} is not understood", "write it like min_prefill_ms=80")
    try:
        return name.strip(), float(value)
    except ValueError:
        return name.strip(), value


def describe(name: str | None = None) -> list[dict[str, Any]]:
    """Tables, views and findings with their columns; only the named one when a name is given."""
    entries = [_table(t) for t in library.tables().values()] + [
        _query(q) for q in library.queries().values()
    ]
    if name is None:
        return entries
    chosen = [entry for entry in entries if entry["name"] == name]
    if not chosen:
        raise UnknownQuery(f"nothing is named {name}", "`pdtrace schema` lists all names")
    return chosen


def _columns(columns: Sequence[library.Column]) -> list[dict[str, str]]:
    return [{"name": c.name, "type": c.type, "unit": c.unit, "text": c.text} for c in columns]


def _table(table: library.Table) -> dict[str, Any]:
    return {
        "name": table.name, "kind": "table", "text": table.text, "key": list(table.key),
        "columns": _columns(table.columns),
    }  # fmt: skip


def _query(query: library.Query) -> dict[str, Any]:
    return {
        "name": query.name,
        "kind": "finding" if query.kind == "findings" else "view",
        "text": query.title,
        "grain": query.grain,
        "params": [{"name": p.name, "default": p.default, "text": p.text} for p in query.params],
        "columns": _columns(query.columns),
    }


def collector_list() -> list[dict[str, str]]:
    """The collectors: system, name, and the first sentence of what each reads."""
    rows = []
    for name, module in registry.collectors().items():
        first = (module.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        rows.append({"title": module.TITLE, "name": name, "reads": first})
    return sorted(rows, key=lambda row: (row["title"], row["name"]))
