"""LMCache's record of lookups (--lookup-hash-log-dir): which chunks of which prompts were asked for, in what order.

Source: LMCache 0.4.7 to 0.5.6 (PyPI wheels), files `lookup_hashes_<date>_<time>_<number>.jsonl` of the
multi-process server. Clock: wall, seconds. One line a lookup: request_id (the engine's), model_name,
chunk_size, seq_len (tokens of the prompt) and chunk_hashes, each over all tokens up to the end of its
chunk. A request that the scheduler tries again is looked up again: the first lookup counts. The server stands
before the engines that share it, so it is read as a front end: it does not say which engine asked.
It says nothing of answers, waits or ends: a request of it alone has an arrival and a prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import polars as pl

from pdtrace.model import Head, Match, Sink, Source

from ._common import integer, json_records, number

TITLE = "LMCache"

REASON_OTHER = "no lookup of chunks"
REASON_AGAIN = "looked up again"

_LEGS: dict[str, pl.DataType | type[pl.DataType]] = {
    "leg": pl.String, "record": pl.Int64, "worker": pl.String, "observer": pl.String, "clock": pl.String,
    "request_id": pl.String, "model": pl.String, "start_ns": pl.Int64, "resolution_ns": pl.Int64,
    "prompt_tokens": pl.Int64, "status": pl.String,
}  # fmt: skip
_BLOCKS: dict[str, pl.DataType | type[pl.DataType]] = {
    "leg": pl.String, "record": pl.Int64, "block_tokens": pl.Int64, "hashes": pl.List(pl.UInt64),
}  # fmt: skip
_RESOLUTION_NS = 1_000_000
_LATEST_S = 9e9  # nanoseconds of more do not fit into 64 bits


def sniff(head: Head) -> Match | None:
    """JSON lines with the hashes of chunks and the size of one."""
    start = head.data.lstrip()[:65_536]
    keys = (b'"chunk_hashes"', b'"chunk_size"', b'"seq_len"')
    if start[:1] == b"{" and all(key in start for key in keys):
        return Match("exact", "LMCache lookups (hashes of the chunks of each prompt)")
    return None


def read(source: Source, out: Sink) -> None:
    """A leg for each request that was looked up, with the hashes of its prompt."""
    out.unit("lookup")
    worker: str | None = None
    seen: set[str] = set()
    for ordinals, objects in json_records(source, out):
        legs, blocks = [], []
        for ordinal, record in zip(ordinals, objects, strict=True):
            hashes = _hashes(record.get("chunk_hashes"))
            tokens = _count(record.get("seq_len"))
            if hashes is None or tokens is None:
                out.skip(ordinal, REASON_OTHER)
                continue
            request = record.get("request_id")
            if isinstance(request, str) and request in seen:
                out.skip(ordinal, REASON_AGAIN)
                continue
            if isinstance(request, str):
                seen.add(request)
            worker = worker or out.worker(
                {"file": source.path}, role="frontend", role_basis="log", name=source.name
            )
            legs.append(_leg(source, ordinal, record, worker, tokens))
            size = _count(record.get("chunk_size")) or None
            blocks.append(
                {"leg": legs[-1]["leg"], "record": ordinal, "block_tokens": size, "hashes": hashes}
            )
        if legs:
            out.add("legs", pl.DataFrame(legs, schema=_LEGS))
            out.add("prefix_blocks", pl.DataFrame(blocks, schema=_BLOCKS))


def _leg(
    source: Source, ordinal: int, record: Mapping[str, Any], worker: str, tokens: int
) -> dict[str, Any]:
    request, model = record.get("request_id"), record.get("model_name")
    stamp = number(record.get("timestamp"))
    # a double of seconds holds microseconds
    start = None if stamp is None or abs(stamp) > _LATEST_S else round(stamp * 1e6) * 1000
    return {
        "leg": f"{source.path}#{ordinal}", "record": ordinal, "worker": worker, "observer": "frontend", "clock": "wall",
        "request_id": request if isinstance(request, str) else None,
        "model": model if isinstance(model, str) else None,
        "start_ns": start, "resolution_ns": _RESOLUTION_NS,
        "prompt_tokens": tokens, "status": "unknown",
    }  # fmt: skip


def _count(told: object) -> int | None:
    found = integer(told)
    return found if found is not None and 0 <= found < 2**63 else None


def _hashes(told: object) -> list[int] | None:
    """Hashes as numbers of 64 bits; longer ones are hashed once more. None for anything else."""
    if not isinstance(told, list):
        return None
    found = []
    for item in told:
        text = item[2:] if isinstance(item, str) and item[:2].lower() == "0x" else item
        if type(text) is int and 0 <= text < 2**64:
            found.append(text)
        elif isinstance(text, str) and text:
            try:
                value = int(text, 16)
            except ValueError:
                return None
            if value < 0:
                return None
            long = value >= 2**64
            found.append(
                int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) if long else value
            )
        else:
            return None
    return found
