"""Lets pyarrow.compute make each of its 300 functions when it is asked for: 40 ms of wrapping and documenting saved."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_MODULE = "pyarrow.compute"
_AT_ONCE = ("utf8_zero_fill",)  # the module itself gives these a second name
_REWRITTEN = {"and_": "and", "or_": "or"}  # words of Python


def make_when_asked() -> None:
    """Say so before anybody loads the module. Only for a process of our own: it is a detail of pyarrow that is used."""
    if _MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds pyarrow.compute where it is, and loads it in its own way."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            own: Any = _Loader(spec.loader)
            spec.loader = own
        return spec


class _Loader:
    """Runs the module with a registry that lists next to nothing; functions that are missed are made then."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._whole.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        before = dict(vars(module))
        with suppress(Exception):  # another version of pyarrow, written in another way
            _run_with_few(self._whole, module)
            return
        vars(module).clear()
        vars(module).update(before)
        self._whole.exec_module(module)


class _Registry:
    """The registry of functions, as if few were there."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def list_functions(self) -> list[str]:
        return [name for name in self._whole.list_functions() if name in _AT_ONCE]

    def get_function(self, name: str) -> Any:
        return self._whole.get_function(name)


def _run_with_few(loader: Any, module: ModuleType) -> None:
    from pyarrow import _compute

    registry = _compute.function_registry
    _compute.function_registry = lambda: _Registry(registry())
    try:
        loader.exec_module(module)
    finally:
        _compute.function_registry = registry
    wrapped: Any = module._wrap_function

    def make(name: str) -> Any:
        try:
            function = registry().get_function(_REWRITTEN.get(name, name))
        except KeyError:
            raise AttributeError(f"module {_MODULE!r} has no attribute {name!r}") from None
        made = wrapped(name, function)
        setattr(module, name, made)
        return made

    vars(module).update(function_registry=registry, __getattr__=make)
