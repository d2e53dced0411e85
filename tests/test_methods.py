"""Methods: known answers of the statistics and of prefill interference from engine steps."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from pdtrace import library, methods
from pdtrace.methods import interference_steps, statistics
from pdtrace.methods.interference_steps import interference

STEP_COLUMNS = (
    "seq", "start_ns", "elapsed_ns", "prefill_requests", "prefill_tokens", "prefill_kv_tokens",
    "decode_requests", "decode_tokens", "decode_kv_tokens", "running", "pulled_requests",
)  # fmt: skip


def steps(rows: Iterable[dict[str, Any]], capture: str | None = "full") -> pl.DataFrame:
    """Step rows with everything not given unknown."""
    schema: dict[str, Any] = dict.fromkeys(STEP_COLUMNS, pl.Int64)
    frame = pl.DataFrame(list(rows), schema_overrides=schema, infer_schema_length=None)
    missing = [pl.lit(None, pl.Int64).alias(n) for n in STEP_COLUMNS if n not in frame.columns]
    return frame.with_columns(
        *missing,
        rank=pl.lit("0"),
        capture=pl.lit(capture, pl.String),
    ).select("rank", *STEP_COLUMNS, "capture")


def step(
    seq: int, ms: float, decodes: int = 0, prompts: Sequence[int] = (), **more: int
) -> dict[str, Any]:
    return {
        "seq": seq, "elapsed_ns": round(ms * 1e6), "decode_requests": decodes,
        "prefill_requests": len(prompts), "prefill_tokens": sum(prompts), **more,
    }  # fmt: skip


def run(count: int = 1000, every: int = 10, pause_at: int | None = None) -> list[dict[str, Any]]:
    """Four decodes in steps of 9 ms (5 + 1 a request); each tenth also computes 100 tokens, +10 ms."""
    rows = []
    for seq in range(count):
        mixed = seq % every == every - 1
        ms = 9.0 + (10.0 if mixed else 0.0) + (0.001 * (seq % 7))
        rows.append(step(seq, ms + (500.0 if seq == pause_at else 0.0), 4, [100] if mixed else []))
    return rows


def only(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return interference(steps(rows, more.pop("capture", "full")), "w", **more)[0].row(0, named=True)


def test_mixed_steps_take_their_excess_from_each_decode() -> None:
    result, losses = interference(steps(run()), "w", "d", "aggregated")
    row = result.row(0, named=True)
    assert row["lost_s"] == pytest.approx(100 * 4 * 0.010, rel=0.01)
    assert row["decode_s"] == pytest.approx(4 * (1000 * 9.003 + 100 * 10) / 1e3, rel=1e-3)
    assert row["lost_low_s"] < 4.0 < row["lost_high_s"]
    assert row["flagged"] is True
    assert losses.height == 100
    assert losses["residents"].unique().to_list() == [4]
    assert losses["lost_s"].sum() == pytest.approx(row["lost_s"])


def test_a_preempted_request_that_is_computed_again_as_generation_is_a_prefill() -> None:
    rows = []
    for seq in range(1000):
        again = seq % 50 == 49  # four decode, a fifth has 100 tokens computed again: +10 ms
        ms = (19.0 if again else 9.0) + 0.001 * (seq % 7)
        rows.append(step(seq, ms, 5 if again else 4, decode_tokens=104 if again else 4))
    result, losses = interference(steps(rows), "w", "d", "aggregated")
    row = result.row(0, named=True)
    assert row["lost_s"] == pytest.approx(20 * 4 * 0.010, rel=0.01)
    assert row["again_lost_s"] == row["lost_s"]  # no new prompt took any of it
    assert losses["residents"].unique().to_list() == [4]
    assert losses.select("prefill_requests", "prefill_tokens").unique().rows() == [(1, 100)]
    assert "20 steps that computed preempted requests again count as prefill" in row["note"]


def test_what_is_computed_again_beside_a_new_prompt_takes_its_part_by_tokens() -> None:
    rows = []
    for seq in range(1000):
        both = seq % 50 == 49  # 100 tokens computed again and a prompt of 300: +40 ms
        more = {"decode_tokens": 104 if both else 4, "prompts": [300] if both else []}
        rows.append(
            step(seq, (49.0 if both else 9.0) + 0.001 * (seq % 7), 5 if both else 4, **more)
        )
    row = only(rows)
    assert row["lost_s"] == pytest.approx(20 * 4 * 0.040, rel=0.01)
    assert row["again_lost_s"] == pytest.approx(row["lost_s"] / 4)
    assert only(run())["again_lost_s"] == 0.0


@pytest.mark.parametrize("every", [50, 6])
def test_of_several_computed_again_at_once_none_is_a_victim(every: int) -> None:
    """Four decode, three more have 200 tokens computed again: +20 ms; also where such steps are common."""
    rows = []
    for seq in range(1000):
        again = (
            seq % every == every - 1
        )  # four decode, three more have 200 tokens computed again: +20 ms
        ms = (29.0 if again else 9.0) + 0.001 * (seq % 7)
        rows.append(step(seq, ms, 7 if again else 4, decode_tokens=204 if again else 4))
    result, losses = interference(steps(rows), "w", "d", "aggregated")
    row, truth = result.row(0, named=True), (1000 // every) * 4 * 0.020
    assert row["lost_s"] == pytest.approx(truth, rel=0.01)
    assert row["lost_low_s"] < truth < row["lost_high_s"]
    assert losses["residents"].unique().to_list() == [4]


def test_who_decoded_among_those_computed_again_may_be_fewer_than_the_step_before_held() -> None:
    rows = []
    for seq in range(1000):  # of six two are put off and computed again at once, then four go on
        again = seq % 50 == 49
        ms = (19.0 if again else 9.0) + 0.001 * (seq % 7)
        rows.append(
            step(
                seq,
                ms,
                6 if again or seq % 50 > 24 else 4,
                decode_tokens=104 if again else 6 if seq % 50 > 24 else 4,
            )
        )
    row = only(rows)
    assert row["lost_low_s"] < 20 * 4 * 0.010
    assert row["lost_high_s"] > 20 * 5 * 0.010


def test_several_tokens_a_request_are_speculation_where_they_are_common() -> None:
    rows = [step(seq, 9.0, 4, decode_tokens=4 + 3 * (seq % 2)) for seq in range(1000)]
    assert only(rows)["affected_steps"] == 0


@pytest.mark.parametrize(("count", "shown"), [(4, False), (5, True)])
def test_a_few_steps_that_held_somebody_up_are_no_finding_and_say_so(
    count: int, shown: bool
) -> None:
    """Each takes 280 ms from eight decodes; of four of them it is said that they are too few."""
    rows = [step(seq, 20.0, 8) for seq in range(36)]
    for n in range(count):
        rows[9 * n if n < 4 else 20] = step(9 * n if n < 4 else 20, 300.0, 8, [4000])
    row = only(rows)
    assert row["affected_steps"] == count
    assert row["flagged"] is shown
    said = f"only {count} steps held somebody up: fewer than 5 are an anecdote" in row["note"]
    assert said is not shown


def test_a_host_pause_inside_a_prefill_step_is_not_its_cost() -> None:
    row = only(run(pause_at=499))
    assert row["lost_s"] == pytest.approx(4.0, rel=0.05)
    assert row["capped_s"] == pytest.approx(
        4 * 0.48, rel=0.02
    )  # 20 ms of the 500 are still allowed


def test_a_row_of_dear_prefill_steps_may_be_cost_and_widens_the_interval() -> None:
    """Nobody decodes alone while 12 prompts in a row cost five times as much: neither pauses nor surely cost."""
    rows = run(2000)
    for n in range(12):
        rows[1000 + n] = step(1000 + n, 9.0 + 50.0, 4, [100])
    row = only(rows)
    assert row["lost_high_s"] >= 4 * (199 * 0.010 + 12 * 0.050)


def test_pauses_outside_prefill_steps_cost_prefill_nothing() -> None:
    rows = [step(i, 9.0 + (300 if i % 50 == 0 else 0) + 0.001 * (i % 7), 4) for i in range(1000)]
    row = only(rows)
    assert (row["lost_s"], row["flagged"]) == (0.0, False)


def test_sampled_or_unknown_capture_gives_no_sum() -> None:
    for capture in ("sampled", None):
        row = only(run(), capture=capture)
        assert (row["lost_s"], row["flagged"], row["decode_s"]) == (None, None, None)
        assert "sampled" in row["note"]
        assert row["mixed_p50_ms"] == pytest.approx(19, rel=0.01)


def test_two_engines_under_one_name_give_no_sum() -> None:
    one = run()
    row = only(sorted([*one, *one], key=lambda r: r["seq"]))
    assert (row["flagged"], row["lost_s"]) == (None, None)
    assert "step numbers of several engines alternate" in row["note"]
    # numbered apart, but two run at a time
    starts = np.cumsum([0, *(r["elapsed_ns"] for r in one)])[:-1]
    placed = [{**r, "start_ns": int(at)} for r, at in zip(one, starts, strict=True)]
    assert only(placed)["flagged"] is True
    beside = [{**r, "start_ns": r["start_ns"] + 4_500_000} for r in placed]
    both = sorted([*placed, *beside], key=lambda r: r["start_ns"])
    row = only([{**r, "seq": n} for n, r in enumerate(both)])
    assert (row["flagged"], row["lost_s"]) == (None, None)
    assert "begin before the one before them ended" in row["note"]


def test_of_few_prompts_a_pause_may_be_their_cost() -> None:
    rows = run(400, pause_at=199)
    row = only(rows)
    assert row["lost_s"] == pytest.approx(40 * 4 * 0.010, rel=0.06)
    assert row["lost_high_s"] > row["lost_s"] + 4 * 0.48
    row = only(run(2000, pause_at=999))  # 200 prompts tell what one costs
    assert row["lost_high_s"] < row["lost_s"] + 4 * 0.48


def test_no_baseline_without_decode_only_steps() -> None:
    row = only([step(i, 20.0, 4, [100]) for i in range(200)])
    assert row["lost_s"] is None
    assert "baseline" in row["note"]


def test_a_step_that_takes_over_pulled_kv_is_no_prefill() -> None:
    rows = [
        step(i, 9.0 + (10 if i % 10 == 9 else 0), 4, [1] if i % 10 == 9 else [])
        for i in range(1000)
    ]
    for row in (only(rows, role="decode"), only(rows, kv_consumer=True)):
        assert (row["lost_s"], row["pulled_steps"], row["mixed_steps"]) == (0.0, 100, 0)
    marked = [r | {"pulled_requests": r["prefill_requests"]} for r in rows]
    assert only(marked)["pulled_steps"] == 100
    # A real prompt on a decode worker (a pull that failed) still counts.
    rows[499] = step(499, 209.0, 4, [2000])
    assert only(rows, role="decode")["mixed_steps"] == 1


def test_exclusive_prefill_holds_up_those_who_decode_before_and_after() -> None:
    rows, seq = [], 0
    for _ in range(60):
        rows += [step(seq + i, 10.0 + 0.001 * i, 5) for i in range(20)]
        rows += [
            step(seq + 20, 100.0, 0, [1000]),
            step(seq + 21, 10.0, 6),
        ]  # the new one decodes as well
        seq += 22
    row = only(rows)
    assert row["lost_s"] == pytest.approx(60 * 5 * 0.1, rel=0.01)
    assert row["prefill_only_lost_s"] == pytest.approx(row["lost_s"])
    # With a hole in the count nobody knows who was decoding.
    holed = [r | {"seq": r["seq"] + 10 * (r["seq"] // 22 * 2 + (r["seq"] % 22 > 20))} for r in rows]
    assert only(holed)["lost_s"] == 0.0
    assert "counted as nobody" in only(holed)["note"]


def test_a_prefill_on_an_idle_engine_holds_up_nobody() -> None:
    rows, seq = [], 0
    for _ in range(60):  # one request after another: its own prefill, then its decode
        rows += [step(seq, 100.0, 0, [1000])] + [step(seq + i, 10.0, 1) for i in range(1, 20)]
        seq += 20
    assert only(rows)["lost_s"] == 0.0


def test_five_steps_are_needed() -> None:
    rows = [
        step(
            i,
            9.0 + (500 if i in (100, 300, 500, 700) else 0),
            4,
            [9000] if i in (100, 300, 500, 700) else [],
        )
        for i in range(1000)
    ]
    assert only(rows)["lost_s"] > 1
    assert only(rows)["flagged"] is False


def test_ranks_are_apart_and_durations_may_be_missing() -> None:
    frame = pl.concat([steps(run()), steps(run()).with_columns(rank=pl.lit("1"))])
    result, _ = interference(frame, "w")
    assert result["rank"].to_list() == ["0", "1"]
    frame = steps([*run(), {"seq": 1000, "decode_requests": 4}])
    row = interference(frame, "w")[0].row(0, named=True)
    assert row["lost_s"] is None
    assert "duration" in row["note"]


def test_context_is_part_of_the_baseline_where_steps_say_it() -> None:
    rows = [
        step(i, 5 + 0.001 * (i * 7 % 5000) + (20 if i % 10 == 9 else 0), 4, [200] if i % 10 == 9 else [],
             decode_kv_tokens=i * 7 % 5000)
        for i in range(2000)
    ]  # fmt: skip
    row = only(rows)
    assert row["lost_s"] == pytest.approx(200 * 4 * 0.020, rel=0.01)
    assert row["baseline_per_kv_token_ms"] == pytest.approx(0.001, rel=0.01)


def test_context_that_steps_do_not_say_is_seen_in_the_steps_before() -> None:
    """Long prompts come in chunks while eight decode, then one of them decodes beside and slows every step."""
    rows: list[dict[str, Any]] = []
    for n in range(40):
        slow = 6.0 if n % 2 else 0.0  # its context, in this half
        rows += [step(len(rows) + i, 10 + slow, 8) for i in range(60)]
        rows += [step(len(rows) + i, 30 + slow, 8, [2000]) for i in range(8)]
    row = only(rows)
    assert row["lost_s"] == pytest.approx(40 * 8 * 8 * 0.020, rel=0.01)
    assert row["lost_low_s"] < row["lost_s"] < row["lost_high_s"]


def test_what_an_arrival_slows_is_no_context() -> None:
    """The steps right before a prompt are slow as the host takes it in: the prompt's step is not compared with those."""
    rows: list[dict[str, Any]] = []
    for _ in range(40):
        rows += [step(len(rows) + i, 10, 4) for i in range(55)]
        rows += [step(len(rows) + i, 16, 4) for i in range(5)]
        rows.append(step(len(rows), 60, 4, [2000]))
    assert only(rows)["lost_s"] == pytest.approx(40 * 4 * 0.050, rel=0.01)


def test_noise_of_steps_is_no_context() -> None:
    """Where steps do not tell those behind them, one baseline holds for all."""
    random = np.random.default_rng(5)
    rows: list[dict[str, Any]] = []
    for _ in range(60):
        rows += [step(len(rows) + i, 10 + random.exponential(3), 4) for i in range(25)]
        rows.append(step(len(rows), 60, 4, [2000]))
    assert only(rows)["lost_s"] == pytest.approx(60 * 4 * 0.047, rel=0.02)


def test_result_columns_are_those_of_the_tables() -> None:
    for table, schema in (
        ("interference_steps", interference_steps.RESULT_SCHEMA),
        ("interference_step_losses", interference_steps.LOSSES_SCHEMA),
    ):
        assert [c.name for c in library.tables()[table].columns] == list(schema)


def test_run_fills_the_tables_of_a_store(store: Any) -> None:
    store.append("steps", steps(run()).with_columns(worker=pl.lit("w")))
    store.append("workers", [{"worker": "w", "deployment": "d", "role": "aggregated"}])
    methods.run(store)
    assert store.sql("SELECT deployment, flagged FROM interference_steps").rows() == [("d", True)]
    assert store.count("interference_step_losses") == 100
    assert [m.name for m in methods.making(["interference_steps"])] == ["interference_steps"]


def test_coarse_log_times_keep_the_engines_order(store: Any) -> None:
    """A log second is the time of ends: the earliest start of a long step lies before its predecessors'."""
    rows, end = [], 0.0
    for seq in range(2000):
        alone = seq % 20 == 10
        end += 100.0 if alone else 9.0
        rows.append(
            step(seq, 100.0, 0, [1000])
            if alone
            else step(seq, 9.0 + 0.001 * (seq % 7), 6 if seq % 20 > 10 else 5)
        )
        rows[-1]["start_lower_ns"] = int(end // 1000 * 1_000_000_000) - rows[-1]["elapsed_ns"]
    shuffled = pl.DataFrame(rows, infer_schema_length=None).sample(
        fraction=1.0, shuffle=True, seed=1
    )
    store.append(
        "steps", shuffled.with_columns(worker=pl.lit("w"), rank=pl.lit("0"), capture=pl.lit("full"))
    )
    methods.run(store)
    assert store.sql("SELECT lost_s FROM interference_steps").item() == pytest.approx(
        100 * 5 * 0.1, rel=0.01
    )


def test_interference_of_nothing_is_nothing(store: Any) -> None:
    methods.run(store)
    assert store.count("interference_steps") == 0


# -- statistics ------------------------------------------------------------------------------------


def test_wilson_interval() -> None:
    assert statistics.wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert statistics.wilson_interval(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert statistics.wilson_interval(0, 0) == (0, 1)


def test_bootstrap_is_repeatable_and_covers() -> None:
    values = np.random.default_rng(1).normal(100, 10, 400)
    first, second = statistics.bootstrap_mean(values), statistics.bootstrap_mean(values)
    assert first == second
    assert first is not None
    assert first.high - first.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.15)
    median = statistics.bootstrap_quantile(values, 0.5)
    assert median is not None
    assert median.low < median.value == np.quantile(values, 0.5) < median.high
    assert statistics.bootstrap_mean(values[:1]) is None


def test_spearman_with_ties_and_slope() -> None:
    x = np.array([1.0, 2, 2, 3, 4, 5, 6, 7])
    rho = statistics.spearman(x, x**3)
    assert rho is not None
    assert rho.value == pytest.approx(1)
    assert statistics.spearman(x, np.ones(8)) is None
    line = statistics.slope(x, 3 * x + 1)
    assert line is not None
    assert (line.value, line.low) == pytest.approx((3, 3))
    assert statistics.slope(np.ones(5), np.arange(5.0)) is None


def test_trimmed_fit_survives_outliers_and_noiseless_data() -> None:
    x = np.arange(200.0)
    y = 2 + 3 * x
    y[::10] += 1000
    fit = statistics.trimmed_least_squares(np.column_stack([np.ones(200), x]), y, floor=0.1)
    assert fit.coefficients == pytest.approx([2, 3])
    assert fit.kept.sum() == 180


# -- real captures ---------------------------------------------------------------------------------

LINE = re.compile(
    rb"Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    rb"(\d+) generation tokens, iteration elapsed time: ([\d.]+) ms"
)


def from_log(path: Path) -> pl.DataFrame:
    with gzip.open(path) as lines:
        found = [m.groups() for m in map(LINE.search, lines) if m]
    return steps(
        {
            "seq": int(s), "prefill_requests": int(p), "prefill_tokens": int(t),
            "decode_requests": int(d), "decode_tokens": int(g), "elapsed_ns": round(float(ms) * 1e6),
        }
        for s, p, t, d, g, ms in found
    )  # fmt: skip


def from_fpm(path: Path) -> pl.DataFrame:
    rows = []
    with gzip.open(path) as lines:
        for line in lines:
            record = json.loads(line)["event"]["fpm"]
            work = record["scheduled_requests"]
            rows.append(
                {
                    "seq": record["counter_id"],
                    "elapsed_ns": round(record["wall_time"] * 1e9),
                    "prefill_requests": work["num_prefill_requests"],
                    "prefill_tokens": work["sum_prefill_tokens"],
                    "prefill_kv_tokens": work["sum_prefill_kv_tokens"],
                    "decode_requests": work["num_decode_requests"],
                    "decode_kv_tokens": work["sum_decode_kv_tokens"],
                }
            )
    return steps(rows)


@pytest.mark.shared
def test_aggregated_capture_loses_a_third_of_its_decode_time(shared: Path) -> None:
    frame = from_log(shared / "data/vllm/agg/server.log.gz")
    row = interference(frame, "w")[0].row(0, named=True)
    assert (row["decode_only_steps"], row["mixed_steps"], row["prefill_only_steps"]) == (
        13456,
        263,
        125,
    )
    assert row["decode_s"] == pytest.approx(147.9, abs=0.1)
    assert row["lost_s"] == pytest.approx(49.9, rel=0.02)
    assert row["plain_lost_s"] == pytest.approx(50.3, abs=0.1)
    assert row["lost_low_s"] < 49.9 < row["lost_high_s"]
    assert row["flagged"] is True


@pytest.mark.shared
def test_simulated_workers_lose_a_twentieth(shared: Path) -> None:
    lost = []
    for path in sorted((shared / "data/dynamo/agg").glob("fpm.*")):
        row = interference(from_fpm(path), path.name)[0].row(0, named=True)
        assert row["flagged"] is True
        lost.append((row["lost_s"], row["decode_s"]))
    assert lost[0] == pytest.approx((1.07, 23.7), rel=0.05)
    assert lost[1] == pytest.approx((1.25, 23.4), rel=0.05)


@pytest.mark.shared
def test_decode_workers_are_not_flagged(shared: Path) -> None:
    row = interference(from_log(shared / "data/vllm/pd_nixl/decode.log.gz"), "w", role="decode")[0]
    assert row.select("lost_s", "flagged", "mixed_steps").row(0) == (0.0, False, 0)
    for path in sorted((shared / "data/dynamo/disagg_bootstrap").glob("fpm.*")):
        flagged = interference(from_fpm(path), path.name)[0]["flagged"].to_list()
        assert True not in flagged
