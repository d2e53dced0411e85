"""Attribute lists of OTLP/JSON found by their bytes, so that the JSON parser sees only the rest.

Four fifths of the time that pyarrow.json takes for a span go into its attributes: three nested
objects each. Exporters write them all in one way, `{"key":"K","value":{"stringValue":"V"}}`, and a
quote that no backslash escapes cannot stand inside a string. So numpy finds the pairs among the
places of all quotes and checks every byte around keys and values. A list that has anything else in
it (blanks, arrays, two values) stays where it is, for the parser.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import orjson
import pyarrow as pa

from pdtrace.records import dataclass

from ._otlp_attributes import BOOL, DOUBLE, INT, LIFTED, LIFTED_FROM, OTHER, STRING, Lifted
from ._otlp_bytes import QUOTE, Block, booleans

# What stands in place of a list of attributes: one element that has the number of the list.
_MARK = np.frombuffer(f'{{"{LIFTED}":00000000}}'.encode(), np.uint8)
_DIGITS = range(5, 13)

_BLANK, _COMMA, _CLOSE, _OPEN_LIST, _CLOSE_LIST = b" ,}[]"
_TWO_CLOSE = np.uint16(0x7D7D)
_NUMBER_BYTES = 40  # no number is longer


def _word(text: bytes) -> np.uint64:
    """Eight bytes as the number that a look at them gives."""
    (word,) = np.frombuffer(text, "<u8")
    return np.uint64(word)


@dataclass(frozen=True)
class _Layout:
    """How a value of one kind is written behind the quote that opens its name."""

    kind: int
    name: np.uint64  # the eight bytes behind that quote
    before: np.uint64  # the last eight bytes before the value
    start: int  # where the value starts
    quoted: bool = False


@dataclass(frozen=True)
class _Style:
    """How a writer puts blanks: none (`gap` 0), or one behind each colon and comma (1)."""

    gap: int
    opening: np.uint64  # the first eight bytes of a pair
    middle: tuple[np.uint64, np.uint64]  # the first and last eight between key and value's name
    middle_bytes: int
    head: np.uint64  # the last eight bytes before a list
    layouts: tuple[_Layout, ...]


def _style(gap: int) -> _Style:
    blank = b" " * gap
    middle = b'",' + blank + b'"value":' + blank + b'{"'

    def layout(kind: int, name: bytes, *, quoted: bool = False) -> _Layout:
        written = name + b'":' + blank + b'"' * quoted
        return _Layout(kind, _word(name[:8]), _word(written[-8:]), len(written) + 1, quoted)

    return _Style(
        gap,
        _word((b'{"key":' + blank + b'"')[:8]),
        (_word(middle[:8]), _word(middle[-8:])),
        len(middle),
        _word((b'"attributes":' + blank + b"[")[-8:]),
        (
            layout(STRING, b"stringValue", quoted=True),
            layout(INT, b"intValue", quoted=True),
            layout(INT, b"intValue"),
            layout(DOUBLE, b"doubleValue"),
            layout(BOOL, b"boolValue"),
        ),
    )


_DENSE, _SPACED = _style(0), _style(1)


class _Block(Block):
    """A block of whole lines: its bytes, two and eight bytes at each place, where quotes are."""

    def __init__(self, text: bytes) -> None:
        super().__init__(text)
        reach = len(self.raw) - 7
        self.pairs: np.ndarray = np.ndarray((reach,), "<u2", self.raw, strides=(1,))
        self.words: np.ndarray = np.ndarray((reach,), "<u8", self.raw, strides=(1,))
        self.style = _SPACED if b'{"key": "' in self.raw else _DENSE

    @cached_property
    def quotes(self) -> np.ndarray:
        """Where quotes are, and two behind them all."""
        # A number may be the last value of all: no quotes of another pair come behind it.
        return np.append(super().quotes, np.full(2, len(self.raw) - 16, np.int32))


def lift(text: bytes) -> tuple[pa.Buffer, Lifted] | tuple[None, None]:
    """The block without its regular attribute lists, and the pairs of those.

    None where there are none, or where a value is not what it should be.
    """
    try:
        block = None if LIFTED.encode() in text else _Block(text)
        found = None if block is None or block.newlines is None else _lifted(block)
    except (pa.ArrowInvalid, orjson.JSONDecodeError):
        found = None
    return found or (None, None)


def _lifted(block: _Block) -> tuple[pa.Buffer, Lifted] | None:
    key = _candidates(block)
    begin = block.quotes[key] - 1
    starts_list = block.bytes[begin - 1] == _OPEN_LIST
    runs = np.flatnonzero(starts_list)
    if not len(runs):
        return None
    kinds, starts, ends, after = _values(block, key)
    # A pair follows the one before it, or it is the first of a list of attributes.
    good = kinds != OTHER
    gap = block.style.gap
    follows = (begin[1:] == after[:-1] + 1 + gap) & (block.bytes[after[:-1]] == _COMMA)
    if gap:
        follows &= block.bytes[begin[1:] - 1] == _BLANK
    good[1:] &= starts_list[1:] | follows
    heads, counts = begin[runs], np.diff(runs, append=len(key))
    last = runs + counts - 1
    whole = np.logical_and.reduceat(good, runs) & (block.bytes[after[last]] == _CLOSE_LIST)
    whole &= block.words[heads - 14 - gap] == _word(b'"attribu')
    whole &= block.words[heads - 8] == block.style.head
    if not whole.any():
        return None
    taken = np.zeros(len(key), bool)
    taken[runs[0] :] = np.repeat(whole, counts)
    if not taken.all():
        key, kinds, starts, ends = key[taken], kinds[taken], starts[taken], ends[taken]
    bounds = np.concatenate(([0], np.cumsum(counts[whole])))
    pairs = _pairs(block, bounds, key, kinds, starts, ends)
    return _rest(block, heads[whole], after[last[whole]]), pairs


def _candidates(block: _Block) -> np.ndarray:
    """Which quotes open the word "key" of a pair: `{"key":"`, with the quotes of a value behind."""
    quotes = block.quotes
    style = block.style
    early = int(np.searchsorted(quotes, 16))
    steps = np.diff(quotes[early:-7])  # nine quotes follow that of "key"
    found = np.flatnonzero((steps[:-1] == 4) & (steps[1:] == 2 + style.gap)) + early
    found = found[block.words[quotes[found] - 1] == style.opening]
    shut = quotes[found + 3]
    fits = block.words[shut] == style.middle[0]
    fits &= block.words[shut + style.middle_bytes - 8] == style.middle[1]
    kept: np.ndarray = found[fits]
    return kept


def _values(
    block: _Block, key: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Kind of each pair's value, where it starts and ends, and where the pair ends."""
    name = block.quotes[key + 6]
    opening = block.words[name + 1]
    kinds = np.full(len(key), OTHER, np.int8)
    starts, ends, after = (np.zeros(len(key), np.int32) for _ in range(3))
    for layout in block.style.layouts:
        rows = np.flatnonzero(opening == layout.name)
        at = name[rows] + layout.start
        fits = block.words[at - 8] == layout.before
        if not layout.quoted:
            fits &= block.bytes[at] != QUOTE
        if not fits.all():
            rows, at = rows[fits], at[fits]
        end = block.quotes[key[rows] + 9] if layout.quoted else _closing(block, key[rows], at)
        tail = end + layout.quoted
        fits = block.pairs[tail] == _TWO_CLOSE
        if not fits.all():
            rows, at, end, tail = rows[fits], at[fits], end[fits], tail[fits]
        kinds[rows], starts[rows], ends[rows], after[rows] = layout.kind, at, end, tail + 2
    return kinds, starts, ends, after


def _closing(block: _Block, key: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Where the closing brace behind each number is; any other place where none is near."""
    # `}},{"` before the next pair, `}}],"` before the next field: four places before a quote.
    ends: np.ndarray = block.quotes[key + 8] - 4 - block.style.gap
    far = (ends < starts) | (ends > starts + _NUMBER_BYTES)
    rows = np.flatnonzero(far | (block.pairs[ends] != _TWO_CLOSE))
    ends[rows] = starts[rows]
    for _ in range(_NUMBER_BYTES):
        rows = rows[block.bytes[ends[rows]] != _CLOSE]
        if not len(rows):
            break
        ends[rows] += 1
    return ends


def _pairs(
    block: _Block,
    bounds: np.ndarray,
    key: np.ndarray,
    kinds: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
) -> Lifted:
    names = block.text(block.quotes[key + 2] + 1, block.quotes[key + 3]).dictionary_encode()
    values: dict[int, pa.Array] = {}
    for kind, typed in _TYPED.items():
        rows = np.flatnonzero(kinds == kind)
        if len(rows):
            values[kind] = typed(block.text(starts[rows], ends[rows]))
    return Lifted(bounds, names.indices.to_numpy(), names.dictionary.to_pylist(), kinds, values)


_TYPED = {
    STRING: lambda texts: texts,
    INT: lambda texts: texts.cast(pa.int64()),
    DOUBLE: lambda texts: texts.cast(pa.float64()),
    BOOL: booleans,
}


def _rest(block: _Block, begin: np.ndarray, end: np.ndarray) -> pa.Buffer:
    """The block with a mark in place of each list."""
    marks = np.tile(_MARK, (len(begin), 1))
    numbers = np.arange(LIFTED_FROM, LIFTED_FROM + len(begin), dtype=np.int32)
    for place in reversed(_DIGITS):
        numbers, digit = np.divmod(numbers, 10)
        marks[:, place] += digit.astype(np.uint8)
    return block.marked(begin, end, marks)
