"""vLLM production stack's router: its log says which engine each request went to, when, and after how long.

Source: vllm-project/production-stack src/vllm_router (services/request_service/request.py, log.py), 2025
to 2026. `[2025-09-19 07:18:11,808] INFO: Routing request ID with session id S to URL at EPOCH, process
time = SECONDS (request.py:303:...)`: the line's own stamp is local time, the epoch in it is not, and is taken.
Clock: wall. The id goes to the engines as X-Request-Id, which put their own prefix before it. Of P/D pairs it
says how long the prefill call took (never the user's first token, whatever the line calls it) and the
whole duration. Access lines of the same process have no time and are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from pdtrace.model import Head, Match, Sink, Source

from ._common import number
from ._loglines import head_texts, log_batches

TITLE = "vLLM production stack's router"

REASON_OTHER = "log line that says nothing about requests"
REASON_PART = "line of a request, kept in its leg"

_ID = r"(?P<id>[\w.:-]+)"
_ROUTED = (
    rf"\bRouting request {_ID}(?: with session id (?P<session>.+?))? to (?:https?://)?(?P<address>[^\s/]+)\S*"
    r" at (?P<at>\d{9,11}(?:\.\d+)?), process time = (?P<took>\d+(?:\.\d+)?(?:e-?\d+)?)"
)
_PREFILL = rf"(?:\[?{_ID}\]?) (?:prefill time \(TTFT\): (?P<old>\d+(?:\.\d+)?)|Prefill completed in (?P<new>\d+(?:\.\d+)?)s)"
_WHOLE = rf"\[{_ID}\] Orchestrated .*\btotal time = (?P<whole>\d+(?:\.\d+)?)s"
_NOT_A_SESSION = ("None", "")
_RESOLUTION_NS = 1_000_000
_PREFILL_MEANS = "the router's call of the prefill worker, from sending it to its answer"

_LEGS: dict[str, Any] = {
    "record": pl.Int64, "leg": pl.String, "worker": pl.String, "observer": pl.String, "role": pl.String,
    "role_basis": pl.String, "container": pl.Boolean, "request_id": pl.String, "external_id": pl.String,
    "session": pl.String, "clock": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64, "resolution_ns": pl.Int64,
    "e2e_ms": pl.Float64, "status": pl.String,
}  # fmt: skip


def sniff(head: Head) -> Match | None:
    """A line with which that router hands a request on."""
    if b"Routing request " not in head.data:
        return None
    lines = pl.Series(head_texts(head), dtype=pl.String)
    return Match("exact", "log of vLLM's router") if lines.str.contains(_ROUTED).any() else None


def read(source: Source, out: Sink) -> None:
    """A leg and a choice for each request that was handed on."""
    out.unit("line")
    routers: dict[str, str] = {}
    requests: dict[tuple[str, str], dict[str, Any]] = {}
    for batch in log_batches(source):
        lines = batch.filter(pl.col("text").str.strip_chars() != "")
        out.read(lines.height)
        found = lines.select(
            "record", "stream",
            pl.col("text").str.extract_groups(_ROUTED).alias("routed"),
            pl.col("text").str.extract_groups(_PREFILL).alias("prefill"),
            pl.col("text").str.extract_groups(_WHOLE).alias("done"),
        )  # fmt: skip
        for record, stream, routed, prefill, done in found.iter_rows():
            worker = routers.get(stream)
            if worker is None and routed["id"]:
                file = f"{source.path}#{stream}" if stream else source.path
                worker = routers[stream] = out.worker(
                    {"file": file}, role="router", role_basis="log", engine="vLLM", name=stream or source.name
                )  # fmt: skip
            reason = _take(requests, stream, record, routed, prefill, done)
            if reason:
                out.skip(record, reason)
    _write(source, out, routers, requests)


def _take(
    requests: dict[tuple[str, str], dict[str, Any]], stream: str, record: int,
    routed: Mapping[str, Any], prefill: Mapping[str, Any], done: Mapping[str, Any],
) -> str:  # fmt: skip
    """Keep what one line says; why it makes no row of its own, else ''."""
    if routed["id"]:
        choice = {"record": record, **routed}
        requests.setdefault((stream, routed["id"]), {**choice, "choices": []})["choices"].append(
            choice
        )
        return ""
    known = requests.get((stream, prefill["id"] or done["id"] or ""))
    if known is None:
        return REASON_OTHER
    if prefill["id"]:
        known["prefill_s"] = number(prefill["old"] or prefill["new"])
    if done["id"]:
        known["whole_s"] = number(done["whole"])
    return REASON_PART


def _write(
    source: Source, out: Sink, routers: Mapping[str, str], requests: dict[tuple[str, str], dict[str, Any]]
) -> None:  # fmt: skip
    legs, choices, waits, told = [], [], [], []
    for (stream, request_id), known in requests.items():
        at_ns = _instant(known["at"])
        start_ns = at_ns - round(float(known["took"]) * 1e9)
        leg = f"{source.path}#{stream}/{request_id}"
        whole_s = known.get("whole_s")
        session = known["session"]
        legs.append({
            "record": known["record"], "leg": leg, "worker": routers[stream], "observer": "router", "role": "router",
            "role_basis": "log", "container": False, "request_id": request_id, "external_id": request_id,
            "session": None if session in _NOT_A_SESSION else session, "clock": "wall", "start_ns": start_ns,
            "end_ns": None if whole_s is None else start_ns + round(whole_s * 1e9), "resolution_ns": _RESOLUTION_NS,
            "e2e_ms": None if whole_s is None else whole_s * 1e3,
            "status": "unknown" if whole_s is None else "completed",
        })  # fmt: skip
        # the prefill worker and then the decode worker, or another engine after one that failed
        choices += [
            {
                "record": choice["record"], "leg": leg, "request_id": request_id, "router": routers[stream],
                "time_ns": _instant(choice["at"]), "worker": f"address:{choice['address']}",
                "duration_ms": float(choice["took"]) * 1e3 if place == 0 else None,
            }
            for place, choice in enumerate(known["choices"])
        ]  # fmt: skip
        waits.append({
            "leg": leg, "detail": "router_decide", "start_ns": start_ns, "end_ns": at_ns, "basis": "measured",
            "clock": "wall", "resolution_ns": _RESOLUTION_NS, "censored": False,
            "semantics": "request received to the choice of an engine",
        })  # fmt: skip
        if known.get("prefill_s") is not None:
            told.append({"leg": leg, "quantity": "prefill_call", "value": known["prefill_s"], "unit": "s", "definition": _PREFILL_MEANS})  # fmt: skip
    if legs:
        out.add("legs", pl.DataFrame(legs, schema=_LEGS))
        out.add("decisions", choices)
        out.add("intervals", waits, record=None)
    if told:
        out.add("reported", told, record=None)


def _instant(epoch: str) -> int:
    """Epoch seconds as nanoseconds; a double holds microseconds of our time."""
    return round(float(epoch) * 1e6) * 1_000
