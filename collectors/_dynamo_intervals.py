"""Intervals from Dynamo's spans: what a request's time was spent on, as far as spans can tell.

handle_payload and the router's hops are containers and never become intervals whole. What lies
between their edges is cut where the frontend saw something: all ends but those of the dispatch
are on the frontend's clock. The prefill worker's first output is in no span of a plain handler:
- one after the other (vLLM-like): the prefill hop bounds the prefill from above (a simulated
  worker holds it open during the KV transfer), and what follows it until the first token is the
  hand-over;
- side by side (bootstrap, SGLang-like): prefill and transfer cannot be told apart inside the hop,
  and only the time after it is the hand-over. The rest stays unattributed.
Where the request trace covers the request it places the prefill, and the decode side's whole wait
is given: the prefill outranks it and leaves the hand-over.
"""

from __future__ import annotations

import polars as pl

from ._dynamo_legs import leg_id
from ._dynamo_spans import ADMISSION, PREFILL_OPERATION, SCHEDULE, SELECT, Tree

_REQUEST = ("trace_id", "rid")
_FRONT = (
    *_REQUEST,
    "front_leg",
    "front_start_ns",
    "front_first_ns",
    "front_end_ns",
    "front_resolution_ns",
)
_CLOSE_NS = 1_000_000  # a choice belongs to the hop that starts within this before or after its end

_DECODE = "the frontend's view: first streamed token to the end of the stream"
_HANDOVER = "hand-over to the decode worker: KV transfer, dispatch and its first pass"
_WAIT = "whole wait on the decode side; where a prefill is placed, what is left is the hand-over"
_PREFILL_BOUND = "hop of the prefill worker: contains its queue and may contain the KV transfer"
_PREFILL_AGGREGATED = "dispatch to the first streamed token: contains the engine's queue"
_PREFILL_ENGINE = "engine.generate to its first output: contains the engine's queue"
_PREFILL_OPERATION_SAID = "worker.operation.prefill: contains the engine's queue"

SCHEMA = {
    "leg": pl.String,
    "detail": pl.String,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "basis": pl.String,
    "clock": pl.String,
    "resolution_ns": pl.Int64,
    "semantics": pl.String,
    "end_leg": pl.String,
}


def intervals(
    tree: Tree, frontends: pl.DataFrame, workers: pl.DataFrame, coverage: pl.DataFrame
) -> pl.DataFrame:
    """All intervals of a batch. `coverage`: worker_id, from_ns, to_ns of the request traces at
    hand."""
    front = frontends.select(
        *_REQUEST,
        front_leg=leg_id(),
        front_start_ns="start_ns",
        front_first_ns="first_token_ns",
        front_end_ns="end_ns",
        front_resolution_ns="resolution_ns",
        stream_end_ns="stream_end_ns",
    ).unique(_REQUEST, maintain_order=True)
    hops = _hops(tree, front, workers, coverage)
    parts = [
        _frontend(tree, front),
        *_router(tree, front),
        _dispatch(tree, front),
        _aggregated_prefill(hops),
        _prefill_bound(hops),
        _kv_wait(hops),
        _decode(front),
        *_worker_side(tree, workers),
    ]
    return pl.concat([part for part in parts if part.height] or [pl.DataFrame(schema=SCHEMA)])


def _rows(
    frame: pl.DataFrame, detail: str | pl.Expr, start: str, end: str, *, basis: str = "measured",
    semantics: str | None = None, leg: str = "front_leg", resolution: str = "front_resolution_ns",
    end_leg: str | None = None,
) -> pl.DataFrame:  # fmt: skip
    """Rows of `intervals`; those with an unknown end are left out, reversed ones stay and are
    counted."""
    return (
        frame.select(
            leg=pl.col(leg),
            detail=pl.lit(detail) if isinstance(detail, str) else detail,
            start_ns=pl.col(start),
            end_ns=pl.col(end),
            basis=pl.lit(basis),
            clock=pl.lit("wall"),
            resolution_ns=pl.col(resolution).cast(pl.Int64),
            semantics=pl.lit(semantics, dtype=pl.String),
            end_leg=pl.lit(None, dtype=pl.String) if end_leg is None else pl.col(end_leg),
        )
        .cast(SCHEMA)  # type: ignore[arg-type]
        .drop_nulls(["leg", "detail", "start_ns", "end_ns"])
    )


def _frontend(tree: Tree, front: pl.DataFrame) -> pl.DataFrame:
    """From the HTTP request to the first thing that the router did; without one, to the end of
    preprocessing."""
    named = tree.others.filter(pl.col("name").is_in([SELECT, "prefill_routing"])).select(
        *_REQUEST, "start_ns"
    )
    routed = pl.concat([named, tree.routes.select(*_REQUEST, "start_ns")])
    first = routed.group_by(_REQUEST).agg(routed_ns=pl.col("start_ns").min())
    prepared = (
        tree.others.filter(pl.col("name") == "request.preprocessing")
        .group_by(_REQUEST)
        .agg(prepared_ns=pl.col("end_ns").max())
    )
    ends = (
        front.join(first, on=_REQUEST, how="left")
        .join(prepared, on=_REQUEST, how="left")
        .with_columns(until_ns=pl.coalesce("routed_ns", "prepared_ns"))
    )
    return _rows(
        ends, "frontend", "front_start_ns", "until_ns", semantics="HTTP, template, tokenising"
    )


def _router(tree: Tree, front: pl.DataFrame) -> list[pl.DataFrame]:
    """The router's choices; inside them kv_router.schedule is where a request waits in the
    router's queue."""
    found = tree.others.join(front, on=_REQUEST)
    choices = _rows(found.filter(pl.col("name") == SELECT), "router_decide", "start_ns", "end_ns",
                    resolution="resolution_ns")  # fmt: skip
    queue = _rows(found.filter(pl.col("name") == SCHEDULE), "router_queue", "start_ns", "end_ns",
                  resolution="resolution_ns",
                  semantics="kv_router.schedule: queue and scoring")  # fmt: skip
    return [choices, queue]


def with_choice(tree: Tree) -> pl.DataFrame:
    """The hops with the choice before them: choice_start_ns, choice_end_ns (NULL without a KV
    router)."""
    choices = (
        tree.others.filter(pl.col("name") == SELECT)
        .select(*_REQUEST, choice_start_ns="start_ns", choice_end_ns="end_ns")
        .drop_nulls()
        .sort("choice_end_ns")
    )
    # Rebuilt from log lines, a choice may seem to end after its hop began.
    hops = tree.routes.with_columns(_by=pl.col("start_ns") + _CLOSE_NS).sort("_by")
    return hops.join_asof(
        choices, left_on="_by", right_on="choice_end_ns", by=list(_REQUEST), check_sortedness=False
    ).drop("_by")


def _dispatch(tree: Tree, front: pl.DataFrame) -> pl.DataFrame:
    """From the choice to the worker's start: the frontend's clock to the worker's."""
    sent = (
        with_choice(tree)
        .join(front, on=_REQUEST)
        .with_columns(
            sent_ns=pl.coalesce(pl.min_horizontal("choice_end_ns", "start_ns"), "start_ns")
        )
    )
    return _rows(
        sent,
        "dispatch",
        "sent_ns",
        "child_start_ns",
        semantics="ends on the worker's clock",
        end_leg="child_leg",
    )


def _hops(
    tree: Tree, front: pl.DataFrame, workers: pl.DataFrame, coverage: pl.DataFrame
) -> pl.DataFrame:
    """One row per request: its last prefill, decode and aggregated hop, and who knows its
    prefill's end."""
    last = tree.routes.sort(pl.col("attempt").fill_null(0), "start_ns", "span_id")
    hops = front
    for role in ("prefill", "decode", "aggregated"):
        side = (
            last.filter(pl.col("role") == role)
            .group_by(_REQUEST, maintain_order=True)
            .agg(
                pl.col("start_ns").last().alias(f"{role}_start_ns"),
                pl.col("end_ns").last().alias(f"{role}_end_ns"),
                pl.col("instance").last().alias(f"{role}_instance"),
            )
        )
        hops = hops.join(side, on=_REQUEST, how="left")
    known = (
        workers.filter((pl.col("role") == "prefill") & pl.col("first_token_ns").is_not_null())
        .select(*_REQUEST, engine_knows=pl.lit(value=True))
        .unique(_REQUEST)
    )
    covered = _covered(hops, coverage)
    return (
        hops.join(known, on=_REQUEST, how="left")
        .join(covered, on=_REQUEST, how="left")
        .with_columns(
            placed=pl.col("engine_knows").fill_null(value=False)
            | pl.col("covered").fill_null(value=False),
            side_by_side=pl.col("decode_start_ns") < pl.col("prefill_end_ns"),
        )
    )


def _covered(hops: pl.DataFrame, coverage: pl.DataFrame) -> pl.DataFrame:
    """Requests whose prefill a request trace places."""
    return (
        hops.select(*_REQUEST, "prefill_instance", "front_start_ns")
        .join(coverage, left_on="prefill_instance", right_on="worker_id")
        .filter(pl.col("front_start_ns").is_between("from_ns", "to_ns"))
        .select(*_REQUEST, covered=pl.lit(value=True))
        .unique(_REQUEST)
    )


def _aggregated_prefill(hops: pl.DataFrame) -> pl.DataFrame:
    """One worker does both: from the hop to the first streamed token (the dispatch outranks its
    part)."""
    alone = hops.filter(pl.col("prefill_start_ns").is_null())
    return _rows(
        alone,
        "prefill_wall",
        "aggregated_start_ns",
        "front_first_ns",
        semantics=_PREFILL_AGGREGATED,
    )


def _prefill_bound(hops: pl.DataFrame) -> pl.DataFrame:
    """The prefill hop as an upper bound, where nothing better is known and the decode hop came
    after it."""
    bounded = hops.filter(~pl.col("placed") & ~pl.col("side_by_side").fill_null(value=False))
    return _rows(
        bounded,
        "prefill_wall",
        "prefill_start_ns",
        "prefill_end_ns",
        basis="upper_bound",
        semantics=_PREFILL_BOUND,
    )


def _kv_wait(hops: pl.DataFrame) -> pl.DataFrame:
    """What the first token waited for after the prefill, as an upper bound on the KV transfer."""
    pairs = hops.filter(
        pl.col("prefill_start_ns").is_not_null() & pl.col("decode_start_ns").is_not_null()
    )
    whole = pairs.filter(pl.col("placed")).with_columns(
        since_ns=pl.min_horizontal("prefill_end_ns", "decode_start_ns")
    )
    # Side by side, the prefill hop may end after the first token: then its end bounds nothing.
    late = (pl.col("prefill_end_ns") > pl.col("front_first_ns")) & pl.col("side_by_side")
    after = pairs.filter(~pl.col("placed") & ~late.fill_null(value=False))
    return pl.concat(
        [
            _rows(
                whole, "kv_wait_upper_bound", "since_ns", "front_first_ns",
                basis="upper_bound", semantics=_WAIT,
            ),
            _rows(
                after, "kv_wait_upper_bound", "prefill_end_ns", "front_first_ns",
                basis="upper_bound", semantics=_HANDOVER,
            ),
        ]
    )  # fmt: skip


def _decode(front: pl.DataFrame) -> pl.DataFrame:
    """From the first streamed token to the end of the stream, as the frontend saw it."""
    seen = front.with_columns(until_ns=pl.coalesce("stream_end_ns", "front_end_ns"))
    return _rows(seen, "decode_wall", "front_first_ns", "until_ns", semantics=_DECODE)


def _worker_side(tree: Tree, workers: pl.DataFrame) -> list[pl.DataFrame]:
    """What the unified backend says of itself: admission, and the prefill up to its first
    output."""
    legs = workers.select(
        "trace_id",
        "role",
        "generate_start_ns",
        "first_token_ns",
        "resolution_ns",
        parent="span_id",
        leg=leg_id(),
    )
    queue = (
        pl.when(pl.col("role") == "decode")
        .then(pl.lit("decode_queue"))
        .otherwise(pl.lit("prefill_queue"))
    )
    below = tree.others.drop("role", strict=False).join(
        legs.select("trace_id", "role", "parent", "leg", "first_token_ns"),
        on=["trace_id", "parent"],
    )
    admitted = below.filter((pl.col("name") == ADMISSION) & pl.col("role").is_not_null())
    computing = legs.filter(pl.col("role").is_in(["prefill", "aggregated"]))
    # Without a first output (cancelled, no engine.generate) the operation itself bounds the
    # prefill.
    operations = below.filter(
        (pl.col("name") == PREFILL_OPERATION) & pl.col("first_token_ns").is_null()
    )
    return [
        _rows(admitted, queue, "start_ns", "end_ns", leg="leg", resolution="resolution_ns",
              semantics="worker.admission"),
        _rows(computing, "prefill_wall", "generate_start_ns", "first_token_ns", basis="placed",
              leg="leg",
              resolution="resolution_ns", semantics=_PREFILL_ENGINE),
        _rows(operations, "prefill_wall", "start_ns", "end_ns", leg="leg",
              resolution="resolution_ns",
              semantics=_PREFILL_OPERATION_SAID),
    ]  # fmt: skip
