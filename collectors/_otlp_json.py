"""OTLP/JSON by pyarrow.json: regular lines, or one regular document, as nested Arrow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import IO

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.json as pj

from pdtrace.records import dataclass

from ._otlp_attributes import ALIKE, LIFTED

BLOCK_BYTES = 8 << 20
_LOOK_BYTES = 64 << 10
_SECOND_LINE = re.compile(rb'\s*\{\s*"')


@dataclass(frozen=True)
class Spelling:
    """How a writer spells what OTLP/JSON leaves open.

    64-bit integers as text or numbers, enums as numbers or names.
    """

    instants: str = "text"
    integers: str = "text"
    kind: str = "number"
    code: str = "number"
    fields: frozenset[str] = frozenset()  # of the rare ones, those that occur


_SPELLINGS = {
    "instants": re.compile(rb'"(?:start|end)TimeUnixNano"\s*:\s*("?)'),
    "integers": re.compile(rb'"intValue"\s*:\s*("?)'),
    "kind": re.compile(rb'"kind"\s*:\s*("?)'),
    "code": re.compile(rb'"code"\s*:\s*("?)'),
}


def spelling_of(block: bytes, *, lifted: bool = False) -> Spelling:
    """The spelling of the first span that shows it; `lifted`: lists of attributes were taken out."""
    found = {name: pattern.search(block) for name, pattern in _SPELLINGS.items()}
    spelled = {name: "text" if m.group(1) else "number" for name, m in found.items() if m}
    rare = _LEFT_OUT if lifted else _RARE
    fields = {name for name in rare if f'"{name}"'.encode() in block}
    return Spelling(**spelled, fields=frozenset(fields if lifted else {*fields, *_PAIR}))


# Each field of the schema costs time for every record, whether it is there or not: a third of the
# parsing with all of these. A block that has one more of them is read again with it.
_RARE = (
    "arrayValue",
    "bytesValue",
    "boolValue",
    "droppedAttributesCount",
    "droppedEventsCount",
    "droppedLinksCount",
    "events",
    "links",
    "traceState",
    "flags",
    "schemaUrl",
)


_PAIR = ("key", "value")
_LEFT_OUT = {*_RARE, *_PAIR, LIFTED, ALIKE}


def _lean(kind: pa.DataType, fields: frozenset[str]) -> pa.DataType:
    """A type without the rare fields that do not occur."""
    if pa.types.is_list(kind):
        return pa.list_(_lean(kind.value_type, fields))
    if pa.types.is_struct(kind):
        kept = [f for f in kind if f.name in fields or f.name not in _LEFT_OUT]
        return pa.struct([(f.name, _lean(f.type, fields)) for f in kept])
    return kind


@lru_cache(maxsize=16)
def _schema(spelling: Spelling) -> pa.Schema:
    text, number = pa.string(), pa.int64()
    instant = text if spelling.instants == "text" else number
    integer = text if spelling.integers == "text" else number
    scalar = [
        ("stringValue", text),
        ("boolValue", pa.bool_()),
        ("intValue", integer),
        ("doubleValue", pa.float64()),
    ]
    value = pa.struct(
        [
            *scalar,
            ("arrayValue", pa.struct([("values", pa.list_(pa.struct(scalar)))])),
            ("bytesValue", _BYTES),
        ]
    )
    pair = pa.struct([("key", text), ("value", value), (LIFTED, number)])
    attributes = ("attributes", pa.list_(pair))
    dropped = ("droppedAttributesCount", number)
    event = pa.struct([("timeUnixNano", instant), ("name", text), attributes, dropped])
    link = pa.struct(
        [
            ("traceId", text),
            ("spanId", text),
            ("traceState", text),
            attributes,
            dropped,
            ("flags", number),
        ]
    )
    code = text if spelling.code == "text" else number
    span = pa.struct(
        [
            ("traceId", text),
            ("spanId", text),
            ("traceState", text),
            ("parentSpanId", text),
            ("name", text),
            ("kind", text if spelling.kind == "text" else number),
            ("startTimeUnixNano", instant),
            ("endTimeUnixNano", instant),
            attributes,
            dropped,
            ("events", pa.list_(event)),
            ("droppedEventsCount", number),
            ("links", pa.list_(link)),
            ("droppedLinksCount", number),
            ("status", pa.struct([("message", text), ("code", code)])),
            ("flags", number),
            (ALIKE, number),
        ]
    )
    scope = pa.struct([("name", text), ("version", text), attributes, dropped])
    scope_spans = pa.struct([("scope", scope), ("spans", pa.list_(span)), ("schemaUrl", text)])
    resource = pa.struct([attributes, dropped])
    resource_spans = pa.struct(
        [("resource", resource), ("scopeSpans", pa.list_(scope_spans)), ("schemaUrl", text)]
    )
    return pa.schema([("resourceSpans", pa.list_(_lean(resource_spans, spelling.fields)))])


_BYTES = pa.string()


def resource_spans(
    block: bytes | pa.Buffer, spelling: Spelling, *, pretty: bool = False
) -> pa.StructArray | None:
    """All ResourceSpans of whole JSON lines (or of one pretty-printed object).

    None when pyarrow refuses the block.
    """
    found = requests(block, spelling, pretty=pretty)
    return None if found is None else found.flatten()


def requests(
    block: bytes | pa.Buffer, spelling: Spelling, *, pretty: bool = False
) -> pa.ListArray | None:
    """The ResourceSpans of each line."""
    try:
        _check_utf8(block)  # the parser does not
        table = pj.read_json(
            pa.BufferReader(block),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=_schema(spelling),
                unexpected_field_behavior="error",
                newlines_in_values=pretty,
            ),
        )
    except pa.ArrowInvalid:
        return None
    column = table.column(0).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return column


class Spellings:
    """How the blocks of one file are spelled: as the last one, until the parser refuses that."""

    def __init__(self) -> None:
        self._last: dict[bool, Spelling] = {}

    def parse(self, text: bytes | pa.Buffer, *, lifted: bool) -> pa.ListArray | None:
        """The ResourceSpans of each line; None when pyarrow refuses the text."""
        last = self._last.get(lifted)
        found = None if last is None else requests(text, last)
        if found is not None:
            return found
        own = spelling_of(bytes(text), lifted=lifted)
        if own != last and (found := requests(text, own)) is not None:
            self._last[lifted] = own
        return found


def _check_utf8(block: bytes | pa.Buffer) -> None:
    """Raise ArrowInvalid where the bytes are no UTF-8."""
    ends = pa.py_buffer(np.array([0, len(block)], np.int32))
    pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(block)]).cast(pa.string())


@dataclass
class Lines:
    """Whole lines of a file, as the pieces in which they were read: who has them from elsewhere need not join these."""

    pieces: list[bytes | memoryview]
    cut: bool = False  # no newline at the end

    def text(self) -> bytes:
        """All of them as one."""
        return bytes(self.pieces[0]) if len(self.pieces) == 1 else b"".join(self.pieces)

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def ends(self, size: int) -> tuple[bytes, bytes]:
        """The first and the last so many bytes."""
        first, last = b"", b""
        for piece in self.pieces:
            first += piece[: size - len(first)]
        for piece in reversed(self.pieces):
            last = bytes(piece[max(len(piece) - size + len(last), 0) :]) + last
        return first, last


def line_blocks(first: bytes, stream: IO[bytes], padding: bytes = b"") -> Iterator[Lines]:
    """Blocks of whole lines (line_places() tells where they are in a file)."""
    parts: list[bytes | memoryview] = []
    block = first
    while block:
        end = block.rfind(b"\n")
        if end < 0:
            parts.append(block)
        else:
            yield Lines([*parts, memoryview(block)[: end + 1], padding])
            parts = [block[end + 1 :]]
        block = stream.read(BLOCK_BYTES)
    rest = b"".join(parts)
    if rest.strip():
        yield Lines([rest], cut=True)


def line_places(file: int) -> Iterator[tuple[int, int]]:
    """Where the same blocks begin and end in a file, but for one behind its last newline: only their ends are looked at."""
    begin, low, size = 0, 0, os.fstat(file).st_size
    while low < size:
        high = min(low + BLOCK_BYTES, size)
        end = _behind_last_newline(file, low, high)
        if end:
            yield begin, end
            begin = end
        low = high


def _behind_last_newline(file: int, low: int, high: int) -> int:
    """The place behind the last newline between two places; 0 where there is none."""
    while high > low:
        start = max(low, high - _LOOK_BYTES)
        found = os.pread(file, high - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        high = start
    return 0


def is_lines(start: bytes) -> bool:
    """Whether a file that begins so is JSON lines (also one alone), not one long document."""
    text = start.lstrip()
    end = text.find(b"\n")
    line = text if end < 0 else text[:end]
    if line.startswith(b"["):
        return False
    if end < 0 or _SECOND_LINE.match(text, end + 1):
        return True
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return not line.startswith(b"{")
    return True
