"""SGLang's Prefill and Decode batch lines as samples.

A Prefill line stands for each prompt batch (or chunk). A Decode line stands for every 40th decode
iteration (`--decode-log-interval`): what it counts is of that moment, its throughput the mean since
the Decode line before, idle time included. Neither states a duration: they are samples, no steps.
Keys were added and renamed from version to version: they are read by name, never by position.
"""

from __future__ import annotations

from typing import Any

import polars as pl

_BATCH = r"^(?P<what>Prefill|Decode) batch(?: \[\d+\])?[.,] (?P<body>.*?),?\s*$"
# key of a line, of prefill lines or both -> metric; of decode lines below
_BOTH = {
    "token usage": "log:kv_token_usage",
    "full token usage": "log:kv_full_token_usage",
    "swa token usage": "log:kv_swa_token_usage",
    "gpu token usage": "log:kv_gpu_token_usage",
    "cpu token usage": "log:kv_cpu_token_usage",
    "mamba usage": "log:mamba_usage_ratio",
    "#running-req": "log:num_running_reqs",
    "#queue-req": "log:num_queue_reqs",
    "#retracted-req": "log:num_retracted_reqs",
}
_PREFILL = {
    "#new-seq": "log:prefill_batch_requests",
    "#new-token": "log:prefill_batch_tokens",
    "#cached-token": "log:prefill_batch_cached_tokens",
    # Such a line is written only while prompts are taken in: its queue is what one batch left, no wait as seen now and then.
    "#queue-req": "log:num_queue_reqs_behind_prefill_batch",
    "#pending-token": "log:pending_prompt_tokens",
    "#replay-token": "log:prefill_batch_replayed_tokens",
    "#unbootstrapped-req": "log:num_prefill_bootstrap_queue_reqs",  # to 0.4.9
    "#prealloc-req": "log:num_prefill_bootstrap_queue_reqs",  # 0.5.3 to 0.5.10
    "#bootstrap-req": "log:num_prefill_bootstrap_queue_reqs",
    "#transferring-req": "log:num_prefill_inflight_queue_reqs",  # to 0.4.9
    "#inflight-req": "log:num_prefill_inflight_queue_reqs",
    "#optimistic-req": "log:num_prefill_optimistic_reqs",
    "input throughput (token/s)": "log:input_throughput_toks_per_s",
}
_DECODE = {
    "#token": "log:kv_used_tokens",
    "#full token": "log:kv_used_tokens",
    "#swa token": "log:kv_swa_used_tokens",
    "pre-allocated usage": "log:kv_pre_allocated_usage",
    "#prealloc-req": "log:num_decode_prealloc_queue_reqs",
    "#transfer-req": "log:num_decode_transfer_queue_reqs",
    "#host-receive-req": "log:num_decode_host_receive_queue_reqs",
    "accept len": "log:spec_accept_length",
    "accept rate": "log:spec_acceptance_rate",
    "gen throughput (token/s)": "log:generation_throughput_toks_per_s",
}
_THROUGHPUT = "log:generation_throughput_toks_per_s"
_PROMPTS = (
    "log:prompt_throughput_toks_per_s"  # ours: tokens of the Prefill lines between two Decode lines
)
_CHIPS = ("cuda graph", "cpu graph", "npu graph", "musa graph")
READ = "batch line without a number"


class Batches:
    """Batch lines of one log; remembers each rank's Decode line before."""

    def __init__(self) -> None:
        self._last: dict[
            tuple[int, str | None], int
        ] = {}  # (run, rank) -> time of the last Decode line
        self._prompts: dict[tuple[int, str | None], float] = {}  # prompt tokens since then

    def samples(self, lines: pl.DataFrame) -> pl.DataFrame:
        """Rows of `samples` with column run in place of worker."""
        groups = lines["message"].str.extract_groups(_BATCH).struct.unnest()
        told = pl.concat([lines.select("record", "run", "dp", "time_ns", "resolution_ns"), groups], how="horizontal")  # fmt: skip
        told = told.filter(pl.col("body").is_not_null())
        values = (
            told.with_columns(pl.col("body").str.split(", ").alias("item"))
            .drop("body")
            .explode("item")
            .with_columns(
                key=pl.col("item").str.extract(r"^(.*): [^:]*$").str.strip_chars(),
                value=pl.col("item").str.extract(r": (-?[\d.]+)%?$").cast(pl.Float64, strict=False),
            )
            .filter(pl.col("value").is_finite() & ~pl.col("key").is_in(_CHIPS))
        )
        decode = {**_BOTH, **_DECODE}
        prefill = {**_BOTH, **_PREFILL}
        metric = (
            pl.when(pl.col("what") == "Decode")
            .then(pl.col("key").replace_strict(decode, default=None, return_dtype=pl.String))
            .otherwise(pl.col("key").replace_strict(prefill, default=None, return_dtype=pl.String))
        )
        rows = values.with_columns(metric=metric).filter(pl.col("metric").is_not_null())
        windows = self._windows(rows)
        both = pl.concat([rows.join(windows.drop("prompts"), on="record", how="left", maintain_order="left"), _prompt_rates(rows, windows)], how="diagonal_relaxed")  # fmt: skip
        return both.select(
            "record", "run", "time_ns", "resolution_ns", "metric", "value",
            pl.when(pl.col("metric").is_in([_THROUGHPUT, _PROMPTS])).then("window_ns").alias("interval_ns"),
            pl.coalesce(pl.concat_str(pl.lit('{"dp_rank":"'), "dp", pl.lit('"}')), pl.lit("{}")).alias("labels"),
            pl.lit("gauge").alias("kind"),
        )  # fmt: skip

    def _windows(self, rows: pl.DataFrame) -> pl.DataFrame:
        """record, window_ns, prompts of each Decode line: since the one before on its rank."""
        lines = (
            rows.group_by("record", maintain_order=True)
            .agg(
                pl.col("run", "dp", "time_ns", "what").first(),
                tokens=pl.col("value").filter(pl.col("metric") == "log:prefill_batch_tokens").sum(),
            )
            .sort("record")
        )
        found: list[dict[str, Any]] = []
        # A loop over batch lines only: what a window holds depends on the line before.
        for record, run, dp, time_ns, what, tokens in lines.iter_rows():
            place = (run, dp)
            if what == "Prefill":
                self._prompts[place] = self._prompts.get(place, 0.0) + tokens
                continue
            before, prompts = self._last.get(place), self._prompts.pop(place, 0.0)
            if time_ns is not None:
                self._last[place] = time_ns
                if before is not None and time_ns > before:
                    found.append({"record": record, "window_ns": time_ns - before, "prompts": prompts})  # fmt: skip
        return pl.DataFrame(
            found, schema={"record": pl.Int64, "window_ns": pl.Int64, "prompts": pl.Float64}
        )


def _prompt_rates(rows: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    lines = rows.unique("record", maintain_order=True).select("record", "run", "dp", "time_ns", "resolution_ns")  # fmt: skip
    return windows.join(lines, on="record").select(
        "record", "run", "dp", "time_ns", "resolution_ns", "window_ns",
        value=pl.col("prompts") * 1e9 / pl.col("window_ns"),
        metric=pl.lit(_PROMPTS),
    )  # fmt: skip
