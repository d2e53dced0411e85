"""vLLM 0.32: `llm_request` spans, server logs with iteration details, the result of vllm bench serve.

P/D as with the NIXL connector behind a tracing proxy: its three spans, one `llm_request` on each
side. Spelling, units and precision follow dumps of the real system: latencies are differences of
floats in seconds, log times have one second, engine phases come from a clock that only differences
leave. vLLM itself has no steps of prompts alone beside decodes; `exclusive` scenarios show them so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from pdtrace.simulator.engine import server_of
from pdtrace.simulator.otlp import CLIENT, INTERNAL, SERVER, Clock, Ids, Span, clocks, write_spans
from pdtrace.simulator.run import Run
from pdtrace.simulator.shape_vllm_log import Pids, write_log
from pdtrace.simulator.streams import NO_STREAM, Stream, servers, streams, tries_by_request
from pdtrace.simulator.trouble import REFUSED

S = 1e9
IPC_NS = 400_000  # from the end of a step until the API server has its tokens
SCOPE, PROXY_SCOPE = "vllm.tracing.otel", "pd_proxy"
SDK = {
    "telemetry.sdk.language": "python",
    "telemetry.sdk.name": "opentelemetry",
    "telemetry.sdk.version": "1.45.2",
}
ERROR = "error.type"
QUANTILES = (50, 90, 95, 99)


def write(run: Run, folder: Path) -> None:
    """Spans and log of each engine, the proxy's spans, the benchmark's result."""
    ids, clock, seen = Ids(run), clocks(run), streams(run)
    pids = Pids(run)
    names = _names(run, ids)
    spans: dict[str, list[Span]] = {}
    ended = run.requests.filter(run.requests["end_ns"].is_not_null())
    drained = _Drained(run)
    policy = run.scenario.router.replace("_", "")
    routed = run.scenario.workers > 1 and run.scenario.mode != "pd"
    tries = tries_by_request(run)
    for row in ended.iter_rows(named=True):
        maker = _Maker(
            ids, clock, pids, names[row["request"]], row, seen.get(row["request"], NO_STREAM),
            drained, policy, tries.get(row["request"], []),
        )  # fmt: skip
        for worker, span in maker.spans(routed=routed):
            spans.setdefault(worker, []).append(span)
    for worker, made in sorted(spans.items()):
        write_spans(folder / f"{worker}.traces.otlp.jsonl", made)
    for server, ranks in servers(run).items():
        write_log(run, folder / f"{server}.log", ranks, ids, clock[ranks[0]], pids, names, tries)
    if (
        not run.scenario.left_ratio + run.scenario.patience_s
    ):  # the benchmark's clients do not leave
        _write_bench(run, folder / "bench.json", ids, seen)


def _names(run: Run, ids: Ids) -> dict[str, str]:
    """External request ids: the benchmark's prefix and its index, as the OpenAI server makes them."""
    prefix = f"bench-{ids.hex(8, 'bench')}-"
    order = run.requests.sort("arrival_ns", "request")["request"]
    return {request: f"cmpl-{prefix}{number}-0" for number, request in enumerate(order)}


class _Drained:
    """When an engine next looks at its input: between two steps."""

    def __init__(self, run: Run) -> None:
        self._steps = {
            worker: (
                steps["start_ns"].to_numpy(),
                (steps["start_ns"] + steps["elapsed_ns"]).to_numpy(),
            )
            for (worker,), steps in run.steps.sort("start_ns").group_by("worker")
        }

    def after(self, worker: str, at: int) -> int:
        starts, ends = self._steps[worker]
        running = int(np.searchsorted(starts, at, side="left")) - 1
        return max(at, int(ends[running])) if running >= 0 else at


class _Maker:
    """The spans of one request."""

    def __init__(
        self,
        ids: Ids,
        clock: dict[str, Clock],
        pids: Pids,
        name: str,
        row: dict[str, Any],
        stream: Stream,
        drained: _Drained,
        policy: str,
        tries: list[dict[str, Any]],
    ) -> None:
        self.ids, self.clock, self.pids, self.name = ids, clock, pids, name
        self.row, self.stream, self.drained = row, stream, drained
        self.trace = ids.hex(32, "trace", row["request"])
        self.policy, self.tries = policy, tries

    def spans(self, *, routed: bool) -> Iterator[tuple[str, Span]]:
        """Those of the component in front, if there is one, and of the engines."""
        row, decoder = self.row, self.row["decode_worker"]
        if routed:
            yield from self._router()
        elif row["prefill_worker"]:
            yield from self._proxy()
        if row["outcome"] != "completed":  # a request that the engine did not complete has no span
            return
        if not row["prefill_worker"]:
            arrival = (row["route_end_ns"] + row["queue_start_ns"]) // 2
            yield self._request(
                decoder, None, arrival, row["queue_start_ns"], row["prefill_start_ns"],
                row["first_token_ns"], row["end_ns"], row["output_tokens"],
            )  # fmt: skip
            return
        arrival = (row["route_end_ns"] + row["queue_start_ns"]) // 2
        yield self._request(
            row["prefill_worker"], self._id("proxy.prefill"), arrival, row["queue_start_ns"],
            row["prefill_start_ns"], row["prefill_end_ns"], row["prefill_end_ns"], 1,
        )  # fmt: skip
        arrival = row["prefill_end_ns"] + IPC_NS // 2
        yield self._request(
            decoder, self._id("proxy.decode"), arrival, row["prefill_end_ns"] + IPC_NS,
            row["decode_start_ns"], row["first_token_ns"], row["end_ns"], row["output_tokens"],
        )  # fmt: skip

    def _id(self, *what: object) -> str:
        return self.ids.hex(16, "span", self.row["request"], *what)

    def _request(
        self,
        worker: str,
        parent: str | None,
        arrival: int,
        received: int,
        scheduled: int,
        first: int,
        last: int,
        tokens: int,
    ) -> tuple[str, Span]:
        shown = self.clock[worker]
        queued = min(self.drained.after(worker, received), scheduled)
        wall = shown(arrival) / S  # time.time(): floats of seconds
        latency = {
            "time_to_first_token": shown(first + IPC_NS) / S - wall,
            "e2e": shown(last + IPC_NS) / S - wall,
            "time_in_queue": scheduled / S - queued / S,
        }
        engine = {
            "time_in_model_prefill": (first - scheduled) / S,
            "time_in_model_decode": (last - first) / S,
            "time_in_model_inference": (last - scheduled) / S,
        }
        attributes = {
            **{f"gen_ai.latency.{key}": value for key, value in latency.items()},
            "gen_ai.usage.prompt_tokens": self.row["prompt_tokens"],
            "gen_ai.usage.completion_tokens": tokens,
            **{f"gen_ai.latency.{key}": value for key, value in engine.items()},
            "gen_ai.request.id": self.name,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.max_tokens": tokens,
            "gen_ai.request.temperature": 1.0,
            "gen_ai.request.n": 1,
        }
        trace = self.trace
        resource = {
            **SDK,
            "service.instance.id": self.ids.uuid("instance", server_of(worker)[0]),
            "service.name": f"vllm-{server_of(worker)[0]}",
            "vllm.instrumenting_module_name": "vllm.llm_engine",
            "vllm.process_id": str(self.pids.api(worker)),
        }
        end = shown(last + IPC_NS) + 150_000
        return server_of(worker)[0], Span(
            resource, SCOPE, "llm_request", trace, self._id(worker), int(wall * S), end, parent,
            SERVER, attributes,
        )  # fmt: skip

    def _router(self) -> Iterator[tuple[str, Span]]:
        """The two spans of production-stack's Python router."""
        row, at, bare = self.row, self.clock["router"], self._bare()
        common = {"vllm.request_id": bare, "vllm.model": "opt-13b"}
        worker = row["decode_worker"]
        asked = {
            "http.method": "POST", "http.target": "/v1/completions", "http.status_code": self._code(),
            **common,
        }  # fmt: skip
        sent = {
            "vllm.backend_url": worker and f"http://127.0.0.1:{self.pids.port(worker)}",
            "vllm.routing_logic": self.policy,
            "vllm.is_streaming": True,
            **common,
        }
        last, whole = max([row["end_ns"], *self.stream.seen[-1:]]) - 20_000, self._id("router")
        made: list[tuple[Any, ...]] = [
            ("router /v1/completions", "router", row["route_start_ns"], last, None, SERVER, asked)
        ]
        for attempt in self.tries:
            there = f"http://127.0.0.1:{self.pids.port(attempt['worker'])}"
            made.append((
                "process_request", f"process_request {attempt['attempt']}", attempt["sent_ns"],
                attempt["end_ns"] + IPC_NS, whole, CLIENT, sent | {"vllm.backend_url": there, ERROR: attempt["error"]},
            ))  # fmt: skip
        if worker:
            broken = {ERROR: row["error"]} if row["error"] else {}
            made.append((
                "process_request", "process_request", row["sent_ns"], last - 10_000, whole, CLIENT,
                sent | broken,
            ))  # fmt: skip
        for name, key, start, end, parent, kind, attributes in made:
            yield "router", Span(
                {**SDK, "service.name": "vllm-router"}, "vllm_router.services", name, self.trace,
                self._id(key), at(start), at(end), parent, kind, attributes, error=ERROR in attributes,
            )  # fmt: skip

    def _code(self) -> int | None:
        """The status that had gone out when the request ended: 200 once there was a token."""
        if self.stream.seen:
            return 200
        return {"aborted": None, "failed": 503 if self.row["error"] == REFUSED else 500}[
            self.row["outcome"]
        ]

    def _bare(self) -> str:
        return self.name.removeprefix("cmpl-").removesuffix("-0")

    def _proxy(self) -> Iterator[tuple[str, Span]]:
        row, at = self.row, self.clock["router"]
        made, done = self.stream.seen, row["prefill_end_ns"]
        last = max([row["end_ns"], *made[-1:]])
        handed = last if done is None else min(done + IPC_NS // 4, last)
        resource = {
            **SDK,
            "service.instance.id": self.ids.uuid("instance", "proxy"),
            "service.name": "pd-proxy",
        }
        whole = self._id("proxy.request")
        for name, start, end, parent, kind in (
            ("proxy.request", row["route_start_ns"], last, None, SERVER),
            ("proxy.prefill", row["route_end_ns"], handed, whole, CLIENT),
            ("proxy.decode", handed, last, whole, CLIENT),
        ):
            if name == "proxy.decode" and handed == last:
                continue
            yield "proxy", Span(
                resource, PROXY_SCOPE, name, self.trace, self._id(name), at(start), at(end), parent,
                kind if parent or kind == SERVER else INTERNAL,
                {} if parent else {"request.id": self._bare()},
                (("first_chunk", at(made[0])),) if name == "proxy.decode" and made else (),
            )  # fmt: skip


def _write_bench(run: Run, path: Path, ids: Ids, seen: dict[str, Stream]) -> None:
    """The result of `vllm bench serve --save-detailed`: chunk times on a process clock."""
    rows = run.requests.sort("arrival_ns", "request").to_dicts()
    made = [seen.get(row["request"]) for row in rows]
    origin = 1000.0 - rows[0]["arrival_ns"] / S if rows else 0.0
    starts = [row["arrival_ns"] / S + origin for row in rows]
    chunks = [[] if s is None else [at / S + origin for at in s.seen] for s in made]
    good = [row["outcome"] == "completed" for row in rows]
    ttfts = [c[0] - start if c else 0.0 for c, start in zip(chunks, starts, strict=True)]
    itls = [np.diff(c).tolist() for c in chunks]
    lengths = [row["output_tokens"] if ok else 0 for row, ok in zip(rows, good, strict=True)]
    latency = [t + sum(gaps) for t, gaps in zip(ttfts, itls, strict=True)]
    tpots = [(e - t) / (n - 1) for e, t, n in zip(latency, ttfts, lengths, strict=True) if n > 1]
    last = max((c[-1] for c in chunks if c), default=0.0)
    duration = last - starts[0] if rows else 0.0
    inputs = [row["prompt_tokens"] for row in rows]
    end = datetime.fromtimestamp(int((last - origin) if rows else 0), UTC)
    result: dict[str, Any] = {
        "date": f"{end:%Y%m%d-%H%M%S}",
        "endpoint_type": "openai", "backend": "openai", "label": run.scenario.name,
        "model_id": "opt-13b", "tokenizer_id": "opt-13b", "num_prompts": len(rows),
        "request_rate": len(rows) / run.duration_s, "burstiness": 1.0, "max_concurrency": None, "duration": duration,
        "completed": sum(good), "failed": len(good) - sum(good),
        "total_input_tokens": sum(inputs), "total_output_tokens": sum(lengths),
        "request_throughput": sum(good) / duration, "request_goodput": None,
        "output_throughput": sum(lengths) / duration,
        "total_token_throughput": (sum(lengths) + sum(inputs)) / duration,
        "input_lens": inputs, "output_lens": lengths, "ttfts": ttfts, "itls": itls,
        "latencies": latency, "start_times": starts, "queue_times": [1e-4] * len(rows),
        "generated_texts": [""] * len(rows),
        "max_output_tokens_per_s": _busiest_second(chunks),
        "max_concurrent_requests": _most_at_once(starts, chunks), "rtfx": 0.0,
        "errors": [row["error"] or ("" if ok else "unfinished") for row, ok in zip(rows, good, strict=True)],
    }  # fmt: skip
    flat = [gap for gaps in itls for gap in gaps]
    for metric, values in (("ttft", ttfts), ("tpot", tpots), ("itl", flat), ("e2el", latency)):
        result |= _statistics(metric, np.array(values) * 1e3)
    path.write_text(json.dumps(result), "utf-8")


def _busiest_second(chunks: list[list[float]]) -> float:
    seconds = np.array([at for chunk in chunks for at in chunk], np.float64).astype(np.int64)
    return float(np.unique(seconds, return_counts=True)[1].max()) if len(seconds) else 0.0


def _most_at_once(starts: list[float], chunks: list[list[float]]) -> int:
    moves = sorted(
        move
        for start, chunk in zip(starts, chunks, strict=True)
        if chunk
        for move in ((start, 1), (chunk[-1], -1))
    )
    return int(np.cumsum([change for _, change in moves]).max()) if moves else 0


def _statistics(metric: str, ms: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    if not len(ms):
        ms = np.zeros(1)
    shown = {
        f"mean_{metric}_ms": float(ms.mean()),
        f"median_{metric}_ms": float(np.median(ms)),
        f"std_{metric}_ms": float(ms.std()),
    }
    return shown | {f"p{q}_{metric}_ms": float(np.percentile(ms, q)) for q in QUANTILES}
