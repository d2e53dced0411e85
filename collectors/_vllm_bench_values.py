"""vllm bench serve: the JSON values of a result file, and what a run says of itself."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from pdtrace.model import Sink, Source

from ._common import CUT_OFF, NOT_JSON, number

_RENAMED = {
    "date": "bench_end_local",
    "duration": "bench_duration_s",
    "endpoint_type": "backend",
    "model_id": "model",
    "tokenizer_id": "tokenizer",
}
# Written by --metadata; the only way in which a result can name the prefix of its request ids.
ID_PREFIX_KEYS = ("request_id_prefix", "request-id-prefix")
MAX_FACT = 200


def json_values(content: bytes) -> tuple[list[Any], bytes]:
    """The JSON values of a file one after another, and what is left that is none."""
    try:
        return [orjson.loads(content)], b""
    except orjson.JSONDecodeError:
        pass  # several values (--append-result), NaN or Infinity, or cut off
    text = content.decode("utf-8", "replace").strip()
    decoder = json.JSONDecoder()
    values: list[Any] = []
    position = 0
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (json.JSONDecodeError, RecursionError):
            return values, text[position:].encode()
        values.append(value)
        while position < len(text) and text[position].isspace():
            position += 1
    return values, b""


def read_runs(
    source: Source, out: Sink, read_run: Callable[[Source, Any, int, int, Sink], int]
) -> None:
    """Every run of a result file by (source, value, its number, its first record, out), which returns its records."""
    out.unit("request")
    with source.open() as stream:
        content = stream.read()
    first = 0
    values, rest = json_values(content)
    for place, value in enumerate(values):
        first += read_run(source, value, place, first, out)
    if rest:
        out.read(1)
        out.skip(first, CUT_OFF if values or content.lstrip()[:1] == b"{" else NOT_JSON)


def run_facts(value: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Settings and aggregates of a run, and the wall-clock window that its date suggests."""
    for key, item in value.items():
        if item is None or isinstance(item, (list, dict)):
            continue
        if isinstance(item, float) and not math.isfinite(item):
            continue
        name = key.rstrip(":")  # 0.8.5 writes `request_goodput:`
        if name == "endpoint_type" and "backend" in value:
            continue
        yield _RENAMED.get(name, name), str(item)[:MAX_FACT]
    window = run_window(value)
    if window is not None:
        yield "window_start_ns", window[0]
        yield "window_end_ns", window[1]
        yield "window_basis", "date - duration to date, the local date taken as UTC"


def run_window(value: Mapping[str, Any]) -> tuple[int, int] | None:
    """Start and end of the run as if its local date were UTC, whole seconds."""
    duration = number(value.get("duration"))
    try:
        end = datetime.strptime(str(value.get("date")), "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return None
    end_ns = int(end.timestamp()) * 1_000_000_000
    return (end_ns - round(duration * 1e9), end_ns) if duration is not None else None


def id_prefix(value: Mapping[str, Any]) -> str | None:
    """The prefix of the request ids, where the user wrote it into the metadata."""
    for key in ID_PREFIX_KEYS:
        if isinstance(value.get(key), str):
            return str(value[key])
    return None
