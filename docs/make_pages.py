"""Writes docs/semconv.md and docs/sql.md from schemas/ and from what the collectors claim. Run by `make docs`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from pdtrace import library, registry
from pdtrace.library import Column, Query, Table

DOCS = Path(__file__).resolve().parent
_HEAD = """# Names of spans and attributes

Made by `make docs`; do not edit. The first part is what pdtrace's instrumentation emits
([registry](../schemas/semconv/pdtrace.yaml), readable by OpenTelemetry Weaver), the second what is read from each system.
`gen_ai.*`, `http.*`, `user.id` and `error.type` are OpenTelemetry's names (conventions 1.41).
"""


_SQL_HEAD = """# SQL: tables, views, findings

Made by `make docs` from the headers in `schemas/`; do not edit. `pdtrace query NAME PATH` prints the rows of any of these, `pdtrace query "SELECT ..."
PATH` of any statement over them. `pdtrace ingest PATH -o FILE.duckdb` keeps them in a file, where each carries these words as its comment.

Instants are BIGINT nanoseconds since the epoch (`_ns`), durations DOUBLE milliseconds (`_ms`) unless the name says otherwise. NULL is unknown, 0 is
zero. *With parameters* means a table macro: `FROM name(parameter := value)`, on the command line `--param NAME=VALUE`.
"""


def main() -> None:
    """Write the pages."""
    for name, text in (("semconv.md", page()), ("sql.md", sql_page())):
        (DOCS / name).write_text(text, "utf-8")


def sql_page() -> str:
    """Every table, view and finding with its columns, as Markdown."""
    queries = sorted(library.queries().values(), key=lambda query: query.name)
    parts = [_SQL_HEAD, "## Tables", *map(_sql_table, library.tables().values())]
    for title, kind in (("Findings", "findings"), ("Views", "views")):
        parts += [f"## {title}", *(_sql_query(query) for query in queries if query.kind == kind)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _sql_table(table: Table) -> str:
    key = f" Key: {', '.join(f'`{name}`' for name in table.key)}." if table.key else ""
    return f"### {table.name}\n\n{_sentence(table.text)}{key}\n\n{_columns(table.columns)}"


def _sql_query(query: Query) -> str:
    lines = [f"### {query.name}", f"{_sentence(query.title)} {_sentence(query.grain)}"]
    if query.params:
        lines.append("With parameters:")
        rows = ([f"`{p.name}`", f"`{p.default}`", _cell(p.text)] for p in query.params)
        lines.append(_table(("parameter", "default", "meaning"), rows))
    lines.append(f"From {', '.join(f'[{name}](#{name})' for name in query.needs)}.")
    lines.append(_columns(query.columns))
    return "\n\n".join(lines)


def _sentence(text: str) -> str:
    return _cell(text[:1].upper() + text[1:]).rstrip(".") + "."


def _columns(columns: Iterable[Column]) -> str:
    rows = ([f"`{c.name}`", f"`{c.type}`", _cell(c.text)] for c in columns)
    return _table(("column", "type", "meaning"), rows)


def _cell(text: str) -> str:
    """Text that neither ends a cell nor is taken for markup."""
    for sign in "|<*_":
        text = text.replace(sign, "\\" + sign)
    return text


def page() -> str:
    """The page of names as Markdown."""
    text = files("pdtrace.schemas").joinpath("semconv/pdtrace.yaml").read_text("utf-8")
    groups = yaml.safe_load(text)["groups"]
    known = {a["id"]: a for g in groups if g["type"] == "attribute_group" for a in g["attributes"]}
    spans = [_span(group, known) for group in groups if group["type"] == "span"]
    attributes = [_attributes(g) for g in groups if g["type"] == "attribute_group"]
    parts = [_HEAD, "## Spans", *spans, "## Attributes", *attributes, *_systems()]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _span(group: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    name = group["id"].removeprefix("span.")
    notes = " ".join(group[key] for key in ("brief", "note") if key in group)
    refs = ", ".join(f"`{a['ref']}`" for a in group["attributes"])
    return f"### {name}\n\n{group['span_kind'].upper()}. {notes}\n\n{refs}"


def _attributes(group: Mapping[str, Any]) -> str:
    rows = [
        [f"`{a['id']}`", _type(a["type"]), a["brief"], _example(a)] for a in group["attributes"]
    ]
    return f"{group['brief']}\n\n{_table(('attribute', 'type', 'meaning', 'example'), rows)}"


def _type(kind: Any) -> str:
    if isinstance(kind, str):
        return kind
    return " · ".join(f"`{member['value']}`" for member in kind["members"])


def _example(attribute: Mapping[str, Any]) -> str:
    return f"`{attribute['examples'][0]}`" if "examples" in attribute else ""


def _systems() -> Iterable[str]:
    yield "## What is read from each system"
    for name, module in sorted(registry.collectors().items()):
        claims = getattr(module, "CLAIMS", None)
        if claims is None:
            continue
        lines = [f"### {module.TITLE}", f"Collector `{name}`."]
        if claims.fallback:
            lines.append("Takes SERVER and CLIENT spans that no other collector claims.")
        for title, values in (
            ("Scopes", claims.scopes),
            ("Span names", claims.names),
            ("Names shared with other systems, told by their attributes", claims.shared_names),
            ("Attribute prefixes", claims.prefixes),
        ):
            if values:
                lines.append(
                    f"{title}: " + ", ".join(f"`{value}`" for value in sorted(values)) + "."
                )
        rows = [[f"`{key}`", kind.__name__] for key, kind in sorted(claims.attributes.items())]
        lines.append(_table(("attribute", "read as"), rows))
        yield "\n\n".join(lines)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    main()
