"""Log lines that a log store gave out as one document: Loki, Grafana, CloudWatch, Cloud Logging, Elasticsearch, Datadog, Splunk.

A whole file is one JSON value (or several, page after page) or a CSV with a column of lines; often
the newest line comes first. They become lines in the order of time. Sources: Loki's and
Elasticsearch's HTTP APIs, `aws logs get-log-events`, `filter-log-events`, CloudWatch Insights,
`gcloud logging read --format json`, Datadog's logs API, the CSV that the web pages of these offer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson
import polars as pl

from pdtrace.model import Source

from ._common import INT64, csv_rows, header_cells

HEAD_BYTES = 64 << 10
MOST_BYTES = 1 << 30  # such a file is read whole; what is larger is no download of a log store

_TEXTS = (
    "log", "message", "Message", "@message", "line", "Line", "textPayload", "_raw", "MESSAGE", "LogEntry", "LogMessage",
    "body", "content", "msg",
)  # fmt: skip
_TIMES = (
    "@timestamp", "timestamp", "time", "_time", "Time", "ts", "date", "Date", "TimeGenerated", "TimeGenerated [UTC]",
    "__REALTIME_TIMESTAMP",
)  # fmt: skip
_NAMES = (
    "logStreamName", "@logStream", "logStream", "pod", "pod_name", "PodName", "podName", "container", "container_name",
    "ContainerName", "ContainerID", "Host", "host", "hostname", "Computer", "_HOSTNAME", "instance",
)  # fmt: skip
_INNER = (
    "_source", "result", "attributes", "fields", "kubernetes", "labels", "stream", "resource", "jsonPayload",
)  # fmt: skip

_DOCUMENTS = tuple(
    re.compile(pattern)
    for pattern in (
        rb'\A\s*\{[\s\S]{0,500}?"resultType"\s*:\s*"streams"',
        rb'\A\s*\{\s*"events"\s*:\s*\[\s*\{[\s\S]{0,2000}?"message"\s*:\s*"',
        rb'\A\s*\{[\s\S]{0,500}?"results"\s*:\s*\[\s*\[\s*\{\s*"field"\s*:',
        rb'\A\s*\{[\s\S]{0,500}?"hits"\s*:\s*\{[\s\S]{0,500}?"hits"\s*:\s*\[',
        rb'\A\s*\{[\s\S]{0,500}?"data"\s*:\s*\[[\s\S]{0,4000}?"type"\s*:\s*"log"',
        rb'\A\s*\[\s*\{[\s\S]{0,4000}?"(?:line|textPayload|@message|message|log|_raw)"\s*:\s*"',
    )
)
_STRING = r'"(?:[^"\\]|\\.)*"'
_ENTRY = re.compile(
    rf'"(?:{"|".join(map(re.escape, _TEXTS))})"\s*:\s*({_STRING})|\[\s*"\d{{16,20}}"\s*,\s*({_STRING})|'
    rf'"field"\s*:\s*"@message"\s*,\s*"value"\s*:\s*({_STRING})'
)


class Entry(NamedTuple):
    """One line, its stamp as the store wrote it, and who wrote it."""

    text: str
    stamp: Any = None
    stream: str = ""


def is_export(data: bytes) -> bool:
    """Whether the first bytes of a file are those of a log store's document."""
    return any(form.search(data) for form in _DOCUMENTS) or _csv_columns(data) is not None


def head_lines(data: bytes) -> list[str]:
    """The log lines in the first bytes of such a document, which may end anywhere."""
    if _csv_columns(data) is not None:
        whole = data[: data.rfind(b"\n") + 1] or data
        return [line for entry in _rows(whole) for line in entry.text.splitlines()]
    return _strings(data.decode("utf-8", "replace"))


def entry(value: dict[str, Any]) -> Entry | None:
    """What one JSON object carries: a line, its stamp, its stream; None: it carries none."""
    text = _first(value, _TEXTS, str)
    return None if text is None else Entry(text, _first(value, _TIMES), _name(value))


def frame(source: Source) -> pl.DataFrame | None:
    """The lines of such a document in order of time: stream, prefix_time_ns, text; None: it is none."""
    with source.open() as stream:
        data = stream.read(HEAD_BYTES)
        if not is_export(data):
            return None
        data += stream.read(MOST_BYTES)
    entries = list(_rows(data) if _csv_columns(data[:HEAD_BYTES]) is not None else _entries(data))
    split = [entry._replace(text=line) for entry in entries for line in entry.text.splitlines()]
    found = pl.DataFrame(
        {"text": [e.text for e in split], "stream": [e.stream for e in split]},
        schema={"text": pl.String, "stream": pl.String},
    ).with_columns(
        pl.Series("prefix_time_ns", [instant_ns(e.stamp) for e in split], dtype=pl.Int64)
    )
    times = found["prefix_time_ns"].drop_nulls()
    if len(times) > 1 and times[0] > times[-1]:
        found = found.reverse()  # newest first: equal stamps are then in the order of writing
    order = pl.col("prefix_time_ns").forward_fill().fill_null(strategy="backward")
    return found.sort(order, maintain_order=True)


def _entries(data: bytes) -> Iterator[Entry]:
    """The lines of all documents of the file; where one is cut off, the texts that it still has."""
    try:
        whole = orjson.loads(data)
    except orjson.JSONDecodeError:
        yield from _pages(data.decode("utf-8", "replace"))
    else:
        yield from _walk(whole)


def _pages(text: str) -> Iterator[Entry]:
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        at += len(text[at:]) - len(text[at:].lstrip())
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        yield from _walk(value)
    yield from (Entry(line) for line in _strings(text[at:]))


def _strings(text: str) -> list[str]:
    found = []
    for match in _ENTRY.finditer(text):
        try:
            value = json.loads(next(group for group in match.groups() if group is not None))
        except ValueError:
            continue
        found += value.splitlines()
    return found


def _walk(value: Any, depth: int = 0) -> Iterator[Entry]:
    """Entries of a document, wherever its lists are."""
    if isinstance(value, list):
        for item in value:
            if isinstance(item, list):  # CloudWatch Insights: an entry is a list of fields
                item = {f.get("field"): f.get("value") for f in item if isinstance(f, dict)}
            if isinstance(item, dict):
                yield from _walk(item, depth + 1)
    elif isinstance(value, dict):
        if isinstance(value.get("values"), list):  # Loki
            name = _name(value.get("stream"))
            for pair in value["values"]:
                if isinstance(pair, list) and len(pair) > 1 and isinstance(pair[1], str):
                    yield Entry(pair[1], pair[0], name)
            return
        found = entry(value)
        if found is not None:
            yield found
        elif depth < 6:
            for key in ("data", "result", "results", "events", "hits", "entries", "logs"):
                yield from _walk(value.get(key), depth + 1)


def _first(
    value: Any, names: tuple[str, ...], kind: Any = (str, int, float), depth: int = 0
) -> Any:
    """The first of these fields, here or in what stores put around an entry."""
    if not isinstance(value, dict):
        return None
    found = next(
        (value[n] for n in names if isinstance(value.get(n), kind) and value[n] != ""), None
    )
    if found is None and depth < 2:
        inner = (_first(value.get(key), names, kind, depth + 1) for key in _INNER)
        found = next((item for item in inner if item is not None), None)
    return found


def _name(value: Any) -> str:
    """Pod and container, or whatever else tells streams apart; empty where nothing does."""
    if not isinstance(value, dict):
        return ""
    kubernetes = next(
        (
            v
            for v in (value, value.get("_source"))
            if isinstance(v, dict) and isinstance(v.get("kubernetes"), dict)
        ),
        None,
    )
    if kubernetes is not None:
        pod = kubernetes["kubernetes"].get("pod")
        container = kubernetes["kubernetes"].get("container")
        if isinstance(pod, dict):
            names = [
                pod.get("name"),
                container.get("name") if isinstance(container, dict) else None,
            ]
            return "pod/" + "/".join(n for n in names if isinstance(n, str))
    pod = _first(value, ("pod", "pod_name", "PodName", "podName"), str)
    if pod is not None:
        container = _first(value, ("container", "container_name", "ContainerName"), str)
        return "pod/" + "/".join(n for n in (pod, container) if n)
    return _first(value, _NAMES, str) or ""


# ---- CSV


def _csv_columns(data: bytes) -> tuple[int, int] | None:
    """Where the line and its time stand, when the head of a file is a CSV of log lines."""
    first, _, rest = data.partition(b"\n")
    if not rest or b"," not in first or len(first) > 4096:
        return None
    header = header_cells(first.decode("utf-8-sig", "replace").strip("\r")) or []
    text = next((header.index(name) for name in _TEXTS if name in header), None)
    time = next((header.index(name) for name in _TIMES if name in header), None)
    return None if text is None or time is None else (text, time)


def _rows(data: bytes) -> Iterator[Entry]:
    columns = _csv_columns(data[:HEAD_BYTES])
    assert columns is not None
    lines = csv_rows(data.decode("utf-8-sig", "replace").replace("\0", ""))
    header = next(lines, [])
    names = [header.index(name) for name in _NAMES if name in header][:2]
    for row in lines:
        if len(row) > max(columns):
            stream = "/".join(row[n] for n in names if n < len(row) and row[n])
            yield Entry(row[columns[0]], row[columns[1]], stream)


# ---- instants

_US = re.compile(
    r"(\d{1,2})/(\d{1,2})/(\d{4}),? (\d{1,2}):(\d\d):(\d\d)(?:\.(\d{1,9}))? ?([AP]M)?",
    re.IGNORECASE,
)
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?\d* ?(Z|UTC|[+-]\d\d:?\d\d)?"
)


def instant_ns(stamp: Any) -> int | None:
    """Nanoseconds since the epoch of a store's stamp; the size of a number tells its unit."""
    if isinstance(stamp, datetime):
        stamp = (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).isoformat()
    if isinstance(stamp, bool) or stamp is None:
        return None
    if isinstance(stamp, str):
        text = stamp.strip()
        if not re.fullmatch(r"\d{9,20}(?:\.\d+)?", text):
            return _from_text(text)
        stamp = float(text) if "." in text else int(text)
    for limit, factor in ((1e11, 10**9), (1e14, 10**6), (1e17, 10**3), (1e20, 1)):
        if 0 < stamp < limit:
            found = stamp * factor if isinstance(stamp, int) else round(stamp * factor)
            return found if found in INT64 else None
    return None


def _from_text(text: str) -> int | None:
    """ISO 8601, or the American form that Azure writes (in UTC)."""
    if found := _ISO.match(text):
        day, clock, fraction, zone = found.groups()
    elif us := _US.match(text):
        month, day_, year, hour, minute, second, fraction, half = us.groups()
        hours = int(hour) % 12 + (12 if half.upper() == "PM" else 0) if half else int(hour)
        day, clock = f"{year}-{int(month):02}-{int(day_):02}", f"{hours:02}:{minute}:{second}"
        zone = "Z"
    else:
        return None
    try:
        epoch = datetime.fromisoformat(f"{day}T{clock}+00:00").timestamp()
    except ValueError:
        return None
    offset = 0
    if zone and zone[0] in "+-":
        minutes = int(zone[1:3]) * 60 + int(zone[-2:])
        offset = minutes * 60 if zone[0] == "+" else -minutes * 60
    return (int(epoch) - offset) * 10**9 + int((fraction or "0").ljust(9, "0"))
