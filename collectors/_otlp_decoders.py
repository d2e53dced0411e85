"""OTLP protobuf messages decoded: trace requests by ptars, anything by Google's protobuf."""

from __future__ import annotations

import base64
from functools import cache
from typing import Any

import pyarrow as pa

from ._otlp_sizes import encoded_bytes
from ._otlp_wire import Signal


def resource_spans(messages: list[bytes]) -> pa.StructArray | None:
    """ExportTraceServiceRequests as nested Arrow by ptars.

    None when it is missing or refuses them, or where there are fields that it does not know.
    """
    handler = _ptars_handler()
    if handler is None:
        return None
    try:
        batch = handler.list_to_record_batch(messages)
    except (ValueError, pa.ArrowInvalid):
        return None
    except BaseException as error:
        # ptars 0.x panics where a length in a damaged message goes beyond its end
        if type(error).__name__ != "PanicException":
            raise
        return None
    found = batch.column(0).flatten()
    if _total_bytes(found) != sum(map(len, messages)) and any(map(_has_unknown, messages)):
        return None
    return found


def _total_bytes(found: pa.StructArray) -> int:
    """Bytes of the requests that hold these ResourceSpans and nothing else."""
    one_by_one = pa.ListArray.from_arrays(pa.array([0, len(found)], pa.int32()), found)
    request = pa.StructArray.from_arrays([one_by_one], names=["resourceSpans"])
    return int(encoded_bytes(request, "Request", MESSAGES)[0])


def _has_unknown(message: bytes) -> bool:
    """Whether a request has fields that opentelemetry-proto does not know, or that it cannot read at all."""
    try:
        decoded = _parsed(message, "traces")
    except ValueError:  # ptars is less strict
        return True
    before = decoded.ByteSize()
    decoded.DiscardUnknownFields()
    return bool(decoded.ByteSize() != before)


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
    for name, members in MESSAGES.items():
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


MESSAGES = {
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
    return _object(_parsed(message, signal))


def _parsed(message: bytes, signal: Signal) -> Any:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        return _request_class(signal).FromString(message)
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
    found: dict[str, Any] = _unknown_fields(message)
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


def _unknown_fields(message: Any) -> dict[str, Any]:
    """Fields that opentelemetry-proto does not know, by number; what is no number as base64."""
    from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-untyped]

    found: dict[str, Any] = {}
    for field in UnknownFieldSet(message):
        value = field.data
        if not isinstance(value, int):
            value = base64.b64encode(value).decode() if isinstance(value, bytes) else None
        found.setdefault(f"field{field.field_number}", []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}
