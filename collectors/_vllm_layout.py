"""vLLM: durations laid end to end from the first token, in the meaning of the KV connector.

V1 exports differences of monotonic stamps only; arrival and first token are wall clock, so prefill
is placed back from the first token, the queue before it, and what remains in front is front end
and intake wait.
"""

from __future__ import annotations

import polars as pl

# A request awaits the load before it is scheduled: the KV transfer lies in time_in_queue.
_ASYNC = r"(?i)nixl|moriio|mooncakeconnector"
# The load is part of the first forward pass: the KV transfer lies in time_in_model_prefill.
_SYNC = r"(?i)exampleconnector|sharedstorage|p2pnccl|pynccl|lmcacheconnector"

_QUEUE: dict[str | None, tuple[str, str]] = {
    "none": ("kv_wait_upper_bound", "queued to first scheduled"),
    "async": (
        "kv_wait_upper_bound",
        "queued to first scheduled; on a KV consumer the transfer is inside",
    ),
    "sync": (
        "decode_queue",
        "queued to first scheduled; KV is loaded later, inside the first step",
    ),
    None: (
        "kv_wait_upper_bound",
        "queued to first scheduled; connector unknown: may contain KV transfer on a KV consumer",
    ),
}
_PREFILL: dict[str | None, tuple[str, str]] = {
    "none": ("kv_wait_upper_bound", "first scheduled to first token, wall"),
    "async": (
        "decode_exec",
        "first scheduled to first token, wall; on a KV consumer the first decode step",
    ),
    "sync": (
        "kv_wait_upper_bound",
        "first scheduled to first token, wall; synchronous KV load of a KV consumer inside",
    ),
    None: (
        "kv_wait_upper_bound",
        "first scheduled to first token, wall; connector unknown: first decode step or KV load",
    ),
}
COLUMNS = (
    "leg", "detail", "decode_detail", "start_ns", "end_ns", "duration_ns", "basis", "clock",
    "resolution_ns", "censored", "semantics",
)  # fmt: skip


def with_load(requests: pl.DataFrame, facts: pl.DataFrame) -> pl.DataFrame:
    """Adds `load`: how the worker's KV connector loads: async, sync, none (it has no connector).

    NULL is unknown: no start-up lines, a connector not known here, or two that disagree.
    """
    said = facts.filter(pl.col("key") == "kv_connector").select(
        "worker",
        pl.when(pl.col("value").str.contains(_ASYNC))
        .then(pl.lit("async"))
        .when(pl.col("value").str.contains(_SYNC))
        .then(pl.lit("sync"))
        .alias("load"),
    )
    one = (
        said.drop_nulls()
        .group_by("worker")
        .agg(pl.col("load").n_unique().alias("ways"), pl.col("load").first())
        .filter(pl.col("ways") == 1)
        .select("worker", "load")
    )
    # A start-up log that states the token budget would name a connector too.
    started = facts.filter(pl.col("key") == "max_num_batched_tokens")["worker"]
    connected = facts.filter(pl.col("key") == "kv_connector")["worker"]
    loads = dict.fromkeys(set(started) - set(connected), "none") | dict(one.iter_rows())
    return requests.with_columns(
        pl.col("worker").replace_strict(loads, default=None, return_dtype=pl.String).alias("load")
    )


def with_anchor(requests: pl.DataFrame) -> pl.DataFrame:
    """Adds first_ns, anchor_ns (instants), prefill_ns, queue_ns, decode_ns and remainder_ns."""
    ttft, queue = pl.col("time_to_first_token_ns"), pl.col("time_in_queue_ns")
    prefill, decode = pl.col("time_in_model_prefill_ns"), pl.col("time_in_model_decode_ns")
    both = pl.col("time_in_model_inference_ns")
    requests = requests.with_columns(
        (pl.col("start_ns") + ttft).alias("first_ns"),
        queue.alias("queue_ns"),
        pl.coalesce(prefill, both - decode).alias("prefill_ns"),
        pl.coalesce(decode, both - prefill).alias("decode_ns"),
    )
    end_ns = pl.col("start_ns") + pl.col("window_ns")
    return requests.with_columns(
        pl.coalesce("first_ns", end_ns - pl.col("decode_ns")).alias("anchor_ns"),
        pl.when(pl.col("era") == "V1")
        .then(ttft - pl.col("queue_ns") - pl.col("prefill_ns"))
        .alias("remainder_ns"),
    )


def meaning(rule: dict[str | None, tuple[str, str]], which: int) -> pl.Expr:
    """Part `which` (decode detail, semantics) of a rule, by the column `load`."""
    texts = {load: parts[which] for load, parts in rule.items() if load is not None}
    return pl.col("load").replace_strict(texts, default=rule[None][which], return_dtype=pl.String)


def queue_meaning() -> tuple[pl.Expr, pl.Expr]:
    """Decode detail and semantics of a queue interval."""
    return meaning(_QUEUE, 0), meaning(_QUEUE, 1)


def prefill_meaning() -> tuple[pl.Expr, pl.Expr]:
    """Decode detail and semantics of a prefill interval."""
    return meaning(_PREFILL, 0), meaning(_PREFILL, 1)


def rows(
    frame: pl.DataFrame,
    detail: str,
    start: pl.Expr,
    end: pl.Expr,
    *,
    basis: str,
    semantics: str | pl.Expr,
    decode_detail: str | pl.Expr | None = None,
) -> pl.DataFrame:
    """Interval rows of one detail; those of no or negative length are left out."""
    as_expr = {"semantics": semantics, "decode_detail": decode_detail}
    texts = [
        (value if isinstance(value, pl.Expr) else pl.lit(value, dtype=pl.String)).alias(name)
        for name, value in as_expr.items()
    ]
    return (
        frame.select(
            "leg",
            pl.lit(detail).alias("detail"),
            start.alias("start_ns"),
            end.alias("end_ns"),
            pl.lit(None, dtype=pl.Int64).alias("duration_ns"),
            pl.lit(basis).alias("basis"),
            pl.lit("wall").alias("clock"),
            pl.col("resolution_ns").cast(pl.Int64),
            pl.lit(value=False).alias("censored"),
            *texts,
        )
        .filter(pl.col("end_ns") > pl.col("start_ns"))
        .select(COLUMNS)
    )


def _v1(requests: pl.DataFrame) -> list[pl.DataFrame]:
    anchor, start = pl.col("anchor_ns"), pl.col("start_ns")
    prefill_start = anchor - pl.col("prefill_ns")
    queue_start = prefill_start - pl.col("queue_ns")
    queue, prefill = queue_meaning(), prefill_meaning()
    first = pl.col("first_ns").is_not_null()
    unplaced = prefill_start.is_null() & pl.col("queue_ns").is_not_null()
    whole_decode = requests.filter(pl.col("decode_ns").is_null() & first)
    return [
        rows(
            requests.filter(first),
            "before_queue",
            start,
            queue_start,
            basis="placed",
            semantics="front end, wait for the running step and IPC; split unknown",
        ),
        rows(
            requests, "prefill_queue", queue_start, prefill_start,
            basis="placed", decode_detail=queue[0], semantics=queue[1],
        ),
        rows(
            requests, "prefill_wall", prefill_start, anchor,
            basis="placed", decode_detail=prefill[0], semantics=prefill[1],
        ),
        rows(
            requests,
            "decode_wall",
            anchor,
            anchor + pl.col("decode_ns"),
            basis="placed",
            semantics="first to last token, wall; stalls and preemptions inside",
        ),
        _until_the_end(whole_decode),
        _unplaced_queue(requests.filter(unplaced), queue),
    ]  # fmt: skip


def _until_the_end(requests: pl.DataFrame) -> pl.DataFrame:
    end = pl.col("start_ns") + pl.col("window_ns")
    return rows(
        requests, "decode_wall", pl.col("first_ns"), end,
        basis="reported", semantics="first token to finish, wall; stalls and preemptions inside",
    )  # fmt: skip


def _unplaced_queue(requests: pl.DataFrame, queue: tuple[pl.Expr, pl.Expr]) -> pl.DataFrame:
    return requests.select(
        "leg",
        pl.lit("prefill_queue").alias("detail"),
        queue[0].alias("decode_detail"),
        pl.lit(None, dtype=pl.Int64).alias("start_ns"),
        pl.lit(None, dtype=pl.Int64).alias("end_ns"),
        pl.col("queue_ns").alias("duration_ns"),
        pl.lit("reported").alias("basis"),
        pl.lit("wall").alias("clock"),
        pl.col("resolution_ns").cast(pl.Int64),
        pl.lit(value=False).alias("censored"),
        pl.lit("position unknown: no usable prefill time; ").add(queue[1]).alias("semantics"),
    )


def _v0(requests: pl.DataFrame) -> list[pl.DataFrame]:
    scheduled = pl.col("start_ns") + pl.col("queue_ns")
    return [
        rows(
            requests,
            "prefill_queue",
            pl.col("start_ns"),
            scheduled,
            basis="reported",
            decode_detail="decode_queue",
            semantics="V0: arrival to first scheduled, the front end's time inside",
        ),
        rows(
            requests,
            "prefill_wall",
            scheduled,
            pl.col("first_ns"),
            basis="reported",
            decode_detail="kv_wait_upper_bound",
            semantics="V0: first scheduled to first token, wall; KV load of a KV consumer inside",
        ),
        _until_the_end(requests),
    ]


def placed(requests: pl.DataFrame) -> pl.DataFrame:
    """The intervals of all requests from their durations."""
    frames = []
    for era, of_era in (("V1", _v1), ("V0", _v0)):
        mine = requests["era"].eq_missing(pl.Series([era]))
        if mine.any():
            frames += of_era(requests if mine.all() else requests.filter(mine))
    # Neither set of attributes: time_in_queue may begin at arrival or behind the front end.
    unknown = requests.filter(pl.col("era").is_null() & pl.col("first_ns").is_not_null())
    frames.append(_until_the_end(unknown))
    queued = requests.filter(pl.col("era").is_null() & pl.col("queue_ns").is_not_null())
    frames.append(_unplaced_queue(queued, queue_meaning()).with_columns(semantics=pl.lit(
        "position unknown: V0 counts from arrival, V1 from the engine's queue"
    )))  # fmt: skip
    return pl.concat([frame.select(COLUMNS) for frame in frames])
