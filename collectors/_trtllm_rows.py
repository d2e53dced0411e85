"""Rows of TensorRT-LLM's request metrics: legs, intervals, streams, transfers and what the records say of themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import polars as pl

from pdtrace.model import UNDATED, Sink

from ._trtllm_records import DEFINITIONS, Pair, Side

ENGINE = "TensorRT-LLM"
RESOLUTION_NS = 1_000  # seconds as a double, and clocks of hosts are aligned no better

_TTFT = "TensorRT-LLM: request at the HTTP server (its executor where that is unknown) to the first token made"
_TTFT_ROUTER = "TensorRT-LLM's disaggregated server: request received to the first chunk sent on"
_DONE = ("complete", "completed", "success")
_INSTANTS = ("start_ns", "end_ns", "duration_ns")

_SCHEMAS: dict[str, dict[str, Any]] = {
    "legs": {
        "record": pl.Int64, "leg": pl.String, "worker": pl.String, "observer": pl.String, "role": pl.String,
        "role_basis": pl.String, "container": pl.Boolean, "request_id": pl.String, "external_id": pl.String,
        "transfer_id": pl.String, "clock": pl.String, "clock_start_ns": pl.Int64, "start_ns": pl.Int64,
        "first_token_ns": pl.Int64, "last_token_ns": pl.Int64, "end_ns": pl.Int64, "resolution_ns": pl.Int64,
        "ttft_ms": pl.Float64, "e2e_ms": pl.Float64, "ttft_definition": pl.String,
        "first_token_delivered": pl.Boolean, "streaming": pl.Boolean, "status": pl.String,
    },
    "intervals": {
        "leg": pl.String, "detail": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64, "duration_ns": pl.Int64,
        "basis": pl.String, "clock": pl.String, "resolution_ns": pl.Int64, "censored": pl.Boolean,
        "semantics": pl.String, "end_leg": pl.String,
    },
    "streams": {
        "leg": pl.String, "stream": pl.Int64, "first_ns": pl.Int64, "gaps_us": pl.List(pl.Int32),
        "emission": pl.String, "clock": pl.String, "observer": pl.String,
    },
    "transfers": {
        "record": pl.Int64, "leg": pl.String, "request_id": pl.String, "source_worker": pl.String,
        "destination_worker": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64, "duration_ms": pl.Float64,
        "bytes": pl.Int64, "direction": pl.String, "outcome": pl.String,
    },
    "decisions": {
        "record": pl.Int64, "leg": pl.String, "request_id": pl.String, "router": pl.String, "time_ns": pl.Int64,
        "phase": pl.String, "worker": pl.String,
    },
    "reported": {
        "leg": pl.String, "quantity": pl.String, "value": pl.Float64, "unit": pl.String, "definition": pl.String,
    },
}  # fmt: skip


class Rows:
    """Gathers the rows of a file and hands them to the sink in one batch per table."""

    def __init__(self, path: str, label: str) -> None:
        self.path, self.label = path, label
        self.clock = UNDATED + path
        self.tables: dict[str, list[dict[str, Any]]] = {name: [] for name in _SCHEMAS}

    def flush(self, out: Sink) -> None:
        """Hand over what was gathered."""
        for name, rows in self.tables.items():
            if rows:
                record = "record" if "record" in _SCHEMAS[name] else None
                out.add(name, pl.DataFrame(rows, schema=_SCHEMAS[name]), record=record)
                rows.clear()

    def pair(
        self, record: int, pair: Pair, router: str, apart: set[str | None], *, ids: bool
    ) -> None:
        """Legs of the router and of both workers, and what lies between them."""
        name = f"{self.path}/{record}"
        shared = (shared_id(pair) if ids else None) or f"{self.label}#{record}"
        clocks = {
            half: "" if server not in apart else f"{UNDATED}{server}"
            for half, server in (("ctx", pair.ctx_server), ("gen", pair.gen_server))
        }
        end = None if clocks["gen"] or pair.gen is None else pair.gen.at("last_token_time")
        self.tables["legs"].append({
            **_blank_leg(), "record": record, "leg": f"{name}/router", "worker": router, "observer": "router",
            "role": "router", "role_basis": "log", "request_id": shared, "external_id": shared, "clock": self.clock,
            "start_ns": pair.arrival, "first_token_ns": pair.first_token, "end_ns": _latest(end, pair.first_token),
            "ttft_ms": _ms(pair.arrival, pair.first_token), "ttft_definition": _TTFT_ROUTER,
            "status": _status(pair.status, pair.gen),
        })  # fmt: skip
        for phase, server in (("prefill", pair.ctx_server), ("decode", pair.gen_server)):
            if server:  # of the choice only its outcome is told
                self.tables["decisions"].append({
                    "record": record, "leg": f"{name}/router", "request_id": shared, "router": router,
                    "time_ns": pair.dispatched if phase == "prefill" else None, "phase": phase,
                    "worker": f"address:{server}",
                })  # fmt: skip
        given = None if clocks["ctx"] or clocks["gen"] else _who_delivered(pair)
        for half, role, side, server in (
            ("ctx", "prefill", pair.ctx, pair.ctx_server), ("gen", "decode", pair.gen, pair.gen_server),
        ):  # fmt: skip
            if side is not None:
                worker = f"address:{server}" if server else None
                delivered = None if given is None else given == role
                leg = self._leg(record, f"{name}/{half}", worker, role, side, clocks[half])
                leg |= {"external_id": shared, "first_token_delivered": delivered}
                leg["request_id"] = f"{side.number}@{server}" if side.number else None
                self._inside(leg, role, side, clocks[half])
        self._between(name, pair, clocks)
        if pair.gen is not None:
            self._transfer(record, f"{name}/gen", shared, pair, bool(clocks["gen"]))

    def side(self, record: int, side: Side, worker: str, *, ids: bool) -> str | None:
        """The leg of a worker's own record; its role, where the request was shared by two workers."""
        shared = side.disagg_request or side.ctx_request
        role = side.half() if shared else None
        leg = self._leg(record, f"{self.path}/{record}", worker, role, side, "")
        leg["request_id"] = f"{side.number or record}@{self.label}"
        if ids:
            leg |= {"external_id": side.disagg_request, "transfer_id": side.ctx_request}
        self._inside(leg, role, side, "")
        if role == "decode":
            lone = Pair(None, None, None, None, None, None, None, None, side)
            self._transfer(record, leg["leg"], leg["request_id"], lone, False, worker)
        return role

    def _leg(
        self, record: int, name: str, worker: str | None, role: str | None, side: Side, clock: str
    ) -> dict[str, Any]:
        """An engine's leg; on a clock of its own only its durations are known."""
        start, first, last = side.start, side.at("first_token_time"), side.at("last_token_time")
        handed = side.at("server_first_token_time")
        streamed = True if handed is not None and last is not None and handed < last else None
        leg = {
            **_blank_leg(), "record": record, "leg": name, "worker": worker, "observer": "engine", "role": role,
            "role_basis": "log" if role else None, "clock": clock or self.clock,
            "ttft_ms": _ms(start, first), "e2e_ms": _ms(start, last), "ttft_definition": _TTFT,
            "streaming": streamed if role != "prefill" else None, "status": _status(side.status, side),
        }  # fmt: skip
        if clock:
            return leg | {"clock_start_ns": start}
        return leg | {
            "start_ns": start, "first_token_ns": first, "last_token_ns": last, "end_ns": last,
        }  # fmt: skip

    def _inside(self, leg: dict[str, Any], role: str | None, side: Side, clock: str) -> None:
        """What the leg's own worker tells: its phases, token times and quantities."""
        name = leg["leg"]
        self.tables["legs"].append(leg)
        for detail, start, end, basis, semantics in _phases(side, role):
            self._interval(name, detail, (start, end), basis, semantics, clock)
        if role != "prefill":
            self._stream(name, side, clock)
        self.tables["reported"].extend(
            {"leg": name, "quantity": quantity, "value": value, "unit": DEFINITIONS[quantity][0],
             "definition": f"TensorRT-LLM: {DEFINITIONS[quantity][1]}"}
            for quantity, value in side.reported.items()
        )  # fmt: skip

    def _interval(
        self, leg: str, detail: str, between: tuple[int | None, int | None], basis: str, semantics: str,
        clock: str, end_leg: str | None = None,
    ) -> None:  # fmt: skip
        start, end = between
        if start is None or end is None:
            return
        instants = (None, None, end - start) if clock else (start, end, None)
        self.tables["intervals"].append({
            "leg": leg, "detail": detail, **dict(zip(_INSTANTS, instants, strict=True)), "basis": basis,
            "clock": clock or self.clock, "resolution_ns": RESOLUTION_NS, "censored": False,
            "semantics": semantics, "end_leg": end_leg,
        })  # fmt: skip

    def _between(self, name: str, pair: Pair, clocks: dict[str, str]) -> None:
        """The router's own time: until the context server has the request, and from its answer to the generation server."""
        leg, ctx, gen = f"{name}/router", pair.ctx, pair.gen
        if pair.dispatched is not None:
            waited = (pair.arrival, pair.dispatched)
            self._interval(leg, "router_queue", waited, "measured", "router: received to sent to the context server", "")  # fmt: skip
        if ctx is not None and not clocks["ctx"]:
            sent = (pair.arrival if pair.dispatched is None else pair.dispatched, ctx.start)
            self._interval(leg, "dispatch", sent, "measured", "router to the context server's HTTP server", "", f"{name}/ctx")  # fmt: skip
            if gen is not None and not clocks["gen"]:
                back = ctx.at("server_first_token_time") or ctx.at("first_token_time")
                self._interval(leg, "dispatch", (back, gen.start), "measured", "context server's answer through the router to the generation server", "", f"{name}/gen")  # fmt: skip

    def _stream(self, leg: str, side: Side, clock: str) -> None:
        """Token times of decode steps, which lie on a clock of their own: the last step made the last token."""
        first, last = side.at("first_token_time"), side.at("last_token_time")
        if len(side.token_ns) < 2 or last is None:
            return
        shift = last - side.token_ns[-1]
        times = [t + shift for t in side.token_ns]
        if first is not None and first < times[0] - (times[-1] - times[0]) / len(times) / 2:
            times.insert(0, first)  # the prompt's own step made it
        gaps = [round((b - a) / 1e3) for a, b in pairwise(times)]
        if max(gaps) < 2**31:
            self.tables["streams"].append({
                "leg": leg, "stream": 0, "first_ns": None if clock else times[0], "gaps_us": gaps,
                "emission": "chunk" if side.drafts else "token", "clock": clock or self.clock, "observer": "engine",
            })  # fmt: skip

    def _transfer(
        self, record: int, leg: str, request: str, pair: Pair, moved: bool, worker: str | None = None
    ) -> None:  # fmt: skip
        """The pull by the generation server; the context server's record tells the same from its side."""
        assert pair.gen is not None
        start, end = (pair.gen.at(f"kv_cache_transfer_{which}") for which in ("start", "end"))
        if start is None or end is None:
            return
        self.tables["transfers"].append({
            "record": record, "leg": leg, "request_id": request,
            "source_worker": f"address:{pair.ctx_server}" if pair.ctx_server else None,
            "destination_worker": f"address:{pair.gen_server}" if pair.gen_server else worker,
            "start_ns": None if moved else start, "end_ns": None if moved else end, "duration_ms": (end - start) / 1e6,
            "bytes": pair.gen.bytes or (pair.ctx.bytes if pair.ctx else None),
            "direction": "prefill_to_decode", "outcome": "completed",
        })  # fmt: skip


def _phases(side: Side, role: str | None) -> Iterator[tuple[str, int | None, int | None, str, str]]:
    """(detail, start, end, basis, semantics) of one worker's stamps."""
    arrival, scheduled = side.at("arrival_time"), side.at("first_scheduled_time")
    first, last = side.at("first_token_time"), side.at("last_token_time")
    yield "frontend", side.at("server_arrival_time"), arrival, "measured", "HTTP server to executor"
    if role == "decode":
        pulling, pulled = side.at("kv_cache_transfer_start"), side.at("kv_cache_transfer_end")
        if pulling is None or pulled is None:
            yield ("kv_wait_upper_bound", arrival, scheduled, "upper_bound",
                   "executor to first scheduled: the KV transfer is within, its stamps are not there")  # fmt: skip
        else:
            yield "bridge_wait", arrival, pulling, "measured", "executor to the start of the KV transfer"  # fmt: skip
            yield ("kv_transfer", pulling, pulled, "measured",
                   "KV transfer as the generation server stamps it, exchange of request data and copies within")  # fmt: skip
            yield "decode_queue", pulled, scheduled, "measured", "KV there to first scheduled"
        yield "decode_exec", scheduled, first, "measured", "first scheduled to the first token made there"  # fmt: skip
    else:
        yield "prefill_queue", arrival, scheduled, "measured", "executor to first scheduled"
        yield "prefill_wall", scheduled, first, "measured", "first scheduled to first token, pauses between chunks within"  # fmt: skip
    if role != "prefill":
        yield "decode_wall", first, last, "measured", "first to last token"
    handed = side.at("server_first_token_time")
    if handed is not None and last is not None and (role == "prefill" or handed < last):
        yield "stream_out", first, handed, "measured", "first token made to handed to HTTP"


def _who_delivered(pair: Pair) -> str | None:
    """Whose first token the user saw first: the router sent one on before the generation server had made any."""
    made = None if pair.gen is None else pair.gen.at("first_token_time")
    if made is None or pair.first_token is None:
        return None
    return "prefill" if pair.first_token < made else "decode"


def shared_id(pair: Pair) -> str | None:
    """The id of a request across the servers: a context server counts by itself."""
    known = [side for side in (pair.gen, pair.ctx) if side is not None]
    whole = pair.disagg_request or next((s.disagg_request for s in known if s.disagg_request), None)
    counted = next((s.ctx_request for s in known if s.ctx_request), None)
    if whole or counted is None:
        return whole
    return f"{counted}@{pair.ctx_server}"


def _status(said: str | None, side: Side | None) -> str:
    """Up to 1.2 records are written of finished requests only; later ones say it."""
    if said is not None:
        return "completed" if said.lower() in _DONE else "unknown"
    return "completed" if side is not None and side.at("last_token_time") else "unknown"


def _blank_leg() -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(_SCHEMAS["legs"])
    return row | {"container": False, "resolution_ns": RESOLUTION_NS}


def _ms(start: int | None, end: int | None) -> float | None:
    return None if start is None or end is None else (end - start) / 1e6


def _latest(*instants: int | None) -> int | None:
    known = [t for t in instants if t is not None]
    return max(known) if len(known) == len(instants) else None
