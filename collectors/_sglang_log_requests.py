"""Request lines of SGLang's log: received, finished, time stats; one leg each, put together at the end.

Prompts and answers stand in Receive and Finish lines: only named numbers and ids are taken out, from
behind the text where there is any. Time stats: 0.4.6 to 0.5.10 state durations and a start on the
process's own clock, which means nothing elsewhere; from 0.5.12 on `entry_time`, seconds since the epoch.
"""

from __future__ import annotations

import polars as pl

from pdtrace import model

from . import _sglang_meta as meta
from ._sglang_log_frame import MS_NS, SECOND_NS, STATS

NO_ID = "request line without an id"
FOLDED = "told with the request's other lines"
HEALTH = "health check, no request of a user"
_HEALTH_ID = "HEALTH_CHECK"
_ABSURD_MS = 1e9  # 0.4.x printed the epoch as a duration (sgl-project/sglang issue 8335)
_HEAD = {
    "rid": r"\brid=([^,)]*)", "room": r"bootstrap_room=(\d+)", "prompt": r"input[ _]len=(\d+)",
    "cached": r"cached_input_len=(\d+)", "output": r"output[ _]len=(\d+)", "type": r"type=(\w+)",
}  # fmt: skip
# durations in milliseconds; groups of older versions stand in parentheses: bootstrap_queue_duration(9.00ms) = ...
_BODY = {
    "bootstrap": r"\bbootstrap(?:_duration=|\()(-?[\d.]+)ms",
    "alloc": r"\balloc_wait(?:_duration=|\()(-?[\d.]+)ms",
    "whole": r"\b(?:bootstrap_queue_duration|prealloc_queue_duration|prealloc_duration)(?:=|\()(-?[\d.]+)ms",
    "transfer": r"\btransfer_duration=(-?[\d.]+)ms",
    "queue": r"\bqueue_duration=(-?[\d.]+)ms",
    "forward": r"\bforward_duration=(-?[\d.]+)ms",
    "entry": r"\bentry_time=(1\d{9}\.\d+)",
    "gib_s": r"\btransfer_speed=([\d.]+) ?GB/s",
    "mib": r"\btransfer_total=([\d.]+) ?MB",
}
_ROLES = {"prefill": "prefill", "decode": "decode", "unified": "aggregated"}
_REASON = r"""['"]finish_reason['"]: ?\{['"]type['"]: ?['"](\w+)"""
_STATUS_CODE = r"""['"]finish_reason['"]: ?\{[^}]*['"]status_code['"]: ?(\d+)"""


def parse(lines: pl.DataFrame) -> pl.DataFrame:
    """record, run, kind, rid, time_ns, resolution_ns and the figures of each request line."""
    parts = [
        _stats(lines.filter(pl.col("kind") == "stats")),
        _told(lines.filter(pl.col("kind").is_in(["finish", "receive"]))),
        _json(lines.filter(pl.col("kind") == "json")),
    ]
    return pl.concat([p for p in parts if p.height] or [parts[0]], how="diagonal_relaxed")


# What a user wrote: one text (a long one printed as its two ends) or a list of them.
_LITERAL = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_TEXT = rf"\btext=(?:{_LITERAL}(?: \.\.\. {_LITERAL})?|\[.*\], input_ids=)"
_KEYS = ("record", "run", "time_ns", "resolution_ns")


def _stats(lines: pl.DataFrame) -> pl.DataFrame:
    message = pl.col("message")
    head = message.str.extract(STATS, 1)
    body = message.str.extract(STATS, 2)
    return lines.select(
        *_KEYS,
        pl.lit("stats").alias("kind"),
        *(head.str.extract(p).alias(name) for name, p in _HEAD.items()),
        *(body.str.extract(p).cast(pl.Float64, strict=False).alias(name) for name, p in _BODY.items()),
    ).with_columns(pl.col("prompt", "cached", "output").cast(pl.Float64, strict=False))  # fmt: skip


def _numbers(text: pl.Expr) -> list[pl.Expr]:
    return [
        text.str.extract(rf"""['"]{name}['"]: ?(-?\d[\d.]*(?:e[+-]?\d+)?)""").cast(pl.Float64, strict=False).alias(name)
        for name in meta.NUMBERS
    ]  # fmt: skip


def _told(lines: pl.DataFrame) -> pl.DataFrame:
    """Text lines: what stands behind the last meta_info; the object's own fields behind its text."""
    said = pl.col("message").str.extract(r".*'meta_info': (\{.*)$")
    inside = pl.col("message").str.replace_all(_TEXT, "").str.replace(r", out=\{.*$", "")
    return lines.with_columns(said=said, inside=inside).select(
        *_KEYS, "kind",
        pl.coalesce(pl.col("said").str.extract(r"'id': '([^']*)'"), pl.col("inside").str.extract(r"\brid='([^']*)'")).alias("rid"),
        pl.col("inside").str.extract(r"\bbootstrap_room=(\d+)").alias("room"),
        pl.col("inside").str.extract(r"\bstream=(True|False)").alias("stream_said"),
        pl.col("said").str.extract(_REASON).alias("reason"),
        pl.col("said").str.extract(_STATUS_CODE).cast(pl.Int64, strict=False).alias("code"),
        *_numbers(pl.col("said")),
    )  # fmt: skip


def _json(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("message")
    said = text.str.json_path_match("$.out.meta_info")
    event = text.str.json_path_match("$.event")
    frame = lines.with_columns(said=said, event=event).filter(
        pl.col("event").is_in(["request.received", "request.finished"])
    )
    return frame.select(
        *_KEYS,
        pl.when(pl.col("event") == "request.finished").then(pl.lit("finish")).otherwise(pl.lit("receive")).alias("kind"),
        pl.coalesce(text.str.json_path_match("$.rid"), text.str.json_path_match("$.obj.rid")).alias("rid"),
        text.str.json_path_match("$.obj.bootstrap_room").alias("room"),
        text.str.json_path_match("$.obj.stream").str.to_titlecase().alias("stream_said"),
        pl.col("said").str.extract(_REASON).alias("reason"),
        pl.col("said").str.extract(_STATUS_CODE).cast(pl.Int64, strict=False).alias("code"),
        *_numbers(pl.col("said")),
    )  # fmt: skip


def together(lines: pl.DataFrame) -> pl.DataFrame:
    """One row a request: the figures of its lines, and which record stands for it."""
    wanted = {
        "reason": pl.String, "code": pl.Int64, "stream_said": pl.String, "room": pl.String, "type": pl.String,
        **dict.fromkeys((*meta.NUMBERS, *_BODY, "prompt", "cached", "output"), pl.Float64),
    }  # fmt: skip
    lines = lines.with_columns(
        pl.lit(None, dtype=kind).alias(name) for name, kind in wanted.items() if name not in lines.columns
    ).sort("record")  # fmt: skip
    # An id that a client uses again: its n-th lines of each kind go together.
    turn = pl.int_range(pl.len()).over("run", "rid", "kind").alias("turn")
    kind = pl.col("kind")
    first = {name: pl.col(name).drop_nulls().first() for name in wanted}
    found = (
        lines.with_columns(turn)
        .group_by("run", "rid", "turn", maintain_order=True)
        .agg(
            **first,
            record=pl.col("record").sort_by(kind.replace_strict({"finish": 0, "stats": 1, "receive": 2}, return_dtype=pl.Int64)).first(),
            received_ns=pl.col("time_ns").filter(kind == "receive").first(),
            line_ns=pl.col("time_ns").filter(kind != "receive").last(),
            stats_ns=pl.col("time_ns").filter(kind == "stats").last(),
            stats_record=pl.col("record").filter(kind == "stats").last(),
            finished=(kind == "finish").any(),
            ended=(kind != "receive").any(),
            resolution_ns=pl.col("resolution_ns").max(),
        )
    )  # fmt: skip
    sane = {name: pl.when(pl.col(name).is_between(0, _ABSURD_MS)).then(name) for name in ("bootstrap", "alloc", "whole", "transfer", "queue", "forward")}  # fmt: skip
    return _with_outcome(_with_places(found.with_columns(**sane)))


def _with_places(found: pl.DataFrame) -> pl.DataFrame:
    """Window and first token: from instants where told, else from durations and the line's stamp."""
    found = found.with_columns(*meta.known(*meta.NUMBERS)).with_columns(
        prompt_tokens=pl.coalesce("prompt_tokens", "prompt"),
        cached_tokens=pl.coalesce("cached_tokens", "cached"),
        completion_tokens=pl.coalesce("completion_tokens", "output"),
        stats_role=pl.col("type").replace_strict(_ROLES, default=None, return_dtype=pl.String),
    )
    found = meta.with_times(found)
    entry = (pl.col("entry") * 1e6).round().cast(pl.Int64, strict=False) * 1000
    entrance = pl.coalesce("whole", pl.col("bootstrap") + pl.col("alloc").fill_null(0))
    parts = [entrance, pl.col("transfer"), pl.col("queue"), pl.col("forward")]
    total = pl.sum_horizontal(*(part.fill_null(0) for part in parts))
    known = pl.col("forward").is_not_null()
    length = pl.when(known).then((total * MS_NS).cast(pl.Int64, strict=False))
    # Without an epoch of its own the line's stamp is the end.
    begin = pl.coalesce(entry, pl.col("stats_ns") - length)
    found = found.with_columns(
        exact=entry.is_not_null() & known,
        entrance=entrance,
        begin_ns=begin,
        length_ns=length,
    )
    before = pl.sum_horizontal(*(part.fill_null(0) for part in (pl.col("entrance"), pl.col("transfer"), pl.col("queue"))))  # fmt: skip
    run_ns = pl.col("begin_ns") + (before * MS_NS).cast(pl.Int64, strict=False)
    taken = (pl.col("stats_role") == "decode") & known & pl.col("first_ns").is_null()
    coarse = ~pl.col("fine")
    return found.with_columns(
        run_ns=pl.when(known).then(run_ns),
        start_ns=pl.when(coarse & pl.col("begin_ns").is_not_null()).then(pl.coalesce(pl.when(pl.col("exact")).then("begin_ns"), "start_ns", "begin_ns")).otherwise(pl.coalesce("start_ns", "received_ns")),
        end_ns=pl.when(coarse & pl.col("exact")).then(pl.col("begin_ns") + pl.col("length_ns")).otherwise("end_ns"),
        first_ns=pl.when(taken.fill_null(value=False)).then(run_ns).otherwise("first_ns"),
        first_text=pl.when(taken.fill_null(value=False)).then(pl.lit("entered the decode scheduler to the batch that takes over the first token")).otherwise("first_text"),
    ).with_columns(start_ns=pl.coalesce("start_ns", "received_ns"))  # fmt: skip


def _with_outcome(found: pl.DataFrame) -> pl.DataFrame:
    abort = (pl.col("reason") == "abort").fill_null(value=False)
    return found.with_columns(
        finish_reason=pl.col("reason"),
        status=pl.when(abort & (pl.col("code") >= 400))
        .then(pl.lit("failed"))
        .when(abort)
        .then(pl.lit("aborted"))
        .when("ended")
        .then(pl.lit("completed"))
        .otherwise(pl.lit("unknown")),
        error=pl.when(abort & (pl.col("code") >= 400)).then(pl.format("HTTP {}", "code")),
        streaming=pl.col("stream_said") == "True",
    )


def intervals(found: pl.DataFrame) -> pl.DataFrame:
    """What time stats place, end to end from the entry; instants of meta_info where there are any instead.

    A prefill worker's durations without an epoch are kept as durations: against the decode worker's they
    would be off by as much as a stamp of whole seconds.
    """
    stated = found.filter(pl.col("run_ns").is_not_null())
    prefill, decode = pl.col("role") == "prefill", pl.col("role") == "decode"
    entrance = (pl.col("entrance").fill_null(0) * MS_NS).cast(pl.Int64, strict=False)
    transfer = (pl.col("transfer").fill_null(0) * MS_NS).cast(pl.Int64, strict=False)
    queue = (pl.col("queue").fill_null(0) * MS_NS).cast(pl.Int64, strict=False)
    begin, run, end = pl.col("begin_ns"), pl.col("run_ns"), pl.col("begin_ns") + pl.col("length_ns")
    bare = ~pl.col("fine") | pl.col("batch_ns").is_null()
    first = pl.col("first_ns")
    unified = ~(prefill | decode).fill_null(value=False)
    split = unified & (first > run) & (first <= end)
    parts = (
        ("kv_space_wait", begin, begin + entrance, "placed", "handshake with the other side, and until there is room or an address for the KV", (prefill | decode) & (entrance > 0)),
        ("kv_wait_upper_bound", begin + entrance, begin + entrance + transfer, "upper_bound", "holds the prefill worker's queue and computing, and the KV transfer", decode & (transfer > 0)),
        ("decode_queue", run - queue, run, "placed", "scheduler's waiting queue", decode & bare),
        ("prefill_queue", run - queue, run, "placed", "scheduler's waiting queue", ~decode & bare),
        ("prefill_wall", run, end, "upper_bound", "first batch to the KV transfer seen as finished: the transfer is inside", prefill & bare),
        ("prefill_wall", run, first, "placed", "first batch to first token: wall time", split & bare),
        ("decode_wall", first, end, "placed", "first token to the end", split & bare),
        ("decode_wall", run, end, "placed", "first batch to the end", decode & ~pl.col("fine")),
    )  # fmt: skip
    alone = ~prefill.fill_null(value=False)
    positioned = pl.col("exact") | alone | (pl.col("resolution_ns") < SECOND_NS)
    return pl.concat(
        stated.filter(when.fill_null(value=False) & (b >= a)).select(
            "leg",
            pl.lit(detail).alias("detail"),
            pl.when(positioned).then(a).alias("start_ns"),
            pl.when(positioned).then(b).alias("end_ns"),
            pl.when(~positioned).then(b - a).alias("duration_ns"),
            pl.lit(basis).alias("basis"),
            pl.lit(model.WALL).alias("clock"),
            pl.when(pl.col("exact")).then(pl.lit(MS_NS, dtype=pl.Int64)).otherwise("resolution_ns").alias("resolution_ns"),
            pl.lit(value=False).alias("censored"),
            pl.lit(words).alias("semantics"),
        )
        for detail, a, b, basis, words, when in parts
    )  # fmt: skip


_STATED = {
    "queue": "scheduler's waiting queue; bootstrap and transfer queues of a pair are not in it",
    "bootstrap": "entry to handshake done",
    "alloc": "handshake done to room for the KV",
    "whole": "entry to the next queue: handshake and wait for room",
    "transfer": "decode worker: room given to KV complete; the remote prefill is inside",
}


def reported(found: pl.DataFrame) -> pl.DataFrame:
    """The durations of time stats, untouched, each with what it measures."""
    forward = pl.when(pl.col("role") == "prefill").then(pl.lit("first batch to the KV transfer seen as finished")).otherwise(pl.lit("first batch to the end"))  # fmt: skip
    parts = [(name, name + "_duration", pl.lit(words), "ms") for name, words in _STATED.items()]
    speed = pl.lit("bytes over a time that in many versions is that of the last chunk only; 1 GB is 2**30 bytes")  # fmt: skip
    parts += [("forward", "forward_duration", forward, "ms"), ("gib_s", "transfer_speed", speed, "GiB/s")]  # fmt: skip
    return pl.concat(
        found.filter(pl.col(name) > 0 if name == "gib_s" else pl.col(name).is_not_null()).select(
            "leg",
            pl.lit(quantity).alias("quantity"),
            pl.col(name).alias("value"),
            pl.lit(unit).alias("unit"),
            pl.concat_str(pl.lit("SGLang's ReqTimeStats: "), words).alias("definition"),
        )
        for name, quantity, words, unit in parts
    )


def transfers(found: pl.DataFrame) -> pl.DataFrame:
    """Bytes that a prefill worker sent for a request; how long it took, its lines do not tell reliably."""
    return found.filter((pl.col("mib") > 0) & (pl.col("role") == "prefill")).select(
        pl.col("stats_record").alias("record"),
        "leg",
        pl.col("rid").alias("request_id"),
        pl.col("worker").alias("source_worker"),
        (pl.col("mib") * 2**20).round().cast(pl.Int64, strict=False).alias("bytes"),
        pl.lit("prefill_to_decode").alias("direction"),
        pl.when(pl.col("status") == "failed").then(pl.lit("failed")).otherwise(pl.lit("completed")).alias("outcome"),
    )  # fmt: skip


def is_health() -> pl.Expr:
    """Requests that SGLang sends itself."""
    return pl.col("rid").str.contains(_HEALTH_ID, literal=True)
