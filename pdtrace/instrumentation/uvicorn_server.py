"""uvicorn servers: every application that uvicorn loads is wrapped in the ASGI middleware.

vLLM's and SGLang's OpenAI servers, and most Python routers, are started this way.
"""

from __future__ import annotations

from collections.abc import Callable

import uvicorn

from pdtrace.instrumentation._patch import Patch
from pdtrace.instrumentation.asgi import PdtraceMiddleware


def _load(theirs: Callable[[uvicorn.Config], None], config: uvicorn.Config) -> None:
    theirs(config)
    # Other interfaces (wsgi, asgi2) have been adapted to ASGI 3 by now.
    config.loaded_app = PdtraceMiddleware(config.loaded_app)


_patch = Patch(uvicorn.Config, "load", _load)
instrument = _patch.on
uninstrument = _patch.off
