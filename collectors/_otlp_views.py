"""Spans as trace viewers and consoles print them, put as OTLP: Jaeger, Zipkin, OpenTelemetry's console.

Source: jaegertracing/jaeger model/json (/api/traces, instants in µs), openzipkin/zipkin-api
zipkin2 (/api/v2/trace, instants in µs), open-telemetry/opentelemetry-python ConsoleSpanExporter
(objects one after the other, ISO 8601). Tags that Zipkin and old exporters write as text get
their number back where GenAI conventions say that they are numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any

Object = dict[str, Any]

_FORMS: tuple[tuple[str, re.Pattern[str], re.Pattern[str]], ...] = (
    ("Jaeger JSON", re.compile(r'"traceID"\s*:'), re.compile(r'"operationName"\s*:')),
    ("Zipkin JSON", re.compile(r'"traceId"\s*:\s*"[0-9a-fA-F]+"'), re.compile(r'"(?:localEndpoint|annotations|tags|timestamp)"\s*:')),
    ("spans of OpenTelemetry's console exporter", re.compile(r'"context"\s*:\s*\{[^{}]*"trace_id"\s*:\s*"0x'), re.compile(r'"start_time"\s*:')),
)  # fmt: skip
_NUMBER = re.compile(r"-?\d{1,15}(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)
_NUMBERED = re.compile(
    r"gen_ai\.(?:usage|latency)\.|gen_ai\.request\.(?:n|max_tokens|top_\w|temperature)$|llm\.(?:token_count|usage)\."
)
_COUNTED = re.compile(r"(?:gen_ai\.usage|llm\.token_count|llm\.usage)\.")
_KINDS = {"server": 2, "client": 3, "producer": 4, "consumer": 5, "internal": 1}


def form_of(head: str) -> str | None:
    """Which of these forms a text is in, or None; OTLP itself is none of them."""
    if '"startTimeUnixNano"' in head or '"start_time_unix_nano"' in head:
        return None
    for form, one, other in _FORMS:
        if one.search(head) and other.search(head):
            return form
    return None


def resource_spans(value: Any) -> list[Object]:
    """ResourceSpans of one decoded value, whichever of the forms it is in."""
    if isinstance(value, list):
        return [group for item in value for group in resource_spans(item)]
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("_source"), dict):  # a dump of Elasticsearch
        return resource_spans(value["_source"])
    inner = value.get("data")
    if isinstance(inner, list):
        return resource_spans(inner)
    if isinstance(value.get("spans"), list):
        return _jaeger(value)
    if "context" in value and "start_time" in value:
        return _group([(_resource(value.get("resource")), _console(value))])
    if "operationName" in value:
        return _jaeger({"spans": [value], "processes": {}})
    return _group([_zipkin(value)]) if "traceId" in value and "id" in value else []


def document(
    resource: Object, trace: Any, own: Any, parent: Any, name: Any, tags: Object, times: Object
) -> Object:
    """One span of a table as an OTLP document; its tags may be text."""
    groups = _group([(resource, _span(trace, own, parent, name, tags) | times)])
    for group in groups:
        group["resource"]["attributes"] = _listed(group["resource"]["attributes"])
        for span in group["scopeSpans"][0]["spans"]:
            span["attributes"] = _listed(span["attributes"])
    return {"resourceSpans": groups}


def _listed(attributes: Object) -> list[Object]:
    return [
        {"key": key, "value": _any(value)} for key, value in attributes.items() if value is not None
    ]


def _any(value: Any) -> Object:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}


# ---- Jaeger


def _jaeger(trace: Object) -> list[Object]:
    processes = _dict(trace.get("processes"))
    found = []
    for raw in _dicts(trace.get("spans")):
        process = _dict(raw.get("process")) or _dict(processes.get(str(raw.get("processID"))))
        resource = {"service.name": process.get("serviceName"), **_tags(process.get("tags"))}
        tags = _tags(raw.get("tags"))
        # Elasticsearch has some tags as fields, with @ for each dot
        tags |= {key.replace("@", "."): item for key, item in _dict(raw.get("tag")).items()}
        start = _ns(raw.get("startTime"))
        references = [_dict(item) for item in raw.get("references") or []]
        parents = [r for r in references if r.get("refType") == "CHILD_OF"]
        parent = parents[0].get("spanID") if parents else raw.get("parentSpanID")
        events = [_log(item) for item in _dicts(raw.get("logs"))]
        span = _span(raw.get("traceID"), raw.get("spanID"), parent, raw.get("operationName"), tags)
        found.append(
            (
                resource,
                span
                | _times(start, _ns(raw.get("duration")))
                | {
                    "events": events,
                    "links": [_link(r) for r in references if r not in parents[:1]],
                },
            )
        )
    return _group(found)


def _log(raw: Object) -> Object:
    fields = _tags(raw.get("fields"))
    name = fields.pop("event", None) or fields.pop("message", None)
    return {"timeUnixNano": _ns(raw.get("timestamp")), "name": name, "attributes": fields}


def _link(reference: Object) -> Object:
    return {
        "traceId": _id(reference.get("traceID"), 32),
        "spanId": _id(reference.get("spanID"), 16),
    }


def _tags(raw: Any) -> Object:
    """A list of {key, type, value}, or a plain object as Elasticsearch holds it."""
    if isinstance(raw, dict):
        return dict(raw)
    return {str(tag.get("key")): _tag(tag) for tag in _dicts(raw)}


def _tag(tag: Object) -> Any:
    value, kind = tag.get("value", tag.get("vStr")), str(tag.get("type", "")).lower()
    if isinstance(value, str):
        if kind == "bool":
            return value.lower() == "true"
        if kind in ("int64", "float64") and _NUMBER.fullmatch(value):
            return int(value) if kind == "int64" and value.lstrip("-").isdigit() else float(value)
    return float(value) if kind == "float64" and isinstance(value, int) else value


# ---- Zipkin


def _zipkin(raw: Object) -> tuple[Object, Object]:
    tags = _dict(raw.get("tags"))
    endpoint = _dict(raw.get("localEndpoint"))
    resource = {"service.name": endpoint.get("serviceName")}
    address = endpoint.get("ipv4") or endpoint.get("ipv6")
    if address:
        resource["server.address"] = address
    tags.setdefault("span.kind", str(raw.get("kind") or "internal").lower())
    events = [
        {"timeUnixNano": _ns(item.get("timestamp")), "name": item.get("value")}
        for item in _dicts(raw.get("annotations"))
    ]
    span = _span(raw.get("traceId"), raw.get("id"), raw.get("parentId"), raw.get("name"), tags)
    times = _times(_ns(raw.get("timestamp")), _ns(raw.get("duration")))
    return resource, span | times | {"events": events}


# ---- OpenTelemetry's console


def _console(raw: Object) -> Object:
    context = _dict(raw.get("context"))
    tags = _dict(raw.get("attributes"))
    tags["span.kind"] = str(raw.get("kind", "")).rpartition(".")[2].lower()
    status = _dict(raw.get("status"))
    tags.setdefault("otel.status_code", status.get("status_code"))
    tags.setdefault("otel.status_description", status.get("description"))
    scope = _dict(raw.get("instrumentation_scope") or raw.get("scope"))
    tags.setdefault("otel.scope.name", scope.get("name"))
    events = [
        {
            "timeUnixNano": _iso_ns(item.get("timestamp")),
            "name": item.get("name"),
            "attributes": _dict(item.get("attributes")),
        }
        for item in _dicts(raw.get("events"))
    ]
    span = _span(
        context.get("trace_id"), context.get("span_id"), raw.get("parent_id"), raw.get("name"), tags
    )
    start, end = _iso_ns(raw.get("start_time")), _iso_ns(raw.get("end_time"))
    return span | {"startTimeUnixNano": start, "endTimeUnixNano": end, "events": events}


def _resource(raw: Any) -> Object:
    resource = _dict(raw)
    return _dict(resource.get("attributes")) if "attributes" in resource else resource


def _iso_ns(text: Any) -> int | None:
    try:
        moment = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None
    if moment.tzinfo is None:
        return None
    return round(moment.replace(microsecond=0).timestamp()) * 10**9 + moment.microsecond * 1000


# ---- what they share


def _span(trace: Any, own: Any, parent: Any, name: Any, tags: Object) -> Object:
    """A span without its times; what exporters put into tags goes back to its place."""
    kind = str(tags.pop("span.kind", "") or "").lower()
    code = str(tags.pop("otel.status_code", "") or "").upper()
    if code not in ("OK", "ERROR") and str(tags.get("error", "")).lower() not in ("", "false"):
        code = "ERROR"
    message = tags.pop("otel.status_description", None)
    scope = {
        "name": tags.pop("otel.scope.name", None) or tags.pop("otel.library.name", None),
        "version": tags.pop("otel.scope.version", None) or tags.pop("otel.library.version", None),
    }
    return {
        "scope": scope,
        "traceId": _id(trace, 32),
        "spanId": _id(own, 16),
        "parentSpanId": _id(parent, 16),
        "name": name,
        "kind": _KINDS.get(kind, 0),
        "status": {"code": {"OK": 1, "ERROR": 2}.get(code, 0), "message": message},
        "attributes": {key: _number(key, value) for key, value in tags.items()},
    }


def _number(key: str, value: Any) -> Any:
    if isinstance(value, str) and _NUMBERED.match(key) and _NUMBER.fullmatch(value):
        value = int(value) if value.lstrip("-").isdigit() else float(value)
    # a data frame with gaps holds counts as 700.0
    counted = isinstance(value, float) and value.is_integer() and _COUNTED.match(key)
    return int(value) if counted else value


def _id(text: Any, digits: int) -> str | None:
    """Hexadecimal of full length: viewers cut leading zeros. No parent is None."""
    found = str(text or "").lower().removeprefix("0x")
    return found.rjust(digits, "0") if found.strip("0") else None


def _times(start: int | None, duration: int | None) -> Object:
    known = start is not None and duration is not None
    return {"startTimeUnixNano": start, "endTimeUnixNano": start + duration if known else None}  # type: ignore[operator]


def _ns(micros: Any) -> int | None:
    if isinstance(micros, str) and _NUMBER.fullmatch(micros):
        micros = float(micros) if "." in micros else int(micros)
    if isinstance(micros, bool) or not isinstance(micros, int | float):
        return None
    return round(micros * 1000)


def _group(spans: Iterable[tuple[Object, Object]]) -> list[Object]:
    """ResourceSpans with one scope per span: the reader finds equal ones again."""
    return [
        {
            "resource": {"attributes": {k: v for k, v in resource.items() if v is not None}},
            "scopeSpans": [{"scope": span.pop("scope"), "spans": [span]}],
        }
        for resource, span in spans
    ]


def _dict(value: Any) -> Object:
    return dict(value) if isinstance(value, dict) else {}


def _dicts(value: Any) -> list[Object]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
