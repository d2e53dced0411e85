"""What collectors that only interpret spans say of files: none is theirs, `otlp` reads spans."""

from __future__ import annotations

from pdtrace.errors import UnknownFormat
from pdtrace.model import Head, Match, Sink, Source


def sniff(head: Head) -> Match | None:
    """None: the spans are read by `otlp`."""
    return None


def read(source: Source, out: Sink) -> None:
    """Never called."""
    raise UnknownFormat(
        f"{source.path}: this collector reads no files", "spans are read by the otlp collector"
    )
