"""Attribute lists of OTLP/JSON found by their bytes, so that the JSON parser sees only the rest.

Four fifths of the time that pyarrow.json takes for a span go into its attributes: three nested
objects each. Exporters write them all in one way, `{"key":"K","value":{"stringValue":"V"}}`, and a
quote that no backslash escapes cannot stand inside a string. So numpy finds the pairs among the
places of all quotes and checks every byte around keys and values. A list that has anything else in
it (blanks, arrays, two values) stays where it is, for the parser.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from ._otlp_attributes import BOOL, DOUBLE, INT, LIFTED, LIFTED_FROM, OTHER, STRING, Lifted

# Blank lines behind a block, so that looking ahead needs no care.
PADDING = b"\n" * 64
# What stands in place of a list of attributes: one element that has the number of the list.
_MARK = np.frombuffer(f'{{"{LIFTED}":00000000}}'.encode(), np.uint8)
_DIGITS = range(5, 13)

_QUOTE, _BACKSLASH, _BLANK, _COMMA, _CLOSE, _OPEN_LIST, _CLOSE_LIST = b'"\\ ,}[]'
_TWO_CLOSE = np.uint16(0x7D7D)
_NUMBER_BYTES = 40  # no number is longer
_PIECE = 256 << 10


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


class _Block:
    """A block of whole lines: its bytes, two and eight bytes at each place, where quotes are."""

    def __init__(self, block: bytes, quotes: np.ndarray) -> None:
        self.bytes = np.frombuffer(block, np.uint8)
        reach = len(block) - 7
        self.pairs: np.ndarray = np.ndarray((reach,), "<u2", block, strides=(1,))
        self.words: np.ndarray = np.ndarray((reach,), "<u8", block, strides=(1,))
        self.quotes = quotes
        self.style = _SPACED if b'{"key": "' in block else _DENSE
        self.ascii = block.isascii()
        self.escapes = b"\\" in block
        if self.escapes:
            self.quotes = quotes[~_escaped(self.bytes, quotes)]
        # A number may be the last value of all: no quotes of another pair come behind it.
        self.quotes = np.append(self.quotes, np.full(2, len(block) - 16, np.int32))

    def text(self, starts: np.ndarray, ends: np.ndarray) -> pa.StringArray:
        """The text between ascending places, unescaped."""
        found = _slices(self.bytes, starts, ends, pa.string() if self.ascii else pa.binary())
        found = found.cast(pa.string())  # where it is not ASCII, this checks that it is UTF-8
        if not self.escapes:
            return found
        marked = pc.match_substring(found, "\\")
        if not pc.any(marked).as_py():
            return found
        plain = [orjson.loads(f'"{text}"') for text in found.filter(marked).to_pylist()]
        return pc.replace_with_mask(found, marked, pa.array(plain, pa.string()))


def lift(block: bytes) -> tuple[pa.Buffer, Lifted] | tuple[None, None]:
    """The block without its regular attribute lists, and the pairs of those.

    None where there are none, or where a value is not what it should be.
    """
    if not block.endswith(PADDING):
        block += PADDING
    quotes = None if LIFTED.encode() in block else _quotes(block)
    try:
        found = None if quotes is None else _lifted(_Block(block, quotes))
    except (pa.ArrowInvalid, orjson.JSONDecodeError):
        found = None
    return found or (None, None)


def _quotes(block: bytes) -> np.ndarray | None:
    """Where quotes are; None where there are control characters other than newlines.

    In pieces that fit into a core's cache.
    """
    data = np.frombuffer(block, np.uint8)
    equal, moved = np.empty(_PIECE, bool), np.empty(_PIECE, np.uint8)
    found = []
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        np.subtract(piece, 0x0B, out=moved[: len(piece)])  # newlines wrap to the greatest number
        if piece.min() < 0x0A or moved[: len(piece)].min() < 0x20 - 0x0B:
            return None
        places = np.flatnonzero(np.equal(piece, _QUOTE, out=equal[: len(piece)]))
        found.append(places.astype(np.int32))
        found[-1] += start
    return np.concatenate(found) if found else np.empty(0, np.int32)


def _escaped(data: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Which places stand behind an odd number of backslashes."""
    odd = np.zeros(len(places), bool)
    at, rows = places - 1, np.arange(len(places))
    while len(rows):
        more = (at >= 0) & (data[at] == _BACKSLASH)
        rows, at = rows[more], at[more] - 1
        odd[rows] ^= True
    return odd


def _slices(data: np.ndarray, starts: np.ndarray, ends: np.ndarray, kind: pa.DataType) -> pa.Array:
    """The bytes between ascending places: every other one of the pieces that all places make."""
    offsets = np.empty(2 * len(starts) + 1, np.int32)
    offsets[0:-1:2], offsets[1::2] = starts, ends
    offsets[-1] = ends[-1] if len(ends) else 0
    n = len(offsets) - 1
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    every_other = pa.py_buffer(np.full(n // 8 + 1, 0b01010101, np.uint8))
    wanted = pa.BooleanArray.from_buffers(pa.bool_(), n, [None, every_other])
    return pa.Array.from_buffers(kind, n, buffers).filter(wanted)


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
            fits &= block.bytes[at] != _QUOTE
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


def _booleans(texts: pa.StringArray) -> pa.BooleanArray:
    if not pc.all(pc.is_in(texts, value_set=pa.array(["true", "false"]))).as_py():
        raise pa.ArrowInvalid("neither true nor false")
    return pc.equal(texts, "true")


_TYPED = {
    STRING: lambda texts: texts,
    INT: lambda texts: texts.cast(pa.int64()),
    DOUBLE: lambda texts: texts.cast(pa.float64()),
    BOOL: _booleans,
}


def _rest(block: _Block, begin: np.ndarray, end: np.ndarray) -> pa.Buffer:
    """The block with a mark in place of each list."""
    starts, ends = np.append(0, end), np.append(begin + len(_MARK), len(block.bytes))
    lengths = ends - starts
    kept = _slices(block.bytes, starts, ends, pa.binary()).buffers()[2]
    text = np.frombuffer(kept, np.uint8)[: int(lengths.sum())].copy()
    marks = np.tile(_MARK, (len(begin), 1))
    numbers = np.arange(LIFTED_FROM, LIFTED_FROM + len(begin), dtype=np.int32)
    for place in reversed(_DIGITS):
        numbers, digit = np.divmod(numbers, 10)
        marks[:, place] += digit.astype(np.uint8)
    places = np.cumsum(lengths[:-1]) - len(_MARK)
    text[places[:, None] + np.arange(len(_MARK))] = marks
    return pa.py_buffer(text)
