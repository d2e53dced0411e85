"""Paths as people give them become readable inputs: files, folders, globs, '-', archive members, decompressed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import zstandard

from pdtrace.errors import UnreadableInput
from pdtrace.model import Head

HEAD_BYTES = 64 << 10
MAX_MEMBERS = 100_000  # of one archive
MAX_MEMBER_BYTES = 64 << 30  # after decompression; a bomb stops here
SPOOL_BYTES = 64 << 20  # tar members up to this size stay in memory
STDIN = "-"

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
_SUFFIXES = (".gz", ".zst", ".zstd", ".bz2", ".xz")
_SKIPPED_FOLDERS = {".git", ".hg", ".svn", "__pycache__", "node_modules"}


@dataclass
class Input:
    """One thing to read. `problem` set: it cannot be read, and why."""

    path: str
    opener: Callable[[], IO[bytes]]
    mtime_ns: int | None = None
    size: int | None = None
    problem: str = ""
    number: int = 0
    keep_content: bool = False
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = plain_name(self.path)

    def open(self) -> IO[bytes]:
        """The decompressed bytes from the start."""
        return decompressed(self.opener())

    def head(self) -> Head:
        """The first 64 KiB after decompression."""
        with self.open() as stream:
            data = _read_up_to(stream, HEAD_BYTES + 1)
        return Head(self.path, self.name, data[:HEAD_BYTES], complete=len(data) <= HEAD_BYTES)


def plain_name(path: str) -> str:
    """The file name without folders, archive and compression suffixes."""
    name = PurePosixPath(path.replace("\\", "/").rpartition("!")[2]).name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


class _Closing(io.BufferedReader):
    """A buffered stream that also closes what lies beneath it."""

    def __init__(self, stream: Any, beneath: Any) -> None:
        super().__init__(stream, 1 << 20)
        self._beneath = beneath

    def close(self) -> None:
        super().close()
        self._beneath.close()


def decompressed(raw: IO[bytes]) -> IO[bytes]:
    """The stream behind gzip, zstd, bzip2 or xz, told by its first bytes; others as they are."""
    buffered: Any = raw if hasattr(raw, "peek") else io.BufferedReader(cast(Any, raw), 1 << 20)
    start = buffered.peek(6)[:6]
    kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), "")
    if kind == "gzip":
        return cast(IO[bytes], _Closing(gzip.GzipFile(fileobj=buffered), buffered))
    if kind == "zstd":
        reader = zstandard.ZstdDecompressor().stream_reader(buffered, read_across_frames=True)
        return cast(IO[bytes], _Closing(reader, buffered))
    if kind == "bzip2":
        return cast(IO[bytes], _Closing(bz2.BZ2File(buffered), buffered))
    if kind == "xz":
        return cast(IO[bytes], _Closing(lzma.LZMAFile(buffered), buffered))
    return cast(IO[bytes], buffered)


def _read_up_to(stream: IO[bytes], size: int) -> bytes:
    """As much as there is up to size; streams may give less per call."""
    parts, left = [], size
    while left and (part := stream.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def expand(paths: list[str]) -> list[Input]:
    """All inputs behind the given paths, each once, sorted by path and numbered.

    Raises UnreadableInput for a path that does not exist; a file that exists and cannot be read becomes an
    Input with a problem.
    """
    found: dict[str, Input] = {}
    for path in paths:
        for item in _inputs(path):
            found.setdefault(os.path.realpath(item.path) if item.path != STDIN else STDIN, item)
    inputs = sorted(found.values(), key=lambda item: item.path)
    for number, item in enumerate(inputs):
        item.number = number
    return inputs


def _inputs(path: str) -> Iterator[Input]:
    if path == STDIN:
        yield _stdin()
    elif Path(path).is_dir():
        for name in _walk(path):
            yield from _file(name)
    elif Path(path).exists():
        yield from _file(path)
    elif has_magic(path):
        names = sorted(glob(path, recursive=True))  # noqa: PTH207 -- absolute patterns too
        if not names:
            raise UnreadableInput(
                f"{path}: no file matches", "check the pattern; quote it for the shell"
            )
        for name in names:
            yield from _inputs(name)
    else:
        raise UnreadableInput(f"{path}: no such file or folder", "check the spelling")


def _walk(folder: str) -> Iterator[str]:
    """Files below a folder, sorted; version control and caches are left out."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS)
        for name in sorted(names):
            yield str(Path(root) / name)


def _stdin() -> Input:
    """Standard input, spooled once because it is looked at twice."""
    spool = tempfile.NamedTemporaryFile(prefix="pdtrace-stdin-")  # noqa: SIM115 -- lives as long as the Input
    while block := sys.stdin.buffer.read(1 << 20):
        spool.write(block)
    spool.flush()

    def reopen() -> IO[bytes]:
        return cast(IO[bytes], Path(spool.name).open("rb"))

    return Input(STDIN, reopen, None, spool.tell())


def _file(path: str) -> Iterator[Input]:
    """A file, or the members of an archive."""
    try:
        status = Path(path).stat()
    except OSError as error:
        yield _broken(path, f"cannot be read: {error.strerror}")
        return
    if not stat.S_ISREG(status.st_mode):
        yield _broken(path, "not a regular file")
        return

    def reopen() -> IO[bytes]:
        return cast(IO[bytes], Path(path).open("rb"))

    whole = Input(path, reopen, status.st_mtime_ns, status.st_size)
    try:
        with Path(path).open("rb") as raw:
            start = raw.read(8)
        whole.mtime_ns = _gzip_time(start) or whole.mtime_ns
        if start.startswith(b"PK\x03\x04"):
            yield from _zip_members(path)
            return
        tar_start = whole.head().data[:512] if status.st_size else b""
        if tar_start[257:262] == b"ustar":
            yield from _tar_members(path, whole)
            return
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError) as error:
        yield _broken(path, f"cannot be read: {_words(error)}", status.st_size)
        return
    except zstandard.ZstdError as error:
        yield _broken(path, f"cannot be decompressed: {error}", status.st_size)
        return
    yield whole


def _gzip_time(start: bytes) -> int | None:
    """When the content of a gzip file was last changed, by its header; copies and checkouts keep it."""
    if not start.startswith(b"\x1f\x8b") or len(start) < 8:
        return None
    return int.from_bytes(start[4:8], "little") * 1_000_000_000 or None


def _broken(path: str, problem: str, size: int | None = None) -> Input:
    return Input(path, lambda: cast(IO[bytes], io.BytesIO()), None, size, problem)


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _zip_members(path: str) -> Iterator[Input]:
    with zipfile.ZipFile(path) as archive:
        members = [info for info in archive.infolist() if not info.is_dir()]
    for info in members[:MAX_MEMBERS]:
        member = f"{path}!{info.filename}"
        if info.flag_bits & 1:
            yield _broken(member, "encrypted: unpack it first")
        elif info.file_size > MAX_MEMBER_BYTES:
            yield _broken(member, "larger than 64 GiB: unpack it first")
        else:
            yield Input(member, _zip_opener(path, info.filename), _zip_time(info), info.file_size)
    if len(members) > MAX_MEMBERS:
        yield _broken(path, f"only the first {MAX_MEMBERS:,} of {len(members):,} members were read")


def _zip_opener(path: str, member: str) -> Callable[[], IO[bytes]]:
    def reopen() -> IO[bytes]:
        archive = zipfile.ZipFile(path)
        return cast(IO[bytes], _Closing(archive.open(member), archive))

    return reopen


def _zip_time(info: zipfile.ZipInfo) -> int | None:
    from datetime import UTC, datetime

    try:
        return int(datetime(*info.date_time, tzinfo=UTC).timestamp()) * 1_000_000_000
    except ValueError:
        return None


def _tar_members(path: str, whole: Input) -> Iterator[Input]:
    """Members of a tar; each is taken out into a spool (memory, then an unnamed file) when it is opened."""
    spools: dict[str, bytes | str] = {}
    with whole.open() as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for count, info in enumerate(archive):
            member = f"{path}!{info.name}"
            if not info.isfile():
                continue
            if count >= MAX_MEMBERS or info.size > MAX_MEMBER_BYTES:
                yield _broken(member, "archive too large: unpack it first", info.size)
                continue
            body = archive.extractfile(info)
            if body is None:
                continue
            spools[member] = _spool(body, info.size)
            yield Input(
                member, _spool_opener(spools, member), int(info.mtime) * 1_000_000_000, info.size
            )


_folders: list[tempfile.TemporaryDirectory[str]] = []


def _spool(body: IO[bytes], size: int) -> bytes | str:
    """Small members as bytes, large ones as a file of our own naming in a folder that goes with the process."""
    if size <= SPOOL_BYTES:
        return body.read()
    if not _folders:
        _folders.append(tempfile.TemporaryDirectory(prefix="pdtrace-"))
    with tempfile.NamedTemporaryFile(dir=_folders[0].name, delete=False) as target:
        while block := body.read(1 << 20):
            target.write(block)
    return target.name


def _spool_opener(spools: dict[str, bytes | str], member: str) -> Callable[[], IO[bytes]]:
    def reopen() -> IO[bytes]:
        spool = spools[member]
        return cast(
            IO[bytes], io.BytesIO(spool) if isinstance(spool, bytes) else Path(spool).open("rb")
        )

    return reopen
