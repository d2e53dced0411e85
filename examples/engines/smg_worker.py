"""A stub of an SGLang worker for the gateway: it answers what the gateway asks and makes tokens of nothing.

python smg_worker.py prefill|decode|aggregated PORT TRACES
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import pdtrace
from pdtrace import instrumentation as pdt
from pdtrace.instrumentation import asgi

ROLE, PORT, TRACES = sys.argv[1], int(sys.argv[2]), sys.argv[3]
MODEL = "stub"
MODES = {"aggregated": "null"}
client = httpx.AsyncClient(timeout=60)
rooms: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)  # whose KV is here


async def said(request: Request) -> Response:
    """What the gateway wants to know of a worker."""
    info = {"model_path": MODEL, "served_model_name": MODEL, "is_generation": True, "tp_size": 1, "dp_size": 1}  # fmt: skip
    info |= {"version": "0.5.23", "disaggregation_mode": MODES.get(ROLE, ROLE), "load_balance_method": "round_robin"}  # fmt: skip
    path = request.url.path
    if path == "/v1/models":
        info = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "stub", "max_model_len": 8192}]}  # fmt: skip
    if path in ("/get_load", "/v1/loads"):
        return JSONResponse([{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}])
    return JSONResponse(info)


@pdt.phase("prefill")
async def prefill(tokens: int, room: int | None) -> None:
    await asyncio.sleep(0.005 + tokens / 100_000)
    if room is not None:
        rooms[room].set()


@pdt.phase("kv_wait_upper_bound")
async def pull(body: dict[str, Any]) -> None:
    """Wait at the prefill worker's door until the KV of the room is there: the gateway asks both at once."""
    door = f"http://{body['bootstrap_host']}:{body['bootstrap_port']}/kv/{body['bootstrap_room']}"
    (await client.get(door)).raise_for_status()


async def kv(request: Request) -> Response:
    await rooms[int(request.path_params["room"])].wait()
    del rooms[int(request.path_params["room"])]
    return JSONResponse({})


async def generate(request: Request) -> Response:
    """Chunks at an even pace; a prefill worker answers once, as SGLang's does."""
    body = await request.json()
    tokens = 1 if ROLE == "prefill" else int(body.get("max_tokens") or 8)
    prompt = len(json.dumps(body.get("messages") or body.get("prompt")))
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    if ROLE == "decode":
        await pull(body)
    else:
        await prefill(prompt, body.get("bootstrap_room"))

    def chunk(choices: list[dict[str, Any]], **more: object) -> bytes:
        kind = "chat.completion.chunk"
        content = {"id": "c", "object": kind, "created": 1, "model": MODEL, "choices": choices}
        return b"data: " + json.dumps(content | more).encode() + b"\n\n"

    async def stream() -> AsyncIterator[bytes]:
        for _ in range(tokens):
            yield chunk([{"index": 0, "delta": {"content": "x"}, "finish_reason": None}])
            await asyncio.sleep(0.004)
        yield chunk([{"index": 0, "delta": {}, "finish_reason": "length"}])
        yield chunk([], usage=usage)
        yield b"data: [DONE]\n\n"

    if body.get("stream"):
        return StreamingResponse(stream(), media_type="text/event-stream")
    message = {"role": "assistant", "content": "x" * tokens}
    choices = [{"index": 0, "message": message, "finish_reason": "length"}]
    return JSONResponse({"id": "c", "object": "chat.completion", "created": 1, "model": MODEL, "choices": choices, "usage": usage})  # fmt: skip


PAGES = ("health", "health_generate", "get_server_info", "server_info", "get_model_info", "model_info", "v1/models", "get_load", "v1/loads")  # fmt: skip
app = Starlette(
    routes=[
        *(Route(f"/{page}", said) for page in PAGES),
        Route("/kv/{room}", kv),
        Route("/v1/chat/completions", generate, methods=["POST"]),
        Route("/generate", generate, methods=["POST"]),
    ]
)
app.add_middleware(asgi.PdtraceMiddleware, role=ROLE)

if __name__ == "__main__":
    pdtrace.instrument(TRACES, service=f"stub-{ROLE}", role=ROLE)
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning")
