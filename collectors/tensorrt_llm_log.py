"""TensorRT-LLM's server log: iterations (print_iter_log), failures, and how far servers' clocks are apart.

Source: NVIDIA/TensorRT-LLM tensorrt_llm/_torch/pyexecutor/py_executor.py, serve/openai_disagg_server.py, logger.py,
2025-06 to 2026-08. An iteration's line is written when it is over, in local time of whole seconds; `host_step_time` (before
1.0 `elapsed_time`, seconds) is the wall time of the loop, `prev_device_step_time` belongs to the iteration before and is not used. Ranks that share
every batch (tensor parallel) print the same line: one of them counts.
"""

from __future__ import annotations

import polars as pl

from pdtrace.model import Head, Match, Sink, Source

from ._loglines import head_texts, log_batches
from ._trtllm_rows import ENGINE

TITLE = ENGINE
SECOND_NS = 1_000_000_000
_LONGEST_MS = 1e9  # eleven days: no step
CARRIED_NS = 1_000_000  # who carries a line stamps it soon after

SWITCHES = {
    "engine_steps": "print_iter_log: true in the server's YAML, and keep its log",
    "kv_usage": "print_iter_log: true in the server's YAML (kv_cache_util, since 1.3)",
}

REASON_OTHER = "log line that says nothing about requests or iterations"
REASON_SETTING = "line of a setting, kept as a fact"
REASON_RANK = "the same iteration from another rank"
REASON_TOTALS = "printed totals of trtllm-bench: run it with --request_json for the single requests"
REASON_CUT = "cut off at the end of the file"

# A carrier may stand before a line; what a table or a log of another system quotes is none of ours.
_OURS = r"^[^\"'{}]{0,200}?\[TRT-LLM\] \[[IWEDVF]\]|^\[TensorRT-LLM\]\[(?:INFO|WARNING|ERROR)\]|^\[TensorRT-LLM\] TensorRT.LLM version"
_ITERATION = (
    r"\biter = (?P<seq>\d+), .*?\b(?:host_step_time = (?P<ms>\d+(?:\.\d+)?) ?ms"
    r"|elapsed_time = (?P<s>\d+(?:\.\d+)?(?:e-?\d+)?) ?s)\b"
)
_FIELDS = {
    "rank": r"\b(?:global_rank|rank) = (\d+)",
    "scheduled": r"\bnum_scheduled_requests ?[:=] ?(\d+)",
    "ctx_requests": r"'num_ctx_requests': (\d+)",
    "ctx_tokens": r"'num_ctx_tokens': (\d+)",
    "gen_tokens": r"'num_generation_tokens': (\d+)",
    "kv": r"\bkv_cache_util = (\d+(?:\.\d+)?)",
}
_STAMPS = (
    (r"\btimestamp = (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", "%Y-%m-%d %H:%M:%S"),
    (r"^\[(\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d)\]", "%m/%d/%Y-%H:%M:%S"),
)
_TOTALS = r"^= PERFORMANCE OVERVIEW|^[A-Z][\w \[\]()./-]{4,70}\((?:req/sec|tokens/sec|tps|ms|tps/gpu|tps/user)\): +[\d.]"
_BAD_LEVEL = r"\[TRT-LLM\] \[[EF]\]|^\[TensorRT-LLM\]\[ERROR\]"
# (pattern, kind, severity, detail); the first that fits counts. None of them holds what users wrote.
_EVENTS = (
    (r"Hang detected on rank", "stall", "critical", "the executor's watchdog found it hanging"),
    (r"CUDA out of memory|OutOfMemoryError|out of memory", "oom", "critical", "out of memory"),
    (r"Cannot set disagg server steady clock offset", "warning", "warning",
     "a server did not take its clock's offset: its request metrics may be mis-aligned"),
    (r"Steady clock handshake with .* was too slow", "warning", "warning",
     "a server's clock could not be aligned: its request metrics are on its own clock"),
    (r"exceeds the KV cache manager's maximum supported length", "failure", "critical",
     "a forward pass failed: sequences longer than the KV cache holds"),
    (r"Encountered an error in forward function", "failure", "critical", "a forward pass failed"),
    (r"CUDA runtime error|CUDA error|NCCL error|illegal memory access", "failure", "critical", "GPU or communication error"),
    (r"Failed to initialize executor|Executor worker died", "failure", "critical", "the executor did not start"),
    (r"CppExecutorError|Error in event loop|Fatal", "failure", "critical", "the executor failed"),
    (r"HTTPException [45]\d\d|\" [45]\d\d [A-Z][a-z]", "http_error", "warning", "an answer with an error status"),
    (r"Internal server error|Error encountered while processing request", "failure", "warning", "a request failed"),
    (_BAD_LEVEL, "warning", "warning", "a line of level error"),
)  # fmt: skip
_EVENT_LINES = "|".join(f"(?:{pattern})" for pattern, *_ in _EVENTS)
_OFFSET = r"\bServer: (?:https?://)?(?P<server>[^\s/,]+)\S*, delay: (?P<delay>[\d.e-]+) second, offset: (?P<offset>-?[\d.e+-]+) second"
_SETTINGS = {
    "version": r"TensorRT.LLM version: (\S+)",
    "tensor_parallel_size": r"LlmArgs\(.*\btensor_parallel_size=(\d+)",
    "max_num_batched_tokens": r"LlmArgs\(.*\bmax_num_tokens=(\d+)",
    "max_num_seqs": r"LlmArgs\(.*\bmax_batch_size=(\d+)",
    "chunked_prefill": r"LlmArgs\(.*\benable_chunked_prefill=(True|False)",
    "model": r"LlmArgs\(.*?\bmodel='([^']+)'",
}


def sniff(head: Head) -> Match | None:
    """Lines of its logger."""
    if b"TRT-LLM]" not in head.data and b"[TensorRT-LLM]" not in head.data:
        return None
    lines = pl.Series(head_texts(head), dtype=pl.String)
    return Match("exact", "TensorRT-LLM server log") if lines.str.contains(_OURS).any() else None


def read(source: Source, out: Sink) -> None:
    """Iterations as steps, failures as events, settings as facts; servers in one file are told apart by its carrier."""
    out.unit("line")
    servers: dict[str, str] = {}
    steps: list[pl.DataFrame] = []
    dated = False
    for batch in log_batches(source):
        lines = batch.filter(pl.col("text").str.strip_chars() != "")
        out.read(lines.height)
        for stream in lines["stream"].unique(maintain_order=True):
            if stream not in servers:
                file = f"{source.path}#{stream}" if stream else source.path
                servers[stream] = out.worker({"file": file}, engine=ENGINE, name=stream or source.name)  # fmt: skip
        lines = _stamped(lines).with_columns(
            pl.col("stream").replace_strict(servers, return_dtype=pl.String).alias("worker")
        )
        dated = dated or bool(lines["own_ns"].is_not_null().any())
        iterations = _iterations(lines)
        steps.append(iterations)
        events = _events(lines.join(iterations, on="record", how="anti", maintain_order="left"))
        if events.height:
            out.add("events", events)
        told = _settings(lines, out)
        kept = {*iterations["record"], *events["record"], *told}
        out.skip(sorted({*told} - {*iterations["record"], *events["record"]}), REASON_SETTING)
        others = lines.filter(~pl.col("record").is_in(kept))
        half = others.filter(~pl.col("whole"))["record"].to_list()
        out.skip(half, REASON_CUT)
        others = others.filter(pl.col("whole"))
        totals = others.filter(pl.col("text").str.contains(_TOTALS))["record"]
        if totals.len():
            out.skip(totals.to_list(), REASON_TOTALS)
        out.skip(
            others.filter(~pl.col("record").is_in(totals.implode()))["record"].to_list(),
            REASON_OTHER,
        )
    _write_steps(pl.concat(steps) if steps else None, out)
    for worker in servers.values() if dated else ():
        out.fact(worker, "log_time_zone", "assumed UTC")


def _stamped(lines: pl.DataFrame) -> pl.DataFrame:
    """Adds own_ns (the line's own stamp), time_ns and resolution_ns."""
    own = pl.coalesce(
        pl.col("text").str.extract(pattern, 1).str.to_datetime(style, strict=False, time_unit="ns")
        for pattern, style in _STAMPS
    )
    carried = pl.col("prefix_time_ns").is_not_null()
    return lines.with_columns(own.cast(pl.Int64).alias("own_ns")).with_columns(
        pl.coalesce("prefix_time_ns", "own_ns").alias("time_ns"),
        pl.when(carried).then(pl.lit(CARRIED_NS, pl.Int64))
        .when(pl.col("own_ns").is_not_null()).then(pl.lit(SECOND_NS, pl.Int64)).alias("resolution_ns"),
    )  # fmt: skip


def _iterations(lines: pl.DataFrame) -> pl.DataFrame:
    """Rows of `steps`. A line cut in the middle has no composition and is none."""
    text = pl.col("text")
    found = lines.select(
        "record", "worker", "time_ns", "resolution_ns",
        text.str.extract_groups(_ITERATION).struct.unnest(),
        *(text.str.extract(pattern, 1).alias(name) for name, pattern in _FIELDS.items()),
    ).with_columns(
        ms=pl.coalesce(pl.col("ms").cast(pl.Float64, strict=False), pl.col("s").cast(pl.Float64, strict=False) * 1e3)
    ).filter(
        (pl.col("ms") < _LONGEST_MS) & pl.col("gen_tokens").is_not_null()
    )  # fmt: skip
    count = {name: pl.col(name).cast(pl.Int64, strict=False) for name in _FIELDS}
    elapsed = (pl.col("ms") * 1e6).round().cast(pl.Int64, strict=False)
    end = pl.col("time_ns")
    return found.select(
        "record",
        "worker",
        pl.coalesce("rank", pl.lit("0")).alias("rank"),
        pl.col("seq").cast(pl.Int64, strict=False),
        elapsed.alias("elapsed_ns"),
        (end - elapsed).alias("start_lower_ns"),
        (end + pl.col("resolution_ns") - elapsed).alias("start_upper_ns"),
        count["ctx_requests"].alias("prefill_requests"),
        count["ctx_tokens"].alias("prefill_tokens"),
        (count["scheduled"] - count["ctx_requests"]).alias("decode_requests"),
        count["gen_tokens"].alias("decode_tokens"),
        pl.col("kv").cast(pl.Float64, strict=False).alias("kv_usage_ratio"),
        pl.lit("full").alias("capture"),
    )


def _write_steps(steps: pl.DataFrame | None, out: Sink) -> None:
    """The steps of each rank; of ranks that share every batch only the first one's."""
    if steps is None or not steps.height:
        return
    same = ["worker", "seq"]
    shape = pl.struct("prefill_tokens", "decode_tokens", "prefill_requests")
    ranks = steps.group_by("worker").agg(pl.col("rank").n_unique().alias("ranks"))
    shared = (
        steps.group_by(same)
        .agg(pl.len().alias("lines"), shape.n_unique().alias("shapes"))
        .filter(pl.col("lines") > 1)
        .group_by("worker")
        .agg((pl.col("shapes") == 1).mean().alias("alike"))
    )
    judged = steps.join(ranks, on="worker").join(shared, on="worker", how="left")
    number = pl.col("rank").cast(pl.Int64, strict=False)
    repeats = (
        (pl.col("ranks") > 1) & (pl.col("alike") > 0.9) & (number > number.min().over("worker"))
    ).fill_null(value=False)
    out.skip(judged.filter(repeats)["record"].to_list(), REASON_RANK)
    out.add("steps", judged.filter(~repeats).select(steps.columns).sort("record"))


def _events(lines: pl.DataFrame) -> pl.DataFrame:
    """Failures and warnings; the detail is ours, whatever the line said."""
    text = pl.col("text")
    again = text.str.contains("Traceback (most recent call last)", literal=True)
    bad = lines.filter(text.str.contains(_EVENT_LINES) & ~again)
    place: pl.Expr = pl.lit(None, pl.Int64)
    for number in reversed(range(len(_EVENTS))):
        place = pl.when(text.str.contains(_EVENTS[number][0])).then(number).otherwise(place)
    words = {
        column: place.replace_strict(
            range(len(_EVENTS)), [event[n] for event in _EVENTS], default=None, return_dtype=pl.String
        ).alias(column)
        for n, column in ((1, "kind"), (2, "severity"), (3, "detail"))
    }  # fmt: skip
    return bad.select("record", "worker", "time_ns", "resolution_ns", *words.values())


def _settings(lines: pl.DataFrame, out: Sink) -> list[int]:
    """Facts of the start-up lines and the offsets that a router measured; the records that told them."""
    told: list[int] = []
    for key, pattern in _SETTINGS.items():
        found = lines.select("record", "worker", value=pl.col("text").str.extract(pattern, 1)).drop_nulls()  # fmt: skip
        for record, worker, value in found.unique("worker", keep="last").iter_rows():
            out.fact(worker, key, value)
            told.append(record)
    offsets = lines.select("record", pl.col("text").str.extract_groups(_OFFSET).struct.unnest()).drop_nulls("server")  # fmt: skip
    for record, server, delay, offset in offsets.iter_rows():
        named = out.worker({"address": server}, engine=ENGINE, name=server)
        out.fact(named, "steady_clock_offset_s", offset)
        out.fact(named, "steady_clock_delay_s", delay)
        told.append(record)
    return told
