"""What OpenAI-compatible answers tell of themselves: emissions in a stream, usage, finish reasons.

Split in two: counting, on the serving thread (a few byte searches a chunk), and parsing of the
request's fields and of the stream's first and last events, on the recorder's thread. Of texts only
whether they are empty is looked at; nothing of them is kept.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from pdtrace.instrumentation.request_ids import of_answer
from pdtrace.instrumentation.requests import Request

KEPT_BODY_BYTES = 1 << 20  # a longer request or answer is not looked into
_TAIL_EVENTS = 3  # events at the end of a stream that may carry no token: finish, usage
_HEAD_EVENTS = 4  # events at its start, likewise: role, empty text
_DATA, _NEXT_DATA, _DONE = b"data:", b"\ndata:", b"[DONE]"


class EventStream:
    """Counts the events of a server-sent stream as they pass, and keeps its first and last few."""

    __slots__ = ("_head", "_rest", "_tail", "done", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.done = False  # the stream has said that it is over
        self._rest = b""
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque(maxlen=_TAIL_EVENTS)  # whole events, one or more each

    def feed(self, chunk: bytes) -> None:
        """Bytes of the stream, cut anywhere: each event that they complete is an emission now."""
        # The usual case in few steps: whole events. A line break inside JSON text is escaped, so
        # `data:` behind one begins an event.
        if not self._rest and len(self._head) >= _HEAD_EVENTS and chunk.endswith(b"\n"):
            events = chunk.count(_NEXT_DATA) + chunk.startswith(_DATA)
            if events == 1 and _DONE not in chunk[-16:]:
                self.request.token()
                self._tail.append(chunk)
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
            if len(self._head) < _HEAD_EVENTS:
                self._head.append(line)

    def settle(self) -> None:
        """Take out what carried no token, and read usage and reasons. Not for the serving thread."""
        if self._rest:
            self._lines(b"\n")
        times = self.request.stream.times
        tail = [line for part in self._tail for line in part.split(b"\n") if line.startswith(_DATA)]
        known = dict(enumerate(map(_parsed, self._head)))
        first = len(times) - len(tail)
        known.update(
            (first + index, _parsed(event))
            for index, event in enumerate(tail)
            if first + index not in known
        )
        for index in sorted(known, reverse=True):
            event = known[index]
            if event is not None and not _emits(event):
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
    named = answer.get("id")  # of every event of a stream too
    if isinstance(named, str) and named and "request_id" not in request.attributes:
        found["request_id"] = of_answer(named)[:256]
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
