"""Words of Dynamo that several of its collectors share: definitions, roles, outcomes, facts."""

from __future__ import annotations

import polars as pl

ENGINE = "Dynamo"
GENERATE = "generate"  # the endpoint that serves requests; the others are the control plane's

# Facts that one Dynamo collector leaves for another; a _ in front: not for people.
FACT_BLOCK_SIZE = "kv_block_size"
FACT_COVERAGE = (
    "_request_trace_coverage"  # JSON: first worker of the requests, and the time they span
)
FACT_LOG = (
    "_log_coverage"  # JSON: service, the time that its log spans, the workers that it saw chosen
)
SLACK_NS = 1_000_000_000  # instants of one thing in two sources lie within this

# A resource attribute that dynamo_log gives the spans that it rebuilds: the log they come from.
LOG_FILE = "pdtrace.log_file"

TTFT_STREAM = "frontend: start of the HTTP request to the first streamed token"
TTFT_REPORTED = "frontend: ttft_ms of http-request, the first token of the client's stream"
TTFT_AGGREGATED = "frontend: request received to the first output of the worker (request trace)"
TTFT_ENGINE = "worker: start of engine.generate to its first output"

REPORTED_SPAN = {
    "ttft_ms": "Dynamo http-request.ttft_ms: HTTP request to first token of the client's stream",
    "avg_itl_ms": "Dynamo http-request.avg_itl_ms: mean gap between tokens of the client's stream",
}
REPORTED_ENGINE = {
    "ttft_ms": "Dynamo engine.generate.ttft_ms: start of the call to the worker's own first output",
    "avg_itl_ms": "Dynamo engine.generate.avg_itl_ms: mean gap between outputs on the worker",
    "itl_p50_ms": "Dynamo engine.generate.itl_p50_ms: median gap between outputs on the worker",
    "itl_p99_ms": "Dynamo engine.generate.itl_p99_ms: 99th percentile of the gaps on the worker",
    "itl_max_ms": "Dynamo engine.generate.itl_max_ms: longest gap between outputs on the worker",
}

STATUSES = {
    "success": "completed",
    "rejected": "failed",
    "timed_out": "failed",
    "failed": "failed",
    "error": "failed",
    "cancelled": "aborted",
    "canceled": "aborted",
}


def status_of(outcome: pl.Expr) -> pl.Expr:
    """completed, failed or aborted from an outcome word; an unheard word is a failure; NULL
    stays."""
    word = outcome.str.to_lowercase()
    known = word.replace_strict(STATUSES, default="failed", return_dtype=pl.String)
    return pl.when(word.is_null() | (word == "unknown")).then(None).otherwise(known)


def engine_worker(worker_id: pl.Expr) -> pl.Expr:
    """The id that model.worker_id gives a Dynamo worker instance."""
    return pl.concat_str(pl.lit("worker_id:"), worker_id)
