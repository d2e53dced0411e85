"""What vLLM's spans say of their workers: software, processes, addresses, model."""

from __future__ import annotations

import polars as pl

from ._vllm_ids import addresses


def model() -> pl.Expr:
    """The model's name: V0 writes it, V1 does not."""
    return pl.coalesce("gen_ai.response.model", "gen_ai.request.model")


def seen(spans: pl.DataFrame, engine: str, role: str | None = None) -> pl.DataFrame:
    """Rows of `workers`: software, role where these spans prove one, and when it was seen."""
    times = spans.group_by("worker").agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    return times.select(
        "worker",
        pl.lit(engine).alias("engine"),
        pl.lit(role, dtype=pl.String).alias("role"),
        pl.lit("span" if role else None, dtype=pl.String).alias("role_basis"),
        "start_ns",
        "end_ns",
    )


def called_addresses(calls: pl.DataFrame) -> pl.DataFrame:
    """Aliases: the address that a router called is that of the worker whose span lies below."""
    aliases = calls.select(
        pl.col("engine_worker").alias("worker"),
        pl.lit("address").alias("kind"),
        pl.col("address").alias("value"),
    )
    return aliases.drop_nulls().unique()


def processes(spans: pl.DataFrame) -> pl.DataFrame:
    """Aliases: engine core and GPU worker processes belong to the API server that started them.

    Each process has an instance id of its own; their start-up spans hang under their parent's.
    Only children that call themselves engine core or worker count: a data-parallel supervisor's
    children are API servers, each a worker of its own.
    """
    started = spans.filter(pl.col("mine") & (pl.col("kind") == "internal"))
    parents = started.select(
        "trace_id", pl.col("span_id").alias("parent_span_id"), pl.col("worker").alias("parent")
    ).unique(["trace_id", "parent_span_id"])
    children = started.filter(pl.col("resource.vllm.process_kind").is_not_null())
    pairs = (
        children.join(parents, on=["trace_id", "parent_span_id"])
        .filter(
            (pl.col("worker") != pl.col("parent")) & pl.col("worker").str.contains("^instance:")
        )
        .select(
            pl.col("parent").alias("worker"),
            pl.lit("instance").alias("kind"),
            pl.col("worker").str.strip_prefix("instance:").alias("value"),
        )
    )
    return pairs.unique()


def facts(requests: pl.DataFrame) -> pl.DataFrame:
    """Facts: the model, and the addresses of prefill and decode worker where ids carry them."""
    models = requests.select("worker", pl.lit("model").alias("key"), model().alias("value"))
    marked = requests.filter(
        pl.col("gen_ai.request.id").str.contains("___prefill_addr_", literal=True)
    )
    said = marked.select("worker", addresses(pl.col("gen_ai.request.id")).alias("said"))
    named = (
        said.unnest("said")
        .unpivot(["prefill", "decode"], index="worker", variable_name="key")
        .with_columns(pl.format("{}_address_in_ids", "key").alias("key"))
    )
    return pl.concat([models, named.select(models.columns)]).drop_nulls().unique()
