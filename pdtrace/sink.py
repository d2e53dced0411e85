"""Where collectors put what they read: numbers, checks and buffers rows, counts what was not kept."""

from __future__ import annotations

import hashlib
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any, cast

import polars as pl
import pyarrow as pa

from pdtrace import library, model, spans
from pdtrace._streams import CarefulReader, words
from pdtrace.inputs import Input
from pdtrace.records import dataclass
from pdtrace.store import Store

if TYPE_CHECKING:
    from pdtrace.model import Batch

FLUSH_ROWS = 65_536


@dataclass
class Account:
    """What is known of one source while it is read."""

    item: Input
    collectors: list[str] = field(default_factory=list)
    unit: str = "record"
    clock: str = model.WALL
    read: int = 0
    what: str = ""
    problem: str = ""
    reasons: Counter[str] = field(default_factory=Counter)
    positions: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    excerpts: dict[str, str] = field(default_factory=dict)
    sha256: str | None = None
    size: int | None = None
    ignored: bool = False  # recognised, not used
    twin: str = ""  # what it is a copy of, in words
    failed: bool = False  # a collector broke down over it
    lost: bool = False  # its rows were taken back, for an error inside a transaction undoes it
    start: bytes = b""  # its first bytes, and what could be read of it: sha256 and size
    seen: tuple[str | None, int] = (None, 0)


class RowSink:
    """Checks and buffers rows on their way into the store; declares workers and facts."""

    def __init__(self, store: Store, source: int | None = None, scope: str = "") -> None:
        self._store = store
        self._source = source
        self._scope = scope
        self._small: dict[str, list[Mapping[str, Any]]] = defaultdict(list)

    def add(self, table: str, batch: Batch, *, record: str | None = "record") -> None:
        """Append rows; lists of dicts are gathered into larger batches first."""
        if isinstance(batch, Sequence):
            rows = self._small[table]
            rows.extend(batch)
            if len(rows) >= FLUSH_ROWS:
                self._flush(table)
            return
        self._append(table, batch)

    def _flush(self, table: str) -> None:
        rows = self._small.pop(table, [])
        if rows:
            self._append(table, rows)

    def _append(self, table: str, batch: Any) -> None:
        if table == "spans":
            batch = spans.packed(batch)
        takes_source = any(c.name == "source" for c in library.staging(table).columns)
        if not takes_source:
            batch = _without_source(batch)
        elif self._source is not None:
            batch = _with_source(batch, self._source)
        self._store.append(table, batch)

    def worker(
        self,
        aliases: Mapping[str, str | None],
        *,
        role: str | None = None,
        role_basis: str | None = None,
        engine: str | None = None,
        version: str | None = None,
        host: str | None = None,
        rank: str | None = None,
        name: str | None = None,
        start_ns: int | None = None,
        end_ns: int | None = None,
    ) -> str:
        """Declare a worker instance and return its id."""
        worker = model.worker_id(aliases, self._scope)
        row = {
            "worker": worker, "name": name, "role": role, "role_basis": role_basis, "engine": engine,
            "version": version, "host": host, "rank": rank, "start_ns": start_ns, "end_ns": end_ns,
        }  # fmt: skip
        self.declare(row, aliases)
        return worker

    def declare(self, row: Mapping[str, Any], aliases: Mapping[str, str | None]) -> None:
        """Add a row of workers and the aliases of that worker."""
        self.add("workers", [row])
        self.add(
            "worker_aliases",
            [
                {"worker": row["worker"], "kind": kind, "value": value}
                for kind, value in aliases.items()
                if value
            ],
        )

    def fact(self, worker: str | None, key: str, value: object) -> None:
        """Record what the source says of a worker."""
        if value is not None:
            self.add("facts", [{"worker": worker, "key": key, "value": str(value)}])

    def close(self) -> None:
        """Write what is still buffered."""
        for table in list(self._small):
            self._flush(table)

    # Interpretation has no records of its own to count.
    def unit(self, name: str) -> None:
        """Name the record unit."""

    def read(self, n: int) -> None:
        """Count n more records as seen."""

    def skip(self, record: int | Sequence[int], reason: str, excerpt: str | None = None) -> None:
        """Count records as not kept."""

    def skip_many(self, n: int, reason: str, first: int | None = None) -> None:
        """Count n records as not kept without naming each."""

    def clock(self, domain: str) -> None:
        """Name the clock of the instants."""


class SourceSink(RowSink):
    """The Sink of one source and one collector: also counts what was seen and what was not kept."""

    def __init__(self, store: Store, account: Account) -> None:
        scope = str(PurePosixPath(account.item.path).parent)
        super().__init__(store, account.item.number, scope)
        self._account = account
        self.read_count = 0

    def unit(self, name: str) -> None:
        """Name the record unit of this source."""
        self._account.unit = name

    def read(self, n: int) -> None:
        """Count n more records as seen."""
        self.read_count += n

    def clock(self, domain: str) -> None:
        """Name the clock of this source's instants."""
        self._account.clock = domain

    def skip(self, record: int | Sequence[int], reason: str, excerpt: str | None = None) -> None:
        """Count records as not kept."""
        records = [record] if isinstance(record, int) else list(record)
        self._account.reasons[reason] += len(records)
        room = 5 - len(self._account.positions[reason])
        self._account.positions[reason].extend(int(r) for r in records[: max(room, 0)])
        if excerpt and reason not in self._account.excerpts:
            self._account.excerpts[reason] = masked(excerpt)

    def skip_many(self, n: int, reason: str, first: int | None = None) -> None:
        """Count n records as not kept without naming each."""
        if n <= 0:
            return
        self._account.reasons[reason] += n
        if first is not None and len(self._account.positions[reason]) < 5:
            self._account.positions[reason].append(first)

    def close(self) -> None:
        """Write what is still buffered and settle the count."""
        super().close()
        self._account.read = max(self._account.read, self.read_count)


def _with_source(batch: Any, number: int) -> Any:
    """The batch with a column `source`, unless it has one."""
    if isinstance(batch, pl.DataFrame):
        if "source" in batch.columns:
            return batch
        return batch.with_columns(pl.lit(number, dtype=pl.Int32).alias("source"))
    if isinstance(batch, Sequence):
        return [{"source": number, **row} for row in batch]
    if isinstance(batch, pa.RecordBatch):
        batch = pa.Table.from_batches([batch])
    if "source" in batch.column_names:
        return batch
    return batch.append_column("source", pa.repeat(pa.scalar(number, pa.int32()), batch.num_rows))


def _without_source(batch: Any) -> Any:
    if isinstance(batch, pl.DataFrame):
        return batch.drop("source", strict=False)
    if isinstance(batch, pa.Table):
        return batch.drop_columns([n for n in batch.column_names if n == "source"])
    return [{key: value for key, value in row.items() if key != "source"} for row in batch]


MASKED_CHARACTERS = 60


def masked(text: str) -> str:
    """An excerpt that shows shape, not content: letters become x, digits 9, other signs stay; at most 60 signs."""
    return "".join(
        "x" if c.isalpha() else "9" if c.isdigit() else c for c in text[:MASKED_CHARACTERS]
    )


class _HashingRaw(io.RawIOBase):
    """Hashes and counts the bytes that pass; closing reads on to the end, so that the hash is of the whole."""

    def __init__(
        self, stream: IO[bytes], report: Callable[[int], None], *, hashed: bool = True
    ) -> None:
        self._stream = stream
        self._report = report
        self._hash = hashlib.sha256() if hashed else None
        self.size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size: int = self._stream.readinto(buffer)  # type: ignore[attr-defined]
        if self._hash is not None:
            self._hash.update(memoryview(buffer)[:size])
        self.size += size
        self._report(self.size)
        return size

    @property
    def sha256(self) -> str | None:
        """Of what has passed; None where nobody wants it."""
        return None if self._hash is None else self._hash.hexdigest()

    def abandon(self) -> None:
        """Read no further."""
        self._stream.close()

    def finish(self) -> None:
        """Read what the collector left."""
        if self._stream.closed:
            return
        try:
            while block := self._stream.read(1 << 20):
                if self._hash is not None:
                    self._hash.update(block)
                self.size += len(block)
        finally:
            self._stream.close()


class Reading:
    """A Source whose first open() is hashed. Collectors see a damaged file as one that ends there; `damage` tells.

    `hashed`: whether anybody will look at the hash.
    """

    def __init__(self, item: Input, report: Callable[[int], None], *, hashed: bool = True) -> None:
        self._item = item
        self._report = report
        self._hashed = hashed
        self._raw: _HashingRaw | None = None
        self.damage = ""
        self.path, self.name, self.number = item.path, item.name, item.number
        self.mtime_ns, self.keep_content = item.mtime_ns, item.keep_content

    def open(self) -> IO[bytes]:
        """The decompressed bytes from the start."""
        stream = self._item.open()
        if self._raw is not None:
            return cast(IO[bytes], CarefulReader(stream, stream, self._damaged))
        self._raw = _HashingRaw(stream, self._report, hashed=self._hashed)
        return cast(IO[bytes], CarefulReader(self._raw, None, self._damaged))

    def _damaged(self, error: Exception) -> None:
        self.damage = self.damage or words(error)

    def fingerprint(self) -> tuple[str | None, int]:
        """sha256 and size of the whole content."""
        if self._raw is None:
            self.open()
        assert self._raw is not None
        self._raw.finish()
        return self.so_far()

    def close(self) -> None:
        """Leave the rest unread."""
        if self._raw is not None:
            self._raw.abandon()

    def so_far(self) -> tuple[str | None, int]:
        """sha256 and size of what was read."""
        return (None, 0) if self._raw is None else (self._raw.sha256, self._raw.size)
