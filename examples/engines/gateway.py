"""A plain gateway before an OpenAI-compatible server; it knows nothing of pdtrace.

pdtrace run -o traces/ --role gateway -- python gateway.py PORT SERVER_URL
"""

from __future__ import annotations

import sys

import httpx
from relay import passed_on, run
from starlette.requests import Request
from starlette.responses import StreamingResponse

PORT, SERVER = int(sys.argv[1]), sys.argv[2]
client = httpx.AsyncClient(base_url=SERVER, timeout=120)


async def forward(request: Request) -> StreamingResponse:
    """Pass the call on, and the answer back."""
    names = ("content-type", "x-request-id")
    headers = {name: value for name, value in request.headers.items() if name in names}
    content = await request.body()
    call = client.build_request("POST", request.url.path, content=content, headers=headers)
    return await passed_on(client, call)


if __name__ == "__main__":
    run(PORT, forward)
