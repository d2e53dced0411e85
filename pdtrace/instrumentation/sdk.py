"""Ways out through OpenTelemetry's SDK: into the application's own TracerProvider, or to an OTLP endpoint.

`Bridge` starts the spans of requests and hops at once, so that their ids are the SDK's and the
application's own spans hang below them; everything else is told to the SDK by the recorder's
thread. `Endpoint` hands finished spans to OpenTelemetry's OTLP exporter, gRPC or HTTP.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)  # fmt: skip

from pdtrace.instrumentation import encode
from pdtrace.instrumentation._context import Parent
from pdtrace.instrumentation.recorder import Unwritten
from pdtrace.instrumentation.requests import Hop, Request
from pdtrace.semconv import SCOPE, SPAN_DISPATCH, SPAN_REQUEST

_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_KINDS = {1: SpanKind.INTERNAL, 2: SpanKind.SERVER, 3: SpanKind.CLIENT}


def application_provider() -> TracerProvider | None:
    """The TracerProvider that the application set up, if it did."""
    provider = trace.get_tracer_provider()
    return provider if isinstance(provider, TracerProvider) else None


class Bridge:
    """Exporter and opener: requests become spans of a TracerProvider; its sampler and exporters rule."""

    def __init__(self, provider: TracerProvider, version: str) -> None:
        self._tracer = provider.get_tracer(SCOPE, version)

    def open(self, request: Request) -> None:
        """Start the request's span: below its parent, or below the application's current span."""
        parent = request.parent
        context = None if parent is None else _around(parent)
        span = self._tracer.start_span(
            request.name, context, SpanKind.SERVER, start_time=request.wall_ns
        )
        request.span = span
        request.trace_id, request.span_id, request.sampled = _ids(span)

    def hop(self, hop: Hop) -> None:
        """Start a hop's span, so that what it injects is its id."""
        request = hop.request
        span = self._tracer.start_span(
            SPAN_DISPATCH,
            None if request.span is None else trace.set_span_in_context(request.span),
            kind=SpanKind.CLIENT,
        )
        _, hop.span_id, _ = _ids(span)
        hop.attributes[encode.STARTED] = span

    def enter(self, request: Request) -> Any:
        """The application's own spans hang below the request from here on."""
        return otel_context.attach(trace.set_span_in_context(request.span))

    def leave(self, entered: Any) -> None:
        """And no longer."""
        # opentelemetry's detach logs an error where a generator was closed in another context
        with contextlib.suppress(ValueError):
            entered.var.reset(entered)

    def export(self, requests: Sequence[Request], dropped: int) -> None:
        """Tell the SDK the phases of finished requests and end their spans, one request after the other.

        Raises Unwritten where some hold what the SDK does not take; the others are told.
        """
        failed: list[Exception] = []
        for request in requests:
            try:
                if request.name == SPAN_REQUEST:
                    self._request(request)
                else:
                    self._steps(request)
            except Exception as error:
                failed.append(error)
        if failed:
            raise Unwritten(len(failed), failed[0])

    def _request(self, request: Request) -> None:
        own = request.span
        if not own.is_recording():  # the sampler does not want it, nor any part of it
            return
        shift = request.wall_ns - request.start_ns
        below = None
        if request.phases or len(request.streams) > 1:
            below = trace.set_span_in_context(own)
        for phase in tuple(request.phases):
            self._phase(phase, below, shift)
        for index in range(len(request.streams)):
            span = own if index == 0 else self._tracer.start_span(
                SPAN_REQUEST, below, SpanKind.SERVER, start_time=request.wall_ns
            )  # fmt: skip
            span.set_attributes(made_plain(encode.request_pairs(request, index)))
            for link in request.links:
                span.add_link(_context_of(link))
            if request.error is not None:
                span.set_status(StatusCode.ERROR)
            span.end(request.end_ns + shift)

    def _phase(self, phase: encode.PhaseRecord, below: Any, shift: int) -> None:
        _, start, end, attributes, error = phase
        name, kind, pairs = encode.phase_told(phase)
        span = attributes.get(encode.STARTED)
        if span is None:
            span = self._tracer.start_span(
                name, below, _KINDS[kind], made_plain(pairs), start_time=start + shift
            )
        else:
            span.set_attributes(made_plain(pairs))
        if error is not None:
            span.set_status(StatusCode.ERROR)
        span.end(end + shift)

    def _steps(self, run: Request) -> None:
        shift = run.wall_ns - run.start_ns
        for pairs in encode.steps_pairs(run):
            span = self._tracer.start_span(
                run.name, None, SpanKind.INTERNAL, made_plain(pairs), start_time=run.wall_ns
            )
            span.end(run.end_ns + shift)

    def close(self) -> None:
        """Nothing to let go: the provider is the application's."""


class Endpoint:
    """Exporter: finished requests to an OTLP endpoint, by OpenTelemetry's own exporter."""

    def __init__(self, exporter: SpanExporter, resource: Mapping[str, Any], version: str) -> None:
        self._exporter = exporter
        self._resource = Resource(dict(resource))
        self._scope = InstrumentationScope(SCOPE, version)

    def export(self, requests: Sequence[Request], dropped: int) -> None:
        """Send them; raises where the endpoint did not take them."""
        spans = [self._span(made) for request in requests for made in encode.described(request)]
        result = self._exporter.export(spans)
        if result.name != "SUCCESS":
            raise OSError("the OTLP endpoint did not take the spans")

    def _span(self, made: encode.Span) -> ReadableSpan:
        own = Parent(made["traceId"], made["spanId"], sampled=True)
        parent = made.get("parentSpanId")
        return ReadableSpan(
            name=made["name"],
            context=_context_of(own),
            parent=_context_of(Parent(own.trace_id, parent, sampled=True)) if parent else None,
            resource=self._resource,
            attributes=made_plain(made[encode.PAIRS]),
            links=_links(made),
            kind=_KINDS[made["kind"]],
            status=Status(StatusCode.ERROR if made.get("status") else StatusCode.UNSET),
            start_time=int(made["startTimeUnixNano"]),
            end_time=int(made["endTimeUnixNano"]),
            instrumentation_scope=self._scope,
        )

    def close(self) -> None:
        """Send what the exporter holds."""
        self._exporter.shutdown()


def otlp_exporter(endpoint: str | None = None) -> SpanExporter:
    """OpenTelemetry's OTLP exporter for OTEL_EXPORTER_OTLP_PROTOCOL (default http/protobuf).

    Raises ImportError where its package is not installed (`pip install pdtrace[otlp]`).
    """
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
    )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    if endpoint is not None and not endpoint.rstrip("/").endswith("/v1/traces"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return Http(endpoint=endpoint)


def made_plain(pairs: encode.Pairs) -> encode.Pairs:
    """These attributes, each as the SDK takes it."""
    for key, value in pairs.items():
        if type(value) is not float:
            pairs[key] = plain(value)
    return pairs


def plain(value: Any) -> Any:
    """The value of an attribute as the SDK takes it."""
    if isinstance(value, str):
        return encode.writable(value)
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return encode.writable(str(value))


def _links(made: encode.Span) -> list[Link]:
    return [
        Link(_context_of(Parent(link["traceId"], link["spanId"], sampled=True)))
        for link in made.get("links", ())
    ]


def _around(parent: Parent) -> Any:
    return trace.set_span_in_context(NonRecordingSpan(_context_of(parent)))


def _context_of(parent: Parent) -> SpanContext:
    return SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=_SAMPLED if parent.sampled else _NOT_SAMPLED,
    )


def _ids(span: trace.Span) -> tuple[str, str, bool]:
    context = span.get_span_context()
    return f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags.sampled
