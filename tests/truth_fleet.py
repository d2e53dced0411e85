"""Fleets with known truth: prefill and decode workers, routers in front of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from truth_otlp import CLIENT, MS, SERVER, T0, S, Span, span_id, trace_id, uuid, write
from truth_vllm import Engine, Log, Request, load, resource, v1_span


def pair(
    n: int = 40,
    *,
    transfer_ms: float = 30.0,
    concurrent: bool = False,
    sync: bool = False,
    name: Callable[[int], str] = lambda i: f"cmpl-{uuid('pd', i)}-0",
    gap_ms: float = 3.0,
    **load_args: Any,
) -> tuple[list[Request], list[Request], Engine, Engine]:
    """Prefill and decode legs of the same requests, and their engines."""
    asked = load(n, T0, name=name, prompt=lambda d: d.randint(200, 900), **load_args)
    prefill = [
        Request(r.id, r.arrival, r.prompt, 1, max_tokens=1, trace=trace_id("p", r.id, r.arrival), span=span_id("p", r.id, r.arrival))
        for r in asked
    ]  # fmt: skip
    p = Engine(seed=2)
    p.run(prefill)
    decode = []
    for r, done in zip(asked, prefill, strict=True):
        at = done.arrival + MS if concurrent else done.last_seen + int(gap_ms * MS)
        leg = Request(
            r.id, at, r.prompt, r.output, trace=trace_id("d", r.id, at), span=span_id("d", r.id, at)
        )
        leg.cached = leg.prompt - (400 if sync else 0)
        leg.ready = 0 if sync else max(done.last_seen, at) + int(transfer_ms * MS)
        decode.append(leg)
    d = Engine(seed=3, per_token_ms=0.05 if sync else 0.0)
    d.run(decode)
    return prefill, decode, p, d


def pd_folder(
    folder: Path,
    legs: tuple[list[Request], list[Request], Engine, Engine],
    connector: str | None,
    log: bool = True,
) -> None:
    prefill, decode, p, d = legs
    ids = {"p": uuid("engine", "p"), "d": uuid("engine", "d")}
    for role, requests, engine, pid in (("p", prefill, p, 11_000), ("d", decode, d, 12_000)):
        res = resource(f"vllm-{role}", pid=pid)
        write(folder / f"{role}.traces.jsonl", [v1_span(r, res) for r in requests])
        if log:
            lines = Log(pid)
            lines.started(T0 - 60 * S, connector=connector, engine_id=ids[role])
            for r in requests:
                lines.request(r)
            lines.steps(engine.steps)
            lines.write(folder / f"{role}.log")


ROUTER = {
    "service.name": "vllm-router",
    "service.version": "0.1.17",
    "service.instance.id": uuid("router"),
}


def pd_name(i: int) -> str:
    hexes = uuid("pd-router", i).replace("-", "")
    return f"cmpl-___prefill_addr_10.0.0.1:8100___decode_addr_10.0.0.2:8200_{hexes}-0"


def hop(
    r: Request,
    phase: str,
    start: int,
    end: int,
    address: str,
    parent: str,
    code: int = 200,
    key: object = "",
) -> Span:
    host, port = address.split(":")
    attributes = {
        "http.request.method": "POST", "url.full": f"http://{address}/v1/completions",
        "server.address": host, "server.port": int(port), "http.response.status_code": code,
        "vllm.request_phase": phase, "busy_ns": "1000", "idle_ns": "2000",
    }  # fmt: skip
    return Span(
        ROUTER, "vllm-router", "POST /v1/completions", r.trace, span_id("hop", phase, r.id, r.arrival, key),
        start, end, parent, CLIENT, attributes, error=code >= 400,
    )  # fmt: skip


def routed(r: Request, start: int, end: int, code: int = 200) -> Span:
    attributes = {
        "http.request.method": "POST", "http.route": "/v1/completions", "url.path": "/v1/completions",
        "http.response.status_code": code, "request_id": f"cmpl-client{r.arrival}", "latency_ms": 3.0,
        **({"error": "prefill failed"} if code >= 400 else {}),
    }  # fmt: skip
    return Span(
        ROUTER, "vllm-router", "POST /v1/completions", r.trace, span_id("srv", r.id, r.arrival),
        start, end, None, SERVER, attributes, error=code >= 500,
    )  # fmt: skip


def rust_pd(
    legs: tuple[list[Request], list[Request], Engine, Engine], skew_ns: int = 0
) -> list[Span]:
    """Router, P and D spans of each request; every third call ends seconds late."""
    prefill, decode, _, _ = legs
    spans = []
    for i, (p, d) in enumerate(zip(prefill, decode, strict=True)):
        p.trace = d.trace = trace_id("router", p.id, p.arrival)
        server = routed(p, p.arrival - 3 * MS, d.last_seen + 2 * MS)
        late = (2 + i % 7) * S if i % 3 == 0 else MS
        first = hop(p, "prefill", p.arrival - MS, p.last_seen + late, "10.0.0.1:8100", server.span)
        second = hop(d, "decode", d.arrival - MS, d.last_seen + late, "10.0.0.2:8200", server.span)
        spans += [server, first, second]
        p.parent, d.parent = first.span, second.span
        spans.append(v1_span(p, resource("vllm-p", pid=11_000)))
        spans.append(v1_span(d, resource("vllm-d", pid=12_000), skew_ns=skew_ns))
        if i == 5:  # a first try on P that failed before the engine saw it
            spans.append(
                hop(
                    p,
                    "prefill",
                    p.arrival - 2 * MS,
                    p.arrival - MS,
                    "10.0.0.1:8100",
                    server.span,
                    503,
                    "a",
                )
            )
    return spans


def stack_spans(r: Request, url: str) -> list[Span]:
    res = {"service.name": "vllm-router"}
    server, call = span_id("s", r.id), span_id("c", r.id)
    r.parent = call
    common = {"vllm.request_id": r.id.removeprefix("chatcmpl-"), "vllm.model": "m"}
    return [
        Span(res, "vllm_router.services", "router /v1/chat/completions", r.trace, server, r.arrival - 4 * MS,
             r.last_seen + 3 * MS, None, SERVER, {"http.method": "POST", "http.target": "/v1/chat/completions", "http.status_code": 200, **common}),
        Span(res, "vllm_router.services", "process_request", r.trace, call, r.arrival - 2 * MS, r.last_seen + 2 * MS, server, CLIENT,
             {"vllm.backend_url": url, "vllm.routing_logic": "roundrobin", "vllm.is_streaming": True, **common}),
    ]  # fmt: skip


def two_workers(
    folder: Path, router: Callable[[Request, str], list[Span]]
) -> dict[str, tuple[Engine, list[Request]]]:
    """Three quarters of the requests on worker a; worker b has long prompts besides."""
    asked = load(
        80,
        T0,
        rate=12,
        name=lambda i: f"chatcmpl-{uuid('two', i)}",
        prompt=lambda d: d.randint(30, 60),
    )
    parts = {
        "a": [r for i, r in enumerate(asked) if i % 4],
        "b": [r for i, r in enumerate(asked) if not i % 4],
    }
    for r in parts["b"][::2]:
        r.prompt = 6000
    found, spans = {}, []
    for name, requests in parts.items():
        engine = Engine(seed=ord(name), per_token_ms=0.05 if name == "b" else 0.0005)
        engine.run(requests)
        pid = 21_000 + ord(name)
        url = f"http://worker-{name}:8000"
        spans += [s for r in requests for s in router(r, url)]
        spans += [v1_span(r, resource("vllm", key=name, pid=pid)) for r in requests]
        log = Log(pid)
        log.started(T0 - 60 * S)
        log.steps(engine.steps)
        log.write(folder / f"{name}.log")
        found[name] = (engine, requests)
    write(folder / "traces.jsonl", spans)
    return found
