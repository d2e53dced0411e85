"""Switching the instrumentation on and off, and marking requests with it.

`instrument()` once at the start of the process; then in the serving code:

    with request(headers=headers, model="llama", prompt_tokens=812) as mine:
        with mine.phase("queue"):
            slot = await scheduler.admit(mine)
        with mine.phase("prefill"):
            state = model.prefill(prompt)
        for token in model.decode(state):
            mine.token()

Without `instrument()` all of this does nothing.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pdtrace import __version__
from pdtrace import semconv as s
from pdtrace.instrumentation import _context
from pdtrace.instrumentation.any_phase import AnyPhase
from pdtrace.instrumentation.engine_steps import Steps
from pdtrace.instrumentation.recorder import Exporter, Off, Opener, Recorder, Sampling
from pdtrace.instrumentation.request_ids import MAX_CHARACTERS
from pdtrace.instrumentation.requests import Request, current

_log = logging.getLogger("pdtrace.instrumentation")
_lock = threading.Lock()
_off = Off()
_recorder: Recorder | None = None
_defaults: dict[str, Any] = {}

FOLDER = "pdtrace-traces"


def instrument(
    folder: str | os.PathLike[str] | None = None,
    *,
    service: str | None = None,
    role: str | None = None,
    ratio: float | None = None,
    slow_ttft_ms: float | None = None,
    slow_ms: float | None = None,
    endpoint: str | None = None,
    exporter: Exporter | None = None,
) -> None:
    """Record requests of this process; a second call warns and changes nothing.

    Traces go to OTLP files below `folder` (environment PDTRACE_FOLDER), to the OTLP `endpoint`
    (OTEL_EXPORTER_OTLP_ENDPOINT; needs `pdtrace[otlp]`) or to `exporter`; where none of these is
    given, into the application's own TracerProvider if it has one, else to `pdtrace-traces`. `service` (OTEL_SERVICE_NAME) and `role` (PDTRACE_ROLE: gateway, router,
    frontend, prefill, decode, aggregated) name the process. `ratio` (PDTRACE_RATIO) keeps that
    share of the requests; failed ones, and those slower than the limits, are kept anyway.
    Never raises: what cannot be done is logged.
    """
    global _recorder
    try:
        with _lock:
            if _recorder is not None:
                _log.warning("pdtrace: already instrumented; this call changes nothing")
                return
            sampling = Sampling(
                _number(ratio, "PDTRACE_RATIO", 1.0),
                _number(slow_ttft_ms, "PDTRACE_SLOW_TTFT_MS", None),
                _number(slow_ms, "PDTRACE_SLOW_MS", None),
            )
            role = role or os.environ.get("PDTRACE_ROLE") or None
            make, opener = _way_out(folder, endpoint, exporter, partial(resource, service, role))
            _defaults.clear()
            if role is not None:
                _defaults["role"] = role
            _recorder = Recorder(make, sampling, opener=opener)
            atexit.register(_recorder.close)
    except Exception:
        _log.warning("pdtrace: not instrumented", exc_info=True)


def _way_out(
    folder: str | os.PathLike[str] | None,
    endpoint: str | None,
    exporter: Exporter | None,
    described: Callable[[], dict[str, Any]],
) -> tuple[Callable[[], Exporter], Opener | None]:
    """(what makes the exporter, what numbers the spans). Made in the process that writes: a forked
    worker has its own id and instance."""
    if exporter is not None:
        return lambda: exporter, None
    folder = folder or os.environ.get("PDTRACE_FOLDER")
    endpoint = endpoint or (None if folder else os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"))
    if folder is None and endpoint is None and "opentelemetry.sdk.trace" in sys.modules:
        from pdtrace.instrumentation.sdk import Bridge, application_provider

        provider = application_provider()
        if provider is not None:
            bridge = Bridge(provider, __version__)
            return lambda: bridge, bridge
    if endpoint is not None:
        from pdtrace.instrumentation.sdk import Endpoint, otlp_exporter

        otlp_exporter(endpoint).shutdown()  # a missing package is told now
        return lambda: Endpoint(otlp_exporter(endpoint), described(), __version__), None
    where = os.fspath(folder or FOLDER)

    def files() -> Exporter:
        from pdtrace.instrumentation.files import OtlpFiles

        return OtlpFiles(where, described(), __version__)

    return files, None


def uninstrument() -> None:
    """Write what is left and record nothing more."""
    global _recorder
    with _lock:
        recorder, _recorder = _recorder, None
        _defaults.clear()
    if recorder is not None:
        atexit.unregister(recorder.close)
        recorder.close()


def instrumented() -> bool:
    """Whether requests of this process are recorded."""
    return _recorder is not None


def flush(timeout_s: float = 5.0) -> bool:
    """Write what is finished now; False when that takes longer than `timeout_s`."""
    recorder = _recorder
    return True if recorder is None else recorder.flush(timeout_s)


def dropped_requests() -> int:
    """Finished requests of this process that were lost because the queue was full or the export failed."""
    recorder = _recorder
    return 0 if recorder is None else recorder.dropped


def resource(service: str | None = None, role: str | None = None) -> dict[str, Any]:
    """What OpenTelemetry calls the resource: this process by name, instance, host and id."""
    name = service or os.environ.get("OTEL_SERVICE_NAME") or role or "pdtrace"
    pairs: dict[str, Any] = {
        "service.name": name,
        "service.instance.id": str(uuid.uuid4()),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "telemetry.sdk.name": "pdtrace",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": __version__,
    }
    if role is not None:
        pairs[s.WORKER_ROLE] = role
    for item in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, separator, value = item.partition("=")
        if separator and key.strip():
            pairs[key.strip()] = value.strip()
    return pairs


def request(
    headers: Mapping[str, str] | None = None,
    *,
    traceparent: str | bytes | None = None,
    request_id: str | None = None,
    **attributes: Any,
) -> Request:
    """A request that begins now: a context manager, or end it with `.end()`.

    `headers` of the incoming call (or its `traceparent`) join it to the caller's trace;
    `request_id` is the id that travels between components (X-Request-ID is taken from the headers).
    """
    recorder = _recorder
    parent = None
    try:
        if headers is not None:
            parent = _context.from_headers(headers)
            if request_id is None:
                request_id = headers.get("x-request-id") or headers.get("X-Request-Id")
        elif traceparent is not None:
            parent = _context.parse(traceparent)
    except Exception:
        _log.debug("pdtrace: headers not understood", exc_info=True)
    if request_id is not None:
        attributes["request_id"] = str(request_id)[:MAX_CHARACTERS]
    if _defaults:
        attributes = {**_defaults, **attributes}
    try:
        return Request(_off if recorder is None else recorder, parent, attributes)
    except Exception:
        _log.debug("pdtrace: request not recorded", exc_info=True)
        return Request(_off, parent, attributes)


def phase(name: str, **attributes: Any) -> AnyPhase:
    """A phase of the current request: `with phase("prefill"):`, or `@phase("prefill")` on a function."""
    return AnyPhase(name, attributes)


def steps(rank: str | None = None) -> Steps:
    """The steps of an engine's batching loop; `rank` where one process has several."""
    return Steps(_Current(), rank)


class _Current:
    """The recorder of the moment: an engine's loop may begin before `instrument()` is called."""

    opener: Opener | None = None

    @property
    def enabled(self) -> bool:
        return _recorder is not None

    def put(self, run: Request) -> None:
        recorder = _recorder
        if recorder is not None:
            recorder.put(run)


def token(count: int = 1) -> None:
    """A token, or `count` tokens at once, of the current request went out now."""
    mine = current()
    if mine is not None:
        mine.token(count)


def _number(given: float | None, variable: str, default: Any) -> Any:
    text = os.environ.get(variable)
    if given is not None or not text:
        return default if given is None else given
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        _log.warning("pdtrace: %s=%s is no number; it is left out", variable, text)
        return default
    return number
