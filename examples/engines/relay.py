"""What gateway.py and pd_proxy.py share: an answer passed on as it comes, and the server around the calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route


async def passed_on(client: httpx.AsyncClient, call: httpx.Request) -> StreamingResponse:
    """Make the call, and pass its answer on, chunk by chunk."""
    answer = await client.send(call, stream=True)

    async def chunks() -> AsyncIterator[bytes]:
        async for chunk in answer.aiter_raw():
            yield chunk
        await answer.aclose()

    return StreamingResponse(
        chunks(), status_code=answer.status_code, media_type=answer.headers.get("content-type")
    )


async def _health(_: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


def run(port: int, handler: Callable[[Request], Awaitable[StreamingResponse]]) -> None:
    """Answer calls below /v1/ with it until the process is ended."""
    routes = [Route("/health", _health), Route("/v1/{path:path}", handler, methods=["POST"])]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="warning")
