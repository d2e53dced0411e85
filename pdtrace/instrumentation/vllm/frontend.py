"""vLLM's API server, recorded: `--middleware pdtrace.instrumentation.vllm.PdtraceMiddleware`.

The server is the front end of the engine that PdtraceScheduler records in its own process. Both know
a request by its X-Request-Id, or by the id in the answer where the caller sent none. Where vLLM
passes trace headers on to its engine (it does with `--otlp-traces-endpoint` only), the engine's spans
hang below those of this middleware.
"""

from __future__ import annotations

import os
from typing import Any

from pdtrace.instrumentation import asgi
from pdtrace.instrumentation._context import TRACEPARENT
from pdtrace.instrumentation._doors import once, switched_on
from pdtrace.instrumentation.requests import Request

_HEADER = TRACEPARENT.encode()


class PdtraceMiddleware(asgi.PdtraceMiddleware):
    """Wraps vLLM's application; does nothing unless switched on."""

    def __init__(self, app: asgi.App) -> None:
        super().__init__(app, role="frontend")
        try:
            switched_on(named=True, role="frontend")
        except Exception as error:
            once("pdtrace: vLLM's API server is not recorded", error=error)

    def _handed_on(self, scope: asgi.Message, request: Request) -> asgi.Message:
        return handed_on(scope, request)


def handed_on(scope: asgi.Message, request: Request) -> asgi.Message:
    """The scope with our span as the parent of what the engine records."""
    headers: list[Any] = list(scope.get("headers", ()))
    kept = [pair for pair in headers if bytes(pair[0]).lower() != _HEADER]
    traced = bool(os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
    if len(kept) == len(headers) and not traced:
        return scope  # vLLM warns of a trace context that it drops
    return {**scope, "headers": [*kept, (_HEADER, request.traceparent.encode())]}
