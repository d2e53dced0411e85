"""uvicorn servers: every application that uvicorn loads is wrapped in the ASGI middleware.

vLLM's and SGLang's OpenAI servers, and most Python routers, are started this way.
"""

from __future__ import annotations

from collections.abc import Callable

import uvicorn

from pdtrace.instrumentation.asgi import PdtraceMiddleware

_original: Callable[[uvicorn.Config], None] | None = None
_theirs: Callable[[uvicorn.Config], None] = uvicorn.Config.load  # what ours goes on to, for good


def instrument() -> None:
    """Wrap what `uvicorn.Config.load` loads; a second call changes nothing."""
    global _original, _theirs
    if _original is None:
        _original = _theirs = uvicorn.Config.load
        uvicorn.Config.load = _load  # type: ignore[method-assign]


def uninstrument() -> None:
    """Servers that start from now on are as they were."""
    global _original
    if _original is not None:
        uvicorn.Config.load = _original  # type: ignore[assignment, method-assign]
        _original = None


def _load(self: uvicorn.Config) -> None:
    _theirs(self)
    if _original is None:  # somebody kept this function beyond uninstrument()
        return
    # Other interfaces (wsgi, asgi2) have been adapted to ASGI 3 by now.
    self.loaded_app = PdtraceMiddleware(self.loaded_app)
