"""Nested OTLP spans as Arrow -> rows of the tables `spans` and `resources`, in whole columns.

Every decoder (ptars, pyarrow.json, the walk over Python objects) hands over the same nesting with
the field names of OTLP/JSON; only leaf types differ (ids as bytes or text, integers as numbers or
text). One code flattens them all: the same spans give the same rows whatever wrote them.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from pdtrace.records import dataclass

from ._compute import pc
from ._errors import is_plain
from ._otlp_attributes import Lifted, json_objects, optional, ragged, typed_columns, withhold
from ._otlp_content import Counted, redact, stand_in
from ._otlp_ids import hexadecimal
from ._otlp_items import Items, Spans, nested, parents
from ._otlp_resources import Resources
from ._otlp_rest import Placed

KINDS = ("unspecified", "internal", "server", "client", "producer", "consumer")
STATUS_CODES = ("unset", "ok", "error")
INT64_MAX = 2**63 - 1


@dataclass
class SpanRows:
    """Rows of one batch: `spans` without column record, and how many texts were withheld."""

    spans: pa.Table
    withheld: int = 0


@dataclass
class _Fragments:
    """Pieces of the JSON object `extra`, per row; most rows have none."""

    keep_content: bool = False
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    withheld: int = 0

    def put(self, row: int, key: str, value: Any) -> None:
        self.rows.setdefault(row, {})[key] = value

    def column(self, n: int) -> pa.Array:
        if not self.rows:
            return pa.nulls(n, pa.string())
        texts: list[str | None] = [None] * n
        for row, fields in self.rows.items():
            texts[row] = orjson.dumps(fields, option=orjson.OPT_SORT_KEYS).decode()
        return pa.array(texts, pa.string())


@dataclass
class _Scopes:
    """What spans have from their scope, by the scope's number."""

    name: pa.Array
    version: pa.Array
    resource: pa.Array
    extra: dict[int, dict[str, Any]]


def span_rows(
    resource_spans: pa.StructArray,
    resources: Resources,
    *,
    keep_content: bool = False,
    lifted: Lifted | None = None,
    placed: Placed | None = None,
) -> SpanRows:
    """Flatten ResourceSpans messages into rows of `spans`, in their order.

    New resources are noted in `resources`. `lifted`, `placed`: attributes and whole spans that were
    taken out before the rest was parsed. ArrowInvalid where that was too much.
    """
    scopes, withheld = _scopes(resource_spans, resources, keep_content, lifted)
    span_lists = resource_spans.field("scopeSpans").flatten().field("spans")
    elements, scope = span_lists.flatten(), parents(span_lists)
    if placed is None:
        table, more = _rows(nested(elements, lifted), scope, scopes, keep_content)
        return SpanRows(table, withheld + more)
    if placed.once and withheld:
        raise pa.ArrowInvalid("texts are counted line by line")
    table, more = _rows(placed.alike, placed.alike_scope, scopes, keep_content)
    if not placed.parsed.any():
        return SpanRows(table, withheld + more)
    rest = nested(elements.filter(pa.array(placed.parsed)), lifted)
    other, most = _rows(rest, scope[placed.parsed], scopes, keep_content)
    order = np.concatenate((placed.alike_order, placed.parsed_order))
    both = pa.concat_tables([table, other], promote_options="default")
    return SpanRows(both.take(pa.array(np.argsort(order))), withheld + more + most)


def _rows(
    found: Spans, span_scope: np.ndarray, scopes: _Scopes, keep_content: bool
) -> tuple[pa.Table, int]:
    """Rows of some spans, and the count of withheld texts."""
    spans, n = found.own.fields, len(found.own.fields)
    extra = _Fragments(keep_content)
    if scopes.extra:
        for row, scope in enumerate(span_scope):
            if int(scope) in scopes.extra:
                extra.put(row, "scope", scopes.extra[int(scope)])
    columns: dict[str, pa.Array] = {
        "trace_id": hexadecimal(spans.field("traceId")),
        "span_id": hexadecimal(spans.field("spanId")),
        "parent_span_id": hexadecimal(optional(spans, "parentSpanId")),
        "start_ns": instants(spans.field("startTimeUnixNano")),
        "end_ns": instants(spans.field("endTimeUnixNano")),
        "name": _encoded(spans.field("name"), ""),
        "kind": _named(spans.field("kind"), KINDS),
        "status_code": _named(spans.field("status").field("code"), STATUS_CODES),
        "trace_state": _text(optional(spans, "traceState")),
        "flags": _positive(optional(spans, "flags")),
        "scope_name": _of_parent(scopes.name, span_scope),
        "scope_version": _of_parent(scopes.version, span_scope),
        "resource": _of_parent(scopes.resource, span_scope),
        "resolution_ns": pa.array(np.ones(n, np.int64)),
    }
    message, withheld = _short(_text(optional(spans.field("status"), "message")), keep_content)
    columns["status_message"] = message

    attributes = found.own.attributes
    for row, fields in attributes.take_irregular().items():
        extra.put(row, "attributes", fields)
    if not keep_content:
        withheld += withhold(attributes)
    columns.update(typed_columns(attributes))
    columns["events"], cut = _children(found.events, "events", n, extra)
    columns["links"], more = _children(found.links, "links", n, extra)
    withheld += cut + more
    for name in ("droppedAttributesCount", "droppedEventsCount", "droppedLinksCount"):
        _note(extra, name, optional(spans, name), np.arange(n))
    _unknown(extra, spans, np.arange(n))
    columns["extra"] = extra.column(n)
    present = {
        name: column for name, column in columns.items() if n and column.null_count < len(column)
    }
    return pa.table(present), withheld + extra.withheld


# ---- scopes, events, links -----------------------------------------------------------------------


def _scopes(
    resource_spans: pa.StructArray, resources: Resources, keep_content: bool, lifted: Lifted | None
) -> tuple[_Scopes, int]:
    """The scopes of all spans, and the count of withheld texts in them and in their resources."""
    scope_lists = resource_spans.field("scopeSpans")
    scopes = scope_lists.flatten()
    resource_ids, withheld = resources.identify(resource_spans, keep_content, lifted)
    scope = scopes.field("scope")
    extra, more = _scope_extra(scopes, scope, keep_content, lifted)
    resource = _of_parent(resource_ids, parents(scope_lists))
    name, version = _text(scope.field("name")), _text(scope.field("version"))
    return _Scopes(name, version, resource, extra), withheld + more


def _scope_extra(
    scopes: pa.StructArray, scope: pa.StructArray, keep_content: bool, lifted: Lifted | None
) -> tuple[dict[int, dict[str, Any]], int]:
    """What scopes say beyond name and version, for `extra` of their spans.

    And the count of withheld texts.
    """
    found = _Fragments(keep_content)
    attributes = ragged(scope.field("attributes"), lifted)
    withheld = 0 if keep_content else withhold(attributes)
    texts = json_objects(attributes)
    for row in _valid(texts):
        found.put(int(row), "attributes", orjson.loads(texts[int(row)].as_py()))
    every = np.arange(len(scopes))
    _note(found, "droppedAttributesCount", optional(scope, "droppedAttributesCount"), every)
    _note(found, "schemaUrl", optional(scopes, "schemaUrl"), every)
    _unknown(found, scopes, every)
    return found.rows, withheld + found.withheld


def _children(children: Items | None, name: str, n: int, extra: _Fragments) -> tuple[pa.Array, int]:
    """Events or links as lists of structs (NULL where a span has none).

    And the count of withheld texts.
    """
    if children is None or not len(children.fields):
        return pa.nulls(n, pa.null()), 0
    items, owner, attributes = children.fields, children.owner, children.attributes
    attributes.take_irregular()
    withheld = 0 if extra.keep_content else withhold(attributes)
    texts = json_objects(attributes)
    if name == "events":
        parts = {
            "time_ns": instants(items.field("timeUnixNano")),
            "name": pc.fill_null(items.field("name"), ""),
            "attributes": texts,
        }
    else:
        parts = {
            "trace_id": hexadecimal(items.field("traceId")),
            "span_id": hexadecimal(items.field("spanId")),
            "attributes": texts,
        }
    counts = np.bincount(owner, minlength=n)
    offsets = np.zeros(n + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    structs = pa.StructArray.from_arrays(list(parts.values()), names=list(parts))
    column = pa.ListArray.from_arrays(pa.array(offsets), structs, mask=pa.array(counts == 0))
    _children_extra(items, name, owner, offsets, extra)
    return column, withheld


def _children_extra(
    items: pa.StructArray, name: str, owner: np.ndarray, offsets: np.ndarray, extra: _Fragments
) -> None:
    """Put what events and links say beyond the columns into `extra`: {"events": {"0": {...}}}."""
    found = _Fragments(extra.keep_content)
    every = np.arange(len(items))
    _note(found, "droppedAttributesCount", optional(items, "droppedAttributesCount"), every)
    if name == "links":
        _note(found, "flags", optional(items, "flags"), every)
        _note(found, "traceState", optional(items, "traceState"), every)
    _unknown(found, items, every)
    extra.withheld += found.withheld
    for item, fields in found.rows.items():
        row = int(owner[item])
        own = extra.rows.setdefault(row, {}).setdefault(name, {})
        own[str(item - int(offsets[row]))] = fields


def _note(extra: _Fragments, name: str, values: pa.Array, rows: np.ndarray) -> None:
    """Note values that are neither missing nor zero nor empty."""
    if values.null_count == len(values):
        return
    if pa.types.is_string(values.type):
        marked = pc.not_equal(values, "")
    else:
        marked = pc.not_equal(values, 0)
    for index in np.flatnonzero(pc.fill_null(marked, False).to_numpy(zero_copy_only=False)):
        value = values[int(index)].as_py()
        extra.put(int(rows[index]), name, value)


def _unknown(extra: _Fragments, structs: pa.StructArray, rows: np.ndarray) -> None:
    """Fields that OTLP does not know, which the walk over Python objects collected as JSON text."""
    if structs.type.get_field_index("unknown") < 0:
        return
    texts = structs.field("unknown")
    for index in _valid(texts):
        for key, value in orjson.loads(texts[int(index)].as_py()).items():
            kept = Counted(value) if extra.keep_content else redact(value, key)
            extra.put(int(rows[index]), key, kept.value)
            extra.withheld += kept.withheld


# ---- columns -------------------------------------------------------------------------------------


def integers(values: pa.Array) -> pa.Array:
    """Integers written as numbers or text as INT64; NULL beyond its range."""
    if pa.types.is_string(values.type):
        try:
            return values.cast(pa.int64())
        except pa.ArrowInvalid:
            return integers(values.cast(pa.uint64()))
    if pa.types.is_uint64(values.type):
        high = pc.greater(values, INT64_MAX)
        if pc.any(high).as_py():
            values = pc.if_else(high, pa.scalar(None, pa.uint64()), values)
    return values.cast(pa.int64())


def instants(values: pa.Array) -> pa.Array:
    """Instants as INT64; 0 means that there is none."""
    return _positive(values)


def _positive(values: pa.Array) -> pa.Array:
    numbers = integers(values)
    zero = pc.equal(numbers, 0)
    if pc.any(zero).as_py():
        numbers = pc.if_else(zero, pa.scalar(None, pa.int64()), numbers)
    return numbers


def _text(values: pa.Array) -> pa.Array:
    """Text with NULL for the empty one, which protobuf cannot tell from a missing one."""
    if values.null_count == len(values):
        return pa.nulls(len(values), pa.string())
    empty = pc.equal(values, "")
    if pc.any(empty).as_py():
        values = pc.if_else(empty, pa.scalar(None, pa.string()), values)
    return values


def _short(values: pa.Array, keep_content: bool) -> tuple[pa.Array, int]:
    """Status messages without those that may quote somebody."""
    if keep_content or values.null_count == len(values):
        return values, 0
    said = values.dictionary_encode() if not pa.types.is_dictionary(values.type) else values
    texts = said.dictionary.to_pylist()
    quoting = np.array([bool(text) and not is_plain(text) for text in texts], bool)
    if not quoting.any():
        return values, 0
    kept = [stand_in(text) if quotes else text for text, quotes in zip(texts, quoting, strict=True)]
    places = said.indices.drop_null().to_numpy()
    return pa.array(kept, pa.string()).take(said.indices), int(quoting[places].sum())


def _encoded(values: pa.Array, missing: str) -> pa.DictionaryArray:
    """Texts as a dictionary, with a text for those that are missing."""
    if pa.types.is_dictionary(values.type):
        return values  # nothing is missing
    return pc.fill_null(values, missing).dictionary_encode()


def _named(codes: pa.Array, names: tuple[str, ...]) -> pa.Array:
    """Enum numbers or names (SPAN_KIND_SERVER) as short names.

    Those that the enum does not know stay as they are.
    """
    if pa.types.is_string(codes.type) or pa.types.is_dictionary(codes.type):
        encoded = _encoded(codes, "0")
        known = [_enum_name(text, names) for text in encoded.dictionary.to_pylist()]
        return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(known, pa.string()))
    numbers = pc.fill_null(codes, 0).cast(pa.int64()).to_numpy()
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= len(names)):
        texts = [names[c] if 0 <= c < len(names) else str(c) for c in numbers]
        return pa.array(texts, pa.string()).dictionary_encode()
    return pa.DictionaryArray.from_arrays(
        pa.array(numbers.astype(np.int32)), pa.array(names, pa.string())
    )


def _enum_name(text: str, names: tuple[str, ...]) -> str:
    if text.isdecimal() and len(text) < 10:
        return names[int(text)] if int(text) < len(names) else text
    short = text.lower().removeprefix("span_kind_").removeprefix("status_code_")
    return short or names[0]


def _of_parent(values: pa.Array, parent: np.ndarray) -> pa.Array:
    """Values of the parents, one per child, kept as a dictionary."""
    encoded = values.dictionary_encode() if not pa.types.is_dictionary(values.type) else values
    return encoded.take(pa.array(parent))


def _valid(values: pa.Array) -> np.ndarray:
    if values.null_count == len(values):
        return np.empty(0, np.int64)
    return np.flatnonzero(pc.is_valid(values).to_numpy(zero_copy_only=False))
