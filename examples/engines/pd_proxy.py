"""A plain P/D proxy for two vLLM servers that share KV over NIXL; it knows nothing of pdtrace.

pdtrace run -o traces/ --role router -- python pd_proxy.py PORT PREFILL_URL DECODE_URL
"""

from __future__ import annotations

import sys

import httpx
from relay import passed_on, run
from starlette.requests import Request
from starlette.responses import StreamingResponse

PORT, PREFILL, DECODE = int(sys.argv[1]), sys.argv[2], sys.argv[3]
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}  # fmt: skip
client = httpx.AsyncClient(timeout=300)


async def serve(request: Request) -> StreamingResponse:
    """The prompt to the prefill server, its KV's address and the rest to the decode server."""
    body = await request.json()
    headers = {"x-request-id": request.headers.get("x-request-id", "")}
    first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": ASKED}
    first.pop("stream_options", None)
    prefilled = await client.post(f"{PREFILL}{request.url.path}", json=first, headers=headers)
    prefilled.raise_for_status()
    rest = {**body, "kv_transfer_params": prefilled.json()["kv_transfer_params"]}
    call = client.build_request("POST", f"{DECODE}{request.url.path}", json=rest, headers=headers)
    return await passed_on(client, call)


if __name__ == "__main__":
    run(PORT, serve)
