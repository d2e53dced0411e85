"""How one OTLP/JSON span is written: its fixed bytes, the values between them, and what those are.

Exporters write the spans of one kind of work alike: the same fields and keys in the same order. So
one span that was read byte by byte is a pattern; others match it when all bytes between the values
are the same, and then their values are found without parsing (_otlp_alike.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import field, replace

import orjson

from pdtrace.records import dataclass

from ._otlp_attributes import BOOL, DOUBLE, INT, OTHER, STRING

_TEXT = re.compile(rb'"((?:[^"\\\x00-\x1f]|\\.)*)"')
_BARE = re.compile(rb"[-+.\w]+")
_BLANKS = re.compile(rb" *")
QUOTE = 0x22


class Unsuitable(Exception):
    """A span that is no pattern for others."""


@dataclass(frozen=True)
class Hole:
    """The fixed bytes before a value, and the byte at which the value ends."""

    literal: bytes
    closing: int
    usual_bytes: int = field(compare=False)  # of the value in the first span of its kind

    @property
    def quoted(self) -> bool:
        """Whether the value is a text."""
        return self.closing == QUOTE


@dataclass(frozen=True)
class Place:
    """A place in a span: so many bytes behind the end of a value (-1: behind the span's start)."""

    hole: int
    delta: int


@dataclass(frozen=True)
class Value:
    """Where a value starts and ends; `hole`: its number, for a single text or number."""

    start: Place
    end: Place
    hole: int | None = None
    quoted: bool = False
    fixed: bytes | None = None  # what all spans of the pattern have

    def moved(self, ends: dict[int, Place], values: dict[int, bytes]) -> Value:
        """The value where some holes have become fixed bytes; `ends`: where each ends now."""
        start, end = (
            Place(ends[old.hole].hole, ends[old.hole].delta + old.delta)
            for old in (self.start, self.end)
        )
        fixed = None if self.hole is None else values.get(self.hole)
        return replace(self, start=start, end=end, fixed=fixed)


@dataclass
class Item:
    """A span, an event or a link: where its fields are, and its attributes in their order."""

    fields: dict[str, Value] = field(default_factory=dict)
    pairs: list[tuple[str, int, Value]] = field(default_factory=list)  # key, kind, value

    def moved(self, ends: dict[int, Place], values: dict[int, bytes]) -> Item:
        """The same where some holes have become fixed bytes."""
        return Item(
            {name: value.moved(ends, values) for name, value in self.fields.items()},
            [(key, kind, value.moved(ends, values)) for key, kind, value in self.pairs],
        )


@dataclass
class Pattern:
    """A span as others are written too."""

    holes: list[Hole]
    tail: bytes  # behind the last value
    span: Item
    events: list[Item]
    links: list[Item]

    @property
    def literals(self) -> list[bytes]:
        """The fixed bytes before each value and behind the last."""
        return [*(hole.literal for hole in self.holes), self.tail]

    def items(self, level: str) -> list[Item]:
        """The span itself ("spans"), its events or its links."""
        return [self.span] if level == "spans" else getattr(self, level)

    def with_fixed(self, values: dict[int, bytes]) -> Pattern:
        """The pattern of those spans that have these values in these holes."""
        holes: list[Hole] = []
        ends = {-1: Place(-1, 0)}  # where the values end, by the holes that are left
        literal = b""
        for number, hole in enumerate(self.holes):
            literal += hole.literal
            if number in values:
                literal += values[number]
                ends[number] = Place(len(holes) - 1, len(literal))
            else:
                holes.append(replace(hole, literal=literal))
                ends[number], literal = Place(len(holes) - 1, 0), b""
        events, links = ([item.moved(ends, values) for item in self.items(n)] for n in _CHILDREN)
        return Pattern(holes, literal + self.tail, self.span.moved(ends, values), events, links)


_CHILDREN = ("events", "links")
_TEXT_FIELDS = {
    "spans": {"traceId", "spanId", "parentSpanId", "traceState", "name"},
    "events": {"name"},
    "links": {"traceId", "spanId", "traceState"},
}
_NUMBER_FIELDS = {
    "spans": {
        "kind",
        "startTimeUnixNano",
        "endTimeUnixNano",
        "flags",
        "droppedAttributesCount",
        "droppedEventsCount",
        "droppedLinksCount",
    },
    "events": {"timeUnixNano", "droppedAttributesCount"},
    "links": {"flags", "droppedAttributesCount"},
}
_NEEDED = {"traceId", "spanId", "name", "startTimeUnixNano"}


def pattern_of(text: bytes, at: int) -> Pattern | None:
    """The pattern of the span that starts at a place of a text.

    None where it has anything that is rare: then the general way takes it.
    """
    try:
        return _Example(text, at).pattern()
    except (Unsuitable, orjson.JSONDecodeError, RecursionError):
        return None


class _Example:
    """Reads one span from its first brace to its last."""

    def __init__(self, text: bytes, at: int) -> None:
        self._text = text
        self._at = at
        self._fixed_from = at  # behind the last value
        self._holes: list[Hole] = []
        self._levels: dict[str, list[Item]] = {"events": [], "links": []}

    def pattern(self) -> Pattern:
        span = Item()
        self._object(lambda name: self._member(name, span, "spans"))
        if not span.fields.keys() >= _NEEDED:
            raise Unsuitable
        tail = self._text[self._fixed_from : self._at]
        return Pattern(self._holes, tail, span, self._levels["events"], self._levels["links"])

    def _member(self, name: str, item: Item, level: str) -> None:
        if name in _TEXT_FIELDS[level]:
            item.fields[name] = self._quoted()
        elif name in _NUMBER_FIELDS[level]:
            item.fields[name] = self._number()
        elif name == "attributes":
            self._pairs(item)
        elif name == "status" and level == "spans":
            self._object(lambda inner: self._status(inner, item))
        elif name in self._levels and level == "spans":
            self._list(lambda: self._child(name))
        else:
            raise Unsuitable

    def _child(self, level: str) -> None:
        item = Item()
        self._object(lambda name: self._member(name, item, level))
        self._levels[level].append(item)

    def _status(self, name: str, item: Item) -> None:
        if name not in ("message", "code"):
            raise Unsuitable
        item.fields[f"status.{name}"] = self._quoted() if name == "message" else self._number()

    # ---- attributes ------------------------------------------------------------------------------

    def _pairs(self, item: Item) -> None:
        def pair() -> None:
            names: list[str] = []
            self._object(lambda name: self._part(name, names, item))
            if len(names) != 2:
                raise Unsuitable

        self._list(pair)

    def _part(self, name: str, before: list[str], item: Item) -> None:
        """A key, or the value behind it."""
        if name == "key" and not before:
            before.append(self._key())
        elif name == "value" and len(before) == 1:
            item.pairs.append((before[0], *self._any_value()))
            before.append(name)
        else:
            raise Unsuitable

    def _any_value(self) -> tuple[int, Value]:
        start, kinds, values = self._place(), list[int](), list[Value]()

        def member(name: str) -> None:
            kinds.append(_KINDS.get(name, OTHER))
            if name == "stringValue":
                values.append(self._quoted())
            elif name in _KINDS:
                values.append(self._number())
                if name == "boolValue" and values[-1].quoted:
                    raise Unsuitable
            elif name in ("arrayValue", "kvlistValue", "bytesValue"):
                self._anything()
            else:
                raise Unsuitable

        self._object(member)
        if len(kinds) > 1:
            raise Unsuitable
        if values:
            return kinds[0], values[0]
        return OTHER, Value(start, self._place())

    def _anything(self) -> None:
        """What is inside arrays and maps: any JSON, whose texts and numbers may differ."""
        self._skip_blanks()
        sign = self._text[self._at : self._at + 1]
        if sign == b"{":
            self._object(lambda _: self._anything())
        elif sign == b"[":
            self._list(self._anything)
        elif sign == b'"':
            self._quoted()
        else:
            self._bare()

    # ---- JSON ------------------------------------------------------------------------------------

    def _object(self, member: Callable[[str], None]) -> None:
        seen: set[str] = set()
        for _ in self._between(b"{", b"}"):
            name = self._key()
            if name in seen:
                raise Unsuitable
            seen.add(name)
            self._sign(b":")
            member(name)

    def _list(self, element: Callable[[], None]) -> None:
        for _ in self._between(b"[", b"]"):
            element()

    def _between(self, opening: bytes, closing: bytes) -> Iterator[None]:
        """Once for each element; the caller reads it."""
        self._sign(opening)
        self._skip_blanks()
        if self._text.startswith(closing, self._at):
            self._at += 1
            return
        while True:
            yield
            self._skip_blanks()
            if self._text.startswith(closing, self._at):
                self._at += 1
                return
            self._sign(b",")

    def _sign(self, sign: bytes) -> None:
        self._skip_blanks()
        if not self._text.startswith(sign, self._at):
            raise Unsuitable
        self._at += 1

    def _skip_blanks(self) -> None:
        found = _BLANKS.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _key(self) -> str:
        """A text that is the same in all spans of the pattern."""
        self._skip_blanks()
        found = _TEXT.match(self._text, self._at)
        if found is None:
            raise Unsuitable
        self._at = found.end()
        key: str = orjson.loads(found.group())
        return key

    def _number(self) -> Value:
        """A number, true or false; with quotes around it or without."""
        self._skip_blanks()
        return self._quoted() if self._text[self._at] == QUOTE else self._bare()

    def _quoted(self) -> Value:
        self._skip_blanks()
        found = _TEXT.match(self._text, self._at)
        if found is None:
            raise Unsuitable
        self._at = found.end()
        return self._hole(found.start(1), found.end(1))

    def _bare(self) -> Value:
        found = _BARE.match(self._text, self._at)
        if found is None or self._text[found.end() : found.end() + 1] not in (b",", b"}", b"]"):
            raise Unsuitable
        self._at = found.end()
        return self._hole(found.start(), found.end())

    def _hole(self, start: int, end: int) -> Value:
        before = Place(len(self._holes) - 1, start - self._fixed_from)
        literal = self._text[self._fixed_from : start]
        self._holes.append(Hole(literal, self._text[end], end - start))
        self._fixed_from = end
        number = len(self._holes) - 1
        return Value(before, Place(number, 0), number, self._text[end] == QUOTE)

    def _place(self) -> Place:
        self._skip_blanks()
        return Place(len(self._holes) - 1, self._at - self._fixed_from)


_KINDS = {"stringValue": STRING, "intValue": INT, "doubleValue": DOUBLE, "boolValue": BOOL}
