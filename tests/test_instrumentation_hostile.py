"""What strangers send and what breaks around the recording: the serving process notices nothing, nothing else is lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import uvicorn
from recorded import PARENT, SPAN, TRACE, Kept, attributes
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from pdtrace import instrumentation as pdt
from pdtrace.instrumentation import (
    aiohttp_client,
    answers,
    api,
    asgi,
    httpx_calls,
    httpx_client,
    sdk,
    uvicorn_server,
)
from pdtrace.instrumentation.files import OtlpFiles
from pdtrace.instrumentation.recorder import BATCH_REQUESTS, WAITING_BYTES, Recorder
from pdtrace.instrumentation.requests import Request

HALF = "\ud800"  # half a surrogate pair: JSON may name it, UTF-8 has no bytes for it


def test_a_retry_count_that_only_looks_like_a_number(kept: Kept) -> None:
    async def completions(_: Any) -> JSONResponse:
        return JSONResponse({})

    app = asgi.PdtraceMiddleware(
        Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])
    )

    async def run() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = [(b"x-stainless-retry-count", b"\xb2")]  # a superscript two
            return (await client.post("/v1/completions", headers=headers)).status_code

    assert asyncio.run(run()) == 200
    pdt.flush()
    assert len(kept.requests) == 1


def test_headers_that_are_no_bytes_are_the_servers_business(kept: Kept) -> None:
    served = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope["headers"])

    async def nothing(*_: Any) -> Any:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [("a", "b")]}
    asyncio.run(asgi.PdtraceMiddleware(app)(scope, nothing, nothing))
    assert served == [[("a", "b")]]


def test_a_server_without_asyncio_shuts_down_as_before(kept: Kept) -> None:
    sent = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    with pytest.raises(StopIteration):  # driven by hand, as by another loop
        asgi._ending(send, {"type": "lifespan.shutdown.complete"}).send(None)
    assert sent == ["lifespan.shutdown.complete"]


def test_a_module_that_was_only_looked_for_is_instrumented_once_imported() -> None:
    # as `python -m uvicorn` does, and packages that ask what is installed; one finder is of the old kind
    code = """
import importlib.util, sys
from pdtrace.instrumentation import auto
auto.activate()
sys.meta_path.insert(1, type("Old", (), {"find_module": lambda *_: None})())
assert importlib.util.find_spec("uvicorn").loader.get_filename("uvicorn").endswith(".py")
assert "uvicorn" not in sys.modules
import uvicorn
load = uvicorn.Config.load
assert load.__wrapped__.__module__ == "uvicorn.config" and not hasattr(load.__wrapped__, "__wrapped__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("stdlib", [False, True])
def test_one_request_that_cannot_be_written_takes_no_others_with_it(
    tmp_path: Path, stdlib: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stdlib:
        monkeypatch.setattr("pdtrace.instrumentation.files._fast", None)
    recorder = Recorder(lambda: OtlpFiles(tmp_path, {"service.name": "s"}), interval_s=5)
    for number in range(4):
        request = Request(recorder, None, {"request_id": str(number), "model": HALF + "m"})
        if number == 2:
            request.mark("queue", "no instant", 5)  # type: ignore[arg-type]
        request.end()
    assert recorder.flush(10)
    recorder.close()
    text = "".join(path.read_text() for path in tmp_path.glob("*.jsonl"))
    assert [f'"stringValue":"{n}"' in text for n in range(4)] == [True, True, False, True]
    assert '"?m"' in text
    assert recorder.dropped == 1


def test_texts_that_utf8_cannot_hold_do_not_reach_the_sdk() -> None:
    assert sdk.plain([HALF + "a", "ü"]) == ["?a", "ü"]


def test_instants_that_are_none_do_not_raise_into_the_serving_code() -> None:
    recorder = Recorder(Kept, interval_s=60)
    recorder._queue.extend(Request(recorder, None, {}) for _ in range(BATCH_REQUESTS))
    request = Request(recorder, None, {})
    request.stream.at("now")  # type: ignore[arg-type]
    request.end()
    assert recorder._queue[-1] is request
    recorder.close()


def test_large_bodies_do_not_wait_in_memory() -> None:
    recorder = Recorder(Kept, interval_s=60)
    recorder._thread = threading.current_thread()  # none that drains
    recorder._queue.extend(Request(recorder, None, {}) for _ in range(BATCH_REQUESTS))
    for size in (WAITING_BYTES, WAITING_BYTES + 1):
        request = Request(recorder, None, {})
        request.put_off(partial(answers.asked, request, b" " * size))
        request.end()
    assert [len(one.later) for one in list(recorder._queue)[-2:]] == [1, 0]
    recorder._drain()


def test_without_a_thread_the_last_requests_are_written_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    exporter = Kept()
    recorder = Recorder(lambda: exporter)
    monkeypatch.setattr(threading.Thread, "start", refused)
    Request(recorder, None, {}).end()
    recorder.close(timeout_s=0.0)
    assert len(exporter.requests) == 1


def test_a_file_that_finds_no_room_is_followed_by_another(tmp_path: Path) -> None:
    class Full:
        def tell(self) -> int:
            return 1 << 40

        def close(self) -> None:
            raise OSError(28, "no space left")

    files = OtlpFiles(tmp_path, {})
    files._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="no space"):
        files._open()
    assert files._open().writable()
    files.close()


def test_a_callers_own_trace_goes_on(kept: Kept) -> None:
    transports = httpx_calls.Transports(httpx)
    call = transports._call(
        httpx.Request("POST", "http://h/v1/completions", headers={"traceparent": PARENT})
    )
    assert call is not None
    assert call.own is not None
    assert (call.own.trace_id, call.own.parent and call.own.parent.span_id) == (TRACE, SPAN)
    call.end()


def test_a_hop_of_aiohttp_lasts_to_the_last_byte_and_has_no_password(kept: Kept) -> None:
    from aiohttp import ClientSession, web

    async def streamed(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(3):
            await answer.write(b"data: {}\n\n")
            await asyncio.sleep(0.01)
        await answer.write_eof()
        return answer

    async def run() -> bytes:
        app = web.Application()
        app.router.add_post("/v1/completions", streamed)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        url = f"http://user:secret@127.0.0.1:{port}/v1/completions"
        try:
            with api.request():
                ours = [aiohttp_client.trace_config()]
                async with (
                    ClientSession(trace_configs=ours) as session,
                    session.post(url) as answer,
                ):
                    return b"".join([part async for part in answer.content.iter_any()])
        finally:
            await runner.cleanup()

    assert asyncio.run(run()) == b"data: {}\n\n" * 3
    pdt.flush()
    (hop,) = kept.named("pdtrace.dispatch")
    assert int(hop["endTimeUnixNano"]) - int(hop["startTimeUnixNano"]) >= 25_000_000
    assert attributes(hop)["pdtrace.router.worker"].startswith("127.0.0.1:")


def test_who_kept_a_wrapper_beyond_uninstrument_gets_a_whole_object() -> None:
    aiohttp_client.instrument()
    uvicorn_server.instrument()
    make, load = aiohttp.ClientSession.__init__, uvicorn.Config.load
    aiohttp_client.uninstrument()
    uvicorn_server.uninstrument()

    async def run() -> bool:
        session = aiohttp.ClientSession.__new__(aiohttp.ClientSession)
        make(session)
        await session.close()
        return session.closed

    assert asyncio.run(run())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Serves nothing."""

    config = uvicorn.Config(app, lifespan="off", interface="asgi3", log_config=None)
    load(config)
    assert not isinstance(config.loaded_app, asgi.PdtraceMiddleware)


def test_a_redirected_call_is_two_requests_and_no_abort(kept: Kept) -> None:
    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for head in (
            b"307 x\r\nlocation: /b/v1/completions",
            b"200 OK\r\ncontent-type: application/json",
        ):
            await reader.readuntil(b"}")
            writer.write(b"HTTP/1.1 " + head + b"\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def run() -> int:
        server = await asyncio.start_server(served, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, httpx.AsyncClient(follow_redirects=True) as client:
            url = f"http://127.0.0.1:{port}/a/v1/completions"
            return (await client.post(url, json={"model": "m"})).status_code

    httpx_client.instrument()
    try:
        assert asyncio.run(run()) == 200
    finally:
        httpx_client.uninstrument()
    pdt.flush()
    told = [attributes(span) for span in kept.named("pdtrace.request")]
    assert [one["http.response.status_code"] for one in told] == ["307", "200"]
    assert [one["gen_ai.request.model"] for one in told] == ["m", "m"]
    assert not any("pdtrace.aborted" in one for one in told)
