"""TensorRT-LLM's spans: `llm_request` of each server, `disaggregated_request` of the server in front of both kinds.

Source: NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/tracing.py, executor/result.py (`do_tracing`) and
serve/openai_disagg_server.py, 1.1 to 1.3. A request's span is written when it is finished; it starts at the arrival in the
executor, a steady stamp moved to the wall clock, and its latencies count from there: all are placed exactly. -1 is
unknown, 0 of the transfer that there was none. Ids are counters of each server and join nothing. The span of the
disaggregated server ends with its handler: of a streamed answer that is its first word.
"""

from __future__ import annotations

import polars as pl

from pdtrace.model import WALL, Claims, Sink

from ._spans_only import read, sniff
from ._trtllm_rows import ENGINE

__all__ = ["CLAIMS", "SWITCHES", "TITLE", "interpret", "read", "sniff"]
TITLE = ENGINE

SWITCHES = {
    "explained_time": "return_perf_metrics: true for every server, and keep what /perf_metrics answers",
    "outcome": "trtllm-serve --otlp_traces_endpoint URL",
    "mode": "trace the disaggregated server, too (otlp_config in its YAML)",
}

_LATENCY = "gen_ai.latency."
_KV_TIME = _LATENCY + "kv_cache_transfer_time"
_LATENCIES = {
    _LATENCY + "time_to_first_token": "arrival in the executor to the first token made",
    _LATENCY + "e2e": "arrival in the executor to the last token made",
    _LATENCY
    + "time_in_queue": "arrival in the executor to first scheduled; of a generation server the KV transfer is within",
    _KV_TIME: "start to end of the KV transfer as this side stamps it",
}
CLAIMS = Claims(
    scopes=("trt.llm",),
    names=("disaggregated_request",),
    shared_names={"llm_request": (_KV_TIME,)},
    attributes={
        **dict.fromkeys(_LATENCIES, float),
        **dict.fromkeys(
            ("gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens", "gen_ai.request.max_tokens",
             "gen_ai.request.n"), int,
        ),
        **dict.fromkeys(("gen_ai.request.id", "gen_ai.response.finish_reasons"), str),
    },
    resource_aliases={"service.instance.id": "instance"},
)  # fmt: skip
_TTFT = "TensorRT-LLM: arrival in the executor to the first token made"
_SLACK_NS = 1_000_000
_ADDRESS = r"\"(?:https?://)?([A-Za-z0-9_.\-\[\]]+:\d{2,5})[/\"]"
_PULL, _PULLED = "kv_cache_transfer_start", "kv_cache_transfer_end"


def interpret(spans: pl.DataFrame, facts: pl.DataFrame, out: Sink) -> None:
    """Legs of the servers and of the router above them, with what they stamped."""
    mine = spans.filter("mine").with_columns(
        pl.concat_str(["trace_id", "span_id"], separator="/").alias("leg")
    )
    routers = mine.filter(pl.col("name") == "disaggregated_request")
    requests = _with_halves(_requests(mine), routers)
    routers = _with_ends(routers, requests)
    for table, frame in (
        ("legs", _legs(requests)),
        ("legs", _router_legs(routers)),
        ("intervals", _intervals(requests)),
        ("intervals", _router_intervals(routers, requests)),
        ("decisions", _decisions(routers)),
        ("transfers", _transfers(requests)),
        ("reported", _reported(requests)),
        ("workers", _workers(requests, "role")),
        ("workers", _workers(routers.with_columns(role=pl.lit("router")), "role")),
    ):
        if frame.height:
            out.add(table, frame, record=None)


def _requests(mine: pl.DataFrame) -> pl.DataFrame:
    """Spans of requests with their instants; a latency that is not above 0 was not stamped."""
    told = pl.any_horizontal(pl.col(key).is_not_null() for key in _LATENCIES)
    found = mine.filter((pl.col("name") == "llm_request") | told)

    def after(key: str) -> pl.Expr:
        seconds = pl.col(_LATENCY + key)
        return pl.when(seconds > 0).then(
            pl.col("start_ns") + (seconds * 1e9).round().cast(pl.Int64, strict=False)
        )

    pulls = _events(found, [_PULL, _PULLED])
    times = pulls.group_by("leg").agg(
        pl.col("time_ns").filter(pl.col("event") == _PULL).min().alias("pull_ns"),
        pl.col("time_ns").filter(pl.col("event") == _PULLED).max().alias("pulled_ns"),
        pl.col("attributes").filter(pl.col("event") == _PULLED).first()
        .str.json_path_match("$.kv_cache_size").cast(pl.Int64, strict=False).alias("bytes"),
    )  # fmt: skip
    return found.with_columns(
        after("time_in_queue").alias("scheduled_ns"),
        after("time_to_first_token").alias("first_ns"),
        after("e2e").alias("last_ns"),
    ).join(times, on="leg", how="left", maintain_order="left")


def _events(spans: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    """The events of these names: leg, event, time_ns, attributes (JSON text), start_ns and worker of the span."""
    return (
        spans.select("leg", "source", "worker", "trace_id", "start_ns", "resolution_ns", "events")
        .filter(pl.col("events").list.len() > 0)
        .explode("events")
        .with_columns(
            event=pl.col("events").struct.field("name"),
            time_ns=pl.col("events").struct.field("time_ns"),
            attributes=pl.col("events").struct.field("attributes"),
        )
        .drop("events")
        .filter(pl.col("event").is_in(names))
    )


def _with_halves(requests: pl.DataFrame, routers: pl.DataFrame) -> pl.DataFrame:
    """Column role: a generation server has pulled the KV before it schedules, a context server sends it after.

    Of two below one router, the one that began first and made one token at most did the prompt.
    """
    above = routers.select("trace_id", parent_span_id="span_id", router="leg")
    requests = requests.join(
        above.unique(["trace_id", "parent_span_id"]), on=["trace_id", "parent_span_id"], how="left",
        maintain_order="left",
    )  # fmt: skip
    pulled = pl.col("pulled_ns") <= pl.col("scheduled_ns") + _SLACK_NS
    pair = pl.col("router").is_not_null() & (pl.len().over("router") == 2)
    ahead = (pl.col("start_ns") == pl.col("start_ns").min().over("router")) & (
        pl.col("gen_ai.usage.completion_tokens") <= 1
    )
    some_ahead = ahead.sum().over("router") == 1
    return requests.with_columns(
        pl.when(pulled)
        .then(pl.lit("decode"))
        .when(pulled.not_())
        .then(pl.lit("prefill"))
        .when(pair & some_ahead & ahead)
        .then(pl.lit("prefill"))
        .when(pair & some_ahead)
        .then(pl.lit("decode"))
        .alias("role")
    )


def _with_ends(routers: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """Column ends_ns: NULL where the work went on after the handler had returned its stream."""
    below = requests.drop_nulls("router").group_by("router").agg(below_ns=pl.col("end_ns").max())
    ends = pl.when(pl.col("below_ns") > pl.col("end_ns") + _SLACK_NS).then(None).otherwise("end_ns")
    return routers.join(
        below, left_on="leg", right_on="router", how="left", maintain_order="left"
    ).with_columns(ends.alias("ends_ns"))


def _status() -> pl.Expr:
    reasons = pl.col("gen_ai.response.finish_reasons").str.to_lowercase()
    return (
        pl.when(pl.col("status_code") == "error")
        .then(pl.lit("failed"))
        .when(reasons.str.contains("cancel"))
        .then(pl.lit("aborted"))
        .when(reasons.str.contains("timeout"))
        .then(pl.lit("failed"))
        .when(pl.col("last_ns").is_null())
        .then(pl.lit("unknown"))
        .otherwise(pl.lit("completed"))
    )


def _legs(requests: pl.DataFrame) -> pl.DataFrame:
    start, first, last = pl.col("start_ns"), pl.col("first_ns"), pl.col("last_ns")
    tokens = pl.col("gen_ai.usage.completion_tokens")
    one = pl.col("gen_ai.request.n").fill_null(1) == 1
    return requests.select(
        "leg", "source", "worker", "role", "trace_id", "span_id", "parent_span_id", "start_ns", "resolution_ns",
        # a number of its server: of two servers the same number is two requests
        request_id=pl.format("{}@{}", "gen_ai.request.id", pl.col("trace_id").str.slice(-8)),
        observer=pl.lit("engine"),
        role_basis=pl.when(pl.col("role").is_not_null()).then(pl.lit("span")),
        container=pl.lit(value=False),
        clock=pl.lit(WALL),
        first_token_ns=first,
        last_token_ns=last,
        end_ns=pl.coalesce("last_ns", "end_ns"),
        ttft_ms=(first - start) / 1e6,
        e2e_ms=(last - start) / 1e6,
        tpot_ms=pl.when(one & (tokens > 1) & pl.col("role").is_null()).then((last - first) / (tokens - 1) / 1e6),
        ttft_definition=pl.lit(_TTFT),
        prompt_tokens=pl.col("gen_ai.usage.prompt_tokens"),
        output_tokens=tokens,
        max_tokens=pl.col("gen_ai.request.max_tokens"),
        status=_status(),
        finish_reason=pl.col("gen_ai.response.finish_reasons").str.extract(r"([A-Za-z_]+)", 1),
    )  # fmt: skip


def _router_legs(routers: pl.DataFrame) -> pl.DataFrame:
    failed = pl.col("status_code") == "error"
    return routers.select(
        "leg", "source", "worker", "trace_id", "span_id", "parent_span_id", "start_ns", "resolution_ns",
        observer=pl.lit("router"),
        role=pl.lit("router"),
        role_basis=pl.lit("span"),
        container=pl.lit(value=False),
        clock=pl.lit(WALL),
        end_ns=pl.col("ends_ns"),
        e2e_ms=(pl.col("ends_ns") - pl.col("start_ns")) / 1e6,
        status=pl.when(failed).then(pl.lit("failed")).when(pl.col("ends_ns").is_not_null())
        .then(pl.lit("completed")).otherwise(pl.lit("unknown")),
        error=pl.when(failed).then(pl.lit("error")),
    )  # fmt: skip


def _intervals(requests: pl.DataFrame) -> pl.DataFrame:
    """The stamps of one server laid out; what waits on a generation server is an upper bound without its transfer's stamps."""
    decodes = pl.col("role") == "decode"
    pulled = decodes & pl.col("pull_ns").is_not_null() & pl.col("pulled_ns").is_not_null()
    parts = (
        (requests.filter(pulled), "bridge_wait", None, "start_ns", "pull_ns", "arrival to the start of the KV transfer"),
        (requests.filter(pulled), "kv_transfer", None, "pull_ns", "pulled_ns", "KV transfer as the generation server stamps it"),
        (requests.filter(pulled), "decode_queue", None, "pulled_ns", "scheduled_ns", "KV there to first scheduled"),
        (requests.filter(pulled.not_().fill_null(value=True)), "prefill_queue", "kv_wait_upper_bound", "start_ns", "scheduled_ns", "arrival to first scheduled"),
        (requests.filter(decodes), "decode_exec", None, "scheduled_ns", "first_ns", "first scheduled to the first token made there"),
        (requests.filter(decodes.not_().fill_null(value=True)), "prefill_wall", "decode_exec", "scheduled_ns", "first_ns", "first scheduled to first token"),
        (requests.filter((pl.col("role") != "prefill").fill_null(value=True)), "decode_wall", None, "first_ns", "last_ns", "first to last token"),
    )  # fmt: skip
    return pl.concat(
        part.drop_nulls([start, end]).select(
            "leg",
            pl.lit(detail).alias("detail"),
            pl.lit(instead, pl.String).alias("decode_detail"),
            pl.col(start).alias("start_ns"),
            pl.col(end).alias("end_ns"),
            pl.lit("measured").alias("basis"),
            pl.lit(WALL).alias("clock"),
            "resolution_ns",
            pl.lit(value=False).alias("censored"),
            pl.lit(words).alias("semantics"),
        )
        for part, detail, instead, start, end, words in parts
    )


def _router_intervals(routers: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """From the router's choice of a server to that server's executor; before the first choice, the choice."""
    chosen = _events(routers, ["ctx_server.selected", "gen_server.selected"])
    role = pl.when(pl.col("event").str.starts_with("ctx")).then(pl.lit("prefill")).otherwise(pl.lit("decode"))  # fmt: skip
    below = requests.drop_nulls(["router", "role"]).select(
        "role", leg="router", end_leg="leg", reached_ns="start_ns"
    )
    sent = chosen.with_columns(role=role).join(below, on=["leg", "role"])
    first = chosen.sort("time_ns").unique("leg", keep="first", maintain_order=True)
    return pl.concat(
        frame.select(
            "leg",
            pl.lit(detail).alias("detail"),
            pl.col(start).alias("start_ns"),
            pl.col(end).alias("end_ns"),
            pl.lit("measured").alias("basis"),
            pl.lit(WALL).alias("clock"),
            "resolution_ns",
            pl.lit(value=False).alias("censored"),
            pl.lit(words).alias("semantics"),
            end_leg,
        )
        for frame, detail, start, end, words, end_leg in (
            (first, "router_decide", "start_ns", "time_ns", "received to the choice of a server", pl.lit(None, pl.String).alias("end_leg")),
            (sent, "dispatch", "time_ns", "reached_ns", "choice of a server to its executor", pl.col("end_leg")),
        )
    )  # fmt: skip


def _decisions(routers: pl.DataFrame) -> pl.DataFrame:
    """Choices whose event names a server by its address."""
    chosen = _events(routers, ["ctx_server.selected", "gen_server.selected"]).with_columns(
        address=pl.col("attributes").str.extract(_ADDRESS, 1),
        phase=pl.when(pl.col("event").str.starts_with("ctx")).then(pl.lit("prefill")).otherwise(pl.lit("decode")),
    )  # fmt: skip
    return chosen.drop_nulls("address").select(
        "source", "leg", "trace_id", "time_ns", "phase",
        router="worker", worker=pl.format("address:{}", "address"),
    )  # fmt: skip


def _transfers(requests: pl.DataFrame) -> pl.DataFrame:
    """Pulls of generation servers; the context server's span tells the same from its side."""
    pulled = requests.filter(pl.col("role") == "decode").drop_nulls(["pull_ns", "pulled_ns"])
    return pulled.select(
        "source",
        "leg",
        request_id=pl.col("gen_ai.request.id"),
        destination_worker=pl.col("worker"),
        start_ns=pl.col("pull_ns"),
        end_ns=pl.col("pulled_ns"),
        duration_ms=(pl.col("pulled_ns") - pl.col("pull_ns")) / 1e6,
        bytes=pl.when(pl.col("bytes") > 0).then("bytes"),
        direction=pl.lit("prefill_to_decode"),
        outcome=pl.lit("completed"),
    )


def _reported(requests: pl.DataFrame) -> pl.DataFrame:
    return pl.concat(
        requests.filter(pl.col(key) > 0).select(
            "source",
            "leg",
            pl.lit(key).alias("quantity"),
            pl.col(key).alias("value"),
            pl.lit("s").alias("unit"),
            pl.lit(f"TensorRT-LLM: {words}, steady clock").alias("definition"),
        )
        for key, words in _LATENCIES.items()
    )


def _workers(spans: pl.DataFrame, role: str) -> pl.DataFrame:
    """The servers; one that has both halves of requests (a bare service name) has no role."""
    seen = spans.group_by("worker").agg(
        pl.col(role).drop_nulls().unique().alias("roles"), pl.col("start_ns").min(), pl.col("end_ns").max()
    )  # fmt: skip
    only = pl.when(pl.col("roles").list.len() == 1).then(pl.col("roles").list.first())
    return seen.select(
        "worker",
        "start_ns",
        "end_ns",
        engine=pl.lit(ENGINE),
        role=only,
        role_basis=pl.when(only.is_not_null()).then(pl.lit("span")),
    )
