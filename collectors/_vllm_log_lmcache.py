"""LMCache's lines inside a vLLM log: what a prompt found in its cache, what was loaded and stored.

Formats: LMCache 0.3.3 to 0.5.6, `integration/vllm/vllm_v1_adapter.py` (lookup) and `v1/cache_engine.py` (retrieve,
store). A lookup is written whenever the scheduler tries a request, again after a failed try or a preemption. It
tells what was found, not what was loaded: that is in the worker's lines, one for each rank of tensor
parallelism. These name the request since 0.3.15. A line is written when its movement is over, so that the cost
in front of the stamp is the movement. Sizes are GiB, in steps of 0.0001.
"""

from __future__ import annotations

import polars as pl

from ._vllm_log_runs import Run

ACTION = "cache"
UNTIMED = "LMCache line without time and size"
BACKEND = "LMCache"
MS_NS, GIB = 1_000_000, 1024**3
_PREFIX = r"^(?:\([^()]*\)\s+)*\[(?P<stamp>20\d\d-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d{3})\] LMCache [A-Z]+\s*:\s+"
_ID = r"(?:\[req_id=(?P<moved_id>[^\]\s]+)(?: [^\]]*)?\] )?"
_NUMBER = r"\d+(?:\.\d+)?"
LOOKUP = (
    rf"{_PREFIX}Reqid: (?P<id>[^,\s]+), Total tokens (?P<total>\d+)"
    r"(?:, Inference Engine computed tokens: (?P<engine>\d+))?"
    r", LMCache hit tokens: (?P<hit>\d+)(?:,(?P<skipped> but)? need to load: (?P<load>-?\d+))?"
)
MOVED = (
    rf"{_PREFIX}{_ID}(?P<way>Retrieved|Stored) (?P<tokens>\d+) out of (?:total )?(?P<required>\d+)[^.]*?tokens"
    rf"(?: \(from \d+ total tokens\))?(?:\. size: (?P<gib>{_NUMBER}) [gG][bB], cost (?P<ms>{_NUMBER}) ms)?"
)
NOTHING = pl.DataFrame(
    schema={
        "record": pl.Int64,
        "run": pl.Int32,
        "time_ns": pl.Int64,
        "resolution_ns": pl.Int64,
        "text": pl.String,
    }
)
_LONGEST_MS = 86_400_000  # more is no duration of a movement


def is_line(text: pl.Expr) -> pl.Expr:
    """A lookup, load or store; anchored, so that no prompt can pass for one."""
    told = text.str.contains(
        rf"{_PREFIX}(?:Reqid: |(?:\[req_id=[^\]]*\] )?(?:Retrieved|Stored) \d)"
    )
    return text.str.contains("] LMCache ", literal=True) & told


def stamped(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with these lines' own stamps where no carrier has one."""
    mine = pl.col("kind") == "lmcache"
    if not frame.select(mine.any()).item():
        return frame
    own = (
        pl.when(mine)
        .then(pl.col("text").str.extract(_PREFIX.replace("?P<stamp>", "")))
        .str.replace(",", ".", literal=True)
        .str.to_datetime("%Y-%m-%d %H:%M:%S%.3f", time_unit="ns", strict=False)
        .cast(pl.Int64)
    )
    bare = mine & pl.col("time_ns").is_null() & own.is_not_null()
    return frame.with_columns(
        time_ns=pl.when(bare).then(own).otherwise("time_ns"),
        resolution_ns=pl.when(bare).then(MS_NS).otherwise("resolution_ns"),
    )


def parse(lines: pl.DataFrame) -> pl.DataFrame:
    """Lookups and movements: record, run, time_ns, resolution_ns, id (NULL unknown) and their figures."""
    text = pl.col("text")
    looked = text.str.extract_groups(LOOKUP).struct
    moved = text.str.extract_groups(MOVED).struct
    whole = [
        looked.field(n).cast(pl.Int64, strict=False) for n in ("total", "engine", "hit", "load")
    ]
    return lines.select(
        "record", "run", "time_ns", "resolution_ns",
        pl.coalesce(looked.field("id"), moved.field("moved_id")).alias("id"),
        *whole,
        looked.field("skipped").is_not_null().alias("skipped"),
        moved.field("way"),
        *[moved.field(n).cast(pl.Int64, strict=False) for n in ("tokens", "required")],
        *[moved.field(n).cast(pl.Float64, strict=False) for n in ("gib", "ms")],
    )  # fmt: skip


def events(parsed: pl.DataFrame) -> pl.DataFrame:
    """The lines that name a request, as events of requests."""
    text, number = pl.lit(None, pl.String), pl.lit(None, pl.Int64)
    return parsed.drop_nulls("id").select(
        "record", "run", "time_ns", "resolution_ns", pl.lit(ACTION).alias("action"), "id",
        max_tokens=number, n=number, finish_reason=text, streaming=pl.lit(None, pl.Boolean), error=text, remote=text,
    )  # fmt: skip


def found(parsed: pl.DataFrame) -> pl.DataFrame:
    """(leg, prompt_tokens, cached_tokens) of each request that was looked up; `parsed` has the legs.

    The last try before the prompt was computed counts; later ones, of a preempted request, have a longer
    prompt. Of several answers to one prompt (n > 1) the first counts. Cached is what the engine had itself and what was to be loaded (the last token of a prompt that
    is there whole is computed again); unknown where less was loaded than was asked for.
    """
    tries = parsed.filter(pl.col("total").is_not_null() & pl.col("leg").is_not_null())
    first = [pl.col(name) == pl.col(name).first().over("leg") for name in ("id", "total")]
    tries = tries.filter(*first)
    load = pl.col("load").clip(lower_bound=0)
    # versions that do not state it: found = already there + to be loaded
    engine = pl.coalesce("engine", (pl.col("hit") - pl.col("load")).clip(lower_bound=0))
    recomputed = (
        (pl.col("hit") == pl.col("total")) & pl.col("engine").is_null() & (pl.col("load") >= 0)
    )
    cached = pl.when("skipped").then(engine).otherwise(engine + load - recomputed.cast(pl.Int64))
    cached = pl.when(cached <= pl.col("total")).then(cached)  # more than the prompt is none
    short = (
        parsed.filter((pl.col("way") == "Retrieved") & (pl.col("tokens") < pl.col("required")))
        .select("leg", short=pl.lit(value=True))
        .unique()
    )
    return (
        tries.group_by("leg", maintain_order=True)
        .agg(pl.col("total").first().alias("prompt_tokens"), cached.last().alias("cached_tokens"))
        .join(short, on="leg", how="left", maintain_order="left")
        .with_columns(cached_tokens=pl.when(pl.col("short").is_null()).then("cached_tokens"))
        .drop("short")
    )


def timed(parsed: pl.DataFrame) -> pl.DataFrame:
    """Movements that state what they took."""
    return parsed.filter(pl.col("ms").is_not_null() & (pl.col("ms") < _LONGEST_MS))


def transfers(moved: pl.DataFrame, runs: list[Run]) -> pl.DataFrame:
    """Rows of `transfers`; `moved` has request_id and leg (NULL unknown). A size of 0.0000 is not known."""
    workers = pl.DataFrame(
        [(n, run.worker) for n, run in enumerate(runs)],
        schema={"run": pl.Int32, "worker": pl.String}, orient="row",
    )  # fmt: skip
    loads = pl.col("way") == "Retrieved"
    took = (pl.col("ms") * MS_NS).round().cast(pl.Int64)
    return moved.join(workers, on="run", how="left", maintain_order="left").select(
        "record", "leg", "request_id",
        pl.when(~loads).then("worker").alias("source_worker"),
        pl.when(loads).then("worker").alias("destination_worker"),
        (pl.col("time_ns") - took).alias("start_ns"), pl.col("time_ns").alias("end_ns"),
        pl.col("ms").alias("duration_ms"),
        pl.when(pl.col("gib") > 0).then((pl.col("gib") * GIB).round().cast(pl.Int64)).alias("bytes"),
        pl.lit(BACKEND).alias("backend"),
        pl.when(loads).then(pl.lit("load")).otherwise(pl.lit("store")).alias("direction"),
        # a store leaves out what was there; a load that gave less than it should is neither done nor failed
        pl.when(~loads | (pl.col("tokens") >= pl.col("required"))).then(pl.lit("completed")).alias("outcome"),
    )  # fmt: skip


def loads(moved: pl.DataFrame) -> pl.DataFrame:
    """Rows of `intervals`: the loads of requests whose leg is known."""
    mine = moved.filter((pl.col("way") == "Retrieved") & pl.col("leg").is_not_null())
    took = (pl.col("ms") * MS_NS).round().cast(pl.Int64)
    return mine.drop_nulls("time_ns").select(
        "leg", pl.lit("kv_load").alias("detail"), (pl.col("time_ns") - took).alias("start_ns"),
        pl.col("time_ns").alias("end_ns"), pl.lit("reported").alias("basis"), pl.lit("wall").alias("clock"),
        "resolution_ns",
    )  # fmt: skip
