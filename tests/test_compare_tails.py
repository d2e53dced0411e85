"""A 99th percentile is compared only where both sides have one."""

from __future__ import annotations

import pytest

from pdtrace._compare_deltas import _with_tail
from pdtrace.methods.two_samples import Difference


@pytest.mark.parametrize(
    ("n_a", "n_b", "shown"),
    [(3, 2, (None, None)), (100, 99, (9.0, None)), (100, 100, (9.0, 7.0))],
)
def test_few_values_have_no_99th_percentile(
    n_a: int, n_b: int, shown: tuple[float | None, float | None]
) -> None:
    tail = _with_tail(Difference(9.0, 7.0, n_a, n_b, interval=(-3.0, -1.0)))
    assert (tail.a, tail.b) == shown
    assert (tail.interval is None) == (None in shown) and bool(tail.note) == (None in shown)
