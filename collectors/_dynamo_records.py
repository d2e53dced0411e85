"""What single log records of Dynamo say: router choices, requests, failures, settings, alarms.

The same records are lines of the JSONL log and OTLP log records; both come here as Entry. Details
of events are the fixed words of a message, cut before the first value: never text of a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import polars as pl

from pdtrace.model import Sink

from ._common import integer, number
from ._dynamo_names import (
    FACT_BLOCK_SIZE,
    FACT_LOG,
    GENERATE,
    SLACK_NS,
    STATUSES,
    TTFT_REPORTED,
)
from ._dynamo_settings import settings

MICROSECOND = 1_000

USED = ""  # verdict: the record gave a row
REASON_HARMLESS = "message known to be harmless"
REASON_NOTHING = "log line that says nothing about requests"
REASON_PAIRED = "end of a request, told with the line that began it"
REASON_TOLD = "line of a worker's request, told by its span"
REASON_SETTING = "settings, kept as facts"
REASON_IN_LOG = "log record, told by the JSONL log of the same service"
REASON_ENTRY = "start of a span, without its name and end"
REASON_NAMELESS = "line of a worker's request that does not name the worker"
REASON_SPAN = "start of a span whose end is in the log"

# Messages at WARN or ERROR that come with every healthy run (1.6.1).
_HARMLESS = ("Distributed Trace Context not found", "Removing worker ", "monitor_instance_source: ")
_JOINED = re.compile(r"^Adding worker WorkerWithDpRank \{ worker_id: (\d+)")
_FIXED = re.compile(r"^[^:{}\[\]()/\\\"'`=<>\d]+")


@dataclass(frozen=True)
class Entry:
    """One log record, whatever carried it."""

    source: int | None
    record: int
    time_ns: int | None
    level: str
    target: str
    message: str
    fields: Mapping[str, Any]
    worker: str | None


@dataclass
class Rows:
    """Gathers the rows that records give, and the requests that have begun."""

    tables: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {"legs": [], "decisions": [], "events": [], "reported": []}
    )
    facts: dict[tuple[str | None, str], str] = field(default_factory=dict)
    spans_seen: bool = False  # the log tells spans: they are the better legs of workers
    frontend_seen: bool = False  # a request line of an HTTP frontend was seen
    service: str | None = None
    block_size: int | None = None
    _window: tuple[int, int] | None = None
    _open: dict[str, Entry] = field(default_factory=dict)

    def take(self, entry: Entry) -> str:
        """Use one record; returns USED or why it gave nothing."""
        if entry.time_ns is not None:
            first, last = self._window or (entry.time_ns, entry.time_ns)
            self._window = (min(first, entry.time_ns), max(last, entry.time_ns))
        used = self._settings(entry)
        if entry.message == "SPAN_FIRST_ENTRY":  # as OTLP log records tell it: ids and no name
            return REASON_ENTRY
        if entry.message == "Selected worker":
            return self._selected(entry)
        if entry.message == "request received" and entry.fields.get("request_id"):
            return self._received(entry)
        if entry.message == "request completed" and entry.fields.get("request_id"):
            return self._completed(entry)
        if entry.level in ("WARN", "ERROR", "FATAL"):
            return self._alarm(entry)
        return REASON_SETTING if used else REASON_NOTHING

    def flush(self, out: Sink) -> None:
        """Hand over what was gathered."""
        for table, rows in self.tables.items():
            if rows:
                # Without a source of its own a row gets the one that is being read.
                out.add(
                    table,
                    [
                        {k: v for k, v in row.items() if k != "source" or v is not None}
                        for row in rows
                    ],
                )
                rows.clear()

    def finish(self, out: Sink, worker_of_log: str | None) -> None:
        """Requests that never completed in this log, and the settings."""
        for entry in self._open.values():
            self._leg(entry, None, "unknown", None)
        self._open.clear()
        self.flush(out)
        for (worker, key), value in sorted(self.facts.items(), key=str):
            out.fact(worker, key, value)
        if self._window:
            said = {"service": self.service, "from_ns": self._window[0], "to_ns": self._window[1]}
            out.fact(worker_of_log, FACT_LOG, orjson.dumps(said).decode())

    def _selected(self, entry: Entry) -> str:
        """The scheduler's choice with its cost; the cached blocks are those that it believed in.

        Where spans tell the choice too, the two become one (pdtrace.decisions).
        """
        blocks, size = number(entry.fields.get("effective_cached_blocks")), self.block_size
        worker_id = entry.fields.get("worker_id")
        mode = entry.fields.get("router_mode")
        self.tables["decisions"].append(
            {
                "source": entry.source, "record": entry.record,
                "request_id": entry.fields.get("request_id"),
                "trace_id": entry.fields.get("trace_id"), "router": entry.worker,
                "time_ns": entry.time_ns,
                "phase": _phase(entry.fields.get("worker_type")),
                "policy": str(mode).lower() if mode else None,
                "worker": f"worker_id:{worker_id}" if worker_id is not None else None,
                "cost": number(entry.fields.get("logit")),
                "overlap_tokens": None if blocks is None or size is None else round(blocks * size),
            }
        )  # fmt: skip
        return USED

    def _received(self, entry: Entry) -> str:
        key = _key(entry)
        if key is None:
            return _keyless(entry)
        self._open[key] = entry
        return REASON_TOLD if self.spans_seen and _of_worker(entry) else USED

    def _completed(self, entry: Entry) -> str:
        key = _key(entry)
        if key is None:
            return _keyless(entry)
        begun = self._open.pop(key, None)
        word = str(entry.fields.get("status") or "").lower()
        failed_as = _word(entry.fields.get("error_type"))
        status = STATUSES.get(word, "failed") if word else "unknown"
        if failed_as in ("cancelled", "canceled"):
            status = "aborted"
        self._leg(begun, entry, status, failed_as)
        if status in ("failed", "aborted"):
            self._event(entry, "failure" if status == "failed" else "abort", "warning",
                        " ".join(filter(None, ["request", status, failed_as])))  # fmt: skip
            return USED
        if self.spans_seen and _of_worker(entry):
            return REASON_TOLD
        return USED if begun is None else REASON_PAIRED

    def _leg(self, begun: Entry | None, done: Entry | None, status: str, error: str | None) -> None:
        """A leg from the two lines of a request; workers' only where the log tells no spans."""
        entry = begun or done
        assert entry is not None
        of_worker = _of_worker(entry)
        self.frontend_seen |= not of_worker
        if of_worker and self.spans_seen:
            return
        fields = {**entry.fields, **(done.fields if done else {})}
        elapsed = number(fields.get("elapsed_ms"))
        end = done.time_ns if done else None
        start = begun.time_ns if begun else None
        if start is None and end is not None and elapsed is not None:
            start = end - round(elapsed * 1e6)
        kind = str(fields.get("request_type") or "")
        instance = fields.get("instance_id")
        told = {} if of_worker else _told(fields, start)
        self.tables["legs"].append(
            {
                "source": entry.source, "record": entry.record, "leg": f"dynamo_log/{_key(entry)}",
                "worker": f"worker_id:{instance}" if of_worker else entry.worker,
                "observer": "engine" if of_worker else "frontend",
                "role": _phase(fields.get("component")) if of_worker else "frontend",
                "role_basis": "log",
                "container": False, "trace_id": fields.get("trace_id"),
                "span_id": _span_of(entry), "request_id": fields["request_id"],
                "external_id": fields.get("x_request_id") or fields["request_id"],
                # workers use the frontend's id, and may not repeat the client's
                "remote_id": fields["request_id"] if of_worker and not fields.get("x_request_id") else None,
                "clock": "wall",
                "start_ns": start, "end_ns": end, "resolution_ns": MICROSECOND,
                "e2e_ms": None if start is None or end is None else (end - start) / 1e6,
                "model": _word(fields.get("model")),
                "streaming": kind == "stream" if kind in ("stream", "unary") else None,
                "status": status, "error": error if status == "failed" else None,
                **told,
            }
        )  # fmt: skip

    def _alarm(self, entry: Entry) -> str:
        """Warnings and errors as events: their fixed words only."""
        joined = _JOINED.match(entry.message)
        if joined:
            self._event(
                entry, "started", "info", "router added the worker", f"worker_id:{joined[1]}"
            )
            return USED
        if entry.message.startswith(_HARMLESS):
            return REASON_HARMLESS
        failed = entry.level != "WARN"
        words = _FIXED.match(entry.message)
        said = (words[0] if words else "").strip()[:120]
        self._event(entry, "failure" if failed else "warning", "warning" if failed else "info",
                    f"{entry.target}: {said}")  # fmt: skip
        return USED

    def _event(
        self, entry: Entry, kind: str, severity: str, detail: str, worker: str | None = None
    ) -> None:
        self.tables["events"].append(
            {
                "source": entry.source, "record": entry.record, "worker": worker or entry.worker,
                "time_ns": entry.time_ns, "resolution_ns": MICROSECOND, "kind": kind,
                "severity": severity,
                "request_id": entry.fields.get("request_id"), "detail": detail,
            }
        )  # fmt: skip

    def _settings(self, entry: Entry) -> bool:
        """Facts in the record; never host names or paths."""
        found = dict(settings(entry.message, entry.fields))
        for key, value in found.items():
            self.facts[entry.worker, key] = value
        size = integer(found.get(FACT_BLOCK_SIZE))
        if size:
            self.block_size = size
        return bool(found)


def _told(fields: Mapping[str, Any], start: int | None) -> dict[str, Any]:
    """What the span http-request says of its request at the end, where the line carries its fields.

    A refused request counts 0 tokens for unknown; it has no first token.
    """
    ttft, gap = number(fields.get("ttft_ms")), number(fields.get("avg_itl_ms"))
    answered = ttft is not None
    return {
        "prompt_tokens": integer(fields.get("input_tokens")) if answered else None,
        "output_tokens": integer(fields.get("output_tokens")) if answered else None,
        "ttft_ms": ttft,
        "ttft_definition": TTFT_REPORTED if answered else None,
        "first_token_ns": None if ttft is None or start is None else start + round(ttft * 1e6),
        "first_token_delivered": True if answered else None,
        "tpot_ms": gap,
    }


def _of_worker(entry: Entry) -> bool:
    """Whether a request line is a worker's: the frontend's names the HTTP endpoint and the
    model."""
    return "push_handler" in entry.target or entry.fields.get("span_name") == "handle_payload"


def _key(entry: Entry) -> str | None:
    """What pairs the two lines of a request in one process; None for the control plane's."""
    request_id = entry.fields["request_id"]
    if not _of_worker(entry):
        return str(request_id)
    if entry.fields.get("endpoint") != GENERATE or not entry.fields.get("instance_id"):
        return None
    hop = entry.fields.get("span_id") or entry.fields["instance_id"]
    return f"{request_id}/{hop}"


def _keyless(entry: Entry) -> str:
    """Why a line of a worker's request gives nothing: another endpoint's, or no worker named."""
    named = entry.fields.get("instance_id") and entry.fields.get("endpoint")
    return REASON_NOTHING if named else REASON_NAMELESS


def _span_of(entry: Entry) -> str | None:
    """The span that is the same leg: http-request, around the lifecycle's root, or
    handle_payload."""
    name, fields = entry.fields.get("span_name"), entry.fields
    if name == "request.lifecycle":
        return fields.get("parent_id")
    return fields.get("span_id") if name in ("http-request", "handle_payload") else None


def _phase(word: object) -> str | None:
    """prefill or decode; "backend" says neither."""
    text = str(word or "").lower()
    return text if text in ("prefill", "decode", "aggregated") else None


def _word(value: object) -> str | None:
    """A short name: a value that could be free text is not one."""
    text = str(value or "").strip()
    return text if text and len(text) <= 200 and not text.startswith("/") else None


def _logs(facts: pl.DataFrame) -> list[dict[str, Any]]:
    return [
        orjson.loads(value) for value in facts.filter(pl.col("key") == FACT_LOG)["value"].unique()
    ]


def add_otlp_records(
    records: pl.DataFrame, facts: pl.DataFrame, out: Sink
) -> list[tuple[int, int, str]]:
    """OTLP log records: body = message, scope = target, attributes = fields.

    What the JSONL log of the same service tells is left to it. Returns source, record and reason
    of the records that gave no row.
    """
    logs = _logs(facts)
    unused = []
    for (worker, service), group in records.group_by("worker", "service_name", maintain_order=True):
        name = None if worker is None else str(worker)
        windows = [
            (said["from_ns"] - SLACK_NS, said["to_ns"] + SLACK_NS)
            for said in logs
            if service is not None and said["service"] == service
        ]
        rows = Rows(service=None if service is None else str(service))
        for entry in _entries(group.sort("time_ns", "source", "record"), name):
            time = entry.time_ns
            if time is not None and any(start <= time <= end for start, end in windows):
                reason = REASON_IN_LOG
            else:
                reason = rows.take(entry)
            if reason and entry.source is not None:
                unused.append((entry.source, entry.record, reason))
        rows.finish(out, name)
    return unused


def _entries(records: pl.DataFrame, worker: str | None) -> Iterator[Entry]:
    for row in records.iter_rows(named=True):
        try:
            fields = orjson.loads(row["attributes"]) if row["attributes"] else {}
        except orjson.JSONDecodeError:
            fields = {}
        fields.setdefault("trace_id", row["trace_id"])
        fields.setdefault("span_id", row["span_id"])
        yield Entry(
            row["source"], row["record"], row["time_ns"], str(row["severity"] or "").upper(),
            row["scope_name"] or "", row["body"] or "", fields, worker,
        )  # fmt: skip
