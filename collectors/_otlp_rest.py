"""A block of OTLP/JSON lines without the spans that match patterns: what is left is parsed.

In place of spans that follow one another stands one mark. Where each line has its own resource,
most lines are the same then, and each is parsed once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from pdtrace.records import dataclass

from ._otlp_alike import Matches, Patterns, matches
from ._otlp_alike_columns import columns
from ._otlp_attributes import ALIKE, optional
from ._otlp_bytes import Block
from ._otlp_items import Spans, parents

_MARK = np.frombuffer(f'{{"{ALIKE}":0}}'.encode(), np.uint8)
_COMMA, _BLANK, _NEWLINE = b", \n"


@dataclass
class Placed:
    """Spans that were found without parsing, and those that were parsed.

    The scope of each by number, and its place among all spans of the block.
    """

    alike: Spans
    alike_scope: np.ndarray
    alike_order: np.ndarray
    parsed: np.ndarray  # mask of the elements of the lists of spans
    parsed_order: np.ndarray
    once: bool  # lines that are the same were parsed once


@dataclass
class Rest:
    """Text to be parsed, and what was taken out of it."""

    text: bytes
    spans: Spans | None = None
    runs: np.ndarray | None = None  # how many spans each mark stands for
    lines: np.ndarray | None = None  # where lines are parsed once: the number of each line

    def place(self, requests: pa.ListArray) -> Placed | None:
        """Where the spans belong in the requests that were parsed, one a line.

        None where that cannot be told.
        """
        assert self.spans is not None
        assert self.runs is not None
        scope_lists = requests.flatten().field("scopeSpans")
        span_lists = scope_lists.flatten().field("spans")
        elements, scope = span_lists.flatten(), parents(span_lists)
        line = parents(requests)[parents(scope_lists)[scope]]
        marked = optional(elements, ALIKE).is_valid().to_numpy(zero_copy_only=False)
        all_lines = np.arange(len(requests)) if self.lines is None else self.lines
        if len(all_lines) and all_lines.max() + 1 != len(requests):
            return None  # the parser has left out a line, or found two requests in one
        order = _elements_of(all_lines, line, len(requests))
        is_run = marked[order]
        if is_run.sum() != len(self.runs) or len(np.unique(order[~is_run])) != (~is_run).sum():
            return None
        sizes = np.ones(len(order), np.int64)
        sizes[is_run] = self.runs
        first = np.cumsum(sizes) - sizes
        behind = np.cumsum(self.runs) - self.runs
        return Placed(
            self.spans,
            np.repeat(scope[order[is_run]], self.runs),
            np.repeat(first[is_run] - behind, self.runs) + np.arange(self.runs.sum()),
            ~marked,
            first[~is_run],
            self.lines is not None,
        )


def _elements_of(lines: np.ndarray, line: np.ndarray, count: int) -> np.ndarray:
    """The elements of some lines, given the line of each element (ascending)."""
    sizes = np.bincount(line, minlength=count)
    first = (np.cumsum(sizes) - sizes)[lines]
    wanted = sizes[lines]
    before = np.cumsum(wanted) - wanted
    found: np.ndarray = np.repeat(first - before, wanted) + np.arange(wanted.sum())
    return found


def rests(text: bytes, patterns: Patterns) -> Iterator[Rest]:
    """What to parse of a block: the least that might do first, then more, then all of it."""
    if not _has_mark(text):
        block = Block(text)
        found = matches(block, patterns)
        if found is not None:
            yield from _without(block, found)
    yield Rest(text)


def _has_mark(text: bytes) -> bool:
    mark = ALIKE.encode()
    return mark in text and b'"' + mark + b'"' in text  # to look for one byte is ten times as quick


def _without(block: Block, found: Matches) -> Iterator[Rest]:
    try:
        spans = columns(block, found)
    except ValueError:  # pyarrow's errors too
        return
    firsts = np.flatnonzero(np.append(True, ~_follows(block, found)))
    runs = np.diff(firsts, append=len(found.starts))
    text = block.marked(found.starts[firsts], found.ends[firsts + runs - 1], _MARK).to_pybytes()
    distinct, lines = _distinct(text)
    if distinct is not None:
        yield Rest(distinct, spans, runs, lines)
    yield Rest(text, spans, runs)


def _follows(block: Block, found: Matches) -> np.ndarray:
    """Which spans but the first follow the one before them in the same list."""
    before, after = found.ends[:-1], found.starts[1:]
    near = (block.bytes[before] == _COMMA) & (after - before <= 2)
    follows: np.ndarray = near & ((after - before == 1) | (block.bytes[before + 1] == _BLANK))
    return follows


def _distinct(text: bytes) -> tuple[bytes, np.ndarray] | tuple[None, None]:
    """The lines of a text once each, and the number of each line; None where few come again."""
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(data == _NEWLINE).astype(np.int32)
    offsets = np.append(np.int32(0), ends + 1)
    lines = pa.Array.from_buffers(
        pa.binary(), len(ends), [None, *map(pa.py_buffer, (offsets, text))]
    )
    lines = lines.filter(pa.array(np.diff(offsets) > 1))
    encoded = lines.dictionary_encode()
    if 2 * len(encoded.dictionary) > len(lines):
        return None, None
    return b"".join(encoded.dictionary.to_pylist()), encoded.indices.to_numpy()
