"""llm-d's spans and what each is: picker, sidecar, call, or part of one of them."""

from __future__ import annotations

import polars as pl

_PICKER = ("gateway.request", "gateway.ext_proc.request")
_CHOICE = "gateway.request_orchestration"
_SIDECAR = r"^(?:forward_request|llm_d\.pd_proxy\.request)$"
_CALL = r"^(?:llm_d\.pd_proxy\.)?(prefill|decode)$"
_DEPTH = 16


def placed(spans: pl.DataFrame) -> pl.DataFrame:
    """Mine with `leg`, `place` (picker, sidecar, call or part), `half` of calls and `owner`: the leg that a part belongs to.

    The owner of a call or part is its nearest picker or sidecar above; a choice without a picker's span is the picker.
    """
    mine = spans.filter("mine").with_columns(
        pl.concat_str(["trace_id", "span_id"], separator="/").alias("leg"),
        pl.col("name").str.extract(_CALL, 1).alias("half"),
    )
    name = pl.col("name")
    above = mine.filter(name.is_in(_PICKER)).select("trace_id", parent_span_id="span_id")
    orphan = mine.filter(name == _CHOICE).join(above, on=["trace_id", "parent_span_id"], how="anti")
    place = (
        pl.when(name.is_in(_PICKER) | pl.col("leg").is_in(orphan["leg"].implode()))
        .then(pl.lit("picker"))
        .when(name.str.contains(_SIDECAR))
        .then(pl.lit("sidecar"))
        .when(pl.col("half").is_not_null())
        .then(pl.lit("call"))
        .otherwise(pl.lit("part"))
    )
    mine = mine.with_columns(place.alias("place"))
    return mine.join(_owners(mine), on="leg", how="left", maintain_order="left")


def _owners(mine: pl.DataFrame) -> pl.DataFrame:
    """leg, owner of the spans below pickers and sidecars."""
    parents = mine.select(
        "trace_id", "span_id", up="parent_span_id", up_leg="leg", up_place="place"
    ).unique(["trace_id", "span_id"])
    front = mine.filter(pl.col("place").is_in(["call", "part"])).select(
        "leg", "trace_id", span_id="parent_span_id"
    )
    found: list[pl.DataFrame] = []
    for _ in range(_DEPTH):
        met = front.drop_nulls("span_id").join(parents, on=["trace_id", "span_id"])
        ends = pl.col("up_place").is_in(["picker", "sidecar"])
        found.append(met.filter(ends).select("leg", owner="up_leg"))
        front = met.filter(~ends).select("leg", "trace_id", span_id="up")
        if not front.height:
            break
    owners = pl.concat(found) if found else pl.DataFrame(schema={"leg": pl.String, "owner": pl.String})  # fmt: skip
    return owners.unique("leg", keep="first", maintain_order=True)
