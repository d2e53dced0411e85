"""What serving processes go through: clock steps, dead exporters, cancellations, very long streams. Right spans, no leak."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from recorded import Kept, attributes
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request as Http
from starlette.responses import StreamingResponse
from starlette.routing import Route

import pdtrace
from pdtrace import instrumentation as pdt
from pdtrace.instrumentation import aiohttp_client, encode, engine_steps, httpx_client, requests
from pdtrace.instrumentation.asgi import PdtraceMiddleware
from pdtrace.instrumentation.engine_steps import RUN_STEPS, Steps
from pdtrace.instrumentation.event_streams import EventStream
from pdtrace.instrumentation.recorder import BATCH_REQUESTS, Recorder
from pdtrace.instrumentation.requests import Request

MS = 1_000_000
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_clock_step_moves_requests_not_durations(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    wall, monotonic = [1_796_000_000 * 1000 * MS], [5 * MS]
    monkeypatch.setattr(requests, "time_ns", lambda: wall[0])
    monkeypatch.setattr(requests, "perf_counter_ns", lambda: monotonic[0])

    def pass_ms(ms: int) -> None:
        wall[0] += ms * MS
        monotonic[0] += ms * MS

    for name in ("before", "after"):
        with pdt.request(request_id=name) as request:
            with request.phase("prefill"):
                pass_ms(30)
                if name == "before":
                    wall[0] += step_s * 1000 * MS
                pass_ms(20)
            request.token()
            pass_ms(40)
            request.token()
    pdt.flush()
    for span in kept.spans:
        lasted = (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / MS
        assert lasted == (50 if span["name"] == "pdtrace.prefill" else 90)
    first, second = kept.named("pdtrace.request")
    assert attributes(first)["pdtrace.token.times_us"] == ["0", "40000"]
    apart = (int(second["startTimeUnixNano"]) - int(first["startTimeUnixNano"])) / MS
    assert apart == 90 + step_s * 1000


class Down:
    """An endpoint that refuses for a while: each attempt takes its time and fails."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.down = True
        self.taken: list[Request] = []
        self.told_dropped = 0

    def export(self, batch: Any, dropped: int) -> None:
        if self.down:
            with socket.create_connection(("127.0.0.1", self.port), timeout=0.05):
                pass
        self.taken += batch
        self.told_dropped = dropped

    def close(self) -> None:
        pass


def test_an_exporter_that_is_down_costs_counted_requests_and_no_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        exporter = Down(unused.getsockname()[1])  # nobody listens there
        recorder = Recorder(lambda: exporter, queue_requests=100, interval_s=0.01)
        for number in range(5000):
            Request(recorder, None, {"request_id": str(number)}).end()
            assert len(recorder._queue) <= 100
        assert recorder.flush(10)
        assert recorder.dropped == 5000
        assert sum("not written" in r.message for r in caplog.records) == 1  # once, not for minutes
        exporter.down = False
        Request(recorder, None, {"request_id": "later"}).end()
        assert recorder.flush(10)
        recorder.close()
    assert [r.attributes["request_id"] for r in exporter.taken] == ["later"]
    assert exporter.told_dropped == 5000


def test_requests_that_wait_take_little_room() -> None:
    let_go = threading.Event()

    class Stuck(Kept):
        def export(self, batch: Any, dropped: int) -> None:
            let_go.wait()

    recorder = Recorder(Stuck, interval_s=0.01)
    waiting = []
    for _ in range(700):
        request = Request(recorder, None, {})
        for _ in range(50):
            request.token()
        request.end()
        waiting.append(request)
    packed = [r for r in waiting if isinstance(r.stream.times, array)]
    assert len(packed) >= 100
    assert all(r.stream.times.itemsize * len(r.stream.times) == 400 for r in packed)
    let_go.set()
    recorder.close()


def test_engine_steps_that_wait_are_bounded_by_the_memory_they_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few runs of a large batch are as much as thousands of requests; what they are taken for is about true."""
    monkeypatch.setattr(engine_steps, "RUN_NS", 10**18)  # a run is as long as it has steps
    limit, exporter = 2 << 20, Kept()
    recorder = Recorder(lambda: exporter, queue_bytes=limit)
    recorder._thread = threading.current_thread()  # none that drains
    loop = Steps(recorder)
    ids = [f"request-{number}" for number in range(64)]

    def runs(number: int) -> None:
        for step in range(number * RUN_STEPS):
            with loop.step() as marked:
                marked.set(decode_requests=64)
                marked.decoded(ids, list(range(step + 1000, step + 1064)))
                marked.member("long", prefill_tokens=512)
        loop.flush()

    tracemalloc.start()
    try:
        runs(12)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    waiting = len(recorder._queue)
    assert 0 < waiting < 12
    assert recorder.dropped == 12 - waiting
    assert limit / 2 < taken < 2 * limit
    recorder._drain()
    runs(1)
    recorder._drain()
    assert len(exporter.requests) == waiting + 1
    assert recorder.dropped == 12 - waiting


def test_long_streams_that_wait_are_bounded_by_the_memory_they_take() -> None:
    recorder = Recorder(Kept, queue_bytes=1 << 20)
    recorder._thread = threading.current_thread()  # none that drains
    for _ in range(600):
        request = Request(recorder, None, {})
        request.times.extend(range(10_000))
        request.end()
    assert BATCH_REQUESTS <= len(recorder._queue) <= BATCH_REQUESTS + (1 << 20) // 80_000
    assert recorder.dropped == 600 - len(recorder._queue)
    recorder._queue.clear()


def test_an_otlp_endpoint_that_is_down_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real exporter retries by itself; the serving code neither waits nor hears of it."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        pdtrace.instrument(endpoint=f"http://127.0.0.1:{unused.getsockname()[1]}")
        began = time.thread_time()
        for _ in range(200):
            with pdt.request() as request:
                request.token()
        assert time.thread_time() - began < 2  # 200 requests: no waiting, no retrying here
        pdt.flush(timeout_s=0.01)
        assert pdt.dropped_requests() <= 200
        pdtrace.uninstrument()


def test_nothing_of_a_request_is_left_behind(kept: Kept) -> None:
    def serve() -> None:
        with pdt.request(request_id="left") as request:
            with request.phase("prefill"), request.dispatch() as hop:
                hop.inject({})
            request.put_off(lambda: request.attributes.update(seen=1))
            request.choice(2).token()

    for _ in range(50):
        serve()
    assert pdt.flush()
    kept.requests.clear()
    gc.collect()
    living = [one for one in gc.get_objects() if isinstance(one, Request)]
    assert not [one for one in living if one.attributes.get("request_id") == "left"]


def test_requests_that_are_open_at_a_fork_are_the_parents(tmp_path: Path) -> None:
    """A child that goes down in good order must not tell its parent's open requests as aborted."""
    code = f"""
import os, sys, pdtrace
from pdtrace import instrumentation as pdt
pdtrace.instrument({str(tmp_path)!r})
request = pdt.request(request_id="open")
child = os.fork()
if child == 0:
    del request
    with pdt.request(request_id="child"):
        pass
    sys.exit(0)
os.waitpid(child, 0)
request.end()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    spans = [
        span
        for path in tmp_path.glob("*.jsonl")
        for line in path.read_text().splitlines()
        for span in json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    ]
    told = sorted((attributes(s)["pdtrace.request.id"], attributes(s).get("pdtrace.aborted")) for s in spans)  # fmt: skip
    assert told == [("child", None), ("open", None)]


def test_a_very_long_stream_stays_bounded(kept: Kept) -> None:
    count = encode.MAX_EMISSIONS + 5000
    request = pdt.request(emission="chunk")
    events = EventStream(request)
    request.put_off(events.settle)
    for _ in range(count):
        events.feed(EVENT)
    assert len(events._head) + len(events._tail) < 10  # texts are not kept
    request.end()
    pdt.flush()
    (span,) = kept.spans
    (times,) = [p["value"]["arrayValue"]["values"] for p in span["attributes"] if p["key"] == "pdtrace.token.times_us"]  # fmt: skip
    assert isinstance(times, array)
    assert len(times) == encode.MAX_EMISSIONS


def application(chunks: Callable[[], AsyncIterator[bytes]], gzipped: bool = False) -> Starlette:
    async def chat(request: Http) -> StreamingResponse:
        await request.body()
        return StreamingResponse(chunks(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    if gzipped:
        app.add_middleware(GZipMiddleware, minimum_size=1)
    return app


async def three() -> AsyncIterator[bytes]:
    for _ in range(3):
        yield EVENT
        await asyncio.sleep(0)
    yield b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("inside", [True, False])
def test_gzip_inside_and_outside(kept: Kept, inside: bool) -> None:
    """Starlette packs event streams only where it is told to; here by hand, as proxies do."""

    async def packed(scope: Any, receive: Any, send: Any) -> None:
        packer: Any = None

        async def pack(message: Any) -> None:
            nonlocal packer
            if message["type"] == "http.response.start":
                packer = __import__("zlib").compressobj(wbits=31)
                message = {**message, "headers": [*message["headers"], (b"content-encoding", b"gzip")]}  # fmt: skip
            else:
                body = packer.compress(message.get("body", b"")) + packer.flush(2 if message.get("more_body") else 4)  # fmt: skip
                message = {**message, "body": body}
            await send(message)

        await inner(scope, receive, pack)

    app = application(three)
    inner: Any = app if inside else PdtraceMiddleware(app, role="router")
    whole: Any = PdtraceMiddleware(packed, role="router") if inside else packed

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(whole)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/chat/completions", json={"stream": True})

    answer = asyncio.run(run())
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.content.count(EVENT) == 3
    pdt.flush()
    (span,) = kept.spans
    assert len(attributes(span)["pdtrace.token.times_us"]) == 3
    assert attributes(span)["gen_ai.usage.input_tokens"] == "4"


def test_what_claims_to_be_packed_and_is_not_passes_untouched(kept: Kept) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        head = [(b"content-type", b"text/event-stream"), (b"content-encoding", b"gzip")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for body in (b"no gzip at all", gzip.compress(EVENT)[:9], b""):
            await send({"type": "http.response.body", "body": body, "more_body": bool(body)})

    sent: list[bytes] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(PdtraceMiddleware(app)(scope, receive, send))
    assert sent[1] == b"no gzip at all"
    pdt.flush()
    assert len(kept.named("pdtrace.request")) == 1


def test_a_cancelled_call_is_an_abort_and_stays_cancelled(kept: Kept) -> None:
    async def forever() -> AsyncIterator[bytes]:
        yield EVENT
        await asyncio.sleep(60)

    async def run() -> None:
        messages = [{"type": "http.request", "body": b'{"stream":true}'}]

        async def receive() -> Any:
            if not messages:
                await asyncio.sleep(60)
            return messages.pop()

        async def send(message: Any) -> None:
            if message.get("body"):
                task.cancel()

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b"", "root_path": ""}  # fmt: skip
        task = asyncio.create_task(PdtraceMiddleware(application(forever))(scope, receive, send))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    pdt.flush()
    (span,) = kept.spans
    assert attributes(span)["pdtrace.aborted"] is True


@contextmanager
def slow() -> Iterator[int]:
    """The port of a server that sends the head and one event, and then nothing."""
    over = threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + EVENT
            )
            over.wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        over.set()
        thread.join()


@pytest.mark.parametrize("library", ["httpx", "aiohttp"])
def test_hops_that_are_cancelled_or_find_nobody_end(kept: Kept, library: str) -> None:
    async def call(url: str) -> None:
        if library == "httpx":
            async with httpx.AsyncClient() as client, client.stream("POST", url, json={}) as answer:
                async for _ in answer.aiter_raw():
                    pass
        else:
            async with aiohttp.ClientSession() as session, session.post(url, json={}) as answer:
                async for _ in answer.content.iter_any():
                    pass

    async def run(port: int) -> None:
        with pdt.request(role="router"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await call(f"http://127.0.0.1:{port}/v1/completions")
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))  # nobody listens
                nobody = unused.getsockname()[1]
                with pytest.raises((httpx.ConnectError, aiohttp.ClientConnectorError)):
                    await call(f"http://127.0.0.1:{nobody}/v1/completions")

    for room in (httpx_client, aiohttp_client):
        room.instrument()
    try:
        with slow() as port:
            asyncio.run(run(port))
    finally:
        for room in (httpx_client, aiohttp_client):
            room.uninstrument()
    pdt.flush()
    left, failed = kept.named("pdtrace.dispatch")
    lasted = [(int(s["endTimeUnixNano"]) - int(s["startTimeUnixNano"])) / MS for s in (left, failed)]  # fmt: skip
    assert lasted[0] < 1000
    assert "error.type" in attributes(failed)
    assert attributes(kept.named("pdtrace.request")[0]).get("error.type") is None
    assert json.dumps(kept.spans, default=str).count("secret") == 0
