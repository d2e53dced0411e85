"""What OpenAI-compatible answers tell of themselves: emissions in a stream, usage, finish reasons.

Split in two: counting, on the serving thread (a few byte searches a chunk), and parsing of the
request's fields and of the stream's first and last events, on the recorder's thread. Of texts only
whether they are empty is looked at; nothing of them is kept.

Known are chat and text completions, the Responses API (events `response.*`) and Anthropic's messages.
"""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pdtrace.instrumentation.request_ids import of_answer
from pdtrace.instrumentation.requests import Request

KEPT_BODY_BYTES = 1 << 20  # a longer request or answer is not looked into
_TAIL_EVENTS = 3  # events at the end of a stream that may carry no token: finish, usage
_HEAD_EVENTS = 4  # events at its start, likewise: role, empty text
_NOTES = 64  # events in between that are kept to be read
_DATA, _NEXT_DATA, _DONE = b"data:", b"\ndata:", b"[DONE]"
_END = b"}\n\n"
_INDEX, _FIRST = b'"index":', (b"0,", b"0}")
_INDEX_NUMBER = re.compile(rb'"index":\s*(\d{1,4})')
_FINISH = re.compile(rb'"finish_reason":\s*"')
# Streams of typed events: those with text say so in their type (first or last; quotes inside texts are escaped).
_DELTA = {
    "responses": re.compile(rb'"type":\s*"response\.[a-z_.]*\.delta"'),
    "messages": re.compile(rb'"type":\s*"content_block_delta"'),
}
_LAST = re.compile(rb'"type":\s*"(?:response\.(?:completed|incomplete|failed)|message_stop)"')
_OPERATIONS = {"completions": "text_completion", "chat/completions": "chat", "responses": "chat", "messages": "chat"}  # fmt: skip
_PATH = re.compile(r"/(chat/completions|completions|responses|messages)/?$")


class Answer:
    """The answer of one call, told as it passes: its head, its bytes, its end."""

    __slots__ = ("_body", "_events", "_inflate", "_kind", "_packed", "_request", "_size")

    def __init__(self, request: Request, path: str) -> None:
        self._request = request
        found = _PATH.search(path)
        self._kind = "" if found is None else found[1]
        if found is not None:
            request.attributes.setdefault("operation", _OPERATIONS[found[1]])
        self._events: EventStream | TypedStream | None = None
        self._body: list[bytes] | None = None
        self._size = 0
        self._inflate: Any = None
        self._packed = False

    def begun(self, status: int | None, headers: Mapping[str, str]) -> None:
        """Status and headers (their names in lower case) are there."""
        self._request.attributes["http_status"] = status
        packing = headers.get("content-encoding", "identity").strip().lower()
        if packing not in ("identity", "", "gzip", "deflate"):
            return  # its events cannot be seen
        self._packed = packing in ("gzip", "deflate")
        kind = headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            typed = _DELTA.get(self._kind)
            events = EventStream(self._request) if typed is None else TypedStream(self._request, typed)  # fmt: skip
            self._request.put_off(events.settle)
            self._events = events
            self._inflate = zlib.decompressobj(47) if self._packed else None
        elif "json" in kind:
            self._body = []

    def chunk(self, data: bytes) -> None:
        """Bytes of the answer, cut anywhere, passed now."""
        if self._events is not None:
            if self._inflate is not None:
                data = self._inflate.decompress(data, KEPT_BODY_BYTES)
                if self._inflate.unconsumed_tail:  # no stream of events
                    self._events = None
                    return
            self._events.feed(data)
        elif self._body is not None:
            self._size += len(data)
            if self._size > KEPT_BODY_BYTES:
                self._body = None
            else:
                self._body.append(data)

    def over(self) -> None:
        """The answer has come to its end, or nobody reads on."""
        body, self._body = self._body, None
        if body:
            whole = b"".join(body)
            self._request.put_off(partial(answered, self._request, whole, self._packed))

    @property
    def said_done(self) -> bool:
        """Whether a stream has said that it is over: who stops reading then has not left early."""
        return self._events is not None and self._events.done


class EventStream:
    """Counts the events of a server-sent stream as they pass, and keeps its first and last few."""

    __slots__ = ("_head", "_notes", "_others", "_rest", "_tail", "_token", "_warm", "done", "request")  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self._token = request.token
        self._warm = False  # the first events are kept
        self.done = False  # the stream has said that it is over
        self._rest = b""
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque(maxlen=_TAIL_EVENTS)  # whole events, one or more each
        self._others: dict[int, int] = {}  # number of an event -> its choice, where that is not 0
        self._notes: dict[int, bytes] = {}  # ends of choices in the midst of a stream

    def feed(self, chunk: bytes) -> None:
        """Bytes of the stream, cut anywhere: each event that they complete is an emission now."""
        # The usual case in few steps: one whole event. A line break inside JSON text is escaped, so
        # `data:` behind one begins an event.
        if (
            self._warm
            and not self._rest
            and chunk.endswith(_END)
            and chunk.startswith(_DATA)
            and chunk.find(_NEXT_DATA, len(_DATA)) < 0
        ):
            self._token()
            self._tail.append(chunk)
            at = chunk.find(_INDEX)
            if self._others or (at >= 0 and chunk[at + 8 : at + 10] not in _FIRST):
                self._choice(chunk)
            return
        self._lines(chunk)

    def _lines(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > KEPT_BODY_BYTES:
            self._rest = b""
        for line in lines:
            if not line.startswith(_DATA):
                continue
            if _DONE in line[:16]:
                self.done = True
                continue
            self.request.token()
            self._tail.append(line)
            if not self._warm:
                self._head.append(line)
                self._warm = len(self._head) >= _HEAD_EVENTS
            self._choice(line)

    def _choice(self, event: bytes) -> None:
        """Which of several choices (n > 1) an event is of."""
        found = _INDEX_NUMBER.search(event)
        if found is not None and int(found[1]) > 0:
            self._others[len(self.request.stream.times) - 1] = int(found[1])
        if self._others and _FINISH.search(event) and len(self._notes) < _NOTES:
            self._notes[len(self.request.stream.times) - 1] = event

    def settle(self) -> None:
        """Take out what carried no token, and read usage and reasons. Not for the serving thread."""
        if self._rest:
            self._lines(b"\n")
        known = self._known()
        silent = {number for number, event in known.items() if event is not None and not _emits(event)}  # fmt: skip
        stream = self.request.stream
        if self._others:
            times = list(stream.times)
            del stream.times[:]
            for number, time in enumerate(times):
                if number not in silent:
                    self.request.choice(self._others.get(number, 0)).times.append(time)
        else:
            for number in sorted(silent, reverse=True):
                stream.times.pop(number)
        for number in sorted(known):
            event = known[number]
            if event is not None:
                told(self.request, event)

    def _known(self) -> dict[int, Mapping[str, Any] | None]:
        """The events that were kept, by their number in the stream."""
        tail = [line for part in self._tail for line in _data_lines(part)]
        first = len(self.request.stream.times) - len(tail)
        known = dict(enumerate(map(_parsed, self._head)))
        for number, event in (*enumerate(tail, first), *self._notes.items()):
            if number not in known:
                known[number] = _parsed(next(_data_lines(event), b""))
        return known


class TypedStream:
    """Counts the events with text of a stream whose events name their type; of the others the last few are read."""

    __slots__ = ("_delta", "_notes", "_rest", "done", "request")

    def __init__(self, request: Request, delta: re.Pattern[bytes]) -> None:
        self.request = request
        self.done = False
        self._delta = delta
        self._rest = b""
        self._notes: deque[bytes] = deque(maxlen=_NOTES)

    def feed(self, chunk: bytes) -> None:
        """Bytes of the stream, cut anywhere."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > KEPT_BODY_BYTES:
            self._rest = b""
        for line in lines:
            if not line.startswith(_DATA):
                continue
            if self._delta.search(line):
                self.request.token()
            else:
                self._notes.append(line)
                self.done = self.done or _DONE in line[:16] or bool(_LAST.search(line))

    def settle(self) -> None:
        """Read usage and reasons. Not for the serving thread."""
        if self._rest:
            self.feed(b"\n")
        for line in self._notes:
            event = _parsed(line)
            if event is not None:
                told(self.request, event)


def _data_lines(part: bytes) -> Iterator[bytes]:
    return (line for line in part.split(b"\n") if line.startswith(_DATA))


def _parsed(event: bytes) -> Mapping[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(event[len(_DATA) :])
        if isinstance(value, dict):
            return value
    return None


def _emits(event: Mapping[str, Any]) -> bool:
    """Whether an event of a chat or completion stream carries text, a call or a token id."""
    choices = event.get("choices")
    if not isinstance(choices, list):
        return "choices" not in event and "usage" not in event and "error" not in event
    return any(_says(choice) for choice in choices if isinstance(choice, dict))


def _says(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    parts = delta if isinstance(delta, dict) else choice
    named = ("content", "text", "reasoning", "reasoning_content", "tool_calls", "function_call", "token_ids", "refusal")  # fmt: skip
    return any(parts.get(name) for name in named)


def told(request: Request, answer: Mapping[str, Any]) -> None:
    """Usage, model, id, finish reasons and errors of an answer, or of one event of it, as attributes."""
    for wrapper in ("response", "message"):  # typed events wrap what an answer in one piece is
        inner = answer.get(wrapper)
        if isinstance(inner, dict):
            answer = inner
    found: dict[str, Any] = {}
    usage = answer.get("usage")
    if isinstance(usage, dict):
        found.update(_usage(usage))
    reasons = _reasons(answer)
    if reasons:
        before = request.attributes.get("finish_reasons", [])
        found["finish_reasons"] = [*before, *(reason for reason in reasons if reason not in before)]
    named = answer.get("id")  # of every event of a stream too
    if isinstance(named, str) and named:
        # Engines that do not read X-Request-Id have ids of their own beside it.
        bare = of_answer(named)[:256]
        known = request.attributes.get("request_id")
        found["request_id" if known in (None, bare) else "engine_id"] = bare
    model = answer.get("model")
    if isinstance(model, str) and "model" not in request.attributes:
        found["model"] = model[:256]
    error = answer.get("error")
    if isinstance(error, dict) and request.error is None:
        # Servers that fail in the midst of a stream have sent status 200 long before.
        code = error.get("type") or error.get("code") or "error"
        request.error = str(code)[:64]
    request.attributes.update({key: value for key, value in found.items() if value is not None})


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    prompt = _count(usage, "prompt_tokens", "input_tokens")
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else None
    read = _count(usage, "cache_read_input_tokens")
    if read is not None and prompt is not None and cached is None:
        # Anthropic's input_tokens are those behind what was cached.
        cached, prompt = read, prompt + read + (_count(usage, "cache_creation_input_tokens") or 0)
    output = _count(usage, "completion_tokens", "output_tokens")
    return {"prompt_tokens": prompt, "output_tokens": output, "cached_tokens": cached}


def _reasons(answer: Mapping[str, Any]) -> list[str]:
    choices = answer.get("choices")
    if isinstance(choices, list):
        named = [c.get("finish_reason") for c in choices if isinstance(c, dict)]
        return [reason for reason in named if isinstance(reason, str)]
    details, delta = answer.get("incomplete_details"), answer.get("delta")
    for place, key in ((details, "reason"), (delta, "stop_reason"), (answer, "stop_reason")):
        reason = place.get(key) if isinstance(place, dict) else None
        if isinstance(reason, str):
            return [reason]
    done = answer.get("object") == "response" and answer.get("status") == "completed"
    return ["stop"] if done else []


def _count(fields: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def asked(request: Request, body: bytes) -> None:
    """What a request asks for: model, streaming, limit, n, conversation. Its messages are not looked at."""
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(body)
        if not isinstance(fields, dict):
            return
        model, stream = fields.get("model"), fields.get("stream")
        if isinstance(model, str):
            request.attributes.setdefault("model", model[:256])
        request.attributes.setdefault("streaming", bool(stream))
        choices = _count(fields, "n")
        if choices is not None:
            request.attributes.setdefault("choices", choices)
        limit = _count(fields, "max_completion_tokens", "max_tokens", "max_output_tokens")
        if limit is not None:
            request.attributes.setdefault("max_tokens", limit)
        session = fields.get("conversation")
        session = session.get("id") if isinstance(session, dict) else session
        if isinstance(session, str):
            request.attributes.setdefault("session", session[:256])


def answered(request: Request, body: bytes, packed: bool = False) -> None:
    """What an answer in one piece tells of itself."""
    with contextlib.suppress(ValueError, RecursionError, zlib.error):
        if packed:
            body = zlib.decompressobj(47).decompress(body, KEPT_BODY_BYTES)
        fields = json.loads(body)
        if isinstance(fields, dict):
            told(request, fields)


def attempt(headers: Mapping[str, str]) -> int | None:
    """Which attempt of a call this is, where the client says so (OpenAI's packages do); 0 is the first."""
    text = headers.get("x-stainless-retry-count", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 4 else None
