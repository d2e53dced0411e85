"""What polls of TensorRT-LLM's JSON endpoints left in a file: arrays, one or several, objects, or objects line by line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdtrace.model import Source

from ._common import CUT_OFF, LONELY, NOT_JSON, line_batches, list_items, loads


def polled(source: Source) -> Iterator[tuple[Any, str]]:
    """What the lines hold, arrays opened, each with what is wrong with it; a file whose first line is no JSON is one value."""
    for batch in line_batches(source):
        for place, line in enumerate(batch.lines):
            if not line.strip():
                continue
            try:
                value = loads(line)
            except ValueError:
                if line.strip() in (b"[", b"{") or (batch.cut and not batch.first and not place):
                    yield from _laid_out(source)
                    return
                last = batch.cut and place == len(batch.lines) - 1
                yield from _broken(line, CUT_OFF if last else NOT_JSON)
                continue
            yield from ((item, "") for item in (value if isinstance(value, list) else [value]))


def _laid_out(source: Source) -> Iterator[tuple[Any, str]]:
    with source.open() as stream:
        data = stream.read()
    try:
        value = loads(data)
    except ValueError:
        yield from _broken(data, CUT_OFF)
        return
    yield from ((item, "") for item in (value if isinstance(value, list) else [value]))


def _broken(data: bytes, reason: str) -> Iterator[tuple[Any, str]]:
    """The whole records of an array that was cut; the rest is one record that is not read."""
    text = LONELY.sub(r"\\ufffd", data.decode("utf-8", "replace").strip())
    items, rest = list_items(text) if text.startswith("[") else ([], text)
    yield from ((item, "") for item in items)
    if rest:
        yield None, reason
