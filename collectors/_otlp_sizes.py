"""How many bytes decoded spans take as protobuf: whether a decoder left fields out.

ptars gives the fields that it was told of and says nothing of others. Protobuf has one shortest
way to write a message, and exporters use it: when the fields that are there need as many bytes as
the messages have, there were no others. Where they need less, Google's protobuf is asked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ._compute import pc

_FIXED = {"fixed64": 8, "fixed32": 4}


def encoded_bytes(structs: pa.StructArray, name: str, messages: dict[str, str]) -> np.ndarray:
    """Bytes of each message of a kind, given its fields (`type name number, ...`) by kind."""
    total = np.zeros(len(structs), np.int64)
    in_choice = name == "Value"  # of a choice the value that is set is written, also when empty
    for line in messages[name].split(","):
        kind, field, number = line.split()
        array, tag = structs.field(field), 1 if int(number) < 16 else 2
        if array.null_count == len(array):
            continue
        if kind.endswith("*"):
            inner = encoded_bytes(array.flatten(), kind[:-1], messages)
            total += _sums(array, inner + tag + _varint_bytes(inner))
        elif kind in messages:
            inner = encoded_bytes(array, kind, messages)
            total += np.where(_valid(array), inner + tag + _varint_bytes(inner), 0)
        else:
            total += _scalar_bytes(array, kind, tag, in_choice)
    return total


def _scalar_bytes(array: pa.Array, kind: str, tag: int, in_choice: bool) -> np.ndarray:
    if kind in ("string", "bytes"):
        lengths = _numbers(pc.binary_length(array), np.int64)
        size, empty = lengths + _varint_bytes(lengths) + tag, lengths == 0
    elif kind in ("double", *_FIXED):
        size = np.full(len(array), tag + _FIXED.get(kind, 8), np.int64)
        empty = _numbers(array, np.float64 if kind == "double" else np.uint64) == 0
    else:
        values = _numbers(array.cast(pa.int64()) if kind == "bool" else array, np.int64)
        size, empty = _varint_bytes(values) + tag, values == 0
    written = _valid(array) if in_choice else _valid(array) & ~empty
    return np.where(written, size, 0)


def _varint_bytes(values: np.ndarray) -> np.ndarray:
    """Bytes that numbers take; negative ones take ten."""
    plain = values.view(np.uint64) if values.dtype == np.int64 else values.astype(np.uint64)
    found = np.ones(len(plain), np.int64)
    greatest = int(plain.max(initial=0))
    limit = 1 << 7
    while greatest >= limit:
        found += plain >= np.uint64(limit)
        limit <<= 7
    return found


def _numbers(array: pa.Array, kind: Any) -> np.ndarray:
    if array.null_count:
        array = pc.fill_null(array, 0)
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values.astype(kind, copy=False)


def _valid(array: pa.Array) -> np.ndarray:
    if not array.null_count:
        return np.ones(len(array), bool)
    valid: np.ndarray = pc.is_valid(array).to_numpy(zero_copy_only=False)
    return valid


def _sums(lists: pa.ListArray, values: np.ndarray) -> np.ndarray:
    """Sums of values by the list that they stand in."""
    counts = _numbers(pc.list_value_length(lists), np.int64)
    ends = np.cumsum(counts)
    running: np.ndarray = np.concatenate(([0], np.cumsum(values)))
    found: np.ndarray = running[ends] - running[ends - counts]
    return found
