"""Methods of other packages that are wrapped while they are recorded, and given back afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


class Patch:
    """One method of a class. `around(theirs, *arguments)` is called in its place while the patch is on.

    Others wrap the same methods, and some of them around ours: what they put there stays. Our
    wrapper, which they hold on to, then goes on to the method that it found and does nothing else,
    for good; switching on again lays a new one around theirs.
    """

    def __init__(self, owner: type, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._wrapper: Callable[..., Any] | None = None

    def on(self) -> None:
        """Wrap it; a second call changes nothing."""
        if self._wrapper is not None:
            return
        theirs, around = getattr(self._owner, self._name), self._around

        @wraps(theirs)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            if self._wrapper is not wrapper:
                return theirs(*arguments, **options)
            return around(theirs, *arguments, **options)

        self._wrapper = wrapper
        self._theirs = theirs
        setattr(self._owner, self._name, wrapper)

    def off(self) -> None:
        """Give it back, if nobody has wrapped ours in the meantime; ours does nothing from now on."""
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is not None and getattr(self._owner, self._name) is wrapper:
            setattr(self._owner, self._name, self._theirs)
