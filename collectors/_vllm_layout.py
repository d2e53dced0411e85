"""vLLM: durations laid end to end from the first token, in the meaning of the KV connector.

V1 exports differences of monotonic stamps only; arrival and first token are wall clock, so prefill
is placed back from the first token, the queue before it, and what remains in front is front end
and intake wait.
"""

from __future__ import annotations

import polars as pl
import pyarrow as pa

from pdtrace.model import PHASE_DETAILS

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
_UNPLACED = "position unknown: no usable prefill time; "
_BEFORE = "front end, wait for the running step and IPC; split unknown"
_DECODING = "first to last token, wall; stalls and preemptions inside"
_TO_THE_END = "first token to finish, wall; stalls and preemptions inside"
_V0_QUEUE = "V0: arrival to first scheduled, the front end's time inside"
_V0_PREFILL = "V0: first scheduled to first token, wall; KV load of a KV consumer inside"
_NEITHER = "position unknown: V0 counts from arrival, V1 from the engine's queue"
_RULES = [text for rule in (_QUEUE, _PREFILL) for _, text in rule.values()]
# Few texts stand in all rows: 1 byte each, and an Arrow dictionary for who reads them.
DETAILS = pl.Enum(list(PHASE_DETAILS))
_BASES = pl.Enum(["measured", "reported", "placed"])
_CLOCKS = pl.Enum(["wall"])
_TEXTS = pl.Enum(
    [
        *(_BEFORE, _DECODING, _TO_THE_END, _V0_QUEUE, _V0_PREFILL, _NEITHER),
        *_RULES,
        *(_UNPLACED + text for text in _RULES),
    ]
)
_READ = (
    "leg", "era", "load", "start_ns", "window_ns", "first_ns", "anchor_ns", "queue_ns", "prefill_ns", "decode_ns",
    "resolution_ns",
)  # fmt: skip
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


def _meaning(
    rule: dict[str | None, tuple[str, str]], which: int, kind: pl.Enum, before: str = ""
) -> pl.Expr:
    """Part `which` (decode detail, semantics) of a rule, by the column `load`."""
    texts = {load: before + parts[which] for load, parts in rule.items() if load is not None}
    other = before + rule[None][which]
    return pl.col("load").replace_strict(texts, default=other, return_dtype=kind)


def queue_meaning() -> tuple[pl.Expr, pl.Expr]:
    """Decode detail and semantics of a queue interval."""
    return _meaning(_QUEUE, 0, DETAILS), _meaning(_QUEUE, 1, _TEXTS)


def prefill_meaning() -> tuple[pl.Expr, pl.Expr]:
    """Decode detail and semantics of a prefill interval."""
    return _meaning(_PREFILL, 0, DETAILS), _meaning(_PREFILL, 1, _TEXTS)


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
    if isinstance(semantics, str):
        known = semantics in _TEXTS.categories
        semantics = pl.lit(semantics, dtype=_TEXTS if known else pl.String())
    if not isinstance(decode_detail, pl.Expr):
        decode_detail = pl.lit(decode_detail, dtype=DETAILS)
    return (
        frame.select(
            "leg",
            pl.lit(detail, dtype=DETAILS).alias("detail"),
            start.alias("start_ns"),
            end.alias("end_ns"),
            pl.lit(None, dtype=pl.Int64).alias("duration_ns"),
            pl.lit(basis, dtype=_BASES).alias("basis"),
            pl.lit("wall", dtype=_CLOCKS).alias("clock"),
            pl.col("resolution_ns").cast(pl.Int64),
            pl.lit(value=False).alias("censored"),
            semantics.alias("semantics"),
            decode_detail.alias("decode_detail"),
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
            semantics=_BEFORE,
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
            semantics=_DECODING,
        ),
        _until_the_end(whole_decode),
        _unplaced_queue(requests.filter(unplaced), _meaning(_QUEUE, 1, _TEXTS, _UNPLACED)),
    ]  # fmt: skip


def _until_the_end(requests: pl.DataFrame) -> pl.DataFrame:
    end = pl.col("start_ns") + pl.col("window_ns")
    return rows(
        requests, "decode_wall", pl.col("first_ns"), end,
        basis="reported", semantics=_TO_THE_END,
    )  # fmt: skip


def _unplaced_queue(requests: pl.DataFrame, semantics: pl.Expr) -> pl.DataFrame:
    return requests.select(
        "leg",
        pl.lit("prefill_queue", dtype=DETAILS).alias("detail"),
        _meaning(_QUEUE, 0, DETAILS).alias("decode_detail"),
        pl.lit(None, dtype=pl.Int64).alias("start_ns"),
        pl.lit(None, dtype=pl.Int64).alias("end_ns"),
        pl.col("queue_ns").alias("duration_ns"),
        pl.lit("reported", dtype=_BASES).alias("basis"),
        pl.lit("wall", dtype=_CLOCKS).alias("clock"),
        pl.col("resolution_ns").cast(pl.Int64),
        pl.lit(value=False).alias("censored"),
        semantics.alias("semantics"),
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
            semantics=_V0_QUEUE,
        ),
        rows(
            requests,
            "prefill_wall",
            scheduled,
            pl.col("first_ns"),
            basis="reported",
            decode_detail="kv_wait_upper_bound",
            semantics=_V0_PREFILL,
        ),
        _until_the_end(requests),
    ]


def placed(requests: pl.DataFrame) -> pl.DataFrame:
    """The intervals of all requests from their durations."""
    requests = requests.select(_READ)  # the others would be copied by each filter
    frames = []
    for era, of_era in (("V1", _v1), ("V0", _v0)):
        mine = requests["era"].eq_missing(pl.Series([era]))
        if mine.any():
            frames += of_era(requests if mine.all() else requests.filter(mine))
    # Neither set of attributes: time_in_queue may begin at arrival or behind the front end.
    unknown = requests.filter(pl.col("era").is_null() & pl.col("first_ns").is_not_null())
    frames.append(_until_the_end(unknown))
    queued = requests.filter(pl.col("era").is_null() & pl.col("queue_ns").is_not_null())
    frames.append(_unplaced_queue(queued, pl.lit(_NEITHER, dtype=_TEXTS)))
    return pl.concat([frame.select(COLUMNS) for frame in frames])


def numbered(requests: pl.DataFrame) -> pl.DataFrame:
    """The requests with their place instead of the leg's id: what is made of them many times over is named by table()."""
    return requests.with_columns(leg=pl.int_range(pl.len(), dtype=pl.Int32))


def table(rows: pl.DataFrame, legs: pl.Series) -> pa.Table:
    """Rows of numbered() requests as Arrow, with the ids of their legs as a dictionary: each id is there once."""
    found = rows.to_arrow(compat_level=pl.CompatLevel.newest())
    once = legs.rechunk().to_arrow(compat_level=pl.CompatLevel.newest())
    places = rows["leg"].rechunk().to_arrow()
    named = pa.DictionaryArray.from_arrays(places, once)
    return found.set_column(found.column_names.index("leg"), "leg", named)
