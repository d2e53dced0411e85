"""A small load for an OpenAI-compatible server; what the client saw of each request is kept as the truth.

python load.py URL MODEL TRUTH.jsonl [--requests 40] [--rate 10] [--client httpx|openai]
pdtrace run -o traces/ -- python load.py URL MODEL TRUTH.jsonl --no-traceparent
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx

WORDS = ["ka", "lo", "mi", "ra", "tu", "ven", "sor", "pel", "dim", "ga", "ho", "nix"]


def prompts(count: int, long_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Short prompts, each eighth one long; half of them begin alike. A byte is a token of the tiny model."""
    dice = random.Random(seed)
    shared = " ".join(dice.choice(WORDS) for _ in range(60))
    made = []
    for number in range(count):
        length = long_tokens if number % 8 == 5 else dice.randint(60, 300)
        text = (shared if number % 2 else "") + " ".join(
            dice.choice(WORDS) for _ in range(length // 3)
        )
        made.append({"prompt": text[:long_tokens], "max_tokens": dice.randint(8, 32)})
    return made


class Client:
    """Sends one request and yields the chunks of its answer."""

    def __init__(self, kind: str, url: str, model: str) -> None:
        self.model = model
        self.plain = httpx.AsyncClient(base_url=url, timeout=120)
        self.openai = None
        if kind == "openai":
            from openai import AsyncOpenAI

            self.openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    async def chunks(self, body: dict[str, Any], headers: dict[str, str]) -> AsyncGenerator[dict[str, Any]]:  # fmt: skip
        """The chunks as they come."""
        if self.openai:
            extra = {"ignore_eos": body.pop("ignore_eos")}
            stream = await self.openai.chat.completions.create(
                **body, extra_headers=headers, extra_body=extra
            )
            async for chunk in stream:
                yield chunk.model_dump()
            return
        path = "/v1/chat/completions"
        async with self.plain.stream("POST", path, json=body, headers=headers) as answer:
            if answer.status_code != 200:
                await answer.aread()
                raise RuntimeError(f"{answer.status_code} {answer.text[:300]}")
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])


async def one(
    client: Client, name: str, what: dict[str, Any], headers: dict[str, str], *, leave: bool
) -> dict[str, Any]:
    """Send a request, and read it to its end or leave after three chunks; its row of the truth."""
    seen: dict[str, Any] = {
        "request_id": name,
        "chunks": 0,
        "usage": None,
        "error": None,
        "left": leave,
    }
    seen |= {"traceparent": headers.get("traceparent"), "start_ns": time.time_ns()}
    body = {
        "model": client.model, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        "max_tokens": what["max_tokens"], "messages": [{"role": "user", "content": what["prompt"]}],
    }  # fmt: skip
    try:
        chunks = client.chunks(body, headers)
        async for chunk in chunks:
            if chunk.get("usage"):
                seen["usage"] = chunk["usage"]
            if chunk["choices"]:  # noise may be no text, so empty ones count too
                seen["chunks"] += 1
                seen.setdefault("first_ns", time.time_ns())
            if leave and seen["chunks"] == 3:
                break
        await chunks.aclose()  # closes the connection of one that is left
    except Exception as error:  # whatever it is, it is a row of the truth
        seen["error"] = repr(error)
    seen["end_ns"] = time.time_ns()
    return seen


async def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Requests at random instants; rows in the order of sending."""
    dice = random.Random(arguments.seed)
    client = Client(arguments.client, arguments.url, arguments.model)
    tasks = []
    made = prompts(arguments.requests, arguments.long, arguments.seed)
    for number, what in enumerate(made):
        name = f"{arguments.name}-{number}"
        headers = {"x-request-id": name}
        if not arguments.no_traceparent:
            headers["traceparent"] = (
                f"00-{dice.getrandbits(128):032x}-{dice.getrandbits(64):016x}-01"
            )
        leave = arguments.leave > 0 and number % arguments.leave == arguments.leave - 1
        what["max_tokens"] += 200 if leave else 0
        tasks.append(asyncio.create_task(one(client, name, what, headers, leave=leave)))
        await asyncio.sleep(dice.expovariate(arguments.rate))
    return list(await asyncio.gather(*tasks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("truth", type=Path)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=10, help="requests a second")
    parser.add_argument("--long", type=int, default=3000, help="tokens of a long prompt")
    parser.add_argument(
        "--leave", type=int, default=0, metavar="N", help="each Nth is left after three chunks"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="load", help="begin of the request ids")
    parser.add_argument("--client", choices=("httpx", "openai"), default="httpx")
    parser.add_argument(
        "--no-traceparent", action="store_true", help="leave it to what records the client"
    )
    arguments = parser.parse_args()
    rows = asyncio.run(run(arguments))
    arguments.truth.write_text("".join(json.dumps(row) + "\n" for row in rows))
    failed = [row["error"] for row in rows if row["error"]]
    print(f"{len(rows)} requests, {len(failed)} failed {failed[:1]}")


if __name__ == "__main__":
    main()
