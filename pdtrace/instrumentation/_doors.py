"""Whether what an engine loads of us by name is switched on: inert unless somebody asked for traces."""

from __future__ import annotations

import logging
import os

from pdtrace.instrumentation import api

_log = logging.getLogger("pdtrace.instrumentation")
_told: set[str] = set()


def switched_on(*, named: bool, role: str | None = None) -> bool:
    """Record this process if it is asked for, and say whether it is recorded.

    Asked for it is by `pdtrace run`, `pdtrace.instrument()` or PDTRACE_FOLDER; where the operator
    named us on the command line (`named`), OTEL_EXPORTER_OTLP_ENDPOINT does too. A package that is
    merely installed beside an engine records nothing.
    """
    if api.instrumented():
        return True
    asked = bool(os.environ.get("PDTRACE_FOLDER") or os.environ.get("PDTRACE_RUN"))
    if not asked and named:
        asked = bool(os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"))
        if not asked:
            once("pdtrace: nothing is recorded; set PDTRACE_FOLDER or OTEL_EXPORTER_OTLP_ENDPOINT")
    if asked:
        api.instrument(role=role)
    return api.instrumented()


def once(message: str, *, error: BaseException | None = None) -> None:
    """Log a warning, the same one once a process."""
    if message not in _told:
        _told.add(message)
        _log.warning(message, exc_info=error)
