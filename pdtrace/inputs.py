"""Paths as people give them become readable inputs: files, folders, globs, '-', archive members, decompressed."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import field
from glob import glob, has_magic
from pathlib import Path, PurePosixPath
from typing import IO, cast

from pdtrace import _archives as archives
from pdtrace._streams import DAMAGED, decompressed, read_up_to, words
from pdtrace.errors import UnreadableInput
from pdtrace.model import Head
from pdtrace.records import dataclass

HEAD_BYTES = 64 << 10
STDIN = "-"
DRAFT_PREFIX = ".pdtrace-"  # folders of files that are being made; never read

_SUFFIXES = (".gz", ".zst", ".zstd", ".bz2", ".xz")
_SKIPPED_FOLDERS = {".git", ".hg", ".svn", "__pycache__", "node_modules"}


@dataclass
class Input:
    """One thing to read. `problem` set: it cannot be read, and why; `useless`: nobody would miss it."""

    path: str
    opener: Callable[[], IO[bytes]]
    mtime_ns: int | None = None
    size: int | None = None
    problem: str = ""
    useless: bool = False
    number: int = 0
    keep_content: bool = False
    member: str = ""  # its name in the archive that it lies in
    damage: str = ""  # what ends its first 64 KiB early, set by head()
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = plain_name(self.member or self.path)

    def open(self) -> IO[bytes]:
        """The decompressed bytes from the start."""
        return decompressed(self.opener(), self.size)

    def head(self) -> Head:
        """The first 64 KiB after decompression."""
        with self.open() as stream:
            data, self.damage = read_up_to(stream, HEAD_BYTES + 1)
        return Head(self.path, self.name, data[:HEAD_BYTES], complete=len(data) <= HEAD_BYTES)


def plain_name(path: str) -> str:
    """The file name without folders and compression suffixes."""
    name = PurePosixPath(path.replace("\\", "/")).name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def shown(path: str) -> str:
    """A path as text that can be stored and printed; bytes that are no UTF-8 become \\xNN."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def expand(paths: list[str]) -> list[Input]:
    """All inputs behind the given paths, each once, sorted by path and numbered.

    Raises UnreadableInput for a path that does not exist; a file that exists and cannot be read becomes an
    Input with a problem.
    """
    seen: set[str] = set()
    found = [item for path in paths for item in _inputs(path, seen)]
    inputs = sorted(found, key=lambda item: item.path)
    for number, item in enumerate(inputs):
        item.number = number
    return inputs


def _inputs(path: str, seen: set[str]) -> Iterator[Input]:
    if path == STDIN:
        if STDIN not in seen:
            seen.add(STDIN)
            yield from _contents(_stream_once(STDIN, _stdin()))
    elif os.path.isdir(path):  # noqa: PTH112 -- false where pathlib raises (names too long)
        yield from _walk(path, seen)
    elif os.path.lexists(path):
        yield from _file(path, seen, given=True)
    elif has_magic(path):
        names = sorted(glob(path, recursive=True))  # noqa: PTH207 -- absolute patterns too
        if not names:
            raise UnreadableInput(
                f"{shown(path)}: no file matches", "check the pattern; quote it for the shell"
            )
        for name in names:
            yield from _inputs(name, seen)
    else:
        raise UnreadableInput(f"{shown(path)}: no such file or folder", "check the spelling")


def _walk(folder: str, seen: set[str], above: frozenset[str] = frozenset()) -> Iterator[Input]:
    """Files below a folder, sorted; links are followed once; version control and caches are left out."""
    real = os.path.realpath(folder)
    if real in above:
        return  # a link to a folder that it lies in
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 -- names, not paths
    except OSError as error:
        yield _broken(folder, f"folder cannot be read: {words(error)}")
        return
    for name in names:
        path = os.path.join(folder, name)  # noqa: PTH118 -- keeps ./ and the like as given
        if not os.path.isdir(path):  # noqa: PTH112
            yield from _file(path, seen)
        elif name not in _SKIPPED_FOLDERS and not name.startswith(DRAFT_PREFIX):
            yield from _walk(path, seen, above | {real})


def _stdin() -> IO[bytes]:
    if sys.stdin is None:
        raise UnreadableInput("standard input is closed", "give a path")
    return cast(IO[bytes], sys.stdin.buffer)


def _stream_once(path: str, stream: IO[bytes]) -> Input:
    """A stream that can be read only once, spooled because it is looked at more than once."""
    spooled = tempfile.NamedTemporaryFile(prefix="pdtrace-stdin-")  # noqa: SIM115 -- lives as long as the Input
    while block := stream.read(1 << 20):
        spooled.write(block)
    spooled.flush()

    def reopen() -> IO[bytes]:
        return cast(IO[bytes], Path(spooled.name).open("rb"))

    return Input(path, reopen, None, spooled.tell())


def _file(path: str, seen: set[str], *, given: bool = False) -> Iterator[Input]:
    """A file, or the members of an archive. A pipe is read only when it was given by name."""
    real = os.path.realpath(path)
    if real in seen:
        return
    seen.add(real)
    try:
        status = Path(path).stat()
        if stat.S_ISFIFO(status.st_mode) and given:
            with Path(path).open("rb") as stream:
                item = _stream_once(shown(path), cast(IO[bytes], stream))
            yield from _contents(item)
            return
        if not stat.S_ISREG(status.st_mode):
            yield _broken(path, "not a regular file")
            return
        with Path(path).open("rb") as raw:
            start = raw.read(16)
    except OSError as error:
        yield _broken(path, f"cannot be read: {words(error)}")
        return

    def reopen() -> IO[bytes]:
        return cast(IO[bytes], Path(path).open("rb"))

    mtime = _gzip_time(start) or status.st_mtime_ns
    yield from _contents(Input(shown(path), reopen, mtime, status.st_size))


def _contents(item: Input, depth: int = 0) -> Iterator[Input]:
    """The input itself, or what lies in it when it is an archive."""
    if item.problem:
        yield item
        return
    try:
        with item.open() as stream:
            start, _ = read_up_to(stream, 512)
        kind = archives.kind_of(start)
        problem = archives.unreadable_kind(start) or _foreign(start)
        item.useless = start[8:12] == b"DUCK"
        if kind and depth == archives.MAX_DEPTH:
            problem = f"more than {archives.MAX_DEPTH} archives inside one another: unpack it first"
        if problem or not kind:
            item.problem = problem
            yield item
            return
        for member in archives.members(kind, item.open, item.size):
            path = f"{item.path}!{shown(member.name)}"
            inner = Input(
                path, member.open, member.mtime_ns, member.size, member.problem, member=member.name
            )
            yield from _contents(inner, depth + 1)
    except DAMAGED as error:
        item.problem = f"cannot be read: {words(error)}"
        yield item


def _foreign(start: bytes) -> str:
    """Why a database is not read along with other files; empty for anything else."""
    if start[8:12] == b"DUCK":
        return "a DuckDB file: give it alone, every command takes it in place of PATH"
    if start.startswith(b"SQLite format 3\0"):
        return "an SQLite database: export its table as CSV"
    return ""


def _gzip_time(start: bytes) -> int | None:
    """When the content of a gzip file was last changed, by its header; copies and checkouts keep it."""
    if not start.startswith(b"\x1f\x8b") or len(start) < 8:
        return None
    return int.from_bytes(start[4:8], "little") * 1_000_000_000 or None


def _broken(path: str, problem: str, size: int | None = None) -> Input:
    return Input(shown(path), lambda: cast(IO[bytes], open(os.devnull, "rb")), None, size, problem)  # noqa: PTH123
