"""Packed answers (Content-Encoding), unpacked as their bytes pass, to look into a copy of them.

gzip and deflate always; zstd and br where a package for them is there, as it is in a process that
packs or unpacks them itself. What cannot be unpacked is not looked into.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

UNPACKED_BYTES = 1 << 20  # of one chunk: more is no stream of events
_SLICE = 256  # packed bytes taken at once: they can become a thousand times as many
NOT_PACKED = ("", "identity")


class TooMuch(Exception):
    """A chunk becomes more than any event does."""


class Unpacking:
    """The bytes of one answer."""

    def __init__(self, begin: Callable[[bytes], Any]) -> None:
        self._begin = begin
        self._one: Any = (
            None  # what takes bytes of the part that is on: gzip and zstd may have several
        )

    def feed(self, data: bytes) -> bytes:
        """What these bytes become. Raises where they are none of this packing, or become too much."""
        made, size = [], 0
        for start in range(0, len(data), _SLICE):
            rest = data[start : start + _SLICE]
            while rest:
                if self._one is None:
                    self._one = self._begin(rest)
                part = self._one.decompress(rest)
                rest = b""
                if self._one.eof:
                    rest, self._one = self._one.unused_data, None
                size += len(part)
                if size > UNPACKED_BYTES:
                    raise TooMuch
                made.append(part)
        return b"".join(made)


def unpacking(coding: str) -> Unpacking | None:
    """For this Content-Encoding; None where it cannot be unpacked here."""
    begin = _PACKINGS.get(coding)
    if begin is None:
        return None
    try:
        begin(b"x")
    except ImportError:
        return None
    return Unpacking(begin)


def _zlib(head: bytes) -> Any:
    # Some servers' "deflate" is the bare stream, without the two bytes of zlib (or those of gzip).
    packed = head[0] & 0x0F == 8 or head[0] == 0x1F
    return zlib.decompressobj(47 if packed else -15)


@cache
def _first_of(*names: str) -> Any:
    """The first of these modules that is there; asked once, for a search through the path takes its time."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def _module(*names: str) -> Any:
    module = _first_of(*names)
    if module is None:
        raise ImportError(names[-1])
    return module


def _zstd(_: bytes) -> Any:
    module = _module("compression.zstd", "backports.zstd", "zstandard")
    one = module.ZstdDecompressor()
    return one.decompressobj() if module.__name__ == "zstandard" else one


class _Brotli:
    """brotli, and brotlicffi with the same names, as the others are."""

    unused_data = b""

    def __init__(self, _: bytes) -> None:
        self._inner = _module("brotli", "brotlicffi").Decompressor()

    def decompress(self, data: bytes) -> bytes:
        """What these bytes become; of what is too much for feed() only the beginning, where brotli can stop."""
        try:
            made: bytes = self._inner.process(data, output_buffer_limit=UNPACKED_BYTES + 1)
        except TypeError:  # before 1.2
            made = self._inner.process(data)
        return made

    @property
    def eof(self) -> bool:
        """Another part never follows."""
        return False


_PACKINGS: dict[str, Callable[[bytes], Any]] = {
    "gzip": _zlib, "x-gzip": _zlib, "deflate": _zlib, "zstd": _zstd, "br": _Brotli,
}  # fmt: skip
