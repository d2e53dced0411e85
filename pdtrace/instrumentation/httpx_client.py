"""httpx clients: a router's hops to its workers, and calls of clients such as the OpenAI package.

Inside a request (a router, a gateway) a call is a hop: its traceparent travels on, its time is a
dispatch span. Outside of one it is a request of its own, seen by the client: first chunk, every
chunk, usage. `instrument()` wraps the two public transports of httpx, `uninstrument()` unwraps.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from pdtrace.instrumentation import answers, api
from pdtrace.instrumentation.asgi import PATHS
from pdtrace.instrumentation.requests import Hop, Request, current, quietly

_log = logging.getLogger("pdtrace.instrumentation")
_originals: dict[type[Any], Any] = {}


def instrument() -> None:
    """Wrap httpx's transports; a second call changes nothing."""
    if _originals:
        return
    _originals[httpx.HTTPTransport] = httpx.HTTPTransport.handle_request
    _originals[httpx.AsyncHTTPTransport] = httpx.AsyncHTTPTransport.handle_async_request
    httpx.HTTPTransport.handle_request = _handle_request  # type: ignore[method-assign]
    httpx.AsyncHTTPTransport.handle_async_request = _handle_async_request  # type: ignore[method-assign]


def uninstrument() -> None:
    """Take the wrappers off."""
    if _originals:
        httpx.HTTPTransport.handle_request = _originals[httpx.HTTPTransport]  # type: ignore[method-assign]
        httpx.AsyncHTTPTransport.handle_async_request = _originals[httpx.AsyncHTTPTransport]  # type: ignore[method-assign]
        _originals.clear()


def _handle_request(self: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
    handle = _originals.get(httpx.HTTPTransport, httpx.HTTPTransport.handle_request)
    call = _call(request)
    if call is None:
        response: httpx.Response = handle(self, request)
        return response
    try:
        response = handle(self, request)
    except BaseException as error:
        quietly(call.end, error)
        raise
    quietly(call.answered, response)
    response.stream = _Stream(response.stream, call)
    return response


async def _handle_async_request(
    self: httpx.AsyncHTTPTransport, request: httpx.Request
) -> httpx.Response:
    handle = _originals.get(httpx.AsyncHTTPTransport, httpx.AsyncHTTPTransport.handle_async_request)
    call = _call(request)
    if call is None:
        response: httpx.Response = await handle(self, request)
        return response
    try:
        response = await handle(self, request)
    except BaseException as error:
        quietly(call.end, error)
        raise
    quietly(call.answered, response)
    response.stream = _AsyncStream(response.stream, call)
    return response


def _call(request: httpx.Request) -> _Call | None:
    """What is recorded of this call; None where nothing is."""
    try:
        if not api.instrumented() or request.method != "POST" or not PATHS.search(request.url.path):
            return None
        call = _Call(request)
    except Exception:
        _log.debug("pdtrace: call not recorded", exc_info=True)
        return None
    return call


class _Call:
    """One call of a client: a hop of the request that it serves, or a request of its own."""

    def __init__(self, request: httpx.Request) -> None:
        around = current()
        self.hop: Hop | None = None
        self.own: Request | None = None
        self.events: answers.EventStream | None = None
        self.body: list[bytes] | None = None
        self.size = 0
        if around is not None:
            self.hop = around.dispatch(worker=request.url.netloc.decode("ascii", "replace"))
            self.hop.__enter__()
            self.hop.inject(request.headers)
            return
        self.own = api.request(
            role="client", emission="chunk", request_id=request.headers.get("x-request-id")
        )
        self.own.set(**{"server.address": request.url.host})
        self.own.inject(request.headers)
        if isinstance(request.stream, httpx.ByteStream) and len(request.content) <= answers.KEPT_BODY_BYTES:  # fmt: skip
            own, content = self.own, request.content
            own.later.append(lambda: answers.asked(own, content))

    def answered(self, response: httpx.Response) -> None:
        """Status and kind of the answer."""
        if self.hop is not None:
            self.hop.set(http_status=response.status_code)
        if self.own is None:
            return
        self.own.set(http_status=response.status_code)
        if response.headers.get("content-encoding", "identity") != "identity":
            return
        kind = response.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            self.events = answers.EventStream(self.own)
            self.own.later.append(self.events.settle)
        elif "json" in kind:
            self.body = []

    def chunk(self, data: bytes) -> None:
        """Bytes of the answer came in now."""
        if self.events is not None:
            self.events.feed(data)
        elif self.body is not None:
            self.size += len(data)
            if self.size > answers.KEPT_BODY_BYTES:
                self.body = None
            else:
                self.body.append(data)

    def close(self, left: bool) -> None:
        """The application lets go of the answer, read to its end or not."""
        self.end(left=left)

    def end(self, error: BaseException | None = None, *, left: bool = False) -> None:
        """The answer is over, broken, or nobody reads on."""
        if self.hop is not None:
            hop, self.hop = self.hop, None
            hop.__exit__(None if error is None else type(error), error, None)
        if self.own is not None:
            own, self.own = self.own, None
            if self.body:
                whole = b"".join(self.body)
                own.later.append(lambda: answers.answered(own, whole))
            done = self.events is not None and self.events.done
            own.end(error, aborted=left and error is None and not done)


class _Stream(httpx.SyncByteStream):
    def __init__(self, inner: Any, call: _Call) -> None:
        self._inner = inner
        self._call = call
        self._read = False

    def __iter__(self) -> Iterator[bytes]:
        try:
            for data in self._inner:
                quietly(self._call.chunk, data)
                yield data
        except Exception as error:
            quietly(self._call.end, error)
            raise
        self._read = True

    def close(self) -> None:
        quietly(self._call.close, not self._read)
        self._inner.close()


class _AsyncStream(httpx.AsyncByteStream):
    def __init__(self, inner: Any, call: _Call) -> None:
        self._inner = inner
        self._call = call
        self._read = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._inner:
                quietly(self._call.chunk, data)
                yield data
        except Exception as error:
            quietly(self._call.end, error)
            raise
        self._read = True

    async def aclose(self) -> None:
        quietly(self._call.close, not self._read)
        await self._inner.aclose()
