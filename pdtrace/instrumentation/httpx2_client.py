"""httpx2 clients, the OpenAI package's among them: hops inside a request, requests of their own outside."""

from __future__ import annotations

import httpx2

from pdtrace.instrumentation.httpx_calls import Transports

_transports = Transports(httpx2, httpx2.HTTPTransport, httpx2.AsyncHTTPTransport)
instrument = _transports.wrap
uninstrument = _transports.unwrap
