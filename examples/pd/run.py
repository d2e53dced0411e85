"""Start the router and its three workers, load them for some seconds, stop them; traces of five processes stay.

python run.py FOLDER [SECONDS]
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

import pdtrace
from pdtrace.instrumentation import httpx_client

HERE = Path(__file__).parent
LONG, SHORT = 4000, 64  # prompt tokens
ROLES = ("prefill", "decode", "aggregated")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def start(folder: str) -> tuple[list[subprocess.Popen[bytes]], str]:
    """The four servers, and the router's address."""
    for _ in range(5):
        ports = free_ports(4)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        commands = [
            ["worker.py", role, str(port), folder] for role, port in zip(ROLES, ports, strict=False)
        ]
        commands.append(["router.py", str(ports[3]), folder, *urls[:3]])
        processes = [
            subprocess.Popen([sys.executable, str(HERE / name), *words])
            for name, *words in commands
        ]
        if all(map(_up, processes, urls)):
            return processes, urls[3]
        stop(processes)  # somebody else took one of the ports in the meantime
    raise SystemExit("the servers did not come up")


def _up(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until the server answers; False where it ended instead."""
    while process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{url}/health", timeout=5)
            return process.poll() is None
        time.sleep(0.1)
    return False


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End them, and wait until they have written what they hold."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


async def load(url: str, seconds: float) -> int:
    """Short requests all the time, a long prompt once a second; half of the short ones are split."""
    dice = random.Random(1)
    calls: list[asyncio.Task[None]] = []
    async with httpx.AsyncClient(timeout=60) as client:

        async def call(prompt: int, output: int, name: str, *, split: bool) -> None:
            body = {"model": "example", "stream": True, "prompt": "x" * prompt, "max_tokens": output, "split": split}  # fmt: skip
            await client.post(f"{url}/v1/completions", json=body, headers={"x-request-id": name})

        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            kind = "long" if number % 10 == 9 else "short"
            prompt, output = (LONG, 8) if kind == "long" else (SHORT, 60)
            split = kind == "short" and number % 2 == 0
            calls.append(asyncio.create_task(call(prompt, output, f"{kind}-{number}", split=split)))
            number += 1
            await asyncio.sleep(dice.expovariate(10))
        await asyncio.gather(*calls)
    return number


def main(folder: str = "traces", seconds: str = "12") -> None:
    processes, url = start(folder)
    try:
        pdtrace.instrument(folder, service="load", role="client")
        httpx_client.instrument()
        count = asyncio.run(load(url, float(seconds)))
        print(f"{count} requests; their traces are in {folder}")
    finally:
        stop(processes)
        pdtrace.uninstrument()


if __name__ == "__main__":
    main(*sys.argv[1:])
