"""httpx clients: a router's hops to its workers, and calls of clients."""

from __future__ import annotations

import httpx

from pdtrace.instrumentation.httpx_calls import Transports

_transports = Transports(httpx, httpx.HTTPTransport, httpx.AsyncHTTPTransport)
instrument = _transports.wrap
uninstrument = _transports.unwrap
