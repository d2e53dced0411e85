"""Instrumentation without code changes: `pdtrace run -- COMMAND`, `opentelemetry-instrument`.

Each target is instrumented when the program imports it; what it never imports costs nothing.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from pdtrace.instrumentation import api

_log = logging.getLogger("pdtrace.instrumentation")

# aiohttp as what carries httpx's calls: transports of other packages, each known by its module.
AIOHTTP_TRANSPORTS = (
    "openai._vendor.httpx_aiohttp.transport",
    "httpx_aiohttp.transport",
    "httpx_aiohttp.httpx2.transport",
)
# module of the program -> ours with instrument() and uninstrument()
TARGETS = {
    "uvicorn": "pdtrace.instrumentation.uvicorn_server",
    "httpx": "pdtrace.instrumentation.httpx_client",
    "httpx2": "pdtrace.instrumentation.httpx2_client",
    **dict.fromkeys(AIOHTTP_TRANSPORTS, "pdtrace.instrumentation.httpx_aiohttp_client"),
    "aiohttp": "pdtrace.instrumentation.aiohttp_client",
}


def activate(names: Iterable[str] = TARGETS) -> None:
    """Record this process, and instrument each of these targets once it is imported."""
    if not api.instrumented():
        api.instrument()
    waiting = set()
    for name in names:
        if name in sys.modules:
            _instrument(name)
        else:
            waiting.add(name)
    waiting -= {name for finder in _finders() for name in finder.names}
    if waiting:
        sys.meta_path.insert(0, _Finder(waiting))


def deactivate(names: Iterable[str] = TARGETS) -> None:
    """Take the instrumentation of these targets off again; with the last one the process is no longer recorded."""
    for finder in _finders():
        finder.names.difference_update(names)
    for name in names:
        module = TARGETS[name]
        if name in sys.modules and module in sys.modules:
            sys.modules[module].uninstrument()
    if set(names) >= TARGETS.keys():
        sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, _Finder)]
        api.uninstrument()


class PdtraceInstrumentor:
    """What `opentelemetry-instrument` finds under the entry point group `opentelemetry_instrumentor`."""

    targets: tuple[str, ...] = tuple(TARGETS)

    def instrument(self, **_: Any) -> None:
        """Record this process."""
        activate(self.targets)

    def uninstrument(self, **_: Any) -> None:
        """And no longer."""
        deactivate(self.targets)


class UvicornInstrumentor(PdtraceInstrumentor):
    """Servers that uvicorn runs, and nothing else."""

    targets = ("uvicorn",)


class HttpxInstrumentor(PdtraceInstrumentor):
    """Calls that httpx and httpx2 make, and nothing else."""

    targets = ("httpx", "httpx2", *AIOHTTP_TRANSPORTS)


class AiohttpInstrumentor(PdtraceInstrumentor):
    """Calls that aiohttp's clients make, and nothing else."""

    targets = ("aiohttp",)


class OpenAIInstrumentor(HttpxInstrumentor):
    """Calls that the OpenAI package makes: through httpx, since 3.0 through httpx2, or aiohttp below them."""


def _finders() -> list[_Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, _Finder)]


def _instrument(name: str) -> None:
    try:
        importlib.import_module(TARGETS[name]).instrument()
    except Exception:
        _log.warning("pdtrace: %s is not instrumented", name, exc_info=True)


class _Finder(MetaPathFinder):
    """Lets the others find a module, and has it instrumented after it was executed."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Asked for again and again: `python -m NAME` and find_spec() look without importing.
        if fullname not in self.names or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)  # old ones have none
                spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _After(spec.loader, fullname)
                    return spec
            return None
        finally:
            self._looking.discard(fullname)


class _After(Loader):
    """The module's own loader, and then the instrumentation."""

    def __init__(self, loader: Loader, name: str) -> None:
        self._loader = loader
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_code, get_filename, ... of who only looks

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _instrument(self._name)


def environment(
    base: Mapping[str, str], folder: str, role: str | None = None, service: str | None = None
) -> dict[str, str]:
    """The environment in which a Python program, and those that it starts, are recorded."""
    # Behind our sitecustomize stand entry points of ours that exist under `pdtrace run` only: vLLM
    # changes what it does for a stat logger that is merely installed.
    ours = [str(Path(__file__).with_name(name)) for name in ("_site", "_plugins")]
    path = base.get("PYTHONPATH")
    changed = {
        "PDTRACE_RUN": "1",
        "PDTRACE_FOLDER": folder,
        "PYTHONPATH": os.pathsep.join([*ours, path] if path else ours),
    }
    if role is not None:
        changed["PDTRACE_ROLE"] = role
    if service is not None:
        changed["OTEL_SERVICE_NAME"] = service
    return {**base, **changed}
