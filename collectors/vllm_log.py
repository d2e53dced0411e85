"""vLLM server logs of all eras: steps, periodic samples, requests, alarms, configuration.

Source: vllm-project/vllm 0.6 to 0.32, text (`INFO 10-16 17:11:24 metrics.py:351] ...`, with or
without `(APIServer pid=N) ` in front) and JSON (objects with message and asctime or timestamp).
Clock: wall, local time of day without year, zone and fractions; carriers (docker, Kubernetes,
journald) may stamp finer.
"""

from __future__ import annotations

from pdtrace.model import Head, Match, Sink, Source

from ._loglines import head_texts, log_batches
from ._vllm_log_frame import vllm_form

TITLE = "vLLM"


def sniff(head: Head) -> Match | None:
    """A log whose head has lines with vLLM's prefix and words; uvicorn's alone say nothing."""
    if not any(word in head.data for word in (b".py:", b'"message"', b'"MESSAGE"')):
        return None
    form = vllm_form(head_texts(head))
    return Match("exact", f"vLLM server log{form}") if form is not None else None


def read(source: Source, out: Sink) -> None:
    """Read one log; requests are put together at its end."""
    from ._vllm_log_reader import Reader  # nine modules: only for who has such a log

    out.unit("line")
    reader = Reader(source, out)
    for batch in log_batches(source):
        reader.batch(batch)
    reader.close()
