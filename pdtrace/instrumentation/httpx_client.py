"""httpx clients: a router's hops to its workers, and calls of clients."""

from __future__ import annotations

import httpx

from pdtrace.instrumentation.httpx_calls import Transports

_transports = Transports(httpx)


def instrument() -> None:
    """Wrap httpx's transports; a second call changes nothing."""
    _transports.wrap()


def uninstrument() -> None:
    """Take the wrappers off."""
    _transports.unwrap()
