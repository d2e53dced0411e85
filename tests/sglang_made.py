"""SGLang servers made by hand: the spans of their threads as OTLP JSON lines, in milliseconds after T0."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

T0 = 1_795_993_200_000_000_000
MS = 1_000_000
HOST = "3d1219c7c4c5404aaa1f6d2a48adfda4"


def _value(value: object) -> dict[str, object]:
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}


def attributes(values: dict[str, Any]) -> list[dict[str, object]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


class Traces:
    """Spans of several processes; `at_ms` of a process is how far its clock is off."""

    def __init__(self, resource: dict[str, str] | None = None) -> None:
        self.resource = resource or {"service.name": "sglang"}
        self.spans: list[tuple[dict[str, str], str, dict[str, Any]]] = []

    def add(
        self, trace: str, name: str, start: float, end: float | None, parent: str | None = None, *,
        resource: dict[str, str] | None = None, scope: str = "sglang server", error: bool = False,
        events: list[tuple[Any, ...]] | None = None, **more: Any,
    ) -> str:  # fmt: skip
        """One span; returns its id."""
        span = {
            "traceId": trace, "spanId": f"{len(self.spans) + 1:016x}", "name": name, "kind": 1,
            "startTimeUnixNano": str(T0 + round(start * MS)),
            "attributes": attributes({key.replace("__", "."): value for key, value in more.items()}),
            "status": {"code": 2} if error else {},
            "events": [
                {"name": kind, "timeUnixNano": str(T0 + round(at * MS)), "attributes": attributes(dict(*said))}
                for kind, at, *said in events or ()
            ],
        }  # fmt: skip
        if end is not None:
            span["endTimeUnixNano"] = str(T0 + round(end * MS))
        if parent:
            span["parentSpanId"] = parent
        self.spans.append((resource or self.resource, scope, span))
        return str(span["spanId"])

    def thread(
        self, trace: str, root: str, label: str, pid: int, stages: list[tuple[Any, ...]], *,
        host: str = HOST, **more: Any,
    ) -> None:  # fmt: skip
        """A thread's span and the stages (name, start, end[, events or nested stages]) below it."""
        begin = max(stage[1] for stage in stages)  # it begins late, as SGLang's do
        top = self.add(
            trace, f"{label}(host:{host[:8]} | pid:{pid})", begin, max(s[2] for s in stages), root,
            host_id=host, pid=pid, thread_label=label, **more,
        )  # fmt: skip
        for name, start, end, *rest in stages:
            below = rest[0] if rest else []
            nested = [stage for stage in below if len(stage) == 3]
            events = [event for event in below if len(event) == 2]
            stage = self.add(trace, name, start, end, top, events=events)
            for n, (child, a, b) in enumerate(nested):
                self.add(trace, child, a, b, stage, **({"decode_ct": n} if "loop" in child else {}))

    def write(self, path: Path) -> Path:
        lines = [
            {"resourceSpans": [{"resource": {"attributes": attributes(resource)}, "scopeSpans": [{"scope": {"name": scope}, "spans": [span]}]}]}
            for resource, scope, span in self.spans
        ]  # fmt: skip
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        return path


def usage(prompt: int, output: int, ttft_s: float, cached: int = 0, **more: Any) -> dict[str, Any]:
    """What the root of a request says at its end, since 0.5.10."""
    return {
        "gen_ai__usage__prompt_tokens": prompt, "gen_ai__usage__cached_tokens": cached,
        "gen_ai__usage__completion_tokens": output, "gen_ai__response__finish_reasons": '["stop"]',
        "gen_ai__latency__time_to_first_token": ttft_s, "gen_ai__response__model": "m", **more,
    }  # fmt: skip


def one_server(made: Traces, n: int, at: float, *, pid: int = 100, tp: int = 1) -> str:
    """A request on one server (0.5.10 and later): 100 ms to its first token, then 4 tokens 20 ms apart."""
    trace, rid = f"{n + 1:032x}", f"{n:032x}"
    root = made.add(
        trace, f" Req {rid[:8]}", at, at + 190, rid=rid, module="sglang::request",
        **usage(500, 5, 0.102, 100),
    )  # fmt: skip
    made.thread(trace, root, "Tokenizer", pid, [("tokenize", at, at + 3), ("api_server_dispatch", at + 3, at + 4)])  # fmt: skip
    loops = [("decode_loop", at + 105 + 20 * k, at + 125 + 20 * k) for k in range(4)]
    for rank in range(tp):
        made.thread(
            trace, root, "Scheduler", pid + 1 + rank,
            [
                ("request_process", at + 8, at + 10),
                ("prefill_waiting", at + 10, at + 40),
                ("prefill_forward", at + 40, at + 100, [("chunked_prefill", at + 40, at + 70), ("chunked_prefill", at + 70, at + 100)]),
                ("decode_waiting", at + 100, at + 105),
                ("decode_forward", at + 105, at + 186, loops),
            ],
            tp_rank=rank, pp_rank=0, dp_rank=0,
        )  # fmt: skip
    return rid


def pair(
    made: Traces, n: int, at: float, *, room: int, prefill_pid: int = 200, decode_pid: int = 300,
    p_ahead: float = 0.0, d_ahead: float = 0.0, p_host: str = HOST, d_host: str = HOST,
    router: str | None = None, trace: str | None = None,
) -> tuple[str, str]:  # fmt: skip
    """A request on a prefill and a decode server; without a router each side is a trace of its own.

    From the decode side's arrival: 2 ms tokenise, 1 hand-over, 1 entry, 6 wait for room, 50 prefill (after 4 in
    the queue of the prefill server), 20 transfer, 2 until the decode server sees it, 3 decode queue and 1 for the
    first batch, first token at 92 ms; 5 tokens 10 ms apart. `p_ahead`, `d_ahead`: how far the hosts' clocks are.
    """
    p_trace, d_trace = (trace, trace) if trace else (f"{n + 1:032x}", f"{n + 500_000:032x}")
    p_rid, d_rid = f"{n:08x}{'a' * 24}", f"{n:08x}{'d' * 24}"
    said = {"module": "sglang::request", "bootstrap_room": hex(room)}
    p, at = at + p_ahead, at + d_ahead
    root = made.add(p_trace, f"prefill Req {p_rid[:8]}", p, p + 87, router, rid=p_rid, **said, **usage(500, 1, 0.065, 100))  # fmt: skip
    made.thread(p_trace, root, "PrefillTokenizer", prefill_pid, [("tokenize", p, p + 2), ("api_server_dispatch", p + 2, p + 3)], host=p_host)  # fmt: skip
    made.thread(
        p_trace, root, "Prefill Scheduler", prefill_pid + 1,
        [
            ("prefill_prepare", p + 4, p + 5), ("prefill_bootstrap", p + 5, p + 10), ("prefill_waiting", p + 10, p + 14),
            ("prefill_forward", p + 14, p + 64), ("prefill_transfer_kv_cache", p + 64, p + 84),
        ],
        tp_rank=0, pp_rank=0, dp_rank=0, host=p_host,
    )  # fmt: skip
    root = made.add(d_trace, f"decode Req {d_rid[:8]}", at, at + 145, router, rid=d_rid, **said, **usage(500, 6, 0.092, 0))  # fmt: skip
    made.thread(d_trace, root, "DecodeTokenizer", decode_pid, [("tokenize", at, at + 2), ("api_server_dispatch", at + 2, at + 3)], host=d_host)  # fmt: skip
    loops = [("decode_loop", at + 91 + 10 * k, at + 101 + 10 * k) for k in range(5)]
    made.thread(
        d_trace, root, "Decode Scheduler", decode_pid + 1,
        [
            ("decode_prepare", at + 3, at + 4), ("decode_bootstrap", at + 4, at + 10), ("decode_transferred", at + 10, at + 87),
            ("decode_waiting", at + 87, at + 90), ("decode_forward", at + 90, at + 142, [("fake_output", at + 90, at + 91), *loops]),
        ],
        tp_rank=0, pp_rank=0, dp_rank=0, host=d_host,
    )  # fmt: skip
    return p_rid, d_rid


def sender(made: Traces, room: int, start: float, end: float, *, trace: str) -> None:
    """Mooncake's sending threads: a trace that names nothing but the room."""
    root = made.add(trace, f"Sender Req {hex(room)[:8]}", start - 1, end, rid=hex(room), module="sglang::mooncake", bootstrap_room=hex(room))  # fmt: skip
    made.thread(trace, root, "unknown", 900, [("mooncake_send", start - 1, start)])
    made.thread(trace, root, "mooncake transfer worker 0", 901, [("mooncake_worker_send", start, end)], tp_rank=0)  # fmt: skip


SERVERS = {  # role and number -> (pid, host id, address, clock ahead in ms, zone of its log in hours)
    "prefill-0": (12_000, "a0" * 16, "10.0.0.1:30000", 0.0, 0),
    "prefill-1": (13_000, "a1" * 16, "10.0.0.2:30000", 300.0, 9),
    "decode-0": (14_000, "d0" * 16, "10.0.1.1:30001", 0.0, 0),
    "decode-1": (15_000, "d1" * 16, "10.0.1.2:30001", -200.0, 0),
}


def fleet(folder: Path, requests: int = 24, *, spans: bool = True, logs: bool = True) -> None:
    """Two prefill and two decode servers behind smg: its spans, theirs, and the logs of all four on their clocks."""
    made = Traces()
    lines: dict[str, list[tuple[float, str]]] = {name: [] for name in SERVERS}
    for n in range(requests):
        at, trace, room = 250.0 * n, f"{n + 1:032x}", 771_100 + n
        p, d = f"prefill-{n % 2}", f"decode-{n // 2 % 2}"
        (p_pid, p_host, p_address, p_ahead, _), (d_pid, d_host, d_address, d_ahead, _) = SERVERS[p], SERVERS[d]  # fmt: skip
        sent = f"http://{p_address}", f"http://{d_address}"
        top = made.add(
            trace, "http_request", at - 5, at + 146, resource={"service.name": "smg"}, scope="smg", method="POST",
            path="/generate", request_id=f"gnt-{n}", status_code="200",
            events=[("Sending concurrent requests", at - 1, {"prefill_url": sent[0], "decode_url": sent[1]})],
        )  # fmt: skip
        rids = pair(
            made, n, at, room=room, prefill_pid=p_pid, decode_pid=d_pid, p_ahead=p_ahead, d_ahead=d_ahead,
            p_host=p_host, d_host=d_host, router=top, trace=trace,
        )  # fmt: skip
        entry = (T0 / 1e6 + at + p_ahead + 5) / 1e3, (T0 / 1e6 + at + d_ahead + 4) / 1e3
        lines[p].append((at + 15, "Prefill batch, #new-seq: 1, #new-token: 400, #cached-token: 100, token usage: 0.10, #running-req: 0, #queue-req: 0, #bootstrap-req: 0, #inflight-req: 1, cuda graph: False, input throughput (token/s): 8000.00"))  # fmt: skip
        lines[p].append((at + 84, f"ReqTimeStats(rid={rids[0]}, bootstrap_room={room}, input_len=500, cached_input_len=100, output_len=1, attempts=1, type=prefill): bootstrap_duration=5.00ms, queue_duration=4.00ms, forward_duration=70.00ms, entry_time={entry[0]:.3f}, transfer_speed=2.00 GB/s, transfer_total=40.00 MB"))  # fmt: skip
        lines[d].append((at + 100, "Decode batch, #running-req: 1, #token: 500, token usage: 0.20, pre-allocated usage: 0.00, #prealloc-req: 0, #transfer-req: 0, #retracted-req: 0, cuda graph: True, gen throughput (token/s): 20.00, #queue-req: 0"))  # fmt: skip
        lines[d].append((at + 142, f"ReqTimeStats(rid={rids[1]}, bootstrap_room={room}, input_len=500, cached_input_len=0, output_len=6, attempts=1, type=decode): bootstrap_duration=4.00ms, alloc_wait_duration=2.00ms, transfer_duration=77.00ms, queue_duration=3.00ms, forward_duration=52.00ms, entry_time={entry[1]:.3f}"))  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    if spans:
        made.write(folder / "traces.jsonl")
    for name, said in lines.items() if logs else ():
        pid, _, address, ahead, zone = SERVERS[name]
        host, port = address.split(":")
        begin = [
            (-9000.0, f"server_args=ServerArgs(model_path='m/x', host='{host}', port={port}, tp_size=1, disaggregation_mode='{name.split('-')[0]}', disaggregation_transfer_backend='mooncake', chunked_prefill_size=8192)"),
            (-8000.0, f"INFO:     Started server process [{pid}]"),
        ]  # fmt: skip
        stamped = [
            f"[{datetime.fromtimestamp((T0 / 1e6 + at + ahead) // 1e3 + 3600 * zone, UTC):%Y-%m-%d %H:%M:%S}{'' if at < 0 else ' TP0'}] {text}\n"
            for at, text in begin + said
        ]  # fmt: skip
        (folder / f"{name}.log").write_text("".join(stamped), "utf-8")
