"""vllm bench serve: the per-request arrays of one run as legs, streams and reported values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from ._compute import pc
from ._errors import error_kind
from ._vllm_bench_values import id_prefix

_ARRAYS = (
    "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times",
    "errors",
)  # fmt: skip
_TTFT = "vllm bench: send to first chunk with content, perf_counter of the client"
_TTFT_CHAT = (
    "vllm bench: send to first chunk, perf_counter of the client; in chat that chunk may carry "
    "the role only, before any token"
)
_QUEUE_TIME = (
    "vllm bench: the client's own wait for its concurrency limit before sending, no server queue"
)
INT32_MAX = 2**31 - 1


def row_count(value: Mapping[str, Any]) -> int:
    """Requests that the result lists; 0 when it has aggregates only."""
    lengths = [
        len(value[k]) for k in _ARRAYS if k != "queue_times" and isinstance(value.get(k), list)
    ]
    return max(set(lengths), key=lengths.count) if lengths else 0


class Run:
    """The arrays of one run as numpy columns of equal length; an absent one is None."""

    def __init__(
        self, value: Mapping[str, Any], count: int, path: str, worker: str, clock: str, first: int
    ) -> None:
        self.count, self.path, self.worker, self.clock, self.first = (
            count,
            path,
            worker,
            clock,
            first,
        )
        arrays = {k: value[k] for k in _ARRAYS if isinstance(value.get(k), list)}
        self.misaligned = [k for k, v in arrays.items() if len(v) != count]
        aligned = {k: v for k, v in arrays.items() if len(v) == count}
        self.input_lens = _numbers(aligned.get("input_lens"))
        self.output_lens = _numbers(aligned.get("output_lens"))
        self.ttfts = _numbers(aligned.get("ttfts"))
        self.latencies = _numbers(aligned.get("latencies"))
        self.start_times = _numbers(aligned.get("start_times"))
        self.queue_times = _numbers(aligned.get("queue_times"))
        self.errors: list[Any] | None = aligned.get("errors")
        self.itls = _lists(aligned.get("itls"))
        self.model = value.get("model_id")
        self.backend = str(value.get("backend") or value.get("endpoint_type") or "")
        self.failures = value.get("failed")
        self.id_prefix = id_prefix(value)
        self.records = np.arange(first, first + count, dtype=np.int64)
        self.legs = pa.array([f"{path}#{record}" for record in self.records], pa.string())


def _numbers(values: list[Any] | None) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Numbers as float64, NaN where there is none."""
    if values is None:
        return None
    try:
        return np.asarray([np.nan if v is None else v for v in values], dtype=np.float64)
    except (TypeError, ValueError):
        return None


def _lists(values: list[Any] | None) -> pa.Array | None:
    """Lists of seconds; NULL where a request has none."""
    if values is None:
        return None
    try:
        return pa.array(values, pa.list_(pa.float64()))
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None


def _status(run: Run) -> list[str]:
    """By the error text; without errors a request that made no token is not called completed."""
    if run.errors is not None:
        return ["failed" if error else "completed" for error in run.errors]
    nobody_failed = run.failures == 0
    made = (run.output_lens if run.output_lens is not None else np.zeros(run.count)) > 0
    return ["completed" if nobody_failed or bool(m) else "unknown" for m in made]


def _durations(run: Run, completed: pl.Series) -> tuple[pl.Series, pl.Series]:
    """(ttft_s, e2e_s): a failed request's zeros are no measurement."""
    ttft = _series(run.ttfts, run.count)
    ttft = ttft.set(~(completed & (ttft > 0)).fill_null(value=False), None)
    e2e = _series(run.latencies, run.count)
    e2e = e2e.set(~(e2e > 0).fill_null(value=False), None)
    if run.itls is not None:
        sums = pl.Series(pl.from_arrow(run.itls)).list.sum()
        e2e = e2e.zip_with(e2e.is_not_null() | ~completed, ttft + sums)
    return ttft, e2e


def _series(values: np.ndarray[Any, np.dtype[np.float64]] | None, count: int) -> pl.Series:
    if values is None:
        return pl.Series([None] * count, dtype=pl.Float64)
    return pl.Series(values, dtype=pl.Float64).fill_nan(None)


def legs(run: Run) -> pl.DataFrame:
    """One leg a request, as the load generator saw it."""
    status = pl.Series(_status(run))
    ttft, e2e = _durations(run, status == "completed")
    output = _series(run.output_lens, run.count).cast(pl.Int64, strict=False)
    errors = run.errors if run.errors is not None else [None] * run.count
    frame = pl.DataFrame(
        {
            "leg": pl.Series(pl.from_arrow(run.legs)),
            "record": run.records,
            "row_index": np.arange(run.count, dtype=np.int64),
            "clock_start_ns": (_series(run.start_times, run.count) * 1e9)
            .round()
            .cast(pl.Int64, strict=False),
            "ttft_ms": ttft * 1e3,
            "e2e_ms": e2e * 1e3,
            "output_tokens": output,
            "prompt_tokens": _series(run.input_lens, run.count).cast(pl.Int64, strict=False),
            "status": status,
            "error": pl.Series([error_kind(text) for text in errors], dtype=pl.String),
        }
    )
    chat = "chat" in run.backend
    after_first = pl.col("e2e_ms") - pl.col("ttft_ms")
    return frame.with_columns(
        pl.when(pl.col("output_tokens") > 1)
        .then(after_first / (pl.col("output_tokens") - 1))
        .alias("tpot_ms"),
        pl.lit(run.worker).alias("worker"),
        pl.lit("client").alias("observer"),
        pl.lit("client").alias("role"),
        pl.lit("config").alias("role_basis"),
        pl.lit(value=False).alias("container"),
        pl.when(pl.col("clock_start_ns").is_not_null()).then(pl.lit(run.clock)).alias("clock"),
        pl.lit(run.id_prefix, dtype=pl.String).alias("id_prefix"),
        pl.lit(run.model, dtype=pl.String).alias("model"),
        pl.when(pl.col("ttft_ms").is_not_null())
        .then(pl.lit(_TTFT_CHAT if chat else _TTFT))
        .alias("ttft_definition"),
        pl.when(pl.col("ttft_ms").is_not_null())
        .then(pl.lit(value=True))
        .alias("first_token_delivered"),
        pl.lit(True if run.itls is not None else None, dtype=pl.Boolean).alias("streaming"),
    )


def streams(run: Run) -> pa.Table | None:
    """Gaps between chunks in microseconds; a chunk is no token where the server bundles them."""
    if run.itls is None:
        return None
    offsets = run.itls.offsets
    gaps = pc.round(pc.multiply(run.itls.flatten(), 1e6))
    too_long = pc.greater(pc.abs(gaps), INT32_MAX)
    gaps = pc.cast(pc.if_else(too_long, pa.scalar(None, pa.float64()), gaps), pa.int32())
    columns = {
        "leg": run.legs,
        "stream": pa.repeat(pa.scalar(0, pa.int64()), run.count),
        "gaps_us": pa.ListArray.from_arrays(offsets, gaps, mask=run.itls.is_null()),
        "emission": pa.repeat("chunk", run.count),
        "clock": pa.repeat(run.clock, run.count) if run.start_times is not None else None,
        "observer": pa.repeat("client", run.count),
    }
    table = pa.table({name: column for name, column in columns.items() if column is not None})
    answered = pa.array([status == "completed" for status in _status(run)], pa.bool_())
    return table.filter(answered)


def queue_times(run: Run) -> pa.Table | None:
    """The client's wait before sending, under its own definition."""
    if run.queue_times is None:
        return None
    return pa.table(
        {
            "leg": run.legs,
            "quantity": pa.repeat("queue_time", run.count),
            "value": pa.array(run.queue_times, from_pandas=True),
            "unit": pa.repeat("s", run.count),
            "definition": pa.repeat(_QUEUE_TIME, run.count),
        }
    )
