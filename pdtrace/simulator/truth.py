"""What each prefill took from each resident decode: known, since the simulator priced the step.

A step that decodes and computes prompts: its duration less that of the same step with the same
decode batch and no prompt tokens, drawn with the same noise; each resident loses as much. A step
that only computes prompts: all of it but pauses, which would have come anyway. Split over the
prompts in the step by their tokens.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from pdtrace.simulator.engine import Ints, Step, Worker
from pdtrace.simulator.log import joined, names

LOST: dict[str, type[pl.DataType]] = {
    "worker": pl.String, "culprit": pl.String, "victim": pl.String, "lost_s": pl.Float64,
}  # fmt: skip
GAPS: dict[str, type[pl.DataType]] = {
    "request": pl.String, "index": pl.Int64, "excess_s": pl.Float64,
}  # fmt: skip


def losses(workers: list[Worker], emissions: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(seconds by worker, culprit and victim; seconds by gap of the victim, 0 its first gap)."""
    pairs, moments = [pl.DataFrame(schema=LOST)], [pl.DataFrame(schema=_MOMENTS)]
    for worker in workers:
        harmful = [s for s in worker.steps if s.parts and len(s.residents)]
        if harmful:
            pairs.append(_pairs(worker.name, harmful))
            moments.append(_moments(harmful))
    return pl.concat(pairs), _gaps(pl.concat(moments), emissions)


def by_worker(workers: list[Worker], lost: pl.DataFrame) -> pl.DataFrame:
    """Seconds lost and seconds that decodes were resident, of each worker that decodes."""
    rows = [
        (w.name, sum((s.end - s.start) * len(s.residents) for s in w.steps) / 1e9)
        for w in workers
        if w.role != "prefill"
    ]
    decode = pl.DataFrame(rows, schema={"worker": pl.String, "decode_s": pl.Float64}, orient="row")
    total = lost.group_by("worker").agg(pl.col("lost_s").sum())
    return decode.join(total, on="worker", how="left", maintain_order="left").select(
        "worker", pl.col("lost_s").fill_null(0.0), "decode_s"
    )


def _pairs(worker: str, steps: list[Step]) -> pl.DataFrame:
    culprits, victims, lost = [], [], []
    for step in steps:
        tokens = np.array([new for _, new, _ in step.parts], np.float64)
        share = step.excess / 1e9 * tokens / tokens.sum()
        residents = len(step.residents)
        culprits.append(np.repeat(np.array([i for i, _, _ in step.parts], np.int64), residents))
        victims.append(np.tile(step.residents, len(step.parts)))
        lost.append(np.repeat(share, residents))
    return (
        pl.DataFrame(
            {"culprit": joined(culprits), "victim": joined(victims), "lost_s": np.concatenate(lost)}
        )
        .group_by("culprit", "victim")
        .agg(pl.col("lost_s").sum())
        .sort("culprit", "victim")
        .select(pl.lit(worker).alias("worker"), names("culprit"), names("victim"), "lost_s")
    )


_MOMENTS: dict[str, type[pl.DataType]] = {
    "index": pl.Int64, "time_ns": pl.Int64, "excess_s": pl.Float64,
}  # fmt: skip


def _moments(steps: list[Step]) -> pl.DataFrame:
    counts = [len(s.residents) for s in steps]
    ends: Ints = np.array([s.end for s in steps], np.int64)
    excess = np.array([s.excess for s in steps], np.float64) / 1e9
    return pl.DataFrame(
        {
            "index": joined([s.residents for s in steps]),
            "time_ns": np.repeat(ends, counts),
            "excess_s": np.repeat(excess, counts),
        }
    )


def _gaps(moments: pl.DataFrame, emissions: pl.DataFrame) -> pl.DataFrame:
    """Each loss belongs to the gap that ends with the victim's next tokens."""
    numbered = emissions.select(
        "index", "time_ns", gap=pl.int_range(pl.len()).over("index") - 1
    ).sort("time_ns")
    return (
        moments.sort("time_ns")
        .join_asof(numbered, on="time_ns", by="index", strategy="forward", check_sortedness=False)
        .filter(pl.col("gap") >= 0)  # what came before the first token is no gap
        .group_by("index", "gap")
        .agg(pl.col("excess_s").sum())
        .sort("index", "gap")
        .select(names("index").alias("request"), pl.col("gap").alias("index"), "excess_s")
        .cast(pl.Schema(GAPS))
    )
