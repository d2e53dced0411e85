"""A small vLLM: a step-by-step engine whose every instant is known, and what it would emit.

Steps follow vLLM V1: running requests get one token each, what is left of the budget goes to
prompts in order of arrival; all requests of a step share its end. Span attributes, log lines and
metrics are spelled as vLLM 0.8.5 to 0.32 spell them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from truth_otlp import MS, SERVER, S, Span, span_id, trace_id, uuid


@dataclass
class Request:
    """A request and the instants that happened to it (ns, wall clock of the truth)."""

    id: str  # engine request id, such as cmpl-x-0
    arrival: int
    prompt: int
    output: int
    max_tokens: int | None = None
    trace: str = ""
    span: str = ""
    parent: str | None = None
    seen: int = 0  # when the engine may take it in: arrival + front end
    queued: int = 0
    ready: int = 0  # KV there (a decode worker of a P/D pair); 0: no wait
    scheduled: int = 0
    first: int = 0  # first token made
    last: int = 0
    done: int = 0  # tokens made
    left: int = 0  # prompt tokens to be computed
    first_seen: int = 0  # first token seen in the API server
    last_seen: int = 0
    cached: int = 0  # prompt tokens that need no computing

    def __post_init__(self) -> None:
        self.trace = self.trace or trace_id(self.id, self.arrival)
        self.span = self.span or span_id(self.id, self.arrival)

    @property
    def ttft_ms(self) -> float:
        return (self.first_seen - self.arrival) / MS

    @property
    def e2e_ms(self) -> float:
        return (self.last_seen - self.arrival) / MS


@dataclass
class Step:
    start: int
    end: int
    prefill_requests: int
    prefill_tokens: int
    decodes: int
    rank: int = 0


@dataclass
class Engine:
    """One engine core: cost of a step, budget, and what it did."""

    base_ms: float = 8.0
    per_decode_ms: float = 0.1
    per_token_ms: float = 0.05
    budget: int = 2048
    front_ms: float = 2.0
    ipc_ms: float = 0.5
    noise: float = 0.02
    seats: int = 256
    seed: int = 1
    rank: int = 0
    steps: list[Step] = field(default_factory=list)

    def run(self, requests: Sequence[Request]) -> list[Request]:
        """Serve the requests; fills their instants and `steps`."""
        dice = random.Random(self.seed)
        todo = sorted(requests, key=lambda r: r.arrival)
        for r in todo:
            r.seen = r.arrival + int(self.front_ms * MS)
            r.left = r.prompt - r.cached
        waiting: list[Request] = []
        running: list[Request] = []
        now = todo[0].arrival
        while todo or waiting or running:
            if not waiting and not running:
                now = max(now, todo[0].seen)
            while todo and todo[0].seen <= now:
                r = todo.pop(0)
                r.queued = now
                waiting.append(r)
            free = self.budget
            decoding = [r for r in running if r.left == 0]
            free -= len(decoding)
            prefills: list[tuple[Request, int]] = []
            for r in running:
                if r.left > 0 and free > 0:
                    prefills.append((r, min(free, r.left)))
                    free -= prefills[-1][1]
            for r in list(waiting):
                if free <= 0 or len(running) >= self.seats:
                    break
                if r.ready > now:
                    continue
                r.scheduled = now
                waiting.remove(r)
                running.append(r)
                prefills.append((r, min(free, max(r.left, 1))))
                free -= prefills[-1][1]
            if not decoding and not prefills:
                now = min([r.ready for r in waiting] + [r.seen for r in todo[:1]])
                continue
            tokens = sum(n for _, n in prefills)
            cost = self.base_ms + self.per_decode_ms * len(decoding)
            cost = cost * dice.gauss(1, self.noise) + self.per_token_ms * tokens
            end = now + int(cost * MS)
            self.steps.append(Step(now, end, len(prefills), tokens, len(decoding), self.rank))
            for r, n in prefills:
                r.left = max(r.left - n, 0)
            for r in decoding + [r for r, _ in prefills if r.left == 0]:
                r.done += 1
                r.last = end
                r.last_seen = end + int(self.ipc_ms * MS)
                if r.done == 1:
                    r.first, r.first_seen = r.last, r.last_seen
                if r.done >= r.output:
                    running.remove(r)
            now = end + int(0.05 * MS)
        return list(requests)

    @property
    def lost_s(self) -> float:
        """Decode seconds that prompts took: the truth of the simulation."""
        return sum(self.per_token_ms * s.prefill_tokens * s.decodes for s in self.steps) / 1e3


def resource(service: str, *, key: object = None, pid: int = 4242, **more: Any) -> dict[str, Any]:
    """The resource that vLLM's API server exports under."""
    return {
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.version": "1.45.2",
        "service.instance.id": uuid(service, key),
        "service.name": service,
        "vllm.instrumenting_module_name": "vllm.llm_engine",
        "vllm.process_id": str(pid),
        **more,
    }


def v1_span(
    r: Request, res: dict[str, Any], *, skew_ns: int = 0, drop: Iterable[str] = (), **more: Any
) -> Span:
    """The `llm_request` span of V1; `skew_ns` is how far this host's wall clock is ahead."""
    latency = {
        "time_to_first_token": (r.first_seen - r.arrival) / S,
        "e2e": (r.last_seen - r.arrival) / S,
        "time_in_queue": (r.scheduled - r.queued) / S,
        "time_in_model_prefill": (r.first - r.scheduled) / S,
        "time_in_model_decode": (r.last - r.first) / S,
        "time_in_model_inference": (r.last - r.scheduled) / S,
    }
    attributes = {
        **{f"gen_ai.latency.{k}": v for k, v in latency.items() if k not in set(drop)},
        "gen_ai.usage.prompt_tokens": r.prompt,
        "gen_ai.usage.completion_tokens": r.done,
        "gen_ai.request.id": r.id,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": r.max_tokens or r.output,
        "gen_ai.request.n": 1,
        **more,
    }
    end = r.last_seen + MS // 5
    return Span(
        res, "vllm.tracing.otel", "llm_request", r.trace, r.span,
        r.arrival + skew_ns, end + skew_ns, r.parent, SERVER, attributes,
    )  # fmt: skip


def v0_span(r: Request, res: dict[str, Any], *, detailed: bool = True) -> Span:
    """The span of V0 (0.8.5): queue from arrival on, sums of step times with detailed traces."""
    attributes = {
        "gen_ai.response.model": "m",
        "gen_ai.request.id": r.id,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": r.output,
        "gen_ai.request.n": 1,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": r.prompt,
        "gen_ai.usage.completion_tokens": r.done,
        "gen_ai.latency.time_in_queue": (r.scheduled - r.arrival) / S,
        "gen_ai.latency.time_to_first_token": (r.first_seen - r.arrival) / S,
        "gen_ai.latency.e2e": (r.last_seen - r.arrival) / S,
        "gen_ai.latency.time_in_scheduler": 0.004,
    }
    if detailed:
        attributes["gen_ai.latency.time_in_model_forward"] = (r.last - r.scheduled) / S * 0.9
        attributes["gen_ai.latency.time_in_model_execute"] = (r.last - r.scheduled) / S * 0.95
    return Span(
        res, "vllm.llm_engine", "llm_request", r.trace, r.span,
        r.arrival, r.last_seen + MS // 5, r.parent, SERVER, attributes,
    )  # fmt: skip


class Log:
    """Lines of a server log with stamps of whole seconds."""

    def __init__(self, pid: int = 4242, core: str = "EngineCore_DP0", zone_h: int = 0) -> None:
        self.pid, self.core, self.zone_ns = pid, core, zone_h * 3600 * S
        self.lines: list[tuple[int, int, str]] = []

    def api(self, time: int, place: str, text: str, level: str = "INFO") -> None:
        self._line(time, f"(APIServer pid={self.pid}) ", place, text, level)

    def engine(
        self, time: int, place: str, text: str, level: str = "INFO", rank: int | None = None
    ) -> None:
        core = self.core if rank is None else f"EngineCore_DP{rank}"
        pid = self.pid + 7 + (rank or 0)
        self._line(time, f"({core} pid={pid}) ", place, text, level)

    def raw(self, time: int, text: str) -> None:
        self.lines.append((time, len(self.lines), text))

    def _line(self, time: int, process: str, place: str, text: str, level: str) -> None:
        at = datetime.fromtimestamp((time + self.zone_ns) // S, UTC)
        self.raw(time, f"{process}{level} {at:%m-%d %H:%M:%S} [{place}] {text}")

    def started(
        self,
        time: int,
        version: str = "0.18.1",
        connector: str | None = None,
        role: str = "kv_both",
        engine_id: str = "",
        budget: int = 2048,
    ) -> None:
        args = "'model_tag': 'm', 'port': 8000"
        if connector:
            args += (
                f", 'kv_transfer_config': KVTransferConfig(kv_connector='{connector}',"
                f" engine_id='{engine_id}', kv_role='{role}')"
            )
        self.api(time, "utils.py:299", f"vLLM API server version {version}")
        self.api(time, "utils.py:233", f"non-default args: {{{args}}}")
        text = f"Chunked prefill is enabled with max_num_batched_tokens={budget}."
        self.api(time, "scheduler.py:231", text)
        config = f"Initializing a V1 LLM engine (v{version}) with config: model='m'"
        self.engine(time, "core.py:97", config)
        if connector:
            created = f"Creating v1 connector with name: {connector} and engine_id: {engine_id}"
            self.engine(time, "factory.py:64", created)
        self.engine(time, "kv_cache_utils.py:1307", "GPU KV cache size: 524,288 tokens")

    def request(self, r: Request, *, n: int = 1) -> None:
        params = f"SamplingParams(n={n}, temperature=1.0, max_tokens={r.max_tokens or r.output})"
        self.api(
            r.arrival + MS,
            "request_logger.py:40",
            f"Received request {r.id}: params: {params}, lora_request: None.",
        )
        self.raw(
            r.arrival + MS, 'INFO:     10.0.0.7:41230 - "POST /v1/completions HTTP/1.1" 200 OK'
        )
        inner = span_id("internal", r.id, r.arrival)[:8]
        self.api(r.arrival + 2 * MS, "async_llm.py:420", f"Added request {r.id}-{inner}.")

    def steps(self, steps: Sequence[Step], era: str = "0.18", ranks: bool = False) -> None:
        """Iteration details: written by EngineCore up to 0.24, by the API server in 0.32."""
        count: dict[int, int] = {}
        for s in steps:
            seq = count[s.rank] = count.get(s.rank, -1) + 1
            text = (
                f"Iteration({seq}): {s.prefill_requests} context requests, {s.prefill_tokens} context"
                f" tokens, {s.decodes} generation requests, {s.decodes} generation tokens, iteration"
                f" elapsed time: {(s.end - s.start) / MS:.2f} ms"
            )
            if era == "0.32":
                text = f"Engine {s.rank:03d}: {text}, GPU KV cache usage: 12.5%"
                self.api(s.end, "loggers.py:199", text)
            else:
                self.engine(s.end, "core.py:379", text, rank=s.rank if ranks else None)

    def write(self, path: Path, mtime: int | None = None) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines.sort()
        path.write_text("\n".join(text for _, _, text in self.lines) + "\n")
        last = (mtime or self.lines[-1][0]) / S + 1
        os.utime(path, (last, last))
        return path


def load(
    n: int,
    start: int,
    *,
    seed: int = 7,
    rate: float = 10.0,
    prompt: Callable[[random.Random], int] = lambda d: d.randint(50, 200),
    output: Callable[[random.Random], int] = lambda d: d.randint(20, 60),
    name: Callable[[int], str] = lambda i: f"cmpl-load-{i}-0",
) -> list[Request]:
    """Poisson arrivals."""
    dice = random.Random(seed)
    at = start
    found = []
    for i in range(n):
        at += int(dice.expovariate(rate) * S)
        found.append(Request(name(i), at, prompt(dice), output(dice)))
    return found


def scrape(times: Sequence[int], rows: Callable[[int], dict[str, float]]) -> str:
    """Text of a metrics scraper: one exposition per `# scrape_ts`."""
    parts = []
    for t in times:
        parts.append(f"# scrape_ts {t / S:.3f}")
        for metric, value in rows(t).items():
            parts += [f"# TYPE {metric.partition('{')[0]} gauge", f"{metric} {value}"]
    return "\n".join(parts) + "\n"
