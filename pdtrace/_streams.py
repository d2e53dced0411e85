"""Streams that keep what came before damage: decompression with limits, text encodings made UTF-8."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from typing import IO, Any, cast

import zstandard

# What reading raises where a stream is damaged, cut or larger than allowed.
DAMAGED = (
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zstandard.ZstdError,
    zipfile.BadZipFile,
    tarfile.TarError,
    NotImplementedError,  # zipfile: a compression that Python does not know
)

MAX_BYTES = 64 << 30  # of one file after decompression
BOMB_BYTES = 2 << 30  # up to here nothing is suspected
BOMB_RATIO = 500  # logs and traces shrink 10 to 100 times; zeros more than 1000 times

_STEP = 128 << 10
_ZSTD_INPUT = 4 << 10  # zstd's best ratio is about 32,000: one step stays below 128 MiB
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
_UTF8_MARK = codecs.BOM_UTF8
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def words(error: BaseException) -> str:
    """What an error says, in one line; its kind when it says nothing."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())


class CarefulReader(io.BufferedReader):
    """A buffered stream that hands out what it read before damage; the error comes with the next call.

    io.BufferedReader throws away what it had gathered in the call that fails.
    """

    def __init__(
        self, raw: Any, beneath: Any = None, on_damage: Callable[[Exception], None] | None = None
    ) -> None:
        """With `on_damage` the stream just ends at the damage, and the error is handed over there."""
        super().__init__(raw, 1 << 20)
        self._beneath = beneath
        self._on_damage = on_damage
        self._damage: Exception | None = None

    def read(self, size: int | None = -1) -> bytes:
        """Up to `size` bytes; all when negative."""
        parts: list[bytes] = []
        left = -1 if size is None else size
        while left:
            try:
                part = self.read1(left if left > 0 else 1 << 20)
            except DAMAGED:
                if not parts:
                    raise
                break
            if not part:
                break
            parts.append(part)
            left = left - len(part) if left > 0 else left
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read1(self, size: int = -1) -> bytes:
        """What one look at the stream beneath gives; behind damage always its error."""
        if self._damage is None:
            try:
                return super().read1(size)
            except DAMAGED as error:
                self._note(error)
        if self._on_damage is not None:
            return b""
        assert self._damage is not None
        raise self._damage

    def _note(self, error: Exception) -> None:
        self._damage = error
        if self._on_damage is not None:
            self._on_damage(error)

    def readinto(self, buffer: Any) -> int:
        """As read(), into a buffer."""
        view, size = memoryview(buffer), 0
        while size < len(view):
            try:
                part = self.readinto1(view[size:])
            except DAMAGED:
                if not size:
                    raise
                break
            if not part:
                break
            size += part
        return size

    def readinto1(self, buffer: Any) -> int:
        """As read1(), into a buffer."""
        if self._damage is None:
            try:
                # No more than waits here: a call that also asks the stream beneath would lose that at its error.
                waiting = len(self.peek())
                return super().readinto1(memoryview(buffer)[:waiting])
            except DAMAGED as error:
                self._note(error)
        if self._on_damage is not None:
            return 0
        assert self._damage is not None
        raise self._damage

    def close(self) -> None:
        """Close this stream and the one beneath."""
        super().close()
        if self._beneath is not None:
            self._beneath.close()


class _Raw(io.RawIOBase):
    """A raw stream that gives the pieces of `_next`."""

    def __init__(self) -> None:
        self._rest: memoryview = memoryview(b"")

    def readable(self) -> bool:
        return True

    def _next(self) -> bytes:
        raise NotImplementedError

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(self._next())
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


class _Limited(_Raw):
    """What a decompressor gives, in small steps, up to the limit of a decompression bomb."""

    def __init__(self, decompressor: Any, limit: int) -> None:
        super().__init__()
        self._decompressor, self._limit, self._given = decompressor, limit, 0

    def _next(self) -> bytes:
        data = cast(bytes, self._decompressor.read1(_STEP))
        self._given += len(data)
        if self._given > self._limit:
            raise OSError(
                f"grows to more than {self._limit >> 20:,} MiB when decompressed (a decompression"
                " bomb?): unpack it yourself if it is meant to be so large"
            )
        return data


class _Zstd:
    """zstd frames one after the other; unlike the library's reader it notices a cut-off end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._started = False
        self._damage: zstandard.ZstdError | None = None

    def read1(self, _size: int) -> bytes:
        while True:
            if self._damage is not None:
                raise self._damage
            block = self._stream.read(_ZSTD_INPUT)
            if not block:
                if self._started and not self._frame.eof:
                    raise EOFError("the file ends in the middle of a zstd frame")
                return b""
            if data := self._decompress(block):
                return data

    def _decompress(self, block: bytes) -> bytes:
        parts = []
        while block:
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._started = True
            try:
                parts.append(self._frame.decompress(block))
            except zstandard.ZstdError as error:
                self._damage = error
                break
            block = self._frame.unused_data if self._frame.eof else b""
        return b"".join(parts)


class _Gzip:
    """gzip members one after the other; unlike the library's reader it gives every byte before damage."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._member = zlib.decompressobj(wbits=31)
        self._input = b""
        self._damage: zlib.error | None = None

    def read1(self, size: int) -> bytes:
        while self._damage is None:
            if self._member.eof:
                rest = (self._member.unused_data or self._stream.read(_STEP)).lstrip(b"\0")
                if not rest:  # zeros behind the last member are padding
                    return b""
                self._member, self._input = zlib.decompressobj(wbits=31), rest
            self._input = self._input or self._stream.read(_STEP)
            if not self._input:
                raise EOFError("the file ends in the middle of its gzip data")
            if data := self._decompress(size):
                return data
        raise self._damage

    def _decompress(self, size: int) -> bytes:
        before = self._member.copy()
        try:
            data = self._member.decompress(self._input, size)
        except zlib.error as error:
            self._damage = error
            return _byte_by_byte(before, self._input, size)
        self._input = self._member.unconsumed_tail
        return data


def _byte_by_byte(member: Any, data: bytes, size: int) -> bytes:
    """What can be decompressed before the byte that cannot."""
    parts: list[bytes] = []
    with contextlib.suppress(zlib.error):
        for number in data:
            parts.append(member.decompress(bytes((number,))))
            size -= len(parts[-1])
            if size <= 0:
                break
    return b"".join(parts)


class _AsUtf8(_Raw):
    """Text in UTF-16 or UTF-32 as UTF-8; what cannot be decoded becomes U+FFFD."""

    def __init__(self, stream: IO[bytes], encoding: str) -> None:
        super().__init__()
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._ended = False

    def _next(self) -> bytes:
        while not self._ended:
            block = self._stream.read(_STEP)
            self._ended = not block
            if text := self._decoder.decode(block, final=self._ended):
                return text.encode("utf-8", "replace")
        return b""


# Terminal colours. JSON cannot hold an escape sign, so taking them out of it loses nothing.
_COLOUR = re.compile(rb"\x1b\[[0-9;:?]*[A-Za-z]")
_COLOURED_JSON = re.compile(
    rb"""\s*(?:\x1b\[[0-9;:?]*[A-Za-z]\s*)*
    (?:\{|\[\s*(?:\x1b\[[0-9;:?]*[A-Za-z]\s*)*\{)""",
    re.VERBOSE,
)
_LONGEST_COLOUR = 64


class _Uncoloured(_Raw):
    """JSON without the colours that jq -C or a log viewer put around its parts."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self._stream, self._held = stream, b""

    def _next(self) -> bytes:
        while block := self._stream.read(_STEP):
            block = self._held + block
            last = block.rfind(b"\x1b", max(0, len(block) - _LONGEST_COLOUR))
            cut = len(block) if last < 0 or _COLOUR.match(block, last) else last
            self._held = block[cut:]
            if text := _COLOUR.sub(b"", block[:cut]):
                return text
        rest, self._held = self._held, b""
        return rest


class Cut(_Raw):
    """A stream that is known to lack its end: after its last byte it raises EOFError."""

    def __init__(self, stream: IO[bytes], reason: str) -> None:
        super().__init__()
        self._stream, self._reason = stream, reason

    def _next(self) -> bytes:
        data = self._stream.read(_STEP)
        if not data:
            raise EOFError(self._reason)
        return data


_DECOMPRESSORS: dict[str, Callable[[Any], Any]] = {
    "gzip": _Gzip,
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
    "zstd": _Zstd,
}


def decompressed(raw: IO[bytes], size: int | None = None) -> IO[bytes]:
    """The stream behind gzip, zstd, bzip2 or xz, told by its first bytes; UTF-16 and UTF-32 as UTF-8, no colours.

    `size` is the compressed size, for the limit of decompression bombs.
    """
    buffered: Any = raw if isinstance(raw, CarefulReader) else CarefulReader(raw, raw)
    start = buffered.peek(6)[:6]
    kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), "")
    if kind:
        decompressor = _DECOMPRESSORS[kind](buffered)
        limit = min(MAX_BYTES, max(BOMB_BYTES, BOMB_RATIO * (size or MAX_BYTES)))
        buffered = CarefulReader(_Limited(decompressor, limit), buffered)
    try:
        mark = buffered.peek(4)[:4]
    except DAMAGED:
        return cast(IO[bytes], buffered)  # the first read says it
    encoding = next((name for sign, name in _MARKS.items() if mark.startswith(sign)), "")
    if encoding:
        return cast(IO[bytes], CarefulReader(_AsUtf8(buffered, encoding), buffered))
    if mark.startswith(_UTF8_MARK):
        buffered.read(len(_UTF8_MARK))
    start = buffered.peek(1 << 12)
    if b"\x1b[" in start and _COLOURED_JSON.match(start):
        return cast(IO[bytes], CarefulReader(_Uncoloured(buffered), buffered))
    return cast(IO[bytes], buffered)


def read_up_to(stream: IO[bytes], size: int) -> tuple[bytes, str]:
    """As much as there is up to size, and what is wrong where the stream is damaged before that.

    Raises what reading raises when there is not one byte before the damage.
    """
    parts: list[bytes] = []
    left = size
    try:
        while left and (part := stream.read(left)):
            parts.append(part)
            left -= len(part)
    except DAMAGED as error:
        if not parts:
            raise
        return b"".join(parts), words(error)
    return b"".join(parts), ""
