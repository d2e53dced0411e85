"""Prefill interference from per-request durations (level C): planted losses, nulls, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from pdtrace import methods
from pdtrace.ingest import ingest
from pdtrace.methods._exposure import Exposure, mean_levels, prefill_windows
from pdtrace.methods._permuted import _shuffled
from pdtrace.methods.interference_requests import RESULT_SCHEMA, interference
from pdtrace.store import Store

T0 = 1_790_000_000_000_000_000


def fleet(
    seed: int = 1, count: int = 400, cost_s: float = 0.05, lengths: str = "mixed"
) -> tuple[pl.DataFrame, float]:
    """(requests, seconds lost): 3 a second, 10 ms a token, `cost_s` per 1000 tokens of others."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / 3, count))
    outputs = random.integers(20, 300, count)
    prompts = {
        "mixed": np.where(random.random(count) < 0.1, 8000, random.integers(50, 400, count)),
        "equal": random.integers(500, 520, count),
        "rare": np.where(np.arange(count) % 100 == 99, 8000, 100),
    }[lengths]
    firsts = arrivals + 0.05
    alone = (outputs - 1) * 0.010 * random.normal(1, 0.02, count)
    ends = firsts + alone
    for _ in range(20):  # who is held up decodes longer and meets more
        met = Exposure.of(firsts - 1e-3, firsts, firsts, ends).tokens(prompts / 1e3)
        ends = firsts + alone + cost_s * met
    frame = pl.DataFrame(
        {
            "start_ns": T0 + (arrivals * 1e9).astype(np.int64),
            "ttft_ms": np.full(count, 50.0),
            "e2e_ms": (ends - arrivals) * 1e3,
            "resolution_ns": np.full(count, 1000),
            "prompt_tokens": prompts.astype(np.int64),
            "cached_tokens": np.zeros(count, np.int64),
            "output_tokens": outputs.astype(np.int64),
            "streams": np.ones(count, np.int64),
            "outcome": ["completed"] * count,
            "observer": ["engine"] * count,
        }
    )
    return frame, float(cost_s * met.sum())


def judged(frame: pl.DataFrame, **more: Any) -> dict[str, Any]:
    return interference(frame, more.pop("worker", "w"), **more).row(0, named=True)


def test_a_planted_loss_is_found_and_covered() -> None:
    frame, lost = fleet()
    row = judged(frame)
    assert row["lost_s"] == pytest.approx(lost, rel=0.1)
    assert row["lost_low_s"] < lost < row["lost_high_s"]
    assert row["lost_per_1000_tokens_ms"] == pytest.approx(50, rel=0.1)
    assert (row["flagged"], row["note"], row["cached_known"]) == (True, None, True)
    durations = (frame["e2e_ms"] - frame["ttft_ms"]).sum() / 1e3
    assert row["decode_s"] == pytest.approx(durations)


def test_without_a_cost_nothing_is_flagged() -> None:
    rows = [judged(fleet(seed, cost_s=0.0)[0]) for seed in range(20)]
    assert not any(row["flagged"] for row in rows)
    assert all(abs(row["lost_ratio"]) < 0.02 for row in rows)
    # hopeless cases stop early
    assert min(row["permutations"] for row in rows) < 999


def test_the_interval_covers_what_was_planted() -> None:
    covered = 0
    for seed in range(20):
        frame, lost = fleet(seed, count=200, cost_s=0.02)
        row = judged(frame)
        covered += row["lost_low_s"] <= lost <= row["lost_high_s"]
    assert covered >= 19


def test_a_cost_that_does_not_depend_on_length_is_no_evidence() -> None:
    frame, _ = fleet(cost_s=0.0)
    first = frame["start_ns"].to_numpy() / 1e9 - T0 / 1e9 + 0.05
    ends = first + (frame["e2e_ms"].to_numpy() - 50) / 1e3
    met = Exposure.of(first - 1e-3, first, first, ends).tokens(np.ones(len(first)))
    slowed = frame.with_columns(pl.col("e2e_ms") + pl.Series(met * 20))
    row = judged(slowed)
    assert row["flagged"] is False
    assert row["lost_high_s"] > 0.5 * met.sum() * 0.02


@pytest.mark.parametrize(
    ("lengths", "words"), [("equal", "nearly equal"), ("rare", "stand out in length")]
)
def test_lengths_that_can_show_nothing_are_told(lengths: str, words: str) -> None:
    row = judged(fleet(lengths=lengths)[0])
    assert (row["flagged"], row["lost_s"]) == (None, None)
    assert words in row["note"]


@pytest.mark.parametrize(
    "more",
    [{"role": "decode"}, {"role": "prefill"}, {"kv_consumer": True}, {"disaggregated": True}],
)
def test_a_worker_whose_prompts_are_computed_elsewhere_is_not_judged(more: dict[str, Any]) -> None:
    row = judged(fleet()[0], **more)
    assert (row["flagged"], row["lost_s"], row["p_value"]) == (None, None, None)
    assert "different workers" in row["note"]


def test_without_workers_or_values_it_cannot_tell() -> None:
    frame, _ = fleet()
    assert "unknown" in judged(frame, worker=None)["note"]
    assert "30%" in judged(frame, unplaced_ratio=0.3)["note"]
    assert "only 0 decodes" in judged(frame.with_columns(output_tokens=None))["note"]
    holes = frame.with_columns(ttft_ms=pl.when(pl.arange(0, 400) % 5 > 0).then("ttft_ms"))
    assert "320 of 400" in judged(holes)["note"]
    for column in ("start_ns", "ttft_ms", "e2e_ms", "prompt_tokens"):
        row = judged(frame.with_columns(pl.lit(None, frame.schema[column]).alias(column)))
        assert row["flagged"] is None
    assert judged(frame.with_columns(resolution_ns=10**10))["flagged"] is None
    assert judged(frame.head(1))["flagged"] is None
    assert judged(frame.clear())["flagged"] is None


def test_equal_rows_give_no_warning_and_no_finding() -> None:
    frame, _ = fleet(cost_s=0.0)
    still = frame.with_columns(e2e_ms=pl.lit(1050.0), output_tokens=pl.lit(101))
    assert judged(still)["flagged"] is False
    at_once = frame.with_columns(start_ns=pl.lit(T0), e2e_ms=pl.lit(1050.0))
    assert judged(at_once)["flagged"] is not True


def test_unknown_cached_tokens_are_marked() -> None:
    frame, lost = fleet()
    row = judged(frame.with_columns(cached_tokens=pl.lit(None, pl.Int64)))
    assert row["lost_s"] == pytest.approx(lost, rel=0.1)
    assert "cached" in row["note"]
    # prompts found whole in the cache cost nothing
    warm = frame.with_columns(cached_tokens=pl.col("prompt_tokens"))
    assert judged(warm)["flagged"] is None


def test_of_many_requests_stretches_are_looked_at() -> None:
    frame, lost = fleet(count=60_000)
    row = judged(frame)
    assert row["lost_s"] == pytest.approx(lost, rel=0.1)
    assert row["flagged"] is True


def test_exposure_is_what_a_loop_over_pairs_gives() -> None:
    random = np.random.default_rng(3)
    ends = np.sort(random.uniform(0, 50, 40))
    starts = ends - random.uniform(0.01, 3, 40)
    until = ends + random.uniform(0.1, 10, 40)
    weights = random.uniform(0, 5, 40)
    inside = np.minimum(until[:, None], ends) - np.maximum(ends[:, None], starts)
    parts = np.clip(inside, 0, None) / (ends - starts)
    found = Exposure.of(starts, ends, ends, until).tokens(np.stack([weights, weights**2]))
    assert found == pytest.approx(np.stack([parts @ weights, parts @ weights**2]))


def test_mean_level_is_the_mean_number_active_and_their_context() -> None:
    at, until = np.array([0.0, 1.0, 3.0]), np.array([4.0, 2.0, 8.0])
    zero, one = np.zeros(3), np.ones(3)
    # the first grows from 10 to 18 tokens: 13 in the mean of second 1 to 2
    level, growth = np.array([10.0, 5.0, 0.0]), np.array([8.0, 0.0, 0.0])
    active, context = mean_levels(at, until, [(one, zero), (level, growth)])
    assert active == pytest.approx([6 / 4, 2.0, 6 / 5])
    assert context[1] == pytest.approx(18.0)


def test_a_prompt_is_computed_after_the_first_token_before_it() -> None:
    arrivals, firsts = np.array([0.0, 0.5, np.nan]), np.array([1.0, 3.0, 4.0])
    assert prefill_windows(arrivals, firsts).tolist() == [0.0, 1.0, 4.0]


@pytest.mark.parametrize("count", [1, 15, 40, 41, 59])
def test_lengths_change_places_inside_their_stretch_only(count: int) -> None:
    parts = list(_shuffled(np.arange(count * 1.0), 20, 3, np.random.default_rng(1)))
    stretches = max(1, count // 20)
    place = np.arange(count) * stretches // count
    for row in np.concatenate(parts):
        assert sorted(row) == list(range(count))
        assert (place[row.astype(int)] == place).all()


def test_many_shuffles_are_the_same_whether_they_come_at_once_or_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rows() -> list[np.ndarray[Any, Any]]:
        return list(_shuffled(np.arange(50.0), 20, 7, np.random.default_rng(1)))

    (at_once,) = rows()
    monkeypatch.setattr("pdtrace.methods._permuted.CELLS_AT_ONCE", 100)
    assert len(rows()) == 4
    assert np.array_equal(np.concatenate(rows()), at_once)


def test_a_table_of_requests_with_workers_is_enough(tmp_path: Path) -> None:
    lines = ["worker,arrival,ttft_ms,e2e_ms,input_tokens,cached_tokens,output_tokens"]
    for worker, cost in (("w1", 0.05), ("w2", 0.0)):
        for row in fleet(cost_s=cost)[0].iter_rows(named=True):
            second = row["start_ns"] / 1e9
            lines.append(
                f"{worker},{second:.6f},{row['ttft_ms']},{row['e2e_ms']},{row['prompt_tokens']},"
                f"{row['cached_tokens']},{row['output_tokens']}"
            )
    path = tmp_path / "requests.csv"
    path.write_text("\n".join(lines) + "\n")
    store = Store()
    ingest([str(path)], store)
    found = store.sql(
        """SELECT w.name, i.* FROM interference_requests AS i JOIN workers AS w USING (worker)
           ORDER BY w.name"""
    )
    assert found["name"].to_list() == ["w1", "w2"]
    assert found["flagged"].to_list() == [True, False]
    assert found["lost_s"][0] == pytest.approx(fleet()[1], rel=0.15)


def test_requests_without_a_worker_give_one_row_that_says_so(con: Store) -> None:
    con.append("requests", [{"request": "a", "deployment": "d"}])
    methods.run(con)
    row = con.sql("FROM interference_requests").row(0, named=True)
    assert (row["deployment"], row["worker"], row["flagged"]) == ("d", None, None)
    assert set(row) == set(RESULT_SCHEMA)
