"""What SGLang says of a finished request (meta_info): one meaning for log lines and for the metrics file.

Instants (`*_ts`, `*_time`) are seconds since the epoch, there only with --enable-metrics; names changed:
0.5.6 to 0.5.8 `prefill_finished_ts`, `decode_finished_ts`, later `prefill_finished_time`,
`request_finished_ts`; `first_token_latency` came with 0.5.23. Source: sgl-project/sglang
srt/managers/tokenizer_manager.py and srt/observability/req_time_stats.py.
"""

from __future__ import annotations

import polars as pl

from pdtrace import model

NUMBERS = (
    "prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency", "queue_time", "request_received_ts",
    "forward_entry_time", "prefill_finished_ts", "prefill_finished_time", "first_token_latency",
    "response_sent_to_client_ts", "decode_finished_ts", "request_finished_ts", "inference_time", "decode_throughput",
    "dp_rank", "num_retractions", "total_retractions", "storage_prefetch_wait",
)  # fmt: skip
_REPORTED = {
    "queue_time": ("s", "scheduler's waiting queue; bootstrap and transfer queues of a pair are not in it"),
    "e2e_latency": ("s", "request created to its end in the API server"),
    "first_token_latency": ("s", "request created to its first token in the API server"),
    "inference_time": ("s", "first batch to the end"),
    "decode_throughput": ("tokens/s", "tokens over the time after the first one; to 0.5.10 the first token is counted, too"),
    "storage_prefetch_wait": ("s", "wait for prefix KV from the storage tier, as polled"),
}  # fmt: skip
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens", "dp_rank")
_MOST_COUNT, _MOST_SECONDS = 2**53, 9e9  # beyond: no count of tokens, no instant and no duration
_MICROSECOND = 1_000
_SECOND = 1_000_000_000


def known(*names: str) -> list[pl.Expr]:
    """Those of these numbers that a request can have; the rest (negative, not finite, absurd) is unknown."""
    return [
        pl.when(pl.col(n).is_between(0, _MOST_COUNT if n in _COUNTS else _MOST_SECONDS)).then(n).alias(n) for n in names
    ]  # fmt: skip


def ns(column: str) -> pl.Expr:
    """Seconds since the epoch as nanoseconds; what is no such instant (0.0: not reached) is unknown."""
    value = pl.col(column)
    return pl.when(value.is_between(1e9, 9e9)).then(
        (value * 1e6).round().cast(pl.Int64, strict=False) * 1000
    )


def with_times(frame: pl.DataFrame) -> pl.DataFrame:
    """Adds start_ns, first_ns, end_ns, fine (from instants, not from a line's stamp) and first_text.

    `line_ns` is when the line was written, NULL without one.
    """
    frame = frame.with_columns(*known(*NUMBERS))
    received, told_end = ns("request_received_ts"), ns("request_finished_ts")
    end = pl.coalesce(told_end, ns("decode_finished_ts"))
    length = (pl.when(pl.col("e2e_latency") > 0).then("e2e_latency") * 1e9).cast(
        pl.Int64, strict=False
    )
    by_latency = received + (pl.when(pl.col("first_token_latency") > 0).then("first_token_latency") * 1e9).cast(pl.Int64, strict=False)  # fmt: skip
    made, sent = pl.coalesce(ns("prefill_finished_time"), ns("prefill_finished_ts")), ns("response_sent_to_client_ts")  # fmt: skip
    texts = (
        (by_latency, "request created to first token, both in the API server"),
        (made, "received by the API server to prompt computed"),
        (sent, "received by the API server to first chunk handed over"),
    )
    text = pl.coalesce(*(pl.when(instant.is_not_null()).then(pl.lit(words)) for instant, words in texts))  # fmt: skip
    fine = received.is_not_null()
    return frame.with_columns(
        start_ns=pl.coalesce(received, end - length, pl.col("line_ns") - length),
        first_ns=pl.coalesce(by_latency, made, sent),
        made_ns=made,
        batch_ns=ns("forward_entry_time"),
        end_ns=pl.coalesce(end, received + length, "line_ns"),
        fine=fine,
        first_text=text,
    )


def legs(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of `legs` of these requests; `role`, `worker` and `leg` are there."""
    first, start, end = pl.col("first_ns"), pl.col("start_ns"), pl.col("end_ns")
    tokens = pl.col("completion_tokens").cast(pl.Int64, strict=False)
    length = pl.coalesce(pl.col("e2e_latency") * 1e3, (end - start) / 1e6)
    ttft = pl.when(pl.col("fine") | pl.col("exact")).then((first - start) / 1e6)
    return frame.select(
        "record", "leg", "worker", "role", "role_basis", "start_ns", "end_ns", "status", "finish_reason", "error", "model",
        pl.col("rid").alias("request_id"),
        pl.col("rid").alias("external_id"),
        pl.col("room").alias("bootstrap_room"),
        pl.lit("engine").alias("observer"),
        pl.lit(value=False).alias("container"),
        pl.lit(model.WALL).alias("clock"),
        pl.col("dp_rank").cast(pl.Int64, strict=False).cast(pl.String).alias("rank"),
        pl.when(pl.col("fine")).then(_MICROSECOND).when(pl.col("exact")).then(1_000_000).otherwise(pl.coalesce("resolution_ns", pl.lit(_SECOND))).cast(pl.Int64, strict=False).alias("resolution_ns"),
        first.alias("first_token_ns"),
        ttft.alias("ttft_ms"),
        length.alias("e2e_ms"),
        pl.when(tokens > 1).then((end - first) / 1e6 / (tokens - 1)).alias("tpot_ms"),
        pl.when(first.is_not_null()).then("first_text").alias("ttft_definition"),
        pl.when(pl.col("role") == "prefill").then(pl.lit(value=False)).alias("first_token_delivered"),
        pl.col("prompt_tokens").cast(pl.Int64, strict=False),
        pl.col("cached_tokens").cast(pl.Int64, strict=False),
        tokens.alias("output_tokens"),
        pl.col("streaming"),
    )  # fmt: skip


def intervals(frame: pl.DataFrame) -> pl.DataFrame:
    """What the instants of one request place: queue, prefill, KV transfer of a prefill worker, decode."""
    entered = pl.col("batch_ns")
    queue = (pl.when(pl.col("queue_time") >= 0).then("queue_time") * 1e9).cast(
        pl.Int64, strict=False
    )
    waits = pl.when(pl.col("role") == "decode").then(pl.lit("decode_queue")).otherwise(pl.lit("prefill_queue"))  # fmt: skip
    prefills = (pl.col("role") != "decode").fill_null(value=False)
    made = pl.col("made_ns")
    # Up to 0.5.8 the API server stamps the prompt's end: a prefill worker's answer comes after the transfer.
    computed = ns("prefill_finished_time")
    prompt = pl.when(pl.col("role") == "prefill").then(computed).otherwise(made)
    parts = (
        (waits, entered - queue, entered, "placed", "scheduler's waiting queue, ends with the first batch", pl.lit(value=True)),
        (pl.lit("prefill_wall"), entered, prompt, "measured", "first batch to prompt computed: wall time", prefills),
        (pl.lit("kv_transfer"), computed, pl.col("end_ns"), "measured", "prompt computed to the end on the prefill worker: when the transfer was seen as finished", pl.col("role") == "prefill"),
        (pl.lit("decode_wall"), pl.col("first_ns"), pl.col("end_ns"), "measured", "first token to the end", pl.col("role") != "prefill"),
    )  # fmt: skip
    return pl.concat(
        frame.filter(pl.col("fine") & when.fill_null(value=False) & (end >= start)).select(
            "leg",
            detail.alias("detail"),
            start.alias("start_ns"),
            end.alias("end_ns"),
            pl.lit(basis).alias("basis"),
            pl.lit(model.WALL).alias("clock"),
            pl.lit(_MICROSECOND, dtype=pl.Int64).alias("resolution_ns"),
            pl.lit(value=False).alias("censored"),
            pl.lit(words).alias("semantics"),
        )
        for detail, start, end, basis, words, when in parts
    )


def reported(frame: pl.DataFrame) -> pl.DataFrame:
    """What SGLang states of a request, untouched."""
    return pl.concat(
        frame.filter(pl.col(name).is_not_null()).select(
            "leg",
            pl.lit(name).alias("quantity"),
            pl.col(name).alias("value"),
            pl.lit(unit).alias("unit"),
            pl.lit(f"SGLang's meta_info: {words}").alias("definition"),
        )
        for name, (unit, words) in _REPORTED.items()
    )
