"""SGLang's file of request metrics (`--export-metrics-to-file`): one finished request a line, JSON.

Source: sgl-project/sglang srt/observability/request_metrics_exporter.py, 0.5.5 to 0.5.23. All of
meta_info stands flat in a record; the request's own fields are JSON inside `request_parameters`, of which
only the room and whether it streams are taken. Nothing in it names the server or its role. Clock: wall, UTC.
"""

from __future__ import annotations

import re
from typing import Any

import polars as pl

from pdtrace.model import Head, Match, Sink, Source

from ._common import CUT_OFF, NOT_JSON

TITLE = "SGLang (file of request metrics)"
ENGINE = "SGLang"
_OTHER = "JSON, but no request of SGLang"
_MARK = re.compile(rb'\A\s*\{"request_parameters"\s*:\s*"')


def sniff(head: Head) -> Match | None:
    """Exact: the record begins with the request's own fields, as the exporter writes it."""
    return Match("exact", "SGLang request metrics") if _MARK.match(head.data) else None


def read(source: Source, out: Sink) -> None:
    """One leg a record; whether this server prefills only is known at the end of the file."""
    from . import _sglang_meta as meta
    from ._loglines import log_batches

    out.unit("request")
    worker = out.worker({"file": source.path}, engine=ENGINE)
    frames = []
    for batch in log_batches(source):
        lines = batch.filter(pl.col("text").str.strip_chars() != "")
        out.read(int(lines["parts"].sum()))
        inside = lines["text"].str.json_path_match("$.request_parameters")
        for missing, whole, reason in (
            (lines.filter(inside.is_null() & lines["text"].str.json_path_match("$").is_not_null()), True, _OTHER),
            (lines.filter(inside.is_null() & lines["text"].str.json_path_match("$").is_null()), False, NOT_JSON),
        ):  # fmt: skip
            for record, complete in missing.select("record", "whole").iter_rows():
                out.skip(record, CUT_OFF if not complete and not whole else reason)
        frames.append(_parsed(lines.filter(inside.is_not_null()), meta.NUMBERS))
    found = pl.concat(frames) if frames else None
    if found is None or not found.height:
        return
    role = _role(found)
    found = meta.with_times(found).with_columns(
        worker=pl.lit(worker),
        role=pl.lit(role, dtype=pl.String),
        role_basis=pl.lit("inferred" if role else None, dtype=pl.String),
        leg=pl.concat_str(pl.lit(f"{source.path}#"), "record"),
        exact=pl.lit(value=False),
        model=pl.lit(None, dtype=pl.String),
        status=_status(),
        error=pl.when((pl.col("finish_reason") == "abort") & (pl.col("code") >= 400)).then(pl.format("HTTP {}", "code")),
    )  # fmt: skip
    if role:
        out.worker({"file": source.path}, engine=ENGINE, role=role, role_basis="inferred")
    # Whose requests these are is told by the spans or the log of the same ids.
    out.fact(worker, "_file_of_requests", "true")
    out.add("legs", meta.legs(found))
    for table, frame in (("intervals", meta.intervals(found)), ("reported", meta.reported(found))):
        if frame.height:
            out.add(table, frame)


def _parsed(lines: pl.DataFrame, numbers: tuple[str, ...]) -> pl.DataFrame:
    text = pl.col("text")
    inside = text.str.json_path_match("$.request_parameters")
    return lines.select(
        "record",
        text.str.json_path_match("$.id").alias("rid"),
        inside.str.json_path_match("$.bootstrap_room").alias("room"),
        (inside.str.json_path_match("$.stream") == "true").alias("streaming"),
        text.str.json_path_match("$.finish_reason.type").alias("finish_reason"),
        text.str.json_path_match("$.finish_reason.status_code").cast(pl.Int64, strict=False).alias("code"),
        *(text.str.json_path_match(f"$.{name}").cast(pl.Float64, strict=False).alias(name) for name in numbers),
        pl.lit(None, dtype=pl.Int64).alias("line_ns"),
        pl.lit(None, dtype=pl.Int64).alias("resolution_ns"),
    )  # fmt: skip


def _status() -> pl.Expr:
    abort = pl.col("finish_reason") == "abort"
    return (
        pl.when(abort & (pl.col("code") >= 400))
        .then(pl.lit("failed"))
        .when(abort)
        .then(pl.lit("aborted"))
        .otherwise(pl.lit("completed"))
    )


def _role(found: pl.DataFrame) -> Any:
    """Requests in a room are those of one side; one that makes no second token of any is the prefill side."""
    roomed = found.filter(pl.col("room").is_not_null())
    if roomed.height < found.height or not found.height:
        return None
    several = roomed.select((pl.col("completion_tokens") > 1).any()).item()
    return "decode" if several else "prefill"
