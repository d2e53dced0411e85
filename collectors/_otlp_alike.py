"""Spans of a block of OTLP/JSON lines that are written alike, found without parsing them.

A quote that no backslash escapes cannot stand inside a text, so in spans of one pattern the same
values lie between the same quotes, counted from the first. Where the distances of quotes fit, every
fixed byte is compared; what is between them are the values. What matches no pattern stays for the
parser.
"""

from __future__ import annotations

import re
from threading import Lock

import numpy as np
import pyarrow as pa

from pdtrace.records import dataclass

from ._otlp_bytes import Block
from ._otlp_pattern import Pattern, Place, pattern_of

LEAST_SPANS = 2500  # in a block, and in need of a pattern: for fewer the parser is as quick
LEAST_ALIKE = 100  # spans of a block that go together
MOST_PATTERNS = 64  # of one file: where each line is a span, each is tried on all that are left
MOST_FAILURES = 8  # patterns in a block that were not worth it; four times as many in a file
SAMPLE = 1000  # spans of a block among which are those with the same keys
LEAST_SAMPLE, MOST_SAMPLE = 16, 64  # of them, to tell which values they have in common

_FIRST_SPAN = re.compile(rb'"spans": ?\[(\{"[^"\\]{1,40}")')
_LITERAL_QUOTE = re.compile(rb'\\.|(")')
_NUMBER_BYTES = 32
_BETWEEN = np.frombuffer(b", ", np.uint8)  # what stands before a span that is not the first
_FIRST_CHECKS = 4  # distances looked at before all are


class _Way:
    """A pattern by its quotes: which of them are where in a span, counted from its first."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        quotes = [
            [found.start() for found in _LITERAL_QUOTE.finditer(text) if found.group(1)]
            for text in pattern.literals
        ]
        before = np.cumsum([0, *map(len, quotes)])
        self.count = int(before[-1])
        # A value ends so many bytes before the first quote behind it; the last may have none there.
        self.open_end = bool(pattern.holes) and not quotes[-1]
        closed = len(pattern.holes) - self.open_end
        self.fits = all(quotes[1 : closed + 1])
        self.next_quote = before[1 : closed + 1]
        self.distance = np.array([q[0] for q in quotes[1 : closed + 1] if q], np.int64)
        checks = [(before[n], before[n + 1] - 1, q[-1] - q[0]) for n, q in enumerate(quotes) if q]
        self.first, self.last, self.gap = np.array(checks).T
        self.widths = np.array([len(text) for text in pattern.literals], np.int32)
        self.fixed = np.frombuffer(b"".join(pattern.literals), np.uint8)


class Patterns:
    """The patterns of one file; several threads use and extend them.

    Of spans with the same keys most have some values in common too. Those are fixed bytes of the
    `usual` pattern; the `open` one is for the others.
    """

    def __init__(self) -> None:
        self._usual: list[_Way] = []
        self._open: list[_Way] = []
        self._known: set[tuple[bytes, ...]] = set()
        self._failures = 0
        self._lock = Lock()

    def ways(self) -> list[_Way]:
        """All patterns, those with more fixed bytes first."""
        return [*self._usual, *self._open]

    def add(self, pattern: Pattern, usual: Pattern) -> _Way:
        """Take in a pattern: its usual form, and when that is there already its open one."""
        with self._lock:
            name = tuple(pattern.literals)
            ways, wanted = (self._open, pattern) if name in self._known else (self._usual, usual)
            self._known.add(name)
            ways.append(_Way(wanted))
            return ways[-1]

    def failed(self) -> None:
        """Count a pattern that was not worth it."""
        with self._lock:
            self._failures += 1

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._usual) + len(self._open)

    def state(self) -> tuple[list[Pattern], list[Pattern], set[tuple[bytes, ...]]]:
        """All of this, for another process that reads the same file."""
        with self._lock:
            usual, others = ([way.pattern for way in ways] for ways in (self._usual, self._open))
            return usual, others, set(self._known)

    def adopt(self, state: tuple[list[Pattern], list[Pattern], set[tuple[bytes, ...]]]) -> None:
        """Take in the patterns of another process, unless this one has learned some itself."""
        usual, others, known = state
        with self._lock:
            if self._known <= known:
                self._usual, self._open = ([_Way(one) for one in ones] for ones in (usual, others))
                self._known = known

    @property
    def wanted(self) -> bool:
        """Whether more patterns may be looked for."""
        count = self.count
        return count < MOST_PATTERNS and self._failures < 4 * MOST_FAILURES + count


@dataclass
class Group:
    """Spans of a block that match a pattern."""

    pattern: Pattern
    rows: np.ndarray  # their numbers, ascending
    starts: np.ndarray
    values: np.ndarray  # where the values of each end, by hole

    def at(self, place: Place) -> np.ndarray:
        """Where a place of the pattern is in each span."""
        base = self.starts if place.hole < 0 else self.values[:, place.hole]
        found: np.ndarray = base + place.delta
        return found

    @property
    def ends(self) -> np.ndarray:
        """Where the spans end."""
        last = Place(len(self.pattern.holes) - 1, len(self.pattern.tail))
        return self.at(last)

    def some(self, mask: np.ndarray, rows: np.ndarray) -> Group:
        """Some of the spans, under other numbers."""
        return Group(self.pattern, rows, self.starts[mask], self.values[mask])


@dataclass
class Matches:
    """Spans that match a pattern: `starts` and `ends` of them all, and by pattern."""

    starts: np.ndarray
    ends: np.ndarray
    groups: list[Group]

    def kept(self, mask: np.ndarray) -> Matches:
        """Some of the spans."""
        number = np.cumsum(mask) - 1
        groups = [
            group.some(mask[group.rows], number[group.rows[mask[group.rows]]])
            for group in self.groups
        ]
        filled = [group for group in groups if len(group.rows)]
        return Matches(self.starts[mask], self.ends[mask], filled)


def matches(block: Block, patterns: Patterns) -> Matches | None:
    """The spans of a block that match a pattern; new patterns are made where many need one."""
    newlines = block.newlines
    if newlines is None:
        return None
    starts = _candidates(block)
    if len(starts) < LEAST_SPANS:
        return None
    groups = _Search(block, starts).groups(patterns)
    ends = np.zeros(len(starts), np.int64)
    for group in groups:
        ends[group.rows] = group.ends
    # None is broken by a newline, and none is inside another.
    whole = (ends > 0) & (np.searchsorted(newlines, starts) == np.searchsorted(newlines, ends))
    whole[1:] &= starts[1:] >= np.maximum.accumulate(np.where(whole, ends, 0))[:-1]
    if not whole.any():
        return None
    found = Matches(starts, ends, groups)
    return found if whole.all() else found.kept(whole)


def _candidates(block: Block) -> np.ndarray:
    """Where spans start, by the first key that the first one has."""
    first = _FIRST_SPAN.search(block.raw)
    if first is None:
        return np.empty(0, np.int64)
    opening = first.group(1)
    # Between its quotes there is no other: few pairs of quotes are so far apart.
    quotes = block.quotes
    places = quotes[:-1][np.diff(quotes) == len(opening) - 2].astype(np.int64) - 1
    places = places[places >= 0]
    found: np.ndarray = places[block.at(places, len(opening)) == opening]
    return found


class _Search:
    """Looks for the patterns of the spans that may start at some places."""

    def __init__(self, block: Block, starts: np.ndarray) -> None:
        self._block, self._starts = block, starts
        # Both with 32 bits: a search would copy the quotes, a million in a block, to have them alike.
        self._quotes = np.append(block.quotes, np.int32(len(block.raw) - 1))
        self._base = np.searchsorted(self._quotes, starts.astype(np.int32))
        # Quotes up to the next start, which are the span's own unless it is the last of its list or
        # has a list of links, which start like spans.
        self._counts = np.diff(self._base, append=len(self._quotes))
        between = np.append(starts[1:] - 1, 0)
        self._last = ~np.isin(block.bytes[between], _BETWEEN)

    def groups(self, patterns: Patterns) -> list[Group]:
        """The spans of each pattern."""
        found: list[Group] = []
        left = np.arange(len(self._starts))
        for way in patterns.ways():
            if len(left) < LEAST_ALIKE:
                break
            left = self._take(way, left, found)
        failures = 0
        while len(left) >= LEAST_SPANS and failures < MOST_FAILURES and patterns.wanted:
            example, before = left[len(left) // 2], len(left)  # of a common kind, probably
            pattern = pattern_of(self._block.raw, int(self._starts[example]))
            if pattern is not None and _Way(pattern).fits:
                usual = self._usual(pattern, left)
                left = self._take(patterns.add(pattern, usual), left, found)
            if before - len(left) < LEAST_ALIKE:
                failures += 1
                patterns.failed()
                left = left[left != example]
        return found

    def _take(self, way: _Way, left: np.ndarray, found: list[Group]) -> np.ndarray:
        """Note the spans of a pattern; returns the others."""
        group = self._match(way, left)
        if len(group.rows) < LEAST_ALIKE:
            return left
        found.append(group)
        mask = np.ones(len(self._starts), bool)
        mask[group.rows] = False
        others: np.ndarray = left[mask[left]]
        return others

    def _match(self, way: _Way, left: np.ndarray) -> Group:
        """The spans whose distances of quotes and then all of whose fixed bytes are the pattern's."""
        rows = left[(self._counts[left] == way.count) | self._last[left]]
        few = slice(None, None, max(1, len(way.gap) // _FIRST_CHECKS))
        for checks in (few, slice(None)):
            base = self._base[rows][:, None]
            gaps = self._quote(base + way.last[checks]) - self._quote(base + way.first[checks])
            rows = rows[(gaps == way.gap[checks]).all(axis=1)]
        values = self._values(way, rows)
        found = Group(way.pattern, rows, self._starts[rows], values)
        same = self._same(way, rows, values)
        return found if same.all() else found.some(same, rows[same])

    def _quote(self, numbers: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._quotes[np.minimum(numbers, len(self._quotes) - 1)]
        return found

    def _values(self, way: _Way, rows: np.ndarray) -> np.ndarray:
        """Where the values end, by span and hole."""
        numbers = self._base[rows][:, None] + way.next_quote
        ends: np.ndarray = self._quote(numbers) - way.distance
        if not way.open_end:
            return ends
        hole = way.pattern.holes[-1]
        start = (ends[:, -1] if ends.shape[1] else self._starts[rows]) + len(hole.literal)
        window = self._block.at(start, _NUMBER_BYTES).view(np.uint8).reshape(-1, _NUMBER_BYTES)
        return np.column_stack((ends, start + (window == hole.closing).argmax(axis=1)))

    def _same(self, way: _Way, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Which spans have all fixed bytes of a pattern."""
        starts = np.column_stack((self._starts[rows], values))
        np.minimum(starts, len(self._block.raw) - way.widths, out=starts)
        ends = starts + way.widths
        fixed = self._block.slices(starts.ravel(), ends.ravel(), pa.binary())
        found = np.frombuffer(fixed.buffers()[2] or b"", np.uint8)[: len(rows) * len(way.fixed)]
        same: np.ndarray = (found.reshape(len(rows), len(way.fixed)) == way.fixed).all(axis=1)
        return same

    def _usual(self, pattern: Pattern, left: np.ndarray) -> Pattern:
        """The pattern with the values that some spans of the block have in common."""
        group = self._match(_Way(pattern), left[:: max(1, len(left) // SAMPLE)])
        if len(group.rows) < LEAST_SAMPLE:
            return pattern
        fixed: dict[int, bytes] = {}
        before = group.starts
        for number, hole in enumerate(pattern.holes):
            begin, end = before + len(hole.literal), group.values[:, number]
            values = {
                self._block.raw[a:b]
                for a, b in zip(begin[:MOST_SAMPLE], end[:MOST_SAMPLE], strict=True)
            }
            if len(values) == 1:
                fixed[number] = values.pop()
            before = group.values[:, number]
        usual = pattern.with_fixed(fixed)
        return usual if usual.holes and _Way(usual).fits else pattern
