"""NVIDIA Dynamo's request trace files (DYN_REQUEST_TRACE=1): one record per request.

Source: ai-dynamo/dynamo lib/llm/src/request_trace, 1.6.1; files `<prefix>.jsonl` or rotated
`<prefix>.NNNNNN.jsonl.gz`. Clock: wall, milliseconds; durations inside a record are finer. A
request is keyed by Dynamo's `request_id`, the same as in spans and logs. No prompt text is kept.
"""

from __future__ import annotations

from pdtrace.model import Head, Match, Sink, Source

from ._common import json_records
from ._dynamo_request_trace import SCHEMA, Rows
from ._dynamo_schema import carries_schema, event_of

TITLE = "NVIDIA Dynamo"

REASON_OTHER = "no request trace record"


def sniff(head: Head) -> Match | None:
    """JSON lines that name the schema."""
    return Match("exact", "Dynamo request trace") if carries_schema(head, SCHEMA) else None


def read(source: Source, out: Sink) -> None:
    """Legs of the frontend and the workers, the placed prefill, and what the record states of
    itself."""
    out.unit("record")
    rows = Rows(None)  # the frontend does not say its name
    for ordinals, objects in json_records(source, out):
        for ordinal, record in zip(ordinals, objects, strict=True):
            event = event_of(record, SCHEMA)
            reason = REASON_OTHER if event is None else rows.take((None, ordinal, event))
            if reason:
                out.skip(ordinal, reason)
        rows.flush(out)
    rows.finish(out)
