"""What a finding says: the record that the wording rooms fill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdtrace.numbers import duration, share
from pdtrace.records import dataclass

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Words:
    """Title and detail of a finding, what it assumes and what to try."""

    title: str
    detail: str
    assumptions: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()


PHASE_WORDS = {
    "network": "the network",
    "frontend": "the front end",
    "router": "the router",
    "queue": "waiting for the engine",
    "kv_load": "loading KV from another cache tier",
    "prefill": "prefill",
    "kv_wait": "waiting for KV",
    "kv_transfer": "the KV transfer",
    "decode_queue": "waiting for the first decode step",
    "decode": "decode",
    "stream_out": "the way from the engine to the user",
    "retry": "failed attempts",
    "unattributed": "time that nobody accounts for",
}


def phase(name: str | None) -> str:
    """A phase in words."""
    return PHASE_WORDS.get(name or "", name or "an unknown phase")


def sentence(*parts: str | None) -> str:
    """The parts that there are, joined by blanks."""
    return " ".join(part for part in parts if part)


def of_ttft(row: Row) -> str:
    """The share of a wait: of the time before first tokens, else of the whole durations."""
    if row["share"] is not None:
        return f"{share(row['share'])} of the time before first tokens"
    return f"{share(row['share_of_e2e_ratio'])} of the requests' time"


def wait_spread(row: Row) -> str:
    """Median and tail of a wait, request by request."""
    return (
        f"Per request p50 {duration(row['wait_p50_ms'])}, p90 {duration(row['wait_p90_ms'])}, "
        f"p99 {duration(row['wait_p99_ms'])}."
    )
