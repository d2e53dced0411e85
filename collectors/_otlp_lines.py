"""OTLP/JSON as blocks of whole lines, or as one document: what decodes each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field
from typing import IO

import pyarrow as pa

from pdtrace.records import dataclass

from . import _otlp_json as otlp_json
from ._otlp_alike import Patterns
from ._otlp_beside import Helper
from ._otlp_bytes import PADDING
from ._otlp_columns import SpanRows, span_rows
from ._otlp_json import Lines, Spellings
from ._otlp_json_walk import canonical
from ._otlp_lifted import lift
from ._otlp_requests import Requests, requests_of_document, requests_of_lines
from ._otlp_resources import Resources
from ._otlp_rest import rests


@dataclass
class Decoded:
    """One block, decoded: span rows, and objects of the other signals."""

    spans: SpanRows | None = None
    requests: Requests = field(default_factory=Requests)


Work = Callable[[Resources, bool], Decoded]


def json_work(start: bytes, stream: IO[bytes], helper: Helper | None = None) -> Iterator[Work]:
    """What decodes each block of a file that begins so; a helper may have decoded some of them already."""
    if otlp_json.is_lines(start):
        patterns = Patterns()
        if helper is not None:
            helper.learn = patterns.adopt
        for number, (lines, work) in enumerate(_blocks_work(start, stream, patterns)):
            mine = helper is None or not helper.has_begun(number)
            yield work if helper is None or mine else _helped(helper, number, lines, work)
        return
    parts = [start]
    while block := stream.read(otlp_json.BLOCK_BYTES):
        parts.append(block)
    yield _document_work(b"".join(parts))


def _blocks_work(
    start: bytes, stream: IO[bytes], patterns: Patterns
) -> Iterator[tuple[Lines, Work]]:
    """Blocks of whole lines, each with what decodes it."""
    spellings = Spellings()
    for lines in otlp_json.line_blocks(start, stream, PADDING):
        yield lines, lines_work(lines, spellings, patterns)


def _helped(helper: Helper, number: int, lines: Lines, work: Work) -> Work:
    def decode(resources: Resources, keep_content: bool) -> Decoded:
        given = helper.result(number, lines)
        if given is None:
            return work(resources, keep_content)
        resources.adopt(given.resources)
        return Decoded(SpanRows(given.spans, given.withheld))

    return decode


def lines_work(lines: Lines, spellings: Spellings, patterns: Patterns) -> Work:
    """What decodes these lines."""

    def decode(resources: Resources, keep_content: bool) -> Decoded:
        block = lines.text()
        for rest in rests(block, patterns):
            for take in (lift, _as_it_is):
                text, lifted = take(rest.text)
                if text is None:
                    continue
                lists = spellings.parse(text, lifted=lifted is not None or rest.spans is not None)
                if lists is None:
                    continue
                placed = rest.place(lists) if rest.spans is not None else None
                if rest.spans is not None and placed is None:
                    continue
                try:
                    rows = span_rows(
                        lists.flatten(),
                        resources,
                        keep_content=keep_content,
                        lifted=lifted,
                        placed=placed,
                    )
                except pa.ArrowInvalid:  # integers that are none, or do not fit
                    continue
                return Decoded(rows)
        return walked(requests_of_lines(block, cut=lines.cut), resources, keep_content)

    return decode


def _as_it_is(block: bytes) -> tuple[bytes, None]:
    return block, None


def _document_work(data: bytes) -> Work:
    def decode(resources: Resources, keep_content: bool) -> Decoded:
        if data.lstrip()[:1] == b"{":
            arrow = otlp_json.resource_spans(data, otlp_json.spelling_of(data), pretty=True)
            if arrow is not None:
                try:
                    return Decoded(span_rows(arrow, resources, keep_content=keep_content))
                except pa.ArrowInvalid:
                    pass
        return walked(requests_of_document(data), resources, keep_content)

    return decode


def walked(requests: Requests, resources: Resources, keep_content: bool) -> Decoded:
    """What a walk over Python objects gave."""
    spans = None
    if requests.spans:
        spans = span_rows(canonical(requests.spans), resources, keep_content=keep_content)
    return Decoded(spans, requests)
