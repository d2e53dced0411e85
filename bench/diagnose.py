"""`pdtrace diagnose` on vLLM spans against `inflame report` (inflame-trace 0.1.0) on the same file."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from pathlib import Path

import orjson

from bench.measure import Figure, interleaved, table

SPANS_PER_LINE = 512


def generate(path: Path, spans: int) -> None:
    """Write `llm_request` spans as vLLM 0.32 emits them: OTLP/JSON lines, attributes as in a real run."""
    rnd = random.Random(11)
    now = 1_795_993_000_000_000_000
    resource = {
        "attributes": [
            {"key": "service.name", "value": {"stringValue": "vllm"}},
            {
                "key": "service.instance.id",
                "value": {"stringValue": "6d5c7d0e-3f7e-4f0c-9d29-3a2d1f6f7a10"},
            },
            {"key": "vllm.instrumenting_module_name", "value": {"stringValue": "vllm.llm_engine"}},
            {"key": "vllm.process_id", "value": {"stringValue": "4242"}},
        ]
    }
    with path.open("wb") as out:
        for first in range(0, spans, SPANS_PER_LINE):
            batch = []
            for _ in range(first, min(first + SPANS_PER_LINE, spans)):
                now += int(rnd.expovariate(40) * 1e9)
                prompt, output = (
                    1 + int(rnd.lognormvariate(6.2, 1.1)),
                    1 + int(rnd.expovariate(1 / 150)),
                )
                queue, prefill = rnd.expovariate(1 / 0.02), 0.008 + prompt * 6e-5
                decode = (output - 1) * rnd.uniform(0.012, 0.03)
                before = rnd.expovariate(1 / 0.01)
                ttft = before + queue + prefill
                doubles = {
                    "gen_ai.latency.time_to_first_token": ttft, "gen_ai.latency.e2e": ttft + decode,
                    "gen_ai.latency.time_in_queue": queue, "gen_ai.latency.time_in_model_prefill": prefill,
                    "gen_ai.latency.time_in_model_decode": decode,
                    "gen_ai.latency.time_in_model_inference": prefill + decode,
                    "gen_ai.request.top_p": 1.0, "gen_ai.request.temperature": 0.7,
                }  # fmt: skip
                ints = {
                    "gen_ai.usage.prompt_tokens": prompt, "gen_ai.usage.completion_tokens": output,
                    "gen_ai.request.max_tokens": 1024, "gen_ai.request.n": 1,
                }  # fmt: skip
                attributes = [{"key": k, "value": {"doubleValue": v}} for k, v in doubles.items()]
                attributes += [{"key": k, "value": {"intValue": str(v)}} for k, v in ints.items()]
                attributes.append(
                    {
                        "key": "gen_ai.request.id",
                        "value": {"stringValue": f"chatcmpl-{rnd.getrandbits(128):032x}"},
                    }
                )
                batch.append(
                    {
                        "traceId": f"{rnd.getrandbits(128):032x}", "spanId": f"{rnd.getrandbits(64):016x}",
                        "name": "llm_request", "kind": 2, "startTimeUnixNano": str(now),
                        "endTimeUnixNano": str(now + int((ttft + decode) * 1e9) + 400_000),
                        "attributes": attributes, "status": {},
                    }
                )  # fmt: skip
            scope = {"scope": {"name": "vllm.tracing.otel"}, "spans": batch}
            out.write(
                orjson.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]})
                + b"\n"
            )


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Generate, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("bench/data"))
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"vllm-{options.requests}.jsonl"
    if not path.exists():
        generate(path, options.requests)
    here = Path(sys.executable).parent
    commands = {"pdtrace diagnose": [str(here / "pdtrace"), "diagnose", str(path)]}
    peer = shutil.which("inflame", path=str(here)) or shutil.which("inflame")
    if peer:
        commands["inflame report"] = [
            peer,
            "report",
            str(path),
            "-o",
            str(options.folder / "inflame.html"),
        ]
    runs = interleaved(commands, options.times)
    rows = [("", "wall s", "CPU s", "peak MB")]
    rows += [
        (name, f"{r.wall_s:.2f}", f"{r.cpu_s:.2f}", f"{r.peak_mb:.0f}") for name, r in runs.items()
    ]
    table(
        f"Diagnosis of {options.requests:,} requests ({path.stat().st_size / 1e6:.0f} MB), median of {options.times}",
        rows,
    )
    if peer:
        ratio = runs["inflame report"].wall_s / runs["pdtrace diagnose"].wall_s
        print(f"  pdtrace is {ratio:.1f}x as fast (goal: at least 3, better 5)")
        memory = runs["pdtrace diagnose"].peak_mb / runs["inflame report"].peak_mb
        print(f"  and takes {memory:.1f}x its memory")
    else:
        print("  inflame is not installed: pip install inflame-trace==0.1.0")
        return []
    what = f"diagnosis of {options.requests:,} vLLM requests against inflame report"
    return [Figure(what, f"{ratio:.1f}x as fast", "3x")]


if __name__ == "__main__":
    main()
