"""Spans of many small files decoded at once: what a batch costs is the same for one span as for thousands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pdtrace.model import Sink, Source

from ._otlp_columns import span_rows
from ._otlp_items import parents
from ._otlp_json_walk import canonical
from ._otlp_requests import Requests
from ._otlp_resources import Resources


def only_spans(requests: Requests) -> bool:
    """Whether nothing but spans was found, and nothing was wrong."""
    return bool(requests.spans) and not (requests.logs or requests.metrics or requests.problems)


def add_spans(files: Sequence[tuple[Source, Sink, Requests]]) -> bool:
    """Put the spans of these files into their sinks, as one batch; False where they cannot be told apart.

    Each row says which file and which record of it made it. What was withheld of all is told by the first file.
    """
    items = [item for _, _, requests in files for item in requests.spans]
    arrow = canonical(items)
    if len(arrow) != len(items):
        return False
    resources = Resources()
    rows = span_rows(arrow, resources, keep_content=files[0][0].keep_content)
    counts = _spans_of(arrow, [len(requests.spans) for _, _, requests in files])
    if sum(counts) != rows.spans.num_rows:
        return False
    for (_, out, _), count in zip(files, counts, strict=True):
        if count:
            out.unit("span")
            out.read(count)
    first = files[0][1]
    if rows.spans.num_rows:
        numbers = np.array([source.number for source, _, _ in files], np.int32)
        begin = np.cumsum(counts) - counts
        record = np.arange(sum(counts)) - np.repeat(begin, counts)
        table = rows.spans.append_column("source", pa.array(np.repeat(numbers, counts)))
        first.add("spans", table.append_column("record", pa.array(record)))
    if (known := resources.take()) is not None:
        first.add("resources", known, record=None)
    if rows.withheld:
        first.fact(None, "content_withheld", rows.withheld)
    return True


def _spans_of(arrow: pa.StructArray, messages: Sequence[int]) -> np.ndarray:
    """How many spans each file has; `messages`: how many ResourceSpans each has."""
    scopes = arrow.field("scopeSpans")
    spans = scopes.flatten().field("spans")
    message = parents(scopes)[parents(spans)]
    of_message = np.repeat(np.arange(len(messages)), messages)
    found: np.ndarray = np.bincount(of_message[message], minlength=len(messages))
    return found
