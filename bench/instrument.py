"""python -m bench.instrument: what the instrumentation costs the serving process.

Marks: CPU time of the serving thread a request, phase and token, our recorder and the plain
OpenTelemetry SDK (BatchSpanProcessor, no-op exporter) in turn in one process; the whole process's
CPU beside it, so that work on other threads is not hidden. Scheduler: what a step of vLLM's recorded
scheduler costs the engine's thread (stand-ins of vLLM's objects; bench.vllm runs the real one). Proxy: an asyncio proxy streams tokens
from a fake engine to clients, with and without the middleware, in turn, block by block.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import mean, median, quantiles, stdev
from typing import Any

from bench.measure import table

REQUESTS, PHASES, TOKENS, ROUNDS = 300, 4, 200, 25


def _cpu(work: Callable[[], Any]) -> tuple[float, float]:
    """(CPU seconds of this thread, of the whole process) for a call."""
    thread, process = time.thread_time(), time.process_time()
    work()
    return time.thread_time() - thread, time.process_time() - process


def marks() -> None:
    """One request with phases and tokens, ours and the SDK's, in microseconds."""
    from opentelemetry.propagate import extract
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    import pdtrace
    from pdtrace import instrumentation as pdt
    from pdtrace.instrumentation.sdk import Bridge

    class Nowhere(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=100_000))
    tracer = provider.get_tracer("bench")
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}

    def ours(phases: int, tokens: int) -> None:
        for _ in range(REQUESTS):
            with pdt.request(headers, model="m", prompt_tokens=100) as request:
                for _ in range(phases):
                    with request.phase("prefill", tokens=100):
                        pass
                for _ in range(tokens):
                    request.token()

    def sdk(phases: int, tokens: int) -> None:
        for _ in range(REQUESTS):
            around = extract(headers)  # joins the caller's trace, as ours does
            with tracer.start_as_current_span("request", around, attributes={"model": "m", "prompt": 100}) as span:  # fmt: skip
                for _ in range(phases):
                    with tracer.start_as_current_span("prefill", attributes={"tokens": 100}):
                        pass
                for _ in range(tokens):
                    span.add_event("token")

    def bridged(phases: int, tokens: int) -> None:
        ours(phases, tokens)

    figures: dict[str, list[tuple[float, ...]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for name, function in (("pdtrace, OTLP files", ours), ("pdtrace, into the SDK", bridged), ("OpenTelemetry SDK", sdk)):  # fmt: skip
                if name.endswith("files"):
                    pdtrace.instrument(folder)
                elif name.endswith("the SDK"):
                    bridge = Bridge(provider, "0")
                    from pdtrace.instrumentation import api
                    from pdtrace.instrumentation.recorder import Recorder

                    api._recorder = Recorder(lambda bridge=bridge: bridge, opener=bridge)
                base, whole_base = _cpu(lambda f=function: (f(0, 0), _flush(provider)))
                phases, whole_phases = _cpu(lambda f=function: (f(PHASES, 0), _flush(provider)))
                tokens, whole_tokens = _cpu(lambda f=function: (f(0, TOKENS), _flush(provider)))
                figures.setdefault(name, []).append(
                    (
                        base / REQUESTS * 1e6,
                        whole_base / REQUESTS * 1e6,
                        (phases - base) / REQUESTS / PHASES * 1e6,
                        (whole_phases - whole_base) / REQUESTS / PHASES * 1e6,
                        (tokens - base) / REQUESTS / TOKENS * 1e6,
                        (whole_tokens - whole_base) / REQUESTS / TOKENS * 1e6,
                        (phases + tokens - base) / REQUESTS * 1e6,
                        (whole_phases + whole_tokens - whole_base) / REQUESTS * 1e6,
                    )
                )
                pdtrace.uninstrument()
    whole = f"request, {PHASES} phases, {TOKENS} tokens"
    rows = [("", "request", "all threads", "phase", "all threads", "token", "all threads", whole, "all threads")]  # fmt: skip
    for name, runs in figures.items():
        rows.append((name, *(f"{median(column):.2f}" for column in zip(*runs, strict=True))))
    table(f"Marks: microseconds of CPU, of the serving thread and of the process, median of {ROUNDS} in turn", rows)  # fmt: skip
    _against_the_sdk(figures["pdtrace, into the SDK"], figures["OpenTelemetry SDK"])
    print("Goals: files: phase <= 2, token <= 0.3; into the SDK: at most 10 % above the SDK.")


def _against_the_sdk(bridged: list[tuple[float, ...]], sdk: list[tuple[float, ...]]) -> None:
    """Ratios of rounds that followed one another, all threads. Our request has one attribute more (its length)."""
    rows = [("all threads, into the SDK over the SDK itself", "median", "quartiles")]
    for title, column in (("request", 1), ("phase", 3), ("token", 5), ("the whole", 7)):
        ratios = [a[column] / b[column] for a, b in zip(bridged, sdk, strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        rows.append((title, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"))
    table("Bridge", rows)


def scheduler(running: int = 256, steps: int = 300) -> None:
    """What vLLM's recorded scheduler adds to a step on the engine's thread; vLLM's objects are stand-ins."""
    from types import SimpleNamespace as Shape

    import pdtrace
    from pdtrace.instrumentation.vllm.book import Book
    from pdtrace.instrumentation.vllm.lives import Deployment

    class All(dict[str, Any]):
        def __contains__(self, _: object) -> bool:
            return True

    engine = Shape(requests=All(), connector=None, get_request_counts=lambda: (running, 0), kv_cache_manager=Shape(usage=0.5))  # fmt: skip

    def request(name: str) -> Any:
        return Shape(request_id=name, num_prompt_tokens=500, num_tokens=500, max_tokens=9999, status=None)  # fmt: skip

    def output(fresh: list[str], known: list[str], context: int) -> Any:
        new = [Shape(req_id=name, num_computed_tokens=0) for name in fresh]
        cached = Shape(req_ids=known, num_computed_tokens=[context] * len(known))
        counts = {**dict.fromkeys(known, 1), **dict.fromkeys(fresh, 500)}
        return Shape(scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=counts)  # fmt: skip

    def answers(names: list[str], end: str | None = None) -> Any:
        return {0: Shape(outputs=[Shape(request_id=n, new_token_ids=[7], finish_reason="length" if n == end else None) for n in names])}  # fmt: skip

    names = [f"chatcmpl-{number:032x}-0badcafe" for number in range(running)]
    rows = [("", "us a step", "us a token")]
    found: dict[str, list[float]] = {"decodes only": [], "a prompt beside them": []}
    with tempfile.TemporaryDirectory() as folder:
        pdtrace.instrument(folder)
        book = Book(Deployment(model="m"))
        for name in names:
            book.added(request(name))
        first = output(names, [], 0)
        book.scheduled(engine, first, time.perf_counter_ns())
        book.updated(engine, first, answers(names), time.perf_counter_ns())
        for _ in range(5):
            plain = [output([], names, 500 + n) for n in range(steps)]
            made = answers(names)
            began = time.thread_time()
            for one in plain:
                book.scheduled(engine, one, time.perf_counter_ns())
                book.updated(engine, one, made, time.perf_counter_ns())
            found["decodes only"].append(time.thread_time() - began)
            mixed = [(request(f"chatcmpl-x{n}"), output([f"chatcmpl-x{n}"], names, 500), answers([*names, f"chatcmpl-x{n}"], f"chatcmpl-x{n}")) for n in range(steps)]  # fmt: skip
            began = time.thread_time()
            for asked, one, made in mixed:
                book.added(asked)
                book.scheduled(engine, one, time.perf_counter_ns())
                book.updated(engine, one, made, time.perf_counter_ns())
            found["a prompt beside them"].append(time.thread_time() - began)
        book.closed()
        pdtrace.uninstrument()
    for name, runs in found.items():
        step = median(runs) / steps * 1e6
        rows.append((name, f"{step:.0f}", f"{step / running:.2f}"))
    table(f"vLLM's scheduler, {running} requests running: added CPU of the engine's thread, median of 5", rows)  # fmt: skip


def _flush(provider: Any) -> None:
    from pdtrace import instrumentation as pdt

    pdt.flush()
    provider.force_flush()


PROXY = """
import asyncio, json, sys, time

from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"token"}}]}\\n\\n'
streams, tokens, rate, blocks, folder = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
import pdtrace
from pdtrace.instrumentation.asgi import PdtraceMiddleware

async def engine(scope, receive, send):
    "Tokens at the rate, on a fixed grid."
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    start = time.perf_counter()
    for n in range(tokens):
        await asyncio.sleep(max(0, start + n * streams / rate - time.perf_counter()))
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\\n\\n"})

async def chat(request):
    async def answer():
        queue = asyncio.Queue()
        async def send(message):
            if message["type"] == "http.response.body":
                await queue.put(message.get("body", b""))
        task = asyncio.create_task(engine(None, None, send))
        while True:
            part = await queue.get()
            yield part
            if part.endswith(b"[DONE]\\n\\n"):
                return
    return StreamingResponse(answer(), media_type="text/event-stream")

app = PdtraceMiddleware(Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])]))

async def one(gaps):
    body = json.dumps({"model": "m", "stream": True, "messages": []}).encode()
    sent = False
    async def receive():
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.sleep(3600)
    last = None
    async def send(message):
        nonlocal last
        now = time.perf_counter()
        if message["type"] == "http.response.body" and message.get("body"):
            if last is not None:
                gaps.append(now - last)
            last = now
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b"",
             "http_version": "1.1", "scheme": "http", "server": ("x", 1), "client": ("x", 1), "root_path": "", "raw_path": b""}
    await app(scope, receive, send)

async def block():
    gaps = []
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(one(gaps) for _ in range(streams)))
    return time.process_time() - cpu, time.perf_counter() - wall, sorted(gaps)[int(len(gaps) * 0.99)]

async def main():
    await block()
    for number in range(blocks):
        on = number % 4 in (1, 2)
        if on:
            pdtrace.instrument(folder)
        figures = await block()
        if on:
            pdtrace.uninstrument()
        print(json.dumps([on, *figures]), flush=True)

asyncio.run(main())
"""


def proxy(streams: int, tokens: int, rate: float, blocks: int) -> None:
    """Added CPU a token on a proxy, and p99 of the gaps, with 95 % intervals over paired blocks."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(streams), str(tokens), str(rate), str(blocks), folder]
        done = subprocess.run([sys.executable, "-c", PROXY, *words], capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    off, on = [f for f in found if not f[0]], [f for f in found if f[0]]
    count = streams * tokens
    rows = [("", "off", "on", "difference", "95 % interval")]
    for title, index, scale in (("CPU us a token", 1, 1e6 / count), ("tokens/s", 2, None), ("ITL p99 ms", 3, 1e3)):  # fmt: skip
        a = [count / f[2] if scale is None else f[index] * scale for f in off]
        b = [count / f[2] if scale is None else f[index] * scale for f in on]
        differences = [y - x for x, y in zip(a, b, strict=True)]
        half = 1.96 * stdev(differences) / len(differences) ** 0.5
        middle = mean(differences)
        rows.append((title, f"{mean(a):.3f}", f"{mean(b):.3f}", f"{middle:+.3f}", f"{middle - half:+.3f} to {middle + half:+.3f}"))  # fmt: skip
    table(f"Asyncio proxy, {streams} streams, {rate:,.0f} tokens/s, {blocks} blocks in turn", rows)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.instrument", description=__doc__)
    parser.add_argument("--blocks", type=int, default=24, help="blocks of the proxy measurement")
    given = parser.parse_args(arguments)
    marks()
    scheduler()
    proxy(40, 100, 2000, given.blocks)


if __name__ == "__main__":
    main()
