"""The span tree of an SGLang request: its root, the threads that worked on it, their stages.

Every tensor and pipeline rank tells the same stages again: the lowest rank of a request is kept. A
thread's span begins when that thread first held the request, often after its first stages: parents
contain nothing, and no time is taken from nesting.
"""

from __future__ import annotations

import polars as pl

from pdtrace.records import dataclass

_ROOT = r"^(.*?) ?Req \S{1,8}$"  # "prefill Req 1a2b3c4d", " Req 1a2b3c4d" (one server), "Req 1a2b3c4d" (0.5.3)
_HEALTH = "HEALTH_CHECK"  # SGLang asks itself under such ids
_ROLES = {"prefill": "prefill", "decode": "decode", "": "aggregated", "mini lb": "router"}
_SENDER = "Sender"
_PREFILLS = ("prefill", "prefill_forward", "chunked_prefill")
_LOOPS = ("decode loop", "decode_loop")
SENDS = ("mooncake_worker_send", "mooncake_send")
RETRACT = "retract"


@dataclass(frozen=True)
class Tree:
    """One batch of whole traces, by kind; threads and stages have the `leg` and `role` of their root."""

    requests: pl.DataFrame  # leg, role, role_basis, room and the root's own columns
    threads: pl.DataFrame  # leg, role, schedules, and where each ran
    stages: pl.DataFrame  # leg, role, schedules, nested, name, start_ns, end_ns, events
    sends: (
        pl.DataFrame
    )  # room, start_ns, end_ns of Mooncake's sending threads, and whether they failed


def tree(spans: pl.DataFrame) -> Tree:
    """Sort SGLang's spans; those of health checks are left out."""
    mine = spans.filter("mine").drop("mine")
    roots = _roots(mine)
    threads = _threads(mine, roots.filter(pl.col("kind_of") != _SENDER))
    stages = _stages(mine, threads)
    requests = _with_roles(roots.filter(pl.col("kind_of") != _SENDER), stages)
    role = requests.select("leg", "role")
    return Tree(
        requests,
        threads.join(role, on="leg", maintain_order="left"),
        stages.join(role, on="leg", maintain_order="left"),
        _sends(mine, roots.filter(pl.col("kind_of") == _SENDER)),
    )


def room(column: str) -> pl.Expr:
    """A bootstrap room in decimal, as logs and request bodies spell it; spans since 0.5.5 have it in hex."""
    text = pl.col(column).str.to_lowercase()
    digits = text.str.extract(r"^0x([0-9a-f]+)$", 1).str.to_integer(base=16, strict=False)
    plain = text.str.extract(r"^(\d+)$", 1).cast(pl.Int64, strict=False)
    number = pl.coalesce(digits, plain)
    return pl.when(number > 0).then(number).cast(pl.String)


def _roots(mine: pl.DataFrame) -> pl.DataFrame:
    """The roots with leg, kind_of (what stands before "Req") and room."""
    # 0.5.5 to 0.5.8: the room stands in a span above the roots of both sides.
    above = mine.filter(pl.col("name").str.starts_with("Bootstrap Room ")).select(
        "trace_id", parent_span_id="span_id", above_room=room("bootstrap_room")
    )
    named = mine.filter(pl.col("name").str.contains(_ROOT) & pl.col("rid").is_not_null())
    return (
        named.filter(~pl.col("rid").str.contains(_HEALTH, literal=True))
        .join(
            above.unique(["trace_id", "parent_span_id"]),
            on=["trace_id", "parent_span_id"],
            how="left",
            maintain_order="left",
        )
        .with_columns(
            leg=pl.format("{}/{}", "trace_id", "span_id"),
            kind_of=pl.col("name").str.extract(_ROOT, 1),
            # several tokenizer processes put their number in front
            request_id=pl.col("rid").str.replace(r"^.*_", ""),
            room=pl.coalesce(room("bootstrap_room"), "above_room"),
        )
        .drop("above_room")
    )


def _threads(mine: pl.DataFrame, roots: pl.DataFrame) -> pl.DataFrame:
    """Of the schedulers of a request those of its lowest rank, and all other threads."""
    threads = (
        mine.filter(pl.col("thread_label").is_not_null())
        .join(
            roots.select("trace_id", "leg", "kind_of", parent_span_id="span_id"),
            on=["trace_id", "parent_span_id"],
            maintain_order="left",
        )
        .with_columns(
            schedules=pl.col("thread_label").str.ends_with("Scheduler"),
            place=pl.col("pp_rank").fill_null(0) * 100_000 + pl.col("tp_rank").fill_null(0),
        )
    )
    lowest = pl.col("place").min().over("leg", "schedules")
    return threads.with_columns(kept=~pl.col("schedules") | (pl.col("place") == lowest))


def _stages(mine: pl.DataFrame, threads: pl.DataFrame) -> pl.DataFrame:
    """Spans under the kept threads, and under those (chunks, decode iterations)."""
    columns = ("name", "start_ns", "end_ns", "resolution_ns", "events", "span_id", "trace_id", "source")  # fmt: skip
    inside = mine.filter(pl.col("thread_label").is_null()).select(*columns, "parent_span_id")
    key = ["trace_id", "parent_span_id"]
    owners = threads.filter("kept").select("trace_id", "leg", "schedules", parent_span_id="span_id")
    first = inside.join(owners, on=key, maintain_order="left").with_columns(
        nested=pl.lit(value=False)
    )
    above = first.select("trace_id", "leg", "schedules", parent_span_id="span_id")
    second = inside.join(above, on=key, maintain_order="left").with_columns(
        nested=pl.lit(value=True)
    )
    return pl.concat([first, second]).unique(
        ["trace_id", "span_id", "start_ns"], maintain_order=True
    )


def _with_roles(roots: pl.DataFrame, stages: pl.DataFrame) -> pl.DataFrame:
    """Columns role and role_basis. Before 0.5.5 no name says a role: then what was done does."""
    did = stages.group_by("leg").agg(
        prefilled=pl.col("name").is_in(_PREFILLS).any(),
        decoded=pl.col("name").is_in(_LOOPS).any(),
    )
    said = pl.col("kind_of").replace_strict(_ROLES, default=None, return_dtype=pl.String)
    # "Req" without a role in front of it, in a room: one side of a pair, whichever.
    silent = (said == "aggregated") & pl.col("room").is_not_null()
    found = (
        pl.when(pl.col("prefilled") & ~pl.col("decoded"))
        .then(pl.lit("prefill"))
        .when(pl.col("decoded") & ~pl.col("prefilled"))
        .then(pl.lit("decode"))
    )
    return (
        roots.join(did, on="leg", how="left", maintain_order="left")
        .with_columns(
            role=pl.when(silent).then(found).otherwise(said),
            role_basis=pl.when(silent).then(pl.lit("inferred")).otherwise(pl.lit("span")),
        )
        .drop("prefilled", "decoded")
    )


def _sends(mine: pl.DataFrame, senders: pl.DataFrame) -> pl.DataFrame:
    """One row a room: from the first to the last send of KV to its decode worker."""
    threads = mine.filter(pl.col("thread_label").is_not_null()).join(
        senders.select("trace_id", "room", parent_span_id="span_id"),
        on=["trace_id", "parent_span_id"],
    )
    sends = mine.filter(pl.col("name").is_in(SENDS)).join(
        threads.select("trace_id", "room", parent_span_id="span_id"),
        on=["trace_id", "parent_span_id"],
    )
    # The thread that moves KV knows better than the one that only hands a chunk to it.
    moving = (pl.col("name") == SENDS[0]).any().over("room")
    sends = sends.filter(~moving | (pl.col("name") == SENDS[0]))
    return (
        sends.filter(pl.col("room").is_not_null())
        .group_by("room", maintain_order=True)
        .agg(
            pl.col("source").first(),
            sent_ns=pl.col("start_ns").min(),
            arrived_ns=pl.col("end_ns").max(),
            failed=(pl.col("status_code") == "error").any(),
        )
    )
