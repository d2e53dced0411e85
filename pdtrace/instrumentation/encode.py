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

_PHASE_SPANS = {
    "router": s.SPAN_ROUTER,
    "queue": s.SPAN_QUEUE,
    "prefill": s.SPAN_PREFILL,
    "kv_transfer": s.SPAN_KV_TRANSFER,
    "decode": s.SPAN_DECODE,
    "dispatch": s.SPAN_DISPATCH,
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
    """A run of engine steps; members that it has no room for in further spans."""
    attributes = dict(run.attributes)
    parts = attributes.pop(PARTS, ())
    what = (_INTERNAL, run.start_ns, run.end_ns)
    made = [_span(run, run.name, run.span_id, None, what, _named(attributes))]
    return made + [_span(run, run.name, new_span_id(), None, what, _named(part)) for part in parts]


def _request_span(request: Request, index: int) -> Span:
    stream = request.streams[index]
    attributes = dict(request.attributes)
    if request.error is not None:
        attributes["error"] = request.error
    pairs = _named(attributes)
    pairs.update(_tokens(request, stream, counted="output_tokens" in attributes))
    if len(request.streams) > 1:
        pairs[s.STREAM_INDEX] = index
        pairs.pop(s.OUTPUT_TOKENS, None)  # the sum belongs to no single stream
        if attributes.get("emission") != "chunk":
            pairs[s.OUTPUT_TOKENS] = _emitted(stream)
    if index == 0:
        pairs.update(_latencies(request))
    span = _span(
        request,
        s.SPAN_REQUEST,
        request.span_id if index == 0 else new_span_id(),
        None if request.parent is None else request.parent.span_id,
        (_SERVER, request.start_ns, request.end_ns),
        pairs,
    )
    if request.error is not None:
        span["status"] = {"code": _ERROR}
    if request.links:
        span["links"] = [{"traceId": p.trace_id, "spanId": p.span_id} for p in request.links]
    return span


def _phase_span(request: Request, phase: tuple[str, int, int, dict[str, Any], str | None]) -> Span:
    name, start, end, attributes, error = phase
    attributes = dict(attributes)
    span_id = attributes.pop("span_id", None) or new_span_id()
    started = attributes.pop("_span", None)  # by the application's SDK
    known = _PHASE_SPANS.get(name)
    if known is None:
        known = _NEAREST.get(model.PHASE_DETAILS.get(name, ""), s.SPAN_PHASE)
        attributes.setdefault("detail", name)
    pairs = _named(attributes)
    if error is not None:
        pairs[s.ERROR_TYPE] = error
    kind = _CLIENT if name == "dispatch" else _INTERNAL
    span = _span(request, known, span_id, request.span_id, (kind, start, end), pairs)
    if started is not None:
        span["_span"] = started
    if error is not None:
        span["status"] = {"code": _ERROR}
    return span


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
    if not times:
        return {}
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


def _latencies(request: Request) -> dict[str, float]:
    """What three engines write on their request spans, for tools that know them; seconds."""
    pairs = {s.LATENCY_E2E: (request.end_ns - request.start_ns) / 1e9}
    firsts = [stream.times[0] for stream in request.streams if stream.times]
    if firsts:
        pairs[s.LATENCY_TTFT] = (min(firsts) - request.start_ns) / 1e9
    for name, key in (
        ("queue", s.LATENCY_QUEUE),
        ("prefill", s.LATENCY_PREFILL),
        ("decode", s.LATENCY_DECODE),
    ):
        spent = [end - start for phase, start, end, *_ in request.phases if phase == name]
        if spent:
            pairs[key] = sum(spent) / 1e9
    return pairs


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The words of the API under their attribute names; keys with a dot are taken as they are."""
    return {
        WORDS.get(key, key if "." in key else f"pdtrace.{key}"): value
        for key, value in attributes.items()
        if value is not None
    }


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
