"""Results as text for people (rich on terminals, plain when piped), Markdown and JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdtrace import _sparks, numbers
from pdtrace._grid import Column, grid
from pdtrace._page import Page
from pdtrace._paper import Plain, put
from pdtrace._stdout import console, print_json, write
from pdtrace.phrases import shorten_path

if TYPE_CHECKING:
    from rich.console import Console

    from pdtrace.blocks import Block
    from pdtrace.diagnosis import Diagnosis
    from pdtrace.options import Check
    from pdtrace.over_time import Series
    from pdtrace.slow import Answer

_SOURCE_COLUMNS = (
    Column("path"), Column("read as", wraps=True), Column("read", right=True), Column("kept", right=True),
    Column("skipped", right=True), Column("remark", wraps=True),
)  # fmt: skip


def chart_cells(style: str) -> int:
    """Into how many stretches charts of time are cut: by the width of the terminal; none for files and pipes."""
    out = console()
    if style != "text" or not out.is_terminal:
        return 0
    return _sparks.CELLS if out.width >= _sparks.WIDE else _sparks.FEW_CELLS


def show_diagnosis(diagnosis: Diagnosis, style: str, series: Series | None = None) -> None:
    """Print the whole diagnosis as text, Markdown or JSON; as text with charts over time, where given."""
    if style == "json":
        print_json(diagnosis.to_dict())
    elif style == "md":
        from pdtrace.markdown import diagnosis_markdown

        write(diagnosis_markdown(diagnosis))
    else:
        write_diagnosis(diagnosis, console(), series)


def write_diagnosis(
    diagnosis: Diagnosis, out: Console | Plain, series: Series | None = None
) -> None:
    """The whole diagnosis as text for people, on a console of the caller's choice."""
    Page(out, series).show(diagnosis)


def show_slow(answer: Answer, style: str) -> None:
    """Print what sets slow requests apart as text, Markdown or JSON."""
    from pdtrace import _slow_page

    if style == "json":
        print_json(answer.to_dict())
    elif style == "md":
        write(_slow_page.markdown(answer))
    else:
        _slow_page.write(answer, console())


def show_report(value: Mapping[str, Any], blocks: Sequence[Block], style: str) -> None:
    """Print a report as text or Markdown from its blocks, or as JSON from its value."""
    if style == "json":
        print_json(value)
    elif style == "md":
        from pdtrace.markdown import blocks_markdown

        write(blocks_markdown(blocks))
    else:
        Page(console()).show_blocks(blocks)


def show_checks(results: Sequence[tuple[Check, str, float | None, bool]]) -> None:
    """One line per check and deployment, on stderr: the result itself stays on stdout."""
    err = console(stderr=True)
    for check, name, value, holds in results:
        share = check.metric in {"failed", "attainment"}
        shown = numbers.share(value) if share else numbers.duration(value)
        verdict = "holds" if holds else "cannot be checked: unknown" if value is None else "FAILED"
        put(err, f"check {check.text}: {verdict} ({name}: {shown})")


def show_sources_summary(rows: Sequence[Mapping[str, Any]], output: str) -> None:
    """What an import took, in one line per source, on stdout."""
    out = console()
    grid(out, _SOURCE_COLUMNS, [
        [
            shorten_path(row["path"]), row["collector"] or numbers.UNKNOWN,
            *(numbers.count(row[key]) for key in ("rows_read", "rows_kept", "rows_skipped")), row["why"],
        ]
        for row in rows
    ])  # fmt: skip
    put(out, f"made {output}")


def show_made(output: str) -> None:
    """Say which file was made, on stdout."""
    put(console(), f"made {output}")


def show_made_too(output: str | None) -> None:
    """Say on stderr which file was made, if any: the result itself stands on stdout."""
    if output:
        put(console(stderr=True), f"made {output}")


def show_notes(lines: Sequence[str]) -> None:
    """Sentences, one below the other, on stdout."""
    out = console()
    for line in lines:
        put(out, line)


def show_address(address: str) -> None:
    """Where the live page is: the address on stdout, how to stop it on stderr."""
    note = "Ctrl-C stops the page"
    if "?token=" in address:
        note = "warning: whoever on the network has this address can read the run; " + note
    sys.stdout.write(address + "\n")
    sys.stdout.flush()  # a script that reads the address waits for it
    put(console(stderr=True), note, "dim")


def show_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Rows of texts under their names; the last ones may take several lines."""
    if rows:
        names = list(rows[0])
        heads = [Column(name, wraps=n > 0) for n, name in enumerate(names)]
        grid(console(), heads, [[row[name] for name in names] for row in rows])


def show_collectors(rows: Sequence[Mapping[str, str]], style: str) -> None:
    """The formats that can be read."""
    if style == "json":
        print_json(list(rows))
        return
    columns = (
        Column("system", wraps=True),
        Column("collector"),
        Column("what it reads", wraps=True),
    )
    grid(console(), columns, [[row[key] for key in ("title", "name", "reads")] for row in rows])


def show_scenarios(rows: Sequence[Mapping[str, str]], style: str) -> None:
    """The scenarios that can be simulated."""
    if style == "json":
        print_json(list(rows))
        return
    columns = (Column("scenario"), Column("kind"), Column("what it is", wraps=True))
    grid(console(), columns, [[row[key] for key in ("name", "kind", "title")] for row in rows])


def show_schema(entries: Sequence[Mapping[str, Any]], style: str) -> None:
    """Tables, views and findings with their columns."""
    if style == "json":
        print_json(list(entries))
        return
    out = console()
    if len(entries) > 1:
        columns = (Column("name"), Column("kind"), Column("what it holds", wraps=True))
        grid(out, columns, [[entry[key] for key in ("name", "kind", "text")] for entry in entries])
        return
    for entry in entries:
        put(out, f"{entry['name']} ({entry['kind']}): {entry['text']}", "bold")
        for name, value in (
            ("one row is", entry.get("grain")),
            ("key", ", ".join(entry.get("key", []))),
        ):
            if value:
                put(out, f"{name}: {value}")
        for parameter in entry.get("params", []):
            put(
                out,
                f"  parameter {parameter['name']} = {parameter['default']}: {parameter['text']}",
            )
        heads = (
            Column("column"),
            Column("type", wraps=True),
            Column("unit"),
            Column("what it is", wraps=True),
        )
        rows = [
            [column[key] for key in ("name", "type", "unit", "text")] for column in entry["columns"]
        ]
        grid(out, heads, rows)


def show_coverage(report: Mapping[str, Any], style: str) -> None:
    """What the dumps contain and what is missing."""
    if style == "json":
        print_json(report)
        return
    out = console()
    for deployment in report["deployments"]:
        put(
            out,
            f"{deployment['name']} (mode {deployment['mode']}, {numbers.plural(deployment['requests'], 'request')})",
            "bold",
        )
        columns = (Column("item", wraps=True), Column("present"), Column("from", wraps=True, optional=1),
                   Column("how to add it", wraps=True))  # fmt: skip
        grid(out, columns, [_coverage_row(item) for item in deployment["items"]])
        put(out)
    grid(out, _SOURCE_COLUMNS, [
        [
            shorten_path(row["path"]), row["collector"] or numbers.UNKNOWN,
            *(numbers.count(row[key]) if row["collector"] else "" for key in ("rows_read", "rows_kept", "rows_skipped")),
            "; ".join(
                part for part in (row["why"], ", ".join(f"{why}: {n:,}" for why, n in row["skipped_reasons"].items())) if part
            ),
        ]
        for row in report["sources"]
    ])  # fmt: skip


def _coverage_row(item: Mapping[str, Any]) -> list[str]:
    ratio = item["present_ratio"]
    there = bool(ratio) and ratio >= 0.995
    shown = "yes" if there else numbers.share(ratio) if ratio else "no"
    return [item["item"], shown, item["found_in"] or "", "" if there else item["switch"] or ""]


def show_explanation(explanation: Mapping[str, Any], style: str) -> None:
    """The story of one request."""
    if style == "json":
        print_json(explanation)
        return
    out = console()
    put(out, explanation["title"], "bold")
    for line in explanation["lines"]:
        put(out, line)
    for section in explanation["sections"]:
        put(out)
        put(out, section["title"], "bold")
        columns = [_explained(name) for name in section["columns"]]
        rows = [
            [
                shorten_path(str(cell), 36) if name == "source" else str(cell)
                for name, cell in zip(section["columns"], row, strict=True)
            ]
            for row in section["rows"]
        ]
        grid(out, columns, rows)
        if section.get("note"):
            put(out, section["note"], "dim")


_NUMBERS = {
    "from", "duration", "TTFT", "total", "per token", "start", "first token", "end", "joins", "value", "median gap",
    "longest gap", "after emission",
}  # fmt: skip
_WORDS = {"remark", "source", "what it computes", "what matched", "from … to", "id"}


def _explained(name: str) -> Column:
    """A column of `explain`: numbers right, words may wrap; the source is the first to go."""
    optional = {"source": 2, "remark": 1}.get(name, 0)
    return Column(name, right=name in _NUMBERS, wraps=name in _WORDS, optional=optional)
