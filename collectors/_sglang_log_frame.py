"""SGLang's log lines taken apart: stamp, ranks, message, and what kind of line it is."""

from __future__ import annotations

import re
from collections.abc import Iterable

import polars as pl

from pdtrace.model import Source

from ._loglines import text_batches

SECOND_NS, MS_NS = 1_000_000_000, 1_000_000
_STAMP = r"\[(?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,](?P<ms>\d{3}))?(?P<ranks>(?: (?:DP|PP|ATTN_CP|MOE_DP|TP|EP)\d+)*)\] "
# Something of a carrier may stand before it; the first stamp of a line is SGLang's own.
PREFIX = rf"^.{{0,120}}?{_STAMP}(?P<message>.*)$"
STATS = r"^Req ?Time ?Stats\((?P<head>[^)]*)\): (?P<body>.*)$"
ACCESS = r'"(?P<method>[A-Z]+) (?P<path>\S+) HTTP/[\d.]+" (?P<status>\d{3})'
_JSON_EVENT = r'^\{"timestamp": ?"[^"]*", ?"event": ?"request\.'
_SETTINGS = r"\bserver_args=ServerArgs\(|\bmax_total_num_tokens=\d|Started server process \[\d"
# What a carrier writes before a line; a quotation, a table's cell or a field of JSON is no line of this log.
_CARRIER = r"^[^\"'{}]{0,200}?"
_OWN = re.compile(
    # a logging configuration of the user's own may leave the stamp out
    rf"(?:{_CARRIER}\] |^)(?:(?:Prefill|Decode) batch(?: \[\d+\])?[.,] #|(?:Receive|Finish): obj=\w+ReqInput\(|Req ?Time ?Stats\(rid="
    r"|(?:Prefill|Decode) (?:bootstrap|transfer|handshake) failed for request rank=|\{\"timestamp\": ?\"[^\"]*\", ?\"event\": ?\"request\.)"
    rf"|{_CARRIER}\bserver_args=ServerArgs\("
    # a piece of a log may hold no batch: nobody else puts ranks behind the stamp
    r"|^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{3})?(?: (?:DP|PP|ATTN_CP|MOE_DP|TP|EP)\d+)+\] "
)
# Behind all that users wrote: what stands in their text is no epoch.
_EPOCH = (
    r"\] Req ?Time ?Stats\(rid=[^)]*\): .*\bentry_time=(1\d{9}\.\d+)",
    r".*'meta_info': \{.*'request_finished_ts': (1\d{9}\.\d+)",
    r"""\] \{"timestamp".*"meta_info": ?\{.*"request_finished_ts": ?(1\d{9}\.\d+)""",
)
_ZONES_NS = (-13 * 3600 * SECOND_NS, 15 * 3600 * SECOND_NS)
QUARTER_NS = 900 * SECOND_NS


def is_sglang(lines: Iterable[str]) -> bool:
    """Whether one of these lines is one that only SGLang writes."""
    return any(_OWN.search(line[:4096]) for line in lines)


def zone_ns(source: Source) -> int | None:
    """How far the stamps of this log are ahead of UTC, where lines state an epoch as well; None unknown.

    Requests tell instants as seconds since the epoch beside stamps of the local time of day.
    """
    for batch in text_batches(source):
        text = batch["text"]
        if not text.str.contains_any(["entry_time=1", "request_finished_ts"]).any():
            continue
        told = batch.filter(text.str.contains_any(["entry_time=1", "request_finished_ts"])).head(
            200
        )
        groups = told["text"].str.extract_groups(PREFIX).struct.unnest()
        epoch = pl.select(pl.coalesce(*(told["text"].str.extract(p) for p in _EPOCH))).to_series()
        apart = (stamps_ns(groups) - (epoch.cast(pl.Float64) * 1e9).cast(pl.Int64)).drop_nulls()
        apart = apart.filter(apart.is_between(*_ZONES_NS))
        # Some tell the entry, not the end: the shortest request is the nearest.
        shortest = apart.min()
        if isinstance(shortest, int):
            return round(shortest / QUARTER_NS) * QUARTER_NS
    return None


def stamps_ns(groups: pl.DataFrame) -> pl.Series:
    """The stamps as nanoseconds, read as if they were UTC."""
    seconds = groups["stamp"].str.to_datetime("%Y-%m-%d %H:%M:%S", strict=False).dt.epoch("s")
    return seconds * SECOND_NS + groups["ms"].cast(pl.Int64).fill_null(0) * MS_NS


def with_fields(lines: pl.DataFrame, ahead_ns: int) -> pl.DataFrame:
    """The lines with time_ns, resolution_ns, dp (rank in data parallel), message and kind."""
    groups = lines["text"].str.extract_groups(PREFIX).struct.unnest()
    own = stamps_ns(groups) - ahead_ns
    fine = groups["ms"].is_not_null()
    frame = lines.with_columns(
        own.alias("own_ns"),
        groups["ranks"].str.extract(r" DP(\d+)").alias("dp"),
        groups["ranks"].str.replace(r" DP\d+", "").fill_null("").alias("place"),
        groups["message"].fill_null(lines["text"]).alias("message"),
    )
    frame = frame.with_columns(
        pl.coalesce("prefix_time_ns", "own_ns").alias("time_ns"),
        # a carrier stamps when it reads the line, shortly after it was written
        pl.when(pl.col("prefix_time_ns").is_not_null() | fine)
        .then(MS_NS)
        .when(pl.col("own_ns").is_not_null())
        .then(SECOND_NS)
        .cast(pl.Int64)
        .alias("resolution_ns"),
    )
    return frame.with_columns(_kind().alias("kind"))


def _kind() -> pl.Expr:
    message = pl.col("message")
    return (
        pl.when(message.str.contains(r"^(?:Prefill|Decode) batch(?: \[\d+\])?[.,] "))
        .then(pl.lit("batch"))
        .when(message.str.contains(STATS))
        .then(pl.lit("stats"))
        .when(message.str.contains(r"^Finish: obj="))
        .then(pl.lit("finish"))
        .when(message.str.contains(r"^Receive: obj="))
        .then(pl.lit("receive"))
        .when(message.str.contains(_JSON_EVENT))
        .then(pl.lit("json"))
        .when(message.str.contains(r"^Receive OpenAI: obj="))
        .then(pl.lit("prompt"))
        .when(message.str.contains(ACCESS))
        .then(pl.lit("access"))
        .when(message.str.contains(_SETTINGS))
        .then(pl.lit("settings"))
        .otherwise(pl.lit("other"))
    )
