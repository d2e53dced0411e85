"""Reads schemas/: tables.sql into Table records, views/ and findings/ into Query records, in order of need."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from importlib.resources import files
from typing import Literal

from pdtrace.records import dataclass

_TABLE = re.compile(r"CREATE TABLE (\w+) \((.*?)^\);", re.DOTALL | re.MULTILINE)
_COLUMN = re.compile(r"^\s+(\w+)\s+(.+?),?\s+-- (.*)$")
_WIDE_GAP = re.compile(r"\s{2,}")
_SECTION = re.compile(r" (grain|needs|when|params|columns):\s*(.*)$")


@dataclass(frozen=True)
class Column:
    """A column: name, DuckDB type, unit ('' for none), description."""

    name: str
    type: str
    unit: str
    text: str


@dataclass(frozen=True)
class Table:
    """A table of tables.sql: what a row is, its natural key, the stage that fills it."""

    name: str
    text: str
    key: tuple[str, ...]
    stage: str
    columns: tuple[Column, ...]

    @property
    def ddl(self) -> str:
        """The CREATE TABLE statement."""
        inner = ", ".join(f"{c.name} {c.type}" for c in self.columns)
        return f"CREATE TABLE IF NOT EXISTS {self.name} ({inner})"


@dataclass(frozen=True)
class Parameter:
    """A parameter of a query with its default, as SQL."""

    name: str
    default: str
    text: str


@dataclass(frozen=True)
class Query:
    """A file of views/ or findings/: header and body."""

    name: str
    kind: Literal["views", "findings"]
    title: str
    grain: str
    needs: tuple[str, ...]
    params: tuple[Parameter, ...]
    described: tuple[str, ...]  # a line for each column
    body: str
    when: str = ""  # SQL condition without which there are no rows

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns; most runs want them of few queries."""
        return tuple(_column(line) for line in self.described)

    @property
    def ddl(self) -> str:
        """CREATE VIEW, or CREATE MACRO ... AS TABLE where the query has parameters."""
        if not self.params:
            return f"CREATE OR REPLACE VIEW {self.name} AS {self.body}"
        inner = ", ".join(f"{p.name} := {p.default}" for p in self.params)
        return f"CREATE OR REPLACE MACRO {self.name}({inner}) AS TABLE {self.body}"

    def called(self, parameters: Mapping[str, object]) -> str:
        """The body with values in place of the parameters: run once, it need not become a macro first."""
        if not self.params:
            return self.body
        values = {p.name: p.default for p in self.params}
        values |= {name: literal(value) for name, value in parameters.items()}
        # Not inside texts and comments, not the column x.name, not the name in `name := value` or `AS name`.
        names = "|".join(map(re.escape, values))
        place = rf"'(?:[^']|'')*'|--[^\n]*|AS (?:{names})\b|(?<![\w.])({names})\b(?!\s*:=)"
        return re.sub(place, lambda m: f"({values[m[1]]})" if m[1] else m[0], self.body)

    @property
    def empty(self) -> str:
        """The columns of a table that stands in where there are no rows."""
        return "(" + ", ".join(f'"{c.name}" {c.type}' for c in self.columns) + ")"


@cache
def tables() -> dict[str, Table]:
    """All tables by name, in the order of tables.sql."""
    text = (files("pdtrace.schemas") / "tables.sql").read_text("utf-8")
    return {table.name: table for table in map(_table, *_with_comments(text))}


# OTLP log records wait here for the collectors that know them; never written to a file.
_LOG_RECORDS = Table(
    "log_records",
    "OTLP log records between reading and interpretation",
    (),
    "staging",
    tuple(
        Column(name, type_, "", "")
        for name, type_ in (
            ("source", "INTEGER"), ("record", "BIGINT"), ("time_ns", "BIGINT"), ("severity", "VARCHAR"),
            ("body", "VARCHAR"), ("event_name", "VARCHAR"), ("trace_id", "VARCHAR"), ("span_id", "VARCHAR"),
            ("scope_name", "VARCHAR"), ("resource", "VARCHAR"), ("attributes", "VARCHAR"),
        )
    ),
)  # fmt: skip


def staging(name: str) -> Table:
    """A table by name, the staging table of log records among them."""
    return _LOG_RECORDS if name == _LOG_RECORDS.name else tables()[name]


def _with_comments(text: str) -> tuple[list[re.Match[str]], list[list[str]]]:
    """Each CREATE TABLE with the comment lines directly above it."""
    matches, comments = [], []
    for match in _TABLE.finditer(text):
        above: list[str] = []
        for line in reversed(text[: match.start()].splitlines()):
            if not line.startswith("--"):
                break
            above.insert(0, line.removeprefix("--").strip())
        matches.append(match)
        comments.append(above)
    return matches, comments


def _table(match: re.Match[str], above: list[str]) -> Table:
    fields = {"key": "", "stage": ""}
    words = []
    for line in above:
        name, _, value = line.partition(":")
        if name in fields:
            fields[name] = value.strip()
        else:
            words.append(line)
    columns = tuple(
        Column(m[1], m[2], _unit_of(m[1]), m[3])
        for m in map(_COLUMN.match, match[2].splitlines())
        if m
    )
    key = tuple(part.strip() for part in fields["key"].split(",") if part.strip())
    return Table(match[1], " ".join(words), key, fields["stage"], columns)


def _unit_of(name: str) -> str:
    """The unit that a name's suffix states."""
    for suffix, unit in (("_ns", "ns"), ("_us", "us"), ("_ms", "ms"), ("_s", "s"), ("_bytes", "bytes"),
                         ("_tokens", "tokens"), ("_ratio", "1")):  # fmt: skip
        if name.endswith(suffix):
            return unit
    return ""


@cache
def queries() -> dict[str, Query]:
    """All views and findings by name, each after what it needs."""
    found: dict[str, Query] = {}
    root = files("pdtrace.schemas")
    for kind in ("views", "findings"):
        for entry in sorted((root / kind).iterdir(), key=lambda e: e.name):
            if entry.name.endswith(".sql"):
                name = entry.name.removesuffix(".sql")
                found[name] = parse_query(name, kind, entry.read_text("utf-8"))
    return {name: found[name] for name in _in_order(found)}


@cache
def fingerprint() -> str:
    """A hash over all tables and queries: files that bear it need nothing made anew."""
    text = "\n".join([*(t.ddl for t in tables().values()), *(q.ddl for q in queries().values())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _in_order(found: dict[str, Query]) -> Iterable[str]:
    """Names in topological order of `needs`; a circle raises ValueError."""
    done: list[str] = []
    open_names: set[str] = set()

    def visit(name: str) -> None:
        if name in done or name not in found:
            return
        if name in open_names:
            raise ValueError(f"{name} needs itself")
        open_names.add(name)
        for need in found[name].needs:
            visit(need)
        open_names.discard(name)
        done.append(name)

    for name in found:
        visit(name)
    return done


def parse_query(name: str, kind: Literal["views", "findings"], text: str) -> Query:
    """Parse header and body of a query file; raises ValueError naming the file when the header is off."""
    lines = text.splitlines()
    count = next((i for i, line in enumerate(lines) if not line.startswith("--")), len(lines))
    header = [line.removeprefix("--").rstrip() for line in lines[:count]]
    if not header or not header[0].strip().startswith(f"{name}:"):
        raise ValueError(f"{kind}/{name}.sql: the first line must be '-- {name}: what it answers'")
    sections: dict[str, list[str]] = {}
    current = "title"
    sections[current] = [header[0].strip().removeprefix(f"{name}:").strip()]
    for line in header[1:]:
        word = _SECTION.match(line)
        if word:
            current = word[1]
            if current in sections:
                raise ValueError(f"{kind}/{name}.sql: the header says {current} twice")
            sections[current] = [word[2]] if word[2] else []
        elif line.strip():
            sections.setdefault(current, []).append(line.strip())
    return Query(
        name=name,
        kind=kind,
        title=" ".join(sections["title"]),
        grain=" ".join(sections.get("grain", [])),
        needs=tuple(_words(" ".join(sections.get("needs", [])))),
        params=tuple(_parameter(line) for line in sections.get("params", [])),
        described=tuple(line for line in sections.get("columns", []) if _WIDE_GAP.search(line)),
        body="\n".join(lines[count:]).strip().rstrip(";"),
        when=" ".join(sections.get("when", [])),
    )


@cache
def below(name: str) -> frozenset[str]:
    """Every query and table that this one reads, also through others; nothing for a table."""
    direct = queries()[name].needs if name in queries() else ()
    return frozenset(direct).union(*map(below, direct))


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word and word != "-"]


def _parameter(line: str) -> Parameter:
    parts = _WIDE_GAP.split(line.strip(), maxsplit=2)
    return Parameter(
        parts[0], parts[1] if len(parts) > 1 else "NULL", parts[2] if len(parts) > 2 else ""
    )


def _column(line: str) -> Column:
    parts = _WIDE_GAP.split(line.strip(), maxsplit=3)
    if len(parts) == 4:
        return Column(*parts)
    return Column(parts[0], parts[1], _unit_of(parts[0]), parts[2] if len(parts) > 2 else "")


def literal(value: object) -> str:
    """A Python value as a SQL literal."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, int | float):
        return repr(value)
    return "'" + str(value).replace("'", "''") + "'"
