"""`dataclass` whose methods are functions that all classes share, not written and compiled for each.

The standard library does that as a module is loaded, 0.3 to 0.8 ms a class: a command loads a hundred, and makes objects
of half of them. An object takes some 0.5 µs more here: what is made line by line or row by row keeps the library's own.
"""

from __future__ import annotations

import dataclasses
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # the same to who writes and who checks
else:

    def dataclass(cls=None, /, *, frozen=False):
        """The decorator; fields(), replace() and asdict() of the standard library take such objects too."""
        if cls is None:
            return lambda own: _made(own, frozen=frozen)
        return _made(cls, frozen=frozen)


def _made(cls: type[Any], *, frozen: bool) -> type[Any]:
    methods: dict[str, Any] = {"__init__": _begin, "__eq__": _equal, "__repr__": _shown}
    methods["__hash__"] = None
    if frozen:
        methods |= {"__hash__": _hashed, "__setattr__": _refuse, "__delattr__": _refuse}
    for name, method in methods.items():
        if name not in vars(cls):
            setattr(cls, name, method)
    dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    given = [field for field in dataclasses.fields(cls) if field.init]
    cls._given = tuple(field.name for field in given)
    cls._compared = tuple(field.name for field in dataclasses.fields(cls) if field.compare)
    cls._then = getattr(cls, "__post_init__", None)
    cls._else = {f.name: made for f in given if (made := _default(f)) is not None}
    return cls


def _default(field: dataclasses.Field[Any]) -> Any:
    """What makes the value of a field that is not given."""
    if field.default is not dataclasses.MISSING:
        return lambda: field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory


def _begin(self: Any, *values: Any, **named: Any) -> None:
    own, names = self.__dict__, self._given
    own.update(zip(names, values, strict=False))
    if len(values) != len(names) or named:
        for name in names[len(values) :]:
            if name in named:
                own[name] = named.pop(name)
            elif name in self._else:
                own[name] = self._else[name]()
            else:
                raise TypeError(f"{self.__class__.__qualname__}: {name} is missing")
        if named or len(values) > len(names):
            more = ", ".join(named) or f"{len(values)} values"
            raise TypeError(f"{self.__class__.__qualname__} takes {', '.join(names)}, not {more}")
    if self._then is not None:
        self._then()


def _equal(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return all(getattr(self, name) == getattr(other, name) for name in self._compared)


def _hashed(self: Any) -> int:
    return hash(tuple([getattr(self, name) for name in self._compared]))


@recursive_repr()
def _shown(self: Any) -> str:
    told = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{self.__class__.__qualname__}({', '.join(told)})"


def _refuse(_: object, name: str, *__: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
