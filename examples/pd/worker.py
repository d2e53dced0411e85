"""A worker of the example: prefill, decode or aggregated. A real queue, batching loop and KV hand-over; model time is slept.

    python worker.py ROLE PORT FOLDER

Lines that pdtrace needs end with `# pdtrace`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as Http
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import pdtrace  # pdtrace
from pdtrace import instrumentation as pdt  # pdtrace

PREFILL_S_PER_TOKEN = 0.0001  # a prompt of 4,000 tokens takes 0.4 s
DECODE_STEP_S = 0.008
KV_BYTES_PER_TOKEN = 256  # small, so that loopback carries it; a real model has 100 KiB and more
LINK_BYTES_PER_S = 20e6


@dataclass
class Work:
    """A request in the engine."""

    prompt_tokens: int
    output_tokens: int
    key: str
    request: pdt.Request  # pdtrace
    has_kv: bool = False
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: asyncio.Queue[bool] = field(default_factory=asyncio.Queue)


class Engine:
    """One step after another: a waiting prompt first and alone, else one token for every running request."""

    def __init__(self) -> None:
        self.waiting: deque[Work] = deque()
        self.running: list[Work] = []
        self.kv: dict[str, int] = {}

    async def loop(self) -> None:
        steps = pdt.steps()  # pdtrace
        while True:
            if self.waiting:
                work = self.waiting.popleft()
                work.admitted.set()
                if not work.has_kv:
                    with work.request.phase("prefill"), steps.step() as step:  # pdtrace
                        tokens = work.prompt_tokens
                        step.set(
                            prefill_requests=1, prefill_tokens=tokens, decode_requests=0
                        )  # pdtrace
                        step.set(running=len(self.running) + 1)  # pdtrace
                        step.member(work.key, prefill_tokens=tokens)  # pdtrace
                        await asyncio.sleep(tokens * PREFILL_S_PER_TOKEN)
                self.running.append(work)
            elif self.running:
                with steps.step() as step:  # pdtrace
                    count = len(self.running)
                    step.set(decode_requests=count, prefill_tokens=0, running=count)  # pdtrace
                    await asyncio.sleep(DECODE_STEP_S)
            else:
                steps.flush()  # pdtrace
                await asyncio.sleep(0.001)
            for work in list(self.running):
                work.output_tokens -= 1
                if work.output_tokens <= 0:
                    self.running.remove(work)
                work.tokens.put_nowait(work.output_tokens <= 0)

    async def generate(self, work: Work) -> AsyncIterator[None]:
        """The tokens of a request, one at a time."""
        self.waiting.append(work)
        with work.request.phase("queue"):  # pdtrace
            await work.admitted.wait()
        done = await work.tokens.get()
        work.request.token()  # pdtrace
        yield
        with work.request.phase("decode"):  # pdtrace
            while not done:
                done = await work.tokens.get()
                work.request.token()  # pdtrace
                yield


def application(role: str) -> Starlette:
    engine = Engine()
    client = httpx.AsyncClient(timeout=60)

    async def completions(http: Http) -> Response:
        body = await http.json()
        request = pdt.request(http.headers, role=role, model="example")  # pdtrace
        request.set(prompt_tokens=len(body["prompt"]))  # pdtrace
        key = http.headers["x-request-id"]
        work = Work(len(body["prompt"]), body["max_tokens"], key, request)

        async def answer() -> AsyncIterator[bytes]:
            with request:  # pdtrace
                if body.get("kv_from"):
                    with request.transfer(backend="http") as moved:  # pdtrace
                        kv = await client.get(f"{body['kv_from']}/kv/{key}")
                        moved.set(bytes=len(kv.content))  # pdtrace
                    work.has_kv = True
                async for _ in engine.generate(work):
                    yield b'data: {"choices":[{"index":0,"text":"x"}]}\n\n'
                yield b"data: [DONE]\n\n"

        if role == "prefill":
            work.output_tokens = 1
            with request:  # pdtrace
                async for _ in engine.generate(work):
                    pass
                engine.kv[key] = work.prompt_tokens
            return JSONResponse({"choices": [{"index": 0, "text": "x"}]})
        return StreamingResponse(answer(), media_type="text/event-stream")

    async def kv(http: Http) -> Response:
        size = engine.kv.pop(http.path_params["key"]) * KV_BYTES_PER_TOKEN
        await asyncio.sleep(size / LINK_BYTES_PER_S)
        return Response(bytes(size))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(engine.loop())
        yield
        task.cancel()
        await client.aclose()
        pdt.flush()  # pdtrace

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/kv/{key}", kv),
        Route("/health", lambda _: JSONResponse({})),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def main(role: str, port: str, folder: str) -> None:
    pdtrace.instrument(folder, service=f"{role}-{port}", role=role)  # pdtrace
    uvicorn.run(application(role), port=int(port), log_level="error")


if __name__ == "__main__":
    main(*sys.argv[1:])
