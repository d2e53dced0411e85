"""vLLM's `llm_request` spans as legs: which spans are requests, their ids, streams and outcomes."""

from __future__ import annotations

import polars as pl

from . import _vllm_layout as layout
from . import _vllm_measured as measured
from ._vllm_ids import external_ids, stream_index
from ._vllm_latency import QUANTITIES, any_bad, column, with_durations
from ._vllm_workers import model

_TTFT = {
    "V1": "vLLM V1: arrival at the API server to the first output batch seen there",
    "V0": "vLLM V0: arrival at the API server to the first token",
}
_TTFT_UNKNOWN = "vLLM: arrival at the API server to the first token"
_PROMPT = ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens")
_CACHED = ("gen_ai.usage.cached_tokens", "gen_ai.usage.cache_read.input_tokens")
_OUTPUT = ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens")


def request_spans(spans: pl.DataFrame, facts: pl.DataFrame) -> pl.DataFrame:
    """The engine's request spans with durations in ns; start-up spans have no gen_ai attribute."""
    has_latency = pl.any_horizontal(column(name).is_not_null() for name in QUANTITIES)
    is_request = has_latency | (
        pl.col("gen_ai.request.id").is_not_null()
        & ~pl.col("name").is_in([*measured.CHILD_SPANS, measured.CORE_SPAN])
        & pl.col("kind").ne_missing("client")
    )
    asked = spans.select(pl.col("mine") & is_request).to_series()
    found = spans if asked.all(ignore_nulls=False) else spans.filter(asked)
    found = found.with_columns(pl.concat_str(["trace_id", "span_id"], separator="/").alias("leg"))
    return layout.with_anchor(layout.with_load(with_durations(found), facts))


def engine_legs(requests: pl.DataFrame, calls: pl.DataFrame, states: pl.DataFrame) -> pl.DataFrame:
    """One leg a request span: the engine's view from arrival to the last token."""
    output, start = pl.coalesce(_OUTPUT), pl.col("start_ns")
    end = start + pl.col("window_ns")
    first = pl.col("first_token_ns")
    # V0 counts the tokens of all sequences in one span: no time per token of a stream.
    one_stream = pl.col("gen_ai.usage.num_sequences").fill_null(1) == 1
    request_id = pl.col("gen_ai.request.id")
    requests = requests.with_columns(
        _looked_up(requests, _hop_roles(calls), ["trace_id", "parent_span_id"], "role"),
        _looked_up(requests, _streams(requests), ["leg"], "stream"),
        pl.coalesce(
            "first_ns", _looked_up(requests, _first_of(states), ["leg"], "first_token_ns")
        ).alias("first_token_ns"),
    )
    is_prefill = pl.col("role") == "prefill"
    return requests.select(
        "leg", "source", "worker", "trace_id", "span_id", "parent_span_id",
        "start_ns", "resolution_ns", "role", "stream", "first_token_ns",
        observer=pl.lit("engine"),
        role_basis=pl.when(pl.col("role").is_not_null()).then(pl.lit("span")),
        container=pl.lit(value=False),
        request_id=request_id,
        external_id=external_ids(requests["gen_ai.request.id"]),
        clock=pl.lit("wall"),
        last_token_ns=pl.when(output.fill_null(1) > 0).then(end),
        end_ns=end,
        ttft_ms=(first - start) / 1e6,
        e2e_ms=pl.col("window_ns") / 1e6,
        tpot_ms=pl.when(one_stream & (output > 1)).then((end - first) / (output - 1) / 1e6),
        ttft_definition=pl.col("era").replace_strict(_TTFT, default=_TTFT_UNKNOWN),
        first_token_delivered=pl.when(is_prefill).then(pl.lit(value=False)),
        model=model(),
        prompt_tokens=pl.coalesce(_PROMPT),
        cached_tokens=pl.coalesce(_CACHED),
        output_tokens=output,
        max_tokens=pl.col("gen_ai.request.max_tokens"),
        status=_status(output),
        error=pl.when(pl.col("status_code") == "error").then(
            pl.coalesce("error.type", pl.lit("error"))
        ),
    )  # fmt: skip


def _looked_up(
    requests: pl.DataFrame, table: pl.DataFrame, keys: list[str], value: str
) -> pl.Series:
    """The column `value` of a small table for each request; a join would copy the wide frame."""
    if table.is_empty():
        return pl.Series(value, [None], dtype=table.schema[value]).new_from_index(
            0, requests.height
        )
    found = requests.select(keys).join(
        table.unique(keys), on=keys, how="left", maintain_order="left"
    )
    return found[value]


def _status(output: pl.Expr) -> pl.Expr:
    return (
        pl.when(pl.col("status_code") == "error")
        .then(pl.lit("failed"))
        .when(any_bad() & (output.fill_null(0) == 0))  # finished without ever being scheduled
        .then(pl.lit("unknown"))
        .otherwise(pl.lit("completed"))
    )


def _hop_roles(calls: pl.DataFrame) -> pl.DataFrame:
    """Roles that the call above proves; legs in separate traces are left to the identity stage."""
    return calls.filter(pl.col("phase").is_in(["prefill", "decode"])).select(
        "trace_id", pl.col("span_id").alias("parent_span_id"), pl.col("phase").alias("role")
    )


def _first_of(states: pl.DataFrame) -> pl.DataFrame:
    """First tokens that child spans or journey events stamp."""
    decode = states.filter(pl.col("state") == "decode")
    return decode.group_by("leg").agg(pl.col("start_ns").min().alias("first_token_ns"))


def _streams(requests: pl.DataFrame) -> pl.DataFrame:
    """Stream numbers of requests with n > 1.

    Up to 0.13 the id says it; since 0.14 the spans of one request share id and arrival.
    """
    request_id = pl.col("gen_ai.request.id")
    digit = (request_id >= "0") & (request_id < ":")  # what the pattern asks of all is asked of few
    narrow = requests.select("leg", "worker", "span_id", "start_ns", "gen_ai.request.id")
    numbered = narrow.filter(digit).filter(request_id.str.contains(r"^\d+_"))
    named = numbered.select("leg", stream_index(request_id).alias("stream")).drop_nulls()
    same = ["worker", "gen_ai.request.id", "start_ns"]
    if narrow["start_ns"].n_unique() == narrow.height:
        return named
    same_time = narrow.filter(pl.col("start_ns").is_duplicated() & request_id.is_not_null())
    twins = same_time.filter(pl.struct(same).is_duplicated())
    order = pl.col("span_id").rank("ordinal").over(same).cast(pl.Int64) - 1
    counted = twins.select("leg", order.alias("stream")).join(named, on="leg", how="anti")
    return pl.concat([named, counted])


def preemptions(requests: pl.DataFrame, states: pl.DataFrame) -> pl.DataFrame:
    """Events: preemptions that child spans or journey events tell."""
    found = states.filter(pl.col("state").is_in(["preempted", "prefill_gap"]))
    owners = requests.select("leg", "source", "worker", "gen_ai.request.id")
    return found.join(owners, on="leg").select(
        "source",
        "worker",
        "resolution_ns",
        time_ns=pl.col("start_ns"),
        kind=pl.lit("preemption"),
        severity=pl.lit("warning"),
        request_id=pl.col("gen_ai.request.id"),
        count=pl.lit(1, dtype=pl.Int64),
    )
