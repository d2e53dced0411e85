"""Tables of requests of any origin: CSV, TSV, Markdown, JSON, Parquet; also client logs.

Also read by the same rules: LiteLLM spend logs and logging payloads, llmperf's individual
responses, the Azure 2023, Mooncake and BurstGPT traces, home-made client or proxy logs with
instants of chunks. A row is one request as its writer saw it. Units come from headers, cells, or
from what the table itself supports (said as fact unit_guess:*). Prompt and answer columns are
never stored.
"""

from __future__ import annotations

from pdtrace.model import Head, Match, Sink, Source

TITLE = (
    "Tables of requests (CSV, TSV, Markdown, JSON lines, Parquet; LiteLLM, llmperf, client logs)"
)
AT_MOST = "generic"  # the strength of every match: the registry asks this collector last


def sniff(head: Head) -> Match | None:
    """A table with at least two request columns, one of them a latency or a token count."""
    from . import _table_reader  # twelve modules: only for a file that nobody else claims

    return _table_reader.sniff(head)


def read(source: Source, out: Sink) -> None:
    """Rows as legs of the observer that wrote the table."""
    from . import _table_reader

    _table_reader.read(source, out)
