"""vLLM: phases that the engine itself stamps: child spans of a request and journey events.

Source: vllm-project/vllm PR 44402 (spans vllm_queue, vllm_async_kv_transfer, vllm_prefill,
vllm_decode; open when read) and PR 33136 (events journey.QUEUED, SCHEDULED, FIRST_TOKEN, PREEMPTED,
FINISHED on `llm_core` spans).
"""

from __future__ import annotations

import polars as pl

from ._vllm_layout import COLUMNS, DETAILS, prefill_meaning, queue_meaning, rows

# Span name -> what the request did in it.
CHILD_SPANS = {
    "vllm_queue": "queue",
    "vllm_async_kv_transfer": "transfer",
    "vllm_prefill": "prefill",
    "vllm_decode": "decode",
    "vllm_preempted": "preempted",
}
CORE_SPAN = "llm_core"
_JOURNEY = r"^(?i:journey\.)?(QUEUED|SCHEDULED|FIRST_TOKEN|PREEMPTED|FINISHED)$"

# Placed details that a measured state makes superfluous.
_REPLACES = {
    "queue": ("before_queue", "prefill_queue"),
    "prefill": ("prefill_wall",),
    "decode": ("decode_wall",),
}


def states(spans: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """What child spans and journey events say: leg, state, start, end, resolution, load."""
    legs = requests.select("trace_id", pl.col("span_id").alias("owner"), "leg", "load")
    return pl.concat([_from_children(spans, legs), _from_journey(spans, legs)])


def _from_children(spans: pl.DataFrame, legs: pl.DataFrame) -> pl.DataFrame:
    children = spans.filter(pl.col("mine") & pl.col("name").is_in(list(CHILD_SPANS)))
    found = children.join(
        legs, left_on=["trace_id", "parent_span_id"], right_on=["trace_id", "owner"], how="inner"
    ).select(
        "leg",
        pl.col("name").replace_strict(CHILD_SPANS, return_dtype=pl.String).alias("state"),
        "start_ns",
        "end_ns",
        "resolution_ns",
        "load",
    )
    # A wait behind the first decode span is a preemption, not the queue.
    decode_start = pl.col("start_ns").filter(pl.col("state") == "decode").min().over("leg")
    again = (pl.col("state") == "queue") & (pl.col("start_ns") >= decode_start)
    return found.with_columns(
        pl.when(again.fill_null(value=False))
        .then(pl.lit("preempted"))
        .otherwise(pl.col("state"))
        .alias("state")
    )


def journey(spans: pl.DataFrame, legs: pl.DataFrame) -> pl.DataFrame:
    """Journey events in time order: leg, load, step, time_ns, resolution_ns."""
    carriers = spans.filter(pl.col("mine") & (pl.col("events").list.len() > 0)).select(
        "trace_id", "span_id", "parent_span_id", "resolution_ns", "events"
    )
    events = (
        carriers.explode("events")
        .unnest("events")
        .with_columns(pl.col("name").str.extract(_JOURNEY, 1).alias("step"))
        .filter(pl.col("step").is_not_null() & pl.col("time_ns").is_not_null())
    )
    own = events.join(legs, left_on=["trace_id", "span_id"], right_on=["trace_id", "owner"])
    of_parent = events.join(
        legs, left_on=["trace_id", "parent_span_id"], right_on=["trace_id", "owner"]
    )
    columns = ["leg", "load", "step", "time_ns", "resolution_ns"]
    return (
        pl.concat([own.select(columns), of_parent.select(columns)]).unique().sort("leg", "time_ns")
    )


def _from_journey(spans: pl.DataFrame, legs: pl.DataFrame) -> pl.DataFrame:
    steps = journey(spans, legs).with_columns(
        pl.col("time_ns").shift(-1).over("leg").alias("end_ns"),
        (pl.col("step") == "FIRST_TOKEN").cum_max().over("leg").alias("decoding"),
    )
    state = (
        pl.when(pl.col("step") == "QUEUED")
        .then(pl.lit("queue"))
        .when(pl.col("step") == "PREEMPTED")
        .then(pl.when("decoding").then(pl.lit("preempted")).otherwise(pl.lit("prefill_gap")))
        .when(pl.col("step").is_in(["SCHEDULED", "FIRST_TOKEN"]))
        .then(pl.when("decoding").then(pl.lit("decode")).otherwise(pl.lit("prefill")))
    )
    return (
        steps.with_columns(state.alias("state"))
        .filter(pl.col("state").is_not_null() & pl.col("end_ns").is_not_null())
        .select(
            "leg", "state", pl.col("time_ns").alias("start_ns"), "end_ns", "resolution_ns", "load"
        )
    )


def intervals(states: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """Measured intervals of the states; what lies before the first queue is before_queue."""
    queue, prefill = queue_meaning(), prefill_meaning()
    pulled = pl.col("leg").is_in(states.filter(pl.col("state") == "transfer")["leg"].implode())
    # Where the transfer has its own span, the queue and the prefill hold none of it.
    queue_detail = pl.when(pulled).then(pl.lit("decode_queue", dtype=DETAILS)).otherwise(queue[0])
    prefill_detail = (
        pl.when(pulled).then(pl.lit("decode_exec", dtype=DETAILS)).otherwise(prefill[0])
    )
    queue_text = (
        pl.when(pulled).then(pl.lit("queued to scheduled")).otherwise(queue[1].cast(pl.String))
    )
    prefill_text = (
        pl.when(pulled)
        .then(pl.lit("wall; on a KV consumer the first decode step"))
        .otherwise(prefill[1].cast(pl.String))
    )
    kinds: dict[str, tuple[str, pl.Expr | None, pl.Expr | str]] = {
        "queue": ("prefill_queue", queue_detail, queue_text),
        "transfer": (
            "kv_load",
            pl.lit("kv_transfer", dtype=DETAILS),
            pl.lit("waiting for remote KV: transfer and its wait"),
        ),
        "prefill": ("prefill_wall", prefill_detail, prefill_text),
        "prefill_gap": ("prefill_gap", None, "preempted during prefill"),
        "decode": ("decode_wall", None, "wall; stalls inside"),
        "preempted": ("preempted", None, "preempted to rescheduled"),
    }
    frames = [
        rows(
            states.filter(pl.col("state") == state), detail, pl.col("start_ns"), pl.col("end_ns"),
            basis="measured", decode_detail=decode_detail, semantics=semantics,
        )
        for state, (detail, decode_detail, semantics) in kinds.items()
    ]  # fmt: skip
    queued = (
        states.filter(pl.col("state") == "queue")
        .group_by("leg")
        .agg(pl.col("start_ns").min().alias("queued_ns"))
    )
    before = requests.select("leg", "start_ns", "resolution_ns").join(queued, on="leg")
    text = "front end, wait for the running step and IPC; split unknown"
    frames.append(
        rows(
            before,
            "before_queue",
            pl.col("start_ns"),
            pl.col("queued_ns"),
            basis="measured",
            semantics=text,
        )
    )
    texts = pl.col("semantics").cast(pl.String)
    return pl.concat(frame.with_columns(texts) for frame in frames).select(COLUMNS)


def without_replaced(placed: pl.DataFrame, states: pl.DataFrame) -> pl.DataFrame:
    """Placed intervals less those whose time a measured state tells better."""
    known = pl.concat(
        states.filter(pl.col("state") == state)
        .select("leg", pl.lit(detail, dtype=DETAILS).alias("detail"))
        .unique()
        for state, details in _REPLACES.items()
        for detail in details
    )
    return placed.join(known, on=["leg", "detail"], how="anti", maintain_order="left")
