"""OTLP files for offline diagnosis: JSON lines, one folder for all processes, rotated by size.

A line is a whole OTLP message, written at once and flushed: what a killed process leaves is
readable up to its last line. Each process has files of its own (service, process id, number).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pdtrace.instrumentation import encode
from pdtrace.instrumentation.requests import Request
from pdtrace.semconv import SCOPE

_fast: Callable[..., bytes] | None = None
with contextlib.suppress(ImportError):  # five times as fast; serving images may lack it
    from orjson import Fragment
    from orjson import dumps as _fast

ROTATE_BYTES = 64 << 20
KEEP_FILES = 16  # of one process; the oldest are removed beyond that
SPANS_PER_LINE = 512
DROPPED = "pdtrace.recorder.dropped_requests"


class OtlpFiles:
    """Writes finished requests below a folder as OTLP/JSON lines."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        resource: Mapping[str, Any],
        version: str = "",
        rotate_bytes: int = ROTATE_BYTES,
        keep_files: int = KEEP_FILES,
    ) -> None:
        self._folder = Path(folder)
        self._resource = {"attributes": encode.attributes_of(resource)}
        self._version = version
        self._rotate_bytes = rotate_bytes
        self._keep_files = keep_files
        service = re.sub(r"[^A-Za-z0-9._-]+", "_", str(resource.get("service.name", "")))[:64]
        # The start time tells apart two processes that were given the same id, as in containers.
        self._stem = f"{service or 'service'}-{os.getpid()}-{time.time_ns() // 1_000_000:x}"
        self._number = 0
        self._file: IO[bytes] | None = None
        self._written: list[Path] = []

    def export(self, requests: Sequence[Request], dropped: int) -> None:
        """Append these requests, flushed; a new file where this one is full."""
        spans: list[encode.Span] = []
        for request in requests:
            spans += encode.spans(request)
        lines = [
            self._line(spans[start : start + SPANS_PER_LINE], dropped)
            for start in range(0, len(spans), SPANS_PER_LINE)
        ]
        file = self._open()
        file.write(b"".join(lines))
        file.flush()

    def _line(self, spans: list[encode.Span], dropped: int) -> bytes:
        scope: dict[str, Any] = {"name": SCOPE, "version": self._version}
        if dropped:
            scope["attributes"] = encode.attributes_of({DROPPED: dropped})
        scope_spans = {"scope": scope, "spans": spans}
        message = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope_spans]}]}
        return _json(message) + b"\n"

    def _open(self) -> IO[bytes]:
        if self._file is not None and self._file.tell() < self._rotate_bytes:
            return self._file
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._stem}-{self._number:04d}.otlp.jsonl"
        self._number += 1
        self._file = path.open("ab", buffering=1 << 20)
        self._written.append(path)
        while len(self._written) > self._keep_files:
            with contextlib.suppress(OSError):
                self._written.pop(0).unlink()
        return self._file

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None  # gone, even where its last bytes find no room
        if file is not None:
            file.close()


def _json(value: Any) -> bytes:
    if _fast is not None:
        return _fast(value, default=lambda numbers: Fragment(encode.numbers_as_json(numbers)))
    return json.dumps(
        value,
        separators=(",", ":"),
        default=lambda numbers: json.loads(encode.numbers_as_json(numbers)),
    ).encode()
