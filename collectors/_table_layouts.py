"""How a file holds its table: JSON, Parquet, or text with a delimiter, header line and encoding."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator
from dataclasses import field

import polars as pl
import pyarrow as pa

from pdtrace.model import Head, Sink, Source
from pdtrace.records import dataclass

from ._table_headers import is_request_table
from ._table_json import BATCH_ROWS, json_batches, json_names, parquet_batches

BLOCK_BYTES = 8 << 20
HEADER_LINES = 60  # a header further down is not looked for
REPEATED_HEADER = "header repeated"
RULE_LINE = "line between header and rows"
NOT_A_ROW = "text around the table"
_ENCODINGS = ("utf-8", "cp949", "gb18030", "cp1252")
_RULE = re.compile(r"^[\s|:;,+=-]*-{2,}[\s|:;,+=-]*$")


@dataclass(frozen=True)
class Layout:
    """Where the table is in the file."""

    kind: str  # delimited, jsonl, json or parquet
    names: list[str] = field(default_factory=list)
    delimiter: str = ","
    header_line: int = 0
    encoding: str = "utf-8"


def find_layout(head: Head) -> Layout | None:
    """The layout of a request table, or None when the head shows none."""
    if head.data[:4] == b"PAR1":
        return _parquet_layout(head)
    encoding, text = _decode(head.data)
    if text is None:
        return None
    start = text.lstrip("\ufeff \t\r\n")
    if start[:1] in "{[" and (found := json_names(start)) is not None:
        kind, names = found
        return Layout(kind, names, encoding=encoding) if is_request_table(names) else None
    return _delimited_layout(text, encoding)


def _decode(data: bytes) -> tuple[str, str | None]:
    """Encoding and text of the head; NUL bytes outside UTF-16 mean binary."""
    for mark, name in (
        (codecs.BOM_UTF8, "utf-8-sig"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if data.startswith(mark):
            return name, codecs.getincrementaldecoder(name)("ignore").decode(data)
    if data[1:2] == b"\0" and data[:1] != b"\0":
        return "utf-16-le", codecs.getincrementaldecoder("utf-16-le")("ignore").decode(data)
    if data.count(0) * 20 > len(data):  # a few are damage, many are a binary file
        return "", None
    for name in _ENCODINGS:
        try:
            return name, codecs.getincrementaldecoder(name)("strict").decode(data)
        except UnicodeDecodeError:
            continue
    return "", None


# ---- delimited text


def _delimited_layout(text: str, encoding: str) -> Layout | None:
    lines = text.splitlines()
    for number, line in enumerate(lines[:HEADER_LINES]):
        if number == len(lines) - 1 and number > 0 and len(text) >= 60_000:
            return None  # cut off by the end of the head
        content = line.strip()
        if not content or len(content) > 8_000 or content[0] in "{[":
            continue
        for delimiter in ("\t", ";", "|", ","):
            if delimiter not in content:
                continue
            names = split_line(content.lstrip("# ") if content[0] == "#" else content, delimiter)
            if (
                _is_header(names)
                and is_request_table(names)
                and _rows_follow(lines[number + 1 :], delimiter, names)
            ):
                return Layout("delimited", names, delimiter, number, encoding)
    return None


def _is_header(names: list[str]) -> bool:
    """Short names, no values: a command line or a sentence with commas is none."""
    return (
        len(names) >= 2
        and all(len(name) <= 80 and "=" not in name and len(name.split()) <= 8 for name in names)
        and sum(bool(re.fullmatch(r"[\d.,:+-]+", name)) for name in names) * 2 < len(names)
    )


def split_line(line: str, delimiter: str) -> list[str]:
    """The cells of one line; the outer pipes of a Markdown table are no cells."""
    if delimiter == "|":
        line = line.strip().removeprefix("|").removesuffix("|")
    cells = next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])
    return [cell.strip() for cell in cells]


def _rows_follow(lines: list[str], delimiter: str, names: list[str]) -> bool:
    """The next row must look like data: about as many cells, and a digit in one of them."""
    for line in lines[:5]:
        if not line.strip() or _RULE.match(line):
            continue
        cells = split_line(line, delimiter)
        return len(cells) * 2 >= len(names) > 1 and bool(re.search(r"\d", line))
    return not lines or not any(line.strip() for line in lines)


def _text_blocks(source: Source, layout: Layout) -> Iterator[str]:
    """The text in blocks that end at a row's end; quotes may hold line breaks."""
    decoder = codecs.getincrementaldecoder(layout.encoding)("replace")
    rest = ""
    with source.open() as stream:
        while block := stream.read(BLOCK_BYTES):
            rest += decoder.decode(block)
            end = rest.rfind("\n") + 1
            while end > 0 and rest.count('"', 0, end) % 2:
                end = rest.rfind("\n", 0, end - 1) + 1
            if end > 0:
                yield rest[:end]
                rest = rest[end:]
    rest += decoder.decode(b"", True)
    if rest.strip():
        yield rest


def _delimited_batches(
    source: Source, layout: Layout, out: Sink
) -> Iterator[tuple[pl.Series, pl.DataFrame]]:
    first = 0
    to_skip = layout.header_line + 1
    for block in _text_blocks(source, layout):
        text = re.sub(r"\r*\n", "\n", block).replace("\r", "\n")
        if to_skip:
            lines = text.split("\n", to_skip)
            text = lines[-1] if len(lines) > to_skip else ""
            to_skip = 0
        if not text.strip():
            continue
        frame = _frame_of_text(text, layout)
        for part in frame.iter_slices(BATCH_ROWS):
            out.read(part.height)
            record = pl.int_range(first, first + part.height, eager=True, dtype=pl.Int64).alias(
                "record"
            )
            first += part.height
            yield _without_strays(record, part, layout, out)


def _frame_of_text(text: str, layout: Layout) -> pl.DataFrame:
    names = _unique(layout.names)
    if layout.delimiter == "|":
        rows = [split_line(line, "|") for line in text.split("\n") if line.strip()]
        wide = [(row + [""] * len(names))[: len(names)] for row in rows]
        return pl.DataFrame(
            {name: [row[i] for row in wide] for i, name in enumerate(names)},
            schema=dict.fromkeys(names, pl.String),
        )
    # An empty row in front: Polars takes the number of columns from the first.
    text = layout.delimiter * (len(names) - 1) + "\n" + text
    return pl.read_csv(
        io.BytesIO(text.encode("utf-8", "replace")),
        separator=layout.delimiter,
        has_header=False,
        schema=dict.fromkeys(names, pl.String),
        truncate_ragged_lines=True,
        quote_char='"' if text.count('"') % 2 == 0 else None,
        ignore_errors=True,
    ).filter(~pl.all_horizontal(pl.all().fill_null("").str.strip_chars() == ""))


def _unique(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    unique = []
    for position, name in enumerate(names):
        name = name or f"column {position + 1}"
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return unique


def _without_strays(
    record: pl.Series, frame: pl.DataFrame, layout: Layout, out: Sink
) -> tuple[pl.Series, pl.DataFrame]:
    """Rule lines of Markdown, repeated headers and prose around the table are only counted."""
    cells = frame.select(pl.all().fill_null("").str.strip_chars())
    header = pl.Series(
        cells.select(
            pl.all_horizontal(
                pl.col(n) == original
                for n, original in zip(cells.columns, layout.names, strict=True)
            )
        ).to_series()
    )
    rule = cells.select(
        pl.all_horizontal(pl.all().str.contains(r"^[\s:=+-]*$"))
        & pl.any_horizontal(pl.all().str.contains("--", literal=True))
    ).to_series()
    prose = cells.select(
        pl.all_horizontal(pl.all().exclude(cells.columns[0]) == "")
        & ~pl.first().str.contains(r"\d")
    ).to_series()
    for mask, reason in (
        (header, REPEATED_HEADER),
        (rule & ~header, RULE_LINE),
        (prose & ~rule & ~header, NOT_A_ROW),
    ):
        if mask.any():
            out.skip(record.filter(mask).to_list(), reason)
    keep = ~(header | rule | prose)
    return record.filter(keep), frame.filter(keep)


def _parquet_layout(head: Head) -> Layout | None:
    """Column names stand at the end of the file: a longer file is judged when it is read."""
    if not head.complete:
        return Layout("parquet")
    import pyarrow.parquet as pq  # 70 ms that other files need not pay

    try:
        names = pq.read_schema(io.BytesIO(head.data)).names
    except (pa.ArrowInvalid, OSError):
        return None
    return Layout("parquet", list(names)) if is_request_table(names) else None


def batches(source: Source, layout: Layout, out: Sink) -> Iterator[tuple[pl.Series, pl.DataFrame]]:
    """The table as (record ordinals, frame) in batches of at most 64k rows; counts every record."""
    if layout.kind == "parquet":
        return parquet_batches(source, out)
    if layout.kind == "delimited":
        return _delimited_batches(source, layout, out)
    return json_batches(source, layout.kind == "jsonl", layout.encoding, out)
