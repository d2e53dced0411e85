"""What a finding says: the record that the wording rooms fill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
