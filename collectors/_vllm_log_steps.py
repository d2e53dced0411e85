"""Iteration-detail lines of vLLM (--enable-logging-iteration-details, since 0.14) as engine steps.

0.14 to 0.24: EngineCore writes them, the engine is in the process name; 0.32: the API server
does, with `Engine 000:` in front. "context" requests are those without output so far, so each
chunk of a long prompt.
"""

from __future__ import annotations

import polars as pl

DUMMY = "dummy iteration of an idle data parallel rank"
FINE_NS = 10_000_000  # stamps finer than this place a step; coarser ones only bound it

ITERATION = (
    r"(?:Engine (?P<engine>[0-9]+): )?Iteration\((?P<seq>[0-9]+)\): "
    r"(?P<cr>[0-9]+) context requests?, (?P<ct>[0-9]+) context tokens?, "
    r"(?P<gr>[0-9]+) generation requests?, (?P<gt>[0-9]+) generation tokens?, "
    r"iteration elapsed time: (?P<ms>[0-9]+(?:\.[0-9]+)?) ms(?P<dummy> \(dummy\))?"
    r"(?:, [A-Za-z]+ KV cache usage: (?P<kv>[0-9]+(?:\.[0-9]+)?)%)?"
)
# with the usual prefix, found without searching: twice as fast
_USUAL = r"^(?:\([^()]*\) )?[A-Z]+ [0-9-]+ [0-9:]+ \[?[^\] ]*\] " + ITERATION


def parse(lines: pl.DataFrame) -> pl.DataFrame:
    """The iteration lines among these, with seq and rank; columns of the input are kept."""
    groups = lines["text"].str.extract_groups(_USUAL).struct.unnest()
    if groups["ms"].has_nulls():
        groups = lines["text"].str.extract_groups(ITERATION).struct.unnest()
    frame = pl.concat([lines, groups], how="horizontal").filter(pl.col("ms").is_not_null())
    return frame.with_columns(
        pl.col("seq").cast(pl.Int64),
        pl.coalesce(
            pl.col("engine").cast(pl.Int64, strict=False),
            pl.col("process").str.extract(r"^EngineCore_DP(\d+)").cast(pl.Int64, strict=False),
            pl.lit(0, dtype=pl.Int64),
        )
        .cast(pl.String)
        .alias("rank"),
    )


def rows(parsed: pl.DataFrame) -> pl.DataFrame:
    """Rows of `steps`; `transfer_role` and `worker` of the run must be among the columns."""
    elapsed = (pl.col("ms").cast(pl.Float64) * 1e6).round().cast(pl.Int64, strict=False)
    fine = pl.col("resolution_ns") <= FINE_NS
    requests, tokens = pl.col("cr").cast(pl.Int64), pl.col("ct").cast(pl.Int64)
    return parsed.filter(pl.col("dummy").is_null()).select(
        "record",
        "worker",
        "rank",
        "seq",
        elapsed.alias("elapsed_ns"),
        # the line is written when the step is done
        pl.when(fine).then(pl.col("time_ns") - elapsed).alias("start_ns"),
        (pl.col("time_ns") - elapsed).alias("start_lower_ns"),
        (pl.col("time_ns") + pl.col("resolution_ns") - elapsed).alias("start_upper_ns"),
        requests.alias("prefill_requests"),
        tokens.alias("prefill_tokens"),
        pl.col("gr").cast(pl.Int64).alias("decode_requests"),
        pl.col("gt").cast(pl.Int64).alias("decode_tokens"),
        (pl.col("kv").cast(pl.Float64) / 100).alias("kv_usage_ratio"),
        _pulled(requests, tokens).alias("pulled_requests"),
        pl.lit("full").alias("capture"),
    )


def _pulled(requests: pl.Expr, tokens: pl.Expr) -> pl.Expr:
    """Requests that took over KV from elsewhere: one context token each, on a server that can pull.

    A pulled prompt is complete but for its last token. With more tokens than requests at least
    one of them computed its prompt, how many did not is unknown.
    """
    role = pl.col("transfer_role")
    return (
        pl.when(role.is_null())
        .then(None)
        .when((requests == 0) | role.is_in(["none", "kv_producer"]))
        .then(pl.lit(0, dtype=pl.Int64))
        .when(requests == tokens)
        .then(requests)
    )
