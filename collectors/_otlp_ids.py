"""Trace and span ids in every spelling as lower-case hexadecimal text."""

from __future__ import annotations

import base64
import binascii

import numpy as np
import pyarrow as pa

from ._compute import pc

_NO_ID = pa.array(["", "0" * 16, "0" * 32], pa.string())
_HEX = np.frombuffer(b"".join(f"{i:02x}".encode() for i in range(256)), np.uint16)


def hexadecimal(ids: pa.Array) -> pa.Array:
    """Ids as lower-case hexadecimal text; empty and all-zero ids are NULL."""
    if ids.null_count == len(ids):
        return pa.nulls(len(ids), pa.string())
    ids = _hex_of_bytes(ids) if pa.types.is_binary(ids.type) else _hex_of_text(ids)
    zero = pc.is_in(ids, value_set=_NO_ID)
    if pc.any(zero).as_py():
        ids = pc.if_else(zero, pa.scalar(None, pa.string()), ids)
    return ids


def _hex_of_bytes(ids: pa.BinaryArray) -> pa.StringArray:
    n = len(ids)
    if n == 0 or ids.null_count:
        return pa.array([None if i is None else i.hex() for i in ids.to_pylist()], pa.string())
    _, offsets_buffer, data_buffer = ids.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[ids.offset : ids.offset + n + 1]
    if data_buffer is None or offsets[-1] == offsets[0]:
        return pa.nulls(n, pa.string())
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
    text = pa.py_buffer(_HEX[data])
    return pa.StringArray.from_buffers(n, pa.py_buffer((offsets - offsets[0]) * 2), text)


def _hex_of_text(ids: pa.StringArray) -> pa.StringArray:
    """OTLP/JSON ids are hexadecimal.

    Some writers use protobuf's own JSON mapping, which is base64.
    """
    lengths = pc.binary_length(ids)
    odd = pc.is_in(lengths, value_set=pa.array([12, 24], lengths.type))
    if pc.any(odd).as_py():

        def plain(text: str | None) -> str | None:
            if text is None or len(text) not in (12, 24):
                return text
            try:
                raw = base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError):
                return text
            return raw.hex() if len(raw) in (8, 16) else text

        ids = pa.array([plain(text) for text in ids.to_pylist()], pa.string())
    return pc.ascii_lower(ids)
