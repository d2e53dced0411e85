"""httpx clients that aiohttp carries: `openai.DefaultAioHttpClient`, and the package httpx-aiohttp.

Their transport is one of its own beside httpx's, so it has to be wrapped by name.
"""

from __future__ import annotations

import sys

from pdtrace.instrumentation.auto import AIOHTTP_TRANSPORTS
from pdtrace.instrumentation.httpx_calls import Transports

_wrapped: dict[str, Transports] = {}


def instrument() -> None:
    """Wrap the transports that are imported by now; a second call changes nothing."""
    for name in AIOHTTP_TRANSPORTS:
        module = sys.modules.get(name)
        if module is not None:
            if name not in _wrapped:
                _wrapped[name] = Transports(module.httpx, asynchronous=module.AiohttpTransport)
            _wrapped[name].wrap()


def uninstrument() -> None:
    """Record none of their calls from now on."""
    for transports in _wrapped.values():
        transports.unwrap()
