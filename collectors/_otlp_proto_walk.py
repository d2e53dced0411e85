"""Trace requests of protobuf: where their spans are, and the spans read many at a time.

All spans of a block take the same step at once (_otlp_proto_steps.py); where they part, each kind goes on with
its own steps. What takes no known step and is too rare for a new one is left for the general way, with the
resources and scopes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from threading import Lock

import numpy as np

from pdtrace.records import dataclass

from ._otlp_proto_steps import Step, Values, Wire, step_of
from ._otlp_wire import varint

LEAST_ALIKE = 100  # spans at one place: for fewer the general way is as quick
MOST_STEPS = 4096  # of one file
MOST_BRANCHES = 64  # at one place
_SPAN = 0x12  # the tag of field 2: a scope in a resource, a span in a scope


# ---- where spans are -----------------------------------------------------------------------------


@dataclass
class Outline:
    """Where the spans of some messages are, by scope; and the rest of each message, without spans."""

    starts: np.ndarray
    ends: np.ndarray
    scope: np.ndarray  # number of the scope of each
    messages: list[_Outer]

    def rest(self, data: bytes, left: np.ndarray) -> list[bytes]:
        """The messages with no spans but those of a mask."""
        numbers = np.flatnonzero(left)
        by_scope: dict[int, list[bytes]] = {}
        for number in numbers:
            span = data[self.starts[number] : self.ends[number]]
            by_scope.setdefault(int(self.scope[number]), []).append(_field(_SPAN, span))
        return [b"".join(message.text(by_scope)) for message in self.messages]


@dataclass
class _Outer:
    """A request, a ResourceSpans or a ScopeSpans: its other fields, and the messages inside."""

    others: list[bytes] = field(default_factory=list)
    inner: list[_Outer] = field(default_factory=list)
    scope: int = -1

    def text(self, spans: dict[int, list[bytes]]) -> Iterator[bytes]:
        yield from self.others
        tag = 0x0A if self.inner and self.inner[0].scope < 0 else _SPAN
        for message in self.inner:
            yield _field(tag, b"".join(message.text(spans)))
        yield from spans.get(self.scope, ())


def _field(tag: int, payload: bytes) -> bytes:
    size, head = len(payload), bytearray((tag,))
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + payload


def outline(messages: list[bytes], wire: Wire) -> Outline | None:
    """Where the spans are, all messages one behind the other; None where there is anything unusual."""
    heads: list[int] = []
    counts: list[int] = []
    found = []
    at = 0
    try:
        for message in messages:
            end = at + len(message)
            found.append(_request(wire.raw, at, end, heads, counts))
            at = end
    except (ValueError, IndexError):
        return None
    behind_tag = np.array(heads, np.int64) + 1
    length, width, _ = wire.varints(behind_tag)
    starts = behind_tag + width
    scope = np.repeat(np.arange(len(counts)), counts)
    return Outline(starts, starts + length, scope, found)


def _request(data: bytes, at: int, end: int, heads: list[int], counts: list[int]) -> _Outer:
    request = _Outer()
    for _, begin, stop in _parts(data, at, end, (0x0A,)):
        resource = _Outer()
        request.inner.append(resource)
        for tag, inner, inner_end in _parts(data, begin, stop, (0x0A, _SPAN, 0x1A)):
            if tag != _SPAN:
                resource.others.append(_field(tag, data[inner:inner_end]))
                continue
            scope = _Outer(scope=len(counts))
            resource.inner.append(scope)
            before = len(heads)
            _spans(data, inner, inner_end, scope, heads)
            counts.append(len(heads) - before)
    return request


def _parts(data: bytes, at: int, end: int, tags: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(tag, start, end) of the fields of a message, which must be these."""
    while at < end:
        tag = data[at]
        if tag not in tags:
            raise ValueError
        size, at = varint(data, at + 1)
        if at + size > end:
            raise ValueError
        yield tag, at, at + size
        at += size


def _spans(data: bytes, at: int, end: int, scope: _Outer, heads: list[int]) -> None:
    """Note where the spans of a scope begin: the one loop over spans."""
    note = heads.append
    while at < end:
        tag = data[at]
        if tag == _SPAN:
            note(at)
        elif tag not in (0x0A, 0x1A):
            raise ValueError
        size, second = data[at + 1], data[at + 2]
        if size < 0x80:
            stop = at + 2 + size
        elif second < 0x80:
            stop = at + 3 + (size & 0x7F) + (second << 7)
        else:
            size, start = varint(data, at + 1)
            stop = start + size
        if tag != _SPAN and stop <= end:
            scope.others.append(data[at:stop])
        at = stop
    if at != end:
        raise ValueError


# ---- spans, many at a time -----------------------------------------------------------------------


@dataclass
class Place:
    """Where spans are that have taken the same steps: what may follow, and what is known of them."""

    number: int
    step: Step | None = None  # the last one
    fields: frozenset[str] = frozenset()
    pairs: tuple[tuple[str, int], ...] = ()  # key and kind of the span's own attributes so far
    before: tuple[int, int, int] = (0, 0, 0)  # own pairs, events and links before the last step
    events: int = 0
    links: int = 0
    ways: list[Place] = field(default_factory=list)


@dataclass
class Taken:
    """A step that spans took: which (by number), and the values."""

    place: Place
    rows: np.ndarray
    values: Values


class Steps:
    """The steps of one file; several threads use and extend them."""

    def __init__(self) -> None:
        self._root = Place(0)
        self.places = [self._root]
        self._lock = Lock()
        self._seen = self._read = 0

    @property
    def worth(self) -> bool:
        """Whether most of the spans so far could be read so."""
        return self._seen < 50_000 or 2 * self._read > self._seen

    def count(self, seen: int, read: int) -> None:
        """Note how many spans of a block could be read."""
        with self._lock:
            self._seen += seen
            self._read += read

    def walk(
        self, wire: Wire, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, list[Taken]]:
        """(the number of the last place of each span, -1 where it was not reached; all steps taken)."""
        last = np.full(len(starts), -1, np.int64)
        taken: list[Taken] = []
        waiting = [(self._root, np.arange(len(starts)), starts)]
        while waiting:
            place, rows, at = waiting.pop()
            over = at == ends[rows]
            if over.any():
                last[rows[over]] = place.number
                rows, at = rows[~over], at[~over]
            tried = 0
            while len(rows) >= LEAST_ALIKE:
                if tried == len(place.ways) and not self._extend(
                    place, wire, at[len(at) // 2], ends[rows[len(at) // 2]], tried
                ):
                    break
                way = place.ways[tried]
                tried += 1
                assert way.step is not None
                found, behind, values = way.step.take(wire, at, ends[rows])
                if not len(found):
                    continue
                took = rows if len(found) == len(rows) else rows[found]
                taken.append(Taken(way, took, values))
                waiting.append((way, took, behind))
                if len(found) == len(rows):
                    rows = rows[:0]
                    break
                left = np.ones(len(rows), bool)
                left[found] = False
                rows, at = rows[left], at[left]
        return last, taken

    def _extend(self, place: Place, wire: Wire, at: int, end: int, known: int) -> bool:
        """A way on from a place, by an example; False where there is none."""
        step = step_of(wire.raw, int(at), int(end))
        if step is None or not len(step.take(wire, np.array([at]), np.array([end]))[0]):
            return False
        with self._lock:
            if len(place.ways) > known:
                return True  # by another thread
            if known >= MOST_BRANCHES or len(self.places) >= MOST_STEPS:
                return False
            way = _behind(place, step, len(self.places))
            if way is None:
                return False
            self.places.append(way)
            place.ways.append(way)
        return True


def _behind(place: Place, step: Step, number: int) -> Place | None:
    """The place behind a step; None where a field comes again."""
    before = len(place.pairs), place.events, place.links
    if step.level != "spans":
        events = place.events + (step.level == "events")
        links = place.links + (step.level == "links")
        return Place(number, step, place.fields, place.pairs, before, events, links)
    if step.name in place.fields:
        return None
    fields = place.fields | ({step.name} - {""})
    pairs = place.pairs + tuple((key, kind) for key, kind, _, _ in step.item.pairs)
    return Place(number, step, fields, pairs, before, place.events, place.links)
