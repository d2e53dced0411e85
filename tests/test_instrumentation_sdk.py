"""Through OpenTelemetry's SDK: the application's TracerProvider, and OTLP endpoints."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, Sampler, SamplingResult
from recorded import PARENT, SPAN, TRACE

import pdtrace
from pdtrace import instrumentation as pdt
from pdtrace.instrumentation import sdk


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The application's provider, without making it global for the other tests."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    pdtrace.uninstrument()
    provider.shutdown()


def test_requests_go_into_the_applications_provider(memory: InMemorySpanExporter) -> None:
    pdtrace.instrument(role="router")
    tracer = trace.get_tracer_provider().get_tracer("app")
    with pdt.request({"traceparent": PARENT}, model="m") as request:
        with tracer.start_as_current_span("own"):
            pass
        with request.phase("queue"):
            pass
        with request.dispatch() as hop:
            headers = hop.inject({})
        request.token()
    assert trace.get_current_span() is trace.INVALID_SPAN
    pdt.flush()
    spans = {span.name: span for span in memory.get_finished_spans()}
    assert set(spans) == {"pdtrace.request", "pdtrace.queue", "pdtrace.dispatch", "own"}
    root = spans["pdtrace.request"]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == SPAN
    for name in ("own", "pdtrace.queue", "pdtrace.dispatch"):
        assert spans[name].parent.span_id == root.context.span_id
    assert (
        headers["traceparent"].split("-")[2] == f"{spans['pdtrace.dispatch'].context.span_id:016x}"
    )
    assert root.attributes["gen_ai.request.model"] == "m"
    assert root.attributes["pdtrace.token.times_us"] == (0,)
    assert root.start_time <= spans["pdtrace.queue"].start_time <= root.end_time


def test_the_applications_sampler_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    pdtrace.instrument()
    with pdt.request() as request:
        assert request.inject({})["traceparent"].endswith("-00")
    pdtrace.uninstrument()


def test_spans_reach_an_otlp_endpoint() -> None:
    bodies: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        pdtrace.instrument(endpoint=f"http://127.0.0.1:{server.server_port}", service="s")
        with pdt.request({"traceparent": PARENT}, model="m") as request, request.phase("decode"):
            request.token()
        pdtrace.uninstrument()
        server.shutdown()
    (message,) = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    (resource_spans,) = message.resource_spans
    names = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
    assert names["service.name"] == "s"
    spans = {span.name: span for span in resource_spans.scope_spans[0].spans}
    assert set(spans) == {"pdtrace.request", "pdtrace.decode"}
    assert spans["pdtrace.request"].trace_id.hex() == TRACE
    assert spans["pdtrace.request"].parent_span_id.hex() == SPAN
    assert spans["pdtrace.decode"].parent_span_id == spans["pdtrace.request"].span_id


def test_both_protocols_have_an_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    exporter = sdk.otlp_exporter("http://127.0.0.1:9")
    assert "grpc" in type(exporter).__module__
    exporter.shutdown()


def test_an_applications_sampler_that_breaks_costs_the_trace_not_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    pdtrace.instrument()

    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("theirs")

    monkeypatch.setattr(provider.sampler, "should_sample", breaks)
    with pdt.request(model="m") as request, request.dispatch() as hop:
        assert hop.inject({}) == {}
        request.token()
    pdtrace.uninstrument()


def test_choices_links_errors_and_steps_reach_the_provider(memory: InMemorySpanExporter) -> None:
    pdtrace.instrument()
    with pytest.raises(KeyError), pdt.request({"traceparent": PARENT}, model="m") as request:
        request.link(PARENT)
        request.token()
        request.choice(1).token(3)
        with request.phase("kv_space_wait"):
            raise KeyError
    loop = pdt.steps()
    with loop.step() as step:
        step.set(decode_requests=2)
    loop.flush()
    pdt.flush()
    first, second = (
        span
        for index in (0, 1)
        for span in memory.get_finished_spans()
        if span.attributes.get("pdtrace.stream.index") == index
    )
    assert second.parent.span_id == first.context.span_id
    assert (first.start_time, first.end_time) == (second.start_time, second.end_time)
    assert second.attributes["gen_ai.usage.output_tokens"] == 3
    for span in (first, second):
        assert span.status.status_code is trace.StatusCode.ERROR
        assert span.attributes["error.type"] == "KeyError"
        assert [f"{link.context.span_id:016x}" for link in span.links] == [SPAN]
    others = [span for span in memory.get_finished_spans() if span not in (first, second)]
    phase, steps = sorted(others, key=lambda span: span.name)
    assert phase.attributes["pdtrace.phase.detail"] == "kv_space_wait"
    assert phase.status.status_code is trace.StatusCode.ERROR
    assert steps.attributes["pdtrace.step.decode_requests"] == (2,)
    assert steps.parent is None


def test_what_the_sampler_does_not_want_has_no_phases_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = InMemorySpanExporter()
    asked: list[str] = []

    class Requests(Sampler):
        def should_sample(self, context: object, trace_id: int, name: str, *_: object, **__: object) -> SamplingResult:  # fmt: skip
            asked.append(name)
            keep = name != "pdtrace.request"
            return SamplingResult(Decision.RECORD_AND_SAMPLE if keep else Decision.DROP)

        def get_description(self) -> str:
            return "all but requests"

    provider = TracerProvider(sampler=Requests())
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    pdtrace.instrument()
    with pdt.request() as request, request.phase("queue"):
        request.token()
    pdtrace.uninstrument()
    assert asked == ["pdtrace.request"]
    assert memory.get_finished_spans() == ()


def test_a_request_that_cannot_be_told_costs_none_of_the_others(
    memory: InMemorySpanExporter,
) -> None:
    pdtrace.instrument()
    for number in range(3):
        with pdt.request(model=str(number)) as request:
            if number == 1:
                request.mark("queue", "soon", None)  # type: ignore[arg-type]
    pdt.flush()
    told = [span.attributes["gen_ai.request.model"] for span in memory.get_finished_spans()]
    assert told == ["0", "2"]  # each once
    assert pdt.dropped_requests() == 1
