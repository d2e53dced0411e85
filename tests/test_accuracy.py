"""The accuracy bench: a figure is judged against its goal, and a run through all levels gives rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (ROOT / "bench").is_dir():
        pytest.skip("the tests run away from the checkout")
    monkeypatch.syspath_prepend(str(ROOT))


def test_a_goal_is_missed_below_its_least_above_its_most_and_without_a_figure() -> None:
    from bench.accuracy import Goal

    assert Goal("A", "recall", 0.98, 9, least=0.99).missed
    assert not Goal("A", "recall", 0.99, 9, least=0.99).missed
    assert Goal("A", "error", 0.02, 9, most=0.01).missed
    assert Goal("A", "error", None, 0, most=0.01).missed
    assert not Goal("A", "only shown", None, 0).missed


def test_a_positive_is_flagged_and_a_null_is_not_at_levels_a_and_b(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bench.judged import judge

    monkeypatch.setattr("pdtrace.simulator.run.DURATION_S", 40.0)
    found = {
        (r["level"], r["kind"]): r for name in ("exclusive", "null_plain") for r in judge(name, 0)
    }
    for level in ("A", "A log lines", "B"):
        assert found[level, "positive"]["flagged"] is True
        assert not found[level, "null"]["flagged"]
        true = found[level, "positive"]["true_s"]
        assert found[level, "positive"]["lost_s"] == pytest.approx(true, rel=0.05)
    assert {level for level, _ in found} == {"A", "A log lines", "B", "C"}


def test_the_bench_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.accuracy", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--check" in done.stdout
