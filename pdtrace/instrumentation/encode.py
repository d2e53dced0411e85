"""Finished requests as OTLP spans in JSON (opentelemetry-proto, trace.proto, JSON mapping).

One request gives a SERVER span `pdtrace.request`, a child for each phase, a CLIENT span for each
hop, and one more request span for each further choice (n > 1). Names: pdtrace/semconv.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from math import isfinite
from typing import Any

from pdtrace import model
from pdtrace import semconv as s
from pdtrace.instrumentation._context import new_span_id
from pdtrace.instrumentation.engine_steps import PARTS
from pdtrace.instrumentation.requests import Request, Stream

Span = dict[str, Any]
Pairs = dict[str, Any]  # attributes by name
PhaseRecord = tuple[str, int, int, Mapping[str, Any], str | None]  # name, start, end, ...
STARTED = "_span"  # key of a hop's attributes: its span, where the application's SDK has begun it
PAIRS = "_pairs"  # key of a span that is not yet JSON: its attributes by name

# Kinds of spans in OTLP.
_INTERNAL, _SERVER, _CLIENT = 1, 2, 3
_ERROR = 2  # status code
MAX_EMISSIONS = 100_000  # times written of one stream: 2 MB of JSON
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # JSON has no such numbers

# The words of the API in OpenTelemetry's names and ours.
WORDS = {
    "operation": s.OPERATION_NAME,
    "model": s.REQUEST_MODEL,
    "max_tokens": s.REQUEST_MAX_TOKENS,
    "streaming": s.REQUEST_STREAM,
    "choices": s.REQUEST_CHOICES,
    "finish_reasons": s.RESPONSE_FINISH_REASONS,
    "prompt_tokens": s.INPUT_TOKENS,
    "output_tokens": s.OUTPUT_TOKENS,
    "cached_tokens": s.CACHED_TOKENS,
    "session": s.CONVERSATION_ID,
    "error": s.ERROR_TYPE,
    "http_status": s.HTTP_STATUS,
    "request_id": s.REQUEST_ID,
    "engine_id": s.ENGINE_REQUEST_ID,
    "remote_id": s.REMOTE_REQUEST_ID,
    "stream_index": s.STREAM_INDEX,
    "preemptions": s.PREEMPTIONS,
    "tokens": s.PHASE_TOKENS,
    "role": s.WORKER_ROLE,
    "attempt": s.ATTEMPT,
    "turn": s.TURN,
    "aborted": s.ABORTED,
    "emission": s.TOKEN_EMISSION,
    "detail": s.PHASE_DETAIL,
    "bytes": s.KV_BYTES,
    "backend": s.KV_BACKEND,
    "direction": s.KV_DIRECTION,
    "source": s.KV_SOURCE,
    "destination": s.KV_DESTINATION,
    "room": s.KV_ROOM,
    "policy": s.ROUTER_POLICY,
    "worker": s.ROUTER_WORKER,
    "overlap_tokens": s.ROUTER_OVERLAP_TOKENS,
    "cost": s.ROUTER_COST,
    "candidates": s.ROUTER_CANDIDATES,
}

_INWARD = ("pdtrace.span_id", f"pdtrace.{STARTED}")  # what a hop knows of its span is no attribute

_PHASE_SPANS = {
    "router": s.SPAN_ROUTER,
    "queue": s.SPAN_QUEUE,
    "prefill": s.SPAN_PREFILL,
    "kv_transfer": s.SPAN_KV_TRANSFER,
    "decode": s.SPAN_DECODE,
    "dispatch": s.SPAN_DISPATCH,
}
_LATENCIES = {
    "queue": s.LATENCY_QUEUE,
    "prefill": s.LATENCY_PREFILL,
    "decode": s.LATENCY_DECODE,
}
# Phases without a span of their own are told by the detail on the nearest one.
_NEAREST = {
    "router": s.SPAN_ROUTER,
    "queue": s.SPAN_QUEUE,
    "prefill": s.SPAN_PREFILL,
    "kv_load": s.SPAN_KV_TRANSFER,
    "kv_transfer": s.SPAN_KV_TRANSFER,
    "kv_wait": s.SPAN_KV_TRANSFER,
    "decode_queue": s.SPAN_QUEUE,
    "decode": s.SPAN_DECODE,
}


def spans(request: Request) -> list[Span]:
    """All spans of one finished request, or of a run of engine steps, in OTLP's JSON."""
    made = described(request)
    for span in made:
        span["attributes"] = attributes_of(span.pop(PAIRS))
    return made


def described(request: Request) -> list[Span]:
    """The same spans with their attributes as they are, under PAIRS."""
    if request.name != s.SPAN_REQUEST:
        return _steps(request)
    made = [_request_span(request, index) for index in range(len(request.streams))]
    made += [_phase_span(request, phase) for phase in tuple(request.phases)]
    return made


def _steps(run: Request) -> list[Span]:
    what = (_INTERNAL, run.start_ns, run.end_ns)
    return [
        _span(run, run.name, new_span_id() if further else run.span_id, None, what, pairs)
        for further, pairs in enumerate(steps_pairs(run))
    ]


def steps_pairs(run: Request) -> list[Pairs]:
    """Attributes of a run of engine steps; of members that it has no room for in further ones."""
    attributes = dict(run.attributes)
    parts = attributes.pop(PARTS, ())
    return [_named(attributes), *map(_named, parts)]


def _request_span(request: Request, index: int) -> Span:
    span = _span(
        request,
        s.SPAN_REQUEST,
        request.span_id if index == 0 else new_span_id(),
        None if request.parent is None else request.parent.span_id,
        (_SERVER, request.start_ns, request.end_ns),
        request_pairs(request, index),
    )
    if request.error is not None:
        span["status"] = {"code": _ERROR}
    if request.links:
        span["links"] = [{"traceId": p.trace_id, "spanId": p.span_id} for p in request.links]
    return span


def request_pairs(request: Request, index: int) -> Pairs:
    """Attributes of a request, as the stream of that choice tells it."""
    attributes, stream = request.attributes, request.streams[index]
    pairs = _named(attributes)
    if request.error is not None:
        pairs[s.ERROR_TYPE] = request.error
    if stream.times:
        pairs.update(_tokens(request, stream, counted="output_tokens" in attributes))
    if len(request.streams) > 1:
        pairs[s.STREAM_INDEX] = index
        pairs.pop(s.OUTPUT_TOKENS, None)  # the sum belongs to no single stream
        if attributes.get("emission") != "chunk":
            pairs[s.OUTPUT_TOKENS] = _emitted(stream)
    if index == 0:
        _add_latencies(request, pairs)
    return pairs


def _phase_span(request: Request, phase: PhaseRecord) -> Span:
    _, start, end, attributes, error = phase
    name, kind, pairs = phase_told(phase)
    span_id = attributes.get("span_id") or new_span_id()
    span = _span(request, name, span_id, request.span_id, (kind, start, end), pairs)
    if error is not None:
        span["status"] = {"code": _ERROR}
    return span


def phase_told(phase: PhaseRecord) -> tuple[str, int, Pairs]:
    """Name, kind and attributes of a phase's span."""
    name, _, _, attributes, error = phase
    pairs = _named(attributes)
    if name == "dispatch":
        for inward in _INWARD:
            pairs.pop(inward, None)
    known = _PHASE_SPANS.get(name)
    if known is None:
        known = _NEAREST.get(model.PHASE_DETAILS.get(name, ""), s.SPAN_PHASE)
        pairs.setdefault(s.PHASE_DETAIL, name)
    if error is not None:
        pairs[s.ERROR_TYPE] = error
    return known, _CLIENT if name == "dispatch" else _INTERNAL, pairs


def _span(
    request: Request,
    name: str,
    span_id: str,
    parent_id: str | None,
    what: tuple[int, int, int],
    pairs: Mapping[str, Any],
) -> Span:
    kind, start, end = what
    shift = request.wall_ns - request.start_ns
    span: Span = {
        "traceId": request.trace_id,
        "spanId": span_id,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(start + shift),
        "endTimeUnixNano": str(end + shift),
        PAIRS: pairs,
    }
    if parent_id is not None:
        span["parentSpanId"] = parent_id
    return span


def _tokens(request: Request, stream: Stream, *, counted: bool) -> dict[str, Any]:
    """First token and emission times; the count too where nobody stated it."""
    times = stream.times[:MAX_EMISSIONS]
    first = times[0]
    pairs: dict[str, Any] = {s.FIRST_TOKEN_NS: first + request.wall_ns - request.start_ns}
    several = request.attributes.get("choices")
    if isinstance(several, int) and several > 1 and len(request.streams) == 1:
        return pairs  # emissions of several streams, nobody says of which
    pairs[s.TOKEN_TIMES_US] = array("q", [(time - first) // 1000 for time in times])
    if stream.counts is not None:
        pairs[s.TOKEN_COUNTS] = stream.counts[:MAX_EMISSIONS]
    if not counted and request.attributes.get("emission") != "chunk":
        pairs[s.OUTPUT_TOKENS] = _emitted(stream)
    return pairs


def _emitted(stream: Stream) -> int:
    return len(stream.times) if stream.counts is None else sum(stream.counts)


def _add_latencies(request: Request, pairs: Pairs) -> None:
    """What three engines write on their request spans, for tools that know them; seconds."""
    start = request.start_ns
    pairs[s.LATENCY_E2E] = (request.end_ns - start) / 1e9
    firsts = [stream.times[0] for stream in request.streams if stream.times]
    if firsts:
        pairs[s.LATENCY_TTFT] = (min(firsts) - start) / 1e9
    for phase, began, ended, *_ in request.phases:
        key = _LATENCIES.get(phase)
        if key is not None:
            pairs[key] = pairs.get(key, 0) + (ended - began) / 1e9


def _named(attributes: Mapping[str, Any]) -> Pairs:
    """The words of the API under their attribute names; keys with a dot are taken as they are."""
    pairs: Pairs = {}
    for key, value in dict(attributes).items():  # a copy: a hop may still be told more of
        if value is not None:
            name = WORDS.get(key)
            pairs[name or (key if "." in key else f"pdtrace.{key}")] = value
    return pairs


def attributes_of(pairs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Attributes as OTLP/JSON key-value list."""
    return [{"key": key, "value": _value(value)} for key, value in pairs.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return (
            {"intValue": str(value)} if -(2**63) <= value < 2**63 else {"stringValue": str(value)}
        )
    if isinstance(value, float):
        return {"doubleValue": value if isfinite(value) else _NOT_FINITE[str(value)]}
    if isinstance(value, array):
        return {"arrayValue": {"values": value}}  # thousands of numbers: see `numbers_as_json`
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": writable(value if isinstance(value, str) else str(value))}


def writable(text: str) -> str:
    """A text that UTF-8 can hold: half a surrogate pair, which JSON from outside may name, becomes `?`."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def numbers_as_json(values: object) -> bytes:
    """An array of whole numbers as the JSON text of OTLP's values. Raises TypeError for anything else."""
    if not isinstance(values, array):
        raise TypeError(f"{type(values).__name__} has no place in a span")
    if not values:
        return b"[]"
    inner = '"},{"intValue":"'.join(map(str, values))
    return f'[{{"intValue":"{inner}"}}]'.encode()
