"""How far `pdtrace whatif` is from the truth: two aggregated workers replayed as 1P:1D, against the simulator run that way.

`python -m bench.whatif [seeds] [A|B]`: the whole pipeline at level B (spans with token times) or A (engine steps), 15 seeds x {exclusive,
chunked 2048}; limits are set where they bite: TTFT 3 x the recorded median, TPOT the 60th percentile of the truth.
One run is one draw of what chance does to steps: attainment is also held against the mean of `RUNS` runs of the same load
on the same costs, and their spread is shown: no prediction from other steps can be nearer to one run than that.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pdtrace._whatif_model import Asked
from pdtrace.api import Trace
from pdtrace.model import Slo
from pdtrace.simulator import SCENARIOS, simulate, write
from pdtrace.simulator.scenario import BLOCK_TOKENS, KV_BYTES_PER_TOKEN
from pdtrace.whatif import WhatIf, whatif

GBYTES_PER_S = 12.0
MODES = ("exclusive", "chunked_2048")
RUNS = 5
SHOWN = (
    "ttft_p50",
    "ttft_p90",
    "ttft_p99",
    "tpot_p50",
    "tpot_p90",
    "attainment_all",
    "attainment_mean",
)


def one(mode: str, seed: int, level: str = "B") -> dict[str, Any]:
    """Errors of one seed: relative for latencies, points for attainment. At level B the dumps lose their engine steps."""
    scenario = replace(SCENARIOS[mode], workers=2)
    run = simulate(scenario, seed)
    split = replace(
        scenario, mode="pd", workers=1, prefill_workers=1, link_gbytes_per_s=(GBYTES_PER_S,) * 2
    )
    ttft, tpot, steps = _seen(simulate(split, seed).requests)
    slo = Slo(
        ttft_ms=round(3 * float(np.median(ttft))), tpot_ms=round(float(np.quantile(tpot, 0.6)), 1)
    )
    with tempfile.TemporaryDirectory() as folder:
        write(run, Path(folder), "pdtrace")
        with Trace.read([folder]) as trace:
            asked = Asked(
                pd=(1, 1), bandwidth_gbps=(8 * GBYTES_PER_S,) * 2, latency_ms=scenario.link_latency_ms,
                kv_tokens=scenario.kv_blocks * BLOCK_TOKENS, kv_bytes_per_token=KV_BYTES_PER_TOKEN, transfer="bulk",
                chunk_tokens=0,
            )  # fmt: skip
            if level == "B":
                trace.store.clear("steps")
            found = whatif(trace.store, folder, asked, slo)
    real = {
        "ttft_" + q: float(np.quantile(ttft, v))
        for q, v in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }
    real |= {
        "tpot_p50": float(np.quantile(tpot[steps > 0], 0.5)),
        "tpot_p90": float(np.quantile(tpot[steps > 0], 0.9)),
    }
    met = [_met(ttft, tpot, slo)]
    for draw in range(1, RUNS):
        met.append(_met(*_seen(simulate(replace(split, step_draw=draw), seed).requests)[:2], slo))
    real |= {"attainment_all": met[0], "attainment_mean": float(np.mean(met))}
    spread = {"spread": 100 * float(np.std(met, ddof=1))}
    return {"mode": mode, "seed": seed, "refused": found.refusal, **_errors(found, real), **spread}


def _seen(requests: pl.DataFrame) -> tuple[Any, Any, Any]:
    """TTFT, TPOT (ms; of one token 0) and decode steps of the requests that ended."""
    ended = requests.filter(pl.col("end_ns").is_not_null())
    ttft = (ended["first_token_ns"] - ended["arrival_ns"]).to_numpy() / 1e6
    steps = ended["output_tokens"].to_numpy() - 1
    decoding = (ended["end_ns"] - ended["first_token_ns"]).to_numpy() / 1e6
    return ttft, np.where(steps > 0, decoding / np.maximum(steps, 1), 0), steps


def _met(ttft: Any, tpot: Any, slo: Slo) -> float:
    return float(((ttft <= slo.ttft_ms) & (tpot <= slo.tpot_ms)).mean())


def _errors(found: WhatIf, real: dict[str, float]) -> dict[str, float]:
    errors = {}
    for answer in found.answers:
        if answer.first_token == "decode" and answer.figure in real:
            truth = real[answer.figure]
            share = answer.unit == "1"
            errors[answer.figure] = 100 * (
                answer.central - truth if share else answer.central / truth - 1
            )
            errors[f"{answer.figure}_in_band"] = 100.0 * (answer.low <= truth <= answer.high)
        if answer.first_token == "decode" and answer.figure == "attainment_all":
            mean = real["attainment_mean"]
            errors["attainment_mean"] = 100 * (answer.central - mean)
            errors["attainment_mean_in_band"] = 100.0 * (answer.low <= mean <= answer.high)
    return errors


def main(seeds: int, level: str) -> None:
    """Print a row per mode: median and worst absolute error, share of truths inside the band."""
    rows = []
    for mode, seed in ((mode, seed) for mode in MODES for seed in range(seeds)):
        rows.append(one(mode, seed, level))
        off = {k: round(rows[-1][k], 2) for k in SHOWN if k in rows[-1]}
        print(f"{mode} {seed}: {rows[-1]['refused'] or off}", flush=True)
    for mode in MODES:
        mine = [r for r in rows if r["mode"] == mode]
        good = [r for r in mine if r["refused"] is None]
        print(
            f"{mode}: {len(mine)} seeds, {len(mine) - len(good)} refused {[r['refused'] for r in mine if r['refused']]}"
        )
        for figure in SHOWN:
            off = np.abs([r[figure] for r in good])
            inside = np.mean([r[f"{figure}_in_band"] for r in good])
            unit = "points" if figure.startswith("attainment") else "%"
            print(
                f"  {figure:15s} median {np.median(off):5.1f} {unit}, worst {off.max():5.1f} {unit}, truth in the band {inside:.0f} %"
            )
        spread = [r["spread"] for r in good]
        print(
            f"  attainment of one run against another: {np.median(spread):.1f} points (sigma, median over seeds), largest {max(spread):.1f}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15, sys.argv[2] if len(sys.argv) > 2 else "B")
