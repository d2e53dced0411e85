"""OTLP protobuf: framing, telling the signals apart, salvage of cut messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import IO, Literal

import zstandard

Signal = Literal["traces", "logs", "metrics"]

MAX_MESSAGE_BYTES = 1 << 30
_READ_BYTES = 4 << 20
_ZSTD = b"\x28\xb5\x2f\xfd"
VARINT, FIXED64, LEN, FIXED32 = 0, 1, 2, 5

# Field -> wire type of the records inside, from opentelemetry-proto 1.x.
_FIELDS: dict[Signal, dict[int, int]] = {
    "traces": {
        1: LEN,
        2: LEN,
        3: LEN,
        4: LEN,
        5: LEN,
        6: VARINT,
        7: FIXED64,
        8: FIXED64,
        9: LEN,
        10: VARINT,
        11: LEN,
        12: VARINT,
        13: LEN,
        14: VARINT,
        15: LEN,
        16: FIXED32,
    },
    "logs": {
        1: FIXED64,
        2: VARINT,
        3: LEN,
        5: LEN,
        6: LEN,
        7: VARINT,
        8: FIXED32,
        9: LEN,
        10: LEN,
        11: FIXED64,
        12: LEN,
    },
    "metrics": {1: LEN, 2: LEN, 3: LEN, 5: LEN, 7: LEN, 9: LEN, 10: LEN, 11: LEN, 12: LEN},
}
# Fields that only one of the three has with this wire type.
_MARKS: dict[Signal, set[tuple[int, int]]] = {
    "traces": {(6, VARINT), (7, FIXED64), (8, FIXED64), (16, FIXED32), (15, LEN), (13, LEN)},
    "logs": {(1, FIXED64), (2, VARINT), (11, FIXED64), (8, FIXED32)},
    "metrics": {(7, LEN)},
}


class WireError(ValueError):
    """Bytes that are no protobuf, or end inside a field."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at a position and the position behind it."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise WireError("varint longer than 64 bits")
    raise WireError("cut inside a varint")


def fields(data: bytes, *, cut: bool = False) -> Iterator[tuple[int, int, bytes, bool]]:
    """(field, wire type, payload, complete) of a message.

    With `cut`, a last field that is cut comes too.
    """
    at = 0
    while at < len(data):
        try:
            tag, at = varint(data, at)
            number, wire = tag >> 3, tag & 7
            if number == 0:
                raise WireError("field number 0")  # noqa: TRY301
            if wire == VARINT:
                start = at
                _, at = varint(data, at)
                yield number, wire, data[start:at], True
                continue
            size = 8 if wire == FIXED64 else 4 if wire == FIXED32 else 0
            if wire == LEN:
                size, at = varint(data, at)
            elif not size:
                raise WireError(f"wire type {wire}")  # noqa: TRY301
        except WireError as error:
            if cut and str(error).startswith("cut"):
                return
            raise
        if at + size > len(data):
            if cut:
                yield number, wire, data[at:], False
                return
            raise WireError("cut inside a field")
        yield number, wire, data[at : at + size], True
        at += size


def probe(message: bytes, *, cut: bool = False) -> Signal | None:
    """Which Export*Request this is, told by the fields of its first records; None when it is none.

    All three are Resource* (1) -> resource (1), Scope* (2) -> scope (1), records (2).
    """
    try:
        for number, wire, outer, whole in fields(message, cut=cut):
            if (number, wire) != (1, LEN):
                return None
            found = _probe_resource(outer, cut=cut and not whole)
            if found is not None:
                return found
    except ValueError:  # WireError, or text that is no UTF-8
        return None
    return None


def _probe_resource(message: bytes, *, cut: bool) -> Signal | None:
    for number, wire, inner, whole in fields(message, cut=cut):
        if wire != LEN:
            raise WireError("no Resource message")
        if number == 2:
            found = _probe_scope(inner, cut=cut and not whole)
            if found is not None:
                return found
        elif number == 3:
            inner.decode("ascii")
        elif number == 1 and whole:
            _check_resource(inner)
    return None


def _check_resource(message: bytes) -> None:
    for number, wire, inner, _ in fields(message):
        if number == 1:
            if wire != LEN:
                raise WireError("no resource")
            for field, kind, text, _whole in fields(inner):
                if field == 1 and kind == LEN:
                    text.decode("utf-8")


def _probe_scope(message: bytes, *, cut: bool) -> Signal | None:
    votes: list[Signal] = []
    for number, wire, inner, whole in fields(message, cut=cut):
        if wire != LEN or number not in (1, 2, 3, 1000):
            raise WireError("no Scope message")
        if number == 2:
            vote = _probe_record(inner, cut=not whole)
            if vote is not None:
                votes.append(vote)
            if len(votes) >= 3 or (vote is None and whole and inner):
                break
    return Counter(votes).most_common(1)[0][0] if votes else None


def _probe_record(message: bytes, *, cut: bool) -> Signal | None:
    seen: list[tuple[int, int, bytes]] = []
    try:
        seen = [
            (number, wire, payload)
            for number, wire, payload, whole in fields(message, cut=cut)
            if whole
        ]
    except WireError:
        return None
    if not seen:
        return None
    possible = [
        signal for signal, known in _FIELDS.items() if all(known.get(n, w) == w for n, w, _ in seen)
    ]
    marked = [s for s in possible if any((n, w) in _MARKS[s] for n, w, _ in seen)]
    if len(marked) == 1:
        return marked[0]
    ids = [len(p) for n, w, p in seen if w == LEN and n in (1, 2)]
    if "traces" in possible and ids[:2] == [16, 8]:
        return "traces"
    if any(n > 20 for n, _, _ in seen):
        return None
    data_fields = {n for n, _, _ in seen}
    if "metrics" in possible and 1 in data_fields and data_fields & {5, 9, 10, 11}:
        return "metrics" if _is_text(next(p for n, _, p in seen if n == 1)) else None
    if possible == ["logs"] and data_fields & {5, 6, 9, 12}:
        return "logs"
    return None


def _is_text(data: bytes) -> bool:
    try:
        return data.decode("utf-8").isprintable()
    except UnicodeDecodeError:
        return False


# ---- framing -------------------------------------------------------------------------------------


def is_framed(head: bytes) -> bool:
    """Whether the bytes begin with a 4-byte big-endian length and a message.

    As the Collector writes them.
    """
    if len(head) < 5:
        return False
    size = int.from_bytes(head[:4], "big")
    if not 0 < size <= MAX_MESSAGE_BYTES:
        return False
    inner = head[4 : 4 + size]
    if inner.startswith(_ZSTD) or inner[:1] == b"{":
        return True
    return probe(inner, cut=len(inner) < size) is not None


def framed_messages(stream: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """(message, complete) of a length-prefixed file; the last one may be cut."""
    buffer, at = b"", 0
    while True:
        while len(buffer) - at >= 4:
            size = int.from_bytes(buffer[at : at + 4], "big")
            if size > MAX_MESSAGE_BYTES:
                yield buffer[at:], False
                return
            if len(buffer) - at - 4 < size:
                break
            yield _unpacked(buffer[at + 4 : at + 4 + size]), True
            at += 4 + size
        block = stream.read(max(_READ_BYTES, _missing(buffer, at)))
        if not block:
            break
        buffer, at = buffer[at:] + block, 0
    if at < len(buffer):
        yield buffer[at + 4 :], False


def _missing(buffer: bytes, at: int) -> int:
    """Bytes still to read for the message at a position."""
    if len(buffer) - at < 4:
        return 0
    return int.from_bytes(buffer[at : at + 4], "big") + 4 - (len(buffer) - at)


def _unpacked(message: bytes) -> bytes:
    """The Collector's file exporter with compression zstd packs each message on its own."""
    if not message.startswith(_ZSTD):
        return message
    try:
        return zstandard.ZstdDecompressor().decompressobj().decompress(message)
    except zstandard.ZstdError:
        return message


def bare_messages(stream: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """(message, complete) of a file that is one Export*Request.

    Its Resource* fields in groups of some MB.

    Each group is a valid request of its own, so that a file of any size stays bounded in memory.
    """
    buffer = b""
    while True:
        block = stream.read(_READ_BYTES)
        buffer += block
        end = _last_whole_field(buffer)
        if end:
            yield buffer[:end], True
            buffer = buffer[end:]
        if not block:
            break
    if buffer:
        yield buffer, False


def _last_whole_field(buffer: bytes) -> int:
    """Where the last complete top-level field ends."""
    at = 0
    while at < len(buffer):
        if buffer[at] != 0x0A:
            return at
        try:
            size, start = varint(buffer, at + 1)
        except WireError:
            return at
        if start + size > len(buffer):
            return at
        at = start + size
    return at


def salvaged(message: bytes) -> bytes | None:
    """A cut Export*Request without the record that was cut; None when nothing is left."""
    try:
        kept = _without_cut(message, depth=0)
    except ValueError:
        return None
    return kept if kept and probe(kept) is not None else None


def _without_cut(message: bytes, depth: int) -> bytes:
    parts: list[bytes] = []
    # Resource* is field 1 of the request, Scope* field 2 of Resource*, records field 2 of Scope*.
    nested = (1, 2)
    for number, wire, payload, whole in fields(message, cut=True):
        if not whole:
            if wire != LEN or depth > 1 or number != nested[depth]:
                break
            payload = _without_cut(payload, depth + 1)
        parts.append(_encoded(number << 3 | wire))
        if wire == LEN:
            parts.append(_encoded(len(payload)))
        parts.append(payload)
    return b"".join(parts)


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
