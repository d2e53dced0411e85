"""trtllm-bench: the single requests of a run (`--request_json`), durations on the clock of its process.

Source: NVIDIA/TensorRT-LLM tensorrt_llm/bench/dataclasses/statistics.py and reporting.py, 2025-02 to
2026-08. Instants are time.perf_counter_ns(); -1 stands for none (without `--streaming` no first
token). The ids count inside one process and join nothing. The texts in the file are not stored.
"""

from __future__ import annotations

import re
from typing import Any

import polars as pl

from pdtrace.model import Head, Match, Sink, Source

from ._common import NOT_AN_OBJECT, integer, whole_document

TITLE = "trtllm-bench requests (--request_json)"

TTFT = "trtllm-bench: first token of the stream - request handed to the engine, perf_counter of the process"
NO_TIMES = "no start or no end"
_KEYS = (b'"first_token_timestamp"', b'"decode_iteration"', b'"num_input_tokens"', b'"end_timestamp"')  # fmt: skip
_START = re.compile(rb"\A\s*\[\s*\{")
_ROW: dict[str, type[pl.DataType]] = {
    "leg": pl.String, "record": pl.Int64, "start": pl.Int64, "first": pl.Int64, "end": pl.Int64,
    "prompt_tokens": pl.Int64, "output_tokens": pl.Int64, "failed": pl.Boolean,
}  # fmt: skip


def sniff(head: Head) -> Match | None:
    """By keys that stand together in no other list of requests."""
    if _START.match(head.data) and all(key in head.data for key in _KEYS):
        return Match("exact", TITLE)
    return None


def read(source: Source, out: Sink) -> None:
    """Every request as a client leg with its durations."""
    out.unit("request")
    values = whole_document(source, out)
    if values is None:
        return
    if not isinstance(values, list):
        values = [values]
    out.read(len(values))
    others = [place for place, value in enumerate(values) if not isinstance(value, dict)]
    if others:
        out.skip(others, NOT_AN_OBJECT)
    rows = [_row(source.path, place, value) for place, value in enumerate(values) if isinstance(value, dict)]  # fmt: skip
    untimed = [row["record"] for row in rows if row["start"] is None or row["end"] is None]
    if untimed:
        out.skip(untimed, NO_TIMES)
    frame = pl.DataFrame(rows, schema=_ROW).filter(~pl.col("record").is_in(untimed))
    if frame.height:
        worker = out.worker({"file": source.path}, role="client", role_basis="log", name="trtllm-bench", engine="trtllm-bench")  # fmt: skip
        out.add("legs", _legs(frame, worker, f"perf:{source.path}"))


def _row(path: str, record: int, value: dict[str, Any]) -> dict[str, Any]:
    output = integer(value.get("num_output_tokens"))
    return {
        "leg": f"{path}#{record}", "record": record,
        "start": _instant(value.get("start_timestamp")), "end": _instant(value.get("end_timestamp")),
        "first": _instant(value.get("first_token_timestamp")),
        "prompt_tokens": integer(value.get("num_input_tokens")),
        "output_tokens": integer(value.get("output_tokens")) if output is None else output,
        "failed": (integer(value.get("error_tokens")) or 0) > 0,
    }  # fmt: skip


def _instant(value: Any) -> int | None:
    """-1 stands for none."""
    found = integer(value)
    return found if found is not None and found >= 0 else None


def _legs(rows: pl.DataFrame, worker: str, clock: str) -> pl.DataFrame:
    streamed = pl.col("first").is_not_null()
    return rows.select(
        "leg", "record", "prompt_tokens", "output_tokens",
        pl.lit(worker).alias("worker"), pl.lit("client").alias("observer"),
        pl.lit("client").alias("role"), pl.lit("log").alias("role_basis"),
        pl.lit(value=False).alias("container"), pl.lit(clock).alias("clock"),
        pl.col("start").alias("clock_start_ns"),
        ((pl.col("first") - pl.col("start")) / 1e6).alias("ttft_ms"),
        ((pl.col("end") - pl.col("start")) / 1e6).alias("e2e_ms"),
        pl.when(pl.col("output_tokens") > 1)
        .then((pl.col("end") - pl.col("first")) / 1e6 / (pl.col("output_tokens") - 1))
        .alias("tpot_ms"),
        pl.when(streamed).then(pl.lit(TTFT)).alias("ttft_definition"),
        pl.when(streamed).then(pl.lit(value=True)).alias("streaming"),
        pl.when("failed").then(pl.lit("failed")).otherwise(pl.lit("completed")).alias("status"),
    )  # fmt: skip
