"""Rows of a query as a table that fits the width, as CSV, JSON or Markdown."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import orjson

from pdtrace import numbers
from pdtrace._grid import Column, grid, shortened
from pdtrace._paper import cell_len, put
from pdtrace._stdout import console, print_json, write
from pdtrace.errors import printable

if TYPE_CHECKING:
    import polars as pl

UPRIGHT = 3  # so many rows are shown upright when they are too wide
CELL_CELLS = 16  # a cell of `query` narrower than its content and than this is hard to read
ROOMY_CELLS = 60  # and so wide where all columns fit with it


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
