"""OTLP protobuf: framing, telling the signals apart, decoders, salvage of cut messages."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import IO, Any, Literal

import pyarrow as pa
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


# ---- decoders ------------------------------------------------------------------------------------


def resource_spans(messages: list[bytes]) -> pa.StructArray | None:
    """ExportTraceServiceRequests as nested Arrow by ptars.

    None when it is missing or refuses them.
    """
    handler = _ptars_handler()
    if handler is None:
        return None
    try:
        batch = handler.list_to_record_batch(messages)
    except (ValueError, pa.ArrowInvalid):
        return None
    return batch.column(0).flatten()


@cache
def _ptars_handler() -> Any:
    try:
        import ptars
    except ImportError:
        return None
    file = _descriptor()
    return ptars.HandlerPool([file]).get_for_message(file.message_types_by_name["Request"])


def _descriptor() -> Any:
    """The trace messages with the field names of OTLP/JSON.

    Recursive values (arrays, maps) stay bytes: they are rare, and ptars cannot unfold recursion.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool  # type: ignore[import-untyped]

    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="pdtrace_otlp.proto", package="pdtrace", syntax="proto3"
    )
    types = {
        "string": kind.TYPE_STRING,
        "bytes": kind.TYPE_BYTES,
        "bool": kind.TYPE_BOOL,
        "int64": kind.TYPE_INT64,
        "double": kind.TYPE_DOUBLE,
        "int32": kind.TYPE_INT32,
        "uint32": kind.TYPE_UINT32,
        "fixed64": kind.TYPE_FIXED64,
        "fixed32": kind.TYPE_FIXED32,
    }
    for name, members in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name == "Value":
            message.oneof_decl.add(name="value")
        for line in members.split(","):
            type_name, field_name, number = line.split()
            field = message.field.add(name=field_name, number=int(number))
            repeated = type_name.endswith("*")
            field.label = kind.LABEL_REPEATED if repeated else kind.LABEL_OPTIONAL
            type_name = type_name.rstrip("*")
            if type_name in types:
                field.type = types[type_name]
            else:
                field.type, field.type_name = kind.TYPE_MESSAGE, f".pdtrace.{type_name}"
            if name == "Value":
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool.FindFileByName(file.name)


_MESSAGES = {
    "Value": "string stringValue 1, bool boolValue 2, int64 intValue 3, double doubleValue 4, "
    "bytes arrayValue 5, bytes kvlistValue 6, bytes bytesValue 7",
    "Pair": "string key 1, Value value 2",
    "Resource": "Pair* attributes 1, uint32 droppedAttributesCount 2",
    "Scope": "string name 1, string version 2, Pair* attributes 3, uint32 droppedAttributesCount 4",
    "Event": "fixed64 timeUnixNano 1, string name 2, Pair* attributes 3, "
    "uint32 droppedAttributesCount 4",
    "Link": "bytes traceId 1, bytes spanId 2, string traceState 3, Pair* attributes 4, "
    "uint32 droppedAttributesCount 5, fixed32 flags 6",
    "Status": "string message 2, int32 code 3",
    "Span": "bytes traceId 1, bytes spanId 2, string traceState 3, bytes parentSpanId 4, "
    "string name 5, int32 kind 6, fixed64 startTimeUnixNano 7, fixed64 endTimeUnixNano 8, "
    "Pair* attributes 9, "
    "uint32 droppedAttributesCount 10, Event* events 11, uint32 droppedEventsCount 12, "
    "Link* links 13, uint32 droppedLinksCount 14, Status status 15, fixed32 flags 16",
    "ScopeSpans": "Scope scope 1, Span* spans 2, string schemaUrl 3",
    "ResourceSpans": "Resource resource 1, ScopeSpans* scopeSpans 2, string schemaUrl 3",
    "Request": "ResourceSpans* resourceSpans 1",
}

_ID_FIELDS = {"trace_id", "span_id", "parent_span_id"}


def as_object(message: bytes, signal: Signal) -> dict[str, Any]:
    """An Export*Request as the object that OTLP/JSON has for it, by Google's protobuf.

    ValueError when it is none.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        return _object(_request_class(signal).FromString(message))
    except DecodeError as error:
        raise ValueError(str(error)) from error


@cache
def _request_class(signal: Signal) -> Any:
    if signal == "traces":
        from opentelemetry.proto.trace.v1 import trace_pb2

        return trace_pb2.TracesData
    if signal == "logs":
        from opentelemetry.proto.logs.v1 import logs_pb2

        return logs_pb2.LogsData
    from opentelemetry.proto.metrics.v1 import metrics_pb2

    return metrics_pb2.MetricsData


def _object(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.message_type is not None:
            repeated = not hasattr(value, "ListFields")
            found[field.json_name] = (
                [_object(item) for item in value] if repeated else _object(value)
            )
        elif isinstance(value, bytes):
            is_id = field.name in _ID_FIELDS
            found[field.json_name] = value.hex() if is_id else base64.b64encode(value).decode()
        elif isinstance(value, str | int | float):
            found[field.json_name] = value
        else:
            found[field.json_name] = list(value)
    return found
