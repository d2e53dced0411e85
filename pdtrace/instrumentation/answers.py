"""What OpenAI-compatible answers tell of themselves: emissions in a stream, usage, finish reasons.

Split in two: counting, on the serving thread (a few byte searches a chunk), and parsing of the
request's fields and of the stream's first and last events, on the recorder's thread. Of texts only
whether they are empty is looked at; nothing of them is kept.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from pdtrace.instrumentation.requests import Request

KEPT_BODY_BYTES = 1 << 20  # a longer request or answer is not looked into
_TAIL_EVENTS = 3  # events at the end of a stream that may carry no token: finish, usage
_HEAD_EVENTS = 4  # events at its start, likewise: role, empty text
_DATA, _DONE = b"data:", b"[DONE]"


class EventStream:
    """Counts the events of a server-sent stream as they pass, and keeps its first and last few."""

    __slots__ = ("_events", "_head", "_rest", "_tail", "done", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.done = False  # the stream has said that it is over
        self._rest = b""
        self._events = 0
        self._head: list[bytes] = []
        self._tail: list[bytes] = []

    def feed(self, chunk: bytes) -> None:
        """Bytes of the stream, cut anywhere: each event that they complete is an emission now."""
        whole = self._rest + chunk if self._rest else chunk
        *lines, self._rest = whole.split(b"\n")
        if len(self._rest) > KEPT_BODY_BYTES:
            self._rest = b""
        events = [line for line in lines if line.startswith(_DATA)]
        if events and _DONE in events[-1][:16]:
            self.done = True
            events.pop()
        if not events:
            return
        token = self.request.token
        for event in events:
            token()
            if len(self._head) < _HEAD_EVENTS:
                self._head.append(event)
        self._events += len(events)
        self._tail = (self._tail + events)[-_TAIL_EVENTS:]

    def settle(self) -> None:
        """Take out what carried no token, and read usage and reasons. Not for the serving thread."""
        if self._rest.startswith(_DATA) and _DONE not in self._rest[:16]:
            self.feed(b"\n")
        times = self.request.stream.times
        head = [_parsed(event) for event in self._head]
        first_tail = max(self._events - len(self._tail), len(head))
        tail = {
            self._events - len(self._tail) + index: _parsed(event)
            for index, event in enumerate(self._tail)
        }
        known = {**dict(enumerate(head)), **{i: e for i, e in tail.items() if i >= first_tail}}
        empty = {index for index, event in known.items() if event is not None and not _emits(event)}
        for index in sorted(empty, reverse=True):
            if index < len(times):
                times.pop(index)
        for event in known.values():
            if event is not None:
                told(self.request, event)


def _parsed(event: bytes) -> Mapping[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(event[len(_DATA) :])
        if isinstance(value, dict):
            return value
    return None


def _emits(event: Mapping[str, Any]) -> bool:
    """Whether an event of a chat, completion or responses stream carries text, a call or a token id."""
    kind = event.get("type")
    if isinstance(kind, str) and kind.startswith("response."):
        return kind.endswith(".delta")
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
    """Usage, model and finish reasons of an answer, or of one event of it, as attributes."""
    inner = answer.get("response")  # the responses API wraps its last event
    if isinstance(inner, dict):
        answer = inner
    found: dict[str, Any] = {}
    usage = answer.get("usage")
    if isinstance(usage, dict):
        found["prompt_tokens"] = _count(usage, "prompt_tokens", "input_tokens")
        found["output_tokens"] = _count(usage, "completion_tokens", "output_tokens")
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        if isinstance(details, dict):
            found["cached_tokens"] = _count(details, "cached_tokens")
    choices = answer.get("choices")
    if isinstance(choices, list):
        reasons = [c.get("finish_reason") for c in choices if isinstance(c, dict)]
        if kept := [reason for reason in reasons if isinstance(reason, str)]:
            found["finish_reasons"] = kept
    model = answer.get("model")
    if isinstance(model, str) and "model" not in request.attributes:
        found["model"] = model[:256]
    request.attributes.update({key: value for key, value in found.items() if value is not None})


def _count(fields: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def asked(request: Request, body: bytes) -> None:
    """What a request asks for: model, streaming, limit, n. Its messages are not looked at."""
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


def answered(request: Request, body: bytes) -> None:
    """What an answer in one piece tells of itself."""
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(body)
        if isinstance(fields, dict):
            told(request, fields)
