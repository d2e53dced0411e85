"""OTLP log records and metric data points -> rows of `log_records` (staging) and `samples`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from ._common import integer, number
from ._otlp_content import redact
from ._otlp_json_walk import camel
from ._otlp_resources import Resources
from ._otlp_values import json_text, pairs, plain, whole

Row = dict[str, Any]
DELTA = ("1", "AGGREGATION_TEMPORALITY_DELTA", "DELTA")


def _items(item: dict[str, Any], *names: str) -> Iterator[dict[str, Any]]:
    for name in names:
        values = item.get(name)
        for value in values if isinstance(values, list) else []:
            yield camel(value)


def _instant(value: Any) -> int | None:
    found = whole(value)
    return found if isinstance(found, int) and 0 < found < 2**63 else None


def _id(value: Any) -> str | None:
    """An id as hexadecimal text; base64 (protobuf's own JSON mapping) is turned into it."""
    if not isinstance(value, str) or not value.strip("0"):
        return None
    if len(value) in (12, 24):
        import base64

        try:
            raw = base64.b64decode(value, validate=True)
        except ValueError:
            return value.lower()
        return raw.hex() if len(raw) in (8, 16) else value.lower()
    return value.lower()


def _resource(
    item: dict[str, Any], resources: Resources, keep_content: bool
) -> tuple[str, dict[str, Any], int]:
    resource = camel(item.get("resource"))
    attributes = pairs(resource.get("attributes"))
    more = {
        "schemaUrl": item.get("schemaUrl"),
        "droppedAttributesCount": resource.get("droppedAttributesCount"),
    }
    key, withheld = resources.of(attributes, more, keep_content=keep_content)
    return key, attributes, withheld


_SEVERITIES = ("TRACE", "DEBUG", "INFO", "WARN", "ERROR", "FATAL")


def _severity(record: dict[str, Any]) -> str | None:
    text = record.get("severityText")
    if isinstance(text, str) and text:
        return text
    level = whole(record.get("severityNumber"))
    if isinstance(level, int) and 1 <= level <= 24:
        return _SEVERITIES[(level - 1) // 4]
    if isinstance(level, str):  # SEVERITY_NUMBER_INFO2
        return level.rpartition("_")[2].rstrip("0123456789") or None
    return None


def log_rows(
    items: list[Any], resources: Resources, first: int, *, keep_content: bool
) -> tuple[list[Row], int]:
    """Log records below ResourceLogs objects, numbered from `first`.

    And the count of withheld attributes.
    """
    rows: list[Row] = []
    withheld = 0
    for item in map(camel, items):
        resource, _, cut = _resource(item, resources, keep_content)
        withheld += cut
        for scope_logs in _items(item, "scopeLogs", "instrumentationLibraryLogs"):
            scope = camel(scope_logs.get("scope") or scope_logs.get("instrumentationLibrary"))
            for record in _items(scope_logs, "logRecords", "logs"):
                attributes = pairs(record.get("attributes"))
                if attributes and not keep_content:
                    # The staging table never reaches a file, and long payloads are what some
                    # collectors read; they decide what of them is stored.
                    counted = redact(attributes, long_texts=False)
                    attributes, withheld = counted.value, withheld + counted.withheld
                body = plain(record.get("body"))
                rows.append(
                    {
                        "record": first + len(rows),
                        "time_ns": _instant(record.get("timeUnixNano"))
                        or _instant(record.get("observedTimeUnixNano")),
                        "severity": _severity(record),
                        "body": body if body is None or isinstance(body, str) else json_text(body),
                        "event_name": record.get("eventName") or None,
                        "trace_id": _id(record.get("traceId")),
                        "span_id": _id(record.get("spanId")),
                        "scope_name": scope.get("name") or None,
                        "resource": resource,
                        "attributes": json_text(attributes) if attributes else None,
                    }
                )
    return rows, withheld


# ---- metrics -------------------------------------------------------------------------------------


def sample_rows(
    items: list[Any], first: int, worker: Callable[[dict[str, Any]], str]
) -> tuple[list[Row], list[int], int]:
    """Data points below ResourceMetrics objects as samples.

    Ordinals of points without a value; points seen.
    """
    rows: list[Row] = []
    empty: list[int] = []
    ordinal = first
    for item in map(camel, items):
        attributes = pairs(camel(item.get("resource")).get("attributes"))
        name = worker(attributes)
        for scope_metrics in _items(item, "scopeMetrics", "instrumentationLibraryMetrics"):
            for metric in _items(scope_metrics, "metrics"):
                for point, samples in _points(metric):
                    made = [_sample(point, *sample) for sample in samples if sample[2] is not None]
                    rows.extend({**row, "record": ordinal, "worker": name} for row in made)
                    if not made:
                        empty.append(ordinal)
                    ordinal += 1
    return rows, empty, ordinal - first


Sample = tuple[
    str, dict[str, str], float | None, str, bool
]  # metric, more labels, value, kind, delta


def _points(metric: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[Sample]]]:
    name = str(metric.get("name") or "")
    for kind in ("gauge", "sum", "histogram", "exponentialHistogram", "summary"):
        data = camel(metric.get(kind))
        delta = str(data.get("aggregationTemporality")) in DELTA
        for point in _items(data, "dataPoints"):
            yield point, list(_samples(name, kind, data, point, delta))


def _samples(
    name: str, kind: str, data: dict[str, Any], point: dict[str, Any], delta: bool
) -> Iterator[Sample]:
    if kind in ("gauge", "sum"):
        value = number(point.get("asInt", point.get("asDouble")))
        monotonic = kind == "sum" and data.get("isMonotonic") is True
        yield name, {}, value, "counter" if monotonic else "gauge", delta and kind == "sum"
        return
    if kind == "summary":
        for item in _items(point, "quantileValues"):
            label = {"quantile": _bound(number(item.get("quantile")))}
            yield name, label, number(item.get("value") or 0), "gauge", False
    if kind == "histogram":
        yield from _buckets(name, point, delta)
    if kind == "exponentialHistogram":
        yield from _exponential_buckets(name, point, delta)
    yield f"{name}_sum", {}, number(point.get("sum")), "histogram", delta
    yield f"{name}_count", {}, number(point.get("count")), "histogram", delta


def _buckets(name: str, point: dict[str, Any], delta: bool) -> Iterator[Sample]:
    counts = point.get("bucketCounts") or []
    bounds = point.get("explicitBounds") or []
    total = 0.0
    for index, count in enumerate(counts):
        total += number(count) or 0.0
        le = _bound(number(bounds[index])) if index < len(bounds) else "+Inf"
        yield f"{name}_bucket", {"le": le}, total, "histogram", delta


def _exponential_buckets(name: str, point: dict[str, Any], delta: bool) -> Iterator[Sample]:
    """The same cumulative series as of other histograms; edges are powers of 2^(2^-scale)."""
    scale = integer(point.get("scale")) or 0
    below, above = (_side(point.get(side)) for side in ("negative", "positive"))
    edges: dict[float, float] = {}  # count at or below each edge, ascending
    total = 0.0
    for index, count in reversed(below):
        edges.setdefault(-_edge(scale, index + 1), total)
        total += count
        edges[-_edge(scale, index)] = total
    zeros = number(point.get("zeroCount")) or 0.0
    total += zeros
    if zeros:
        edges[number(point.get("zeroThreshold")) or 0.0] = total
    for index, count in above:
        edges.setdefault(_edge(scale, index), total)
        total += count
        edges[_edge(scale, index + 1)] = total
    for edge, value in edges.items():
        if math.isfinite(edge):
            yield f"{name}_bucket", {"le": _bound(edge)}, value, "histogram", delta
    if edges:
        yield f"{name}_bucket", {"le": "+Inf"}, total, "histogram", delta


def _side(buckets: Any) -> list[tuple[int, float]]:
    """(index, count) of the buckets on one side of zero, outwards."""
    side = camel(buckets)
    offset = integer(side.get("offset")) or 0
    counts = side.get("bucketCounts")
    listed = counts if isinstance(counts, list) else []
    return [(offset + place, number(count) or 0.0) for place, count in enumerate(listed)]


def _edge(scale: int, index: int) -> float:
    """The lower edge of a bucket: (2^(2^-scale))^index."""
    try:
        return float(2.0 ** math.ldexp(index, -scale))
    except OverflowError:
        return math.inf if index > 0 else 0.0


def _bound(value: float | None) -> str:
    return "" if value is None else repr(value)


def _sample(
    point: dict[str, Any],
    name: str,
    more: dict[str, str],
    value: float | None,
    kind: str,
    delta: bool,
) -> Row:
    labels = redact(pairs(point.get("attributes"))).value
    time, start = _instant(point.get("timeUnixNano")), _instant(point.get("startTimeUnixNano"))
    interval = time - start if delta and time is not None and start is not None else None
    texts = {key: v if isinstance(v, str) else json_text(v) for key, v in labels.items()}
    return {
        "time_ns": time,
        "metric": name,
        "labels": orjson.dumps({**texts, **more}, option=orjson.OPT_SORT_KEYS).decode(),
        "value": value,
        "interval_ns": interval,
        "kind": kind,
        "resolution_ns": 1,
    }
