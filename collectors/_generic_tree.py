"""Where each unclaimed span stands in its trace: request, call, hop or phase, and whose."""

from __future__ import annotations

import polars as pl

from . import _generic_columns as columns

MAX_DEPTH = 16  # nested internal spans between two requests; deeper ones count as unrelated


def with_places(spans: pl.DataFrame) -> pl.DataFrame:
    """Our spans with place (request, call, hop, phase, NULL), detail, leg, phase_leg, observer."""
    tree = _roles(spans)
    above = _nearest_above(tree)
    tree = tree.join(above, on=["trace_id", "span_id"], how="left", maintain_order="left")
    tree = _hops_between(tree)
    own = (pl.col("place") == "request") & pl.col("detail").is_in(["prefill_wall", "decode_wall"])
    carries = _carriers(tree)
    tree = tree.join(carries, on=["trace_id", "span_id"], how="left", maintain_order="left")
    observer = (
        pl.when(pl.col("place") == "call")
        .then(pl.lit("client"))
        .when((pl.col("place") == "hop") & (pl.col("detail") == "router_decide"))
        .then(pl.lit("router"))
        .when((pl.col("place") == "hop") | pl.col("carries").fill_null(value=False))
        .then(pl.lit("gateway"))
        .otherwise(pl.lit("engine"))
    )
    own_leg = pl.format("{}/{}", "trace_id", "span_id")
    return tree.filter("mine").with_columns(
        leg=own_leg,
        phase_leg=pl.when(own).then(own_leg).otherwise(pl.format("{}/{}", "trace_id", "above")),
        observer=observer,
    )


def _roles(spans: pl.DataFrame) -> pl.DataFrame:
    """First look at each span by itself and at its trace."""
    spans = spans.with_columns(
        about_models=columns.speaks_of_models().any().over("trace_id"),
        has_server=(pl.col("kind") == "server").any().over("trace_id"),
        named=columns.phase_detail(),
    )
    models = columns.speaks_of_models()
    kind, detail = pl.col("kind"), pl.when("about_models").then("named")
    server = (kind == "server") & (models | ~pl.col("name").str.contains(columns.NOT_A_REQUEST))
    # A GenAI call by whoever asks the model; in-process calls are INTERNAL, engine spans none.
    call = models & columns.is_inference() & detail.is_null()
    call = call & ((kind == "client") | ((kind == "internal") & ~pl.col("has_server")))
    place = (
        pl.when(server)
        .then(pl.lit("request"))
        .when(call)
        .then(pl.lit("call"))
        .when((kind == "client") & detail.is_null())
        .then(pl.lit("hop"))
        .when(detail.is_not_null())
        .then(pl.lit("phase"))
    )
    # Legs of other collectors are unknown here; their SERVER and CLIENT spans stand for them.
    others = pl.when(kind.is_in(["server", "client"])).then(pl.lit("other"))
    return spans.with_columns(place=pl.when("mine").then(place).otherwise(others), detail=detail)


def _nearest_above(tree: pl.DataFrame) -> pl.DataFrame:
    """For each span the nearest ancestor that is a leg: trace_id, span_id, above."""
    parents = tree.select(
        "trace_id",
        pl.col("span_id").alias("up"),
        pl.col("parent_span_id").alias("next"),
        pl.col("place").is_in(["request", "call", "hop", "other"]).alias("is_leg"),
    ).unique(["trace_id", "up"])
    open_ = tree.filter(pl.col("parent_span_id").is_not_null()).select(
        "trace_id", "span_id", up="parent_span_id"
    )
    found = []
    for _ in range(MAX_DEPTH):
        step = open_.join(parents, on=["trace_id", "up"], how="inner")
        found.append(step.filter("is_leg").select("trace_id", "span_id", above="up"))
        open_ = step.filter(~pl.col("is_leg") & pl.col("next").is_not_null()).select(
            "trace_id", "span_id", up="next"
        )
        if not open_.height:
            break
    return pl.concat(found).unique(["trace_id", "span_id"])


def _hops_between(tree: pl.DataFrame) -> pl.DataFrame:
    """An internal span between two legs becomes a hop: the chain of parents must not break.

    `covers`: the leg below begins while the hop is still open; a step that ends before it does not.
    """
    is_leg = pl.col("place").is_in(["request", "call", "hop", "other"])
    below = tree.filter(is_leg & (pl.col("parent_span_id") != pl.col("above"))).select(
        "trace_id", span_id="parent_span_id", child_ns="start_ns"
    )
    between = []
    parents = tree.select("trace_id", "span_id", "parent_span_id", is_leg=is_leg).unique(
        ["trace_id", "span_id"]
    )
    for _ in range(MAX_DEPTH):
        step = (
            below.group_by("trace_id", "span_id")
            .agg(pl.col("child_ns").min())
            .join(parents, on=["trace_id", "span_id"], how="inner")
            .filter(~pl.col("is_leg"))
        )
        if not step.height:
            break
        between.append(step.select("trace_id", "span_id", "child_ns"))
        below = step.filter(pl.col("parent_span_id").is_not_null()).select(
            "trace_id", "child_ns", span_id="parent_span_id"
        )
    if not between:
        return tree.with_columns(covers=pl.lit(value=False))
    marks = pl.concat(between).group_by("trace_id", "span_id").agg(pl.col("child_ns").min())
    tree = tree.join(marks, on=["trace_id", "span_id"], how="left", maintain_order="left")
    hop = pl.col("child_ns").is_not_null() & pl.col("mine")
    # Clocks of two hosts differ: what begins in the last half of a step may well follow it.
    middle = (pl.col("start_ns") + pl.col("end_ns")) // 2
    return tree.with_columns(
        place=pl.when(hop).then(pl.lit("hop")).otherwise("place"),
        covers=(pl.col("child_ns") < middle).fill_null(value=False),
    ).drop("child_ns")


def _carriers(tree: pl.DataFrame) -> pl.DataFrame:
    """Legs that call others: a hop below, or a request of another worker below."""
    is_leg = pl.col("place").is_in(["request", "hop", "other", "call"])
    below = tree.filter(is_leg & pl.col("above").is_not_null()).select(
        "trace_id", span_id="above", below_worker="worker", below_place="place"
    )
    own = tree.select("trace_id", "span_id", own_worker="worker")
    joined = below.join(own, on=["trace_id", "span_id"], how="inner")
    other = (pl.col("below_place") == "hop") | (pl.col("below_worker") != pl.col("own_worker"))
    return joined.filter(other).select("trace_id", "span_id", carries=True).unique()
