"""Writes docs/semconv.md from schemas/semconv and from what the collectors claim. Run by `make docs`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from pdtrace import registry

PAGE = Path(__file__).resolve().parent / "semconv.md"
_HEAD = """# Names of spans and attributes

Made by `make docs`; do not edit. The first part is what pdtrace's instrumentation emits
([registry](../schemas/semconv/pdtrace.yaml), readable by OpenTelemetry Weaver), the second what is read from each system.
`gen_ai.*`, `http.*`, `user.id` and `error.type` are OpenTelemetry's names (conventions 1.41).
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), "utf-8")


def page() -> str:
    """The whole page as Markdown."""
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
