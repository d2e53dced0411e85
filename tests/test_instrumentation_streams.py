"""Answers as servers really send them: packed, cut anywhere, with errors inside, of every known API."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import brotli
import pytest
import zstandard
from recorded import Kept, attributes

import pdtrace
from pdtrace import instrumentation as pdt
from pdtrace.instrumentation import unpacking
from pdtrace.instrumentation.answers import Answer
from pdtrace.instrumentation.asgi import PdtraceMiddleware

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """Which packages are there is not kept from one test to the next."""
    unpacking._first_of.cache_clear()
    yield
    unpacking._first_of.cache_clear()


def sse(*events: Any, line: str = "\n") -> bytes:
    return "".join(f"data: {json.dumps(e, ensure_ascii=False)}{line}{line}" for e in events).encode() + f"data: [DONE]{line}{line}".encode()  # fmt: skip


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}], **more}


LAST = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}
THREE = [said("grüße"), said("🙂🙂"), said(' data: "index":7\n\n'), LAST]


def told(
    kept: Kept, answer: bytes, path: str = CHAT, *, size: int = 0, coding: str = "", kind: str = "text/event-stream"
) -> list[dict[str, Any]]:  # fmt: skip
    """The spans' attributes of an answer that comes in pieces of that size (0: whole)."""
    kept.requests.clear()
    with pdt.request(emission="chunk") as request:
        seen = Answer(request, path)
        seen.begun(200, {"content-type": kind, "content-encoding": coding})
        for start in range(0, len(answer), size or len(answer)):
            seen.chunk(answer[start : start + (size or len(answer))])
        seen.over()
    pdt.flush()
    return [attributes(span) for span in kept.spans]


def times(span: dict[str, Any]) -> int:
    return len(span.get("pdtrace.token.times_us", ()))


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def members(data: bytes) -> bytes:
    """Each event a gzip member of its own, as servers send them that flush by starting anew."""
    return b"".join(map(gzip.compress, re.findall(rb"(?s).+?(?:\n\n|$)", data)))


def frames(data: bytes) -> bytes:
    return b"".join(map(zstandard.ZstdCompressor().compress, re.findall(rb"(?s).+?(?:\n\n|$)", data)))  # fmt: skip


PACKED: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("", bytes), ("identity", bytes), ("gzip", gzip.compress), ("gzip", members), ("deflate", zlib.compress), ("deflate", raw_deflate),
    ("br", brotli.compress), ("zstd", zstandard.ZstdCompressor().compress), ("zstd", frames),
]  # fmt: skip


@pytest.mark.parametrize("size", [0, 1, 7])
@pytest.mark.parametrize(("coding", "pack"), PACKED)
def test_packed_and_cut_anywhere(kept: Kept, coding: str, pack: Any, size: int) -> None:
    """Inside a character, inside `data:`, inside a frame: three tokens, and what the usage says."""
    (span,) = told(kept, pack(sse(*THREE)), size=size, coding=coding)
    assert times(span) == 3
    assert span["gen_ai.usage.output_tokens"] == "3"


@pytest.mark.parametrize(("coding", "pack"), PACKED[2:])
def test_packed_answers_in_one_piece(kept: Kept, coding: str, pack: Any) -> None:
    body = pack(json.dumps({"usage": {"prompt_tokens": 5, "completion_tokens": 2}}).encode())
    (span,) = told(kept, body, coding=coding, kind="application/json")
    assert span["gen_ai.usage.output_tokens"] == "2"


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, br"])
def test_what_cannot_be_unpacked_is_unknown(
    kept: Kept, coding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(unpacking.importlib, "import_module", missing)
    for kind in ("text/event-stream", "application/json"):
        (span,) = told(kept, sse(*THREE), coding=coding, kind=kind)
        assert not {"pdtrace.token.times_us", "pdtrace.first_token_ns", "gen_ai.usage.output_tokens"} & span.keys()  # fmt: skip
        assert span["http.response.status_code"] == "200"


@pytest.mark.parametrize(("coding", "pack"), PACKED[2:])
def test_half_a_count_is_none(kept: Kept, coding: str, pack: Any) -> None:
    """Broken bytes after the first events, or a megabyte out of a few bytes."""
    good = pack(sse(*THREE))
    for answer in (good + b"\xff\x00broken\xff" * 9, pack(sse(*THREE) + bytes(9 << 20))):
        (span,) = told(kept, answer, coding=coding)
        assert "pdtrace.token.times_us" not in span


@pytest.mark.parametrize("size", [0, 1, 5])
def test_line_ends_comments_and_fields_of_events(kept: Kept, size: int) -> None:
    answer = b": keep-alive\r\n\r\nevent: x\r\nid: 4\r\nretry: 10\r\n" + sse(*THREE, line="\r\n")
    answer += b": bye\r\n\r\n"
    (span,) = told(kept, answer.replace(b"data: {", b"data:{"), size=size)
    assert times(span) == 3
    assert span["gen_ai.usage.input_tokens"] == "9"


def calls(choice: int, tool: int, *, first: bool) -> dict[str, Any]:
    """A piece of a tool call, with the choice's index behind the call's or before it."""
    delta = {"tool_calls": [{"index": tool, "function": {"arguments": "{"}}]}
    return {"choices": [{"index": choice, "delta": delta} if first else {"delta": delta, "index": choice}]}  # fmt: skip


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_parallel_tool_calls_are_no_choices(
    kept: Kept, first: bool, separators: tuple[str, str]
) -> None:
    def answer(*events: dict[str, Any]) -> bytes:
        return b"".join(b"data: %b\n\n" % json.dumps(e, separators=separators).encode() for e in events)  # fmt: skip

    one_choice = [calls(0, tool, first=first) for tool in (0, 0, 0, 0, 1, 1, 2)]
    for size in (0, 11):
        (span,) = told(kept, answer(*one_choice), size=size)
        assert times(span) == 7
    # each event by itself, as servers send them
    two = [calls(n % 2, n % 3, first=first) for n in range(12)] + [calls(1, 0, first=first)]
    kept.requests.clear()
    with pdt.request(emission="chunk") as request:
        seen = Answer(request, CHAT)
        seen.begun(200, {"content-type": "text/event-stream"})
        for event in two:
            seen.chunk(answer(event))
    pdt.flush()
    assert [times(attributes(span)) for span in kept.spans] == [6, 7]


ERRORS: list[tuple[str, bytes, str]] = [
    (CHAT, b'data: {"error":{"message":"secret","type":"server_error","code":500}}\n\n', "server_error"),
    (CHAT, b'event: error\ndata: {"error":{"message":"secret","code":502}}\n\n', "502"),
    (CHAT, b'data: {"error":"secret","error_type":"overloaded"}\n\n', "overloaded"),
    (CHAT, b'data: {"error":"secret"}\n\n', "error"),
    (CHAT, b'data: {"object":"error","message":"secret","type":"InternalServerError","code":500}\n\n', "InternalServerError"),
    ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"secret"}}\n\n', "overloaded_error"),
    ("/v1/responses", b'data: {"type":"error","code":"rate_limit_exceeded","message":"secret","param":null}\n\n', "rate_limit_exceeded"),
    ("/v1/responses", b'data: {"type":"response.failed","response":{"status":"failed","error":{"code":"server_error","message":"secret"}}}\n\n', "server_error"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "error", "code"), ERRORS)
def test_an_error_in_the_midst_of_a_stream(kept: Kept, path: str, error: bytes, code: str) -> None:
    piece = {
        CHAT: b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n',
        "/v1/messages": b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"x"}}\n\n',
        "/v1/responses": b'data: {"type":"response.output_text.delta","delta":"x"}\n\n',
    }[path]  # fmt: skip
    for size in (0, 13):
        (span,) = told(kept, piece * 6 + error, path, size=size)
        assert span["error.type"] == code
        assert times(span) == 6
        assert "secret" not in json.dumps(span)


def message(*middle: dict[str, Any], whole: bool = True) -> bytes:
    """A stream of Anthropic's kind."""
    usage = {"input_tokens": 10, "cache_read_input_tokens": 30, "cache_creation_input_tokens": 2, "output_tokens": 1}  # fmt: skip
    events = [
        {"type": "message_start", "message": {"id": "msg_7", "model": "c", "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": t}} for t in "abc"),
        *middle,
    ]  # fmt: skip
    if whole:
        events += [
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 25}},
            {"type": "message_stop"},
        ]  # fmt: skip
    return b"".join(b"event: %b\ndata: %b\n\n" % (str(e["type"]).encode(), json.dumps(e).encode()) for e in events)  # fmt: skip


@pytest.mark.parametrize("size", [0, 1])
def test_messages_of_anthropics_kind(kept: Kept, size: int) -> None:
    signed = {"type": "content_block_delta", "index": 1, "delta": {"type": "signature_delta", "signature": "s"}}  # fmt: skip
    pings = [{"type": "ping"}] * 100
    (span,) = told(kept, message(signed, *pings), "/v1/messages", size=size)
    assert times(span) == 3
    assert span["gen_ai.operation.name"] == "chat"
    numbers = [span[f"gen_ai.usage.{name}"] for name in ("input_tokens", "output_tokens", "cache_read.input_tokens")]  # fmt: skip
    assert numbers == ["42", "25", "30"]
    assert span["gen_ai.response.finish_reasons"] == ["end_turn"]
    assert span["pdtrace.request.id"] == "7"


def test_a_message_that_breaks_off_does_not_say_how_long_it_was(kept: Kept) -> None:
    """Its first event counts one output token, whatever follows."""
    (span,) = told(kept, message(whole=False), "/v1/messages")
    assert span["gen_ai.usage.input_tokens"] == "42"
    assert "gen_ai.usage.output_tokens" not in span
    assert times(span) == 3


def test_responses_that_end_early(kept: Kept) -> None:
    usage = {"input_tokens": 4, "output_tokens": 2}
    whole = {"object": "response", "id": "resp_1", "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "usage": usage}  # fmt: skip
    events = [
        {"type": "response.created", "response": {"object": "response", "status": "in_progress"}},
        {"type": "response.reasoning_text.delta", "delta": "x"},
        {"type": "response.function_call_arguments.delta", "delta": "{"},
        {"type": "response.incomplete", "response": whole},
    ]
    (span,) = told(kept, sse(*events), "/v1/responses")
    assert times(span) == 2
    assert span["gen_ai.response.finish_reasons"] == ["max_output_tokens"]
    assert span["gen_ai.usage.output_tokens"] == "2"


def through(path: str, parts: list[bytes], *headers: tuple[bytes, bytes], asked: tuple[tuple[bytes, bytes], ...] = ()) -> list[dict[str, Any]]:  # fmt: skip
    """What the server of this answer sends, through the middleware."""

    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": list(headers)})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(asked)}
    asyncio.run(PdtraceMiddleware(app)(scope, receive, send))
    return sent


@pytest.mark.parametrize("coding", ["br", "zstd"])
def test_packed_bytes_pass_the_middleware_unchanged(kept: Kept, coding: str) -> None:
    packed = dict(PACKED)[coding](sse(*THREE))
    parts = [packed[start : start + 9] for start in range(0, len(packed), 9)]
    kind = [(b"content-type", b"text/event-stream"), (b"content-encoding", coding.encode())]
    sent = through(CHAT, parts, *kind)
    assert sent[0] == {"type": "http.response.start", "status": 200, "headers": kind}
    assert [m["body"] for m in sent[1:]] == [*parts, b""]
    pdt.flush()
    (span,) = map(attributes, kept.spans)
    assert (times(span), span["gen_ai.usage.output_tokens"]) == (3, "3")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings", "/v1/rerank", "/v1/score", "/pooling", "/v1/messages/count_tokens", "/v1/threads/thread_1/messages", "/api/messages",
        "/v1/responses/resp_1/cancel", "/v1/completions/cancel", "/tokenize", "/v1/chat/completions/render",
    ],
)  # fmt: skip
def test_calls_that_make_no_tokens_are_untouched(kept: Kept, path: str) -> None:
    sent = through(path, [b'{"data":[]}'], (b"content-type", b"application/json"))
    assert [m.get("body") for m in sent] == [None, b'{"data":[]}', b""]
    pdt.flush()
    assert kept.requests == []


def test_ids_from_outside_have_a_limit(kept: Kept) -> None:
    long = b"a" * 100_000
    body = b'{"id":"%b","model":"%b","usage":{}}' % (long, long)
    kind = (b"content-type", b"application/json")
    through(CHAT, [body], kind, asked=((b"x-request-id", long),))
    through(CHAT, [body], kind, (b"x-request-id", long))
    with pdt.request(request_id="b" * 1000):
        pass
    pdt.flush()
    for span in kept.spans:
        longest = max(len(value) for value in attributes(span).values() if isinstance(value, str))
        assert longest == 256


def test_answers_of_500_and_more_are_kept_whatever_the_ratio() -> None:
    exporter = Kept()
    pdtrace.instrument(exporter=exporter, ratio=0)
    for status in (200, 404, 503):
        with pdt.request() as request:
            request.set(http_status=status)
    pdtrace.uninstrument()
    assert [request.attributes["http_status"] for request in exporter.requests] == [503]


def test_what_no_line_break_ended_is_no_emission_but_its_usage_counts(kept: Kept) -> None:
    """Its instant would be that at which the recorder's thread got to it: after the request's end."""
    whole = sse(said("a"), said("b")).removesuffix(b"data: [DONE]\n\n")
    (cut,) = told(kept, whole + b'data: {"choices":[{"index":0,"del')
    assert times(cut) == 2 and "pdtrace.token.times_us" in cut
    (named,) = told(kept, whole + b"data: " + json.dumps(LAST).encode())
    assert times(named) == 2 and named["gen_ai.usage.output_tokens"] == "3"


def test_a_package_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def missing(name: str) -> Any:
        asked.append(name)
        raise ImportError(name)

    monkeypatch.setattr(unpacking.importlib, "import_module", missing)
    assert unpacking.unpacking("br") is None and unpacking.unpacking("br") is None
    assert asked == ["brotli", "brotlicffi"]


def test_what_grows_too_much_is_left_before_it_fills_memory() -> None:
    packed = brotli.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(unpacking.TooMuch):
            unpacking.unpacking("br").feed(packed)  # type: ignore[union-attr]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
