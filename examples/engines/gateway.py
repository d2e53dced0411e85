"""A plain gateway before an OpenAI-compatible server; it knows nothing of pdtrace.

pdtrace run -o traces/ --role gateway -- python gateway.py PORT SERVER_URL
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

PORT, SERVER = int(sys.argv[1]), sys.argv[2]
client = httpx.AsyncClient(base_url=SERVER, timeout=120)


async def forward(request: Request) -> StreamingResponse:
    """Pass the call on, and the answer back as it comes."""
    names = ("content-type", "x-request-id")
    headers = {name: value for name, value in request.headers.items() if name in names}
    call = client.build_request("POST", request.url.path, content=await request.body(), headers=headers)  # fmt: skip
    answer = await client.send(call, stream=True)

    async def chunks() -> AsyncIterator[bytes]:
        async for chunk in answer.aiter_raw():
            yield chunk
        await answer.aclose()

    return StreamingResponse(
        chunks(), status_code=answer.status_code, media_type=answer.headers.get("content-type")
    )


async def health(_: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


app = Starlette(
    routes=[
        Route("/health", health),
        Route("/v1/{path:path}", forward, methods=["POST"]),
    ]
)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning")
