"""OTLP/JSON in any spelling, by a walk over Python objects: ResourceSpans as nested Arrow."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pyarrow as pa

from ._otlp_values import finite, json_text, plain, whole

_CANONICAL_VALUE = pa.struct(
    [
        ("stringValue", pa.string()),
        ("boolValue", pa.bool_()),
        ("intValue", pa.int64()),
        ("doubleValue", pa.float64()),
        ("otherJson", pa.string()),
    ]
)


_ATTRIBUTES = (
    "attributes",
    pa.list_(pa.struct([("key", pa.string()), ("value", _CANONICAL_VALUE)])),
)


_DROPPED = ("droppedAttributesCount", pa.int64())


_UNKNOWN = ("unknown", pa.string())


_EVENT = pa.struct(
    [("timeUnixNano", pa.int64()), ("name", pa.string()), _ATTRIBUTES, _DROPPED, _UNKNOWN]
)


_LINK = pa.struct(
    [
        ("traceId", pa.string()),
        ("spanId", pa.string()),
        ("traceState", pa.string()),
        _ATTRIBUTES,
        _DROPPED,
        ("flags", pa.int64()),
        _UNKNOWN,
    ]
)


_SPAN = pa.struct(
    [
        ("traceId", pa.string()),
        ("spanId", pa.string()),
        ("traceState", pa.string()),
        ("parentSpanId", pa.string()),
        ("name", pa.string()),
        ("kind", pa.string()),
        ("startTimeUnixNano", pa.int64()),
        ("endTimeUnixNano", pa.int64()),
        _ATTRIBUTES,
        _DROPPED,
        ("events", pa.list_(_EVENT)),
        ("droppedEventsCount", pa.int64()),
        ("links", pa.list_(_LINK)),
        ("droppedLinksCount", pa.int64()),
        ("status", pa.struct([("message", pa.string()), ("code", pa.string())])),
        ("flags", pa.int64()),
        _UNKNOWN,
    ]
)


_SCOPE = pa.struct([("name", pa.string()), ("version", pa.string()), _ATTRIBUTES, _DROPPED])


_CANONICAL = pa.struct(
    [
        ("resource", pa.struct([_ATTRIBUTES, _DROPPED])),
        (
            "scopeSpans",
            pa.list_(
                pa.struct(
                    [
                        ("scope", _SCOPE),
                        ("spans", pa.list_(_SPAN)),
                        ("schemaUrl", pa.string()),
                        _UNKNOWN,
                    ]
                )
            ),
        ),
        ("schemaUrl", pa.string()),
        _UNKNOWN,
    ]
)


def canonical(items: list[Any]) -> pa.StructArray:
    """ResourceSpans objects in any spelling as nested Arrow."""
    return pa.array([_resource_spans(item) for item in items if isinstance(item, dict)], _CANONICAL)


@lru_cache(maxsize=4096)
def _camel(key: str) -> str:
    """snake_case keys as OTLP/JSON spells them."""
    head, *rest = key.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in rest)


def camel(item: Any) -> dict[str, Any]:
    """An object with its keys spelled as OTLP/JSON spells them; anything else is an empty one."""
    return {_camel(key): value for key, value in item.items()} if isinstance(item, dict) else {}


def _children(item: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    for name in names:
        values = item.get(name)
        if isinstance(values, list):
            return [camel(value) for value in values if isinstance(value, dict)]
    return []


def _resource_spans(raw: dict[str, Any]) -> dict[str, Any]:
    item = camel(raw)
    resource = camel(item.get("resource"))
    known = {"resource", "scopeSpans", "instrumentationLibrarySpans", "schemaUrl"}
    more = {k: v for k, v in resource.items() if k not in ("attributes", "droppedAttributesCount")}
    return {
        "resource": _attributed(resource),
        "scopeSpans": [
            _scope_spans(s) for s in _children(item, "scopeSpans", "instrumentationLibrarySpans")
        ],
        "schemaUrl": _text(item.get("schemaUrl")),
        "unknown": _unknown({**item, **({"resourceFields": more} if more else {})}, known),
    }


def _scope_spans(item: dict[str, Any]) -> dict[str, Any]:
    scope = camel(item.get("scope") or item.get("instrumentationLibrary"))
    return {
        "scope": {
            **_attributed(scope),
            "name": _text(scope.get("name")),
            "version": _text(scope.get("version")),
        },
        "spans": [_span(span) for span in _children(item, "spans")],
        "schemaUrl": _text(item.get("schemaUrl")),
        "unknown": _unknown(item, {"scope", "instrumentationLibrary", "spans", "schemaUrl"}),
    }


_SPAN_FIELDS = {f.name for f in _SPAN}


def _span(item: dict[str, Any]) -> dict[str, Any]:
    status = camel(item.get("status"))
    return {
        **_attributed(item),
        **{
            name: _text(item.get(name))
            for name in ("traceId", "spanId", "parentSpanId", "name", "traceState", "kind")
        },
        **{
            name: _integer(item.get(name))
            for name in (
                "startTimeUnixNano",
                "endTimeUnixNano",
                "flags",
                "droppedEventsCount",
                "droppedLinksCount",
            )
        },
        "status": {"message": _text(status.get("message")), "code": _text(status.get("code"))},
        "events": [_event(event) for event in _children(item, "events")],
        "links": [_link(link) for link in _children(item, "links")],
        "unknown": _unknown(item, _SPAN_FIELDS),
    }


def _event(item: dict[str, Any]) -> dict[str, Any]:
    return {
        **_attributed(item),
        "timeUnixNano": _integer(item.get("timeUnixNano")),
        "name": _text(item.get("name")),
        "unknown": _unknown(item, {f.name for f in _EVENT}),
    }


def _link(item: dict[str, Any]) -> dict[str, Any]:
    return {
        **_attributed(item),
        **{name: _text(item.get(name)) for name in ("traceId", "spanId", "traceState")},
        "flags": _integer(item.get("flags")),
        "unknown": _unknown(item, {f.name for f in _LINK}),
    }


def _attributed(item: dict[str, Any]) -> dict[str, Any]:
    return {
        "attributes": key_values(item.get("attributes")),
        "droppedAttributesCount": _integer(item.get("droppedAttributesCount")),
    }


def key_values(attributes: Any) -> list[dict[str, Any]]:
    """Attributes as {key, value}; a plain JSON object, as some writers have it, is taken too."""
    if isinstance(attributes, dict):
        return [{"key": key, "value": _typed(value)} for key, value in attributes.items()]
    if not isinstance(attributes, list):
        return []
    return [
        {"key": _text(item.get("key")), "value": _value(item.get("value"))}
        for item in attributes
        if isinstance(item, dict)
    ]


def _value(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return _typed(value)
    for name, inner in value.items():
        kind = _camel(name)
        if inner is None:
            continue
        if kind == "stringValue" and isinstance(inner, str):
            return {"stringValue": inner}
        if kind == "boolValue" and isinstance(inner, bool):
            return {"boolValue": inner}
        if kind == "intValue":
            return _typed(whole(inner))
        if kind == "doubleValue":
            return _double(inner)
        break
    return {"otherJson": json_text(plain({_camel(k): v for k, v in value.items()}))}


def _double(inner: Any) -> dict[str, Any]:
    try:
        return {"doubleValue": float(inner)}
    except (TypeError, ValueError):
        return _typed(finite(inner))


def _typed(value: Any) -> dict[str, Any]:
    """A plain JSON value by its own type; integers beyond 64 bits stay text."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": value} if -(2**63) <= value < 2**63 else {"stringValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    return {"otherJson": json_text(value)}


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json_text(value)


def _integer(value: Any) -> int | None:
    number = whole(value)
    if isinstance(number, bool) or not isinstance(number, int):
        return None
    return number if -(2**63) <= number < 2**63 else None


def _unknown(item: dict[str, Any], known: set[str]) -> str | None:
    more = {key: value for key, value in item.items() if key not in known}
    return json_text(more) if more else None
