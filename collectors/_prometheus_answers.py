"""Samples that a metrics store gave out, written as text exposition: answers of its API, exports, dumps.

Sources: Prometheus' HTTP API (`/api/v1/query`, `query_range`: also of Thanos, Mimir, VictoriaMetrics),
VictoriaMetrics' `/api/v1/export` (JSON lines), `promtool tsdb dump`. Each sample carries its stamp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import polars as pl

from pdtrace.model import Head, Source

from ._common import line_batches, list_items, loads
from ._loglines import text_batches

_ANSWER = re.compile(rb'\A\s*\{[\s\S]{0,2000}?"resultType"\s*:\s*"(?:matrix|vector)"')
_EXPORT = re.compile(rb'\A\s*\{\s*"metric"\s*:\s*\{[\s\S]{0,20000}?\}\s*,\s*"values"\s*:\s*\[')
_DUMP = re.compile(rb'\A\s*\{\s*__name__\s*=\s*"')
_DUMPED = r'^\{\s*__name__\s*=\s*"([^"]+)"(?:\s*,\s*)?'
_RESULT = re.compile(r'"result"\s*:\s*(?=\[)')
DAMAGED = "damaged JSON of a metrics store"
UNNAMED = "a computed expression: no metric's name, so it is not said what it is"
_NAME = re.compile(r"[A-Za-z_:][\w:.]*")


def form_of(head: Head) -> str | None:
    """answer, export or dump; None for text exposition and everything else."""
    forms = (("answer", _ANSWER), ("export", _EXPORT), ("dump", _DUMP))
    return next((name for name, pattern in forms if pattern.search(head.data)), None)


def texts(source: Source, form: str) -> Iterator[pl.DataFrame]:
    """The samples as lines of text exposition (column `text`)."""
    if form == "dump":
        for batch in text_batches(source):
            text = pl.col("text").str.replace(_DUMPED, "${1}{")
            yield batch.select(text)
        return
    for value in _documents(source, form):
        if isinstance(value, bytes):  # damaged: the place of a sample, as what no reader takes
            lines = [f"{DAMAGED}: {value[:200].decode('utf-8', 'replace')!r}"]
        else:
            lines = [line for series in _series(value) for line in _lines(series)]
        if lines:
            yield pl.DataFrame({"text": lines}, schema={"text": pl.String})


def _documents(source: Source, form: str) -> Iterator[Any]:
    if form == "answer":
        with source.open() as stream:
            data = stream.read()
        with suppress(ValueError):  # one answer a line, or cut off
            yield loads(data)
            return
    for batch in line_batches(source):
        for line in batch.lines:
            if line.strip():
                yield from _of_line(line)


def _of_line(line: bytes) -> Iterator[Any]:
    """What a line holds; of one that breaks off the series that are whole, then the damage itself."""
    try:
        whole = loads(line)
    except ValueError:
        text = line.decode("utf-8", "replace")
    else:
        yield whole
        return
    found = _RESULT.search(text)
    items, damaged = list_items(text[found.end() :]) if found else ([], text)
    yield {"data": {"result": items}}
    if damaged:
        yield damaged.encode()


def _series(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, dict):
        return []
    data = value.get("data")
    found = data.get("result") if isinstance(data, dict) else [value]
    return [item for item in found or [] if isinstance(item, dict)]


def _lines(series: dict[str, Any]) -> Iterator[str]:
    """One line a sample; a series without a name keeps the place of its samples as what no reader takes."""
    labels = {k: v for k, v in (series.get("metric") or {}).items() if isinstance(v, str)}
    name = labels.pop("__name__", "")
    inside = ",".join(
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in labels.items()
    )
    head = f"{name}{{{inside}}}" if _NAME.fullmatch(name) else f"{UNNAMED}:"
    values, stamps = series.get("values") or [], series.get("timestamps")
    if isinstance(stamps, list):  # VictoriaMetrics: values and ms apart
        pairs = list(zip_longest(stamps, values))
    else:
        single = series.get("value")
        pairs = [tuple(p[:2]) for p in ([single] if single else values) if isinstance(p, list)]
        pairs = [(round(float(at) * 1000), value) for at, value in pairs if _number(at)]
    for at, value in pairs:
        yield f"{head} {'NaN' if value is None else value} {at}"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
