"""A second process that decodes blocks of one OTLP/JSON file, from before this one has loaded its libraries.

Both go through the file from its beginning and cut the same blocks; whoever takes the next number from a pipe decodes
that block. What the other gives is used only where its block began, ended and measured the same, and where it holds
spans alone; any other block is decoded here, as all are when the other is gone.
"""

from __future__ import annotations

import os
import pickle
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from zlib import crc32

from pdtrace.records import dataclass

if TYPE_CHECKING:
    import pyarrow as pa

    from pdtrace.model import Source

    from ._otlp_json import Lines
    from ._otlp_lines import Decoded

LEAST_BYTES = 32 << 20  # below, the other process would load its libraries for little
LEAST_SHARED = 20  # blocks left, where no patterns come from the other process: to learn them takes as long as some blocks
SLOTS = 12  # results that wait here to be taken, some 2 MB each
_NUMBER = struct.Struct("<i")
# Of a block: its number, length and mark; bytes of spans, 0 when they are not given; bytes of resources, and of what was
# learned with it; texts withheld.
_MESSAGE = struct.Struct("<iqIqqqq")
_MOST_BLOCKS = 15_000  # their numbers fit into a pipe
_BLOCK_BYTES = 8 << 20  # as read there, at least
_MARKED_BYTES = 4096
_LEAST_OPEN = 64  # files that this process may have open; the other process costs it some twenty
_MOST_FILES = 1000  # of a folder that are looked at
_IS_SPANS = re.compile(rb'\s*\{\s*"resourceSpans"\s*:')


@dataclass
class Given:
    """What the other process made of a block."""

    spans: pa.Table
    resources: pa.Table | None
    withheld: int


class Helper:
    """The other process, as this one sees it."""

    def __init__(self, path: str, keep_content: bool, seen: os.stat_result) -> None:
        self.path, self.keep_content = path, keep_content
        self._seen, size = seen, seen.st_size
        self._blocks = min(-(-size // _BLOCK_BYTES) + 1, _MOST_BLOCKS)
        self._pid = 0
        self._slots: list[int] = []
        self._numbers = self._credits = self._credit = self._results = self._result = -1
        try:
            self._open()
        except OSError:
            self.end()  # or what is open already is missing elsewhere
            raise
        self.learn: Callable[[Any], None] = lambda _: (
            None
        )  # gets what the other process learned of how spans are written
        self._learned = False
        self._mine: set[int] = set()
        self._last = -1
        self._found: dict[int, tuple[int, int, Given | None]] = {}
        self._taken = 0  # results taken from their slots; in the other process: put there
        self._lock = threading.Lock()

    def _open(self) -> None:
        self._slots.extend(os.memfd_create(f"pdtrace-{n}") for n in range(SLOTS))
        self._credits, self._credit = os.pipe()
        self._results, self._result = os.pipe()
        self._numbers, numbers = os.pipe()
        os.write(numbers, b"".join(map(_NUMBER.pack, range(self._blocks))))
        os.close(numbers)
        os.write(self._credit, b"." * SLOTS)

    def start(self, serve: Callable[[Helper], None]) -> None:
        """Fork; the other process serves, then ends."""
        self._pid = os.fork()
        if not self._pid:
            _apart(serve, self)
        self._close("_credits", "_result")

    # ---- in this process ----

    def is_current(self) -> bool:
        """Whether the file is the one that the other process opened, no more than longer; not written anew since."""
        try:
            now, seen = Path(self.path).stat(), self._seen
        except OSError:
            return False
        same = (now.st_dev, now.st_ino) == (seen.st_dev, seen.st_ino)
        return same and (now.st_mtime_ns == seen.st_mtime_ns or now.st_size > seen.st_size)

    def has_begun(self, number: int) -> bool:
        """Whether the other process decodes this block, has done so or will; otherwise it is this one's now. Ask in their order."""
        many = self._mine or self._learned or number <= self._blocks - LEAST_SHARED
        while many and self._last < number:
            taken = self._next()
            if taken is None:
                self._last = self._blocks
            else:
                self._mine.add(taken)
                self._last = taken
        return number < self._blocks and number not in self._mine

    def result(self, number: int, lines: Lines) -> Given | None:
        """What the other process made of a block that it has begun; None when that cannot be used."""
        with self._lock:
            while number not in self._found and self._receive():
                pass
            size, mark, given = self._found.pop(number, (0, 0, None))
        return given if (size, mark) == _looks(lines) else None

    def _receive(self) -> bool:
        try:
            message = os.read(self._results, _MESSAGE.size)
        except OSError:
            return False
        if len(message) < _MESSAGE.size:
            return False
        number, size, mark, spans, resources, learned, withheld = _MESSAGE.unpack(message)
        given = None
        if spans:
            whole = spans + resources + learned
            data = os.pread(self._slots[self._taken % SLOTS], whole, 0)
            self._taken += 1
            with suppress(OSError):
                os.write(self._credit, b".")
            if len(data) == whole:
                if learned:
                    self.learn(pickle.loads(data[-learned:]))  # noqa: S301 -- from a process of our own
                    self._learned = True
                given = Given(_table(data, 0, spans), _table(data, spans, resources), withheld)
        self._found[number] = (size, mark, given)
        return True

    def end(self) -> None:
        """End the other process."""
        if self._pid:
            with suppress(OSError):
                os.kill(self._pid, 9)
            with suppress(OSError):
                os.waitpid(self._pid, 0)
            self._pid = 0
        self._close("_numbers", "_credits", "_credit", "_results", "_result")
        for slot in self._slots:
            os.close(slot)
        self._slots = []

    def _next(self) -> int | None:
        """The number of the next block that nobody has begun."""
        found = os.read(self._numbers, _NUMBER.size)
        return int(_NUMBER.unpack(found)[0]) if found else None

    def _close(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)

    # ---- in the other process ----

    def serve(self) -> None:
        """Decode blocks until none is left."""
        from . import _otlp_json as otlp_json
        from ._otlp_alike import Patterns
        from ._otlp_bytes import PADDING
        from ._otlp_lines import lines_work
        from ._otlp_resources import Resources

        self._close("_credit", "_results")
        resources, patterns, known = Resources(), Patterns(), 0
        spellings, wanted = otlp_json.Spellings(), self._next()
        with Path(self.path).open("rb") as stream:
            if not otlp_json.is_lines(stream.read(otlp_json.BLOCK_BYTES)):
                return
            file = stream.fileno()
            for number, (begin, end) in enumerate(otlp_json.line_places(file)):
                if wanted is None:
                    return
                if number == wanted:
                    lines = otlp_json.Lines([os.pread(file, end - begin, begin), PADDING])
                    decoded = lines_work(lines, spellings, patterns)(resources, self.keep_content)
                    learned = b"" if patterns.count == known else pickle.dumps(patterns.state())
                    known = patterns.count
                    self._send(number, lines, decoded, resources.take(), learned)
                    wanted = self._next()

    def _send(
        self,
        number: int,
        lines: Lines,
        decoded: Decoded,
        resources: pa.Table | None,
        learned: bytes,
    ) -> None:
        rows, others = decoded.spans, decoded.requests
        if rows is None or others.logs or others.metrics or others.problems:
            os.write(self._result, _MESSAGE.pack(number, *_looks(lines), 0, 0, 0, 0))
            return
        parts = _bytes(rows.spans), _bytes(resources), learned
        if not os.read(self._credits, 1):
            raise BrokenPipeError  # nobody is there
        _write(self._slots[self._taken % SLOTS], parts)
        self._taken += 1
        sizes = map(len, parts)
        os.write(self._result, _MESSAGE.pack(number, *_looks(lines), *sizes, rows.withheld))


_running: list[Helper] = []


@contextmanager
def beginning(
    paths: Sequence[str], *, keep_content: bool, prepare: Callable[[], None]
) -> Iterator[None]:
    """Let another process begin with the first of these that is worth it; it is gone when the block ends.

    Only in a process of our own that has one thread yet and has loaded nothing large: that is when a fork is safe and
    cheap. `prepare` is called there before any library is loaded.
    """

    def serve(helper: Helper) -> None:
        prepare()
        helper.serve()

    helper = next(filter(None, (_helper(path, keep_content) for path in _files(paths))), None)
    if helper is not None:
        try:
            helper.start(serve)
        except OSError:
            helper.end()
        else:
            _running.append(helper)
    try:
        yield
    finally:
        while _running:
            _running.pop().end()


@contextmanager
def helped(source: Source) -> Iterator[Helper | None]:
    """The process that has begun with this source, if one has."""
    mine = [h for h in _running if h.path == source.path and h.keep_content == source.keep_content]
    if not mine:
        yield None
        return
    _running.remove(mine[0])
    try:
        yield mine[0] if mine[0].is_current() else None
    finally:
        mine[0].end()


def _files(paths: Sequence[str]) -> Iterator[str]:
    """The files among these, and those that lie in folders among these, as the names of sources have them."""
    for path in paths:
        if os.path.isdir(path):  # noqa: PTH112 -- false where pathlib raises
            with suppress(OSError):
                for name in sorted(os.listdir(path))[:_MOST_FILES]:  # noqa: PTH208 -- names, not paths
                    yield os.path.join(path, name)  # noqa: PTH118 -- keeps ./ as given
        else:
            yield path


def _helper(path: str, keep_content: bool) -> Helper | None:
    if not hasattr(os, "memfd_create") or not hasattr(os, "fork"):
        return None
    if threading.active_count() > 1 or "numpy" in sys.modules or len(os.sched_getaffinity(0)) < 2:
        return None
    import resource

    may_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= may_open < _LEAST_OPEN:  # below 0: as many as it likes
        return None
    try:
        if not Path(path).is_file() or (seen := Path(path).stat()).st_size < LEAST_BYTES:
            return None
        with Path(path).open("rb") as stream:
            if not _IS_SPANS.match(stream.read(64)):
                return None
        return Helper(path, keep_content, seen)
    except (OSError, ValueError):
        return None


def _apart(serve: Callable[[Helper], None], helper: Helper) -> NoReturn:
    """The life of the other process: it says nothing, and nothing of this one runs in it behind its work."""
    import signal

    with suppress(BaseException):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        serve(helper)
    os._exit(0)


def _looks(lines: Lines) -> tuple[int, int]:
    """Length of a block and a mark of its beginning and end."""
    first, last = lines.ends(_MARKED_BYTES)
    return len(lines), crc32(last, crc32(first))


def _bytes(table: pa.Table | None) -> memoryview:
    import pyarrow as pa

    if table is None:
        return memoryview(b"")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def _table(data: bytes, start: int, size: int) -> Any:
    import pyarrow as pa

    if not size:
        return None
    return pa.ipc.open_stream(pa.py_buffer(data).slice(start, size)).read_all()


def _write(place: int, parts: Sequence[bytes | memoryview]) -> None:
    at = 0
    for part in parts:
        done = 0
        while done < len(part):
            done += os.pwrite(place, memoryview(part)[done:], at + done)
        at += done
