"""The OpenAI package against a server of ours: what a client of a managed API can see, answers unchanged."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import brotli
import httpx2
import pytest
import uvicorn
import zstandard
from recorded import Kept, attributes

import pdtrace
from pdtrace import instrumentation as pdt
from pdtrace.instrumentation import auto

openai = pytest.importorskip("openai")

SEEN: list[dict[str, str]] = []
FAILING: list[int] = []  # statuses of the next answers
PACKINGS = {
    "gzip": gzip.compress,
    "br": brotli.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}
USAGE = {
    "prompt_tokens": 50, "completion_tokens": 4, "total_tokens": 54,
    "prompt_tokens_details": {"cached_tokens": 32},
}  # fmt: skip


def chat(index: int = 0, **given: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": given.pop("delta", {}), "finish_reason": given.pop("finish", None)}  # fmt: skip
    return {"id": "chatcmpl-77", "object": "chat.completion.chunk", "created": 1, "model": "gpt-x", "choices": [choice], **given}  # fmt: skip


def events(*made: dict[str, Any], named: bool = False) -> list[bytes]:
    lines = [
        (b"event: " + m["type"].encode() + b"\n" if named else b"")
        + b"data: " + json.dumps(m, separators=(",", ":")).encode() + b"\n\n"
        for m in made
    ]  # fmt: skip
    return lines if named else [*lines, b"data: [DONE]\n\n"]


def streamed(body: dict[str, Any]) -> list[bytes]:
    count = body.get("n") or 1
    made = [chat(i, delta={"role": "assistant", "content": ""}) for i in range(count)]
    for number in range(3):
        made += [chat(i, delta={"content": f"s{number}"}) for i in range(count)]
        if number == 0 and count > 1:
            made.append(chat(1, delta={}, finish="length"))  # one ends early
            count = 1
    made.append(chat(0, delta={}, finish="stop"))
    if (body.get("stream_options") or {}).get("include_usage"):
        made.append({**chat(), "choices": [], "usage": USAGE})
    return events(*made)


def responses(body: dict[str, Any]) -> list[bytes]:
    base = {"id": "resp_9", "object": "response", "created_at": 1, "model": "gpt-x", "output": [], "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}  # fmt: skip
    usage = {"input_tokens": 20, "input_tokens_details": {"cached_tokens": 5}, "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 23}  # fmt: skip
    where = {"item_id": "m", "output_index": 0, "content_index": 0}
    item = {"id": "m", "type": "message", "role": "assistant", "status": "in_progress", "content": []}  # fmt: skip
    made = [
        {"type": "response.created", "sequence_number": 0, "response": {**base, "status": "in_progress"}},
        {"type": "response.in_progress", "sequence_number": 1, "response": {**base, "status": "in_progress"}},
        {"type": "response.output_item.added", "sequence_number": 2, "output_index": 0, "item": item},
        *({**where, "delta": d, "logprobs": [], "sequence_number": 3 + i, "type": "response.output_text.delta"} for i, d in enumerate("abc")),
        {"type": "response.output_text.done", "sequence_number": 6, "text": "abc", "logprobs": [], **where},
        {"type": "response.completed", "sequence_number": 7, "response": {**base, "status": "completed", "usage": usage}},
    ]  # fmt: skip
    return events(*made, named=True)


async def served(scope: Any, receive: Any, send: Any) -> None:
    headers = {k.decode(): v.decode() for k, v in scope["headers"]}
    SEEN.append(headers)
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    asked = json.loads(body)

    async def answer(status: int, kind: bytes, parts: list[bytes], *more: tuple[bytes, bytes]) -> None:  # fmt: skip
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *more]})  # fmt: skip
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0.002)
        await send({"type": "http.response.body", "body": b""})

    if FAILING:
        await answer(FAILING.pop(), b"application/json", [b'{"error":{"message":"busy"}}'])
    elif asked.get("stream"):
        made = responses(asked) if scope["path"].endswith("/responses") else streamed(asked)
        if asked.get("user"):
            whole = PACKINGS[asked["user"]](b"".join(made))
            await answer(200, b"text/event-stream", [whole[:60], whole[60:]], (b"content-encoding", asked["user"].encode()))  # fmt: skip
        else:
            await answer(200, b"text/event-stream", made)
    else:
        message = {"role": "assistant", "content": "secret"}
        choices = [{"index": i, "message": message, "finish_reason": "stop"} for i in range(asked.get("n") or 1)]  # fmt: skip
        whole = json.dumps({"id": "chatcmpl-78", "object": "chat.completion", "created": 1, "model": "gpt-x", "choices": choices, "usage": USAGE}).encode()  # fmt: skip
        await answer(200, b"application/json", [gzip.compress(whole)], (b"content-encoding", b"gzip"))  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(served, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def kept() -> Iterator[Kept]:
    exporter = Kept()
    pdtrace.instrument(exporter=exporter)
    auto.OpenAIInstrumentor().instrument()
    SEEN.clear()
    yield exporter
    auto.OpenAIInstrumentor().uninstrument()
    pdtrace.uninstrument()


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=2) as made:
        yield made


ASK: dict[str, Any] = {"model": "gpt-x", "messages": [{"role": "user", "content": "secret"}]}


def told(kept: Kept) -> list[dict[str, Any]]:
    pdt.flush()
    return [attributes(span) for span in kept.named("pdtrace.request")]


def test_a_stream(kept: Kept, client: Any) -> None:
    with client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}) as stream:  # fmt: skip
        text = [c.choices[0].delta.content for c in stream if c.choices]
    assert text == ["", "s0", "s1", "s2", None]
    (call,) = told(kept)
    assert call["pdtrace.worker.role"] == "client"
    assert call["pdtrace.request.id"] == "77"  # what a server of ours calls it too
    assert call["gen_ai.operation.name"] == "chat"
    assert call["gen_ai.request.model"] == "gpt-x"
    assert len(call["pdtrace.token.times_us"]) == 3
    assert "gen_ai.latency.time_to_first_token" in call
    assert call["gen_ai.response.finish_reasons"] == ["stop"]
    numbers = [call[f"gen_ai.usage.{name}"] for name in ("input_tokens", "output_tokens", "cache_read.input_tokens")]  # fmt: skip
    assert numbers == ["50", "4", "32"]
    assert call["pdtrace.attempt"] == "0"
    assert "secret" not in json.dumps(call)


def test_an_answer_in_one_piece_though_packed(kept: Kept, client: Any) -> None:
    answer = client.chat.completions.create(**ASK, n=2)
    assert [c.message.content for c in answer.choices] == ["secret", "secret"]
    (call,) = told(kept)
    assert call["gen_ai.usage.output_tokens"] == "4"
    assert call["gen_ai.request.choice.count"] == "2"
    assert call["gen_ai.request.stream"] is False
    assert "pdtrace.first_token_ns" not in call  # nobody saw it


def test_async_calls_side_by_side(kept: Kept, url: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:

            async def one() -> int:
                stream = await client.chat.completions.create(**ASK, stream=True)
                return len([chunk async for chunk in stream])

            assert await asyncio.gather(*[one() for _ in range(4)]) == [5] * 4

    asyncio.run(run())
    calls = told(kept)
    assert [len(call["pdtrace.token.times_us"]) for call in calls] == [3] * 4
    assert len({request.trace_id for request in kept.requests}) == 4


def test_choices_are_streams_of_their_own(kept: Kept, client: Any) -> None:
    stream = client.chat.completions.create(**ASK, stream=True, n=2)
    assert len(list(stream)) == 8
    first, second = told(kept)
    assert len(first["pdtrace.token.times_us"]) == 3
    assert len(second["pdtrace.token.times_us"]) == 1
    assert first["gen_ai.response.finish_reasons"] == ["length", "stop"]
    assert "gen_ai.usage.output_tokens" not in first  # chunks are no tokens


@pytest.mark.parametrize("coding", sorted(PACKINGS))
def test_a_stream_that_comes_packed(kept: Kept, client: Any, coding: str) -> None:
    if coding not in httpx2.Client().headers["accept-encoding"]:
        pytest.skip(f"the client cannot unpack {coding}")
    assert len(list(client.chat.completions.create(**ASK, stream=True, user=coding))) == 5
    (call,) = told(kept)
    assert len(call["pdtrace.token.times_us"]) == 3


def test_the_responses_api(kept: Kept, client: Any) -> None:
    stream = client.responses.create(model="gpt-x", input="secret", stream=True, conversation="conv_1")  # fmt: skip
    assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == "abc"
    (call,) = told(kept)
    assert len(call["pdtrace.token.times_us"]) == 3
    assert (call["gen_ai.usage.input_tokens"], call["gen_ai.usage.output_tokens"]) == ("20", "3")
    assert call["gen_ai.usage.cache_read.input_tokens"] == "5"
    assert call["gen_ai.response.finish_reasons"] == ["stop"]
    assert call["gen_ai.conversation.id"] == "conv_1"
    assert call["pdtrace.request.id"] == "9"
    assert "pdtrace.aborted" not in call


def test_who_stops_reading_has_left(kept: Kept, client: Any) -> None:
    with client.chat.completions.create(**ASK, stream=True) as stream:
        next(iter(stream))
    (call,) = told(kept)
    assert call["pdtrace.aborted"] is True


def test_retries_are_attempts(kept: Kept, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai._constants, "INITIAL_RETRY_DELAY", 0.001)
    FAILING[:] = [503]
    client.with_options(timeout=60).chat.completions.create(**ASK)
    failed, done = told(kept)
    assert (failed["http.response.status_code"], failed["pdtrace.attempt"]) == ("503", "0")
    assert (done["http.response.status_code"], done["pdtrace.attempt"]) == ("200", "1")


def test_a_pause_for_a_tool_is_in_no_call(kept: Kept, client: Any) -> None:
    with pdt.request(role="gateway") as agent:
        client.chat.completions.create(**ASK)
        time.sleep(0.02)
        client.chat.completions.create(**ASK)
    pdt.flush()
    hops = [(end - start) / 1e6 for name, start, end, *_ in agent.phases if name == "dispatch"]
    pause = (agent.phases[1][1] - agent.phases[0][2]) / 1e6
    assert len(hops) == 2
    assert pause >= 20
    parents = {headers["traceparent"].split("-")[1] for headers in SEEN}
    assert parents == {agent.trace_id}


def over_aiohttp(url: str) -> list[str | None]:
    """The texts of a stream that aiohttp carries below httpx."""

    async def run() -> list[str | None]:
        carried = openai.DefaultAioHttpClient()
        async with openai.AsyncOpenAI(base_url=url, api_key="none", http_client=carried) as client:
            options = {"include_usage": True}
            stream = await client.chat.completions.create(**ASK, stream=True, stream_options=options)  # fmt: skip
            return [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]

    return asyncio.run(run())


def test_a_stream_that_aiohttp_carries(kept: Kept, url: str) -> None:
    pytest.importorskip("aiohttp")
    assert over_aiohttp(url) == ["", "s0", "s1", "s2", None]
    (call,) = told(kept)
    assert call["pdtrace.worker.role"] == "client"
    assert len(call["pdtrace.token.times_us"]) == 3
    assert call["gen_ai.usage.output_tokens"] == "4"
    assert SEEN[-1]["traceparent"].split("-")[1] == kept.requests[0].trace_id


def test_what_carries_a_call_is_no_second_hop(kept: Kept, url: str) -> None:
    pytest.importorskip("aiohttp")
    auto.AiohttpInstrumentor().instrument()
    try:
        with pdt.request(role="router") as request:
            over_aiohttp(url)
    finally:
        auto.AiohttpInstrumentor().uninstrument()
    pdt.flush()
    (hop,) = kept.named("pdtrace.dispatch")
    assert SEEN[-1]["traceparent"] == f"00-{request.trace_id}-{hop['spanId']}-01"
    assert attributes(hop)["http.response.status_code"] == "200"


def test_after_uninstrument_the_carried_call_is_as_it_was(url: str) -> None:
    pytest.importorskip("aiohttp")
    SEEN.clear()
    over_aiohttp(url)
    assert "traceparent" not in SEEN[-1]
