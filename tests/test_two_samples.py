"""Two samples: planted differences are found, their absence is too, and memory in a run widens the interval."""

from __future__ import annotations

import numpy as np
import pytest

from pdtrace.methods import two_samples
from pdtrace.methods.two_samples import Sample


def waits(n: int, load: float, seed: int) -> np.ndarray:
    """Sojourn times of a queue with one server: values that depend on each other."""
    random = np.random.default_rng(seed)
    gaps, work = random.exponential(1, n), random.lognormal(0, 1, n) * load / np.exp(0.5)
    wait = np.zeros(n)
    for i in range(1, n):
        wait[i] = max(0.0, wait[i - 1] + work[i - 1] - gaps[i])
    return wait + work


def test_the_same_values_differ_by_nothing() -> None:
    values = np.arange(1.0, 201.0)
    found = two_samples.compare(Sample(values), Sample(values))
    for name in ("mean", "p50", "p90"):
        assert found[name].difference == 0
        low, high = found[name].interval  # type: ignore[misc]
        assert low < 0 < high
        assert found[name].ratio == 1


def test_a_planted_difference_is_found_with_its_size() -> None:
    random = np.random.default_rng(1)
    a, b = random.exponential(100, 600), 50 + random.exponential(100, 600)
    found = two_samples.compare(Sample(a), Sample(b), family=13)["mean"]
    assert found.difference == pytest.approx(b.mean() - a.mean())
    low, high = found.joint  # type: ignore[misc]
    assert 0 < low < 50 < high


def test_over_100_pairs_without_a_difference_few_are_called_different() -> None:
    """Joint intervals of one family: at most 5 in 100 runs; a queue whose values remember is no exception."""
    wrong = single = 0
    for seed in range(100):
        a, b = waits(400, 0.6, 2 * seed), waits(400, 0.6, 2 * seed + 1)
        found = two_samples.compare(Sample(a), Sample(b), family=3)
        judged = [found[name] for name in ("mean", "p50", "p90")]
        wrong += any(d.joint is not None and not d.joint[0] <= 0 <= d.joint[1] for d in judged)
        single += not judged[1].interval[0] <= 0 <= judged[1].interval[1]  # type: ignore[index]
    assert wrong <= 5
    assert single <= 10  # 5 expected; more than 10 has a chance of 1 in 100


def test_memory_widens_the_interval() -> None:
    remembered = np.repeat(np.random.default_rng(2).normal(100, 10, 40), 10)
    shuffled = np.random.default_rng(3).permutation(remembered)
    length, _ = two_samples.block_length(remembered)
    assert length >= 10
    wide, narrow = (
        two_samples.compare(Sample(v), Sample(v))["mean"].interval for v in (remembered, shuffled)
    )
    assert wide is not None
    assert narrow is not None
    assert wide[1] - wide[0] > 2 * (narrow[1] - narrow[0])


def test_a_run_shorter_than_its_memory_says_so() -> None:
    drift = np.linspace(100, 200, 60)
    found = two_samples.compare(Sample(drift), Sample(drift))["mean"]
    assert "may still be too narrow" in found.note


def test_few_values_have_no_interval() -> None:
    found = two_samples.compare(Sample(np.arange(1.0, 9.0)), Sample(np.arange(1.0, 200.0)))
    assert found["mean"].interval is None
    assert found["mean"].difference is not None
    many = two_samples.compare(Sample(np.arange(1.0, 200.0)), Sample(np.arange(1.0, 200.0)))
    assert many["p99"].interval is None  # two values beyond it
    assert many["p99"].note == "too few requests for an interval"


def test_no_values_are_unknown_not_zero() -> None:
    found = two_samples.compare(Sample(np.empty(0)), Sample(np.ones(20)))["mean"]
    assert (found.a, found.b, found.difference, found.ratio) == (None, 1.0, None, None)
    assert found.note == "unknown on A"


def test_equal_values_and_zeros_give_no_warning() -> None:
    found = two_samples.compare(Sample(np.zeros(50)), Sample(np.ones(50)))["p50"]
    assert found.interval == (1.0, 1.0)
    assert found.ratio is None


@pytest.mark.parametrize("n", [5000, 9000])
def test_bins_give_what_sorting_gives(n: int) -> None:
    values = np.random.default_rng(4).lognormal(0, 1, n)
    found = two_samples.compare(Sample(values), Sample(values))["p90"]
    low, high = found.interval  # type: ignore[misc]
    density = 0.1755 / np.exp(1.2816)  # of the lognormal at its 90th percentile
    expected = 1.96 * np.sqrt(2 * 0.09 / n) / density
    assert high - low == pytest.approx(2 * expected, rel=0.35)


def test_gaps_of_a_request_stay_together() -> None:
    """Ten requests with a pace of their own: as many values as one likes tell no more than ten."""
    paces = np.array([5.0, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16])
    values, unit = np.repeat(paces, 100), np.repeat(np.arange(12.0), 100)
    together = two_samples.compare(Sample(values, unit), Sample(values, unit))["mean"].interval
    assert together is not None
    assert together[1] - together[0] > 2 * 1.96 * paces.std() / np.sqrt(12)


def test_kolmogorov_smirnov_by_hand() -> None:
    distance, chance = two_samples.kolmogorov_smirnov(np.arange(4.0), np.arange(4.0) + 2)
    assert distance == 0.5
    assert chance > 0.5
    distance, chance = two_samples.kolmogorov_smirnov(np.arange(100.0), np.arange(100.0) + 100)
    assert distance == 1
    assert chance < 1e-9
    assert two_samples.kolmogorov_smirnov(np.ones(9), np.ones(9)) == (0.0, 1.0)


def test_newcombe_by_its_paper() -> None:
    """Newcombe 1998, table II (a): 56/70 against 48/80 by method 10: 0.0524 to 0.3339."""
    found = two_samples.share_difference(48, 80, 56, 70)
    assert found.difference == pytest.approx(0.2)
    assert found.interval == pytest.approx((0.0524, 0.3339), abs=1e-4)
    assert two_samples.share_difference(0, 10, 0, 10).interval[1] > 0.2  # type: ignore[index]


def test_a_slow_start_is_seen() -> None:
    random = np.random.default_rng(5)
    even = random.normal(100, 5, 300)
    slow = even.copy()
    slow[:30] *= 3
    assert two_samples.slow_start(even)[2] is False
    first, ratio, seen = two_samples.slow_start(slow)
    assert (first, seen) == (30, True)
    assert ratio == pytest.approx(3, rel=0.05)
    assert two_samples.slow_start(even[:20])[2] is None
    assert two_samples.slow_start(np.full(100, 7.0))[2] is False
