"""Figures of a replay, the self-check against the recorded ones, and the bands of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pdtrace._whatif_inputs import Inputs
from pdtrace._whatif_model import Answer, Check
from pdtrace.methods.replay import Played
from pdtrace.methods.statistics import Z95, Bools, Floats
from pdtrace.model import Slo

QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def figures(found: Inputs, played: Played, slo: Slo | None) -> dict[str, float]:
    """Figures of a replay, as the headline observer would have seen them (ms; shares 0 to 1)."""
    ttft = found.lead_s + (played.first_s - found.load.arrival_s) + found.tail_s
    e2e = found.lead_s + (played.end_s - found.load.arrival_s) + found.tail_s
    steps = found.load.output - 1
    tpot = np.where(steps > 0, (played.end_s - played.first_s) / np.maximum(steps, 1), np.nan)
    return _table(ttft, tpot, e2e, found.counted > 0, slo)


def recorded(found: Inputs, slo: Slo | None) -> dict[str, float]:
    """The same figures as they were recorded, over the same requests."""
    return _table(found.ttft_s, found.tpot_s, found.e2e_s, found.counted > 0, slo)


def _table(
    ttft: Floats, tpot: Floats, e2e: Floats, counted: Bools, slo: Slo | None
) -> dict[str, float]:
    table: dict[str, float] = {}
    for name, values in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e)):
        known = values[counted & np.isfinite(values)]
        if len(known):
            table |= {f"{name}_{q}": 1e3 * float(np.quantile(known, at)) for q, at in QUANTILES}
    limits = {k: getattr(slo, f"{k}_ms") for k in ("ttft", "tpot", "e2e")} if slo else {}
    limits = {k: v for k, v in limits.items() if v is not None}
    if limits:
        met = np.ones(int(counted.sum()), bool)
        for name, values in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e)):
            if name not in limits:
                continue
            mine = values[counted]
            single = np.isnan(mine) if name == "tpot" else np.zeros(len(mine), bool)
            within = (np.nan_to_num(mine, nan=np.inf) * 1e3 <= limits[name]) | single
            table[f"attainment_{name}"] = float(within.mean())
            met &= within
        table["attainment_all"] = float(met.mean())
    return table


def check(found: Inputs, base: Mapping[str, float], slo: Slo | None) -> list[Check]:
    """Every figure of the deployment as it ran, recorded and replayed."""
    real = recorded(found, slo)
    return [
        Check(name, unit_of(name), real.get(name), base.get(name))
        for name in dict.fromkeys([*real, *base])
    ]


def unit_of(figure: str) -> str:
    """ms, or 1 for shares."""
    return "1" if figure.startswith("attainment") else "ms"


def answers(
    tables: Sequence[Mapping[str, float]],
    scattered: Sequence[Mapping[str, float]],
    base: Mapping[str, float],
    checks: Sequence[Check],
    origin: str | None,
) -> list[Answer]:
    """Lowest, central and highest of each figure, wider by what chance and the self-check leave open.

    `tables`: the central replay first, then fits and links that the data allow; `scattered`: runs with steps that
    scatter as they did. The central value is the mean of those: a run is one draw of them.
    """
    errors = {c.figure: c.error for c in checks}
    found = []
    for figure, plain in tables[0].items():
        draws = [t[figure] for t in scattered if figure in t]
        central = float(np.mean(draws)) if draws else plain
        chance = Z95 * float(np.std(draws, ddof=1)) if len(draws) > 1 else 0.0
        # what other fits and links change, and what one run differs from another, add as independent errors do
        values = [t[figure] for t in tables if figure in t]
        low = central - np.hypot(plain - min(values), chance)
        high = central + np.hypot(max(values) - plain, chance)
        off = abs(errors.get(figure) or 0.0)
        if unit_of(figure) == "1":
            low, high = max(0.0, low - off), min(1.0, high + off)
        else:
            low, high = max(0.0, low) / (1 + off), high * (1 + off)
        found.append(
            Answer(
                figure, unit_of(figure), origin, float(low), central, float(high), base.get(figure)
            )
        )
    return found
