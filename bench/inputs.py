"""Large logs, metrics and tables: how long `pdtrace ingest` takes, and whether memory grows with the file.

The lines have the form of those of vLLM 0.24 (`--enable-logging-iteration-details`) and of its /metrics; numbers
and times go on from line to line. Each kind is read at two sizes.

    python -m bench.inputs                       100 MB and 300 MB of each
    python -m bench.inputs --mb 10 --kinds log   a quick look
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bench.measure import Figure, run, table

START = datetime(2026, 11, 29, 22, 57, 56, tzinfo=UTC)


def log_lines(draw: random.Random) -> Iterator[str]:
    """A server's log: an iteration a line, its averages every ten seconds, a scrape every second."""
    at, step = START, 0
    head = "(APIServer pid=20687) INFO {} [loggers.py:{}] Engine 000: "
    while True:
        prefills, decodes = int(draw.random() < 0.02), draw.randrange(1, 64)
        took = draw.uniform(1.5, 4) + prefills * draw.uniform(20, 200)
        before, at, step = at, at + timedelta(milliseconds=took), step + 1
        stamp = f"{at:%m-%d %H:%M:%S}"
        yield (
            f"{head.format(stamp, 199)}Iteration({step}): {prefills} context requests, {prefills * draw.randrange(2048)}"
            f" context tokens, {decodes} generation requests, {decodes} generation tokens,"
            f" iteration elapsed time: {took:.2f} ms, CPU KV cache usage: {draw.random() * 80:.1f}%\n"
        )
        if before.second != at.second:
            yield 'INFO:     127.0.0.1:38224 - "GET /metrics HTTP/1.1" 200 OK\n'
        if before.second // 10 != at.second // 10:
            yield (
                f"{head.format(stamp, 335)}Avg prompt throughput: 512.0 tokens/s, Avg generation throughput:"
                f" 990.1 tokens/s, Running: {decodes} reqs, Waiting: 0 reqs, CPU KV cache usage: 40.0%,"
                " Prefix cache hit rate: 11.0%\n"
            )


def metrics_lines(draw: random.Random) -> Iterator[str]:
    """Scrapes of /metrics, one a second, each with its stamp: gauges, counters and histograms."""
    label = 'engine="0",model_name="m"'
    counts = dict.fromkeys(("prompt_tokens", "generation_tokens", "request_success"), 0)
    buckets = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0]
    names = [f"vllm:{n}_seconds" for n in ("time_to_first_token", "e2e_request_latency", "request_queue_time")]  # fmt: skip
    seen = {name: [0] * (len(buckets) + 1) for name in names}
    second = 0
    while True:
        second += 1
        yield f"# scrape_ts {START.timestamp() + second:.1f}\n"
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            yield f"# TYPE vllm:{gauge} gauge\nvllm:{gauge}{{{label}}} {draw.randrange(64)}.0\n"
        for name in counts:
            counts[name] += draw.randrange(1000)
            yield f"# TYPE vllm:{name} counter\nvllm:{name}_total{{{label}}} {counts[name]}.0\n"
        for name in names:
            yield f"# TYPE {name} histogram\n"
            seen[name] = [count + index for index, count in enumerate(seen[name])]
            for le, count in zip([*map(str, buckets), "+Inf"], seen[name], strict=True):
                yield f'{name}_bucket{{{label},le="{le}"}} {count}.0\n'
            yield f"{name}_count{{{label}}} {seen[name][-1]}.0\n{name}_sum{{{label}}} {second}.5\n"


def table_lines(draw: random.Random) -> Iterator[str]:
    """A table of requests."""
    yield "request_id,start_time,prompt_tokens,output_tokens,ttft_ms,tpot_ms,latency_ms,worker\n"
    at = START.timestamp()
    number = 0
    while True:
        number += 1
        at += draw.expovariate(100)
        output, ttft, tpot = draw.randrange(1, 400), draw.uniform(30, 900), draw.uniform(8, 40)
        yield (
            f"req-{number:08},{at:.6f},{draw.randrange(1, 4000)},{output},{ttft:.3f},{tpot:.3f},"
            f"{ttft + tpot * (output - 1):.3f},worker-{number % 8}\n"
        )


KINDS: dict[str, tuple[str, Callable[[random.Random], Iterator[str]]]] = {
    "log": ("server.log", log_lines),
    "metrics": ("metrics.prom", metrics_lines),
    "table": ("requests.csv", table_lines),
}


def write(path: Path, lines: Iterator[str], size: int) -> None:
    """Lines up to a size."""
    with path.open("w") as out:
        written = 0
        while written < size:
            written += out.write(next(lines))


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Generate, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=300, help="size of the larger file")
    parser.add_argument("--kinds", default="log,metrics,table")
    options = parser.parse_args(arguments)
    rows = [("", "MB", "wall s", "CPU s", "MB per CPU s", "peak MB")]
    figures = []
    with tempfile.TemporaryDirectory(prefix="pdtrace-bench-") as folder:
        for kind in options.kinds.split(","):
            name, lines = KINDS[kind]
            path, peaks = Path(folder) / name, []
            for size in (options.mb / 3, options.mb):
                write(path, lines(random.Random(11)), int(size * 1e6))
                target = Path(folder) / "x.duckdb"
                target.unlink(missing_ok=True)
                done = run(
                    [sys.executable, "-m", "pdtrace", "ingest", str(path), "-o", str(target)]
                )
                peaks.append(done.peak_mb)
                rows.append(
                    (kind, f"{size:.0f}", f"{done.wall_s:.1f}", f"{done.cpu_s:.1f}", f"{size / done.cpu_s:.1f}", f"{done.peak_mb:.0f}")
                )  # fmt: skip
            figures.append(
                Figure(f"{kind} of {options.mb} MB: memory against a third of it", f"{peaks[1] / peaks[0]:.2f}x", "does not grow")
            )  # fmt: skip
    table("Large logs, metrics and tables: pdtrace ingest, once each", rows)
    return figures


if __name__ == "__main__":
    main()
