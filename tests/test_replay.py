"""Replays with round numbers: every instant can be worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdtrace.methods.replay import Cost, Load, Plan, Played, replay
from pdtrace.methods.step_cost import Fitted, Prefills, Rows, Streams, fit, rows

# Prefill: 10 ms + 1 ms a token. Decode: 20 ms + 2 ms a request.
COST = Cost((0.010, 0.001, 0.0), (0.020, 0.002, 0.0))


def load(*requests: tuple[float, int, int], cached: int = 0) -> Load:
    """Requests as (arrival, prompt, output)."""
    arrival, prompt, output = (np.array(column) for column in zip(*requests, strict=True))
    unknown = np.full(len(requests), -1)
    return Load(
        arrival.astype(float), prompt, np.full(len(requests), cached), output, unknown, unknown
    )


def play(what: Load, cost: Cost = COST, **plan: Any) -> Played:
    return replay(what, cost, Plan(**plan))


def test_one_request_alone() -> None:
    got = play(load((1.0, 100, 3)))
    assert got.first_s[0] == pytest.approx(1.110)  # 10 ms + 100 tokens
    assert got.end_s[0] == pytest.approx(1.154)  # two steps of 22 ms
    assert got.finished


def test_prompts_of_their_own_steps_hold_up_decodes() -> None:
    got = play(load((0.0, 100, 10), (0.115, 50, 2)))
    assert got.first_s[0] == pytest.approx(0.110)
    assert got.first_s[1] == pytest.approx(
        0.132 + 0.060
    )  # after the decode step that ran, then 10 + 50
    # One step alone, the prompt of the other, one step of two, seven alone.
    assert got.end_s[0] == pytest.approx(0.132 + 0.060 + 0.024 + 7 * 0.022)
    assert got.end_s[1] == pytest.approx(0.132 + 0.060 + 0.024)


def test_chunks_go_with_the_decodes() -> None:
    got = play(load((0.0, 100, 10), (0.115, 198, 2)), chunk_tokens=100)
    assert got.first_s[0] == pytest.approx(0.110)
    # Each step of 99 prompt tokens beside one decode: 22 + 99 ms.
    assert got.first_s[1] == pytest.approx(0.132 + 2 * 0.121)
    assert got.end_s[1] == pytest.approx(0.132 + 2 * 0.121 + 0.024)


def test_chunks_alone_pay_their_fixed_part_each() -> None:
    got = play(load((0.0, 300, 1)), chunk_tokens=100)
    assert got.end_s[0] == got.first_s[0] == pytest.approx(3 * 0.110)


def test_cached_tokens_are_not_computed() -> None:
    assert play(load((0.0, 100, 1), cached=60)).first_s[0] == pytest.approx(0.050)


def test_squares_cost_what_came_before_too() -> None:
    square = Cost((0.0, 0.0, 1e-6), (0.02, 0.0, 0.0))
    whole = play(load((0.0, 200, 1)), square).first_s[0]
    parts = play(load((0.0, 200, 1)), square, chunk_tokens=100).first_s[0]
    assert whole == pytest.approx(0.040)
    assert parts == pytest.approx(0.040)


SPLIT = {
    "prefill_workers": 1, "workers": 1, "bytes_per_s": 1e6, "latency_s": 0.005, "kv_bytes_per_token": 1000.0,
}  # fmt: skip


def test_a_split_with_the_first_token_from_decode_has_the_transfer_in_ttft() -> None:
    got = play(load((0.0, 100, 3)), **SPLIT, origin="decode")
    assert got.transfer_s[0] == pytest.approx(0.105)  # 5 ms + 100 kB at 1 MB/s
    assert got.first_s[0] == pytest.approx(0.110 + 0.105 + 0.022)
    assert got.end_s[0] == pytest.approx(0.110 + 0.105 + 3 * 0.022)


def test_a_split_with_the_first_token_from_prefill_has_it_in_the_gap_after() -> None:
    got = play(load((0.0, 100, 3), (5.0, 10, 1)), **SPLIT, origin="prefill")
    assert got.first_s[0] == pytest.approx(0.110)
    assert got.end_s[0] == pytest.approx(0.110 + 0.105 + 2 * 0.022)
    assert got.end_s[1] == got.first_s[1] == pytest.approx(5.020)  # one token: no transfer


def test_a_layerwise_transfer_hides_behind_its_prefill() -> None:
    got = play(load((0.0, 100, 3)), **SPLIT, transfer="layerwise")
    assert got.transfer_s[0] == pytest.approx(0.005)  # 100 ms of transfer behind 110 ms of prefill
    slow = play(load((0.0, 100, 3)), **SPLIT | {"bytes_per_s": 5e5}, transfer="layerwise")
    assert slow.transfer_s[0] == pytest.approx(0.005 + 0.2 - 0.110)


def test_transfers_leave_one_after_the_other() -> None:
    got = play(load((0.0, 100, 3), (0.0, 10, 3)), **SPLIT | {"bytes_per_s": 2e5})
    assert got.transfer_s[0] == pytest.approx(0.505)
    assert got.transfer_s[1] == pytest.approx(0.505 + 0.055 - 0.020)  # computed 20 ms later


def test_decode_waits_for_kv_room() -> None:
    plan = SPLIT | {"kv_tokens": 160, "block_tokens": 1}
    got = play(load((0.0, 100, 20), (0.0, 100, 3)), **plan)
    assert got.memory_wait_s[0] == 0
    assert got.memory_wait_s[1] == pytest.approx(got.end_s[0] - 0.220)
    assert got.finished


def test_memory_that_is_short_is_given_up_and_computed_again() -> None:
    many = load(*[(0.1 * n, 50, 40) for n in range(8)])
    wide = play(many, chunk_tokens=64, kv_tokens=10_000, block_tokens=1)
    short = play(many, chunk_tokens=64, kv_tokens=200, block_tokens=1)
    assert short.finished
    assert short.end_s.max() > wide.end_s.max()


def test_an_endless_queue_is_given_up() -> None:
    many = load(*[(0.001 * n, 5000, 2) for n in range(200)])
    got = play(many)
    assert not got.finished
    assert np.isnan(got.end_s).any()


def test_workers_take_turns_or_serve_whom_they_served() -> None:
    two = load((0.0, 100, 1), (0.0, 100, 1))
    assert play(two, workers=2).first_s.tolist() == pytest.approx([0.110, 0.110])
    same = Load(
        two.arrival_s, two.prompt, two.cached, two.output, np.zeros(2, int), np.zeros(2, int)
    )
    assert play(same, workers=2, as_recorded=True).first_s.tolist() == pytest.approx([0.110, 0.220])


def test_ten_thousand_requests_are_played_to_their_end() -> None:
    random = np.random.default_rng(0)
    n = 10_000
    output = random.integers(50, 250, n)
    what = Load(np.cumsum(random.exponential(0.25, n)), random.integers(50, 500, n), np.zeros(n, int), output,
                np.full(n, -1), np.full(n, -1))  # fmt: skip
    got = play(what, Cost((0.010, 1e-4, 0.0), (0.02, 3e-5, 1e-9)), chunk_tokens=2048)
    assert got.finished
    assert np.isfinite(got.end_s).all()


# -- what a step costs -----------------------------------------------------------------------------


def alone(n: int, seed: int = 0) -> tuple[Prefills, Streams]:
    """Requests one after the other: prefill 10 ms + 0.1 ms a token, gaps 20 ms + 0.01 ms a token of context."""
    random = np.random.default_rng(seed)
    prompts = random.integers(100, 2000, n).astype(float)
    start = np.arange(n) * 100.0
    end = start + 0.010 + 0.0001 * prompts
    times, owner = [], []
    for i in range(n):
        gaps = 0.020 + 0.00001 * (prompts[i] + 1 + np.arange(30))
        times.append(end[i] + np.append(0.0, np.cumsum(gaps)))
        owner.append(np.full(31, i))
    last = np.array([t[-1] for t in times])
    zero = np.zeros(n)
    streams = Streams(
        zero, prompts, np.full(n, 31.0), end, last, np.concatenate(times), np.concatenate(owner)
    )
    return Prefills(zero, start, end, prompts), streams


def test_planted_costs_are_found() -> None:
    prefills, streams = alone(60)
    table = rows(prefills, streams, None, said_chunked=False)
    assert isinstance(table, Rows)
    found = fit(table)
    assert isinstance(found, Fitted)
    assert found.cost.prefill == pytest.approx((0.010, 0.0001, 0.0), rel=1e-3, abs=1e-9)
    assert found.cost.decode[0] == pytest.approx(0.020, rel=1e-3)
    assert found.cost.decode[2] == pytest.approx(0.00001, rel=1e-3)
    assert found.chunk_tokens is None


def test_without_decodes_beside_prompts_the_batching_is_not_guessed() -> None:
    prefills, streams = alone(60)
    said = rows(prefills, streams, None, None)
    assert isinstance(said, str)
    assert "cannot be told" in said


def test_few_rows_are_no_fit() -> None:
    prefills, streams = alone(5)
    table = rows(prefills, streams, None, said_chunked=False)
    assert isinstance(table, Rows)
    assert "too few" in str(fit(table))
    none = rows(Prefills(*[np.empty(0)] * 4), streams, None, None)
    assert isinstance(none, str)
