"""The figures of both sides with their differences: latency, goodput, failures, throughput, phases, findings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from pdtrace._compare_model import Delta
from pdtrace._compare_side import Side
from pdtrace.methods import two_samples
from pdtrace.methods.statistics import Bools, Floats
from pdtrace.methods.two_samples import Difference, Sample
from pdtrace.model import PHASE_DETAILS, Finding, SloPolicy

LATENCIES = ("ttft", "tpot", "itl", "e2e")
# Figures that decide who is better; with failures and goodput they are one family of joint intervals.
JUDGED = ("mean", "p50", "p90")
MANY = 100  # so many values have a 99th percentile
FAMILY = len(LATENCIES) * len(JUDGED) + 1


def deltas(a: Side, b: Side, policy: SloPolicy | None) -> list[Delta]:
    """Every figure of both sides."""
    return [
        *_latency(a, b),
        *_goodput(a, b, policy),
        *_failures(a, b),
        *_throughput(a, b),
        *_phases(a, b),
    ]


def _latency(a: Side, b: Side) -> list[Delta]:
    found = []
    for group in LATENCIES:
        samples = [s.gap_sample() if group == "itl" else s.sample(f"{group}_ms") for s in (a, b)]
        level = _level(a, b, f"{group}_ms")
        note = _emissions(a, b) if group == "itl" else ""
        for statistic, told in two_samples.compare(samples[0], samples[1], FAMILY).items():
            difference = _with_tail(told) if statistic == "p99" else told
            found.append(
                Delta(group, f"{group}_ms", statistic, "ms", difference, level, judged=statistic in JUDGED, note=note)
            )  # fmt: skip
    return found


def _with_tail(told: Difference) -> Difference:
    """A 99th percentile only of a side that has so many values; fewer have none."""
    a, b = told.n_a >= MANY, told.n_b >= MANY
    if (a and b) or (told.a is None and told.b is None):
        return told
    return Difference(
        told.a if a else None, told.b if b else None, told.n_a, told.n_b,
        note=f"fewer than {MANY} values have no 99th percentile to speak of",
    )  # fmt: skip


def _level(a: Side, b: Side, metric: str) -> str | None:
    """The weaker level of the headline rows."""
    levels: list[str] = []
    for side in (a, b):
        rows = [r for r in side.deployment.latency if r["metric"] == metric]
        best = [r for r in rows if r["headline"]] or rows
        levels += [best[0]["level"]] if best else []
    return max(levels) if len(levels) == 2 else None


def _emissions(a: Side, b: Side) -> str:
    kinds = [set(s.gaps["emission"].drop_nulls().to_list()) for s in (a, b)]
    if kinds[0] and kinds[1] and kinds[0] != kinds[1]:
        return f"a gap ends with a {'/'.join(sorted(kinds[0]))} on A and a {'/'.join(sorted(kinds[1]))} on B"
    return ""


def _goodput(a: Side, b: Side, policy: SloPolicy | None) -> list[Delta]:
    if policy is None:
        return []
    met = [s.requests["good"].fill_null(value=False).to_numpy() for s in (a, b)]
    unknown = sum(s.requests["good"].null_count() for s in (a, b))
    left = (
        f"; {unknown:,} requests of unknown outcome or latency count as missed" if unknown else ""
    )
    level = _level(a, b, "ttft_ms")
    share = _share(met[0], met[1])
    counted = [m[s.requests["counted"].to_numpy()] for m, s in zip(met, (a, b), strict=True)]
    return [
        Delta("goodput", "attainment", "share", "1", share, level, False, True, f"of all arrivals (G2){left}"),
        Delta("goodput", "attainment_of_completed", "share", "1", _share(*counted), level, False, False,
              "of completed requests (G2)"),
        Delta("goodput", "goodput", "rate", "requests/s", _rate(a, b, [m.astype(float) for m in met]), level, None,
              False, "good requests per second of the window (G1); follows the load"),
    ]  # fmt: skip


def _share(a: Bools, b: Bools) -> Difference:
    """Difference of shares: the wider of the score interval and of the one that keeps stretches together."""
    score = two_samples.share_difference(int(a.sum()), len(a), int(b.sum()), len(b))
    if score.interval is None or min(len(a), len(b)) < 10:
        return score
    drawn = two_samples.compare(Sample(a.astype(float)), Sample(b.astype(float)), FAMILY)["mean"]
    z = two_samples.normal_quantile(1 - 0.025 / FAMILY)
    joint = two_samples.share_difference(int(a.sum()), len(a), int(b.sum()), len(b), z).interval
    return Difference(
        score.a, score.b, score.n_a, score.n_b, _wider(score.interval, drawn.interval),
        drawn.ratio_interval, _wider(joint, drawn.joint), drawn.note,
    )  # fmt: skip


def _wider(
    one: tuple[float, float] | None, other: tuple[float, float] | None
) -> tuple[float, float] | None:
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])


def _failures(a: Side, b: Side) -> list[Delta]:
    told = [
        s.requests.filter(s.requests["outcome"].is_in(["completed", "failed", "aborted"]))
        for s in (a, b)
    ]
    if not all(t.height for t in told):
        unknown = Difference(None, None, 0, 0, note="outcomes are not known")
        return [Delta("failures", "failed", "share", "1", unknown, None)]
    lost = [t["outcome"].is_in(["failed", "aborted"]).to_numpy() for t in told]
    return [
        Delta(
            "failures",
            "failed",
            "share",
            "1",
            _share(*lost),
            "D",
            True,
            False,
            "failed or aborted, of known outcomes",
        )
    ]


def _throughput(a: Side, b: Side) -> list[Delta]:
    tokens = [s.requests["output_tokens"].cast(float).fill_null(0.0).to_numpy() for s in (a, b)]
    found = [
        Delta("throughput", "requests_per_s", "rate", "requests/s",
              _rate(a, b, [np.ones(s.requests.height) for s in (a, b)]), "C", None,
              note="the offered load where arrivals do not wait for answers")
    ]  # fmt: skip
    if all(s.requests["output_tokens"].null_count() <= 0.1 * s.requests.height for s in (a, b)):
        found.append(
            Delta(
                "throughput",
                "output_tokens_per_s",
                "rate",
                "tokens/s",
                _rate(a, b, tokens),
                "C",
                None,
            )
        )
    return found


def _rate(a: Side, b: Side, amounts: list[Floats]) -> Difference:
    """Amounts per second of each window; its interval from stretches of equal time."""
    parts = []
    for side, amount in zip((a, b), amounts, strict=True):
        window = side.window_s()
        starts = side.requests["start_ns"]
        if window is None or starts.null_count() or not len(amount):
            return Difference(None, None, 0, 0, note="instants are not known")
        place = (starts.to_numpy() - starts.min()) / 1e9
        index = np.minimum((place / window * 40).astype(np.int64), 39)
        parts.append(np.bincount(index, amount, 40) * 40 / window)
    found = two_samples.compare(Sample(parts[0]), Sample(parts[1]))["mean"]
    return Difference(
        found.a,
        found.b,
        len(amounts[0]),
        len(amounts[1]),
        found.interval,
        found.ratio_interval,
        None,
        found.note,
    )


def _phases(a: Side, b: Side) -> list[Delta]:
    """Seconds per counted request in each phase; together they are the whole duration."""
    if a.phases.is_empty() or b.phases.is_empty():
        return []
    sums, bounds = [_phase_values(s) for s in (a, b)], [s.bounds() for s in (a, b)]
    found = []
    for detail, phase in PHASE_DETAILS.items():
        if not any(detail in side for side in sums):
            continue
        samples = [side.get(detail, np.zeros_like(next(iter(side.values())))) for side in sums]
        difference = two_samples.compare(Sample(samples[0]), Sample(samples[1]))["mean"]
        missing = [x for x, side in zip("AB", sums, strict=True) if detail not in side]
        note = f"no time of {missing[0]} falls into it" if missing else ""
        at_most = (detail in bounds[0], detail in bounds[1])
        if any(at_most):
            note = "; ".join(x for x in (note, _of_bounds(at_most)) if x)
            difference = replace(difference, interval=None, ratio_interval=None, joint=None)
        found.append(
            Delta("phase", f"{phase}/{detail}", "mean", "s", difference, None, None, note=note, at_most=at_most)
        )  # fmt: skip
    return found


def _of_bounds(at_most: tuple[bool, bool]) -> str:
    """What a difference says where a side's value is an upper bound."""
    if all(at_most):
        return "upper bounds on both sides: how the times themselves differ is not known"
    return f"an upper bound on {'A' if at_most[0] else 'B'}: the difference is {'at least' if at_most[0] else 'at most'} this"


def _phase_values(side: Side) -> dict[str, Floats]:
    """Seconds of each request in each detail, in order of arrival; 0 where it spent none."""
    import polars as pl

    order = side.counted().select("request")
    known = order.join(side.phases.select("request").unique(), on="request", maintain_order="left")
    found = {}
    for (detail,), rows in side.phases.group_by("detail"):
        values = known.join(
            rows.select("request", "duration_ms"), on="request", how="left", maintain_order="left"
        )
        found[str(detail)] = (
            values.select(pl.col("duration_ms").fill_null(0.0) / 1e3).to_series().to_numpy()
        )
    return found


def findings(a: Side, b: Side) -> list[dict[str, Any]]:
    """Findings of both sides by id: which appear, which vanish, which change."""
    sides = [_numbered(s) for s in (a, b)]
    rows: list[dict[str, Any]] = []
    for name, place in sorted(sides[0].keys() | sides[1].keys()):
        first, second = sides[0].get((name, place)), sides[1].get((name, place))
        change = "appears" if first is None else "vanishes" if second is None else "on both"
        both = [f for f in (first, second) if f is not None]
        rows.append(
            {
                "id": name, "change": change, "level": max(f.level for f in both),
                **{f"{key}_{side}": None if f is None else getattr(f, key)
                   for side, f in (("a", first), ("b", second)) for key in ("severity", "title", "value", "cost_s")},
                "unit": both[0].unit,
            }
        )  # fmt: skip
    order = ("appears", "vanishes", "on both")
    return sorted(rows, key=lambda r: (order.index(r["change"]), r["id"]))


def _numbered(side: Side) -> dict[tuple[str, int], Finding]:
    """Findings by id and by their place among those of the same id (one per group of workers)."""
    seen: Counter[str] = Counter()
    found = {}
    for finding in side.deployment.findings:
        found[finding.id, seen[finding.id]] = finding
        seen[finding.id] += 1
    return found
