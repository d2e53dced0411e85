"""OTLP AnyValue as plain JSON values: from OTLP/JSON objects and from protobuf bytes."""

from __future__ import annotations

import base64
import math
from typing import Any

import orjson

_INT64 = range(-(2**63), 2**63)


def plain(value: Any) -> Any:
    """An OTLP/JSON AnyValue object as a plain JSON value.

    Bytes stay marked as {"bytesValue": base64}.
    """
    if not isinstance(value, dict) or not value:
        return None
    name, inner = next(((k, v) for k, v in value.items() if v is not None), ("", None))
    kind = name.replace("_v", "V")
    if kind == "intValue":
        return whole(inner)
    if kind == "doubleValue":
        return finite(inner)
    if kind == "arrayValue":
        return [plain(item) for item in _values(inner)]
    if kind == "kvlistValue":
        return pairs(_values(inner))
    if kind in ("stringValue", "boolValue"):
        return inner
    return {kind: inner} if name else None


def pairs(items: Any) -> dict[str, Any]:
    """A list of OTLP/JSON key-value objects as one object; a plain object is taken as it is."""
    if isinstance(items, dict):
        return items
    found: dict[str, Any] = {}
    for item in items or []:
        if isinstance(item, dict):
            found.setdefault(str(item.get("key", "")), plain(item.get("value")))
    return found


def _values(inner: Any) -> list[Any]:
    values = inner.get("values") if isinstance(inner, dict) else inner
    return values if isinstance(values, list) else []


def whole(value: Any) -> Any:
    """An integer from a number or text; what is none stays as it is."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def finite(value: Any) -> Any:
    """A double from a number or text; NaN and infinities as the text that JSON mappings use."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def json_text(value: Any) -> str:
    """A plain value as JSON text; integers beyond 64 bits as text."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return orjson.dumps(_narrow(value)).decode()


def _narrow(value: Any) -> Any:
    if isinstance(value, int) and value not in _INT64:
        return str(value)
    if isinstance(value, list):
        return [_narrow(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _narrow(item) for key, item in value.items()}
    return value


def array_text(value: Any) -> str:
    """An array value (protobuf bytes, or the struct that pyarrow.json reads), or bytes.

    As JSON text.
    """
    if isinstance(value, bytes):
        return decoded_list_text(value, maps=False)
    if "bytes" in value:
        inner = value["bytes"]
        text = base64.b64encode(inner).decode() if isinstance(inner, bytes) else inner
        return json_text({"bytesValue": text})
    return json_text([plain(item) for item in value.get("values") or []])


def decoded_list_text(data: bytes, *, maps: bool) -> str:
    """An ArrayValue or KeyValueList message as JSON text."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from opentelemetry.proto.common.v1 import common_pb2

    try:
        if maps:
            pairs_message = common_pb2.KeyValueList.FromString(data)
            return json_text(_map_of(pairs_message.values))
        return json_text(
            [from_message(item) for item in common_pb2.ArrayValue.FromString(data).values]
        )
    except DecodeError as error:
        raise ValueError(f"damaged attribute value: {error}") from error


def from_message(value: Any) -> Any:
    """A protobuf AnyValue as a plain JSON value."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    inner = getattr(value, kind)
    if kind == "array_value":
        return [from_message(item) for item in inner.values]
    if kind == "kvlist_value":
        return _map_of(inner.values)
    if kind == "bytes_value":
        return {"bytesValue": base64.b64encode(inner).decode()}
    return finite(inner) if kind == "double_value" else inner


def _map_of(items: Any) -> dict[str, Any]:
    """KeyValue messages as one object; the first of equal keys stays."""
    found: dict[str, Any] = {}
    for item in items:
        found.setdefault(item.key, from_message(item.value))
    return found
