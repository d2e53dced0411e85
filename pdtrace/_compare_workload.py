"""The workload of two sides: lengths, arrivals, load, cache hits, failures, warm-up, duration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdtrace import numbers
from pdtrace._compare_model import Condition, Kind, Status, condition
from pdtrace._compare_side import Side
from pdtrace.methods import two_samples
from pdtrace.methods.statistics import Floats

SPREAD = 10  # below so many values the error of their mean is not known
FEW = 30  # below so many values "no difference found" says nothing
SURE = 0.01  # chance below which distributions are held to differ
DISTANCE = 0.05  # distance of two distributions below which a difference does not matter
MEAN = 0.10  # relative difference of the means above which it does
RATE = 0.10  # likewise of arrival rates
BURSTS = 1.25  # ratio of the variations of two arrival processes that is held to differ
HITS = 0.02  # difference of cache-hit shares that does not matter
ALIKE_SHARE = (
    0.05  # shares of failed requests this near are alike where chance may make the difference
)
LONGER = 1.25  # ratio of durations that does not matter


def conditions(a: Side, b: Side) -> list[Condition]:
    """Every condition of the workload."""
    return [
        *lengths(a, b), arrivals(a, b), load(a, b), cached_accounting(a, b), cache_hits(a, b), failed(a, b),
        warm_up(a, b), duration(a, b),
    ]  # fmt: skip


def _condition(
    key: str, name: str, status: Status, values: Sequence[str | None], note: str = ""
) -> Condition:
    kind: Kind = "measure" if key in {"failed", "warm_up", "duration"} else "workload"
    return condition(key, name, kind, values, status=status, note=note)


def lengths(a: Side, b: Side) -> list[Condition]:
    """Whether prompts and answers have the same lengths: a two-sample test and the quantiles."""
    found = []
    for column, name in (("prompt_tokens", "prompt lengths"), ("output_tokens", "output lengths")):
        values = [_values(side, column) for side in (a, b)]
        status, note = _same_lengths(*values)
        found.append(_condition(column, name, status, [_quantiles(v) for v in values], note))
    return found


def _values(side: Side, column: str) -> Floats:
    values: Floats = side.requests[column].drop_nulls().cast(float).to_numpy()
    return values


def _quantiles(values: Floats) -> str | None:
    if not len(values):
        return None
    low, high = np.quantile(values, [0.5, 0.99])
    return f"mean {values.mean():,.0f}, p50 {low:,.0f}, p99 {high:,.0f} ({len(values):,})"


def _same_lengths(a: Floats, b: Floats) -> tuple[Status, str]:
    if not len(a) or not len(b):
        return "unknown", ""
    if len(a) == len(b) and np.array_equal(np.sort(a), np.sort(b)):
        return "same", "the same lengths, one by one"
    distance, chance = two_samples.kolmogorov_smirnov(a, b)
    mean = b.mean() / a.mean() - 1 if a.mean() > 0 else float("inf")
    error = np.hypot(a.std() / np.sqrt(len(a)), b.std() / np.sqrt(len(b)))
    sure_mean = (
        abs(b.mean() - a.mean()) > 2.58 * error
        and abs(mean) > MEAN
        and min(len(a), len(b)) >= SPREAD
    )
    note = f"Kolmogorov-Smirnov distance {distance:.2f}, p {_chance(chance)}"
    if (chance < SURE and distance > DISTANCE) or sure_mean:
        return "different", note
    if min(len(a), len(b)) < FEW:
        return "unknown", "too few requests to tell"
    return "same", note


def _chance(chance: float) -> str:
    return "< 0.001" if chance < 0.001 else f"{chance:.3f}"


def _rates(side: Side) -> tuple[float | None, float | None]:
    """Arrivals a second, and their burstiness: variation of the gaps between arrivals (1 for Poisson)."""
    instants = side.arrivals_s()
    if len(instants) < 3 or instants[-1] <= 0:
        return None, None
    gaps = np.diff(instants)
    return (len(instants) - 1) / float(instants[-1]), float(gaps.std() / gaps.mean())


def arrivals(a: Side, b: Side) -> Condition:
    """Whether requests came as regularly, or in bursts as strong."""
    asked = [side.fact("burstiness", client=True) for side in (a, b)]
    found = [_rates(side)[1] for side in (a, b)]
    texts = [
        None if cv is None else f"variation of gaps {cv:.2f}" + (f", burstiness set {'/'.join(s)}" if s else "")
        for cv, s in zip(found, asked, strict=True)
    ]  # fmt: skip
    name = "arrival process"
    if all(asked):
        return _condition("arrivals", name, "same" if asked[0] == asked[1] else "different",
                          [t or f"burstiness set {'/'.join(s)}" for t, s in zip(texts, asked, strict=True)])  # fmt: skip
    if found[0] is None or found[1] is None:
        return _condition("arrivals", name, "unknown", texts)
    few = min(a.requests.height, b.requests.height) < FEW
    low, high = sorted(found)  # type: ignore[type-var]
    ratio = high / low if low else float("inf") if high else 1.0  # type: ignore[operator]
    noise = 1 + 4 / np.sqrt(min(a.requests.height, b.requests.height))
    status: Status = (
        "different" if ratio > max(BURSTS, noise) and not few else "unknown" if few else "same"
    )
    return _condition("arrivals", name, status, texts, "too few requests to tell" if few else "")


def load(a: Side, b: Side) -> Condition:
    """Whether the offered load was the same: the rate of an open loop, the concurrency of a closed one."""
    asked = [_asked(side) for side in (a, b)]
    measured = [_rates(side)[0] for side in (a, b)]
    texts = [
        "; ".join([t for t in (s, None if r is None else f"{r:.3g} req/s seen") if t]) or None
        for s, r in zip(asked, measured, strict=True)
    ]
    name = "load (rate or concurrency)"
    if all(asked):
        same = asked[0] == asked[1]
        return _condition("load", name, "same" if same else "different", texts)
    if measured[0] is None or measured[1] is None:
        return _condition("load", name, "unknown", texts)
    n = min(a.requests.height, b.requests.height)
    ratio = measured[1] / measured[0]
    noise = 2.58 * np.sqrt(
        sum((_rates(side)[1] or 1.0) ** 2 / side.requests.height for side in (a, b))
    )
    if n < FEW:
        return _condition("load", name, "unknown", texts, "too few requests to tell")
    status: Status = "different" if abs(np.log(ratio)) > max(np.log1p(RATE), noise) else "same"
    note = (
        f"rates within {numbers.share(abs(ratio - 1))}; a closed loop would follow latency instead"
    )
    return _condition("load", name, status, texts, note if status == "same" else "")


def _asked(side: Side) -> str | None:
    """What the load generator was told: a concurrency closes the loop, then the rate follows from latency."""
    limit = side.fact("max_concurrency", client=True)
    rate = side.fact("request_rate", client=True)
    parts = [f"concurrency {'/'.join(limit)}"] if limit else []
    parts += [f"rate set {'/'.join(rate)} req/s"] if rate and rate != ("inf",) else []
    if rate == ("inf",) and not limit:
        parts = ["all at once"]
    return ", ".join(parts) or None


def cached_accounting(a: Side, b: Side) -> Condition:
    """Whether both sides say how many prompt tokens came from a cache."""
    shares = [
        float(side.requests["cached_tokens"].is_not_null().mean() or 0.0)  # type: ignore[arg-type]
        for side in (a, b)
    ]
    texts = [f"known for {numbers.share(s)} of requests" if s else None for s in shares]
    if min(shares) >= 0.9:
        return _condition("cached_accounting", "cached-token accounting", "same", texts)
    lone = (min(shares) == 0) != (max(shares) == 0)
    return _condition("cached_accounting", "cached-token accounting", "different" if lone else "unknown", texts)  # fmt: skip


def cache_hits(a: Side, b: Side) -> Condition:
    """Share of prompt tokens that came from a cache."""
    shares: list[float | None] = []
    for side in (a, b):
        rows = side.requests.select("cached_tokens", "prompt_tokens").drop_nulls()
        enough = rows.height >= 0.9 * side.requests.height and rows["prompt_tokens"].sum() > 0
        off = side.fact("prefix_caching") == ("False",)
        hit = (
            float(rows["cached_tokens"].sum()) / float(rows["prompt_tokens"].sum())
            if enough
            else None
        )
        shares.append(0.0 if hit is None and off else hit)
    texts = [None if s is None else f"{numbers.share(s)} of prompt tokens" for s in shares]
    if shares[0] is None or shares[1] is None:
        return _condition("cache_hits", "cache hits", "unknown", texts)
    same = abs(shares[0] - shares[1]) <= HITS
    return _condition("cache_hits", "cache hits", "same" if same else "different", texts)


ALIKE_SHARE = (
    0.05  # shares of failed requests this near are alike where chance may make the difference
)


def failed(a: Side, b: Side) -> Condition:
    """Share of requests that failed: those that are left out of latency may be the slow ones."""
    counts = [side.deployment.requests for side in (a, b)]
    lost = [c["failed"] + c["aborted"] for c in counts]
    told = [c["count"] - c["unknown"] for c in counts]
    texts = [
        f"{n:,} of {c['count']:,}" if t >= 0.9 * c["count"] else None
        for n, c, t in zip(lost, counts, told, strict=True)
    ]
    name = "failed and aborted requests"
    if None in texts:
        return _condition("failed", name, "unknown", texts, "outcomes are not known")
    found = two_samples.share_difference(lost[0], told[0], lost[1], told[1])
    low, high = found.interval or (0.0, 0.0)
    if low > 0 or high < 0:
        return _condition("failed", name, "different", texts)
    apart = abs(lost[0] / max(told[0], 1) - lost[1] / max(told[1], 1))
    if apart > ALIKE_SHARE:  # far apart, and so few that it may be chance: that is not alike
        return _condition("failed", name, "unknown", texts, "too few requests to tell")
    return _condition("failed", name, "same", texts)


def warm_up(a: Side, b: Side) -> Condition:
    """Whether the first requests were slower than the rest."""
    texts: list[str | None] = []
    verdicts = []
    for side in (a, b):
        first, ratio, seen = two_samples.slow_start(side.sample("ttft_ms").values)
        verdicts.append(seen)
        if seen is None:
            texts.append(None)
        elif seen:
            texts.append(f"seen: TTFT of the first {first} requests {ratio:.1f} x that of the rest")
        else:
            texts.append("none seen")
    if None in verdicts:
        return _condition("warm_up", "warm-up", "unknown", texts, "too few requests to tell")
    note = "it is in the figures; leave it out with --since" if any(verdicts) else ""
    status: Status = "same" if verdicts[0] == verdicts[1] else "different"
    return _condition("warm_up", "warm-up", status, texts, note)


def duration(a: Side, b: Side) -> Condition:
    """How long each side ran, and over how many requests."""
    windows = [side.window_s() for side in (a, b)]
    counts = [side.requests.height for side in (a, b)]
    texts = [None if w is None else f"{numbers.seconds(w)}, {numbers.plural(n, 'request')}"
             for w, n in zip(windows, counts, strict=True)]  # fmt: skip
    if windows[0] is None or windows[1] is None:
        return _condition("duration", "duration", "unknown", texts)
    alike = [max(pair) <= LONGER * min(pair) for pair in (windows, counts)]  # type: ignore[type-var, operator]
    return _condition("duration", "duration", "same" if any(alike) else "different", texts)
