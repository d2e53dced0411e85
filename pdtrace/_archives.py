"""Members of zip and tar archives as inputs, also of archives inside archives; nothing is written where they say."""

from __future__ import annotations

import io
import tarfile
import tempfile
import weakref
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, cast

from pdtrace._streams import BOMB_BYTES, BOMB_RATIO, DAMAGED, MAX_BYTES, CarefulReader, Cut, words
from pdtrace.records import dataclass

MAX_MEMBERS = 100_000  # of one archive
MAX_DEPTH = 3  # archives inside archives
MEMORY_BYTES = (
    64 << 20
)  # members taken out of tars: so much stays in memory, the rest becomes files

_ZIP_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA}
# Archives that are only named: (first bytes, what it is).
_OTHERS = (
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"\x04\x22\x4d\x18", "compressed with lz4"),
)


@dataclass(frozen=True)
class Member:
    """One file in an archive. `problem` set: it cannot be read, and why."""

    name: str
    open: Callable[[], IO[bytes]]
    mtime_ns: int | None = None
    size: int | None = None
    problem: str = ""


def unreadable_kind(start: bytes) -> str:
    """Why a file with these first bytes is not looked into; empty for all others."""
    return next(
        (f"{what}: unpack it first" for magic, what in _OTHERS if start.startswith(magic)), ""
    )


def kind_of(start: bytes) -> str:
    """'zip' or 'tar' by the first 512 bytes, empty for anything else."""
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    return "tar" if start[257:262] == b"ustar" else ""


def members(kind: str, open_archive: Callable[[], IO[bytes]], size: int | None) -> Iterator[Member]:
    """The files in an archive. A member that is named twice gets a number behind its name.

    Raises what reading raises when the archive itself is damaged; members before the damage were given.
    """
    seen: Counter[str] = Counter()
    for member in (_zip_members if kind == "zip" else _tar_members)(open_archive, size):
        seen[member.name] += 1
        again = f" ({seen[member.name]})" if seen[member.name] > 1 else ""
        yield Member(member.name + again, member.open, member.mtime_ns, member.size, member.problem)


def _nothing() -> IO[bytes]:
    return io.BytesIO()


def _broken(name: str, problem: str, size: int | None = None) -> Member:
    return Member(name, _nothing, None, size, problem)


# ---- zip -----------------------------------------------------------------------------------------


def _zip_members(open_archive: Callable[[], IO[bytes]], _size: int | None) -> Iterator[Member]:
    stream: Any = open_archive()
    if not stream.seekable():
        with stream:
            stream = spool(stream)()
    try:
        archive = zipfile.ZipFile(stream)
    except BaseException:
        stream.close()
        raise
    # It stays open as long as a member may be asked for: opening it anew for each is quadratic.
    weakref.finalize(archive, stream.close)
    infos = [info for info in archive.infolist() if not info.is_dir()]
    if any(info.filename == "xl/workbook.xml" for info in infos):
        raise OSError("an Excel workbook: save the sheet as CSV")
    for info in infos[:MAX_MEMBERS]:
        if info.flag_bits & 1:
            yield _broken(info.filename, "encrypted: unpack it first", info.file_size)
        elif info.compress_type not in _ZIP_METHODS:
            yield _broken(info.filename, "compressed in an unusual way: unpack it first")
        elif info.file_size > max(BOMB_BYTES, BOMB_RATIO * info.compress_size):
            yield _broken(info.filename, "grows as a decompression bomb does: unpack it yourself")
        elif info.file_size > MAX_BYTES:
            yield _broken(info.filename, "larger than 64 GiB: unpack it first")
        else:
            yield Member(info.filename, _zip_opener(archive, info), _zip_time(info), info.file_size)
    if len(infos) > MAX_MEMBERS:
        yield _broken("…", f"{len(infos) - MAX_MEMBERS:,} more members were not read")


def _zip_opener(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Callable[[], IO[bytes]]:
    def reopen() -> IO[bytes]:
        return cast(IO[bytes], CarefulReader(_ZipMember(archive.open(info), info.CRC)))

    return reopen


class _ZipMember(io.RawIOBase):
    """A member whose checksum is compared at its end; zipfile would withhold the last piece."""

    def __init__(self, stream: Any, checksum: int) -> None:
        self._stream, self._wanted, self._checksum = stream, checksum, 0
        stream._expected_crc = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read1(min(len(buffer), 128 << 10))
        self._checksum = zlib.crc32(data, self._checksum)
        if not data and self._checksum != self._wanted:
            raise OSError("the checksum in the archive differs from that of the content")
        buffer[: len(data)] = data
        return len(data)


def _zip_time(info: zipfile.ZipInfo) -> int | None:
    try:
        return int(datetime(*info.date_time, tzinfo=UTC).timestamp()) * 1_000_000_000
    except ValueError:
        return None


# ---- tar -----------------------------------------------------------------------------------------


def _tar_members(open_archive: Callable[[], IO[bytes]], size: int | None) -> Iterator[Member]:
    """Members of a tar, read once from front to back; each is taken out into a spool."""
    with open_archive() as opened:
        stream = _UntilDamage(opened)
        try:
            with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|") as archive:
                yield from _tar_files(archive)
        except tarfile.TarError:
            if stream.damage is None:
                raise
        if stream.damage is not None:
            raise stream.damage


def _tar_files(archive: tarfile.TarFile) -> Iterator[Member]:
    for count, info in enumerate(archive):
        if not info.isfile():
            continue
        if count >= MAX_MEMBERS:
            yield _broken("…", f"more than {MAX_MEMBERS:,} members: unpack it first")
            return
        if info.size > MAX_BYTES:
            yield _broken(info.name, "larger than 64 GiB: unpack it first", info.size)
            continue
        body = archive.extractfile(info) if info.issparse() else _TarBody(archive, info)
        opener = spool(cast(IO[bytes], body))
        yield Member(info.name, opener, int(info.mtime) * 1_000_000_000, info.size)


class _UntilDamage:
    """A stream that ends where it is damaged: tarfile would throw away what it had gathered."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.damage: Exception | None = None

    def read(self, size: int) -> bytes:
        if self.damage is None:
            try:
                return self._stream.read(size)
            except DAMAGED as error:
                self.damage = error
        return b""


class _TarBody:
    """The content of a member as far as it is there; tarfile gives none of a piece that is cut."""

    def __init__(self, archive: tarfile.TarFile, info: tarfile.TarInfo) -> None:
        self._stream: Any = archive.fileobj
        self._left = info.size

    def read(self, size: int) -> bytes:
        data: bytes = self._stream.read(min(size, self._left))
        if not data and self._left:
            raise EOFError("the archive ends in the middle of this member")
        self._left -= len(data)
        return data


# ---- spools --------------------------------------------------------------------------------------

_folders: list[tempfile.TemporaryDirectory[str]] = []
_room = MEMORY_BYTES


def spool(body: IO[bytes]) -> Callable[[], IO[bytes]]:
    """Take a stream out once and hand out openers of the copy: in memory while there is room, then a file.

    Where the stream is damaged, the copy holds what came before, and its end raises EOFError.
    """
    global _room
    problem = ""
    blocks: list[bytes] = []
    size = 0
    target: IO[bytes] | None = None
    try:
        while block := body.read(128 << 10):
            size += len(block)
            if target is None and size > _room:
                target = _new_file()
                target.writelines(blocks)
                blocks = []
            if target is None:
                blocks.append(block)
            else:
                target.write(block)
    except DAMAGED as error:
        problem = words(error)
    if target is not None:
        target.close()
        path = Path(target.name)
        return lambda: _whole_or_cut(cast(IO[bytes], path.open("rb")), problem)
    _room -= size
    content = b"".join(blocks)
    return lambda: _whole_or_cut(io.BytesIO(content), problem)


def _new_file() -> IO[bytes]:
    """A file of our own naming, in a folder that goes with the process."""
    if not _folders:
        _folders.append(tempfile.TemporaryDirectory(prefix="pdtrace-"))
    return cast(IO[bytes], tempfile.NamedTemporaryFile(dir=_folders[0].name, delete=False))


def _whole_or_cut(stream: IO[bytes], problem: str) -> IO[bytes]:
    return cast(IO[bytes], CarefulReader(Cut(stream, problem), stream)) if problem else stream
