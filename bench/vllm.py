"""python -m bench.vllm: what pdtrace's doors cost a real vLLM server on the CPU.

Two servers of the same tiny model stand side by side, one of them with --scheduler-cls and --middleware; they are
loaded in turn, block by block, in changing order. CPU seconds are those of each process (API server, engine
core, worker) over the block; throughput and the longest hundredth of token gaps are what the client saw.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.measure import table

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "engines"))

ARMS = ("plain", "recorded")
TOKENS = 64
_TICK = os.sysconf("SC_CLK_TCK")


def processes(leader: int) -> dict[str, float]:
    """CPU seconds used so far by the processes of a server, by their kind."""
    used: dict[str, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
            title = (entry / "cmdline").read_text()
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        if int(fields[2]) != leader:  # its process group
            continue
        known = [kind for kind in ("EngineCore", "Worker") if kind in title]
        kind = known[0] if known else "APIServer" if int(entry.name) == leader else "other"
        used[kind] = used.get(kind, 0.0) + (int(fields[11]) + int(fields[12])) / _TICK
    return used


async def block(url: str, requests: int, at_once: int) -> dict[str, Any]:
    """Load one server; seconds and the gaps between chunks."""
    gate = asyncio.Semaphore(at_once)
    gaps: list[float] = []

    async def one(client: httpx.AsyncClient, number: int) -> int:
        body = {
            "model": "tiny", "prompt": f"request {number} " + "ka lo mi " * 8, "max_tokens": TOKENS, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        tokens, last = 0, 0.0
        async with gate, client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                now = time.perf_counter()
                if line.startswith("data: {") and '"text"' in line:
                    tokens += 1
                    if last:
                        gaps.append(now - last)
                    last = now
        return tokens

    start = time.perf_counter()
    async with httpx.AsyncClient(timeout=600) as client:
        chunks = sum(await asyncio.gather(*(one(client, n) for n in range(requests))))
    return {"seconds": time.perf_counter() - start, "gaps": gaps, "chunks": chunks}


def measured(servers: dict[str, tuple[str, int]], blocks: int, requests: int, at_once: int) -> dict[str, list[dict[str, float]]]:  # fmt: skip
    """Blocks in turn: for each arm and block, CPU milliseconds a request, tokens a second, p99 of gaps in ms."""
    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for number in range(blocks + 1):
        for arm in ARMS if number % 2 else ARMS[::-1]:
            url, leader = servers[arm]
            before = processes(leader)
            seen = asyncio.run(block(url, requests, at_once))
            time.sleep(0.5)  # what is written behind belongs to the block
            after = processes(leader)
            if number == 0:
                continue  # warm-up
            cpu = {kind: 1e3 * (after[kind] - before.get(kind, 0.0)) / requests for kind in after}
            rows[arm].append(
                {
                    **{f"CPU {kind}, ms a request": cpu[kind] for kind in sorted(cpu)},
                    "CPU in all, ms a request": sum(cpu.values()),
                    "tokens a second": requests * TOKENS / seen["seconds"],
                    "p99 of token gaps, ms": 1e3 * float(np.quantile(seen["gaps"], 0.99)),
                }
            )
    return rows


def interval(differences: np.ndarray[Any, Any]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    dice = np.random.default_rng(1)
    means = dice.choice(differences, (20_000, differences.size)).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def shown(rows: dict[str, list[dict[str, float]]]) -> list[tuple[str, str, str]]:
    """Plain value and what recording adds, with its interval over the pairs of blocks."""
    lines = []
    for name in rows["plain"][0]:
        plain = np.array([row[name] for row in rows["plain"]])
        recorded = np.array([row.get(name, 0.0) for row in rows["recorded"]])
        low, high = interval(recorded - plain)
        base = plain.mean()
        share = f" ({100 * low / base:+.0f} to {100 * high / base:+.0f} %)" if base else ""
        lines.append((name, f"{base:.2f}", f"{(recorded - plain).mean():+.2f}, {low:+.2f} to {high:+.2f}{share}"))  # fmt: skip
    return lines


def main() -> None:
    import run_vllm
    import tiny_model
    from processes import free_ports, running

    parser = argparse.ArgumentParser(prog="python -m bench.vllm", description=__doc__)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--at-once", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as them:
        model = tiny_model.make(Path(folder) / "model")
        servers = {}
        for arm, port in zip(ARMS, free_ports(2), strict=True):
            run_vllm.start(them, arm, model, port, None, doors=arm == "recorded")
            servers[arm] = (f"http://127.0.0.1:{port}", them.processes[arm].pid)
        for url, _ in servers.values():
            them.wait(f"{url}/health", lambda _: True, seconds=900)
        rows = measured(servers, arguments.blocks, arguments.requests, arguments.at_once)
        them.stop(60)
    title = f"{arguments.blocks} blocks of {arguments.requests} requests, {TOKENS} tokens each, {arguments.at_once} at once"  # fmt: skip
    table(title, [("", "plain", "recorded adds (95 % interval)"), *shown(rows)])


if __name__ == "__main__":
    main()
