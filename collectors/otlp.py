"""OpenTelemetry: OTLP traces, logs and metrics in JSON or protobuf.

Source: open-telemetry/opentelemetry-proto 1.x and its OTLP/JSON mapping; the framings are those of
open-telemetry/opentelemetry-collector-contrib exporter/fileexporter. Clock: wall, nanoseconds.
This room only reads; the collectors of the systems that wrote the spans say what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from io import BytesIO
from itertools import chain
from typing import IO, Any

import numpy as np
import pyarrow as pa

from pdtrace.model import Head, Match, Sink, Source

from . import _otlp_beside as beside
from . import _otlp_decoders as decoders
from . import _otlp_json as otlp_json
from . import _otlp_proto as proto
from . import _otlp_wire as wire
from ._common import CUT_OFF
from ._otlp_ahead import in_order
from ._otlp_columns import SpanRows
from ._otlp_lines import Decoded, Work, json_work, walked
from ._otlp_logs import log_rows, sample_rows
from ._otlp_proto_walk import Steps
from ._otlp_requests import Requests, requests_of_document, requests_of_lines
from ._otlp_resources import Resources
from ._otlp_together import add_spans, only_spans
from ._otlp_views import form_of

TITLE = "OpenTelemetry (OTLP)"

BATCH_ROWS = 65_536
GATHERED_ROWS = 16_384  # spans of small blocks are stored together: half the cost of storing them
GROUP_BYTES = 6 << 20  # protobuf messages decoded together
DECODERS = 2  # threads; ptars, pyarrow and numpy let go of the interpreter's lock
AHEAD = 6  # blocks: the decoders go on while a whole row group is compressed and written
NOT_PROTOBUF = "not an OTLP export request"

_JSON_START = re.compile(
    r"""(?:\A\ufeff?|\n)\s*\[?\s*\{\s*(?:"(?:trace|data|result)"\s*:\s*\{\s*)?
    "(?:resource_?(?P<signal>Spans|Logs|Metrics)|batches)"\s*:\s*(?:\[|null)""",
    re.VERBOSE | re.IGNORECASE,
)
_SCOPES = re.compile(r'"(?:scope_?|instrumentationLibrary)Spans"', re.IGNORECASE)
_UNITS = {"traces": "span", "logs": "log record", "metrics": "data point"}


def sniff(head: Head) -> Match | None:
    """Recognise export requests: JSON by its outermost key, protobuf by its inner structure."""
    data = head.data
    if data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        found = _JSON_START.search(head.text())
        if found is None:
            form = form_of(head.text())
            return Match("exact", form) if form else None
        if found["signal"] is None and not _SCOPES.search(head.text()):
            return None
        return Match("exact", f"OTLP/JSON {(found['signal'] or 'spans').lower()}")
    if wire.is_framed(data):
        return Match("exact", "OTLP protobuf, length-prefixed")
    signal = wire.probe(data, cut=not head.complete) if data[:1] == b"\x0a" else None
    return Match("exact", f"OTLP protobuf, {signal}") if signal else None


def read(source: Source, out: Sink) -> None:
    """Read one file: spans, log records and data points, numbered in the order of the file."""
    reading = _Reading(source, out)
    with source.open() as stream, beside.helped(source) as helper:
        start = stream.read(otlp_json.BLOCK_BYTES)
        try:
            if start.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
                reading.decode(json_work(start.removeprefix(b"\xef\xbb\xbf"), stream, helper))
            elif start.strip():
                reading.decode(_protobuf_work(start, stream))
        finally:
            reading.store_spans()
    reading.finish()


def read_together(files: Sequence[tuple[Source, Sink]]) -> list[int]:
    """Read many small files at once; the places of those that hold more than spans, which read() takes one by one."""
    found = [_requests(source) for source, _ in files]
    together = [place for place, requests in enumerate(found) if only_spans(requests)]
    if together and add_spans([(*files[place], found[place]) for place in together]):
        return sorted({*range(len(files))} - {*together})
    return list(range(len(files)))


def _requests(source: Source) -> Requests:
    """What a small file holds, as Python objects."""
    with source.open() as stream:
        data = stream.read().removeprefix(b"\xef\xbb\xbf")
    if data.lstrip(b" \t\r\n")[:1] in (b"{", b"["):
        if otlp_json.is_lines(data):
            return requests_of_lines(data, cut=not data.endswith(b"\n"))
        return requests_of_document(data)
    requests = Requests()
    stream = BytesIO(data)
    messages = wire.framed_messages(stream) if wire.is_framed(data) else wire.bare_messages(stream)
    for message, whole in messages:
        if not whole or message[:1] == b"{" or wire.probe(message) != "traces":
            return Requests()
        _take(message, "traces", requests)
    return requests


class _Reading:
    """Puts decoded blocks into the sink in the order of the file, and numbers the records."""

    def __init__(self, source: Source, out: Sink) -> None:
        self._out = out
        self._keep_content = source.keep_content
        self._resources = Resources()
        self._records = 0
        self._withheld = 0
        self._signals: set[str] = set()
        self._gathered: list[pa.Table] = []

    def decode(self, work: Iterator[Work]) -> None:
        """Decode blocks, several at once when there is more than one."""
        first = next(work, None)
        if first is None:
            return
        second = next(work, None)
        if second is None:
            self._take(first(self._resources, self._keep_content))
            return
        tasks = (
            partial(task, self._resources, self._keep_content)
            for task in chain((first, second), work)
        )
        with closing(in_order(tasks, DECODERS, AHEAD)) as blocks:
            for block in blocks:
                self._take(block)
        self.store_spans()
        pa.default_memory_pool().release_unused()  # or it keeps what it parsed with: 80 MB

    def finish(self) -> None:
        """Say what was withheld."""
        if self._withheld:
            self._out.fact(None, "content_withheld", self._withheld)

    def _take(self, block: Decoded) -> None:
        if block.spans is not None:
            self._add_spans(block.spans)
        if block.requests.logs:
            self._add_logs(block.requests.logs)
        if block.requests.metrics:
            self._add_metrics(block.requests.metrics)
        for reason, excerpt in block.requests.problems:
            self._out.skip(self._count(1), reason, excerpt or None)
        resources = self._resources.take()
        if resources is not None:
            self._out.add("resources", resources, record=None)

    def _count(self, n: int) -> int:
        """Count records; returns the number of the first."""
        first = self._records
        self._records += n
        self._out.read(n)
        return first

    def _unit(self, signal: str) -> None:
        if signal not in self._signals:
            self._signals.add(signal)
            self._out.unit(_UNITS[signal] if len(self._signals) == 1 else "record")

    def _add_spans(self, rows: SpanRows) -> None:
        table = rows.spans
        if not table.num_rows:
            return
        self._unit("traces")
        first = self._count(table.num_rows)
        self._withheld += rows.withheld
        record = pa.array(np.arange(first, first + table.num_rows))
        table = table.append_column("record", record)
        if self._gathered and self._gathered[0].schema != table.schema:
            self.store_spans()
        self._gathered.append(table)
        if sum(gathered.num_rows for gathered in self._gathered) >= GATHERED_ROWS:
            self.store_spans()

    def store_spans(self) -> None:
        """Hand over the spans that were gathered."""
        if not self._gathered:
            return
        table = pa.concat_tables(self._gathered)
        self._gathered = []
        for start in range(0, table.num_rows, BATCH_ROWS):
            self._out.add("spans", table.slice(start, BATCH_ROWS))

    def _add_logs(self, items: list[Any]) -> None:
        rows, withheld = log_rows(
            items, self._resources, self._records, keep_content=self._keep_content
        )
        self._withheld += withheld
        if not rows:
            return
        self._unit("logs")
        self._count(len(rows))
        for start in range(0, len(rows), BATCH_ROWS):
            self._out.add("log_records", rows[start : start + BATCH_ROWS])

    def _add_metrics(self, items: list[Any]) -> None:
        rows, empty, points = sample_rows(items, self._records, self._worker)
        if not points:
            return
        self._unit("metrics")
        self._count(points)
        for start in range(0, len(rows), BATCH_ROWS):
            self._out.add("samples", rows[start : start + BATCH_ROWS])
        if empty:
            self._out.skip(empty, "data point without a value")

    def _worker(self, resource: dict[str, Any]) -> str:
        """The worker that a resource of metrics describes."""

        def text(key: str) -> str | None:
            value = resource.get(key)
            return None if value is None else str(value)

        return self._out.worker(
            {
                "instance": text("service.instance.id"),
                "pod": text("k8s.pod.name"),
                "pid": text("process.pid"),
                "service": text("service.name"),
            },
            version=text("service.version"),
            host=text("host.name"),
        )


# ---- protobuf ------------------------------------------------------------------------------------


class _Rest:
    """A stream with its first block put back."""

    def __init__(self, start: bytes, stream: IO[bytes]) -> None:
        self._start, self._stream = start, stream

    def read(self, size: int) -> bytes:
        if self._start:
            start, self._start = self._start, b""
            return start
        return self._stream.read(size)


def _protobuf_work(start: bytes, stream: IO[bytes]) -> Iterator[Work]:
    rest: Any = _Rest(start, stream)
    messages = wire.framed_messages(rest) if wire.is_framed(start) else wire.bare_messages(rest)
    steps = Steps()
    group: list[bytes] = []
    size = 0
    for message, whole in messages:
        if not whole:
            break
        group.append(message)
        size += len(message)
        if size >= GROUP_BYTES:
            yield _messages_work(group, steps)
            group, size = [], 0
    else:
        if group:
            yield _messages_work(group, steps)
        return
    kept = wire.salvaged(message)
    yield _messages_work(group + ([kept] if kept else []), steps, cut=True)


def _messages_work(messages: list[bytes], steps: Steps, *, cut: bool = False) -> Work:
    def decode(resources: Resources, keep_content: bool) -> Decoded:
        requests = Requests()
        traces: list[bytes] = []
        for message in messages:
            if (
                message[:1] == b"{"
            ):  # the Collector's JSON with compression zstd is length-prefixed, too
                one = requests_of_document(message)
                for name in ("spans", "logs", "metrics", "problems"):
                    getattr(requests, name).extend(getattr(one, name))
                continue
            signal = wire.probe(message)
            if signal == "traces":
                traces.append(message)
            elif message:
                _take(message, signal, requests)
        found = None
        if traces and not requests.spans:
            found = proto.rows(traces, steps, resources, keep_content=keep_content)
        if found is not None:
            decoded = Decoded(found, requests)
        else:
            for message in traces:
                _take(message, "traces", requests)
            decoded = walked(requests, resources, keep_content)
        if cut:
            requests.problems.append((CUT_OFF, ""))
        return decoded

    return decode


def _take(message: bytes, signal: wire.Signal | None, requests: Requests) -> None:
    """Decode one message by Google's protobuf; a message without any record is none to count."""
    if signal is None:
        if not _is_empty(message):
            requests.problems.append((NOT_PROTOBUF, ""))
        return
    try:
        requests.take(decoders.as_object(message, signal))
    except ValueError:
        requests.problems.append((NOT_PROTOBUF, ""))


def _is_empty(message: bytes) -> bool:
    """Whether a request is well formed and holds no record."""
    try:
        return all(
            number == 1
            and kind == wire.LEN
            and not any(n == 2 and p for n, _, p, _ in wire.fields(inner))
            for number, kind, inner, _ in wire.fields(message)
        )
    except wire.WireError:
        return False
