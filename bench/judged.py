"""One simulated run through the detectors of levels A, B and C: what they say beside what is true."""

from __future__ import annotations

from typing import Any

import polars as pl

from pdtrace.methods import interference_gaps, interference_requests, interference_steps
from pdtrace.simulator import Run, simulate

NEAR_NS = 5_000  # an event that ends within as much of an instant does not contain it


def judge(name: str, seed: int) -> list[dict[str, Any]]:
    """One row per worker that decodes and level."""
    run = simulate(name, seed)
    streams, requests = _streams(run), _requests(run)
    rows = []
    for true in run.truth_workers.iter_rows(named=True):
        worker = true["worker"]
        share = true["lost_s"] / true["decode_s"] if true["decode_s"] else 0.0
        about = {
            "scenario": name, "kind": run.scenario.kind, "seed": seed, "worker": worker,
            "true_s": true["lost_s"], "share": share,
        }  # fmt: skip
        steps = _steps(run, worker)
        role = "decode" if run.scenario.mode == "pd" else "aggregated"
        for level, found in (
            ("A", _by_steps(steps, worker, role)),
            ("A log lines", _by_steps(_as_logged(steps), worker, role)),
            ("B", _by_gaps(run, streams, worker)),
            ("C", _by_requests(requests, worker)),
        ):
            rows.append({**about, "level": level, **found})
    return rows


def _row(found: dict[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in ("flagged", "lost_s", "lost_low_s", "lost_high_s", "note")}


# ---- level A
def _steps(run: Run, worker: str) -> pl.DataFrame:
    """A worker's steps as engines report them: a pulled request's first step is one of a prompt of
    one token."""
    steps = run.steps.filter(pl.col("worker") == worker).sort("seq")
    if run.scenario.mode == "pd":
        pulled = (
            run.requests.filter(pl.col("decode_worker") == worker)
            .group_by(start_ns="decode_start_ns")
            .agg(pulled=pl.len().cast(pl.Int64))
        )
        steps = steps.join(pulled, on="start_ns", how="left", maintain_order="left").with_columns(
            pl.col("pulled").fill_null(0)
        )
        steps = steps.with_columns(
            prefill_requests=pl.col("prefill_requests") + pl.col("pulled"),
            prefill_tokens=pl.col("prefill_tokens") + pl.col("pulled"),
            decode_requests=pl.col("decode_requests") - pl.col("pulled"),
            decode_tokens=pl.col("decode_tokens") - pl.col("pulled"),
        ).drop("pulled")
    return steps.with_columns(
        rank=pl.lit(None, pl.String), pulled_requests=pl.lit(None, pl.Int64), capture=pl.lit("full")
    )


def _as_logged(steps: pl.DataFrame) -> pl.DataFrame:
    """What log lines keep of steps: neither context nor residents."""
    unknown = ("prefill_kv_tokens", "decode_kv_tokens", "running")
    return steps.with_columns(pl.lit(None, pl.Int64).alias(column) for column in unknown)


def _by_steps(steps: pl.DataFrame, worker: str, role: str) -> dict[str, Any]:
    result, _ = interference_steps.interference(steps, worker, role=role)
    return _row(result.row(0, named=True))


# ---- level B
def _streams(run: Run) -> pl.DataFrame:
    """Token times as the client saw them."""
    return (
        run.emissions.sort("request", "seen_ns")
        .group_by("request", maintain_order=True)
        .agg(
            worker=pl.col("decode_worker").last(),
            first_ns=pl.col("seen_ns").first(),
            last_ns=pl.col("seen_ns").last(),
            emissions=pl.len(),
            gaps_us=(pl.col("seen_ns") // 1000).diff().drop_nulls().cast(pl.Int32),
            emission_tokens=pl.col("tokens").cast(pl.Int32),
        )
        .join(run.requests.select("request", "prompt_tokens"), on="request", how="left")
        .with_columns(stream=pl.lit(0, pl.Int64), observer=pl.lit("client"))
    )


def _by_gaps(run: Run, streams: pl.DataFrame, worker: str) -> dict[str, Any]:
    """Judged with prefills as the scenario shows them, and a role that is not known."""
    mine = pl.col("worker") == worker
    judged = interference_gaps.interference(streams.filter(mine), run.prefills.filter(mine), worker)
    found = _row(judged.row)
    if judged.row["flagged"]:
        found |= _events(run, worker, judged) | {"culprit_mass": _mass(run, worker, judged.losses)}
    return found


def _events(run: Run, worker: str, judged: interference_gaps.Judgement) -> dict[str, Any]:
    """Stalls called against gaps that truly lost as much; both by what the client saw."""
    emissions = run.emissions.with_columns(gap=pl.int_range(pl.len()).over("request") - 1)
    true = (
        run.truth_gaps.filter(pl.col("excess_s") >= judged.row["event_ms"] / 1e3)
        .join(emissions, left_on=["request", "index"], right_on=["request", "gap"])
        .filter(pl.col("decode_worker") == worker)
        .select("request", at="seen_ns")
        .sort("at")
    )
    called = judged.events.select(
        event=pl.int_range(pl.len()),
        request="victim",
        end=pl.col("end_ns") + NEAR_NS,
        start=pl.col("end_ns") - (pl.col("gap_ms") * 1e6).cast(pl.Int64) + NEAR_NS,
    ).sort("end")
    hits = true.join_asof(
        called, left_on="at", right_on="end", by="request", strategy="forward",
        check_sortedness=False,
    ).filter(pl.col("start") < pl.col("at"))  # fmt: skip
    return {
        "events_true": true.height,
        "events_called": called.height,
        "events_found": hits.height,
        "events_right": hits["event"].n_unique(),
    }


def _mass(run: Run, worker: str, losses: pl.DataFrame) -> float:
    """Share of the loss that is put on the requests that took it."""
    true = run.lost.filter(pl.col("worker") == worker)
    both = (
        true.group_by("culprit")
        .agg(true=pl.col("lost_s").sum())
        .join(
            losses.group_by("culprit").agg(said=pl.col("lost_s").sum()),
            on="culprit",
            how="full",
            coalesce=True,
        )
        .fill_null(0.0)
    )
    shares = both.select(pl.col("true", "said") / pl.col("true", "said").sum())
    return float(shares.select(pl.min_horizontal("true", "said").sum()).item())


# ---- level C
def _requests(run: Run) -> pl.DataFrame:
    """One row per request as the client saw it, first and last token only."""
    seen = run.emissions.group_by("request").agg(
        first=pl.col("seen_ns").min(), last=pl.col("seen_ns").max()
    )
    start = pl.col("arrival_ns")
    return (
        run.requests.join(seen, on="request")
        .sort("arrival_ns", "request")
        .select(
            "decode_worker", "prompt_tokens", "cached_tokens", "output_tokens", "outcome",
            start_ns=start, ttft_ms=(pl.col("first") - start) / 1e6,
            e2e_ms=(pl.col("last") - start) / 1e6, resolution_ns=pl.lit(1, pl.Int64),
            streams=pl.lit(1, pl.Int64), observer=pl.lit("client"),
        )
    )  # fmt: skip


def _by_requests(requests: pl.DataFrame, worker: str) -> dict[str, Any]:
    mine = requests.filter(pl.col("decode_worker") == worker)
    result = interference_requests.interference(mine, worker)
    return _row(result.row(0, named=True))
