"""httpx2 clients, the OpenAI package's among them: hops inside a request, requests of their own outside."""

from __future__ import annotations

import httpx2

from pdtrace.instrumentation.httpx_calls import Transports

_transports = Transports(httpx2)


def instrument() -> None:
    """Wrap httpx2's transports; a second call changes nothing."""
    _transports.wrap()


def uninstrument() -> None:
    """Take the wrappers off."""
    _transports.unwrap()
