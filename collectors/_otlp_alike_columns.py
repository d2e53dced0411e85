"""The values of spans that match patterns, as columns."""

from __future__ import annotations

import re

import numpy as np
import orjson
import pyarrow as pa

from ._common import loads
from ._otlp_alike import Matches
from ._otlp_attributes import BOOL, DOUBLE, INT, OTHER, STRING, Ragged
from ._otlp_bytes import Block, booleans
from ._otlp_items import Items, Spans
from ._otlp_pattern import Value
from ._otlp_values import json_text, plain

_COUNTS = re.compile(r"flags|dropped\w+")
_ENUMS = ("kind", "status.code")
_FEW = ("name", *_ENUMS)  # fields with few values
_EXPECTED = (
    "traceId", "spanId", "name", "kind", "startTimeUnixNano", "endTimeUnixNano", "timeUnixNano",
)  # fmt: skip


def columns(block: Block, found: Matches) -> Spans:
    """All spans that were found, in the order of the file.

    ArrowInvalid or ValueError where a value is not what its place says.
    """
    spans, events, links = (_Level(block, found, name) for name in ("spans", "events", "links"))
    return Spans(spans.items(), events.items(), links.items())


class _Level:
    """The spans themselves, their events or their links: where the values of each are."""

    def __init__(self, block: Block, found: Matches, name: str) -> None:
        self._block, self._name = block, name
        self._spans = len(found.starts)
        counts = np.zeros(self._spans, np.int64)
        for group in found.groups:
            counts[group.rows] = len(group.pattern.items(name))
        first = np.cumsum(counts) - counts
        self._total = int(counts.sum())
        self._owner = np.repeat(np.arange(self._spans), counts)
        # Each item of each pattern: its spans, and the numbers of the item of each of them.
        self._each = [
            (item, group, first[group.rows] + number)
            for group in found.groups
            for number, item in enumerate(group.pattern.items(name))
        ]

    def items(self) -> Items:
        """Their fields and attributes."""
        names = dict.fromkeys(name for item, _, _ in self._each for name in item.fields)
        fields = _struct({name: self._field(name) for name in names}, self._total)
        return Items(self._spans, self._owner, fields, self._attributes())

    def _field(self, name: str) -> pa.Array:
        values = [item.fields.get(name) for item, _, _ in self._each]
        if self._name == "spans" and name in _FEW and (known := _known(name, values)) is not None:
            return self._few(known)
        starts, ends = np.full((2, self._total), -1, np.int32)
        bare = np.zeros(self._total, bool)
        for (_, group, numbers), value in zip(self._each, values, strict=True):
            if value is not None:
                starts[numbers] = group.at(value.start)
                ends[numbers] = group.at(value.end)
                bare[numbers] = not value.quoted
        there = starts >= 0
        if there.all():
            texts = self._block.text(starts, ends)
        else:
            numbers = pa.array(np.cumsum(there) - 1, mask=~there)
            texts = self._block.text(starts[there], ends[there]).take(numbers)
        if name in _ENUMS:
            texts.filter(pa.array(bare)).cast(pa.int64())  # what has no quotes is a number
        return texts.cast(pa.int64()) if _COUNTS.fullmatch(name) else texts

    def _few(self, texts: list[str]) -> pa.DictionaryArray:
        """A field, given the text that all spans of each pattern have."""
        codes = np.empty(self._total, np.int32)
        for code, (_, _, numbers) in enumerate(self._each):
            codes[numbers] = code
        return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(texts, pa.string()))

    def _attributes(self) -> Ragged:
        counts, shape = np.zeros((2, self._total), np.int64)
        for number, (item, _, numbers) in enumerate(self._each):
            counts[numbers], shape[numbers] = len(item.pairs), number
        first, total = np.cumsum(counts) - counts, int(counts.sum())
        keys: dict[str, int] = {}
        codes, pairs = np.empty(total, np.int32), _Pairs(total)
        for item, group, numbers in self._each:
            for number, (key, kind, value) in enumerate(item.pairs):
                at = first[numbers] + number
                codes[at] = keys.setdefault(key, len(keys))
                pairs.kinds[at] = kind
                if value.fixed is not None and kind in _NUMBERS:
                    pairs.fix(at, kind, value.fixed.decode())
                else:
                    pairs.starts[at] = group.at(value.start)
                    pairs.ends[at] = group.at(value.end)
        owner = np.repeat(np.arange(self._total), counts)
        values = pairs.values(self._block)
        return Ragged(self._total, owner, codes, list(keys), pairs.kinds, values, shape)


_NUMBERS = {INT, DOUBLE, BOOL}


class _Pairs:
    """The values of attributes: where each is, or which of the known ones it is."""

    def __init__(self, total: int) -> None:
        self.kinds = np.empty(total, np.int8)
        self.starts, self.ends = np.empty((2, total), np.int32)
        self._fixed = np.full(total, -1, np.int32)
        self._texts: dict[int, dict[str, int]] = {kind: {} for kind in _NUMBERS}

    def fix(self, at: np.ndarray, kind: int, text: str) -> None:
        """Note a value that some pairs have in common."""
        texts = self._texts[kind]
        self._fixed[at] = texts.setdefault(text, len(texts))

    def values(self, block: Block) -> dict[int, pa.Array]:
        """By kind: the values of the pairs of that kind, in order."""
        found = {}
        for kind in range(len(_TYPED)):
            rows = np.flatnonzero(self.kinds == kind)
            if len(rows):
                found[kind] = self._of_kind(kind, rows, block)
        return found

    def _of_kind(self, kind: int, rows: np.ndarray, block: Block) -> pa.Array:
        known = self._texts.get(kind)
        if not known:
            return _TYPED[kind](block, self.starts[rows], self.ends[rows])
        fixed = self._fixed[rows]
        own = fixed < 0
        read = _TYPED[kind](block, self.starts[rows[own]], self.ends[rows[own]])
        both = pa.concat_arrays([read, _CASTS[kind](pa.array(known, pa.string()))])
        return both.take(pa.array(np.where(own, np.cumsum(own) - 1, len(read) + fixed)))


def _struct(fields: dict[str, pa.Array], total: int) -> pa.StructArray:
    """The fields as every decoder gives them; those that all must have are there."""
    status = {name[7:]: fields.pop(name) for name in list(fields) if name.startswith("status.")}
    nothing = pa.nulls(total, pa.string())
    for name in _EXPECTED:
        fields.setdefault(name, nothing)
    status.setdefault("code", nothing)
    fields["status"] = pa.StructArray.from_arrays(list(status.values()), names=list(status))
    return pa.StructArray.from_arrays(list(fields.values()), names=list(fields))


def _known(name: str, values: list[Value | None]) -> list[str] | None:
    """A field's text for all spans of each pattern, where it has only one in each."""
    texts: list[str] = []
    for value in values:
        if value is None or value.fixed is None:
            return None
        texts.append(orjson.loads(b'"' + value.fixed + b'"'))
        if name in _ENUMS and not (value.quoted or texts[-1].isdecimal()):
            raise ValueError(f"{name} is neither a text nor a number")
    return texts


def _other(block: Block, starts: np.ndarray, ends: np.ndarray) -> pa.StringArray:
    """Arrays, maps and bytes as JSON text."""
    found = block.slices(starts, ends, pa.binary()).dictionary_encode()
    texts = [_rendered(value) for value in found.dictionary.to_pylist()]
    return pa.array(texts, pa.string()).take(found.indices)


def _rendered(value: bytes) -> str:
    return json_text(plain(loads(value)))


_CASTS = {
    INT: lambda texts: texts.cast(pa.int64()),
    DOUBLE: lambda texts: texts.cast(pa.float64()),
    BOOL: booleans,
}
_TYPED = {
    STRING: lambda block, starts, ends: block.text(starts, ends),
    INT: lambda block, starts, ends: _CASTS[INT](block.text(starts, ends)),
    DOUBLE: lambda block, starts, ends: _CASTS[DOUBLE](block.text(starts, ends)),
    BOOL: lambda block, starts, ends: booleans(block.text(starts, ends)),
    OTHER: _other,
}
