"""Log lines as frames: in whole columns, in order, without what carriers put in front of them (_log_wrappers).

Documents of log stores are undone by _log_exports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import polars as pl
import pyarrow as pa

from pdtrace.model import Head, Source

from . import _log_exports as exports
from ._common import MAX_LINE_BYTES
from ._log_wrappers import SAMPLE_LINES, Layers, join_parts, plain, unwrap, whole_lines

BATCH_BYTES = 8 << 20
# Who asks these wants to know whether a server is well, or its counters: a refusal is no failed request.
PROBE = r"^/(?:health\w*|ready\w*|live\w*|ping|metrics)/?$"


def is_probe(method: str, path: str) -> bool:
    """Whether a call asks after the server and no model."""
    return method == "GET" and re.search(PROBE, path) is not None


def log_batches(source: Source, size: int = BATCH_BYTES) -> Iterator[pl.DataFrame]:
    """The source's lines in frames of about `size` bytes, in order.

    Columns: record (ordinal of the line), stream (container, '' without one), prefix_time_ns
    (stamp of the carrier, else NULL), text (without colours and carriage returns), parts (lines
    that were joined to it), whole (false: the last line has no newline, it may be half written).
    A file whose newest line stands first, as web pages give it out, is turned round.
    """
    batches = _batches(source, size)
    first = next(batches, None)
    if first is None:
        return
    if not _newest_first(first):
        yield first
        yield from batches
        return
    turned = pl.concat([first, *batches]).reverse()
    yield turned.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("record"))


_OWN_TIME = r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b"


def _newest_first(frame: pl.DataFrame) -> bool:
    """Whether the stamps of these lines run backwards."""
    times = frame["prefix_time_ns"].drop_nulls()
    if len(times) < 0.5 * frame.height:
        times = frame["text"].head(SAMPLE_LINES).str.extract(_OWN_TIME).drop_nulls()
        times = times.rank("dense").cast(pl.Int64)
    if len(times) < 3 or times[0] <= times[-1]:
        return False
    steps = times.diff().drop_nulls()
    return bool((steps > 0).sum() <= 0.02 * len(steps)) and times.n_unique() > 2


def _batches(source: Source, size: int) -> Iterator[pl.DataFrame]:
    """The lines in the order of the file, or of time where a log store gave them out."""
    layers = Layers()
    first = 0
    exported = exports.frame(source)
    if exported is not None:
        numbered = exported.with_row_index("record").with_columns(
            pl.col("record").cast(pl.Int64), pl.lit(value=True).alias("whole")
        )
        unwrapped = unwrap(numbered.with_columns(plain(numbered["text"])), layers)
        if unwrapped.height:
            yield join_parts(unwrapped, layers, last=True)
        return
    for column, cut in _line_columns(source, size):
        frame = pl.DataFrame({"text": column}).with_columns(
            pl.int_range(first, first + len(column), dtype=pl.Int64).alias("record"),
            (pl.int_range(len(column)) < len(column) - cut).alias("whole"),
        )
        first += len(column)
        unwrapped = unwrap(frame.with_columns(plain(frame["text"])), layers)
        joined = join_parts(unwrapped, layers, last=cut)
        if joined.height:
            yield joined
    if layers.waiting is not None and layers.waiting.height:
        yield whole_lines(layers.waiting)


def text_batches(source: Source, size: int = BATCH_BYTES) -> Iterator[pl.DataFrame]:
    """The source's lines as they are (column `text`), in frames of about `size` bytes."""
    for column, _ in _line_columns(source, size):
        yield pl.DataFrame({"text": column})


def _line_columns(source: Source, size: int) -> Iterator[tuple[pl.Series, bool]]:
    """Columns of whole lines; True with the last one when the file does not end with a newline."""
    rest = b""
    with source.open() as stream:
        while block := stream.read(size):
            block = rest + block
            end = block.rfind(b"\n") + 1
            if not end:
                rest = block
                if len(rest) > MAX_LINE_BYTES:
                    break
                continue
            rest = block[end:]
            yield _column(block[:end]), False
    if rest:
        yield _column(rest + b"\n"), True


def _column(block: bytes) -> pl.Series:
    """The lines of a block that ends with a newline, as one text column."""
    if b"\0" in block:
        block = block.replace(b"\0", b"")
    try:
        block.decode("utf-8")
    except UnicodeDecodeError:
        block = block.decode("utf-8", "replace").encode("utf-8")
    ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10) + 1
    offsets = np.concatenate([[0], ends]).astype(np.int64)
    array = pa.LargeStringArray.from_buffers(len(ends), pa.py_buffer(offsets), pa.py_buffer(block))
    column = pl.from_arrow(array)
    assert isinstance(column, pl.Series)
    return column.alias("text").str.strip_chars_end("\r\n")


@lru_cache(maxsize=1)  # several collectors look at the same head, one after the other
def head_texts(head: Head) -> tuple[str, ...]:
    """The unwrapped lines of a head, for sniffing; a line that the head cuts is left out."""
    data = head.data if head.complete else head.data[: head.data.rfind(b"\n") + 1]
    if not head.data.strip():
        return ()
    if not data and not exports.is_export(head.data):
        return ()
    if exports.is_export(head.data):
        data = "".join(line + "\n" for line in exports.head_lines(head.data)).encode() or b"\n"
    text = _column(data if data.endswith(b"\n") else data + b"\n")
    frame = pl.DataFrame({"text": plain(text)}).with_columns(
        pl.int_range(pl.len(), dtype=pl.Int64).alias("record"), pl.lit(True).alias("whole")
    )
    return tuple(unwrap(frame, Layers())["text"].to_list())
