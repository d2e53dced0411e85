"""The server log of one vLLM 0.32 engine: start, requests, iteration details, periodic stats."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl

from pdtrace.simulator.engine import server_of
from pdtrace.simulator.otlp import Clock, Ids
from pdtrace.simulator.run import Run
from pdtrace.simulator.scenario import BLOCK_TOKENS, EPOCH_NS
from pdtrace.simulator.trouble import DEAD

S = 1_000_000_000
STATS_NS = 10 * S
LOG_AHEAD_NS = 90 * S  # the engine was started as long before the first request
_PARAMS = (
    "SamplingParams(n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,"
    " temperature=1.0, watermarking=None, top_p=1.0, top_k=0, min_p=0.0, seed=None, stop=[],"
    " stop_token_ids=[], bad_words=[], thinking_token_budget=None, include_stop_str_in_output=False,"
    " ignore_eos=True, max_tokens={tokens}, min_tokens=0, logprobs=None, prompt_logprobs=None,"
    " skip_special_tokens=True, spaces_between_special_tokens=True, structured_outputs=None,"
    " extra_args={extra})"
)


_ANSWER = 'INFO:     127.0.0.1:44318 - "POST /v1/completions HTTP/1.1" {status}'
_BROKEN = "500 Internal Server Error"


class Pids:
    """Process ids of API servers and engine cores."""

    def __init__(self, run: Run) -> None:
        names = dict.fromkeys(server_of(worker)[0] for worker in run.workers["worker"])
        self._number = {server: n for n, server in enumerate(names)}

    def api(self, worker: str) -> int:
        """Of the API server."""
        return 20_000 + 100 * self._number[server_of(worker)[0]]

    def core(self, worker: str) -> int:
        """Of the engine core."""
        return self.api(worker) + 37 + int(server_of(worker)[1] or 0)

    def port(self, worker: str) -> int:
        """Where the API server listens."""
        return 8000 + self._number[server_of(worker)[0]]


class _Log:
    def __init__(self, worker: str, clock: Clock, pids: Pids) -> None:
        self.worker, self.clock, self.pids = worker, clock, pids
        self.lines: list[tuple[int, int, str]] = []

    def api(self, at: int, place: str, text: str) -> None:
        self._line(at, f"(APIServer pid={self.pids.api(self.worker)})", place, text)

    def core(self, at: int, place: str, text: str) -> None:
        rank = server_of(self.worker)[1]
        process = "EngineCore" if rank is None else f"EngineCore_DP{rank}"
        self._line(at, f"({process} pid={self.pids.core(self.worker)})", place, text)

    def bad(self, at: int, place: str, text: str) -> None:
        """The engine core's last words."""
        rank = server_of(self.worker)[1]
        process = "EngineCore" if rank is None else f"EngineCore_DP{rank}"
        self._line(at, f"({process} pid={self.pids.core(self.worker)})", place, text, "ERROR")

    def raw(self, at: int, text: str) -> None:
        self.lines.append((at, len(self.lines), text))

    def _line(self, at: int, process: str, place: str, text: str, level: str = "INFO") -> None:
        stamp = datetime.fromtimestamp(self.clock(at) // S, UTC)
        self.raw(at, f"{process} {level} {stamp:%m-%d %H:%M:%S} [{place}] {text}")

    def write(self, path: Path) -> None:
        self.lines.sort()
        path.write_text("\n".join(text for _, _, text in self.lines) + "\n", "utf-8")
        last = self.clock(self.lines[-1][0]) / S
        os.utime(path, (last, last))  # log lines have no year: readers take the file's


def write_log(
    run: Run, path: Path, ranks: list[str], ids: Ids, clock: Clock, pids: Pids,
    names: dict[str, str], tries: dict[str, list[dict[str, Any]]],
) -> None:  # fmt: skip
    """All lines of one server, in the order of their instants."""
    log = _Log(ranks[0], clock, pids)
    _start(log, run, ids)
    for row in run.requests.iter_rows(named=True):
        for attempt in tries.get(row["request"], []):
            if attempt["worker"] in ranks:
                _attempt(log, row, attempt, ids, names[row["request"]])
        _request(log, row, ranks, ids, names[row["request"]])
    for worker in ranks:
        log.worker = worker
        steps = _steps(run, worker)
        _iterations(log, steps)
        _stats(log, run, steps)
        died = run.workers.filter(pl.col("worker") == worker)["died_ns"].item()
        if died is not None:
            log.bad(died, "core.py:1108", "EngineCore encountered a fatal error.")
    log.write(path)


def _role(run: Run, worker: str) -> str:
    return str(run.workers.filter(pl.col("worker") == worker)["role"].item())


def _start(log: _Log, run: Run, ids: Ids) -> None:
    at, worker, scenario = EPOCH_NS - LOG_AHEAD_NS, log.worker, run.scenario
    role, tokens = _role(run, worker), scenario.kv_blocks * BLOCK_TOKENS
    budget = scenario.chunk_tokens if scenario.mode == "chunked" else scenario.prefill_batch_tokens
    port = log.pids.port(worker)
    transfer = ""
    engine = ids.uuid("engine", worker)
    if role in ("prefill", "decode"):
        side = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        transfer = (
            f", 'kv_transfer_config': KVTransferConfig(kv_connector='NixlConnector',"
            f" engine_id='{engine}', kv_buffer_device='cuda', kv_role='{side}')"
        )
    ranks = f", 'data_parallel_size': {scenario.ranks}" if scenario.ranks > 1 else ""
    log.api(at, "api_utils.py:347", "  version 0.32.0")
    log.api(
        at,
        "api_utils.py:286",
        f"non-default args: {{'model_tag': 'opt-13b', 'host': '127.0.0.1', 'port': {port},"
        f" 'enable_logging_iteration_details': True, 'max_num_batched_tokens': {budget},"
        f" 'max_num_seqs': {scenario.max_running}{transfer}{ranks}, 'enable_log_requests': True}}",
    )
    log.core(
        at + S, "core.py:133", "Initializing a V1 LLM engine (v0.32.0) with config: model='opt-13b'"
    )
    if transfer:
        log.core(
            at + 2 * S,
            "factory.py:62",
            f"Creating v1 connector with name: NixlPullConnector and engine_id: {engine}",
        )
    log.core(
        at + 9 * S,
        "kv_cache_utils.py:2327",
        f"GPU KV cache size: {tokens:,} tokens, Maximum concurrency for 16,384 tokens per request:"
        f" {tokens / 16_384:.2f}x",
    )
    log.api(at + 10 * S, "entry.py:140", f"Starting vLLM server on http://127.0.0.1:{port}")


def _request(log: _Log, row: dict[str, Any], ranks: list[str], ids: Ids, name: str) -> None:
    at, tokens, extra = row["queue_start_ns"], row["asked_tokens"], "None"
    if row["prefill_worker"] in ranks:
        tokens, extra = 1, "{'kv_transfer_params': {'do_remote_decode': True}}"
    elif row["decode_worker"] not in ranks or at is None:
        return
    elif row["prefill_worker"]:
        at, extra = row["prefill_end_ns"], "{'kv_transfer_params': {'do_remote_prefill': True}}"
        if at is None:
            return
    over = row["prefill_end_ns"] is not None and row["prefill_worker"] in ranks
    fine = over or row["outcome"] != "failed" or row["first_token_ns"] is not None
    _received(log, at, ids, name, tokens, extra)
    if fine:
        log.raw(at, _ANSWER.format(status="200 OK"))
    if not over and row["outcome"] != "completed":
        _ended(log, row["left_ns"] or row["end_ns"], ids, name, row["error"])
    if not fine:
        log.raw(row["end_ns"], _ANSWER.format(status=_BROKEN))


def _attempt(log: _Log, row: dict[str, Any], attempt: dict[str, Any], ids: Ids, name: str) -> None:
    """One that failed and that the router sent elsewhere."""
    _received(log, attempt["queue_start_ns"], ids, name, row["asked_tokens"], "None")
    _ended(log, attempt["end_ns"], ids, name, attempt["error"])
    log.raw(attempt["end_ns"], _ANSWER.format(status=_BROKEN))


def _ended(log: _Log, at: int, ids: Ids, name: str, error: str | None) -> None:
    """The end of a request that did not complete."""
    if error is None:
        log.api(at, "async_llm.py:742", f"Request {name} aborted.")
        internal = ids.hex(8, "internal", log.worker, name)
        log.api(at, "async_llm.py:722", f"Aborted request(s) {name}-{internal}.")
    elif error == DEAD:
        log.api(at, "async_llm.py:751", f"Request {name} failed (engine dead).")
    else:
        log.api(at, "async_llm.py:765", f"Request {name} failed due to RuntimeError: simulated.")


def _received(log: _Log, at: int, ids: Ids, name: str, tokens: int, extra: str) -> None:
    params = _PARAMS.format(tokens=tokens, extra=extra)
    log.api(
        at,
        "request_logger.py:65",
        f"Received request {name}: params: {params}, lora_request: None.",
    )
    internal = ids.hex(8, "internal", log.worker, name)
    log.api(at, "async_llm.py:578", f"Added request {name}-{internal}.")


def _steps(run: Run, worker: str) -> pl.DataFrame:
    """Steps as vLLM counts them: a prompt computed again for a request that already made tokens is
    generation; the first step of a pulled request computes its last prompt token."""
    steps = run.steps.filter(pl.col("worker") == worker).sort("seq")
    seq = steps.select("seq", "start_ns")
    members = (
        run.members.filter(pl.col("worker") == worker)
        .join(seq, on="seq")
        .join(
            run.requests.select("request", "prefill_worker", "first_token_ns", "decode_start_ns"),
            on="request",
        )
    )
    began = pl.col("first_token_ns") <= pl.col("start_ns")
    pulled = pl.col("prefill_worker").is_not_null() & (
        pl.col("decode_start_ns") == pl.col("start_ns")
    )
    pulled = pulled & (pl.col("decode_tokens") > 0)
    prompt = (pl.col("prefill_tokens") > 0) & ~began.fill_null(value=False)
    context = prompt | pulled.fill_null(value=False)
    tokens = pl.when(prompt).then("prefill_tokens").otherwise(1)
    counted = members.group_by("seq").agg(
        context_requests=context.sum(),
        context_tokens=tokens.filter(context).sum(),
        generation_requests=(~context).sum(),
        generation_tokens=(pl.col("prefill_tokens") + pl.col("decode_tokens"))
        .filter(~context)
        .sum(),
    )
    return steps.join(counted, on="seq", how="left", maintain_order="left")


def _iterations(log: _Log, steps: pl.DataFrame) -> None:
    for number, s in enumerate(steps.iter_rows(named=True)):
        log.api(
            s["start_ns"] + s["elapsed_ns"],
            "loggers.py:199",
            f"Engine {int(server_of(log.worker)[1] or 0):03d}: Iteration({number}): {s['context_requests']} context requests,"
            f" {s['context_tokens']} context tokens, {s['generation_requests']} generation requests,"
            f" {s['generation_tokens']} generation tokens, iteration elapsed time:"
            f" {s['elapsed_ns'] / 1e6:.2f} ms, GPU KV cache usage:"
            f" {s['kv_usage_ratio'] * 100:.1f}%",
        )


def _stats(log: _Log, run: Run, steps: pl.DataFrame) -> None:
    """Throughput since the last line and the state of the last step, every ten seconds."""
    if steps.is_empty():
        return
    ended = steps.with_columns(
        slot=(pl.col("start_ns") + pl.col("elapsed_ns") - EPOCH_NS) // STATS_NS
    )
    slots = ended.group_by("slot", maintain_order=True).agg(
        pl.col("prefill_tokens", "decode_tokens").sum(),
        pl.col("running", "waiting", "kv_usage_ratio").last(),
    )
    asked, found = 0, 0
    began = run.requests.filter(pl.col("prefill_start_ns").is_not_null()).with_columns(
        slot=(pl.col("prefill_start_ns") - EPOCH_NS) // STATS_NS
    )
    mine = pl.coalesce("prefill_worker", "decode_worker") == log.worker
    hits = {
        slot: (prompt, cached)
        for slot, prompt, cached in began.filter(mine)
        .group_by("slot")
        .agg(pl.col("prompt_tokens", "cached_tokens").sum())
        .iter_rows()
    }
    role = _role(run, log.worker)
    external = {"decode": 100.0, "prefill": 0.0}.get(role)
    other = "" if external is None else f", External prefix cache hit rate: {external:.1f}%"
    for slot, prompt, made, running, waiting, usage in slots.iter_rows():
        new = hits.get(slot, (0, 0))
        asked, found = asked + new[0], found + new[1]
        log.api(
            EPOCH_NS + (slot + 1) * STATS_NS,
            "loggers.py:335",
            f"Engine {int(server_of(log.worker)[1] or 0):03d}: Avg prompt throughput: {prompt / 10:.1f} tokens/s, Avg generation"
            f" throughput: {made / 10:.1f} tokens/s, Running: {running} reqs, Waiting: {waiting}"
            f" reqs, GPU KV cache usage: {usage * 100:.1f}%, Prefix cache hit rate:"
            f" {100 * found / asked if asked else 0:.1f}%{other}",
        )
