"""OTLP/JSON: pyarrow.json for regular lines, a walk over Python objects for everything else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import IO, Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from ._common import CUT_OFF, LONELY, NOT_AN_OBJECT, NOT_JSON, loads
from ._otlp_values import finite, json_text, plain, whole

BLOCK_BYTES = 4 << 20  # pages of larger ones go back to the system and come anew each time
NOT_OTLP = "JSON, but no OTLP export request"

# ---- the fast way: pyarrow.json ------------------------------------------------------------------


@dataclass(frozen=True)
class Spelling:
    """How a writer spells what OTLP/JSON leaves open.

    64-bit integers as text or numbers, enums as numbers or names.
    """

    instants: str = "text"
    integers: str = "text"
    kind: str = "number"
    code: str = "number"
    fields: frozenset[str] = frozenset()  # of the rare ones, those that occur


_SPELLINGS = {
    "instants": re.compile(rb'"(?:start|end)TimeUnixNano"\s*:\s*("?)'),
    "integers": re.compile(rb'"intValue"\s*:\s*("?)'),
    "kind": re.compile(rb'"kind"\s*:\s*("?)'),
    "code": re.compile(rb'"code"\s*:\s*("?)'),
}


def spelling_of(block: bytes) -> Spelling:
    """The spelling of the first span that shows it."""
    found = {name: pattern.search(block) for name, pattern in _SPELLINGS.items()}
    spelled = {name: "text" if m.group(1) else "number" for name, m in found.items() if m}
    return Spelling(**spelled, fields=frozenset(f for f in _RARE if f'"{f}"'.encode() in block))


# Each field of the schema costs time for every record, whether it is there or not: a third of the
# parsing with all of these. A block that has one more of them is read again with it.
_RARE = (
    "arrayValue",
    "bytesValue",
    "boolValue",
    "droppedAttributesCount",
    "droppedEventsCount",
    "droppedLinksCount",
    "events",
    "links",
    "traceState",
    "flags",
    "schemaUrl",
)


def _lean(kind: pa.DataType, fields: frozenset[str]) -> pa.DataType:
    """A type without the rare fields that do not occur."""
    if pa.types.is_list(kind):
        return pa.list_(_lean(kind.value_type, fields))
    if pa.types.is_struct(kind):
        kept = [f for f in kind if f.name in fields or f.name not in _RARE]
        return pa.struct([(f.name, _lean(f.type, fields)) for f in kept])
    return kind


@lru_cache(maxsize=16)
def _schema(spelling: Spelling) -> pa.Schema:
    text, number = pa.string(), pa.int64()
    instant = text if spelling.instants == "text" else number
    integer = text if spelling.integers == "text" else number
    scalar = [
        ("stringValue", text),
        ("boolValue", pa.bool_()),
        ("intValue", integer),
        ("doubleValue", pa.float64()),
    ]
    value = pa.struct(
        [
            *scalar,
            ("arrayValue", pa.struct([("values", pa.list_(pa.struct(scalar)))])),
            ("bytesValue", _BYTES),
        ]
    )
    attributes = ("attributes", pa.list_(pa.struct([("key", text), ("value", value)])))
    dropped = ("droppedAttributesCount", number)
    event = pa.struct([("timeUnixNano", instant), ("name", text), attributes, dropped])
    link = pa.struct(
        [
            ("traceId", text),
            ("spanId", text),
            ("traceState", text),
            attributes,
            dropped,
            ("flags", number),
        ]
    )
    code = text if spelling.code == "text" else number
    span = pa.struct(
        [
            ("traceId", text),
            ("spanId", text),
            ("traceState", text),
            ("parentSpanId", text),
            ("name", text),
            ("kind", text if spelling.kind == "text" else number),
            ("startTimeUnixNano", instant),
            ("endTimeUnixNano", instant),
            attributes,
            dropped,
            ("events", pa.list_(event)),
            ("droppedEventsCount", number),
            ("links", pa.list_(link)),
            ("droppedLinksCount", number),
            ("status", pa.struct([("message", text), ("code", code)])),
            ("flags", number),
        ]
    )
    scope = pa.struct([("name", text), ("version", text), attributes, dropped])
    scope_spans = pa.struct([("scope", scope), ("spans", pa.list_(span)), ("schemaUrl", text)])
    resource = pa.struct([attributes, dropped])
    resource_spans = pa.struct(
        [("resource", resource), ("scopeSpans", pa.list_(scope_spans)), ("schemaUrl", text)]
    )
    return pa.schema([("resourceSpans", pa.list_(_lean(resource_spans, spelling.fields)))])


_BYTES = pa.string()


def resource_spans(
    block: bytes, spelling: Spelling, *, pretty: bool = False
) -> pa.StructArray | None:
    """All ResourceSpans of whole JSON lines (or of one pretty-printed object).

    None when pyarrow refuses the block.
    """
    try:
        table = pj.read_json(
            pa.BufferReader(block),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=_schema(spelling),
                unexpected_field_behavior="error",
                newlines_in_values=pretty,
            ),
        )
    except pa.ArrowInvalid:
        return None
    column = table.column(0).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return column.flatten()


# ---- the careful way: Python objects -------------------------------------------------------------

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


# ---- requests ------------------------------------------------------------------------------------


@dataclass
class Requests:
    """What export requests hold, by signal, and the records that could not be taken.

    (reason, excerpt).
    """

    spans: list[Any] = field(default_factory=list)
    logs: list[Any] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def take(self, value: Any) -> None:
        """Note the contents of one request, or of an array of them."""
        if isinstance(value, list):
            for item in value:
                self.take(item)
            return
        if not isinstance(value, dict):
            self.problems.append((NOT_AN_OBJECT, ""))
            return
        request = camel(value)
        inner = request.get("trace") or request.get("data")
        if isinstance(inner, dict) and not request.keys() & _SIGNALS:
            request = camel(inner)
        found = False
        for key, target in (
            ("resourceSpans", self.spans),
            ("batches", self.spans),
            ("resourceLogs", self.logs),
            ("resourceMetrics", self.metrics),
        ):
            items = request.get(key)
            if key in request:
                found = True
                target.extend(items if isinstance(items, list) else [])
        if not found and request:
            self.problems.append((NOT_OTLP, ""))


_SIGNALS = {"resourceSpans", "resourceLogs", "resourceMetrics", "batches"}


def requests_of_lines(block: bytes, *, cut: bool) -> Requests:
    """Requests of whole lines, one by one; `cut`: the last one may end in the middle."""
    found = Requests()
    lines = block.split(b"\n")
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            found.take(loads(line))
        except ValueError:
            last = cut and index == len(lines) - 1
            if last and (value := salvaged(line)) is not None:
                found.take(value)
            found.problems.append(
                (CUT_OFF if last else NOT_JSON, line[:200].decode("utf-8", "replace"))
            )
    return found


def requests_of_document(data: bytes) -> Requests:
    """Requests of a whole file: one object or array, several one after the other, or a cut one."""
    found = Requests()
    try:
        found.take(loads(data))
    except ValueError:
        _take_one_by_one(LONELY.sub(r"\\ufffd", data.decode("utf-8", "replace")), found)
    return found


def _take_one_by_one(text: str, found: Requests) -> None:
    decoder = json.JSONDecoder()
    at = 0
    blank = re.compile(r"[\s,\x1e]*")
    while (at := blank.match(text, at).end()) < len(text):  # type: ignore[union-attr]
        try:
            value, at = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError):
            rest = text[at:]
            kept = salvaged(rest.encode("utf-8", "surrogatepass"))
            if kept is not None:
                found.take(kept)
            reason = CUT_OFF if rest[:1] in "{[" else NOT_JSON
            found.problems.append((reason, rest[:200]))
            return
        found.take(value)


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')
_RECORD_LISTS = {
    b"",
    b"spans",
    b"logRecords",
    b"log_records",
    b"metrics",
    b"scopeSpans",
    b"scope_spans",
    b"scopeLogs",
    b"scope_logs",
    b"scopeMetrics",
    b"scope_metrics",
    b"resourceSpans",
    b"resource_spans",
    b"resourceLogs",
    b"resource_logs",
    b"resourceMetrics",
    b"resource_metrics",
    b"batches",
}


def salvaged(data: bytes) -> Any:
    """A cut JSON request without the record that was cut; None when nothing is left."""
    stack: list[tuple[bytes, bytes]] = []  # closing bracket, key that the list stands under
    last = b""
    end, closers = 0, b""
    for token in _TOKEN.finditer(data):
        sign = token.group()
        if sign in (b"{", b"["):
            stack.append((b"}" if sign == b"{" else b"]", last))
            last = b""
        elif sign in (b"}", b"]"):
            if not stack or stack[-1][0] != sign:
                return None
            stack.pop()
            if sign == b"}" and stack and stack[-1][0] == b"]" and stack[-1][1] in _RECORD_LISTS:
                end, closers = token.end(), b"".join(bracket for bracket, _ in reversed(stack))
        else:
            last = sign[1:-1]
    if not end:
        return None
    try:
        return orjson.loads(data[:end] + closers)
    except orjson.JSONDecodeError:
        return None


# ---- cutting a stream ----------------------------------------------------------------------------


def line_blocks(first: bytes, stream: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Blocks of whole lines; True with the last one when it has no newline at its end."""
    parts = [first]
    while block := stream.read(BLOCK_BYTES):
        end = block.rfind(b"\n")
        if end < 0:
            parts.append(block)
            continue
        head = b"".join([*parts, block[: end + 1]])
        parts = [block[end + 1 :]]
        yield head, False
    rest = b"".join(parts)
    end = rest.rfind(b"\n") + 1
    if end:
        yield rest[:end], False
    if rest[end:].strip():
        yield rest[end:], True


def is_lines(start: bytes) -> bool:
    """Whether a file that begins so is JSON lines (also one alone), not one long document."""
    text = start.lstrip()
    line, newline, rest = text.partition(b"\n")
    if line.startswith(b"["):
        return False
    if not newline:
        return True
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return re.match(rb'\s*\{\s*"', rest) is not None or not line.startswith(b"{")
    return True


def count(array: pa.StructArray) -> int:
    """Spans below ResourceSpans messages."""
    lists = array.field("scopeSpans").flatten().field("spans")
    return int(pc.sum(pc.list_value_length(lists)).as_py() or 0)
