"""What a step costs, from the engine's own steps: hand-made steps with known costs; and steps that scatter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from pdtrace._whatif_figures import answers
from pdtrace._whatif_model import Check
from pdtrace._whatif_words import why_it_misses
from pdtrace.methods.replay import Cost, Load, Noise, Plan, replay
from pdtrace.methods.step_cost import Fitted, fixed_part
from pdtrace.methods.step_cost_steps import fit

NO_GAPS = np.empty((0, 4))
DECODE, MIXED, ALONE = (0.010, 1e-4, 1e-7), 0.002, 0.006
TOKEN, SQUARE = 5e-5, 1e-9


def steps(*, mixed: int = 200, alone: int = 60, split: bool = False) -> pl.DataFrame:
    """Steps that cost exactly what they should."""
    random = np.random.default_rng(1)
    rows = []
    for n in range(600):
        batch, context = int(random.integers(1, 40)), int(random.integers(100, 40_000))
        seconds = DECODE[0] + DECODE[1] * batch + DECODE[2] * context
        rows.append((n, seconds, 0, 0, 0, batch, context))
    for n in range(600, 600 + mixed + alone):
        is_mixed = n < 600 + mixed
        batch = int(random.integers(1, 40)) if is_mixed else 0
        context = int(random.integers(100, 40_000)) if is_mixed else 0
        tokens, before = int(random.integers(16, 2000)), int(random.integers(0, 4000))
        fixed = DECODE[0] + DECODE[1] * batch + DECODE[2] * context + MIXED if is_mixed else ALONE
        seconds = fixed + TOKEN * tokens + SQUARE * tokens * (tokens + 2 * before)
        rows.append((n, seconds, 1, tokens, before, batch, context))
    names = ["seq", "elapsed_s", "prefill_requests", "prefill_tokens", "prefill_kv_tokens",
             "decode_requests", "decode_kv_tokens"]  # fmt: skip
    frame = pl.DataFrame(rows, schema=names, orient="row")
    return frame.with_columns(worker=pl.lit("w"), rank=pl.lit(None, pl.String))


def fitted(frame: pl.DataFrame, *, split: bool = False, gaps: np.ndarray = NO_GAPS) -> Fitted:
    found = fit(frame, gaps, None, split=split)
    assert not isinstance(found, str), found
    return found


def test_mixed_steps_give_back_what_they_cost() -> None:
    found = fitted(steps())
    assert found.level == "A"
    assert found.cost.decode == pytest.approx(DECODE, rel=1e-3)
    assert found.cost.mixed == pytest.approx(MIXED, rel=1e-2)
    assert found.cost.prefill == pytest.approx((ALONE, TOKEN, SQUARE), rel=1e-2)
    assert found.alone_rows == 60
    frame = steps()
    assert found.chunk_tokens == (frame["prefill_tokens"] + frame["decode_requests"]).max()


def test_prompts_in_steps_of_their_own_do_too() -> None:
    found = fitted(steps(mixed=0), split=True)
    assert (found.chunk_tokens, found.cost.mixed) == (None, 0.0)
    assert found.cost.prefill == pytest.approx((ALONE, TOKEN, SQUARE), rel=1e-2)


def test_a_prompt_only_step_that_was_never_seen_is_said() -> None:
    found = fitted(steps(alone=0))
    assert found.alone_rows == 0
    assert found.cost.prefill[0] == pytest.approx(DECODE[0] + MIXED, rel=1e-2)


def test_a_few_steps_alone_tell_their_fixed_part_if_they_agree() -> None:
    found = fitted(steps(alone=3))
    assert found.alone_rows == 3
    assert found.cost.prefill[0] == pytest.approx(ALONE, rel=1e-2)
    assert found.fixed_range is not None
    assert found.fixed_range[0] <= ALONE * 1.01 and found.fixed_range[1] >= ALONE * 0.99
    first = pl.col("seq") == pl.col("seq").max()  # one of them pays for starting up
    slow = steps(alone=3).with_columns(
        elapsed_s=pl.col("elapsed_s") + pl.when(first).then(2.0).otherwise(0.0)
    )
    found = fitted(slow)
    assert found.alone_rows == 0
    assert found.fixed_range == pytest.approx(
        (0.4 * (DECODE[0] + MIXED), DECODE[0] + MIXED), rel=1e-2
    )


def test_two_that_agree_far_from_a_decode_step_are_something_else() -> None:
    assert fixed_part(np.array([0.1, 0.101]), np.array([0.001, 0.001]), 0.01) == (
        0.01,
        (0.004, 0.01),
        0,
    )
    assert (
        fixed_part(np.array([0.009]), np.array([0.001]), 0.01)[2] == 0
    )  # one alone proves nothing
    value, within, seen = fixed_part(np.array([0.008, 0.009]), np.array([0.001, 0.001]), 0.01)
    assert (value, seen) == (pytest.approx(0.0085), 2)
    assert within == pytest.approx(
        (0.0085 - 2 * 0.0014826 / 2**0.5, 0.0085 + 2 * 0.0014826 / 2**0.5)
    )


def test_what_passes_beside_the_steps_is_seen_in_the_gaps() -> None:
    batch, context = np.full(100, 10.0), np.full(100, 1000.0)
    told = DECODE[0] + DECODE[1] * batch + DECODE[2] * context
    gaps = np.column_stack([np.arange(100.0), batch, context, told + 0.003])
    found = fitted(steps(), gaps=gaps)
    assert found.cost.decode[0] == pytest.approx(DECODE[0] + 0.003, rel=1e-3)
    assert found.cost.prefill[0] == pytest.approx(ALONE + 0.003, rel=1e-2)


def test_few_or_no_steps_are_refused() -> None:
    assert "too few engine steps" in str(fit(steps().head(20), NO_GAPS, None, split=False))
    assert "too few engine steps" in str(fit(steps().clear(), NO_GAPS, None, split=False))
    assert "only compute prompts" in str(fit(steps(alone=5), NO_GAPS, None, split=True))


def load(n: int = 50) -> Load:
    whole = np.full(n, 100, np.int64)
    zero = np.zeros(n, np.int64)
    return Load(np.arange(n) * 0.5, whole, zero, np.full(n, 20, np.int64), zero, zero)


def test_steps_that_scatter_are_a_draw_and_the_same_seed_is_the_same_run() -> None:
    cost, plan = Cost((0.01, 1e-4, 0.0), (0.02, 0.0, 0.0)), Plan()
    still = replay(load(), cost, plan)
    noise = Noise(np.array([0.5, 1.5]), np.array([1.0]), seed=1)
    one, again = replay(load(), cost, plan, noise), replay(load(), cost, plan, noise)
    other = replay(load(), cost, plan, Noise(noise.decode, noise.prefill, seed=2))
    assert one.end_s.tolist() == again.end_s.tolist()
    assert one.end_s.tolist() != other.end_s.tolist()
    assert one.first_s.tolist() == pytest.approx(still.first_s.tolist())  # prefills do not scatter
    assert one.end_s.mean() == pytest.approx(still.end_s.mean(), rel=0.02)


def test_bands_hold_what_chance_and_the_fit_leave_open() -> None:
    tables = [{"ttft_p50": 100.0}, {"ttft_p50": 103.0}]
    scattered = [{"ttft_p50": v} for v in (98.0, 102.0, 100.0)]
    (found,) = answers(tables, scattered, {}, [], None)
    assert (found.central, found.low) == (100.0, pytest.approx(100 - 1.96 * 2, abs=0.01))
    assert found.high == pytest.approx(100 + np.hypot(3, 1.96 * 2), abs=0.01)
    (bare,) = answers(tables, [], {}, [], None)
    assert (bare.low, bare.central, bare.high) == (100, 100, 103)


def test_a_refusal_says_what_the_fit_tells_of_its_reason() -> None:
    found = fitted(steps())
    off = [Check("ttft_p50", "ms", 30.0, 20.0)]
    assert "10.0 ms of the median first token pass outside" in why_it_misses(found, off)
    assert why_it_misses(found, [Check("ttft_p50", "ms", 20.0, 30.0)]) == ""
    rough = replace(found, decode_error=0.35)
    assert "lie 35 % off" in why_it_misses(rough, off).replace("35%", "35 %")
