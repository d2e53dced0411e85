"""What SGLang's stages say of a request's time: intervals, token times, KV movements, retractions."""

from __future__ import annotations

import polars as pl

from pdtrace import model

from ._sglang_spans import RETRACT, Tree

# stage -> (detail, what it holds). Names of 0.5.3 stand beside the later ones.
_FRONT, _ENTRY = "HTTP, template, tokenising, hand-over", "received by the scheduler to its queue"
_WALL = "first scheduled to prompt computed: wall time, other batches within"
_STAGES: dict[str, tuple[str, str]] = {
    "tokenize": ("frontend", _FRONT),
    "dispatch": ("frontend", _FRONT),
    "api_server_dispatch": ("frontend", _FRONT),
    "dc_dispatch": ("frontend", "controller of data parallel ranks"),
    "dpc_dispatch": ("frontend", "controller of data parallel ranks"),
    "process req": ("before_queue", _ENTRY),
    "request_process": ("before_queue", _ENTRY),
    "prefill_prepare": ("before_queue", _ENTRY),
    "decode_prepare": ("before_queue", _ENTRY),
    "prefill_bootstrap": ("kv_space_wait", "handshake with the decode worker, and until it has given addresses for the KV"),
    "prefill_waiting": ("prefill_queue", "scheduler's waiting queue"),
    "prefill": ("prefill_wall", _WALL),
    "prefill_forward": ("prefill_wall", _WALL),
    "chunked_prefill": ("prefill_wall", _WALL),
    "prefill_transfer_kv_cache": ("kv_transfer", "prompt computed to transfer seen as finished by the event loop"),
    "decode_bootstrap": ("kv_space_wait", "handshake with the prefill worker, and until there is room for the KV"),
    "decode_transferred": ("kv_wait_upper_bound", "holds the prefill worker's queue and computing, and the KV transfer"),
    "decode_waiting": ("decode_queue", "KV or prompt complete to the first decode batch"),
    "fake_output": ("decode_queue", "the batch that takes over the first token"),
    "quick_finish": ("decode_queue", "ended by the first token"),
    "decode_forward": ("decode_wall", "first decode batch to the end"),
}  # fmt: skip
_HANDED = (
    "handed to the scheduler, which takes requests between two batches: wait for the running one"
)
_WAITED = "scheduler's waiting queue, up to the first batch"
_HOLDS_QUEUE = "scheduler's queue to prompt computed: this version tells no time between"
_ON_ITS_WAY = "token made by the scheduler to token seen by the API server"
_PREFILLS = ("prefill", "prefill_forward", "chunked_prefill")
_LOOPS = ("decode loop", "decode_loop")
_INTERVAL = (
    "leg", "detail", "start_ns", "end_ns", "basis", "clock", "resolution_ns", "censored", "semantics",
)  # fmt: skip


def with_tokens(requests: pl.DataFrame, stages: pl.DataFrame) -> pl.DataFrame:
    """Adds made_ns (first token as the scheduler made it), loops (ends of decode iterations), dispatched ranks."""
    name = pl.col("name")
    made = stages.group_by("leg").agg(
        prefilled_ns=pl.col("end_ns").filter(name.is_in(("prefill", "prefill_forward"))).min(),
        taken_ns=pl.col("end_ns").filter(name == "fake_output").min(),
        waited_ns=pl.col("end_ns").filter(name == "decode_waiting").min(),
        loop_ns=pl.col("start_ns").filter(name.is_in(_LOOPS)).min(),
        loops=pl.col("end_ns").filter(name.is_in(_LOOPS)).drop_nulls().unique().sort(),
    )
    decodes = pl.col("role") == "decode"
    return requests.join(made, on="leg", how="left", maintain_order="left").with_columns(
        made_ns=pl.when(decodes)
        .then(pl.coalesce("taken_ns", "waited_ns", "loop_ns"))
        .otherwise("prefilled_ns")
    )


def intervals(tree: Tree, requests: pl.DataFrame) -> pl.DataFrame:
    """All stages as time of their requests, and the two hand-overs between API server and scheduler."""
    stages = _named(tree.stages, requests)
    parts = [
        stages,
        _handed(tree.stages),
        _old_decodes(requests, tree.stages),
        _delivered(requests),
    ]
    return pl.concat([part.select(_INTERVAL) for part in parts])


def _row(basis: str, semantics: str) -> dict[str, pl.Expr]:
    return {
        "basis": pl.lit(basis),
        "clock": pl.lit(model.WALL),
        "censored": pl.lit(value=False),
        "semantics": pl.lit(semantics),
    }


def _named(stages: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """Stages by their meaning. Chunks inside a prefill_forward are part of it."""
    known = stages.filter(pl.col("name").is_in(list(_STAGES)))
    known = known.filter(~((pl.col("name") == "chunked_prefill") & pl.col("nested")))
    known = _waits_apart(known).join(
        requests.select("leg", "made_ns"), on="leg", how="left", maintain_order="left"
    )
    again = pl.col("name").is_in(_PREFILLS) & (pl.col("start_ns") >= pl.col("made_ns"))
    meaning = {name: pl.col("name").replace_strict({k: v[i] for k, v in _STAGES.items()}, return_dtype=pl.String) for i, name in enumerate(("detail", "text"))}  # fmt: skip
    bound = pl.col("holds_queue") | (meaning["detail"] == "kv_wait_upper_bound")
    return known.with_columns(
        pl.when(again.fill_null(value=False))
        .then(pl.lit("prefill_recompute"))
        .otherwise(pl.coalesce("as_detail", meaning["detail"]))
        .alias("detail"),
        pl.when(bound).then(pl.lit("upper_bound")).otherwise(pl.lit("measured")).alias("basis"),
        pl.when("holds_queue")
        .then(pl.lit(_HOLDS_QUEUE))
        .otherwise(pl.coalesce("as_text", meaning["text"]))
        .alias("semantics"),
        pl.lit(model.WALL).alias("clock"),
        pl.col("end_ns").is_null().alias("censored"),
    )


def _waits_apart(stages: pl.DataFrame) -> pl.DataFrame:
    """Up to 0.5.8 the first prompt span begins in the queue: cut where its first batch was scheduled.

    0.5.3 does not say when that was; such a span is an upper bound of the prefill.
    """
    text = pl.lit(None, dtype=pl.String)
    waiting = (pl.col("name") == "prefill_waiting").any().over("leg")
    prompt = pl.col("name").is_in(_PREFILLS) & ~pl.col("nested") & ~waiting
    first = prompt & (pl.col("start_ns") == pl.col("start_ns").filter(prompt).min().over("leg"))
    scheduled = (
        pl.col("events")
        .list.eval(
            pl.when(pl.element().struct.field("name") == "schedule").then(
                pl.element().struct.field("time_ns")
            )
        )
        .list.min()
    )
    stages = stages.with_columns(
        first=first.fill_null(value=False), at=scheduled, as_detail=text, as_text=text
    )
    cut = pl.col("first") & pl.col("at").is_not_null()
    waits = stages.filter(cut).with_columns(
        end_ns=pl.col("at"), as_detail=pl.lit("prefill_queue"), as_text=pl.lit(_WAITED)
    )
    rest = stages.with_columns(start_ns=pl.when(cut).then("at").otherwise("start_ns"))
    both = pl.concat([waits, rest])
    holds = pl.col("first") & pl.col("at").is_null()
    return both.with_columns(holds_queue=holds).drop("first", "at")


def _handed(stages: pl.DataFrame) -> pl.DataFrame:
    """Between the API server's last stage and the scheduler's first."""
    ends = stages.group_by("leg", maintain_order=True).agg(
        start_ns=pl.col("end_ns").filter(~pl.col("schedules")).max(),
        end_ns=pl.col("start_ns").filter("schedules").min(),
        resolution_ns=pl.col("resolution_ns").max(),
    )
    between = ends.filter(pl.col("end_ns") > pl.col("start_ns"))
    return between.with_columns(detail=pl.lit("before_queue"), **_row("inferred", _HANDED))


def _old_decodes(requests: pl.DataFrame, stages: pl.DataFrame) -> pl.DataFrame:
    """Decoding where only its iterations are told: up to 0.5.8."""
    whole = stages.filter(pl.col("name") == "decode_forward").select("leg")
    looped = requests.filter(pl.col("loops").list.len() > 0).join(whole, on="leg", how="anti")
    return looped.select(
        "leg", "resolution_ns",
        start_ns="loop_ns",
        end_ns=pl.col("loops").list.last(),
        detail=pl.lit("decode_wall"),
        **_row("measured", "first to last decode iteration"),
    )  # fmt: skip


def _delivered(requests: pl.DataFrame) -> pl.DataFrame:
    """The first token's way from the scheduler to the API server."""
    late = requests.filter(
        (pl.col("role") != "prefill").fill_null(value=True)
        & (pl.col("seen_ns") > pl.col("made_ns"))
    )
    return late.select(
        "leg", "resolution_ns",
        start_ns="made_ns",
        end_ns="seen_ns",
        detail=pl.lit("stream_out_first"),
        **_row("measured", _ON_ITS_WAY),
    )  # fmt: skip


def streams(requests: pl.DataFrame) -> pl.DataFrame:
    """Token times as the scheduler's decode iterations ended; several tokens each where it speculates."""
    told = requests.filter(
        (pl.col("loops").list.len() > 0)
        & pl.coalesce("made_ns", "loop_ns").is_not_null()
        & (pl.col("role") != "prefill").fill_null(value=True)
    ).with_columns(first=pl.coalesce("made_ns", "loop_ns"))
    times = pl.concat_list("first", "loops")
    emissions = pl.col("loops").list.len() + 1
    single = (emissions == pl.col("gen_ai.usage.completion_tokens")).fill_null(value=False)
    ones = pl.lit(1, dtype=pl.Int32).repeat_by(emissions)
    return told.select(
        "source",
        "leg",
        pl.lit(0, dtype=pl.Int64).alias("stream"),
        pl.col("first").alias("first_ns"),
        (times.list.diff(null_behavior="drop") / 1000).list.eval(pl.element().round().cast(pl.Int32, strict=False)).alias("gaps_us"),
        pl.when(single).then(ones).alias("emission_tokens"),
        pl.when(single).then(pl.lit("token")).otherwise(pl.lit("chunk")).alias("emission"),
        pl.lit(model.WALL).alias("clock"),
        pl.lit("engine").alias("observer"),
    )  # fmt: skip


def transfers(tree: Tree, requests: pl.DataFrame) -> pl.DataFrame:
    """The KV that prefill workers sent; where Mooncake's threads tell when, it is their time."""
    stages = (
        tree.stages.filter(pl.col("name") == "prefill_transfer_kv_cache")
        .sort("start_ns")
        .group_by("leg", maintain_order=True)
        .agg(pl.col("start_ns").first(), pl.col("end_ns").last())
    )
    sent = requests.filter(pl.col("role") == "prefill").select(
        "leg", "request_id", "room", "worker", "status", of="source"
    )
    sent = sent.join(stages, on="leg", how="left", maintain_order="left").join(
        tree.sends, on="room", how="full", coalesce=True, maintain_order="left"
    )
    start, end = pl.coalesce("sent_ns", "start_ns"), pl.coalesce("arrived_ns", "end_ns")
    failed = pl.col("failed").fill_null(value=False) | (pl.col("status") == "failed").fill_null(value=False)  # fmt: skip
    return sent.filter(start.is_not_null()).select(
        pl.coalesce("of", "source").alias("source"),
        "leg",
        pl.coalesce("request_id", pl.format("bootstrap_room={}", "room")).alias("request_id"),
        pl.col("worker").alias("source_worker"),
        start.alias("start_ns"),
        end.alias("end_ns"),
        ((end - start) / 1e6).alias("duration_ms"),
        pl.when(pl.col("sent_ns").is_not_null()).then(pl.lit("Mooncake")).alias("backend"),
        pl.lit("prefill_to_decode").alias("direction"),
        pl.when(failed).then(pl.lit("failed")).otherwise(pl.lit("completed")).alias("outcome"),
    )


def retractions(tree: Tree, requests: pl.DataFrame) -> pl.DataFrame:
    """Requests put off for lack of KV room after they had begun."""
    told = tree.stages.filter(pl.col("events").list.len() > 0).explode("events")
    times = told.filter(pl.col("events").struct.field("name") == RETRACT).select(
        "leg", "resolution_ns", time_ns=pl.col("events").struct.field("time_ns")
    )
    return times.join(
        requests.select("leg", "source", "worker", "request_id"), on="leg", maintain_order="left"
    ).select(
        "source", "worker", "time_ns", "resolution_ns", "request_id",
        pl.lit("preemption").alias("kind"),
        pl.lit("warning").alias("severity"),
        pl.lit(1, dtype=pl.Int64).alias("count"),
        pl.lit("retracted: KV cache full").alias("detail"),
    )  # fmt: skip
