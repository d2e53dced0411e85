"""The span tree of a Dynamo request: which spans belong to which request, hop and role."""

from __future__ import annotations

import polars as pl

from pdtrace.records import dataclass

from ._dynamo_names import GENERATE

SELECT = "kv_router.select_worker"
SCHEDULE = "kv_router.schedule"
ROUTES = ("kv_router.route_request", "router.route_request", "client_request")
STREAMING = "response.streaming"
GENERATE_SPAN = "engine.generate"
ADMISSION = "worker.admission"
PREFILL_OPERATION = "worker.operation.prefill"

_DEPTH = 6  # levels between a leg and the leg that caused it, at most
_REQUEST = ("trace_id", "rid")

# POST requests of the frontend that are no inference.
_CONTROL = r"^/(health|live|metrics|clear_kv_blocks|busy_threshold|engine/|v1/models|openapi|docs)"

# phase of a route, role of an operation, component of a worker -> role
_ROLE_WORDS = {
    "prefill": "prefill",
    "decode": "decode",
    "aggregated": "aggregated",
    "agg": "aggregated",
    "worker": "aggregated",
}


@dataclass(frozen=True)
class Tree:
    """The spans of one batch by kind; each has `rid`, legs have `parent`, hops have `role`."""

    requests: pl.DataFrame  # http-request
    routes: pl.DataFrame  # CLIENT hops of the router, one per attempt and phase
    workers: pl.DataFrame  # handle_payload
    others: pl.DataFrame  # all spans of ours


def tree(spans: pl.DataFrame) -> Tree:
    """Sort the spans of ours and give each its request, its parent leg and its role."""
    mine = _with_request_id(_finest(spans.filter("mine").drop("mine")))
    legs = (
        ((pl.col("name") == "http-request") & _is_inference())
        | pl.col("name").is_in(ROUTES)
        | (pl.col("name") == "handle_payload")
    )
    mine = _with_parent_leg(mine, legs)
    requests = mine.filter((pl.col("name") == "http-request") & _is_inference())
    routes = mine.filter(pl.col("name").is_in(ROUTES))
    serves = (pl.col("endpoint").is_null() | (pl.col("endpoint") == GENERATE)) | pl.col("under_leg")
    workers = mine.filter((pl.col("name") == "handle_payload") & serves)
    workers, routes = _with_roles(workers, routes, requests, mine)
    return Tree(requests, routes, workers, mine)


def _finest(mine: pl.DataFrame) -> pl.DataFrame:
    """Without the log's copy of spans that OTLP has too but under an id that the log does not
    tell."""
    same = ("trace_id", "name", "dynamo.operation.id")
    copy = pl.col("dynamo.operation.id").is_not_null() & (
        pl.col("resolution_ns") > pl.col("resolution_ns").min().over(same)
    )
    return mine.filter(~copy.fill_null(value=False))


def _is_inference() -> pl.Expr:
    """Whether an http-request is a user's: health, metrics and management calls are not."""
    return (pl.col("method").fill_null("POST") == "POST") & ~pl.col("uri").fill_null(
        ""
    ).str.contains(_CONTROL)


def _with_request_id(mine: pl.DataFrame) -> pl.DataFrame:
    """Column `rid`: the span's own request id, else that of the nearest ancestor that has one."""
    mine = mine.with_columns(rid=pl.coalesce("request_id", "dynamo.request.id"))
    for _ in range(_DEPTH):
        if mine["rid"].null_count() == 0:
            break
        named = mine.filter(pl.col("rid").is_not_null()).select(
            "trace_id", parent_span_id="span_id", parent_rid="rid"
        )
        mine = (
            mine.join(
                named.unique(["trace_id", "parent_span_id"]),
                on=["trace_id", "parent_span_id"],
                how="left",
            )
            .with_columns(rid=pl.coalesce("rid", "parent_rid"))
            .drop("parent_rid")
        )
    # Old versions name the request on the worker's span only.
    below = (
        mine.filter((pl.col("name") == "handle_payload") & pl.col("rid").is_not_null())
        .group_by("trace_id", "parent_span_id")
        .agg(child_rid=pl.col("rid").min())
        .rename({"parent_span_id": "span_id"})
    )
    return (
        mine.join(below, on=["trace_id", "span_id"], how="left")
        .with_columns(rid=pl.coalesce("rid", "child_rid"))
        .drop("child_rid")
    )


def _with_parent_leg(mine: pl.DataFrame, legs: pl.Expr) -> pl.DataFrame:
    """Column `parent`: the nearest span above that is a leg (or not ours); `under_leg` when it
    is ours."""
    between = (
        mine.filter(~legs)
        .select("trace_id", parent="span_id", above="parent_span_id")
        .unique(["trace_id", "parent"])
    )
    mine = mine.with_columns(parent="parent_span_id")
    for _ in range(_DEPTH):
        mine = mine.join(
            between.with_columns(hit=pl.lit(value=True)), on=["trace_id", "parent"], how="left"
        )
        moved = mine["hit"].sum()
        mine = mine.with_columns(parent=pl.when("hit").then("above").otherwise("parent")).drop(
            "above", "hit"
        )
        if not moved:
            break
    known = (
        mine.filter(legs)
        .select("trace_id", parent="span_id")
        .unique()
        .with_columns(under_leg=pl.lit(value=True))
    )
    return mine.join(known, on=["trace_id", "parent"], how="left").with_columns(
        pl.col("under_leg").fill_null(value=False)
    )


def _with_roles(
    workers: pl.DataFrame, routes: pl.DataFrame, requests: pl.DataFrame, mine: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Columns `role`, `attempt` and `outcome` of hops and workers, from phase, component,
    operation or ids."""
    said = routes.select(
        "trace_id", parent="span_id", route_role=_word("phase"), attempt="request.attempt",
        outcome="request.outcome", rank="dp_rank",
        route_name="name", route_start_ns="start_ns",
    )  # fmt: skip
    ids = requests.select(*_REQUEST, "prefill_worker_id", "decode_worker_id").unique(_REQUEST)
    workers = (
        workers.drop("prefill_worker_id", "decode_worker_id")
        .join(said.unique(["trace_id", "parent"]), on=["trace_id", "parent"], how="left")
        .join(_operations(mine), on=["trace_id", "span_id"], how="left")
        .join(ids, on=_REQUEST, how="left")
    )
    prefill_seen = (
        pl.concat(
            [
                workers.filter(pl.col("component") == "prefill").select(_REQUEST),
                routes.filter(_word("phase") == "prefill").select(_REQUEST),
            ]
        )
        .unique()
        .with_columns(split=pl.lit(value=True))
    )
    workers = workers.join(prefill_seen, on=_REQUEST, how="left").with_columns(role=_worker_role())
    below = workers.select("trace_id", span_id="parent", worker_role="role",
                           child_instance="instance_id",
                           child_leg=pl.concat_str("trace_id", pl.lit("/"), "span_id"),
                           child_start_ns="start_ns")  # fmt: skip
    routes = (
        routes.join(below.unique(["trace_id", "span_id"]), on=["trace_id", "span_id"], how="left")
        .join(prefill_seen, on=_REQUEST, how="left")
        .with_columns(
            role=pl.coalesce(_word("phase"), "worker_role"),
            instance=pl.coalesce("worker_id", "child_instance"),
            attempt=pl.col("request.attempt"),
            outcome=pl.col("request.outcome"),
        )
    )
    return workers, routes


def _word(column: str) -> pl.Expr:
    return (
        pl.col(column)
        .str.to_lowercase()
        .replace_strict(_ROLE_WORDS, default=None, return_dtype=pl.String)
    )


def _operations(mine: pl.DataFrame) -> pl.DataFrame:
    """What the unified backend says below a handle_payload: its role, as operation and as
    disagg_role."""
    return (
        mine.filter(
            pl.col("dynamo.operation.role").is_not_null() | pl.col("disagg_role").is_not_null()
        )
        .group_by("trace_id", span_id="parent")
        .agg(
            operation_role=pl.coalesce(_word("dynamo.operation.role"), _word("disagg_role"))
            .drop_nulls()
            .min()
        )
    )


def _worker_role() -> pl.Expr:
    """The role of a worker in a request; component "backend" alone says neither decode nor
    aggregated."""
    component = pl.col("component")
    prefill_id, decode_id = pl.col("prefill_worker_id"), pl.col("decode_worker_id")
    by_ids = (
        pl.when(prefill_id == decode_id)
        .then(pl.lit("aggregated"))
        .when(pl.col("instance_id") == prefill_id)
        .then(pl.lit("prefill"))
        .when(pl.col("instance_id") == decode_id)
        .then(pl.lit("decode"))
    )
    by_component = (
        pl.when(component.is_in(["prefill", "decode"]))
        .then(component)
        .when(component.is_in(["backend"]) & pl.col("split").fill_null(value=False))
        .then(pl.lit("decode"))
    )
    return pl.coalesce("route_role", by_component, "operation_role", by_ids)
