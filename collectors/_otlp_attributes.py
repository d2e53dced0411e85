"""Attributes of many spans at once: typed maps, JSON objects, and content taken out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from pdtrace.records import dataclass

from ._compute import pc
from ._otlp_content import LONG_BYTES, is_content_key, redact, stand_in
from ._otlp_values import array_text, decoded_list_text, finite, json_text

STRING, INT, DOUBLE, BOOL, OTHER = range(5)
_COLUMNS = {STRING: "string", INT: "int", DOUBLE: "double", BOOL: "bool", OTHER: "other"}

# Between the keys of a span in the columns *_keys (pdtrace/spans.py reads them).
SEPARATOR = "\x1f"


@dataclass
class Ragged:
    """Key-value pairs of `owners` spans (or events, ...), one after the other.

    Each value in one typed array.
    """

    owners: int
    owner: np.ndarray  # of each pair, ascending
    codes: np.ndarray  # of each pair's key in `keys`
    keys: list[str]
    kinds: np.ndarray  # STRING ... OTHER, of each pair
    values: dict[int, pa.Array]  # by kind: the values of the pairs of that kind, in order
    alike: np.ndarray | None = None  # where known: a number for all owners with the same keys
    _shapes: dict[int, tuple[np.ndarray, Shapes]] = field(default_factory=dict)

    def shapes(self, kind: int) -> tuple[np.ndarray, Shapes]:
        """Which pairs are of a kind, and the sequences of their keys."""
        if kind not in self._shapes:
            index = np.flatnonzero(self.kinds == kind)
            counts = np.bincount(self.owner[index], minlength=self.owners)
            self._shapes[kind] = index, Shapes(self.codes[index], counts, self.alike)
        return self._shapes[kind]

    def take_irregular(self) -> dict[int, list[Any]]:
        """Remove pairs that cannot be stored as columns; returns them by owner, as [key, value].

        These are keys that their owner has already with a value of the same type, and keys that
        hold the
        separator. Which owners have any is told from one example per set of keys: a store sees few
        sets.
        """
        split = [code for code, key in enumerate(self.keys) if SEPARATOR in key]
        drop = np.isin(self.codes, split) if split else np.zeros(len(self.codes), bool)
        for kind in self.values:
            index, shape = self.shapes(kind)
            for row in shape.rows_with_repeats():
                seen: set[int] = set()
                for pair in index[shape.starts[row] : shape.starts[row] + shape.counts[row]]:
                    code = int(self.codes[pair])
                    drop[pair] |= code in seen
                    seen.add(code)
        if not drop.any():
            return {}
        dropped: dict[int, list[Any]] = {}
        for pair in np.flatnonzero(drop):
            key = self.keys[int(self.codes[pair])]
            entry = [key, redact(self._value(int(pair)), key).value]
            dropped.setdefault(int(self.owner[pair]), []).append(entry)
        keep = ~drop
        self._shapes.clear()
        for kind, array in self.values.items():
            self.values[kind] = array.filter(pa.array(keep[self.kinds == kind]))
        self.owner, self.codes, self.kinds = self.owner[keep], self.codes[keep], self.kinds[keep]
        return dropped

    def _value(self, pair: int) -> Any:
        kind = int(self.kinds[pair])
        value = self.values[kind][int(np.count_nonzero(self.kinds[:pair] == kind))].as_py()
        return orjson.loads(value) if kind == OTHER else value


class Shapes:
    """The sequences of keys of many rows: each distinct one is a shape."""

    def __init__(
        self, codes: np.ndarray, counts: np.ndarray, alike: np.ndarray | None = None
    ) -> None:
        self.codes, self.counts = codes, counts
        self.starts = np.cumsum(counts) - counts
        self.filled = np.flatnonzero(counts)
        marks = self._marks() if alike is None else alike[self.filled]
        encoded = pa.array(marks).dictionary_encode()
        self.own = encoded.indices.to_numpy(zero_copy_only=False)  # shape of each filled row
        self.examples = np.zeros(len(encoded.dictionary), np.int64)  # one row of each shape
        self.examples[self.own[::-1]] = self.filled[::-1]

    def _marks(self) -> np.ndarray:
        """A 64-bit hash of each filled row's keys in their order."""
        if not len(self.filled):
            return np.empty(0, np.uint64)
        place = np.arange(len(self.codes)) - np.repeat(self.starts, self.counts)
        mixed = (self.codes.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed += place.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        return np.add.reduceat(mixed, self.starts[self.filled])

    def keys_of(self, row: Any) -> np.ndarray:
        """The key codes of a row."""
        return self.codes[self.starts[row] : self.starts[row] + self.counts[row]]

    def rows_with_repeats(self) -> np.ndarray:
        """Rows that have a key more than once."""
        bad = []
        for shape, row in enumerate(self.examples):
            keys = self.keys_of(row).tolist()
            if len(set(keys)) < len(keys):
                bad.append(shape)
        return self.filled[np.isin(self.own, bad)] if bad else np.empty(0, np.int64)

    def texts(self, names: list[str]) -> pa.DictionaryArray:
        """Each row's keys as one text; NULL where a row has none."""
        texts = [
            SEPARATOR.join([names[code] for code in self.keys_of(row)]) for row in self.examples
        ]
        indices = np.zeros(len(self.counts), np.int32)
        indices[self.filled] = self.own
        return pa.DictionaryArray.from_arrays(
            pa.array(indices, mask=self.counts == 0), pa.array(texts, pa.string())
        )


def optional(structs: pa.StructArray, name: str) -> pa.Array:
    """A field, all NULL where the decoder left it out because no record has it."""
    if structs.type.get_field_index(name) < 0:
        return pa.nulls(len(structs))
    return structs.field(name)


LIFTED = "\x7f"  # the key of what stands in place of a list that was lifted out of JSON
ALIKE = "~"  # the key of what stands in place of spans that were found without parsing
LIFTED_FROM = 10**7  # the number of the first such list


@dataclass
class Lifted:
    """Pairs that were taken out of the text of a block before it was parsed.

    In place of each list stands one element {LIFTED: LIFTED_FROM + its number}.
    """

    bounds: np.ndarray  # where the pairs of each list begin, and where the last ends
    codes: np.ndarray
    keys: list[str]
    kinds: np.ndarray
    values: dict[int, pa.Array]

    def of(self, numbers: np.ndarray, owner: np.ndarray, owners: int) -> Ragged:
        """The pairs of some lists (by number, ascending) with their owners."""
        counts = self.bounds[numbers + 1] - self.bounds[numbers]
        inside = np.zeros(len(self.bounds) - 1, bool)
        inside[numbers] = True
        taken = np.repeat(inside, np.diff(self.bounds))
        values = {
            kind: array.filter(pa.array(taken[self.kinds == kind]))
            for kind, array in self.values.items()
        }
        return Ragged(
            owners,
            np.repeat(owner, counts),
            self.codes[taken],
            self.keys,
            self.kinds[taken],
            {kind: array for kind, array in values.items() if len(array)},
        )


def _joined(one: Ragged, other: Ragged) -> Ragged:
    """The pairs of two, which have no owner in common."""
    place = {key: code for code, key in enumerate(one.keys)}
    keys = [*one.keys, *(key for key in other.keys if key not in place)]
    place = {key: code for code, key in enumerate(keys)}
    codes = np.array([place[key] for key in other.keys], np.int32)[other.codes]
    owner = np.concatenate((one.owner, other.owner))
    order = np.argsort(owner, kind="stable")
    kinds = np.concatenate((one.kinds, other.kinds))
    values: dict[int, pa.Array] = {}
    for kind in sorted(one.values.keys() | other.values.keys()):
        parts = [pairs.values[kind] for pairs in (one, other) if kind in pairs.values]
        rank = np.argsort(np.argsort(owner[kinds == kind], kind="stable"), kind="stable")
        values[kind] = pa.concat_arrays(parts).take(pa.array(np.argsort(rank)))
    codes = np.concatenate((one.codes, codes)).astype(np.int32)
    return Ragged(one.owners, owner[order], codes[order], keys, kinds[order], values)


def ragged(lists: pa.Array, lifted: Lifted | None = None) -> Ragged:
    """The pairs of a column of attribute lists, of which some may have been lifted before."""
    if pa.types.is_null(lists.type) or lists.null_count == len(lists):
        return Ragged(
            len(lists), np.empty(0, np.int64), np.empty(0, np.int32), [], np.empty(0, np.int8), {}
        )
    pairs = lists.flatten()
    owner = pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)
    if lifted is not None and pairs.type.get_field_index(LIFTED) >= 0:
        return _with_lifted(pairs, owner, len(lists), lifted)
    return _parsed(pairs, owner, len(lists))


def _with_lifted(pairs: pa.StructArray, owner: np.ndarray, owners: int, lifted: Lifted) -> Ragged:
    at = pairs.field(LIFTED)
    if not at.null_count:
        return lifted.of(at.to_numpy() - LIFTED_FROM, owner, owners)
    marked = pc.is_valid(at).to_numpy(zero_copy_only=False)
    rest = _parsed(pairs.filter(pa.array(~marked)), owner[~marked], owners)
    return _joined(lifted.of(at.drop_null().to_numpy() - LIFTED_FROM, owner[marked], owners), rest)


def _parsed(pairs: pa.StructArray, owner: np.ndarray, owners: int) -> Ragged:
    encoded = pc.fill_null(pairs.field("key"), "").dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    value = pairs.field("value")
    kinds = np.full(len(pairs), OTHER, np.int8)
    values: dict[int, pa.Array] = {}
    forms = (value.field(number) for number in range(value.type.num_fields))
    if sum(len(form) - form.null_count for form in forms) > len(pairs):
        raise pa.ArrowInvalid("two values in one")  # the last counts, and here none is the last
    for kind, name in (
        (STRING, "stringValue"),
        (INT, "intValue"),
        (DOUBLE, "doubleValue"),
        (BOOL, "boolValue"),
    ):
        array = optional(value, name)
        if array.null_count == len(array):
            continue
        kinds[pc.is_valid(array).to_numpy(zero_copy_only=False)] = kind
        array = array.drop_null()
        if kind == INT and not pa.types.is_int64(array.type):
            array = array.cast(pa.int64())
        values[kind] = array
    rest = np.flatnonzero(kinds == OTHER)
    if len(rest):
        values[OTHER] = _other_values(value.take(pa.array(rest)))
    return Ragged(owners, owner, codes, encoded.dictionary.to_pylist(), kinds, values)


def _other_values(value: pa.StructArray) -> pa.StringArray:
    """Arrays, maps, bytes and empty values as JSON text."""
    texts: list[str] = ["null"] * len(value)
    for name, render in _RENDERERS.items():
        if value.type.get_field_index(name) < 0:
            continue
        array = value.field(name)
        if array.null_count == len(array):
            continue
        rows = np.flatnonzero(pc.is_valid(array).to_numpy(zero_copy_only=False))
        known: dict[bytes, str] = {}
        for row, item in zip(rows, array.drop_null().to_pylist(), strict=True):
            if isinstance(item, bytes):  # the same few lists come again and again (finish reasons)
                if item not in known:
                    known[item] = render(item)
                texts[row] = known[item]
            else:
                texts[row] = render(item)
    return pa.array(texts, pa.string())


_RENDERERS: dict[str, Callable[[Any], str]] = {
    "otherJson": str,
    "arrayValue": array_text,
    "kvlistValue": lambda item: decoded_list_text(item, maps=True),
    "bytesValue": lambda item: array_text({"bytes": item}),
}


def typed_columns(pairs: Ragged) -> dict[str, pa.Array]:
    """Per value type the keys as one text and the values as a list.

    NULL where a span has none of that type.
    """
    columns: dict[str, pa.Array] = {}
    for kind, values in sorted(pairs.values.items()):
        _, shapes = pairs.shapes(kind)
        counts = shapes.counts
        offsets = np.zeros(pairs.owners + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        name = _COLUMNS[kind]
        columns[f"{name}_keys"] = shapes.texts(pairs.keys)
        columns[f"{name}_values"] = pa.ListArray.from_arrays(
            pa.array(offsets), values, mask=pa.array(counts == 0)
        )
    return columns


def withhold(pairs: Ragged) -> int:
    """Replace content and long texts in place; returns how many."""
    content = np.array([is_content_key(key) for key in pairs.keys], bool)
    withheld = 0
    if STRING in pairs.values:
        texts = pairs.values[STRING]
        codes = pairs.codes[pairs.kinds == STRING]
        mask = content[codes] | (pc.binary_length(texts).to_numpy() > LONG_BYTES)
        rows = np.flatnonzero(mask)
        if len(rows):
            found = texts.filter(pa.array(mask)).to_pylist()
            new = [stand_in(text) for text in found]
            pairs.values[STRING] = pc.replace_with_mask(
                texts, pa.array(mask), pa.array(new, pa.string())
            )
            withheld += len(rows)
    if OTHER in pairs.values:
        withheld += _withhold_other(pairs, content)
    return withheld


def _withhold_other(pairs: Ragged, content: np.ndarray) -> int:
    codes = pairs.codes[pairs.kinds == OTHER]
    texts = pairs.values[OTHER].to_pylist()
    withheld = 0
    for row, text in enumerate(texts):
        key = pairs.keys[codes[row]]
        # Short lists of plain values need no look inside.
        if content[codes[row]] or len(text) > LONG_BYTES or "{" in text:
            if (
                text.startswith('{"bytesValue"')
                and len(text) <= LONG_BYTES
                and not content[codes[row]]
            ):
                continue
            counted = redact(orjson.loads(text), key)
            if counted.withheld:
                texts[row] = orjson.dumps(counted.value).decode()
                withheld += counted.withheld
    if withheld:
        pairs.values[OTHER] = pa.array(texts, pa.string())
    return withheld


def json_objects(pairs: Ragged) -> pa.Array:
    """Each owner's attributes as one JSON object; NULL where it has none."""
    if not len(pairs.codes):
        return pa.nulls(pairs.owners, pa.string())
    parts = [_json_texts(kind, values) for kind, values in pairs.values.items()]
    order = np.concatenate([np.flatnonzero(pairs.kinds == kind) for kind in pairs.values])
    texts = pa.concat_arrays(parts).take(pa.array(np.argsort(order, kind="stable")))
    names = pa.array([orjson.dumps(key).decode() for key in pairs.keys], pa.string())
    fields = pc.binary_join_element_wise(names.take(pa.array(pairs.codes)), texts, ":")
    counts = np.bincount(pairs.owner, minlength=pairs.owners)
    offsets = np.zeros(pairs.owners + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), fields), ",")
    objects = pc.binary_join_element_wise("{", joined, "}", "")
    return pc.if_else(pa.array(counts == 0), pa.scalar(None, pa.string()), objects)


def _json_texts(kind: int, values: pa.Array) -> pa.Array:
    if kind == OTHER:
        return values
    if kind == STRING:
        special = pc.match_substring_regex(values, '["\\\\\\x00-\\x1f]')
        if pc.any(special).as_py():
            inner = [
                orjson.dumps(text).decode()[1:-1] for text in values.filter(special).to_pylist()
            ]
            values = pc.replace_with_mask(values, special, pa.array(inner, pa.string()))
        return pc.binary_join_element_wise('"', values, '"', "")
    if kind == DOUBLE:
        return pa.array([_double_text(value) for value in values.to_pylist()], pa.string())
    return values.cast(pa.string())


def _double_text(value: float) -> str:
    return json_text(finite(value))
