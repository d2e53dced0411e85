"""What OpenAI-compatible answers tell of themselves: emissions in a stream, usage, finish reasons.

Split in two: counting, on the serving thread (event_streams.py), and parsing of what was asked and
answered, on the recorder's thread (answer_fields.py). Of texts only whether they are empty is
looked at; nothing of them is kept.

Known are chat and text completions, the Responses API (events `response.*`) and Anthropic's messages.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from functools import partial

from pdtrace.instrumentation.answer_fields import count_of, told
from pdtrace.instrumentation.event_streams import EventStream, TypedStream
from pdtrace.instrumentation.requests import Request
from pdtrace.instrumentation.unpacking import NOT_PACKED, Unpacking, unpacking

KEPT_BODY_BYTES = 1 << 20  # a longer request or answer is not looked into
# Calls that make tokens, below any prefix. Health checks and metrics are none, nor are embeddings; `messages` alone
# is Anthropic's: a thread of OpenAI's assistants has messages too, and so has any chat room.
PATHS = re.compile(
    r"/(chat/completions|completions|responses|v1/messages|generate|generate_stream|inference)/?$"
)
# Streams of typed events: those with text say so in their type (first or last; quotes inside texts are escaped).
_DELTA = {
    "responses": re.compile(rb'"type":\s*"response\.[a-z_.]*\.delta"'),
    "v1/messages": re.compile(rb'"type":\s*"content_block_delta"(?!.*"type":\s*"signature_delta")'),
}
_OPERATIONS = {"completions": "text_completion", "chat/completions": "chat", "responses": "chat", "v1/messages": "chat"}  # fmt: skip


class Answer:
    """The answer of one call, told as it passes: its head, its bytes, its end."""

    __slots__ = ("_body", "_coding", "_events", "_kind", "_request", "_size", "_unpacking")

    def __init__(self, request: Request, path: str) -> None:
        self._request = request
        found = PATHS.search(path)
        self._kind = "" if found is None else found[1]
        if self._kind in _OPERATIONS:
            request.attributes.setdefault("operation", _OPERATIONS[self._kind])
        self._events: EventStream | TypedStream | None = None
        self._body: list[bytes] | None = None
        self._size = 0
        self._coding = ""
        self._unpacking: Unpacking | None = None

    def begun(self, status: int | None, headers: Mapping[str, str]) -> None:
        """Status and headers (their names in lower case) are there."""
        self._request.attributes["http_status"] = status
        self._coding = headers.get("content-encoding", "").strip().lower()
        if self._coding not in NOT_PACKED:
            self._unpacking = unpacking(self._coding)
            if self._unpacking is None:
                return  # its events cannot be seen: what it holds stays unknown
        kind = headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            typed = _DELTA.get(self._kind)
            events = EventStream(self._request) if typed is None else TypedStream(self._request, typed)  # fmt: skip
            self._request.put_off(events.settle)
            self._events = events
        elif "json" in kind:
            self._body = []

    def chunk(self, data: bytes) -> None:
        """Bytes of the answer, cut anywhere, passed now."""
        if self._events is not None:
            if self._unpacking is not None:
                try:
                    data = self._unpacking.feed(data)
                except Exception:  # of whichever package unpacks: half a count is none
                    self._events.forget()
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
            self._request.put_off(partial(answered, self._request, whole, self._coding))

    @property
    def said_done(self) -> bool:
        """Whether a stream has said that it is over: who stops reading then has not left early."""
        return self._events is not None and self._events.done


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
        choices = count_of(fields, "n")
        if choices is not None:
            request.attributes.setdefault("choices", choices)
        limit = count_of(fields, "max_completion_tokens", "max_tokens", "max_output_tokens")
        if limit is not None:
            request.attributes.setdefault("max_tokens", limit)
        session = fields.get("conversation")
        session = session.get("id") if isinstance(session, dict) else session
        if isinstance(session, str):
            request.attributes.setdefault("session", session[:256])


def answered(request: Request, body: bytes, coding: str = "") -> None:
    """What an answer in one piece tells of itself."""
    unpacked = None if coding in NOT_PACKED else unpacking(coding)
    fields = json.loads(body if unpacked is None else unpacked.feed(body))
    if isinstance(fields, dict):
        told(request, fields)


def attempt(headers: Mapping[str, str]) -> int | None:
    """Which attempt of a call this is, where the client says so (OpenAI's packages do); 0 is the first."""
    text = headers.get("x-stainless-retry-count", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 4 else None
