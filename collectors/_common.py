"""Reading helpers that collectors share: lines, JSON records, timestamps, numbers."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import orjson

from pdtrace.model import Sink, Source
from pdtrace.records import dataclass

READ_BYTES = 4 << 20
MAX_LINE_BYTES = 64 << 20  # a longer line is no record of any format known here

NOT_JSON = "not JSON"
NOT_AN_OBJECT = "JSON, but not an object"
CUT_OFF = "cut off at the end of the file"
TOO_LONG = "line longer than 64 MiB"


@dataclass(frozen=True)
class LineBatch:
    """Whole lines without their newline; `first` is the ordinal of the first; blank lines are kept."""

    first: int
    lines: list[bytes]
    cut: bool = False  # the last line had no newline: the file may end in the middle of a record


def line_batches(source: Source, size: int = READ_BYTES) -> Iterator[LineBatch]:
    """The source's lines in batches of about `size` bytes; memory stays bounded by the longest line."""
    first = 0
    rest = b""
    with source.open() as stream:
        while block := stream.read(size):
            block = rest + block
            end = block.rfind(b"\n")
            if end < 0:
                rest = block
                if len(rest) > MAX_LINE_BYTES:
                    yield LineBatch(first, [rest], cut=True)
                    return
                continue
            lines = block[:end].split(b"\n")
            rest = block[end + 1 :]
            yield LineBatch(first, lines)
            first += len(lines)
    if rest:
        yield LineBatch(first, [rest], cut=True)


def json_records(
    source: Source, out: Sink, size: int = READ_BYTES
) -> Iterator[tuple[list[int], list[dict[str, Any]]]]:
    """JSON lines as (ordinals, objects) per batch; counts every non-blank line and skips what is no object."""
    for batch in line_batches(source, size):
        ordinals: list[int] = []
        objects: list[dict[str, Any]] = []
        for offset, line in enumerate(batch.lines):
            if not line.strip():
                continue
            out.read(1)
            ordinal = batch.first + offset
            try:
                value = loads(line)
            except ValueError:
                last = batch.cut and offset == len(batch.lines) - 1
                out.skip(
                    ordinal, CUT_OFF if last else NOT_JSON, line[:200].decode("utf-8", "replace")
                )
                continue
            if isinstance(value, dict):
                ordinals.append(ordinal)
                objects.append(value)
            else:
                out.skip(ordinal, NOT_AN_OBJECT)
        if objects:
            yield ordinals, objects


# Halves of surrogate pairs that stand alone: no text can hold them.
LONELY = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def loads(data: bytes) -> Any:
    """A JSON value; also of writers that put NaN, Infinity, huge numbers or lone surrogates.

    Raises ValueError for anything else, and for nesting too deep to be a record.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        if data.lstrip()[:1] not in (b"{", b"["):
            raise
    try:
        return json.loads(LONELY.sub(r"\\ufffd", data.decode("utf-8", "replace")))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def whole_document(source: Source, out: Sink) -> Any:
    """The one JSON value of a file; None where there is none, which is then counted and skipped."""
    with source.open() as stream:
        content = stream.read()
    why = NOT_AN_OBJECT
    try:
        value = loads(content)
    except ValueError:
        value, why = None, CUT_OFF if content.lstrip()[:1] in (b"{", b"[") else NOT_JSON
    if value is None:
        out.read(1)
        out.skip(0, why)
    return value


def list_items(text: str) -> tuple[list[Any], str]:
    """The values of a JSON list that `text` begins with, as far as they are whole; and what is left: damaged, if not empty."""
    decoder, at = json.JSONDecoder(), 1
    found: list[Any] = []
    while match := _SPACES.match(text, at):
        at = match.end()
        if text[at : at + 1] == "]":
            rest = text[at + 1 :].strip(" \t\r\n}],")
            return found, rest
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        found.append(value)
    return found, text[at:].strip() or "]"


_SPACES = re.compile(r"[\s,]*")


def header_cells(line: str) -> list[str] | None:
    """The cells of a CSV's first line; None where it is no line of a CSV."""
    try:
        return next(csv.reader([line]), None)
    except csv.Error:  # a progress bar's carriage returns, for one
        return None


def csv_rows(text: str) -> Iterator[list[str]]:
    """The rows of a CSV with cells of any length; what the process had as its limit is as before in between."""
    lines = csv.reader(io.StringIO(text, newline=""))
    while True:
        before = csv.field_size_limit(MAX_LINE_BYTES)
        try:
            row = next(lines, None)
        finally:
            csv.field_size_limit(before)
        if row is None:
            return
        yield row


def number(value: object) -> float | None:
    """A finite number from a JSON number or numeric string; None for anything else, booleans included."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        result = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return result if math.isfinite(result) else None


INT64, UINT64 = range(-(2**63), 2**63), range(2**64)


def integer(value: object, within: range = INT64) -> int | None:
    """A whole number, exact beyond 2**53; None for anything else, and for what no column of 64 bits holds."""
    found = _whole(value)
    return None if found is None or found not in within else found


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return None
    result = number(value)
    return int(result) if result is not None and result.is_integer() else None


_MOST_SECONDS = 9.2e9  # nanoseconds of more do not fit into 64 bits


def seconds_to_ns(value: object) -> int | None:
    """Seconds (number or numeric string) as nanoseconds."""
    result = number(value)
    if result is None or abs(result) > _MOST_SECONDS:
        return None
    return round(result * 1e9)


def rfc3339_to_ns(text: str) -> int | None:
    """An RFC 3339 instant as epoch nanoseconds (any number of fractional digits); None when it is none."""
    try:
        whole, _, tail = text.partition(".")
        digits = ""
        if tail:
            n = 0
            while n < len(tail) and tail[n].isdecimal():
                n += 1
            digits, zone = tail[:n], tail[n:]
            moment = datetime.fromisoformat(whole + zone)
        else:
            moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp()) * 1_000_000_000 + int((digits + "000000000")[:9] or 0)
