"""What requests went through and what workers ran, as frames."""

from __future__ import annotations

import numpy as np
import polars as pl

from pdtrace.simulator.engine import Ints, Step, Worker
from pdtrace.simulator.load import Request
from pdtrace.simulator.scenario import KV_BYTES_PER_TOKEN, Scenario

REQUESTS: dict[str, type[pl.DataType]] = {
    "request": pl.String, "arrival_ns": pl.Int64, "router_worker": pl.String,
    "prefill_worker": pl.String, "decode_worker": pl.String, "prompt_tokens": pl.Int64,
    "cached_tokens": pl.Int64, "output_tokens": pl.Int64, "session": pl.String, "turn": pl.Int64,
    "route_start_ns": pl.Int64, "route_end_ns": pl.Int64, "believed_tokens": pl.Int64,
    "candidates": pl.Int64, "load": pl.Int64, "prefix": pl.Int64,
    "queue_start_ns": pl.Int64, "prefill_start_ns": pl.Int64, "prefill_end_ns": pl.Int64,
    "transfer_start_ns": pl.Int64, "transfer_end_ns": pl.Int64, "transfer_bytes": pl.Int64,
    "decode_start_ns": pl.Int64, "first_token_ns": pl.Int64, "end_ns": pl.Int64,
    "preemptions": pl.Int64, "outcome": pl.String, "error": pl.String, "asked_tokens": pl.Int64,
    "sent_ns": pl.Int64, "left_ns": pl.Int64,
}  # fmt: skip


def request_frame(requests: list[Request]) -> pl.DataFrame:
    """One row per request that arrived."""
    rows = [
        (
            _name(r.index), r.arrival, r.router_worker, r.prefill_worker, r.decode_worker, r.prompt,
            r.cached, r.output, f"s{r.session:04d}" if r.session > 0 else None,
            r.turn if r.session > 0 else None, r.route_start, r.route_end, r.believed,
            r.candidates, r.load, r.prefix if r.prefix >= 0 else None, r.queue_start, r.prefill_start, r.prefill_end, r.transfer_start,
            r.transfer_end, None if r.transfer_start is None else r.prompt * KV_BYTES_PER_TOKEN,
            r.decode_start, r.first_token, r.end, r.preempted,
            r.fate if r.end is not None else "unfinished", r.error, r.asked, r.sent, r.left,
        )
        for r in requests
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=REQUESTS, orient="row")


TRIES: dict[str, type[pl.DataType]] = {
    "request": pl.String, "attempt": pl.Int64, "worker": pl.String, "sent_ns": pl.Int64,
    "queue_start_ns": pl.Int64, "prefill_start_ns": pl.Int64, "end_ns": pl.Int64, "error": pl.String,
}  # fmt: skip


def try_frame(requests: list[Request]) -> pl.DataFrame:
    """One row per failed attempt that another one followed."""
    rows = [
        (_name(r.index), t.number, t.worker, t.sent, t.queue_start, t.prefill_start, t.end, t.error)
        for r in requests
        for t in r.tries
    ]
    return pl.DataFrame(rows, schema=TRIES, orient="row")


STEPS: dict[str, type[pl.DataType]] = {
    "worker": pl.String, "seq": pl.Int64, "start_ns": pl.Int64, "elapsed_ns": pl.Int64,
    "prefill_requests": pl.Int64, "prefill_tokens": pl.Int64, "prefill_kv_tokens": pl.Int64,
    "decode_requests": pl.Int64, "decode_tokens": pl.Int64, "decode_kv_tokens": pl.Int64,
    "running": pl.Int64, "waiting": pl.Int64, "kv_usage_ratio": pl.Float64,
}  # fmt: skip


def step_frame(workers: list[Worker], scenario: Scenario) -> pl.DataFrame:
    """One row per engine iteration."""
    rows = [
        (
            worker.name, seq, s.start, s.end - s.start, len(s.parts), sum(p[1] for p in s.parts),
            sum(p[2] for p in s.parts), len(s.residents) if s.decoded else 0,
            0 if not s.decoded else len(s.residents) if s.tokens is None else int(s.tokens.sum()),
            int(s.context.sum()) if s.decoded else 0, s.running, s.waiting,
            s.blocks / scenario.kv_blocks,
        )
        for worker in workers
        for seq, s in enumerate(worker.steps)
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=STEPS, orient="row")


MEMBERS = ("worker", "seq", "request", "prefill_tokens", "decode_tokens", "context_tokens")


def member_frame(workers: list[Worker]) -> pl.DataFrame:
    """One row per step and request in it."""
    frames = [_members(worker) for worker in workers]
    return pl.concat(frames).sort("worker", "seq", "request")


def _members(worker: Worker) -> pl.DataFrame:
    decoding = [(seq, s) for seq, s in enumerate(worker.steps) if s.decoded]
    counts = [len(s.residents) for _, s in decoding]
    decodes = pl.DataFrame(
        {
            "seq": np.repeat(np.array([seq for seq, _ in decoding], np.int64), counts),
            "index": joined([s.residents for _, s in decoding]),
            "prefill_tokens": np.zeros(sum(counts), np.int64),
            "decode_tokens": joined([made(s) for _, s in decoding]),
            "context_tokens": joined([s.context for _, s in decoding]),
        }
    )
    parts = [
        (seq, index, new, 0, before)
        for seq, step in enumerate(worker.steps)
        for index, new, before in step.parts
    ]
    prefills = pl.DataFrame(parts, schema=dict.fromkeys(decodes.columns, pl.Int64), orient="row")
    return (
        pl.concat([decodes, prefills])
        .with_columns(worker=pl.lit(worker.name), request=names("index"))
        .select(MEMBERS)
    )


def joined(arrays: list[Ints]) -> Ints:
    """One array of all; empty without any."""
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


EMISSIONS = ("index", "decode_worker", "time_ns", "tokens")


def emission_frame(workers: list[Worker]) -> pl.DataFrame:
    """One row per time at which a worker made tokens of a request, by request and time."""
    frames = []
    for worker in workers:
        decoding = [s for s in worker.steps if s.decoded]
        first = [(i, s.end) for s in worker.steps for i in s.complete]
        ends = np.array([s.end for s in decoding], np.int64)
        index = joined([s.residents for s in decoding])
        frames.append(
            pl.DataFrame(
                {
                    "index": np.append(index, np.array([i for i, _ in first], np.int64)),
                    "time_ns": np.append(
                        np.repeat(ends, [len(s.residents) for s in decoding]),
                        np.array([at for _, at in first], np.int64),
                    ),
                    "tokens": np.append(
                        joined([made(s) for s in decoding]), np.ones(len(first), np.int64)
                    ),
                }
            ).with_columns(decode_worker=pl.lit(worker.name))
        )
    return pl.concat(frames).select(EMISSIONS).sort("index", "time_ns")


def preemption_frame(workers: list[Worker]) -> pl.DataFrame:
    """One row per preemption."""
    rows = [
        (worker.name, at, _name(index)) for worker in workers for at, index in worker.preemptions
    ]
    schema = {"worker": pl.String, "time_ns": pl.Int64, "request": pl.String}
    return pl.DataFrame(rows, schema=schema, orient="row")


def names(column: str) -> pl.Expr:
    """Ids of requests from their numbers."""
    return pl.format("r{}", pl.col(column).cast(pl.String).str.zfill(5))


def _name(index: int) -> str:
    return f"r{index:05d}"


def made(step: Step) -> Ints:
    """Tokens that each resident made in a step that decoded."""
    return np.ones(len(step.residents), np.int64) if step.tokens is None else step.tokens
