"""Server-sent events of an answer: counted as they pass, the first and last few read afterwards.

Counting happens on the serving thread: a few byte searches a chunk. Of texts only whether they are
empty is looked at; nothing of them is kept.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from pdtrace.instrumentation.answer_fields import told
from pdtrace.instrumentation.requests import Request

KEPT_LINE_BYTES = 1 << 20  # a longer line is no event
_TAIL_EVENTS = 3  # events at the end of a stream that may carry no token: finish, usage
_HEAD_EVENTS = 4  # events at its start, likewise: role, empty text
_NOTES = 64  # events in between that are kept to be read
_DATA, _NEXT_DATA, _DONE = b"data:", b"\ndata:", b"[DONE]"
_END = b"}\n\n"
_INDEX, _FIRST = b'"index":', (b"0,", b"0}")
_INDEX_NUMBER = re.compile(rb'"index":\s*(\d{1,4})')
_FINISH = re.compile(rb'"finish_reason":\s*"')
_LAST = re.compile(rb'"type":\s*"(?:response\.(?:completed|incomplete|failed)|message_stop|error)"')


class Events:
    """A stream of server-sent events, line by line."""

    __slots__ = ("_forgotten", "_rest", "done", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.done = False  # the stream has said that it is over
        self._forgotten = False
        self._rest = b""  # of a line that is not whole yet

    def feed(self, chunk: bytes) -> None:
        """Bytes of the stream, cut anywhere."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > KEPT_LINE_BYTES:
            self._rest = b""
        for line in lines:
            if line.startswith(_DATA):
                self._line(line)

    def _line(self, line: bytes) -> None:
        """The data of an event."""

    def forget(self) -> None:
        """The rest cannot be read, and what was counted is not the whole."""
        self._forgotten = True

    def settle(self) -> None:
        """Read what the events say, once all have passed. Not for the serving thread."""
        if self._forgotten:
            del self.request.times[:]
            return
        self._read()
        # What no line break ended is no event that went out (its instant would be that of this
        # reading); what it says of the request counts, where it is whole.
        last = _parsed(self._rest) if self._rest.startswith(_DATA) else None
        if last is not None:
            told(self.request, last)

    def _read(self) -> None:
        """Read it."""


class EventStream(Events):
    """Counts the events as they pass, each an emission, and keeps its first and last few."""

    __slots__ = ("_head", "_notes", "_others", "_tail", "_token", "_warm")

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._token = request.token
        self._warm = False  # the first events are kept
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
            if self._others or (
                at >= 0
                and (chunk[at + 8 : at + 10] not in _FIRST or chunk.find(_INDEX, at + 10) >= 0)
            ):
                self._choice(chunk)
            return
        super().feed(chunk)

    def _line(self, line: bytes) -> None:
        if _DONE in line[:16]:
            self.done = True
            return
        self.request.token()
        self._tail.append(line)
        if not self._warm:
            self._head.append(line)
            self._warm = len(self._head) >= _HEAD_EVENTS
        self._choice(line)

    def _choice(self, event: bytes) -> None:
        """Which of several choices (n > 1) an event is of."""
        numbers = _INDEX_NUMBER.findall(event)
        choice = int(numbers[0]) if numbers else 0
        if len(numbers) > 1 and any(map(int, numbers)):  # of tool calls too, before it or behind it
            choice = _choice_of(_parsed(event[event.find(_DATA) :]))
        if choice > 0:
            self._others[len(self.request.times) - 1] = choice
        if self._others and _FINISH.search(event) and len(self._notes) < _NOTES:
            self._notes[len(self.request.times) - 1] = event

    def _read(self) -> None:
        """Take out what carried no token, and read usage and reasons."""
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
        first = len(self.request.times) - len(tail)
        known = dict(enumerate(map(_parsed, self._head)))
        for number, event in (*enumerate(tail, first), *self._notes.items()):
            if number not in known:
                known[number] = _parsed(next(_data_lines(event), b""))
        return known


class TypedStream(Events):
    """Counts the events with text of a stream whose events name their type; of the others the first and last few are read."""

    __slots__ = ("_delta", "_head", "_notes")

    def __init__(self, request: Request, delta: re.Pattern[bytes]) -> None:
        super().__init__(request)
        self._delta = delta
        self._head: list[bytes] = []  # the first one may be all that tells of the prompt
        self._notes: deque[bytes] = deque(maxlen=_NOTES)

    def _line(self, line: bytes) -> None:
        if self._delta.search(line):
            self.request.token()
            return
        few = len(self._head) < _HEAD_EVENTS
        (self._head if few else self._notes).append(line)
        self.done = self.done or _DONE in line[:16] or bool(_LAST.search(line))

    def _read(self) -> None:
        for line in (*self._head, *self._notes):
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


def _choice_of(event: Mapping[str, Any] | None) -> int:
    """The number of the first choice in an event; 0 where that has none."""
    choices = (event or {}).get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    index = first.get("index") if isinstance(first, dict) else None
    return index if isinstance(index, int) and 0 <= index < 10_000 else 0


def _emits(event: Mapping[str, Any]) -> bool:
    """Whether an event of a chat or completion stream carries text, a call or a token id."""
    choices = event.get("choices")
    if not isinstance(choices, list):
        told = event.keys() & {"choices", "usage", "error"}
        return not told and event.get("object") != "error"
    return any(_says(choice) for choice in choices if isinstance(choice, dict))


def _says(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    parts = delta if isinstance(delta, dict) else choice
    named = ("content", "text", "reasoning", "reasoning_content", "tool_calls", "function_call", "token_ids", "refusal")  # fmt: skip
    return any(parts.get(name) for name in named)
