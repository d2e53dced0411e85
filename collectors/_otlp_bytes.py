"""A block of JSON lines as bytes: looks at many places at once, and texts between places."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import orjson
import pyarrow as pa

from ._compute import pc

# Blank lines behind a block, so that looking ahead needs no care.
PADDING = b"\n" * 64
QUOTE, _BACKSLASH, _NEWLINE = b'"\\\n'
_PIECE = 256 << 10


class Block:
    """Whole lines and the padding behind them."""

    def __init__(self, text: bytes) -> None:
        self.raw = text if text.endswith(PADDING) else text + PADDING
        self.bytes = np.frombuffer(self.raw, np.uint8)
        self.ascii = self.raw.isascii()
        self.escapes = b"\\" in self.raw

    @cached_property
    def quotes(self) -> np.ndarray:
        """Where quotes are that no backslash escapes."""
        quotes = self.places(QUOTE)
        return quotes[~_escaped(self.bytes, quotes)] if self.escapes else quotes

    @cached_property
    def newlines(self) -> np.ndarray | None:
        """Where newlines are; None where there are other control characters."""
        found = self._where(np.less, 0x20)
        return None if (self.bytes[found] != _NEWLINE).any() else found

    def places(self, sign: int) -> np.ndarray:
        """Where a byte is."""
        return self._where(np.equal, sign)

    def _where(self, compare: np.ufunc, sign: int) -> np.ndarray:
        """In pieces that fit into a core's cache."""
        fits, found = np.empty(_PIECE, bool), []
        for start in range(0, len(self.bytes), _PIECE):
            piece = self.bytes[start : start + _PIECE]
            places = np.flatnonzero(compare(piece, sign, out=fits[: len(piece)]))
            found.append(places.astype(np.int32))
            found[-1] += start
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def windows(self, width: int) -> np.ndarray:
        """So many bytes at each place, as texts."""
        return np.ndarray((len(self.raw) - width + 1,), f"S{width}", self.raw, strides=(1,))

    def at(self, places: np.ndarray, width: int) -> np.ndarray:
        """So many bytes at some places; places too near to the end are moved into the padding."""
        found: np.ndarray = self.windows(width)[np.minimum(places, len(self.raw) - width)]
        return found

    def slices(self, starts: np.ndarray, ends: np.ndarray, kind: pa.DataType) -> pa.Array:
        """The bytes between ascending places: every other one of the pieces that all places make."""
        width = int(ends[0] - starts[0]) if len(starts) else 0
        if 0 < width <= 64 and (ends - starts == width).all():
            return self._even_slices(starts, width, kind)
        offsets = np.empty(2 * len(starts) + 1, np.int32)
        offsets[0:-1:2], offsets[1::2] = starts, ends
        offsets[-1] = ends[-1] if len(ends) else 0
        n = len(offsets) - 1
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self.bytes)]
        every_other = pa.py_buffer(np.full(n // 8 + 1, 0b01010101, np.uint8))
        wanted = pa.BooleanArray.from_buffers(pa.bool_(), n, [None, every_other])
        return pa.Array.from_buffers(kind, n, buffers).filter(wanted)

    def _even_slices(self, starts: np.ndarray, width: int, kind: pa.DataType) -> pa.Array:
        ends = pa.py_buffer(np.arange(0, width * len(starts) + 1, width, dtype=np.int32))
        data = pa.py_buffer(self.windows(width)[starts])
        return pa.Array.from_buffers(kind, len(starts), [None, ends, data])

    def marked(self, begin: np.ndarray, end: np.ndarray, marks: np.ndarray) -> pa.Buffer:
        """The block with marks in place of what is between places, which must be longer."""
        width = marks.shape[-1]
        starts, ends = np.append(0, end), np.append(begin + width, len(self.bytes))
        lengths = ends - starts
        kept = self.slices(starts, ends, pa.binary()).buffers()[2]
        text = np.frombuffer(kept, np.uint8)[: int(lengths.sum())].copy()
        places = np.cumsum(lengths[:-1]) - width
        text[places[:, None] + np.arange(width)] = marks
        return pa.py_buffer(text)

    def text(self, starts: np.ndarray, ends: np.ndarray) -> pa.StringArray:
        """The text between ascending places, unescaped."""
        found = self.slices(starts, ends, pa.string() if self.ascii else pa.binary())
        found = found.cast(pa.string())  # where it is not ASCII, this checks that it is UTF-8
        if not self.escapes:
            return found
        marked = pc.match_substring(found, "\\")
        if not pc.any(marked).as_py():
            return found
        plain = [orjson.loads(f'"{text}"') for text in found.filter(marked).to_pylist()]
        return pc.replace_with_mask(found, marked, pa.array(plain, pa.string()))


def _escaped(data: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Which places stand behind an odd number of backslashes."""
    odd = np.zeros(len(places), bool)
    at, rows = places - 1, np.arange(len(places))
    while len(rows):
        more = (at >= 0) & (data[at] == _BACKSLASH)
        rows, at = rows[more], at[more] - 1
        odd[rows] ^= True
    return odd


def booleans(texts: pa.StringArray) -> pa.BooleanArray:
    """Texts true and false as booleans; ArrowInvalid for any other."""
    if not pc.all(pc.is_in(texts, value_set=pa.array(["true", "false"]))).as_py():
        raise pa.ArrowInvalid("neither true nor false")
    return pc.equal(texts, "true")
