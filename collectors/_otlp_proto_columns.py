"""The values of protobuf spans that were read many at a time, as columns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from ._otlp_attributes import BOOL, DOUBLE, INT, OTHER, STRING, Ragged
from ._otlp_decoders import MESSAGES
from ._otlp_items import Items, Spans
from ._otlp_proto_steps import Wire
from ._otlp_proto_walk import Place, Taken
from ._otlp_values import array_text, decoded_list_text

_BYTES = {"traceId", "spanId", "parentSpanId"}
_ALWAYS = {
    "spans": ("traceId", "spanId", "name", "kind", "startTimeUnixNano", "endTimeUnixNano"),
    "events": ("timeUnixNano", "name"),
    "links": ("traceId", "spanId"),
}
_TYPES = {
    f"{prefix}{name}": kind
    for message, prefix in (("Span", ""), ("Event", ""), ("Link", ""), ("Status", "status."))
    for kind, name, _ in (line.split() for line in MESSAGES[message].split(","))
}
_TEXTS = {"string", "bytes"}
# How values of the rare forms are told as JSON, by their field.
_FORMS: dict[int, Callable[[bytes], str]] = {
    5: array_text,
    6: lambda item: decoded_list_text(item, maps=True),
    7: lambda item: array_text({"bytes": item}),
}


def columns(
    wire: Wire, starts: np.ndarray, last: np.ndarray, places: list[Place], taken: list[Taken]
) -> Spans:
    """The spans whose last place is known, in the order of the file.

    ArrowInvalid or ValueError where a text or a value is damaged.
    """
    read = last >= 0
    number = np.cumsum(read) - 1
    last, starts = last[read], starts[read]
    kept: list[Taken] = []
    for one in taken:
        fits = read[one.rows]
        rows, values = one.rows, one.values
        if not fits.all():
            rows = rows[fits]
            values = [(v[0][fits], v[1][fits]) if isinstance(v, tuple) else v[fits] for v in values]
        if len(rows):
            kept.append(Taken(one.place, number[rows], values))
    own = _Level("spans", wire, starts, len(last))
    own.pairs_of(places, last)
    levels = {"spans": own}
    for name in ("events", "links"):
        counts = np.array([getattr(place, name) for place in places], np.int64)[last]
        levels[name] = _Level(name, wire, np.repeat(starts, counts), len(last), counts)
    for name in ("events", "links"):
        levels[name].pairs_of_items([one for one in kept if _level(one) == name])
    for one in kept:
        levels[_level(one)].put(one)
    return Spans(*(level.items() for level in levels.values()))


def _level(one: Taken) -> str:
    assert one.place.step is not None
    return one.place.step.level


class _Level:
    """The spans themselves, their events or their links: the values of each, in the order of the file."""

    def __init__(
        self,
        name: str,
        wire: Wire,
        starts: np.ndarray,
        spans: int,
        counts: np.ndarray | None = None,
    ) -> None:
        self._name, self._wire, self._spans, self._starts = name, wire, spans, starts
        self._total = len(starts)
        self._owner = np.arange(spans) if counts is None else np.repeat(np.arange(spans), counts)
        self._first = None if counts is None else np.cumsum(counts) - counts
        self._fields: dict[str, np.ndarray] = {}  # starts and ends of texts, or numbers
        self._codes: dict[str, int] = {}

    # ---- attributes: how many of which kind each has ---------------------------------------------

    def pairs_of(self, places: list[Place], last: np.ndarray) -> None:
        """Spans have the attributes of their last place."""
        self._pairs([place.pairs for place in places], last)

    def pairs_of_items(self, taken: list[Taken]) -> None:
        """Events and links have those of the step that they are."""
        shapes: list[tuple[tuple[str, int], ...]] = [()]
        shape = np.zeros(self._total, np.int64)
        for one in taken:
            assert one.place.step is not None
            shape[self._numbers(one)] = len(shapes)
            shapes.append(tuple((key, kind) for key, kind, _, _ in one.place.step.item.pairs))
        self._pairs(shapes, shape)

    def _pairs(self, shapes: list[tuple[tuple[str, int], ...]], shape: np.ndarray) -> None:
        lengths = np.array([len(pairs) for pairs in shapes], np.int64)
        firsts = np.cumsum(lengths) - lengths
        flat = [pair for pairs in shapes for pair in pairs]
        codes = np.array(
            [self._codes.setdefault(key, len(self._codes)) for key, _ in flat], np.int32
        )
        kinds = np.array([kind for _, kind in flat], np.int8)
        counts = lengths[shape]
        first = np.cumsum(counts) - counts
        total = int(counts.sum())
        place = np.repeat(firsts[shape] - first, counts) + np.arange(total)
        self._shape, self._pair_owner = shape, np.repeat(np.arange(self._total), counts)
        self._pair_codes, self._pair_kinds = codes[place], kinds[place]
        self._kind_first: dict[int, np.ndarray] = {}
        self._kind_values: dict[int, np.ndarray] = {}
        for kind in np.flatnonzero(np.bincount(self._pair_kinds, minlength=OTHER + 1)).tolist():
            each = np.array([sum(k == kind for _, k in pairs) for pairs in shapes], np.int64)[shape]
            self._kind_first[kind] = np.cumsum(each) - each
            width = {STRING: 2, OTHER: 3}.get(kind, 1)
            self._kind_values[kind] = np.zeros((width, int(each.sum())), np.int64)

    # ---- values ----------------------------------------------------------------------------------

    def _numbers(self, one: Taken) -> np.ndarray:
        """The items that a step gives values to."""
        if self._first is None:
            return one.rows
        found: np.ndarray = self._first[one.rows] + one.place.before[1 + (self._name == "links")]
        return found

    def put(self, one: Taken) -> None:
        """Take in the values of a step."""
        assert one.place.step is not None
        item, numbers = one.place.step.item, self._numbers(one)
        for name, value in item.fields.items():
            self._put_field(name, numbers, one.values[value])
        before = one.place.pairs[: one.place.before[0]] if self._first is None else ()
        counts = [sum(kind == k for _, kind in before) for k in range(OTHER + 1)]
        for _, kind, form, value in item.pairs:
            at = self._kind_first[kind][numbers] + counts[kind]
            counts[kind] += 1
            self._put_pair(kind, form, at, one.values[value])

    def _put_field(
        self, name: str, numbers: np.ndarray, value: tuple[np.ndarray, np.ndarray] | np.ndarray
    ) -> None:
        if name not in self._fields:
            self._fields[name] = self._nothing(name)
        column = self._fields[name]
        if isinstance(value, tuple):
            column[0][numbers], column[1][numbers] = value
        elif _TYPES[name] == "fixed64":
            column[numbers] = self._wire.words(value)
        elif _TYPES[name] == "fixed32":
            column[numbers] = self._wire.words(value) & np.uint64(0xFFFFFFFF)
        else:
            column[numbers] = value

    def _nothing(self, name: str) -> np.ndarray:
        """A field that nobody has: empty texts, zeros; protobuf does not tell these from missing ones."""
        if _TYPES[name] in _TEXTS:
            return np.stack((self._starts, self._starts))
        return np.zeros(self._total, np.uint64 if _TYPES[name] == "fixed64" else np.int64)

    def _put_pair(
        self,
        kind: int,
        form: int,
        at: np.ndarray,
        value: tuple[np.ndarray, np.ndarray] | np.ndarray,
    ) -> None:
        values = self._kind_values[kind]
        if isinstance(value, tuple):
            values[0][at], values[1][at] = value
            if kind == OTHER:
                values[2][at] = form
        else:
            values[0][at] = self._wire.words(value).view(np.int64) if kind == DOUBLE else value

    # ---- columns ---------------------------------------------------------------------------------

    def items(self) -> Items:
        """Their fields and attributes."""
        for name in (*_ALWAYS[self._name], *(("status.code",) if self._name == "spans" else ())):
            if name not in self._fields:
                self._fields[name] = self._nothing(name)
        fields = {name: self._column(name, values) for name, values in self._fields.items()}
        status = {name[7:]: fields.pop(name) for name in list(fields) if name.startswith("status.")}
        if status:
            fields["status"] = pa.StructArray.from_arrays(list(status.values()), names=list(status))
        structs = pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
        pairs = Ragged(
            self._total,
            self._pair_owner,
            self._pair_codes,
            list(self._codes),
            self._pair_kinds,
            {kind: self._values(kind, values) for kind, values in self._kind_values.items()},
            self._shape,
        )
        return Items(self._spans, self._owner, structs, pairs)

    def _column(self, name: str, values: np.ndarray) -> pa.Array:
        if _TYPES[name] == "string":
            return self._wire.text(*values)
        if _TYPES[name] == "bytes":
            return self._wire.slices(values[0], values[1], pa.binary())
        return pa.array(values)

    def _values(self, kind: int, values: np.ndarray) -> pa.Array:
        if kind == STRING:
            return self._wire.text(*values)
        if kind == OTHER:
            return self._other(*values)
        if kind == BOOL:
            return pa.array(values[0] != 0)
        return pa.array(values[0] if kind == INT else values[0].view(np.float64))

    def _other(self, starts: np.ndarray, ends: np.ndarray, forms: np.ndarray) -> pa.Array:
        """Arrays, maps and bytes as JSON text; the same few come again and again (finish reasons)."""
        found = self._wire.slices(starts, ends, pa.binary()).dictionary_encode()
        known = found.dictionary.to_pylist()
        codes = found.indices.to_numpy() * 8 + forms
        distinct, places = np.unique(codes, return_inverse=True)
        texts = [_FORMS[code % 8](known[code // 8]) for code in distinct.tolist()]
        return pa.array(texts, pa.string()).take(pa.array(places))
