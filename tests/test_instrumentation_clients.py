"""Calls of httpx, httpx2 and aiohttp: hops inside a request, requests of their own outside; answers unchanged."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import httpx
import httpx2
import pytest
import uvicorn
from recorded import Kept, attributes

import pdtrace
from pdtrace import instrumentation as pdt
from pdtrace.instrumentation import aiohttp_client, httpx2_client, httpx_client

HEADERS: list[dict[str, str]] = []
STREAM = b"".join(
    [
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"secret"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n',
        b"data: [DONE]\n\n",
    ]
)


async def served(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    HEADERS.append({k.decode(): v.decode() for k, v in scope["headers"]})
    await receive()
    kind = b"text/event-stream"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    for line in STREAM.split(b"\n\n")[:-1]:
        await send({"type": "http.response.body", "body": line + b"\n\n", "more_body": True})
        await asyncio.sleep(0.002)
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        config = uvicorn.Config(served, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}/v1/completions"
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def kept() -> Iterator[Kept]:
    exporter = Kept()
    pdtrace.instrument(service="test", exporter=exporter)
    httpx_client.instrument()
    httpx2_client.instrument()
    aiohttp_client.instrument()
    HEADERS.clear()
    yield exporter
    httpx_client.uninstrument()
    httpx2_client.uninstrument()
    aiohttp_client.uninstrument()
    pdtrace.uninstrument()


def with_httpx(url: str) -> bytes:
    return httpx.post(url, json={"model": "m", "stream": True}, timeout=60).content


def with_async_httpx(url: str) -> bytes:
    async def run() -> bytes:
        async with httpx.AsyncClient(timeout=60) as client:
            return (await client.post(url, json={"model": "m", "stream": True})).content

    return asyncio.run(run())


def with_httpx2(url: str) -> bytes:
    return httpx2.post(url, json={"model": "m", "stream": True}, timeout=60).content


def with_async_httpx2(url: str) -> bytes:
    async def run() -> bytes:
        async with httpx2.AsyncClient(timeout=60) as client:
            return (await client.post(url, json={"model": "m", "stream": True})).content

    return asyncio.run(run())


def with_aiohttp(url: str) -> bytes:
    async def run() -> bytes:
        async with aiohttp.ClientSession() as session, session.post(url, json={}) as answer:
            return await answer.read()

    return asyncio.run(run())


HTTPX = [with_httpx, with_async_httpx, with_httpx2, with_async_httpx2]


@pytest.mark.parametrize("call", [*HTTPX, with_aiohttp])
def test_inside_a_request_a_call_is_a_hop(kept: Kept, url: str, call: Any) -> None:
    with pdt.request(role="router") as request:
        assert call(url) == STREAM
    pdt.flush()
    (hop,) = kept.named("pdtrace.dispatch")
    assert HEADERS[0]["traceparent"] == f"00-{request.trace_id}-{hop['spanId']}-01"
    said = attributes(hop)
    assert said["http.response.status_code"] == "200"
    assert said["pdtrace.router.worker"] == url.split("/")[2]
    # it lasts as long as the answer, not only until its headers
    assert int(hop["endTimeUnixNano"]) - int(hop["startTimeUnixNano"]) > 8_000_000
    assert len(kept.named("pdtrace.request")) == 1


@pytest.mark.parametrize("call", HTTPX)
def test_outside_of_one_it_is_a_request_seen_by_the_client(kept: Kept, url: str, call: Any) -> None:
    assert call(url) == STREAM
    pdt.flush()
    (span,) = kept.named("pdtrace.request")
    said = attributes(span)
    assert span["spanId"] in HEADERS[0]["traceparent"]
    assert said["pdtrace.worker.role"] == "client"
    assert said["gen_ai.request.model"] == "m"
    assert said["gen_ai.usage.output_tokens"] == "2"
    assert len(said["pdtrace.token.times_us"]) == 2
    assert "secret" not in json.dumps(kept.spans, default=str)


def test_a_call_that_stops_reading_is_an_abort_unless_the_stream_was_done(
    kept: Kept, url: str
) -> None:
    with httpx.stream("POST", url, json={}) as answer:
        next(answer.iter_raw())
    with httpx.stream("POST", url, json={}) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                break
    pdt.flush()
    aborted = [attributes(s).get("pdtrace.aborted", False) for s in kept.named("pdtrace.request")]
    assert aborted == [True, False]


def test_a_server_that_is_not_there_is_a_failure_and_the_error_is_httpx_own(kept: Kept) -> None:
    with pytest.raises(httpx.ConnectError):
        httpx.post("http://127.0.0.1:9/v1/completions", json={})
    pdt.flush()
    (span,) = kept.named("pdtrace.request")
    assert attributes(span)["error.type"] == "ConnectError"


def test_after_uninstrument_nothing_is_added(url: str) -> None:
    HEADERS.clear()
    for call in (with_httpx, with_httpx2, with_aiohttp):
        assert call(url) == STREAM
    assert all("traceparent" not in headers for headers in HEADERS)


def theirs(owner: type, name: str) -> tuple[list[str], Callable[[], None]]:
    """Somebody else's wrapper around what is there now: what it saw, and how it is taken off."""
    inner, seen = getattr(owner, name), []

    def wrapper(*args: Any, **options: Any) -> Any:
        seen.append(name)
        return inner(*args, **options)

    setattr(owner, name, wrapper)
    return seen, lambda: setattr(owner, name, inner)


@pytest.mark.parametrize(
    ("module", "owner", "name", "call"),
    [
        (httpx_client, httpx.HTTPTransport, "handle_request", with_httpx),
        (httpx_client, httpx.AsyncHTTPTransport, "handle_async_request", with_async_httpx),
        (httpx2_client, httpx2.HTTPTransport, "handle_request", with_httpx2),
        (httpx2_client, httpx2.AsyncHTTPTransport, "handle_async_request", with_async_httpx2),
        (aiohttp_client, aiohttp.ClientSession, "__init__", with_aiohttp),
    ],
)
def test_a_wrapper_around_ours_stays(
    url: str, module: Any, owner: type, name: str, call: Any
) -> None:
    """Off, and on again: theirs is called once each time, and nothing is recorded twice."""
    kept, before = Kept(), getattr(owner, name)
    pdtrace.instrument(exporter=kept)
    try:
        module.instrument()
        seen, taken_off = theirs(owner, name)
        for on, spans in ((True, 1), (False, 0), (True, 1), (False, 0)):
            (module.instrument if on else module.uninstrument)()
            kept.requests.clear()
            seen.clear()
            HEADERS.clear()
            with pdt.request(role="router"):
                assert call(url) == STREAM
            pdt.flush()
            assert len(kept.named("pdtrace.dispatch")) == spans
            assert ("traceparent" in HEADERS[0]) is on
            assert seen == [name]
        taken_off()
        assert call(url) == STREAM
    finally:
        module.uninstrument()
        setattr(owner, name, before)
        pdtrace.uninstrument()


def test_another_order_of_taking_off_leaves_theirs_as_it_was() -> None:
    before = httpx.HTTPTransport.handle_request
    httpx_client.instrument()
    _, taken_off = theirs(httpx.HTTPTransport, "handle_request")
    taken_off()
    httpx_client.uninstrument()
    assert httpx.HTTPTransport.handle_request is before
