"""Calls of httpx and of httpx2, its successor with the same transports (the OpenAI package uses that one today).

Inside a request (a router, a gateway) a call is a hop: its traceparent travels on, its time is a
dispatch span. Outside of one it is a request of its own, seen by the client: first chunk, every
chunk, usage. `httpx_client`, `httpx2_client` and `httpx_aiohttp_client` say whose transports are wrapped.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar, Token
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, Self

from pdtrace.instrumentation import answers, api
from pdtrace.instrumentation._patch import Patch
from pdtrace.instrumentation.answers import PATHS
from pdtrace.instrumentation.requests import Hop, Request, current, quietly

_log = logging.getLogger("pdtrace.instrumentation")
# A call of this task is on its way: what carries it further down (aiohttp) is no second one.
under_way: ContextVar[bool] = ContextVar("pdtrace_call", default=False)


class Transports:
    """Public transports of one of the libraries, recorded and no longer."""

    def __init__(
        self, library: ModuleType, sync: type | None = None, asynchronous: type | None = None
    ) -> None:
        self._plain = library.ByteStream
        # The library asks whether an answer's stream is one of its own.
        self._stream = type("RecordedStream", (_Stream, library.SyncByteStream), {})
        self._async_stream = type("RecordedStream", (_AsyncStream, library.AsyncByteStream), {})
        self._patches = []
        if sync is not None:
            self._patches.append(Patch(sync, "handle_request", self._handle))
        if asynchronous is not None:
            self._patches.append(Patch(asynchronous, "handle_async_request", self._handle_async))

    def wrap(self) -> None:
        """Record calls; a second time changes nothing."""
        for patch in self._patches:
            patch.on()

    def unwrap(self) -> None:
        """Record none from now on."""
        for patch in self._patches:
            patch.off()

    def _handle(self, theirs: Callable[..., Any], transport: Any, request: Any) -> Any:
        with self._call(request) as call:
            response = theirs(transport, request)
        return call.passing(response, self._stream)

    async def _handle_async(self, theirs: Callable[..., Any], transport: Any, request: Any) -> Any:
        with self._call(request) as call:
            response = await theirs(transport, request)
        return call.passing(response, self._async_stream)

    def _call(self, request: Any) -> _Call | _Unrecorded:
        """What is recorded of this call."""
        try:
            if (
                api.instrumented()
                and request.method == "POST"
                and PATHS.search(request.url.path)
                and not under_way.get()
            ):
                return _Call(request, whole=isinstance(request.stream, self._plain))
        except Exception:
            _log.debug("pdtrace: call not recorded", exc_info=True)
        return _UNRECORDED


class _Unrecorded:
    """A call that is none of ours."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was begun."""

    def passing(self, response: Any, _: type) -> Any:
        """The answer, as it is."""
        return response


_UNRECORDED = _Unrecorded()


class _Call:
    """One call of a client: a hop of the request that it serves, or a request of its own."""

    def __init__(self, request: Any, *, whole: bool) -> None:
        around = current()
        self.hop: Hop | None = None
        self.own: Request | None = None
        self.answer: answers.Answer | None = None
        self._token: Token[bool] | None = None
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

    def __enter__(self) -> Self:
        self._token = under_way.set(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._token is not None:
            with contextlib.suppress(
                ValueError
            ):  # closed from another context: it was set for none else
                under_way.reset(self._token)
        if error is not None:
            quietly(self.end, error)

    def passing(self, response: Any, stream: type) -> Any:
        """The answer, whose bytes are told as they are read."""
        quietly(self._begun, response)
        response.stream = stream(response.stream, self)
        return response

    def _begun(self, response: Any) -> None:
        if self.hop is not None:
            self.hop.set(http_status=response.status_code)
        if self.answer is not None:
            self.answer.begun(response.status_code, response.headers)

    def chunk(self, data: bytes) -> None:
        """Bytes of the answer came in now."""
        if self.answer is not None:
            self.answer.chunk(data)

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


class _Passing:
    """Bytes of an answer on their way to who reads them; a block around the reading."""

    def __init__(self, inner: Any, call: _Call) -> None:
        self._inner = inner
        self._call = call
        self._read = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._read = error is None
        if isinstance(error, Exception):  # who merely stops reading closes the stream
            quietly(self._call.end, error)

    def _closed(self) -> None:
        quietly(partial(self._call.end, left=not self._read))


class _Stream(_Passing):
    def __iter__(self) -> Iterator[bytes]:
        with self:
            for data in self._inner:
                quietly(self._call.chunk, data)
                yield data

    def close(self) -> None:
        self._closed()
        self._inner.close()


class _AsyncStream(_Passing):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self:
            async for data in self._inner:
                quietly(self._call.chunk, data)
                yield data

    async def aclose(self) -> None:
        self._closed()
        await self._inner.aclose()
