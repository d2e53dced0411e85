"""Results as text for people (rich on terminals, plain when piped), Markdown, JSON and CSV."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import orjson
from rich.cells import cell_len

from pdtrace import _sparks, numbers
from pdtrace._grid import Column, grid, shortened
from pdtrace._page import Page
from pdtrace._paper import Plain, encodable, put
from pdtrace.errors import printable
from pdtrace.phrases import shorten_path

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Console

    from pdtrace.blocks import Block
    from pdtrace.diagnosis import Diagnosis
    from pdtrace.options import Check
    from pdtrace.over_time import Series
    from pdtrace.reading import Progress
    from pdtrace.slow import Answer

# By these rich takes a pipe for a terminal.
_AS_TERMINAL = {"FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
PLAIN_WIDTH = 110  # when the output is no terminal
UPRIGHT = 3  # so many rows are shown upright when they are too wide
_SOURCE_COLUMNS = (
    Column("path"), Column("read as", wraps=True), Column("read", right=True), Column("kept", right=True),
    Column("skipped", right=True), Column("remark", wraps=True),
)  # fmt: skip
CELL_CELLS = 16  # a cell of `query` narrower than its content and than this is hard to read
ROOMY_CELLS = 60  # and so wide where all columns fit with it


def console(*, stderr: bool = False) -> Console | Plain:
    """What text is printed on; it knows whether it may use colour (terminal, NO_COLOR, FORCE_COLOR) and how wide it is."""
    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isdigit() and int(columns) else PLAIN_WIDTH
    tty = stream.isatty()
    if not tty and not _AS_TERMINAL & os.environ.keys():
        return Plain(stream, asked)
    from pdtrace._console import SafeConsole

    return SafeConsole(file=stream, width=None if tty else asked, highlight=False, emoji=False)


def write(text: str) -> None:
    """Text on stdout as it is, in whatever encoding stdout has."""
    sys.stdout.write(encodable(text, sys.stdout.encoding or "utf-8"))


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on stderr while files are read."""
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from pdtrace._console import SafeConsole

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
        console=SafeConsole(file=sys.stderr, highlight=False, emoji=False), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("reading", total=None)

        def report(path: str, done: int, total: int) -> None:
            bar.update(task, description=escape(path[-40:]), completed=done, total=total or None)

        yield report


def print_json(value: object) -> None:
    """JSON on stdout; NaN and infinities become null."""
    data = orjson.dumps(
        _rounded(value), option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=str
    )
    text = _STEERING.sub(lambda sign: f"\\u{ord(sign.group()):04x}", data.decode())
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.flush()


# JSON escapes the other controls by itself.
_STEERING = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def _rounded(value: Any) -> Any:
    """Floats to 12 significant digits: sums over threads differ behind them from run to run."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


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


def show_rows(rows: pl.DataFrame, style: str, limit: int) -> None:
    """Rows as a table, CSV, JSON or Markdown."""
    if style == "csv":
        nested = [name for name, kind in rows.schema.items() if kind.is_nested()]
        flat = rows.with_columns(_as_json(rows[name]) for name in nested)
        text = flat.write_csv()
        if sys.stdout.isatty():
            write(printable(text))
        else:  # data: UTF-8 whatever the locale, nothing is replaced
            sys.stdout.buffer.write(text.encode())
            sys.stdout.flush()
        return
    if style == "json":
        print_json(rows.to_dicts())
        return
    shown = rows.head(limit) if limit > 0 else rows
    names = rows.columns
    cells = [[_cell(value) for value in row] for row in shown.iter_rows()]
    if style == "md":
        from pdtrace.markdown import table as markdown_table

        write(markdown_table(names, cells))
        return
    _rows_text(shown, cells)
    if rows.height > shown.height:
        put(console(stderr=True), "more rows; --limit 0 shows all")


def _cell(value: object) -> str:
    """A value for people: floats to four decimals or four digits; CSV and JSON have all."""
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}" if abs(value) < 0.1 else f"{value:.4f}".rstrip("0").rstrip(".")
    return "" if value is None else str(value)


def _rows_text(rows: pl.DataFrame, cells: list[list[str]]) -> None:
    """Rows as a table; a few wide rows stand upright, and columns that do not fit are named."""
    out = console()
    kinds = rows.dtypes

    def width(n: int, most: int) -> int:
        longest = max([cell_len(row[n]) for row in cells], default=0)
        # A number that is cut is another number.
        return max(
            cell_len(rows.columns[n]), longest if kinds[n].is_numeric() else min(longest, most)
        )

    for most in range(ROOMY_CELLS, CELL_CELLS - 1, -4):
        widths = [width(n, most) for n in range(len(kinds))]
        if sum(widths) + 2 * (len(widths) - 1) <= out.width:
            break
    if 0 < len(cells) <= UPRIGHT and sum(widths) + 2 * (len(widths) - 1) > out.width:
        heads = [Column("column"), *(Column(f"row {n + 1}", wraps=True) for n in range(len(cells)))]
        upright = [[name, *(row[n] for row in cells)] for n, name in enumerate(rows.columns)]
        grid(out, heads, upright, style="bold")
        return
    kept = list(range(len(widths)))
    if sum(widths) + 2 * (len(widths) - 1) > out.width:  # empty columns go first
        kept = [n for n in kept if any(row[n] for row in cells)] or kept[:1]
    while len(kept) > 1 and sum(widths[n] for n in kept) + 2 * (len(kept) - 1) > out.width:
        kept.pop()
    columns = [Column(rows.columns[n], right=kinds[n].is_numeric()) for n in kept]
    short = [[shortened(" ".join(row[n].split()), widths[n]) for n in kept] for row in cells]
    grid(out, columns, short, style="bold", keep_empty=True)
    if left := [name for n, name in enumerate(rows.columns) if n not in kept]:
        missing = numbers.plural(len(left), "column")
        text = f"{missing} not shown: {', '.join(left)} (--format csv shows all)"
        put(out, text, "dim")


def _as_json(column: pl.Series) -> pl.Series:
    import polars as pl

    values = [
        None if v is None else orjson.dumps(v, default=list).decode() for v in column.to_list()
    ]
    return pl.Series(column.name, values, dtype=pl.String)


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
