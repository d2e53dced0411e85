"""ASGI middleware for OpenAI-compatible servers and routers: one request span a call, every chunk timed.

`app.add_middleware(PdtraceMiddleware, role="router")`, or by import path where a server takes one
(`--middleware pdtrace.instrumentation.asgi.PdtraceMiddleware`). Bytes pass through untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import partial
from typing import Any

from pdtrace.instrumentation import answers, api
from pdtrace.instrumentation.answers import PATHS
from pdtrace.instrumentation.request_ids import MAX_CHARACTERS
from pdtrace.instrumentation.requests import Request, quietly

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_CLIENT_LEFT = "http.disconnect"
# What servers of this process are that were not told; an engine's door sets it where the engine has spans of its own.
_served_as: list[str] = []


# How an application gets its scope where spans of its engine shall hang below ours; an engine's door sets it.
_handed_on: list[Callable[[Message, Request], Message]] = []


def hand_on(how: Callable[[Message, Request], Message]) -> None:
    """Have the applications of this process get what this makes of their scopes."""
    _handed_on[:] = [how]


def served_as(role: str) -> None:
    """Say what the servers of this process are, where nobody told them."""
    _served_as[:] = [role]


class PdtraceMiddleware:
    """Wraps an ASGI application; does nothing until `pdtrace.instrument()` was called."""

    def __init__(
        self, app: App, role: str | None = None, paths: str | re.Pattern[str] = PATHS
    ) -> None:
        self.app = app
        self.role = role
        self.paths = re.compile(paths)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan" and api.instrumented():
            await self.app(scope, receive, partial(_ending, send))
            return
        if (
            scope["type"] != "http"
            or scope.get("method") != "POST"
            or not api.instrumented()
            or not self.paths.search(scope.get("path", ""))
        ):
            await self.app(scope, receive, send)
            return
        request = scope.get("pdtrace")
        if request is not None:  # a second middleware further in does not count the call again
            await self.app(self._inner(scope, request), receive, send)
            return
        scope["pdtrace"] = request = self._begun(scope)
        call = _Call(request, scope.get("path", ""), receive, send)
        with request:
            await self.app(self._inner(scope, request), call.receive, call.send)
            if call.left and not call.complete:
                request.end(aborted=True)

    def _begun(self, scope: Message) -> Request:
        headers: dict[str, str] = {}
        with contextlib.suppress(Exception):  # headers that cannot be read tell nothing
            headers = _headers(scope.get("headers", ()))
        request = api.request(headers, emission="chunk")
        role = self.role or (_served_as[0] if _served_as else None)
        if role is not None:
            request.set(role=role)
        attempt = answers.attempt(headers)
        if attempt is not None:
            request.set(attempt=attempt)
        return request

    def _inner(self, scope: Message, request: Request) -> Message:
        with contextlib.suppress(Exception):
            return self._handed_on(scope, request)
        return scope

    def _handed_on(self, scope: Message, request: Request) -> Message:
        """The scope as the application gets it."""
        return _handed_on[0](scope, request) if _handed_on else scope


async def _ending(send: Send, message: Message) -> None:
    """At the end of the application everything is written: servers may die by their own signal then."""
    if message["type"].startswith("lifespan.shutdown"):
        try:
            await asyncio.get_running_loop().run_in_executor(None, api.flush)
        except RuntimeError:  # trio's loop, or an executor that is down already
            api.flush(timeout_s=1.0)
    await send(message)


class _Call:
    """One call: passes messages on in both directions and marks what they tell."""

    __slots__ = ("_answer", "_body", "_body_bytes", "_receive", "_send", "complete", "left", "request")  # fmt: skip

    def __init__(self, request: Request, path: str, receive: Receive, send: Send) -> None:
        self.request = request
        self.left = False
        self.complete = False
        self._receive = receive
        self._send = send
        self._body: list[bytes] | None = []
        self._body_bytes = 0
        self._answer = answers.Answer(request, path)

    async def receive(self) -> Message:
        message = await self._receive()
        kind = message["type"]
        if kind == "http.request":
            quietly(self._asked, message)
        elif kind == _CLIENT_LEFT:
            self.left = True
        return message

    def _asked(self, message: Message) -> None:
        if self._body is None:
            return
        body = bytes(message.get("body") or b"")
        self._body_bytes += len(body)
        if self._body_bytes > answers.KEPT_BODY_BYTES:
            self._body = None
            return
        self._body.append(body)
        if not message.get("more_body"):
            self.request.put_off(partial(answers.asked, self.request, b"".join(self._body)))
            self._body = None

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.body":
            quietly(self._answered, message)
        elif kind == "http.response.start":
            quietly(self._started, message)
        await self._send(message)

    def _started(self, message: Message) -> None:
        headers = _headers(message.get("headers", ()))
        self._answer.begun(message.get("status"), headers)
        if "request_id" not in self.request.attributes and "x-request-id" in headers:
            self.request.attributes["request_id"] = headers["x-request-id"][:MAX_CHARACTERS]

    def _answered(self, message: Message) -> None:
        self.complete = not message.get("more_body")
        self._answer.chunk(bytes(message.get("body") or b""))
        if self.complete:
            self._answer.over()


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {
        bytes(key).decode("latin-1").lower(): bytes(value).decode("latin-1") for key, value in pairs
    }
