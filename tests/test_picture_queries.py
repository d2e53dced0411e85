"""The queries behind the pictures: hand-made rows in, known figures out."""

from __future__ import annotations

import polars as pl
import pytest

from pdtrace import pictures
from pdtrace.dashboards import interference_pairs
from pdtrace.store import Store

MS = 1_000_000


@pytest.fixture
def stalled(store: Store) -> Store:
    """One worker; the prompt of `long` (100 ms) stops the streams of `a` (80 ms lost) and `b` (40 ms)."""
    store.append(
        "workers", [{"worker": "w", "deployment": "d", "name": "engine", "role": "aggregated"}]
    )
    store.append("requests", [
        {"request": name, "deployment": "d", "start_ns": start * MS, "end_ns": end * MS, "outcome": "completed",
         "decode_worker": "w", "prefill_worker": "w", "prompt_tokens": tokens, "mode": "aggregated"}
        for name, start, end, tokens in (("a", 0, 400, 10), ("b", 0, 400, 10), ("long", 100, 300, 8000))
    ])  # fmt: skip
    store.append("legs", [
        {"leg": f"l-{name}", "request": name, "deployment": "d", "worker": "w", "observer": "engine", "role": "aggregated"}
        for name in ("a", "b", "long")
    ])  # fmt: skip
    store.append("streams", [
        {"leg": "l-a", "stream": 0, "first_ns": 50 * MS, "gaps_us": [10_000, 10_000, 90_000, 10_000], "emission": "token"},
        {"leg": "l-b", "stream": 0, "first_ns": 55 * MS, "gaps_us": [10_000, 50_000, 10_000], "emission": "token"},
    ])  # fmt: skip
    store.append("phases", [
        {"request": "long", "phase": "prefill", "detail": "prefill_exec", "start_ns": 100 * MS, "end_ns": 200 * MS, "worker": "w", "basis": "measured"},
        {"request": "long", "phase": "decode", "detail": "decode_exec", "start_ns": 200 * MS, "end_ns": 300 * MS, "worker": "w", "basis": "measured"},
    ])  # fmt: skip
    store.append("interference_gaps", [
        {"worker": "w", "deployment": "d", "flagged": True, "lost_s": 0.12, "decode_s": 1.0, "baseline_ms": 10.0,
         "offset_ms": 3.0, "tail_explained_ratio": 0.75},
    ])  # fmt: skip
    store.append("interference_events", [
        {"worker": "w", "victim": "a", "stream": 0, "end_ns": 160 * MS, "gap_ms": 90.0, "excess_ms": 80.0, "lost_ms": 80.0, "culprit": "long"},
        {"worker": "w", "victim": "b", "stream": 0, "end_ns": 115 * MS, "gap_ms": 50.0, "excess_ms": 40.0, "lost_ms": 40.0, "culprit": "long"},
    ])  # fmt: skip
    store.append("interference_gap_losses", [
        {"worker": "w", "culprit": "long", "victim": "a", "lost_s": 0.08, "pairs": 1},
        {"worker": "w", "culprit": "long", "victim": "b", "lost_s": 0.04, "pairs": 1},
        {"worker": "w", "lost_s": 0.01, "pairs": 7},
    ])  # fmt: skip
    return store


def test_the_stutter_shows_prefill_tokens_and_stalls_of_the_worst_stretch(stalled: Store) -> None:
    rows = stalled.query("stutter").sort("kind", "request", "start_ns")
    (prefill,) = rows.filter(kind="prefill").to_dicts()
    assert (prefill["request"], prefill["role"], prefill["place"]) == ("long", "culprit", 1)
    # moved by the offset onto the clock of the token times
    assert (prefill["start_ns"], prefill["end_ns"]) == (103 * MS, 203 * MS)
    assert (prefill["lost_ms"], prefill["prompt_tokens"]) == (120.0, 8000)
    stalls = rows.filter(kind="stall")
    assert stalls["request"].to_list() == ["a", "b"]
    assert stalls["start_ns"].to_list() == [70 * MS, 65 * MS]
    assert stalls["place"].to_list() == [2, 3]
    tokens = rows.filter(kind="token", request="a")["start_ns"].to_list()
    assert tokens == [50 * MS, 60 * MS, 70 * MS, 160 * MS, 170 * MS]
    assert rows["stretch_lost_s"].unique().to_list() == pytest.approx([0.12])
    assert rows["kept_one_in"].unique().to_list() == [1]
    (shown,) = pictures.pictures(stalled, ["d"], ["stutter"])[0]
    assert (
        "prompts of others took 0.12 s from 2 streams, long (8,000 tokens) more than any other (120 ms)"
        in str(shown.sentence)
    )
    assert "a stood still for 90.0 ms, where a token ordinarily comes after 10.0 ms" in str(
        shown.sentence
    )


def test_the_stutter_can_be_asked_for_a_stretch_and_fewer_marks(stalled: Store) -> None:
    rows = stalled.query("stutter", from_ns=150 * MS, seconds=0.03, marks=1)
    assert rows.filter(kind="stall")["request"].to_list() == ["a"]
    assert rows["kept_one_in"].max() == 2
    assert stalled.query("stutter", on_worker="other").is_empty()


def test_pairs_name_takers_and_losers_and_sum_the_others(stalled: Store) -> None:
    rows = stalled.query("interference_pairs", victims=1).sort("culprit_place", "victim_place")
    assert rows.select("culprit", "victim").rows() == [
        ("long", "a"),
        ("long", None),
        (None, None),
    ]
    assert rows["lost_s"].to_list() == pytest.approx([0.08, 0.04, 0.01])
    assert rows["total_lost_s"][0] == pytest.approx(0.13)
    assert rows["worst_victim"].unique().to_list() == ["a"]
    (shown,) = pictures.pictures(stalled, ["d"], ["interference_pairs"])[0]
    assert (
        shown.sentence
        == "one prompt took 92 % of 0.13 s, long (8,000 tokens) most (0.12 s); a lost most (0.08 s)."
    )


def test_a_request_called_others_is_a_request(stalled: Store) -> None:
    stalled.append("interference_gap_losses", [{"worker": "w", "culprit": "others", "victim": "all others", "lost_s": 0.03, "pairs": 1}])  # fmt: skip
    rows = stalled.query("interference_pairs").sort("culprit_place", "victim_place")
    assert rows.select("culprit", "victim").rows() == [
        ("long", "a"), ("long", "b"), ("others", "all others"), (None, None),
    ]  # fmt: skip
    drawn = interference_pairs.chart(rows).to_dict()
    named = {(r["culprit"], r["victim"]) for rows in drawn["datasets"].values() for r in rows}
    assert named == {("long", "a"), ("long", "b"), ("others", "request all others"), ("all others", "all others")}  # fmt: skip


def test_losses_over_time_are_zeros_where_nothing_was_lost(stalled: Store) -> None:
    rows = stalled.query("interference_time", bins=4).sort("start_ns")
    assert rows["lost_s"].to_list() == pytest.approx([0.0, 0.12, 0.0, 0.0])
    assert rows["losses"].to_list() == [0, 2, 0, 0]
    assert rows["level"].to_list() == ["B"] * 4
    assert rows["total_lost_s"].to_list() == pytest.approx([0.12] * 4)


def test_losses_over_time_come_from_steps_where_steps_judge_the_worker(stalled: Store) -> None:
    stalled.append("interference_steps", [{"worker": "w", "rank": "0", "deployment": "d", "flagged": True, "lost_s": 0.5, "decode_s": 1.0}])  # fmt: skip
    stalled.append("interference_step_losses", [{"worker": "w", "rank": "0", "seq": 1, "start_ns": 350 * MS, "lost_s": 0.5}])  # fmt: skip
    rows = stalled.query("interference_time", bins=4).sort("start_ns")
    assert rows["lost_s"].to_list() == [0.0, 0.0, 0.0, 0.5]
    assert rows["level"].to_list() == ["A"] * 4


def test_gaps_are_told_by_length_with_what_prefills_explain(stalled: Store) -> None:
    rows = stalled.query("itl_distribution").sort("low_ms")
    assert rows["gaps"].to_list() == [5, 1, 1]
    assert rows["explained_gaps"].to_list() == [0, 1, 1]
    assert rows["explained_s"].to_list() == pytest.approx([0.0, 0.04, 0.08])
    assert (rows["low_ms"] <= pl.Series([10.0, 50.0, 90.0]) + 1e-9).all()
    assert (rows["high_ms"] > pl.Series([10.0, 50.0, 90.0])).all()
    assert rows["all_s"][0] == pytest.approx(0.19)
    assert (rows["p50_ms"][0], rows["max_ms"][0]) == (10.0, 90.0)
    assert rows["p99_ms"][0] == pytest.approx(87.6)  # as quantile_cont has it


def test_gaps_that_nobody_judged_are_not_called_unexplained(store: Store) -> None:
    store.append(
        "requests",
        [{"request": "a", "deployment": "d", "outcome": "completed", "start_ns": 0, "end_ns": 9}],
    )
    store.append("legs", [{"leg": "l", "request": "a", "deployment": "d", "observer": "client"}])
    store.append("streams", [{"leg": "l", "stream": 0, "gaps_us": [1000, 3000]}])
    rows = store.query("itl_distribution")
    assert rows["explained_s"].to_list() == [None, None]
    (shown,) = pictures.pictures(store, ["d"], ["itl_distribution"])[0]
    assert "cannot be told" in str(shown.sentence)


def test_gaps_on_a_worker_that_could_not_be_judged_are_unknown(stalled: Store) -> None:
    stalled.append("workers", [{"worker": "v", "deployment": "d", "name": "other", "role": "aggregated"}])  # fmt: skip
    stalled.append("requests", [{"request": "c", "deployment": "d", "outcome": "completed", "start_ns": 0, "end_ns": 9, "decode_worker": "v"}])  # fmt: skip
    stalled.append("legs", [{"leg": "l-c", "request": "c", "deployment": "d", "worker": "v", "observer": "engine"}])  # fmt: skip
    stalled.append("streams", [{"leg": "l-c", "stream": 0, "gaps_us": [1_000_000, 500_000], "emission": "token"}])  # fmt: skip
    stalled.append("interference_gaps", [{"worker": "v", "deployment": "d", "role": "aggregated", "note": "weak baseline"}])  # fmt: skip
    rows = stalled.query("itl_distribution")
    assert rows["unjudged_gaps"].unique().to_list() == [2]
    assert rows["unjudged_s"].unique().to_list() == pytest.approx([1.5])
    (shown,) = pictures.pictures(stalled, ["d"], ["itl_distribution"])[0]
    assert (
        "prompts of others explain 0.12 s of 0.19 s stream time (63 %); of 1.50 s on workers that could not be judged"
        in str(shown.sentence)
    )


def test_steps_of_like_batches_are_one_row(store: Store) -> None:
    store.append(
        "workers", [{"worker": "w", "deployment": "d", "name": "engine", "role": "aggregated"}]
    )
    store.append("steps", [
        {"worker": "w", "rank": "0", "seq": seq, "elapsed_ns": ms * MS, "prefill_requests": int(tokens > 0),
         "prefill_tokens": tokens, "decode_requests": decodes, "decode_tokens": decodes, "capture": "full"}
        for seq, (ms, tokens, decodes) in enumerate([(10, 0, 2), (20, 0, 2), (30, 0, 3), (100, 512, 2), (80, 512, 0)])
    ])  # fmt: skip
    rows = store.query("step_batches").sort("class", "decode_requests")
    assert rows.select("class", "decode_requests", "steps", "p50_ms").rows() == [
        ("decode_only", 2.0, 2, 15.0), ("decode_only", 3.0, 1, 30.0), ("mixed", 2.0, 1, 100.0), ("prefill_only", 0.0, 1, 80.0),
    ]  # fmt: skip
    assert rows["total_s"].to_list() == pytest.approx([0.03, 0.03, 0.1, 0.08])
    (shown,) = pictures.pictures(store, ["d"], ["engine_steps"])[0]
    assert "a step with decodes only takes 20.0 ms (median of 3; 25 % of the time)" in str(
        shown.sentence
    )
    assert shown.level == "A"


def test_first_tokens_carry_their_cache_hit_and_a_sample_says_so(store: Store) -> None:
    store.append("deployments", [{"deployment": "d", "headline_observer": "client"}])
    store.append("requests", [
        {"request": f"r{n}", "deployment": "d", "outcome": "completed", "start_ns": n, "end_ns": n + 9, "ttft_ms": 10.0 * n,
         "prompt_tokens": 100, "cached_tokens": cached}
        for n, cached in enumerate([None, 0, 20, 50, 100], start=1)
    ])  # fmt: skip
    rows = store.query("ttft_by_prompt").sort("ttft_ms")
    assert rows["cache"].to_list() == [
        "unknown",
        "none",
        "below half",
        "half and more",
        "half and more",
    ]
    assert (rows["requests"][0], rows["cache_known"][0], rows["cache_hits"][0]) == (5, 4, 3)
    assert store.query("ttft_by_prompt", points=2)["kept_one_in"].unique().to_list() == [3]
    (shown,) = pictures.pictures(store, ["d"], ["ttft_by_prompt"])[0]
    assert "75 % of 4 requests found a part of their prompt in a cache" in str(shown.sentence)


def test_the_waterfall_gives_the_slowest_or_the_one_asked_for(stalled: Store) -> None:
    stalled.append("phases", [{"request": "a", "phase": "decode", "detail": "decode_exec", "start_ns": 0, "end_ns": 400 * MS, "basis": "measured"}])  # fmt: skip
    rows = stalled.query("request_waterfall")
    assert rows.sort("place")["request"].unique(maintain_order=True).to_list() == ["a", "long"]
    (only,) = (
        stalled.query("request_waterfall", of_request="long", pieces=1)["request"]
        .unique()
        .to_list()
    )
    assert only == "long"
    piece = stalled.query("request_waterfall", of_request="long", pieces=1).row(0, named=True)
    assert (piece["from_ms"], piece["to_ms"], piece["left_out_ms"]) == (0.0, 100.0, 100.0)
    assert piece["lane"] == "engine (aggregated)"
    assert stalled.query("request_waterfall", of_request="x'; DROP TABLE phases").is_empty()
    shown = pictures.picture(stalled, "request_waterfall", "d", of_request="long")
    assert "request long took 200 ms" in str(shown.sentence)


def test_shares_of_phases_add_up_in_each_window(store: Store) -> None:
    store.append("requests", [{"request": "a", "deployment": "d", "mode": "aggregated", "outcome": "completed", "start_ns": 0, "first_token_ns": 40 * MS, "end_ns": 100 * MS}])  # fmt: skip
    store.append("phase_sums", [
        {"request": "a", "deployment": "d", "mode": "aggregated", "counted": True, "phase": phase, "detail": detail, "duration_ns": whole * MS, "ttft_part_ns": first * MS, "basis": basis, "placed_ns": 0, "bound_ns": 0}
        for phase, detail, whole, first, basis in (
            ("queue", "prefill_queue", 10, 10, "measured"), ("kv_wait", "kv_wait_upper_bound", 30, 30, "upper_bound"),
            ("decode", "decode_exec", 60, 0, "measured"))
    ])  # fmt: skip
    rows = store.query("phase_shares").sort("window", "share")
    assert rows.select("window", "phase", "share").rows() == [
        ("first_token", "queue", 0.25), ("first_token", "kv_wait", 0.75),
        ("whole", "queue", 0.1), ("whole", "kv_wait", 0.3), ("whole", "decode", 0.6),
    ]  # fmt: skip
    (shown,) = pictures.pictures(store, ["d"], ["where_time_goes"])[0]
    assert "kv_wait holds up to 75 %" in str(shown.sentence)


def test_stalls_without_an_instant_are_told_also_beside_workers_with_steps() -> None:
    from pdtrace.dashboards import interference_time

    row = {"worker": "a", "worker_name": None, "start_ns": 0, "end_ns": MS, "lost_s": 5.0, "worker_lost_s": 5.0, "total_lost_s": 5.0, "level": "A"}  # fmt: skip
    other = {**row, "worker": "b", "lost_s": 1.0, "worker_lost_s": 1.0, "total_lost_s": 4.0, "level": "B"}  # fmt: skip
    text = str(interference_time.sentence(pl.DataFrame([row, other])))
    assert "half of the 6.00 s that have an instant" in text
    assert "only stalls that can be called have an instant on 1 of 2 workers, of 4.00 s in all" in text  # fmt: skip


def test_two_workers_without_names_have_a_lane_each(stalled: Store) -> None:
    stalled.append("workers", [{"worker": w, "deployment": "d", "name": None, "role": "decode"} for w in "xy"])  # fmt: skip
    stalled.append("phases", [
        {"request": "a", "phase": "decode", "detail": "decode_exec", "worker": w, "start_ns": n * MS, "end_ns": (n + 200) * MS, "basis": "measured"}
        for w, n in (("x", 0), ("y", 200))
    ])  # fmt: skip
    lanes = stalled.query("request_waterfall", of_request="a").sort("start_ns")["lane"].to_list()
    assert lanes == ["decode-1", "decode-2"]


def test_workers_of_one_name_are_not_one_worker(store: Store) -> None:
    store.append("workers", [{"worker": w, "deployment": "d", "name": "engine", "role": "decode"} for w in "xy"])  # fmt: skip
    store.append("steps", [{"worker": w, "seq": 1, "start_ns": 0, "elapsed_ns": MS, "decode_requests": 1, "prefill_requests": 0, "prefill_tokens": 0} for w in "xy"])  # fmt: skip
    assert sorted(store.query("step_batches")["worker_name"]) == ["decode-1", "decode-2"]


def test_cached_tokens_of_the_decode_side_are_not_those_of_the_prompt(store: Store) -> None:
    store.append("requests", [
        {"request": mode, "deployment": "d", "mode": mode, "outcome": "completed", "prompt_tokens": 100, "cached_tokens": 0, "ttft_ms": 10.0}
        for mode in ("aggregated", "disaggregated")
    ])  # fmt: skip
    store.append("observations", [
        {"request": mode, "deployment": "d", "observer": "client", "ttft_ms": 10.0, "level": "C", "basis": "reported"} for mode in ("aggregated", "disaggregated")
    ])  # fmt: skip
    found = dict(store.query("ttft_by_prompt").select("request", "cache").iter_rows())
    assert found == {"aggregated": "none", "disaggregated": "unknown"}


def test_a_small_part_without_a_number_still_takes_its_place_before_the_others() -> None:
    """Numbers are stacked as their bars are: one left out of the stack would move those behind it."""
    from pdtrace.dashboards import where_time_goes

    common = {"window": "whole", "window_mean_ms": 100.0, "requests": 9, "basis": "measured"}
    parts = (("queue", 0.05), ("prefill", 0.35), ("decode", 0.6))
    rows = pl.DataFrame([{**common, "phase": p, "share": s, "mean_ms": 100 * s} for p, s in parts])
    bars, numbers = where_time_goes.chart(rows).to_dict()["layer"]
    assert "transform" not in numbers
    assert numbers["encoding"]["text"]["condition"]["test"] == "datum.share >= 0.07"
    assert numbers["encoding"]["order"] == bars["encoding"]["order"]
    assert numbers["encoding"]["x"]["stack"] == bars["encoding"]["x"]["stack"] == "zero"
