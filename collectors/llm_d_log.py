"""llm-d's logs: when the endpoint picker received a request, sent it on and ended it, whom it chose; failures of the sidecar.

Source: llm-d/llm-d-router pkg/epp/handlers/server.go, pkg/epp/requestcontrol/director.go, pkg/epp/framework (pickers),
pkg/sidecar/proxy, 0.8 and later; gateway-api-inference-extension before. Received and sent are written at -v 2 (1 before 2026),
`Request handled` with the endpoint at -v 3, scores at -v 4. Keyed by x-request-id, which Envoy gives and the pods see. Clock: wall.
Bodies that -v 5 writes are never looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import polars as pl

from pdtrace.model import WALL, Head, Match, Sink, Source

from ._common import CUT_OFF, line_batches
from ._llmd_lines import Line, endpoint_of, line_of, scores_of
from ._llmd_names import ENGINE, TITLE

__all__ = ["SWITCHES", "TITLE", "read", "sniff"]
SWITCHES = {
    "router_time": "the endpoint picker's log at -v 2 or more, with stamps finer than a second (--zap-time-encoding=epoch)",
    "router_decisions": "the endpoint picker's log at -v 3 (endpoints) or -v 4 (candidates and scores)",
}

REASON_OTHER = "log line that says nothing about requests"
REASON_PART = "line of a request, kept in its leg"
_FINE_NS = 1_000_000
_RECEIVED = "EPP received request"
_SENT = "EPP sent request body response(s) to proxy"
_ENDED = "EPP sent response body back to proxy"
_HANDLED = "Request handled"
_PICKED = re.compile(r"^Selecting (?:pods|endpoints) from candidates (?P<how>.*)$")
_SIDECAR = {
    "retrying prefill request": ("warning", "the sidecar tries prefill again"),
    "prefill request failed": ("failure", "a prefill request failed"),
}
_FALLBACK = re.compile(r"fall(?:ing|s)? ?back to decode", re.IGNORECASE)

_SIDECARS = re.compile(
    rb'"logger"\s*:\s*"(?:proxy server|routing-sidecar)[^"]*"|"msg"\s*:\s*"(?:running NIXL protocol|sending (?:prefill )?request to)'
)
_PICKERS = re.compile(
    rb'"(?:msg|body)"\s*:\s*"EPP (?:received|sent) |\tEPP (?:received|sent) re'
    rb'|"caller"\s*:\s*"[^"]*(?:requestcontrol/|handlers/server\.go|scheduler_profile|/epp/)'
)

_LEGS: dict[str, Any] = {
    "record": pl.Int64, "leg": pl.String, "worker": pl.String, "observer": pl.String, "role": pl.String,
    "role_basis": pl.String, "container": pl.Boolean, "request_id": pl.String, "external_id": pl.String,
    "clock": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64, "resolution_ns": pl.Int64, "e2e_ms": pl.Float64,
    "model": pl.String, "status": pl.String,
}  # fmt: skip


def sniff(head: Head) -> Match | None:
    """Lines that only the picker or the sidecar writes."""
    if _PICKERS.search(head.data):
        return Match("exact", "llm-d endpoint picker log")
    return Match("exact", "llm-d routing sidecar log") if _SIDECARS.search(head.data) else None


def read(source: Source, out: Sink) -> None:
    """A leg, its wait and its choice for each request that the picker received; failures."""
    out.unit("line")
    requests: dict[str, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    sidecar = True
    # Line by line: every message has fields of its own.
    for record, raw, cut in _lines(source):
        out.read(1)
        line = line_of(raw)
        if line is None:
            out.skip(record, CUT_OFF if cut else REASON_OTHER)
            continue
        reason = _take(requests, record, line)
        sidecar = sidecar and reason is None and _PICKERS.search(raw) is None
        if reason is None and (event := _event(record, line)):
            events.append(event)
        elif reason != "":
            out.skip(record, reason or REASON_OTHER)
    if not requests and not events:
        return
    role = "router" if sidecar else "gateway"
    worker = out.worker({"file": source.path}, role=role, role_basis="log", engine=ENGINE, name=source.name)  # fmt: skip
    if events:
        out.add("events", [{"worker": worker, **event} for event in events])
    _write(source, out, worker, requests)


def _lines(source: Source) -> Iterator[tuple[int, bytes, bool]]:
    for batch in line_batches(source):
        for place, raw in enumerate(batch.lines):
            if raw.strip():
                yield batch.first + place, raw, batch.cut and place == len(batch.lines) - 1


def _take(requests: dict[str, dict[str, Any]], record: int, line: Line) -> str | None:
    """Keep what a line says of its request: '' where it begins one, a reason where it adds to one, None for other lines."""
    name, message = line.request, line.message
    if name is None or line.time_ns is None:
        return None
    known = requests.get(name)
    if message == _RECEIVED:
        if known is not None and "ended" not in known:
            return REASON_PART
        if known is not None:  # its id is used again: that is another request
            requests[f"{name}\n{known['record']}"] = known
            del requests[name]
        requests[name] = {"record": record, "received": line, "again": known is not None}
        return ""
    picked = _PICKED.match(message)
    if message not in (_SENT, _ENDED, _HANDLED) and picked is None:
        return None
    if known is None:  # the log begins in the middle of it
        return REASON_OTHER
    if message == _SENT:
        known.setdefault("sent", line)
    elif message == _ENDED:
        known["ended"] = line
    elif message == _HANDLED:
        known["handled"] = line
    elif picked is not None:
        known.setdefault("picks", []).append((picked["how"], line))
    return REASON_PART


def _event(record: int, line: Line) -> dict[str, Any] | None:
    """Failures. Messages are words of the program; what an error quotes is left out."""
    if line.message in _SIDECAR:
        kind, detail = _SIDECAR[line.message]
    elif _FALLBACK.search(line.message):
        kind, detail = "warning", "the request went to decode alone: prefill had failed"
    elif line.level in ("error", "dpanic", "panic", "fatal"):
        kind, detail = "failure", line.message[:120]
    else:
        return None
    return {
        "record": record, "time_ns": line.time_ns, "resolution_ns": line.resolution_ns, "kind": kind,
        "severity": "critical" if line.level in ("panic", "fatal", "dpanic") else "warning",
        "request_id": line.request, "detail": detail,
    }  # fmt: skip


def _write(source: Source, out: Sink, worker: str, requests: dict[str, dict[str, Any]]) -> None:
    legs, waits, choices, told, pods = [], [], [], [], set()
    for key, known in requests.items():
        name = key.partition("\n")[0]
        leg = f"{source.path}/{name}" + (f"#{known['record']}" if known["again"] else "")
        legs.append(_leg(leg, worker, name, known))
        waits += _waits(leg, known)
        for choice, score in _choices(leg, worker, name, known):
            choices.append(choice)
            if (choice["worker"] or "").startswith("pod:"):
                pods.add(choice["worker"])
            if score is not None:
                told.append({
                    "leg": leg, "quantity": "best_score", "value": score, "unit": "1",
                    "definition": "llm-d endpoint picker: weighted sum of the scorers for the best candidate, more is better",
                })  # fmt: skip
    if legs:
        out.add("legs", pl.DataFrame(legs, schema=_LEGS))
    for table, rows in (("intervals", waits), ("reported", told)):
        if rows:
            out.add(table, pl.DataFrame(rows, infer_schema_length=None), record=None)
    if choices:
        out.add("decisions", pl.DataFrame(choices, infer_schema_length=None))
    for pod in sorted(pods):
        out.add(
            "worker_aliases",
            [{"worker": pod, "kind": "pod", "value": pod.removeprefix("pod:")}],
            record=None,
        )


def _leg(leg: str, worker: str, name: str, known: dict[str, Any]) -> dict[str, Any]:
    received, ended = known["received"], known.get("ended")
    end = None if ended is None else ended.time_ns
    fine = received.resolution_ns is not None and received.resolution_ns <= _FINE_NS
    model = next(
        (line.fields[key] for line in (known.get("handled"), known.get("sent")) if line
         for key in ("targetModel", "targetModelName", "resolvedTargetModel", "modelName", "model")
         if isinstance(line.fields.get(key), str)), None,
    )  # fmt: skip
    return {
        "record": known["record"], "leg": leg, "worker": worker, "observer": "gateway", "role": "gateway",
        "role_basis": "log", "container": False, "request_id": name, "external_id": name, "clock": WALL,
        "start_ns": received.time_ns, "end_ns": end, "resolution_ns": received.resolution_ns,
        "e2e_ms": (end - received.time_ns) / 1e6 if fine and end is not None else None,
        "model": model, "status": "unknown" if ended is None else "completed",
    }  # fmt: skip


def _waits(leg: str, known: dict[str, Any]) -> list[dict[str, Any]]:
    """From received to sent on; where the picker wrote when it began to pick, that ends the wait."""
    received, sent = known["received"], known.get("sent")
    if sent is None or max(received.resolution_ns, sent.resolution_ns or 0) > _FINE_NS:
        return []
    picks = [line.time_ns for _, line in known.get("picks", ()) if line.time_ns is not None]
    picked = min(picks) if picks else None
    if picked is None or not received.time_ns <= picked <= sent.time_ns:
        parts = [("router_decide", received.time_ns, sent.time_ns, "received to sent on: body, flow control, choice")]  # fmt: skip
    else:
        parts = [
            ("router_queue", received.time_ns, picked, "received to its pick: body, flow control, scores"),
            ("router_decide", picked, sent.time_ns, "pick to sent on"),
        ]  # fmt: skip
    return [
        {
            "leg": leg, "detail": detail, "start_ns": start, "end_ns": end, "basis": "measured", "clock": WALL,
            "resolution_ns": received.resolution_ns, "censored": False, "semantics": semantics,
        }
        for detail, start, end, semantics in parts
    ]  # fmt: skip


def _choices(
    leg: str, worker: str, name: str, known: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], float | None]]:
    """The endpoint that was handed the request; else the best scored, where the picker takes the best and one is best."""
    handled: Line | None = known.get("handled")
    chosen = endpoint_of(handled.fields.get("endpoint")) if handled else None
    picks = known.get("picks", [])
    row = {
        "record": known["record"], "leg": leg, "request_id": name, "router": worker, "time_ns": None, "worker": chosen,
        "candidates": None,
    }  # fmt: skip
    if not picks:
        if handled is not None:
            yield row | {"time_ns": handled.time_ns}, None
        return
    for how, line in picks:
        count, best, holder = scores_of(line.fields)
        sure = holder if "max score" in how else None
        # Of several profiles (prefill and decode) only one was handed the request.
        whom = chosen if chosen and len(picks) == 1 else sure
        yield row | {"time_ns": line.time_ns, "worker": whom, "candidates": count}, best
