"""Trace requests of protobuf as rows: spans that are written alike many at a time, the rest by ptars."""

from __future__ import annotations

import numpy as np

from . import _otlp_decoders as decoders
from ._otlp_columns import SpanRows, span_rows
from ._otlp_proto_columns import columns
from ._otlp_proto_steps import Wire
from ._otlp_proto_walk import Steps, outline
from ._otlp_resources import Resources
from ._otlp_rest import Placed

LEAST_SPANS = 1000  # of a block, and of a scope on average: for fewer the general way is as quick
LEAST_OF_SCOPE = 4


def rows(
    messages: list[bytes], steps: Steps, resources: Resources, *, keep_content: bool
) -> SpanRows | None:
    """The spans of trace requests; None where Google's protobuf must be asked."""
    found = _alike(messages, steps)
    for texts, placed in ([found] if found is not None else []) + [(messages, None)]:
        arrow = decoders.resource_spans(texts)
        if arrow is None:
            continue
        try:
            return span_rows(arrow, resources, keep_content=keep_content, placed=placed)
        except ValueError:  # a value inside is damaged
            continue
    return None


def _alike(messages: list[bytes], steps: Steps) -> tuple[list[bytes], Placed | None] | None:
    """The messages without the spans that could be read many at a time, and those; None where that gains nothing."""
    if not steps.worth:
        return None
    wire = Wire(messages)
    found = outline(messages, wire)
    if found is None or len(found.starts) < LEAST_SPANS:
        return None
    scopes = int(found.scope[-1]) + 1
    if len(found.starts) < LEAST_OF_SCOPE * max(scopes, len(messages)):
        return None
    last, taken = steps.walk(wire, found.starts, found.ends)
    read = last >= 0
    steps.count(len(read), int(read.sum()))
    if not read.any():
        return None
    try:
        spans = columns(wire, found.starts, last, steps.places, taken)
    except ValueError:  # pyarrow's errors too
        return None
    left = np.flatnonzero(~read)
    placed = Placed(
        spans,
        found.scope[read],
        np.flatnonzero(read),
        np.ones(len(left), bool),
        left,
        once=False,
    )
    return found.rest(wire.raw, ~read), placed
