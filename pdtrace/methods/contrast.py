"""What sets one group of requests apart: attributes tested, measured, corrected, and told from their proxies.

Test: Pearson's chi-square of attribute by group, its p value by drawing the group anew among all
requests (Monte Carlo with fixed margins, Hope 1968: valid for any counts, however small).
Several attributes: Holm 1979, so that with no difference at all the chance that any attribute is
named is at most ALPHA. Size: Cramér's V, bias-corrected (Bergsma 2013). Each value: difference of
shares with Newcombe's hybrid score interval (Newcombe 1998, method 10).
Proxies: the same test inside the strata of another attribute (Mantel & Haenszel 1959, Birch 1965,
drawn inside each stratum): an attribute that adds nothing once another is held equal, while that
other still does, is its proxy; where neither adds anything, the data cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pdtrace.methods.statistics import SEED, Bools, Floats, wilson_interval
from pdtrace.records import dataclass

Ints = NDArray[np.int64]
ALPHA = 0.05  # chance of naming any attribute when nothing differs
DRAWS = 9_999  # smallest p value 0.0001
STRATUM_DRAWS = 1_999
STILL, GONE = 0.01, 0.05  # p inside strata: it still differs below, nothing is left of it above
RARE = 5  # values of fewer requests go together
MOST_VALUES = 40
CHECKED = 10  # so many attributes that differ are checked against each other
NEEDED = 8  # requests that each group needs


@dataclass(frozen=True)
class Value:
    """One value of an attribute: its requests in the group and in all, against all other values."""

    value: str
    selected: int
    requests: int
    share: float  # of its requests, those in the group
    share_low: float  # Wilson
    share_high: float
    share_of_others: float | None
    difference: float | None  # share - share of the others
    low: float | None
    high: float | None
    lift: float | None  # share / share among all


@dataclass(frozen=True)
class Attribute:
    """One attribute: whether the groups differ in it, how much, and what else explains it."""

    name: str
    known: int
    selected: int
    p: float
    p_adjusted: float
    association: float
    values: tuple[Value, ...]
    proxy_of: str | None = None
    not_told_from: tuple[str, ...] = ()

    @property
    def stands_out(self) -> bool:
        """Whether the groups differ in it, all attributes tried considered."""
        return self.p_adjusted <= ALPHA


@dataclass(frozen=True)
class Levels:
    """One attribute of all requests: the number of its value, -1 unknown; finer numbers to hold it equal."""

    codes: Ints
    names: tuple[str, ...]
    strata: Ints
    symptom: bool = False  # a part of being slow: shown, no explanation of others


def contrast(group: Bools, attributes: Mapping[str, Levels]) -> tuple[Attribute, ...]:
    """All attributes, those that stand out and are no proxies first, the greatest association first."""
    random = np.random.default_rng(SEED)
    tested = [_tested(name, group, levels, random) for name, levels in attributes.items()]
    adjusted = holm([a.p for a in tested])
    tested = [replace(a, p_adjusted=p) for a, p in zip(tested, adjusted, strict=True)]
    tested.sort(key=lambda a: (not a.stands_out, -a.association, a.p, a.name))
    checked = _without_proxies(group, tested, attributes, random)
    return tuple(sorted(checked, key=lambda a: (not a.stands_out, a.proxy_of is not None)))


def _tested(name: str, group: Bools, levels: Levels, random: np.random.Generator) -> Attribute:
    known = levels.codes >= 0
    totals, inside = _counts(levels.codes[known], group[known], len(levels.names))
    p = chance(totals, inside, random)
    return Attribute(
        name, int(known.sum()), int(inside.sum()), p, p, cramers_v(totals, inside),
        _values(levels.names, totals, inside),
    )  # fmt: skip


def _counts(codes: Ints, group: Bools, size: int) -> tuple[Ints, Ints]:
    totals = np.bincount(codes, minlength=size)
    inside = np.bincount(codes[group], minlength=size)
    return totals.astype(np.int64), inside.astype(np.int64)


def chance(totals: Ints, inside: Ints, random: np.random.Generator, draws: int = DRAWS) -> float:
    """How often a group of that size, drawn at random, differs as much: Monte Carlo p value of chi-square."""
    filled = totals > 0
    totals, inside = totals[filled], inside[filled]
    n, chosen = int(totals.sum()), int(inside.sum())
    if len(totals) < 2 or chosen in (0, n):
        return 1.0
    drawn = random.multivariate_hypergeometric(totals, chosen, size=draws, method="marginals")
    expected = totals * (chosen / n)
    seen = float(((inside - expected) ** 2 / totals).sum())
    found = ((drawn - expected) ** 2 / totals).sum(axis=1)
    return float((1 + np.count_nonzero(found >= seen * (1 - 1e-9))) / (draws + 1))


def chance_within(
    codes: Ints, strata: Ints, group: Bools, random: np.random.Generator
) -> float | None:
    """The p value of an attribute with another held equal; None where no stratum has both."""
    known = (codes >= 0) & (strata >= 0)
    codes, strata, group = codes[known], strata[known], group[known]
    if not len(codes):
        return None
    k, m = int(codes.max()) + 1, int(strata.max()) + 1
    totals = np.bincount(strata * k + codes, minlength=k * m).reshape(m, k)
    inside = np.bincount((strata * k + codes)[group], minlength=k * m).reshape(m, k)
    n, chosen = totals.sum(axis=1), inside.sum(axis=1)
    # Only strata with several values and both groups say anything.
    telling = (n > 1) & (chosen > 0) & (chosen < n) & ((totals > 0).sum(axis=1) > 1)
    if not telling.any():
        return None
    totals, inside, n, chosen = totals[telling], inside[telling], n[telling], chosen[telling]
    share = (chosen / n)[:, None]
    expected = (totals * share).sum(axis=0)
    spread = totals * (1 - totals / n[:, None]) * share * (1 - share) * (n / (n - 1))[:, None]
    variance = spread.sum(axis=0)
    drawn = np.zeros((STRATUM_DRAWS, k))
    for row, count in zip(totals, chosen, strict=True):
        drawn += random.multivariate_hypergeometric(row, int(count), size=STRATUM_DRAWS, method="marginals")  # fmt: skip
    varies = variance > 0
    seen = float(((inside.sum(axis=0) - expected)[varies] ** 2 / variance[varies]).sum())
    found = ((drawn - expected)[:, varies] ** 2 / variance[varies]).sum(axis=1)
    return float((1 + np.count_nonzero(found >= seen * (1 - 1e-9))) / (STRATUM_DRAWS + 1))


def _without_proxies(
    group: Bools,
    tested: list[Attribute],
    attributes: Mapping[str, Levels],
    random: np.random.Generator,
) -> list[Attribute]:
    """What each attribute that stands out is a proxy of, or cannot be told from."""
    causes = [a.name for a in tested if a.stands_out and not attributes[a.name].symptom][:CHECKED]
    within = {
        (a, b): chance_within(attributes[a].codes, attributes[b].strata, group, random)
        for a in causes
        for b in causes
        if a != b
    }

    def gone(a: str, b: str) -> bool:
        p = within[a, b]
        return p is None or p >= GONE

    def still(a: str, b: str) -> bool:
        p = within[a, b]
        return p is not None and p < STILL

    done = []
    for attribute in tested:
        if attribute.name in causes:
            others = [b for b in causes if b != attribute.name and gone(attribute.name, b)]
            real = [b for b in others if still(b, attribute.name)]
            open_ = tuple(b for b in others if gone(b, attribute.name))
            attribute = replace(attribute, proxy_of=real[0] if real else None, not_told_from=open_)
        done.append(attribute)
    return done


def cramers_v(totals: Ints, inside: Ints) -> float:
    """Bias-corrected Cramér's V of attribute by group, 0 to 1 (Bergsma 2013)."""
    filled = totals > 0
    totals, inside = totals[filled], inside[filled]
    n, chosen = int(totals.sum()), int(inside.sum())
    if len(totals) < 2 or chosen in (0, n):
        return 0.0
    share = chosen / n
    phi2 = float(((inside - totals * share) ** 2 / totals).sum()) / (share * (1 - share)) / n
    k = len(totals)
    corrected = max(0.0, phi2 - (k - 1) / (n - 1))
    rows, columns = k - (k - 1) ** 2 / (n - 1), 2 - 1 / (n - 1)
    smallest = min(rows, columns) - 1
    return min(1.0, float(np.sqrt(corrected / smallest))) if smallest > 0 else 0.0


def newcombe(hits: int, n: int, other_hits: int, others: int) -> tuple[float, float]:
    """95 % interval of the difference of two shares (Newcombe 1998, method 10)."""
    a, b = hits / n, other_hits / others
    (a_low, a_high), (b_low, b_high) = wilson_interval(hits, n), wilson_interval(other_hits, others)
    difference = a - b
    low = difference - float(np.hypot(a - a_low, b_high - b))
    high = difference + float(np.hypot(a_high - a, b - b_low))
    return low, high


def holm(p: list[float]) -> list[float]:
    """Step-down adjusted p values (Holm 1979)."""
    values = np.asarray(p, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    scaled = np.minimum(1.0, (len(p) - np.arange(len(p))) * values[order])
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(scaled)
    return [float(v) for v in adjusted]


def _values(names: tuple[str, ...], totals: Ints, inside: Ints) -> tuple[Value, ...]:
    n, chosen = int(totals.sum()), int(inside.sum())
    found = []
    for name, total, hits in zip(names, totals.tolist(), inside.tolist(), strict=True):
        if not total:
            continue
        share, others = hits / total, n - total
        share_low, share_high = wilson_interval(hits, total)
        low, high = newcombe(hits, total, chosen - hits, others) if others else (None, None)
        rest = (chosen - hits) / others if others else None
        found.append(Value(
            name, hits, total, share, share_low, share_high, rest, None if rest is None else share - rest, low, high,
            share / (chosen / n) if chosen else None,
        ))  # fmt: skip
    return tuple(found)


def by_value(values: pl.Series, *, symptom: bool = False) -> Levels:
    """Levels of texts; rare values go together."""
    counts = values.drop_nulls().value_counts(name="requests").sort(
        "requests", values.name, descending=[True, False]
    )  # fmt: skip
    kept = counts.filter(pl.col("requests") >= RARE).head(MOST_VALUES)[values.name].to_list()
    rare = counts.height - len(kept)
    codes = values.replace_strict(
        {name: place for place, name in enumerate(kept)}, default=len(kept), return_dtype=pl.Int64
    )
    placed = codes.set(values.is_null(), -1).to_numpy().astype(np.int64)
    last = [counts[values.name][-1] if rare == 1 else f"{rare} others"] if rare else []
    return Levels(placed, (*kept, *last), placed, symptom)


def by_band(values: Floats, cuts: Floats, fine: Floats, names: list[str]) -> Levels:
    """Levels of numbers (NaN unknown) by the lower ends of bands; `fine` are the narrower ones of the strata."""
    unknown = np.isnan(values)
    codes = np.searchsorted(cuts, values, side="right").astype(np.int64) - 1
    strata = np.searchsorted(fine, values, side="right").astype(np.int64)
    codes[unknown] = -1
    strata[unknown] = -1
    return Levels(codes, tuple(names), strata)
