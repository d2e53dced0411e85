"""The simulator: what it plays is consistent, and what it calls true can be checked by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from pdtrace.errors import BadOption
from pdtrace.simulator import SCENARIOS, Run, simulate

FRAMES = ("requests", "steps", "members", "emissions", "prefills", "preemptions", "workers")
TRUTH = ("lost", "truth_workers", "truth_gaps")
ALL = sorted(SCENARIOS)
_runs: dict[str, Run] = {}


def played(name: str) -> Run:
    """One short run of each scenario, shared by the tests."""
    if name not in _runs:
        _runs[name] = simulate(name, seed=1, duration_s=15)
    return _runs[name]


def test_the_scenarios_are_those_of_the_accuracy_goals() -> None:
    kinds = pl.Series([s.kind for s in SCENARIOS.values()]).value_counts()
    assert dict(kinds.iter_rows())["positive"] == 13
    assert dict(kinds.iter_rows())["null"] == 8
    assert all(name == s.name and s.title for name, s in SCENARIOS.items())


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    again, other = simulate("exclusive_dirty", 1, 15), simulate("exclusive_dirty", 2, 15)
    for frame in (*FRAMES, *TRUTH):
        assert_frame_equal(getattr(played("exclusive_dirty"), frame), getattr(again, frame))
    assert not again.requests.equals(other.requests)


def test_a_wrong_name_is_one_sentence() -> None:
    with pytest.raises(BadOption, match="no scenario is called 'nope'"):
        simulate("nope")


@pytest.mark.parametrize("name", sorted({*ALL} - {"troubled", "pd_left"}))
def test_every_request_ends_with_all_its_tokens(name: str) -> None:
    run = played(name)
    assert (run.requests["outcome"] == "completed").all()
    seen = run.emissions.group_by("request").agg(
        pl.col("tokens").sum(), first=pl.col("time_ns").min(), last=pl.col("time_ns").max()
    )
    joined = run.requests.join(seen, on="request", how="left")
    assert (joined["tokens"] == joined["output_tokens"]).all()
    assert (joined["first"] == joined["first_token_ns"]).all()
    assert (joined["last"] == joined["end_ns"]).all()


@pytest.mark.parametrize("name", ALL)
def test_instants_follow_each_other(name: str) -> None:
    requests = played(name).requests
    order = ["arrival_ns", "route_start_ns", "route_end_ns", "queue_start_ns", "prefill_start_ns",
             "prefill_end_ns", "transfer_start_ns", "transfer_end_ns", "decode_start_ns",
             "first_token_ns", "end_ns"]  # fmt: skip
    if requests["transfer_start_ns"].is_null().all():
        order = [c for c in order if not c.startswith(("transfer", "decode"))]
    if SCENARIOS[name].transfer == "layerwise":  # it begins with the first layer
        assert (requests["prefill_start_ns"] <= requests["transfer_start_ns"]).all()
        assert (requests["prefill_end_ns"] <= requests["transfer_end_ns"]).all()
        order.remove("transfer_start_ns")
    for before, after in itertools.pairwise(order):
        assert (requests[before] <= requests[after]).all(), (before, after)


@pytest.mark.parametrize("name", ALL)
def test_steps_of_a_worker_do_not_overlap_and_hold_their_members(name: str) -> None:
    run = played(name)
    steps = run.steps.sort("worker", "start_ns")
    free = steps.with_columns(
        before=(pl.col("start_ns") + pl.col("elapsed_ns")).shift(1).over("worker")
    )
    assert (free["before"].fill_null(0) <= free["start_ns"]).all()
    members = run.members.group_by("worker", "seq").agg(
        pl.col("prefill_tokens", "decode_tokens").sum(),
        decode_requests=(pl.col("decode_tokens") > 0).sum(),
    )
    both = steps.join(members, on=["worker", "seq"], how="full", suffix="_m")
    for column in ("prefill_tokens", "decode_tokens", "decode_requests"):
        assert both[column].eq_missing(both[f"{column}_m"]).all(), column


@pytest.mark.parametrize("name", ALL)
def test_budget_and_memory_are_kept(name: str) -> None:
    run, scenario = played(name), SCENARIOS[name]
    assert run.steps["kv_usage_ratio"].max() <= 1 + 10 / scenario.kv_blocks  # type: ignore[operator]
    if scenario.mode == "chunked":
        used = run.steps["prefill_tokens"] + run.steps["decode_tokens"]
        assert used.max() <= scenario.chunk_tokens  # type: ignore[operator]
    else:
        mixed = (pl.col("prefill_requests") > 0) & (pl.col("decode_requests") > 0)
        assert run.steps.filter(mixed).is_empty()


@pytest.mark.parametrize("name", [n for n in ALL if SCENARIOS[n].kind in ("null", "adversarial")])
def test_nothing_is_lost_on_a_decode_worker_though_prefills_are_shown_on_it(name: str) -> None:
    run = played(name)
    assert run.truth_workers["lost_s"].to_list() == [0.0]
    assert run.lost.is_empty()
    assert run.truth_gaps.is_empty()
    assert run.prefills["worker"].unique().to_list() == ["decode0"]


@pytest.mark.parametrize("name", [n for n in ALL if SCENARIOS[n].kind == "positive"])
def test_the_three_truths_agree(name: str) -> None:
    run = played(name)
    by_pair = run.lost.group_by("worker").agg(pl.col("lost_s").sum()).sort("worker")["lost_s"]
    assert by_pair.to_list() == pytest.approx(run.truth_workers.sort("worker")["lost_s"].to_list())
    total = run.truth_workers["lost_s"].sum()
    assert total > 0
    assert run.truth_gaps["excess_s"].sum() == pytest.approx(total, rel=1e-9)
    assert (run.lost["culprit"] != run.lost["victim"]).all()


def test_a_step_of_its_own_is_lost_as_a_whole_by_each_request_that_was_decoding() -> None:
    run = played("exclusive")
    alone = run.steps.filter(pl.col("prefill_tokens") > 0)
    residents = pl.col("running") - pl.col("prefill_requests")
    lost = alone.select((pl.col("elapsed_ns") * residents).sum()).item() / 1e9
    assert run.truth_workers["lost_s"].item() == pytest.approx(lost)


def test_a_gap_holds_the_prefill_step_that_ran_in_it() -> None:
    run = played("exclusive")
    worst = run.truth_gaps.sort("excess_s").row(-1, named=True)
    times = run.emissions.filter(pl.col("request") == worst["request"])["time_ns"].to_list()
    start, end = times[worst["index"]], times[worst["index"] + 1]
    inside = run.steps.filter(
        (pl.col("prefill_tokens") > 0)
        & (pl.col("start_ns") >= start)
        & (pl.col("start_ns") + pl.col("elapsed_ns") <= end)
    )
    assert worst["excess_s"] == pytest.approx(inside["elapsed_ns"].sum() / 1e9)
    assert worst["excess_s"] < (end - start) / 1e9


def test_without_noise_a_mixed_step_costs_its_prompt_tokens_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdtrace.simulator.engine.NOISE", 0.0)
    monkeypatch.setattr("pdtrace.simulator.engine.HICCUPS", 0.0)
    run = simulate(replace(SCENARIOS["chunked_2048"], name="quiet"), 0, 15)
    clean = run.steps.filter((pl.col("prefill_tokens") == 0) & (pl.col("decode_requests") > 0))
    mixed = run.steps.filter((pl.col("prefill_tokens") > 0) & (pl.col("decode_requests") > 0))
    x = clean.select(pl.lit(1.0), "decode_requests", "decode_kv_tokens").to_numpy().astype(float)
    beta, *_ = np.linalg.lstsq(x, clean["elapsed_ns"].to_numpy().astype(float), rcond=None)
    base = mixed.select(pl.lit(1.0), "decode_requests", "decode_kv_tokens").to_numpy() @ beta
    lost = ((mixed["elapsed_ns"].to_numpy() - base) * mixed["decode_requests"].to_numpy()).sum()
    assert run.truth_workers["lost_s"].item() == pytest.approx(lost / 1e9, rel=1e-4)


def test_the_link_carries_one_transfer_after_the_other() -> None:
    run = played("transfer_bound")
    moved = run.requests.sort("transfer_start_ns")
    assert (moved["transfer_end_ns"].shift(1).fill_null(0) <= moved["transfer_start_ns"]).all()
    took = (moved["transfer_end_ns"] - moved["transfer_start_ns"] - 1_000_000) / 1e9
    rate = (moved["transfer_bytes"] / 1e9 / took).to_list()
    assert rate == pytest.approx([rate[0]] * len(rate), rel=1e-5)
    assert 0.9 <= rate[0] <= 1.1


def test_affinity_finds_more_of_the_cache_than_round_robin() -> None:
    def hit(name: str) -> float:
        requests = simulate(name, 1, 60).requests
        return float(requests["cached_tokens"].sum() / requests["prompt_tokens"].sum())

    assert hit("router_affinity") > hit("router_blind") + 0.1


def test_preemption_happens_where_memory_is_short_and_is_computed_again() -> None:
    run = simulate("preemption", 0, 40)
    assert run.preemptions.height > 5
    computed = run.members.group_by("request").agg(pl.col("prefill_tokens").sum())
    prompts = run.requests.join(computed, on="request")
    again = prompts.filter(pl.col("preemptions") > 0)
    assert (
        again[
            "prefill_tokens_right" if "prefill_tokens_right" in again.columns else "prefill_tokens"
        ]
        > again["prompt_tokens"]
    ).all()


def test_bundled_streams_are_seen_later_but_in_order() -> None:
    run = played("null_coalesced")
    late = run.emissions["seen_ns"] - run.emissions["time_ns"]
    assert late.min() == 120_000
    gaps = run.emissions.select(pl.col("seen_ns").diff().over("request")).drop_nulls()["seen_ns"]
    assert gaps.min() >= 0  # type: ignore[operator]
    assert 0.3 < float((gaps < 2_000_000).mean()) < 0.7  # type: ignore[arg-type]


def test_prefill_instants_are_late_by_what_the_scenario_says() -> None:
    run = played("late_prefills")
    both = run.prefills.join(run.requests, on="request")
    assert (both["start_ns"] - both["prefill_start_ns"]).unique().to_list() == [5_000_000]
