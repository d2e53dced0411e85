"""Rows of a request table as legs."""

from __future__ import annotations

import re

import polars as pl

from pdtrace.records import dataclass

from ._table_blocks import prefix_blocks
from ._table_columns import typed_columns
from ._table_extras import intervals, reported, served, streams
from ._table_headers import words_of
from ._table_plan import NOTE_CHARACTERS, Plan
from ._table_status import with_status
from ._table_times import with_times

LONG_NOTES = "long_notes_not_stored"
SUMMARY_ROW = "summary row"
EMPTY_ROW = "no value in the columns that were understood"
_SUMMARY = (
    r"^(average|avg|mean|total|sum|median|min|max|std|stdev|p\d\d(\.\d)?"
    r"|평균|합계|平均|合计|总计)\.?:?$"
)


@dataclass
class Rows:
    """What one batch of rows gave."""

    legs: pl.DataFrame
    intervals: list[pl.DataFrame]
    streams: pl.DataFrame | None
    reported: list[pl.DataFrame]
    served: pl.DataFrame | None  # leg, record, worker that the row names, ids and counts
    summaries: list[int]
    empty: list[int]
    counts: dict[str, int]
    blocks: pl.DataFrame | None = None


def observer_of(name: str, columns: list[str], plan: Plan) -> str:
    """Who wrote the table: the client, unless its name or columns say proxy, router or gateway."""
    said = " ".join([words_of(name)[0], *(words_of(c)[0] for c in columns)])
    if plan.dialect == "litellm" or re.search(r"gateway|litellm", words_of(name)[0]):
        return "gateway"
    if re.search(r"(?:^|_)(?:proxy|router)(?:_|$)", words_of(name)[0]) or (
        "prefill_start" in said and "decode_start" in said
    ):
        return "router"
    return "client"


def build(
    plan: Plan, frame: pl.DataFrame, record: pl.Series, path: str, observer: str, worker: str
) -> Rows:
    """All rows of one batch; the caller adds them to the tables."""
    counts: dict[str, int] = {}
    values = typed_columns(plan, frame, record)
    values = with_status(plan, frame, values)
    values = with_times(plan, values, path, counts)
    filled = pl.any_horizontal(
        pl.col(
            "ttft_ms", "e2e_ms", "tpot_ms", "tps", "prompt_tokens", "output_tokens", "start_raw"
        ).is_not_null()
    )
    summary = (
        pl.coalesce("request_id", "first_cell")
        .str.to_lowercase()
        .str.contains(_SUMMARY)
        .fill_null(value=False)
    )
    values = values.with_columns(
        filled=filled, summary=summary, leg=pl.format("{}#{}", pl.lit(path), pl.col("record"))
    )
    kept = values.filter(pl.col("filled") & ~pl.col("summary"))
    frame_kept = frame.filter(values["filled"] & ~values["summary"])
    legs = _legs(plan, kept, observer, worker)
    if long := int((kept["note"].str.len_chars() > NOTE_CHARACTERS).sum()):
        counts[LONG_NOTES] = long
    return Rows(
        legs,
        intervals(plan, frame_kept, kept),
        streams(plan, frame_kept, kept, observer),
        reported(plan, frame_kept, kept),
        served(plan, kept, legs),
        values.filter("summary")["record"].to_list(),
        values.filter(~pl.col("filled") & ~pl.col("summary"))["record"].to_list(),
        counts,
        prefix_blocks(plan, frame_kept, kept),
    )


def _legs(plan: Plan, values: pl.DataFrame, observer: str, worker: str) -> pl.DataFrame:
    traceparent = pl.col("traceparent").str.extract_groups(
        r"^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-"
    )
    id_ = pl.coalesce("external_id", "request_id")
    # A running number names a row of this table only; it must not join with another file's.
    travels: pl.Expr = pl.when(~id_.str.contains(r"^[#]?\d{1,7}$")).then(id_)
    if plan.first("worker"):  # the row's second leg (who served it) needs a key in common
        travels = pl.coalesce(travels, pl.when(pl.col("worker").is_not_null()).then("leg"))
    resolution = max((rule.resolution_ns for rule in plan.rules.values()), default=None)
    definition = (
        "first chunk - start"
        if plan.first("chunk_times") or plan.first("first_at")
        else "as the table says"
    )
    return values.select(
        "leg",
        "record",
        pl.lit(worker).alias("worker"),
        pl.lit(observer).alias("observer"),
        pl.lit(observer).alias("role"),
        pl.lit("log").alias("role_basis"),
        pl.lit(value=False).alias("container"),
        pl.coalesce(pl.col("trace_id"), traceparent.struct.field("1"))
        .str.to_lowercase()
        .alias("trace_id"),
        # What a client log calls its parent span is the span that it sent: the server's parent.
        pl.coalesce("span_id", traceparent.struct.field("2"), "parent_span_id")
        .str.to_lowercase()
        .alias("span_id"),
        pl.coalesce("request_id", "row_id", "external_id").alias("request_id"),
        travels.alias("external_id"),
        "remote_id",
        "session",
        "turn",
        "clock",
        "clock_start_ns",
        "start_ns",
        "first_token_ns",
        "last_token_ns",
        "end_ns",
        pl.lit(resolution, dtype=pl.Int64).alias("resolution_ns"),
        "ttft_ms",
        "e2e_ms",
        "tpot_ms",
        pl.when(pl.col("ttft_ms").is_not_null()).then(pl.lit(definition)).alias("ttft_definition"),
        "model",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "max_tokens",
        pl.when(pl.col("streaming").str.to_lowercase().is_in(["true", "1", "yes"]))
        .then(pl.lit(value=True))
        .when(pl.col("not_streamed"))
        .then(pl.lit(value=False))
        .alias("streaming"),
        "tenant",
        "route",
        "status",
        pl.when(pl.col("finish_reason").str.contains(r"^[A-Za-z][\w.-]{0,59}$"))
        .then("finish_reason")
        .alias("finish_reason"),
        "error",
        pl.when(pl.col("note").str.len_chars() <= NOTE_CHARACTERS).then("note").alias("note"),
    )
