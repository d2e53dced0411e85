"""What instrumented code recorded, for tests: an exporter that keeps it, spans by name, plain attributes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from pdtrace.instrumentation import encode
from pdtrace.instrumentation.requests import Request

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
# A server of its own process: two events a call; VERSION is there to be replaced.
APP = """
import os

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    await receive()
    head = [(b"content-type", b"text/event-stream"), (b"x-pid", str(os.getpid()).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    for text in ("VERSION", "b"):
        body = b'data: {"choices":[{"text":"' + text.encode() + b'"}]}\\n\\n'
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\\n\\n"})
"""


class Kept:
    """An exporter that keeps what it is given."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.dropped = 0

    def export(self, requests: Sequence[Request], dropped: int) -> None:
        self.requests += requests
        self.dropped = dropped

    def close(self) -> None:
        pass

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [span for request in self.requests for span in encode.spans(request)]

    def named(self, name: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"] == name]


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {pair["key"]: plain(pair["value"]) for pair in span["attributes"]}


def plain(value: dict[str, Any]) -> Any:
    ((kind, inner),) = value.items()
    if kind != "arrayValue":
        return inner
    values = inner["values"]
    return [str(v) for v in values] if isinstance(values, array) else [plain(v) for v in values]
