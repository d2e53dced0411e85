"""The ASGI middleware passes bytes through untouched and tells what went by."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from recorded import PARENT, SPAN, TRACE, Kept, attributes
from starlette.applications import Starlette
from starlette.requests import Request as Http
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

import pdtrace
from pdtrace import instrumentation as pdt
from pdtrace.instrumentation.asgi import PdtraceMiddleware


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event(model="m", choices=[{"index": 0, "delta": fields}])


CHAT = [
    delta(role="assistant", content=""),
    delta(content="secret one"),
    delta(content=" two") + delta(content=" three"),
    event(model="m", choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
    event(model="m", choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}),
    b"data: [DONE]\n\n",
]  # fmt: skip


def app(chunks: list[bytes] = CHAT, status: int = 200) -> PdtraceMiddleware:
    async def chat(request: Http) -> Any:
        asked = json.loads(await request.body())
        if status >= 400:
            return JSONResponse({"error": {"message": "secret"}}, status)
        if asked.get("explode"):
            raise RuntimeError("secret")
        if not asked.get("stream"):
            return JSONResponse({"model": "m", "choices": [{"text": "secret", "finish_reason": "length"}], "usage": {"prompt_tokens": 7, "completion_tokens": 9}})  # fmt: skip

        async def stream() -> AsyncIterator[bytes]:
            for chunk in chunks:
                await asyncio.sleep(0)
                yield chunk

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"x-request-id": "r1"})  # fmt: skip

    async def health(_: Http) -> Any:
        return PlainTextResponse("ok")

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/health", health),
    ]
    return PdtraceMiddleware(Starlette(routes=routes), role="router")


@pytest.fixture
def kept() -> Iterator[Kept]:
    exporter = Kept()
    pdtrace.instrument(service="test", exporter=exporter)
    yield exporter
    pdtrace.uninstrument()


def call(
    served: Any, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str
) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(served, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(run())


def spans(kept: Kept) -> list[dict[str, Any]]:
    assert pdt.flush()
    return kept.named("pdtrace.request")


def test_a_stream_passes_untouched_and_its_chunks_are_timed(kept: Kept) -> None:
    body = {"model": "asked", "stream": True, "max_tokens": 5, "messages": [{"content": "secret"}]}
    answer = call(app(), body, traceparent=PARENT)
    assert answer.content == b"".join(CHAT)
    (span,) = spans(kept)
    assert (span["traceId"], span["parentSpanId"]) == (TRACE, SPAN)
    said = attributes(span)
    assert said["gen_ai.request.model"] == "asked"
    assert said["gen_ai.request.stream"] is True
    assert said["gen_ai.request.max_tokens"] == "5"
    assert said["gen_ai.usage.input_tokens"] == "7"
    assert said["gen_ai.usage.output_tokens"] == "3"
    assert said["gen_ai.usage.cache_read.input_tokens"] == "4"
    assert said["gen_ai.response.finish_reasons"] == ["stop"]
    assert said["http.response.status_code"] == "200"
    assert said["pdtrace.worker.role"] == "router"
    assert said["pdtrace.request.id"] == "r1"
    assert said["pdtrace.token.emission"] == "chunk"
    assert len(said["pdtrace.token.times_us"]) == 3  # role, finish and usage are no tokens
    assert "secret" not in json.dumps(kept.spans, default=str)


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_chunks_cut_anywhere_are_counted_alike(kept: Kept, size: int) -> None:
    whole = b"".join(CHAT)
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    assert call(app(pieces), {"stream": True}).content == whole
    (span,) = spans(kept)
    assert len(attributes(span)["pdtrace.token.times_us"]) == 3
    assert attributes(span)["gen_ai.usage.output_tokens"] == "3"


def test_an_answer_in_one_piece_has_usage_and_no_token_times(kept: Kept) -> None:
    assert call(app(), {"model": "asked"}).json()["usage"]["completion_tokens"] == 9
    (span,) = spans(kept)
    said = attributes(span)
    assert said["gen_ai.usage.output_tokens"] == "9"
    assert said["gen_ai.request.stream"] is False
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert "pdtrace.token.times_us" not in said


def test_errors_are_failures(kept: Kept) -> None:
    assert call(app(status=503), {}).status_code == 503
    assert call(app(), {"explode": True}).status_code == 500
    first, second = spans(kept)
    assert attributes(first)["http.response.status_code"] == "503"
    assert attributes(second)["error.type"] == "RuntimeError"
    assert "secret" not in json.dumps(kept.spans, default=str)


def test_several_choices_in_one_stream_have_no_gaps(kept: Kept) -> None:
    call(app(), {"stream": True, "n": 2})
    (span,) = spans(kept)
    assert attributes(span)["gen_ai.request.choice.count"] == "2"
    assert "pdtrace.first_token_ns" in attributes(span)
    assert "pdtrace.token.times_us" not in attributes(span)


def test_other_calls_and_other_protocols_pass_by(kept: Kept) -> None:
    async def get() -> None:
        transport = httpx.ASGITransport(app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get("/health")).text == "ok"

    asyncio.run(get())

    seen: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    asyncio.run(PdtraceMiddleware(inner)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]
    assert spans(kept) == []


def test_two_middlewares_count_a_call_once(kept: Kept) -> None:
    call(PdtraceMiddleware(app(), role="gateway"), {"stream": True})
    (span,) = spans(kept)
    assert attributes(span)["pdtrace.worker.role"] == "gateway"


def test_a_client_that_leaves_is_an_abort(kept: Kept) -> None:
    async def run() -> None:
        messages = iter([{"type": "http.request", "body": b"{}", "more_body": False}, {"type": "http.disconnect"}])  # fmt: skip

        async def receive() -> Any:
            return next(messages)

        async def send(_: Any) -> None:
            pass

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})  # fmt: skip
            await send({"type": "http.response.body", "body": CHAT[1], "more_body": True})
            await receive()

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
        await PdtraceMiddleware(inner)(scope, receive, send)

    asyncio.run(run())
    (span,) = spans(kept)
    assert attributes(span)["pdtrace.aborted"] is True


@pytest.mark.parametrize(
    "chunks",
    [
        [b"data: not json\n\n", b"data: [1]\n\n"],
        [b"data: " + b"[" * 5000 + b"\n\n"],
        [b'data: {"choices": null, "usage": []}\n\n'],
        [b"\xff\xfe", b": comment\n\n", b"event: x\n\n"],
        [b""],
    ],
)
def test_strange_streams_pass_untouched(kept: Kept, chunks: list[bytes]) -> None:
    assert call(app(chunks), {"stream": True}).content == b"".join(chunks)
    assert len(spans(kept)) == 1


def test_without_instrument_nothing_is_wrapped() -> None:
    assert call(app(), {"stream": True}).content == b"".join(CHAT)
    assert not pdt.instrumented()


def streamed(*chunks: Any) -> list[Any]:
    """What a client gets of these bodies through the middleware."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message.get("body"))

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})  # fmt: skip
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(PdtraceMiddleware(inner)(scope, receive, send))
    return sent


def test_bodies_of_any_bytes_kind_are_counted_and_passed_as_they_are(kept: Kept) -> None:
    view, array = memoryview(CHAT[1]), bytearray(CHAT[2])
    assert streamed(view, array) == [None, view, array, None]
    (span,) = spans(kept)
    assert len(attributes(span)["pdtrace.token.times_us"]) == 3


def test_what_breaks_in_the_recording_does_not_reach_the_server(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdtrace.instrumentation import answers

    def breaks(*_: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(answers.EventStream, "feed", breaks)
    assert streamed(CHAT[1]) == [None, CHAT[1], None]
    assert len(spans(kept)) == 1


def through(path: str, *chunks: bytes) -> list[bytes]:
    """What a caller of a path gets when the application sends these chunks of a stream."""
    sent: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for chunk in (*chunks, b""):
            await send({"type": "http.response.body", "body": chunk, "more_body": bool(chunk)})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    asyncio.run(PdtraceMiddleware(app)(scope, receive, send))
    return sent[1:-1]


def test_messages_in_anthropics_shape(kept: Kept) -> None:
    def typed(kind: str, **fields: Any) -> bytes:
        return f"event: {kind}\n".encode() + event(type=kind, **fields)

    begin = {"id": "msg_5", "model": "m", "usage": {"input_tokens": 3, "cache_read_input_tokens": 40, "cache_creation_input_tokens": 2}}  # fmt: skip
    chunks = [
        typed("message_start", message=begin),
        typed("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        *(typed("content_block_delta", index=0, delta={"type": "text_delta", "text": "secret"}) for _ in range(4)),
        typed("ping"),
        typed("content_block_stop", index=0),
        typed("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 9}),
        typed("message_stop"),
    ]  # fmt: skip
    whole = b"".join(chunks)
    assert b"".join(through("/v1/messages", whole[:333], whole[333:])) == whole
    (span,) = spans(kept)
    told = attributes(span)
    assert len(told["pdtrace.token.times_us"]) == 4
    assert told["gen_ai.usage.input_tokens"] == "45"  # with what was cached, as elsewhere
    assert told["gen_ai.usage.cache_read.input_tokens"] == "40"
    assert told["gen_ai.usage.output_tokens"] == "9"
    assert told["gen_ai.response.finish_reasons"] == ["end_turn"]
    assert told["pdtrace.request.id"] == "5"
    assert "secret" not in json.dumps(told)


def test_an_error_inside_a_stream_is_a_failure_whatever_the_status(kept: Kept) -> None:
    through("/v1/completions", CHAT[1], event(error={"message": "secret", "type": "InternalServerError"}), CHAT[-1])  # fmt: skip
    (span,) = spans(kept)
    assert span["status"] == {"code": 2}
    assert attributes(span)["error.type"] == "InternalServerError"
    assert "secret" not in json.dumps(attributes(span))
