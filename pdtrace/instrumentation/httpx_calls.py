"""Calls of httpx and of httpx2, its successor with the same transports (the OpenAI package uses that one today).

Inside a request (a router, a gateway) a call is a hop: its traceparent travels on, its time is a
dispatch span. Outside of one it is a request of its own, seen by the client: first chunk, every
chunk, usage. `httpx_client` and `httpx2_client` say which of the two is wrapped.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

from pdtrace.instrumentation import answers, api
from pdtrace.instrumentation.asgi import PATHS
from pdtrace.instrumentation.requests import Hop, Request, current, quietly

_log = logging.getLogger("pdtrace.instrumentation")


class Transports:
    """The two public transports of one of the libraries, wrapped and unwrapped."""

    def __init__(self, library: ModuleType) -> None:
        self._sync, self._async = library.HTTPTransport, library.AsyncHTTPTransport
        self._plain = library.ByteStream
        # The library asks whether an answer's stream is one of its own.
        self._stream = type("RecordedStream", (_Stream, library.SyncByteStream), {})
        self._async_stream = type("RecordedStream", (_AsyncStream, library.AsyncByteStream), {})
        self._originals: tuple[Any, Any] | None = None

    def wrap(self) -> None:
        """Record calls; a second time changes nothing."""
        if self._originals is None:
            handle, handle_async = self._sync.handle_request, self._async.handle_async_request
            self._originals = (handle, handle_async)
            self._sync.handle_request = self._recorded(handle)
            self._async.handle_async_request = self._recorded_async(handle_async)

    def unwrap(self) -> None:
        """Take the wrappers off."""
        if self._originals is not None:
            self._sync.handle_request, self._async.handle_async_request = self._originals
            self._originals = None

    def _recorded(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        def handle_request(transport: Any, request: Any) -> Any:
            call = self._call(request)
            if call is None:
                return handle(transport, request)
            try:
                response = handle(transport, request)
            except BaseException as error:
                quietly(call.end, error)
                raise
            quietly(call.answered, response)
            response.stream = self._stream(response.stream, call)
            return response

        return handle_request

    def _recorded_async(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        async def handle_async_request(transport: Any, request: Any) -> Any:
            call = self._call(request)
            if call is None:
                return await handle(transport, request)
            try:
                response = await handle(transport, request)
            except BaseException as error:
                quietly(call.end, error)
                raise
            quietly(call.answered, response)
            response.stream = self._async_stream(response.stream, call)
            return response

        return handle_async_request

    def _call(self, request: Any) -> _Call | None:
        """What is recorded of this call; None where nothing is."""
        try:
            if (
                not api.instrumented()
                or request.method != "POST"
                or not PATHS.search(request.url.path)
            ):
                return None
            call = _Call(request, whole=isinstance(request.stream, self._plain))
        except Exception:
            _log.debug("pdtrace: call not recorded", exc_info=True)
            return None
        return call


class _Call:
    """One call of a client: a hop of the request that it serves, or a request of its own."""

    def __init__(self, request: Any, *, whole: bool) -> None:
        around = current()
        self.hop: Hop | None = None
        self.own: Request | None = None
        self.answer: answers.Answer | None = None
        if around is not None:
            self.hop = around.dispatch(worker=request.url.netloc.decode("ascii", "replace"))
            self.hop.__enter__()
            self.hop.inject(request.headers)
            return
        self.own = api.request(
            role="client",
            traceparent=request.headers.get("traceparent"),  # the application's own trace goes on
            emission="chunk",
            request_id=request.headers.get("x-request-id"),
            attempt=answers.attempt(request.headers),
        )
        self.own.set(**{"server.address": request.url.host})
        self.own.inject(request.headers)
        self.answer = answers.Answer(self.own, request.url.path)
        # Not `content`: the call after a redirect has the stream only.
        body = b"".join(request.stream) if whole else b""
        if body and len(body) <= answers.KEPT_BODY_BYTES:
            self.own.put_off(partial(answers.asked, self.own, body))

    def answered(self, response: Any) -> None:
        """Status and kind of the answer."""
        if self.hop is not None:
            self.hop.set(http_status=response.status_code)
        if self.answer is not None:
            self.answer.begun(response.status_code, response.headers)

    def chunk(self, data: bytes) -> None:
        """Bytes of the answer came in now."""
        if self.answer is not None:
            self.answer.chunk(data)

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
            done = False
            if self.answer is not None:
                self.answer.over()
                done = self.answer.said_done
            own.end(error, aborted=left and error is None and not done)


class _Stream:
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


class _AsyncStream:
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
