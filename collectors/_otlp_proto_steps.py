"""How one field of a protobuf span is written, and how many fields written so are read at once.

Exporters write the spans of one kind of work alike: the same fields and keys in the same order. A field that
was read byte by byte is a step for all others of its kind: its tags, keys and the widths of its lengths are
fixed bytes, compared eight at a time; between them are the values. Every length must fit and every byte must be
accounted for, so that a field that opentelemetry-proto does not know cannot be overlooked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

import numpy as np

from pdtrace.records import dataclass

from ._otlp_attributes import BOOL, DOUBLE, INT, OTHER, STRING
from ._otlp_bytes import Block
from ._otlp_decoders import MESSAGES

LONGEST = 1000  # fixed bytes of one step
PADDING = bytes(LONGEST + 64)
_WIDEST = 4  # bytes of a length
_VARINT, _EIGHT, _LEN, _FOUR = 0, 1, 2, 5
_TOP = np.uint64(0x8080808080808080)


class Unsuitable(Exception):
    """A field that is no step for others."""


class Wire(Block):
    """The bytes of some messages and the padding behind them."""

    def __init__(self, messages: list[bytes]) -> None:
        self.raw = b"".join([*messages, PADDING])
        self.bytes = np.frombuffer(self.raw, np.uint8)
        self.ascii = self.escapes = False

    def looks(self, at: np.ndarray, words: int) -> np.ndarray:
        """So many times eight bytes at some places, as numbers."""
        # As texts: from places that are no multiple of eight numpy takes numbers half as fast.
        found: np.ndarray = self.windows(8 * words)[at].view("<u8").reshape(len(at), words)
        return found

    def words(self, at: np.ndarray) -> np.ndarray:
        """Eight bytes at some places, as numbers."""
        return self.looks(at, 1)[:, 0]

    def varints(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers at some places, their bytes, and which of them are written as short as can be."""
        word = self.words(at)
        stop = ~word & _TOP
        stop &= -stop  # the highest bit of the last byte
        value = word & (stop - np.uint64(1)) & ~_TOP
        for shift, low in ((1, 0x007F007F007F007F), (2, 0x00003FFF00003FFF), (4, 0x0FFFFFFF)):
            kept = value & np.uint64(low)
            value = kept | (value - kept) >> np.uint64(shift)
        size = np.ones(len(at), np.int64)
        for bits in range(7, 7 * int(_bytes_of(value.max(initial=0))), 7):
            size += value >= np.uint64(1 << bits)
        short = stop == np.uint64(1) << (size.astype(np.uint64) * np.uint64(8) - np.uint64(1))
        rows = np.flatnonzero(stop == 0)
        if len(rows):  # more than eight bytes
            ninth, tenth = (self.bytes[at[rows] + n].astype(np.uint64) for n in (8, 9))
            goes_on = ninth > 0x7F
            value[rows] |= (ninth & np.uint64(0x7F)) << np.uint64(56)
            value[rows] |= np.where(goes_on, tenth, np.uint64(0)) << np.uint64(63)
            size[rows] = np.where(goes_on, 10, 9)
            short[rows] = np.where(goes_on, tenth == 1, ninth > 0)
        return value.view(np.int64), size, short


def _bytes_of(value: int) -> int:
    return max(1, -(-int(value).bit_length() // 7))


# ---- what a step is ------------------------------------------------------------------------------


@dataclass
class Fixed:
    """Bytes that are the same in all, but for the lengths among them: (offset, bytes) of each."""

    words: list[tuple[np.uint64, np.uint64]]  # mask and wanted, eight bytes each
    lengths: list[tuple[int, int]]
    size: int


@dataclass(frozen=True)
class Hole:
    """A value: text, number, flag, eight or four bytes; `limit`: numbers below are taken."""

    kind: str
    limit: int = 0


CLOSE = "close"  # the innermost message ends here

# Where a text starts and ends; a number; where eight or four bytes start.
Values = list[tuple[np.ndarray, np.ndarray] | np.ndarray]


@dataclass
class Item:
    """What a step gives to a span, an event or a link: numbers of values by field, and pairs."""

    fields: dict[str, int] = field(default_factory=dict)
    pairs: list[tuple[str, int, int, int]] = field(default_factory=list)  # key, kind, form, value


@dataclass
class Step:
    """One field of a span: `level` says whether it is the span's own, an event or a link."""

    name: str  # empty where the field may come again
    level: str
    item: Item
    parts: list[Fixed | Hole | str]

    def take(
        self, wire: Wire, at: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Values]:
        """(which of the places have this field, where it ends in those, its values in those)."""
        state = _State(wire, at, ends)
        for part in self.parts:
            if part == CLOSE:
                fits = state.at == state.open.pop()
            elif isinstance(part, Fixed):
                fits = state.fixed(part)
            else:
                assert isinstance(part, Hole)
                fits = state.hole(part)
            state.keep(fits)
            if not len(state.at):
                break
        state.keep(state.at <= state.ends)
        return state.rows, state.at, state.values


class _State:
    """Where each of many spans is while a step is taken."""

    def __init__(self, wire: Wire, at: np.ndarray, ends: np.ndarray) -> None:
        self._wire, self.at, self.ends = wire, at, ends
        self.rows = np.arange(len(at))
        self.open: list[np.ndarray] = []
        self.values: Values = []

    def keep(self, fits: np.ndarray) -> None:
        """Go on with some of them."""
        if fits.all():
            return
        self.rows, self.at, self.ends = self.rows[fits], self.at[fits], self.ends[fits]
        self.open = [ends[fits] for ends in self.open]
        self.values = [
            (v[0][fits], v[1][fits]) if isinstance(v, tuple) else v[fits] for v in self.values
        ]

    def fixed(self, part: Fixed) -> np.ndarray:
        at = self.at
        found = self._wire.looks(at, len(part.words))
        fits = np.ones(len(at), bool)
        for column, (mask, word) in enumerate(part.words):
            look = found[:, column]
            fits &= (look if mask == _ALL else look & mask) == word
        for offset, width in part.lengths:
            length = _byte(found, offset)
            for more in range(1, width):
                length |= _byte(found, offset + more) << np.uint64(7 * more)
            if width > 1:
                fits &= length >= np.uint64(1 << 7 * (width - 1))
            self.open.append(length.view(np.int64) + (at + (offset + width)))
        self.at = at + part.size
        return fits

    def hole(self, part: Hole) -> np.ndarray:
        at = self.at
        if part.kind == "text":
            self.at = self.open.pop()
            self.values.append((at, self.at))
            return self.at <= self.ends
        if part.kind in ("eight", "four"):
            self.at = at + (8 if part.kind == "eight" else 4)
            self.values.append(at)
            return self.at <= self.ends
        number, size, fits = self._wire.varints(at)
        self.at = at + size
        self.values.append(number)
        if part.limit:
            fits &= (number >= 0) & (number < part.limit)
        return fits & (self.at <= self.ends)


_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


def _byte(words: np.ndarray, offset: int) -> np.ndarray:
    """A byte of a length, without the bit that says whether it goes on."""
    found: np.ndarray = words[:, offset // 8] >> np.uint64(8 * (offset % 8)) & np.uint64(0x7F)
    return found


# ---- steps from examples -------------------------------------------------------------------------

_WIRES = {"string": _LEN, "bytes": _LEN, "fixed64": _EIGHT, "double": _EIGHT, "fixed32": _FOUR}
_LIMITS = {"int32": 1 << 31, "uint32": 1 << 32, "bool": 2, "int64": 0}
_LEVELS = {"Event": "events", "Link": "links"}
_KINDS = {"stringValue": STRING, "intValue": INT, "doubleValue": DOUBLE, "boolValue": BOOL}


def _layout(members: str) -> dict[int, tuple[str, str]]:
    parts = (line.split() for line in members.split(","))
    return {int(number): (kind, name) for kind, name, number in parts}


_LAYOUTS = {name: _layout(members) for name, members in MESSAGES.items()}


def step_of(data: bytes, at: int, end: int) -> Step | None:
    """The step of the field that starts at a place of a span; None where it has anything that is rare."""
    try:
        return _Example(data, at, end).step()
    except (Unsuitable, UnicodeDecodeError):
        return None


class _Example:
    """Reads one field of a span."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self._data, self._at, self._end = data, at, end
        self._fixed_from = at
        self._lengths: list[tuple[int, int]] = []
        self._parts: list[Fixed | Hole | str] = []
        self._holes = 0
        self._fixed_bytes = 0

    def step(self) -> Step:
        kind, name = self._member("Span")
        item, level = Item(), "spans"
        if kind.endswith("*") and kind != "Pair*":
            level = _LEVELS[kind[:-1]]
            self._message(kind[:-1], item, "")
        else:
            self._field(kind, name, item, "")
        self._cut()
        if self._fixed_bytes > LONGEST:
            raise Unsuitable
        return Step("" if kind.endswith("*") else name, level, item, self._parts)

    def _member(self, message: str) -> tuple[str, str]:
        """Type and name of the field whose tag comes next."""
        tag = self._varint()
        kind, name = _LAYOUTS[message].get(tag >> 3, ("", ""))
        if not kind or tag & 7 != _wire_of(kind):
            raise Unsuitable
        return kind, name

    def _field(self, kind: str, name: str, item: Item, prefix: str) -> None:
        if kind == "Pair*":
            self._pair(item)
        elif kind in MESSAGES:
            self._message(kind, item, f"{name}.")
        elif prefix + name in item.fields:
            raise Unsuitable  # the last one counts
        else:
            item.fields[prefix + name] = self._scalar(kind)

    def _message(self, kind: str, item: Item, prefix: str) -> None:
        for _ in self._inside():
            self._field(*self._member(kind), item, prefix)

    def _pair(self, item: Item) -> None:
        """{key, value}, in this order."""
        key, value = None, None
        for _ in self._inside():
            _, name = self._member("Pair")
            if name == "key" and key is None:
                size = self._varint()
                key = self._data[self._at : self._at + size].decode()
                self._at += size
            elif name == "value" and key is not None and value is None:
                value = self._value()
            else:
                raise Unsuitable
        if key is None or value is None:
            raise Unsuitable
        item.pairs.append((key, *value))

    def _value(self) -> tuple[int, int, int]:
        """Kind, field and number of the value."""
        found: tuple[int, int, int] | None = None
        for _ in self._inside():
            if found is not None:
                raise Unsuitable
            form = self._data[self._at] >> 3
            kind, name = self._member("Value")
            found = _KINDS.get(name, OTHER), form, self._scalar(kind)
        if found is None:
            raise Unsuitable
        return found

    def _scalar(self, kind: str) -> int:
        wire = _wire_of(kind)
        if wire == _LEN:
            end = self._length()
            self._cut()
            self._hole(Hole("text"), end - self._at)
        elif wire == _VARINT:
            self._cut()
            before = self._at
            self._varint()
            self._at, size = before, self._at - before
            self._hole(Hole("number", _LIMITS[kind]), size)
        else:
            self._cut()
            self._hole(*((Hole("eight"), 8) if wire == _EIGHT else (Hole("four"), 4)))
        return self._holes - 1

    def _hole(self, hole: Hole, size: int) -> None:
        self._parts.append(hole)
        self._holes += 1
        self._at += size
        self._fixed_from = self._at
        if self._at > self._end:
            raise Unsuitable

    def _inside(self) -> Iterator[None]:
        """Once for each field of a message; the caller reads it."""
        end = self._length()
        while self._at < end:
            yield
        if self._at != end:
            raise Unsuitable
        self._cut()
        self._parts.append(CLOSE)

    def _length(self) -> int:
        """Read a length; where it ends what it is the length of."""
        before = self._at
        size = self._varint()
        if self._at - before > _WIDEST or self._at + size > self._end:
            raise Unsuitable
        self._lengths.append((before - self._fixed_from, self._at - before))
        return self._at + size

    def _varint(self) -> int:
        value = shift = 0
        while True:
            if self._at >= self._end or shift > 63:
                raise Unsuitable
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if not byte and shift > 7:
                    raise Unsuitable
                return value

    def _cut(self) -> None:
        """The fixed bytes since the last value."""
        text = self._data[self._fixed_from : self._at]
        if text:
            self._parts.append(_fixed(text, self._lengths))
        self._fixed_bytes += len(text)
        self._fixed_from, self._lengths = self._at, []


def _wire_of(kind: str) -> int:
    return _LEN if kind.endswith("*") or kind in MESSAGES else _WIRES.get(kind, _VARINT)


def _fixed(text: bytes, lengths: list[tuple[int, int]]) -> Fixed:
    """Bytes to compare, eight at a time; of a length only whether it goes on."""
    mask = bytearray(b"\xff" * len(text))
    for offset, width in lengths:
        mask[offset : offset + width] = b"\x80" * width
    wanted = bytes(a & b for a, b in zip(text, mask, strict=True))
    words = [
        (_word(mask[at : at + 8]), _word(wanted[at : at + 8])) for at in range(0, len(text), 8)
    ]
    return Fixed(words, lengths, len(text))


def _word(text: bytes | bytearray) -> np.uint64:
    return np.uint64(int.from_bytes(text, "little"))
