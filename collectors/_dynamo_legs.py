"""Legs from Dynamo's spans: the frontend's view of a request, the router's hops, the workers."""

from __future__ import annotations

import polars as pl

from ._dynamo_names import TTFT_ENGINE, TTFT_REPORTED, TTFT_STREAM, engine_worker, status_of
from ._dynamo_spans import GENERATE_SPAN, STREAMING, Tree

_REQUEST = ("trace_id", "rid")
MS = 1_000_000

# Log lines round the length of a span to three digits; beyond this the reported ttft_ms is the
# finer one.
_COARSE_NS = 1 * MS


def leg_id() -> pl.Expr:
    """`<trace id>/<span id>`."""
    return pl.concat_str("trace_id", pl.lit("/"), "span_id")


def frontend_legs(tree: Tree) -> pl.DataFrame:
    """One leg per http-request, with its stream, outcome and session."""
    requests = (
        tree.requests.join(_streams(tree), on=_REQUEST, how="left")
        .join(_lifecycles(tree), on=_REQUEST, how="left")
        .join(_last_attempts(tree), on=_REQUEST, how="left")
        .with_columns(
            http_status=_http_status(), reported_first_ns=pl.col("start_ns") + _ms_to_ns("ttft_ms")
        )
    )
    streamed = pl.col("stream_start_ns").is_not_null() & (
        (pl.col("stream_resolution_ns") <= _COARSE_NS) | pl.col("reported_first_ns").is_null()
    )
    first = pl.when(streamed).then("stream_start_ns").otherwise("reported_first_ns")
    return requests.with_columns(
        first_token_ns=first,
        last_token_ns=pl.col("stream_end_ns"),
        ttft_definition=pl.when(streamed)
        .then(pl.lit(TTFT_STREAM))
        .when(pl.col("reported_first_ns").is_not_null())
        .then(pl.lit(TTFT_REPORTED)),
        status=_request_status(),
        error=_request_error(),
        session=pl.when(pl.col("dynamo.session.source_l") == "agent_context").then(
            "dynamo.session.id_l"
        ),
    )


def frontend_rows(requests: pl.DataFrame) -> pl.DataFrame:
    """The `legs` rows of frontend_legs()."""
    return _rows(
        requests,
        parent_span_id=pl.col("parent"),
        observer=pl.lit("frontend"),
        role=pl.lit("frontend"),
        container=pl.lit(value=False),
        request_id=pl.col("rid"),
        external_id=pl.coalesce("x_request_id", "rid"),
        session=pl.col("session"),
        first_token_delivered=pl.when(pl.col("first_token_ns").is_not_null()).then(
            pl.lit(value=True)
        ),
        prompt_tokens=pl.col("input_tokens"),
        output_tokens=pl.col("output_tokens"),
        streaming=pl.when(pl.col("stream_start_ns").is_not_null()).then(pl.lit(value=True)),
        status=pl.col("status"),
        error=pl.col("error"),
    )


def route_rows(routes: pl.DataFrame) -> pl.DataFrame:
    """The router's hops: containers on the frontend's clock, one per attempt and phase."""
    return _rows(
        routes.with_columns(_no_first_token()),
        parent_span_id=pl.col("parent"),
        observer=pl.lit("router"),
        role=pl.lit(None, dtype=pl.String),
        container=pl.lit(value=True),
        request_id=pl.col("rid"),
        external_id=pl.coalesce("x_request_id", "rid"),
        attempt=pl.col("attempt"),
        status=status_of(pl.col("outcome")).fill_null("unknown"),
        error=pl.when(status_of(pl.col("outcome")) == "failed").then(
            pl.coalesce("error.type", "outcome")
        ),
    )


def unseen_worker_rows(routes: pl.DataFrame) -> pl.DataFrame:
    """Workers that a hop names but whose own spans are lost (a killed worker exports nothing)."""
    lost = routes.filter(pl.col("child_start_ns").is_null() & pl.col("instance").is_not_null())
    return _rows(
        lost.with_columns(_no_first_token(), worker=engine_worker(pl.col("instance"))),
        parent_span_id=pl.col("span_id"),
        observer=pl.lit("engine"),
        role=pl.col("role"),
        rank=pl.col("dp_rank"),
        container=pl.lit(value=True),
        request_id=pl.col("rid"),
        external_id=pl.coalesce("x_request_id", "rid"),
        attempt=pl.col("attempt"),
        status=status_of(pl.col("outcome")).fill_null("unknown"),
    ).with_columns(
        leg=pl.concat_str("leg", pl.lit("#worker")), span_id=pl.lit(None, dtype=pl.String)
    )


def worker_legs(tree: Tree) -> pl.DataFrame:
    """handle_payload with what engine.generate (unified backend) says below it."""
    generate = (
        tree.others.filter(pl.col("name") == GENERATE_SPAN)
        .sort("start_ns")
        .group_by("trace_id", span_id="parent", maintain_order=True)
        .agg(
            generate_start_ns=pl.col("start_ns").first(),
            generate_ttft_ms=pl.col("ttft_ms").first(),
            generate_input_tokens=pl.col("input_tokens").first(),
            generate_output_tokens=pl.col("output_tokens").first(),
            generate_finish=pl.col("finish_reason").first().str.to_lowercase(),
            generate_cancelled=pl.col("cancelled").any(),
            generate_model=pl.col("model").first(),
            **{
                f"generate_{key}": pl.col(key).first()
                for key in ("avg_itl_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms")
            },
        )
    )
    return tree.workers.join(generate, on=["trace_id", "span_id"], how="left").with_columns(
        first_token_ns=pl.col("generate_start_ns") + _ms_to_ns("generate_ttft_ms"),
        last_token_ns=pl.lit(None, dtype=pl.Int64),
        ttft_definition=pl.when(pl.col("generate_ttft_ms").is_not_null()).then(pl.lit(TTFT_ENGINE)),
    )


def worker_rows(workers: pl.DataFrame) -> pl.DataFrame:
    """The `legs` rows of worker_legs(); a prefill worker's token does not reach the user."""
    named = pl.when(~pl.col("generate_model").str.starts_with("/")).then("generate_model")
    cancelled = pl.when("generate_cancelled").then(pl.lit("aborted"))
    return _rows(
        workers.with_columns(
            worker=pl.coalesce(engine_worker(pl.col("instance_id")), "worker"),
        ),
        parent_span_id=pl.col("parent"),
        observer=pl.lit("engine"),
        role=pl.col("role"),
        rank=pl.col("rank"),
        container=pl.lit(value=False),
        request_id=pl.col("rid"),
        external_id=pl.coalesce("x_request_id", "rid"),
        attempt=pl.col("attempt"),
        first_token_delivered=pl.when(pl.col("role") == "prefill").then(pl.lit(value=False)),
        model=named,
        prompt_tokens=pl.col("generate_input_tokens"),
        output_tokens=pl.col("generate_output_tokens"),
        status=pl.coalesce(cancelled, status_of(pl.col("outcome")), pl.lit("unknown")),
        finish_reason=pl.col("generate_finish"),
        error=pl.when(status_of(pl.col("outcome")) == "failed").then("outcome"),
    )


def _rows(frame: pl.DataFrame, **columns: pl.Expr) -> pl.DataFrame:
    """Rows of `legs`: the shared columns, the given ones, and the durations that the instants
    give."""
    shared = frame.with_columns(
        e2e_ms=_span_ms("start_ns", "end_ns"), first_ms=_span_ms("start_ns", "first_token_ns")
    )
    rows = shared.select(
        "source", "worker", "trace_id", "span_id", "start_ns", "end_ns", "first_token_ns",
        "last_token_ns",
        "resolution_ns", "e2e_ms", "ttft_definition",
        leg=leg_id(),
        ttft_ms=pl.col("first_ms"),
        clock=pl.lit("wall"),
        **{name: expression for name, expression in columns.items() if name != "span_id"},
    )  # fmt: skip
    basis = pl.when(pl.col("role").is_not_null()).then(pl.lit("span"))
    rows = rows.with_columns(role_basis=basis)
    if "output_tokens" not in columns:
        return rows
    gaps = pl.col("output_tokens") - 1
    return rows.with_columns(
        tpot_ms=pl.when(gaps > 0).then(
            (pl.col("last_token_ns") - pl.col("first_token_ns")).cast(pl.Float64) / 1e6 / gaps
        )
    )


def _span_ms(start: str, end: str) -> pl.Expr:
    return (pl.col(end) - pl.col(start)).cast(pl.Float64) / 1e6


def _ms_to_ns(column: str) -> pl.Expr:
    return (pl.col(column) * MS).round().cast(pl.Int64)


def _no_first_token() -> list[pl.Expr]:
    none = pl.lit(None, dtype=pl.Int64)
    return [
        none.alias("first_token_ns"),
        none.alias("last_token_ns"),
        pl.lit(None, dtype=pl.String).alias("ttft_definition"),
    ]


def _streams(tree: Tree) -> pl.DataFrame:
    """The frontend's response.streaming of each request: from the first streamed token to the
    end."""
    return (
        tree.others.filter(pl.col("name") == STREAMING)
        .group_by(_REQUEST)
        .agg(
            stream_start_ns=pl.col("start_ns").min(),
            stream_end_ns=pl.col("end_ns").max(),
            stream_resolution_ns=pl.col("resolution_ns").max(),
        )
    )


def _lifecycles(tree: Tree) -> pl.DataFrame:
    """What the root of the lifecycle family says of a request's end and session."""
    return (
        tree.others.filter(pl.col("name") == "request.lifecycle")
        .group_by(_REQUEST)
        .agg(
            terminal_outcome=pl.col("dynamo.request.terminal.outcome").drop_nulls().first(),
            **{
                f"{key}_l": pl.col(key).drop_nulls().first()
                for key in ("dynamo.session.id", "dynamo.session.source")
            },
        )
    )


def _last_attempts(tree: Tree) -> pl.DataFrame:
    """The outcome of each request's last hop: a success heals earlier attempts."""
    return (
        tree.routes.sort(pl.col("attempt").fill_null(0), "start_ns", "span_id")
        .group_by(_REQUEST, maintain_order=True)
        .agg(
            last_outcome=pl.col("outcome").drop_nulls().last(),
            last_error=pl.col("error.type").drop_nulls().last(),
        )
    )


def _http_status() -> pl.Expr:
    """The HTTP status in the span event "http response sent", where it is one."""
    sent = pl.col("events").list.eval(
        pl.when(pl.element().struct.field("name") == "http response sent").then(
            pl.element()
            .struct.field("attributes")
            .str.extract(r'"status"\s*:\s*"?(\d{3})')
            .cast(pl.Int64, strict=False)
        )
    )
    return sent.list.drop_nulls().list.last()


def _request_status() -> pl.Expr:
    """completed, failed, aborted or unknown. The span's own status is ERROR on success (1.6.1):
    not used."""
    http = pl.col("http_status")
    refused = pl.when(http == 499).then(pl.lit("aborted")).when(http >= 400).then(pl.lit("failed"))
    # A request that ended in order carries its token counts; a cancelled one does not.
    counted = pl.when(pl.col("output_tokens").is_not_null()).then(pl.lit("completed"))
    return pl.coalesce(
        status_of(pl.col("terminal_outcome")),
        refused,
        status_of(pl.col("last_outcome")),
        counted,
        pl.lit("unknown"),
    )


def _request_error() -> pl.Expr:
    http = pl.when(pl.col("http_status") >= 400).then(
        pl.concat_str(pl.lit("http_"), pl.col("http_status").cast(pl.String))
    )
    outcome = pl.coalesce("terminal_outcome", "last_outcome")
    return pl.when(_request_status() == "failed").then(pl.coalesce("last_error", http, outcome))
