"""A phase of whatever request is current: for code that is not handed the request it works on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from types import TracebackType
from typing import Any, Self, TypeVar

from pdtrace.instrumentation.requests import Attributes, Block, Phase, current

F = TypeVar("F", bound=Callable[..., Any])


class AnyPhase(Block):
    """A phase of the current request: a context manager, sync or async, and a decorator.

    Without a current request it does nothing.
    """

    __slots__ = ("_attributes", "_name", "_open")

    def __init__(self, name: str, attributes: Attributes) -> None:
        self._name = name
        self._attributes = attributes
        self._open: Phase | None = None

    def __enter__(self) -> Self:
        request = current()
        if request is not None:
            self._open = Phase(request, self._name, dict(self._attributes))
            self._open.__enter__()
        return self

    def set(self, **attributes: Any) -> None:
        """Say more of it."""
        if self._open is not None:
            self._open.set(**attributes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.__exit__(kind, error, None)
            self._open = None

    def __call__(self, function: F) -> F:
        """The function, each call of it a phase; coroutines and generators for as long as they run."""
        return _wrapped(function, lambda: AnyPhase(self._name, self._attributes))


def _wrapped(function: F, phase: Callable[[], AnyPhase]) -> F:
    wrapper: Any
    if iscoroutinefunction(function):

        @wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with phase():
                return await function(*args, **kwargs)

    elif isasyncgenfunction(function):

        @wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with phase():
                async with contextlib.aclosing(function(*args, **kwargs)) as items:
                    async for item in items:
                        yield item

    elif isgeneratorfunction(function):

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with phase():
                return (yield from function(*args, **kwargs))

    else:

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with phase():
                return function(*args, **kwargs)

    typed: F = wrapper
    return typed
