"""The router of the example: long prompts to prefill and decode workers, sessions that stay put to the aggregated one.

    python router.py PORT FOLDER PREFILL_URL DECODE_URL AGGREGATED_URL

Lines that pdtrace needs end with `# pdtrace`.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as Http
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import pdtrace  # pdtrace
from pdtrace import instrumentation as pdt  # pdtrace
from pdtrace.instrumentation import asgi, httpx_client  # pdtrace


def application(prefill: str, decode: str, aggregated: str) -> Starlette:
    client = httpx.AsyncClient(timeout=60)

    async def completions(http: Http) -> Response:
        body = await http.json()
        headers = {"x-request-id": http.headers.get("x-request-id") or str(uuid.uuid4())}
        split = body.pop("split", False)
        target = decode if split else aggregated
        with pdt.phase("router", policy="split" if split else "local", worker=target):  # pdtrace
            pass
        if split:
            await client.post(f"{prefill}/v1/completions", json=body, headers=headers)
            body["kv_from"] = prefill

        async def answer() -> AsyncIterator[bytes]:
            url = f"{target}/v1/completions"
            async with client.stream("POST", url, json=body, headers=headers) as upstream:
                async for chunk in upstream.aiter_raw():
                    yield chunk

        return StreamingResponse(answer(), media_type="text/event-stream", headers=headers)

    routes: list[Any] = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/health", lambda _: JSONResponse({})),
    ]
    return Starlette(routes=routes)


def main(port: str, folder: str, prefill: str, decode: str, aggregated: str) -> None:
    pdtrace.instrument(folder, service="router", role="router")  # pdtrace
    httpx_client.instrument()  # pdtrace
    app = asgi.PdtraceMiddleware(application(prefill, decode, aggregated))  # pdtrace
    uvicorn.run(app, port=int(port), log_level="error")


if __name__ == "__main__":
    main(*sys.argv[1:])
