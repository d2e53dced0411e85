"""The headline: the outermost observer that saw nearly all of a deployment's requests, and their latencies as it saw them."""

from __future__ import annotations

import polars as pl

from pdtrace.model import OBSERVERS

COVERAGE = 0.9  # share of completed requests that the headline's observer must have seen
TOO_COARSE_NS = 10**8  # instants coarser than this say nothing of a first token


def headline(
    observations: pl.DataFrame, requests: pl.DataFrame, value: str = "ttft_ms"
) -> pl.DataFrame:
    """Per deployment the outermost observer that saw the TTFT of 90 % of the completed."""
    requests = requests.select("r", "deployment", "outcome")
    completed = requests.filter(pl.col("outcome") == "completed").select("r", "deployment")
    # Where nothing says how requests ended, all count.
    silent = requests.filter(pl.col("outcome") == "unknown")
    if silent.height:
        told = completed["deployment"].unique().implode()
        silent = silent.filter(~pl.col("deployment").is_in(told))
    counted = pl.concat([completed, silent.select("r", "deployment")])
    total = counted.group_by("deployment").agg(pl.len().alias("requests"))
    seen = observations.select(
        "r", "deployment", "observer", "resolution_ns", "own_clock", value
    ).filter(
        pl.col(value).is_not_null()
        & (pl.col("own_clock") | (pl.col("resolution_ns").fill_null(1) < TOO_COARSE_NS))
    )
    if counted.height < requests.height:
        seen = seen.join(counted.select("r"), on="r", how="semi")
    seen = seen.group_by("deployment", "observer").agg(pl.len().alias("seen"))
    rank = pl.col("observer").replace_strict(
        list(OBSERVERS), list(range(len(OBSERVERS))), return_dtype=pl.Int8
    )
    return (
        seen.join(total, on="deployment")
        .filter(pl.col("seen") >= COVERAGE * pl.col("requests"))
        .sort("deployment", rank)
        .unique("deployment", keep="first", maintain_order=True)
        .select("deployment", "observer")
    )


def with_headline(
    requests: pl.DataFrame, observations: pl.DataFrame, headlines: pl.DataFrame
) -> pl.DataFrame:
    """Latencies of each request as its deployment's headline observer saw them.

    Where nobody saw first tokens, durations and pace are those of the outermost observer that has them.
    """
    observations = observations.select(
        "r", "deployment", "observer", "ttft_ms", "e2e_ms", "tpot_ms", "resolution_ns", "own_clock"
    )
    seen = observations.join(headlines, on=["deployment", "observer"], how="semi")
    values = seen.select("r", "ttft_ms", "e2e_ms", "tpot_ms")
    silent = observations.join(headlines, on="deployment", how="anti")
    if silent.height:
        silent = silent.with_columns(pl.coalesce("e2e_ms", "tpot_ms").alias("duration"))
        others = headline(silent, requests, "duration")
        unheard = silent.join(others, on=["deployment", "observer"], how="semi")
        untold = pl.lit(None, pl.Float64).alias("ttft_ms")
        values = pl.concat([values, unheard.select("r", untold, "e2e_ms", "tpot_ms")])
    if values["r"].equals(requests["r"]):  # as where one observer is there
        return requests.hstack(values.drop("r"))
    return requests.join(values, on="r", how="left", maintain_order="left")
