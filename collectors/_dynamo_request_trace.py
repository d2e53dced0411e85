"""Rows of Dynamo's request trace (dynamo.request.trace.v1), from files and OTLP log records.

Source: ai-dynamo/dynamo lib/llm/src/request_trace/{types,record}.rs, 1.6.1. `ttft_ms` is the time
to the first output of the *prefill* worker: with prefill and decode apart it is no token that a
user saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson
import polars as pl

from pdtrace.model import Sink

from ._common import UINT64, integer, number
from ._dynamo_names import ENGINE, FACT_BLOCK_SIZE, FACT_COVERAGE, SLACK_NS
from ._dynamo_request_times import MS, Times, epoch_ms, text

SCHEMA = "dynamo.request.trace.v1"
SCOPE = "dynamo.request_trace"

REASON_EVENT = "request trace record of a kind that is not used"
REASON_IN_FILE = "request trace record, told by the request trace's file"
REASON_EMPTY = "request trace record without a request id"

# quantity -> (unit, what the code computes)
_REPORTED = {
    "prefill_wait_time_ms": (
        "ms", "request received to dispatch: frontend and router queue, not the engine's",
    ),
    "prefill_time_ms": (
        "ms", "dispatch to the first output of the prefill worker, its engine queue included",
    ),
    "ttft_ms": (
        "ms", "request received to the first output of the prefill worker, not the client's first",
    ),
    "total_time_ms": ("ms", "request received to the end"),
    "avg_itl_ms": (
        "ms", "(total - ttft) / (output tokens - 1): with P and D apart it holds the hand-over",
    ),
    "kv_transfer_estimated_latency_ms": (
        "ms", "prefill result to first decode token, one decode pass included; 0 when unmeasured",
    ),
    "kv_hit_rate": ("1", "share of the prompt that the router expected to be cached"),
    "queue_depth": ("1", "requests in the router's queue when this one was routed"),
}  # fmt: skip

_LEG_SCHEMA = {
    "source": pl.Int32, "record": pl.Int64, "leg": pl.String, "worker": pl.String,
    "observer": pl.String,
    "role": pl.String, "role_basis": pl.String, "container": pl.Boolean, "request_id": pl.String,
    "external_id": pl.String, "session": pl.String, "clock": pl.String, "start_ns": pl.Int64,
    "first_token_ns": pl.Int64, "end_ns": pl.Int64, "resolution_ns": pl.Int64,
    "ttft_ms": pl.Float64,
    "e2e_ms": pl.Float64, "tpot_ms": pl.Float64, "ttft_definition": pl.String,
    "first_token_delivered": pl.Boolean, "model": pl.String, "prompt_tokens": pl.Int64,
    "cached_tokens": pl.Int64, "output_tokens": pl.Int64, "status": pl.String,
    "finish_reason": pl.String,
}  # fmt: skip

_SCHEMAS: dict[str, dict[str, Any]] = {
    "legs": _LEG_SCHEMA,
    "prefix_blocks": {
        "source": pl.Int32, "record": pl.Int64, "leg": pl.String, "block_tokens": pl.Int64,
        "hashes": pl.List(pl.UInt64),
    },
}  # fmt: skip

Record = tuple[int | None, int, Mapping[str, Any]]  # source (None: the sink's), ordinal, event


class Rows:
    """Gathers the rows of many records and hands them to the sink in one batch per table."""

    def __init__(self, frontend: str | None) -> None:
        self._frontend = frontend
        self.tables: dict[str, list[dict[str, Any]]] = {
            "legs": [],
            "intervals": [],
            "reported": [],
            "events": [],
            "prefix_blocks": [],
        }
        self._windows: dict[str, list[int]] = {}
        self._blocks: dict[str, int] = {}
        self.roles: dict[str, str] = {}

    def take(self, record: Record) -> str | None:
        """Add one record; returns why it gave nothing, else None."""
        source, ordinal, event = record
        kind = str(event.get("event_type") or "")
        if kind.startswith("tool"):
            self._tool(source, ordinal, kind, event)
            return None
        request = event.get("request")
        if kind not in ("request_end", "") or not isinstance(request, dict):
            return REASON_EVENT
        request_id = request.get("request_id")
        if not request_id:
            return REASON_EMPTY
        self._request(source, ordinal, str(request_id), request, event)
        return None

    def flush(self, out: Sink) -> None:
        """Hand over what was gathered."""
        for table, rows in self.tables.items():
            if rows:
                frame = pl.DataFrame(rows, schema=_SCHEMAS.get(table), infer_schema_length=None)
                out.add(
                    table,
                    frame
                    if any(r.get("source") is not None for r in rows)
                    else frame.drop("source"),
                )
                rows.clear()

    def finish(self, out: Sink) -> None:
        """Declare the workers that were named, and which requests are covered (dynamo.interpret
        asks)."""
        self.flush(out)
        for worker_id, role in sorted(self.roles.items()):
            worker = out.worker(
                {"worker_id": worker_id}, role=role, role_basis="log", engine=ENGINE
            )
            out.fact(worker, FACT_BLOCK_SIZE, self._blocks.get(worker_id))
            window = self._windows.get(worker_id)
            if window:
                said = {"worker_id": worker_id, "from_ns": window[0], "to_ns": window[1]}
                out.fact(worker, FACT_COVERAGE, orjson.dumps(said).decode())

    def _tool(self, source: int | None, ordinal: int, kind: str, event: Mapping[str, Any]) -> None:
        """A harness's tool call: an event, its duration and class in the detail."""
        tool = event.get("tool") or {}
        duration = number(tool.get("duration_ms"))
        words = [kind, str(tool.get("tool_class") or ""), str(tool.get("status") or "")]
        took = "" if duration is None else f" {duration:g} ms"
        self.tables["events"].append(
            {
                "source": source, "record": ordinal, "worker": self._frontend,
                "time_ns": epoch_ms(event.get("event_time_unix_ms")), "resolution_ns": MS,
                "kind": "failure" if kind == "tool_error" else "tool", "severity": "info",
                "detail": " ".join(word for word in words if word) + took,
            }
        )  # fmt: skip

    def _request(
        self,
        source: int | None,
        ordinal: int,
        request_id: str,
        request: Mapping[str, Any],
        event: Mapping[str, Any],
    ) -> None:
        times = Times(request, event)
        leg = f"dynamo_request_trace/{request_id}"
        self.tables["legs"].append(
            {**self._leg(source, ordinal, leg, request_id, request, event), **times.of_leg(request)}
        )
        self.tables["legs"].extend(
            self._worker_legs(source, ordinal, leg, request_id, request, times)
        )
        self._blocks_of(source, ordinal, leg, request)
        self.tables["intervals"].extend(
            {
                "source": source, "leg": leg, "detail": detail, "start_ns": start, "end_ns": end,
                "basis": basis,
                "clock": "wall", "resolution_ns": MS, "semantics": semantics,
            }
            for detail, start, end, basis, semantics in times.intervals()
        )  # fmt: skip
        for quantity, (unit, definition) in _REPORTED.items():
            value = number(request.get(quantity))
            if value is not None:
                self.tables["reported"].append(
                    {
                        "source": source, "leg": leg, "quantity": quantity, "value": value,
                        "unit": unit,
                        "definition": f"Dynamo request trace: {definition}",
                    }
                )  # fmt: skip

    def _blocks_of(
        self, source: int | None, ordinal: int, leg: str, request: Mapping[str, Any]
    ) -> None:
        """Hashes of the whole blocks of the prompt; each stands for the prompt up to its block."""
        replay = _inner(request, "replay")
        said = replay.get("input_sequence_hashes")
        if not isinstance(said, list) or not said:
            return
        hashes = [integer(value, UINT64) for value in said]
        if None not in hashes:
            self.tables["prefix_blocks"].append(
                {
                    "source": source, "record": ordinal, "leg": leg, "hashes": hashes,
                    "block_tokens": integer(replay.get("trace_block_size")),
                }
            )  # fmt: skip

    def _leg(
        self, source: int | None, ordinal: int, leg: str, request_id: str,
        request: Mapping[str, Any], event: Mapping[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        """The frontend's leg, all but its times."""
        replay = _inner(request, "replay")
        prompt = integer(request.get("input_tokens"))
        finish = _inner(request, "finish_reason_metadata").get("finish_reason")
        context = _inner(event, "agent_context")
        return {
            "source": source, "record": ordinal, "leg": leg, "worker": self._frontend,
            "observer": "frontend", "role": "frontend", "role_basis": "log", "container": False,
            "request_id": request_id,
            "external_id": text(request.get("x_request_id")) or request_id,
            "session": text(context.get("session_id")), "model": text(request.get("model")),
            "prompt_tokens": prompt if prompt is not None else integer(replay.get("input_length")),
            "cached_tokens": integer(request.get("cached_tokens")),
            "output_tokens": integer(request.get("output_tokens")),
            "finish_reason": text(finish),
        }  # fmt: skip

    def _worker_legs(
        self,
        source: int | None,
        ordinal: int,
        leg: str,
        request_id: str,
        request: Mapping[str, Any],
        times: Times,
    ) -> Iterator[dict[str, Any]]:
        """Legs of the workers that the record names, so that deployments connect."""
        block = integer(_inner(request, "replay").get("trace_block_size"))
        for role, worker_id, rank in times.workers():
            self.roles.setdefault(worker_id, role)
            if block:
                self._blocks[worker_id] = block
            if role != "decode" and times.start is not None and times.prefill_end is not None:
                window = self._windows.setdefault(worker_id, [times.start, times.start])
                window[:] = [min(window[0], times.start), max(window[1], times.start)]
            yield {
                "source": source, "record": ordinal, "leg": f"{leg}/{role}",
                "worker": f"worker_id:{worker_id}",
                "observer": "engine", "role": role, "rank": rank, "role_basis": "log", "container": False,
                "request_id": request_id,
                "external_id": text(request.get("x_request_id")) or request_id,
                "clock": "wall", "resolution_ns": MS, "status": "unknown", **times.of_worker(role),
            }  # fmt: skip


def _inner(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object inside a record; an empty one where anything else stands there."""
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def coverage(facts: pl.DataFrame) -> pl.DataFrame:
    """What request traces at hand cover: first worker of a request (prefill or aggregated),
    from, to."""
    rows = [
        (said["worker_id"], said["from_ns"] - SLACK_NS, said["to_ns"] + SLACK_NS)
        for said in map(_json, facts.filter(pl.col("key") == FACT_COVERAGE)["value"].unique())
        if said
    ]
    schema = {"worker_id": pl.String, "from_ns": pl.Int64, "to_ns": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def add_otlp_payloads(
    records: pl.DataFrame, facts: pl.DataFrame, out: Sink
) -> list[tuple[int, int, str]]:
    """Request trace rows that the `otel` sink sent as log records: the row stands in attribute
    `payload`.

    Requests that a file of the same trace covers are left to the file. Returns source, record and
    reason of the records that gave no row.
    """
    unused = []
    windows = coverage(facts).rows()
    for (worker,), group in records.group_by("worker", maintain_order=True):
        rows = Rows(None if worker is None else str(worker))
        for record in _payloads(group):
            if _is_covered(record[2], windows):
                reason: str | None = REASON_IN_FILE
            else:
                reason = rows.take(record)
            if reason and record[0] is not None:
                unused.append((record[0], record[1], reason))
        rows.finish(out)
    return unused


def _is_covered(event: Mapping[str, Any], windows: list[tuple[Any, ...]]) -> bool:
    request = event.get("request")
    if not windows or not isinstance(request, dict):
        return False
    times = Times(request, event)
    first = times.workers()[:1]
    return times.start is not None and any(
        worker == first[0][1] and start <= times.start <= end
        for worker, start, end in windows
        if first
    )


def _payloads(records: pl.DataFrame) -> Iterable[Record]:
    for source, ordinal, attributes in records.select("source", "record", "attributes").iter_rows():
        yield source, ordinal, _json(_json(attributes).get("payload"))


def _json(text: object) -> dict[str, Any]:
    if isinstance(text, dict):
        return text
    if not isinstance(text, str | bytes):
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
