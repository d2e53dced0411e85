"""KV transfers: sizes, fits of links, hidden and exposed time, counters; rows made by hand, answers known."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from pdtrace import methods, wording
from pdtrace.methods import kv_sizes, transfer_fit, transfer_waits
from pdtrace.methods.kv_sizes import bytes_per_token, shape_of
from pdtrace.store import Store

MS = 1_000_000
Row = dict[str, Any]


def run(con: Store) -> None:
    methods.run(con, [methods.METHODS["kv_sizes"], methods.METHODS["transfer_fit"]])


def sides(con: Store) -> None:
    methods.run(con, [methods.METHODS["transfer_requests"]])


def split(con: Store, n: int = 20, origin: str | None = "decode", **more: Any) -> None:
    """Requests p -> q of 1000 ms, one a second: prefill to 100 ms, first token at 200 ms."""
    con.append("workers", [{"worker": "p", "deployment": "d", "role": "prefill"},
                           {"worker": "q", "deployment": "d", "role": "decode"}])  # fmt: skip
    con.append(
        "requests",
        [
            {"request": f"r{i}", "deployment": "d", "outcome": "completed", "mode": "disaggregated",
             "start_ns": i * 1000 * MS, "end_ns": (i * 1000 + 1000) * MS,
             "first_token_ns": (i * 1000 + 200) * MS, "ttft_ms": 200.0, "prefill_worker": "p",
             "decode_worker": "q", "first_token_origin": origin, "first_token_observer": "client",
             "prompt_tokens": 1000} | more
            for i in range(n)
        ],
    )  # fmt: skip
    con.append("legs", [{"leg": f"l{i}", "request": f"r{i}", "deployment": "d", "worker": "q",
                         "request_id": f"id{i}", "observer": "engine"} for i in range(n)])  # fmt: skip


def at(
    i: int, phase: str, detail: str, start_ms: float, end_ms: float, basis: str = "measured"
) -> Row:
    return {"request": f"r{i}", "phase": phase, "detail": detail, "basis": basis,
            "start_ns": round((i * 1000 + start_ms) * MS), "end_ns": round((i * 1000 + end_ms) * MS)}  # fmt: skip


def move(i: int, start_ms: float, end_ms: float, **more: Any) -> Row:
    return {"leg": f"l{i}", "start_ns": round((i * 1000 + start_ms) * MS), "backend": "b",
            "end_ns": round((i * 1000 + end_ms) * MS), "direction": "prefill_to_decode",
            "outcome": "completed"} | more  # fmt: skip


# -- bytes of a token ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 1, 131_072),
        ("/models/Llama-3.3-70B-Instruct", 8, 327_680),
        ("Meta-Llama-3.1-405B", 8, 516_096),
        ("Qwen/Qwen3-8B", 1, 147_456),
        ("Qwen/Qwen3-235B-A22B", 4, 192_512),
        ("Qwen/Qwen3-235B-A22B", 8, 385_024),  # 4 heads on 8 ranks: each kept twice
        ("facebook/opt-13b", 1, 819_200),
        ("facebook/opt-66b", 4, 2_359_296),
        ("deepseek-ai/DeepSeek-R1", 16, 70_272),  # latent attention: one copy
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", 1, 57_344),
    ],
)  # fmt: skip
def test_published_shapes_give_the_known_bytes_of_a_token(
    name: str, ranks: int, expected: int
) -> None:
    shape = shape_of(name)
    assert shape is not None
    assert bytes_per_token(shape, 2, ranks)[0] == expected


def sized(facts: dict[str, str], model: str | None = "m") -> Row:
    frame = pl.DataFrame(
        [("d", "prefill", key, value) for key, value in facts.items()],
        schema=["deployment", "role", "key", "value"], orient="row",
    )  # fmt: skip
    models = pl.DataFrame(
        {"deployment": ["d"], "model": [model]}, schema_overrides={"model": pl.String}
    )
    (row,) = kv_sizes.sizes(models, frame).to_dicts()
    return row


def test_sizes_come_from_the_configuration_then_from_the_shape_else_they_are_unknown() -> None:
    assert (
        sized({"kv_bytes_per_token": "32768", "model": "Qwen/Qwen3-8B"})["bytes_per_token"] == 32768
    )
    row = sized({"model": "/data/Qwen3-8B", "tensor_parallel_size": "2", "block_size": "16"})
    assert (row["bytes_per_token"], row["basis"], row["block_tokens"]) == (147_456, "formula", 16)
    assert "no fact states it" in row["note"]
    assert sized({"model": "Qwen3-8B", "kv_cache_dtype": "fp8_e4m3"})["bytes_per_token"] == 73_728
    assert sized({"model": "Qwen3-8B", "dtype": "torch.float32"})["bytes_per_token"] == 294_912
    for facts in (
        {"model": "openai/gpt-oss-20b"},  # sliding windows
        {"model": "google/gemma-3-27b-it"},
        {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct"},  # linear attention
        {"model": "my-finetune"},
        {"model": "RedHatAI/Llama-3.1-8B-Instruct-FP8"},  # may keep KV in FP8
        {"model": "Qwen3-8B", "kv_cache_dtype": "turbo3"},
    ):
        row = sized(facts)
        assert (row["bytes_per_token"], row["basis"]) == (None, "unknown")
        assert row["note"]


# -- the line through size and time ----------------------------------------------------------------


def sample(seed: int, n: int = 200, noise: float = 0.03) -> tuple[Any, Any]:
    """T = 0.8 ms + bytes / 10 GB/s, scatter in proportion, one in fifty held up."""
    random = np.random.default_rng(seed)
    sizes = random.uniform(2e6, 500e6, n)
    times = (0.8 + sizes / 10e9 * 1e3) * random.normal(1, noise, n)
    times[::50] *= 4
    return sizes, times


def test_the_fit_finds_setup_time_and_bandwidth_though_some_transfers_were_held_up() -> None:
    line = transfer_fit.fit(*sample(0))
    assert line.bytes_per_second is not None
    assert line.setup_ms is not None
    assert line.bytes_per_second[0] == pytest.approx(10e9, rel=0.01)
    assert line.setup_ms[0] == pytest.approx(0.8, abs=0.1)
    assert line.scatter == pytest.approx(0.03, rel=0.2)


def test_intervals_of_the_fit_cover_the_truth() -> None:
    speed = setup = 0
    for seed in range(200):
        line = transfer_fit.fit(*sample(seed))
        assert line.bytes_per_second is not None
        assert line.setup_ms is not None
        speed += line.bytes_per_second[1] <= 10e9 <= line.bytes_per_second[2]  # type: ignore[operator]
        setup += line.setup_ms[1] <= 0.8 <= line.setup_ms[2]
    assert speed >= 180
    assert setup >= 180


def test_what_shows_no_line_gets_none() -> None:
    sizes, times = sample(1)
    assert "too few" in str(transfer_fit.fit(sizes[:9], times[:9]).note)
    assert "nearly equal" in str(transfer_fit.fit(np.full(50, 1e8), times[:50]).note)
    assert "do not surely grow" in str(transfer_fit.fit(sizes, np.full(len(sizes), 5.0)).note)
    coarse = transfer_fit.fit(sizes, np.maximum(np.round(times / 1000), 1) * 1000, step_ms=1000)
    assert "too coarse" in str(coarse.note)
    assert all(
        transfer_fit.fit(sizes[:9], times[:9]).__dict__[k] is None for k in ("setup_ms", "scatter")
    )


def test_the_step_of_the_clock_is_seen() -> None:
    start = np.arange(20, dtype=np.int64) * 3_000_000_000
    assert transfer_fit.clock_step_ms(start, start + 2_000_000_000) == 1000
    assert transfer_fit.clock_step_ms(start + 17, start + 2_000_000_000) == 0


def test_others_in_flight_are_counted_by_time() -> None:
    start, end = np.array([0, 50, 200]), np.array([100, 150, 300])
    assert transfer_fit.others_in_flight(start, end) == pytest.approx([0.5, 0.5, 0])


def test_contention_is_one_on_a_shared_link_and_nought_on_a_free_one() -> None:
    random = np.random.default_rng(3)
    sizes = random.uniform(1e7, 5e8, 400)
    together = random.choice([0.0, 0.0, 1.0, 2.0], 400)
    noise = random.normal(1, 0.02, 400)
    shared = transfer_fit.fit(sizes, (1 + sizes / 10e9 * 1e3 * (1 + together)) * noise, together)
    free = transfer_fit.fit(sizes, (1 + sizes / 10e9 * 1e3) * noise, together)
    assert shared.contention is not None
    assert free.contention is not None
    assert shared.bytes_per_second is not None
    assert shared.contention[0] == pytest.approx(1, abs=0.05)
    assert shared.bytes_per_second[0] == pytest.approx(10e9, rel=0.02)
    assert free.contention[1] < 0 < free.contention[2] or abs(free.contention[0]) < 0.02
    assert transfer_fit.fit(sizes, sizes / 1e7, np.zeros(400)).contention is None


# -- movements of requests and links ---------------------------------------------------------------


def test_bytes_are_measured_else_computed_only_where_one_movement_carries_the_prompt(
    con: Store,
) -> None:
    split(con, 3)
    con.append("facts", [{"worker": "p", "key": "kv_bytes_per_token", "value": "100"},
                         {"worker": "p", "key": "kv_block_size", "value": "16"}])  # fmt: skip
    con.append("transfers", [
        move(0, 100, 150, bytes=77), move(1, 100, 150), move(2, 100, 120), move(2, 120, 150),
        {"request_id": "id1", "destination_worker": "q", "direction": "store", "outcome": "failed"},
    ])  # fmt: skip
    run(con)
    rows = con.sql(
        "SELECT request, direction, bytes, bytes_basis, source_worker, duration_ms FROM transfer_times ORDER BY ALL"
    ).rows()
    assert rows == [
        ("r0", "prefill_to_decode", 77, "measured", "p", 50),
        ("r1", "prefill_to_decode", 63 * 16 * 100, "config", "p", 50),  # 1000 tokens in 63 blocks
        ("r1", "store", None, None, None, None),
        ("r2", "prefill_to_decode", None, None, "p", 20),
        ("r2", "prefill_to_decode", None, None, "p", 30),
    ]


def test_overlapping_chunks_count_once_and_what_lies_under_prefill_is_hidden(con: Store) -> None:
    split(con, 1)
    con.append("phases", [
        at(0, "prefill", "prefill_exec", 0, 60), at(0, "prefill", "prefill_exec", 70, 100),
        at(0, "kv_transfer", "kv_transfer", 100, 130), at(0, "decode", "decode_exec", 130, 1000),
    ])  # fmt: skip
    con.append(
        "transfers",
        [move(0, 40, 90, bytes=10), move(0, 80, 110, bytes=10), move(0, 100, 130, bytes=5)],
    )
    sides(con)
    (row,) = con.query("transfer_requests").to_dicts()
    assert (row["movements"], row["bytes"]) == (3, 25)
    assert (row["moved_ms"], row["hidden_ms"], row["exposed_ms"]) == (90, 20 + 30, 30)


def test_behind_a_prefill_known_as_wall_time_the_hidden_part_is_unknown(con: Store) -> None:
    split(con, 3)
    con.append("phases", [
        at(0, "prefill", "prefill_wall", 0, 100), at(0, "kv_transfer", "kv_transfer", 100, 150),
        at(1, "prefill", "prefill_wall", 0, 100), at(1, "kv_transfer", "kv_transfer", 110, 150),
        at(2, "kv_transfer", "kv_transfer", 110, 150),
    ])  # fmt: skip
    con.append("transfers", [move(0, 100, 150), move(1, 110, 150), move(2, 110, 150)])
    sides(con)
    rows = con.sql("SELECT hidden_ms, exposed_ms FROM transfer_requests ORDER BY request").rows()
    assert rows == [(None, 50), (0, 40), (None, 40)]  # met it, came after it, no prefill known
    assert con.query("transfer_summary")["hidden_s"].to_list() == [None]


def test_kv_that_moves_inside_a_prefill_known_as_wall_time_is_called_an_upper_bound(
    con: Store,
) -> None:
    split(con)
    for i in range(20):
        con.append("phases", [at(i, "prefill", "prefill_wall", 0, 60), at(i, "kv_transfer", "kv_transfer", 60, 100, "upper_bound"),
                              at(i, "kv_transfer", "kv_transfer", 100, 110)])  # fmt: skip
    con.append("transfers", [move(i, 60, 110) for i in range(20)])
    sides(con)
    parts = con.sql("SELECT DISTINCT hidden_ms, exposed_ms, bound_ms FROM transfer_requests").rows()
    assert parts == [(None, 50, 40)]
    (row,) = con.query("kv_transfer").to_dicts()
    assert (row["value"], row["interval_low"], row["interval_high"]) == tuple(
        map(pytest.approx, (1.0, 0.2, 1.0))
    )
    assert (row["transfer_s"], row["upper_bound_s"], row["wall_s"], row["bound"]) == (
        pytest.approx(0.2), pytest.approx(0.8), pytest.approx(0.8), True,
    )  # fmt: skip
    said = wording.finding("kv_transfer", row)
    assert (
        said.title
        == "waiting for KV takes at most 25 % of the time before first tokens (upper bound)"
    )
    assert "0.80 s lie inside prefills known as wall time only" in said.detail
    assert "0.20 s are known to be KV time" in said.detail
    assert "decode side" not in said.detail.partition("known to be KV time")[0]
    assert any("known as wall time only counts as waited for" in text for text in said.assumptions)


def test_a_small_part_that_is_only_bounded_is_told_in_title_and_text(con: Store) -> None:
    split(con)
    for i in range(20):
        con.append("phases", [at(i, "kv_transfer", "kv_transfer", 90, 100, "upper_bound"),
                              at(i, "kv_transfer", "kv_transfer", 100, 130)])  # fmt: skip
    (row,) = con.query("kv_transfer").to_dicts()
    said = wording.finding("kv_transfer", row)
    assert (
        said.title
        == "KV transfer and waiting for it take at most 20 % of the time before first tokens"
    )
    assert "Transfer 0.60 s" in said.detail
    assert "0.20 s lie inside prefills known as wall time only" in said.detail
    assert "that may hold other things" not in said.detail


def test_a_link_is_known_by_what_it_gave_while_busy(con: Store) -> None:
    split(con, 4)
    con.append("transfers", [
        move(0, 0, 100, bytes=100_000), move(1, 0, 100, bytes=300_000), move(1, 50, 150, bytes=100_000),
    ])  # fmt: skip
    run(con)
    (row,) = con.query("transfer_links").to_dicts()
    assert (row["source_worker"], row["destination_worker"], row["transfers"]) == ("p", "q", 3)
    assert (row["busy_s"], row["most_at_once"], row["bytes"]) == (0.25, 2, 500_000)
    assert row["link_bytes_per_second"] == pytest.approx(2_000_000)
    assert row["throughput_p50"] == pytest.approx(1_000_000)
    assert "too few" in row["note"]
    con.append("transfers", [move(3, 0, 100, outcome="failed")])
    (row,) = con.query("transfer_links").to_dicts()
    assert (row["failed"], row["bytes"], row["link_bytes_per_second"]) == (1, 500_000, None)


def test_each_link_has_its_own_fit(con: Store) -> None:
    split(con, 60)
    sizes, times = sample(4, 60, noise=0.001)
    con.append(
        "transfers",
        [
            move(i, 0, float(t), bytes=int(s))
            for i, (s, t) in enumerate(zip(sizes, times, strict=True))
        ],
    )
    run(con)
    (row,) = con.query("transfer_links").to_dicts()
    assert row["bytes_per_second"] == pytest.approx(10e9, rel=0.01)
    assert row["bytes_per_second_low"] < row["bytes_per_second"] < row["bytes_per_second_high"]
    assert row["contention_ratio"] is None


# -- counters --------------------------------------------------------------------------------------


def counter(metric: str, *values: float, timed: bool = True) -> list[Row]:
    return [{"source": n, "record": n, "worker": "q", "metric": metric, "labels": "{}", "value": v, "kind": "histogram",
             "time_ns": n * 1000 * MS if timed else None} for n, v in enumerate(values)]  # fmt: skip


def test_counters_add_up_over_restarts_and_without_times(con: Store) -> None:
    split(con, 1)
    con.append("samples", counter("x_xfer_time_seconds_count", 10, 30, 5) + counter("x_xfer_time_seconds_sum", 1, 3, 0.5)
               + counter("rx_bytes_total", 1000, 1500, 100))  # fmt: skip
    (row,) = con.query("transfer_counters").to_dicts()
    assert (row["transfers"], row["total_s"], row["bytes"], row["since_start"]) == (
        25,
        2.5,
        600,
        False,
    )
    con.execute("DELETE FROM samples")
    con.append("samples", counter("agent_xfer_time_us_count", 306, 0, 200, timed=False)
               + counter("agent_xfer_time_us_sum", 2e6, 0, 1e6, timed=False))  # fmt: skip
    (row,) = con.query("transfer_counters").to_dicts()
    assert (row["transfers"], row["total_s"], row["bytes"], row["basis"]) == (
        306,
        2.0,
        None,
        "counters",
    )


def lines(con: Store, n: int, mean_ms: float, mean_mib: float) -> None:
    con.append("samples", [
        {"source": 1, "record": 1, "worker": "q", "labels": "{}", "value": value, "kind": "gauge", "time_ns": 0,
         "metric": f"log:kv_{name}"}
        for name, value in (("num_successful_transfers", n), ("avg_xfer_time_ms", mean_ms), ("avg_mb_per_transfer", mean_mib))
    ])  # fmt: skip


def test_counters_narrow_a_wait_that_is_only_bounded(con: Store) -> None:
    split(con)
    con.append(
        "phases",
        [at(i, "kv_wait", "kv_wait_upper_bound", 100, 200, "upper_bound") for i in range(20)],
    )
    lines(con, 20, 25.0, 1.0)
    (row,) = con.query("kv_transfer").to_dicts()
    assert (row["value"], row["interval_low"], row["bound"]) == (
        pytest.approx(2),
        pytest.approx(0),
        True,
    )
    assert (row["counter_s"], row["at_most_transfer_s"]) == (pytest.approx(0.5), pytest.approx(0.5))
    assert row["counter_bytes"] == 20 * 2**20
    said = wording.finding("kv_transfer", row)
    assert "at most 25 % of this wait is the transfer itself" in said.detail
    assert "part of TTFT" in said.detail
    assert "since the start" not in said.detail
    con.execute("UPDATE samples SET value = 19 WHERE metric LIKE '%num%'")
    assert con.query("kv_transfer")["at_most_transfer_s"].to_list() == [None]


def test_one_scrape_counts_from_the_start_of_the_process(con: Store) -> None:
    split(con)
    con.append(
        "phases",
        [at(i, "kv_wait", "kv_wait_upper_bound", 100, 200, "upper_bound") for i in range(20)],
    )
    con.append(
        "samples",
        counter("x_xfer_time_seconds_count", 25) + counter("x_xfer_time_seconds_sum", 0.5),
    )
    row = con.query("kv_transfer").to_dicts()[0]
    assert (row["counter_transfers"], row["counter_since_start"], row["counter_bytes"]) == (
        25,
        True,
        None,
    )
    said = wording.finding("kv_transfer", row)
    assert "25 KV movements since the start of their processes" in said.detail


def test_where_prefill_makes_the_first_token_the_wait_lies_in_the_first_gap(con: Store) -> None:
    split(con, origin="prefill")
    con.append("phases", [at(i, "kv_transfer", "kv_transfer", 200, 240) for i in range(20)])
    con.append(
        "legs",
        [
            {"leg": f"c{i}", "request": f"r{i}", "deployment": "d", "observer": "client"}
            for i in range(20)
        ],
    )
    con.append(
        "streams", [{"leg": f"c{i}", "stream": 0, "gaps_us": [80_000, 10_000]} for i in range(20)]
    )
    (row,) = con.query("kv_transfer").to_dicts()
    assert (row["share"], row["after_first_s"]) == (0, pytest.approx(0.8))
    assert row["first_gap_ratio"] == pytest.approx(0.5)
    said = wording.finding("kv_transfer", row)
    assert "in the first gap between tokens, 50 % of those first gaps" in said.detail


def test_waits_for_space_are_told_apart_from_the_transfer_where_records_do(con: Store) -> None:
    split(con)
    for i in range(20):
        con.append("phases", [at(i, "kv_wait", "bridge_wait", 100, 110), at(i, "kv_wait", "kv_space_wait", 110, 160),
                              at(i, "kv_transfer", "kv_transfer", 160, 200)])  # fmt: skip
    (row,) = con.query("kv_transfer").to_dicts()
    assert (row["bridge_s"], row["space_s"], row["transfer_s"]) == tuple(
        map(pytest.approx, (0.2, 1.0, 0.8))
    )
    said = wording.finding("kv_transfer", row)
    assert "waits stated to be for KV space 1.00 s" in said.detail
    assert said.suggestions[0].startswith("KV space")


@pytest.mark.parametrize(
    ("outcomes", "failed", "said"),
    [
        (["completed"] * 20, 0, "from prefill to decode, none of them failed or expired"),
        (["completed"] * 18 + ["failed", "expired"], 2, "2 of them failed or expired"),
        (["completed"] * 19 + [None], None, None),
    ],
)
def test_directions_and_failures_of_movements_are_told_where_stated(
    con: Store, outcomes: list[str | None], failed: int | None, said: str | None
) -> None:
    split(con)
    con.append("phases", [at(i, "kv_transfer", "kv_transfer", 100, 200) for i in range(20)])
    con.append("transfers", [move(i, 100, 200, outcome=o) for i, o in enumerate(outcomes)])
    sides(con)
    row = con.query("kv_transfer").to_dicts()[0]
    assert (row["failed_transfers"], row["directions"]) == (failed, ["prefill_to_decode"])
    detail = wording.finding("kv_transfer", row).detail
    assert ("failed or expired" in detail) is (said is not None)
    assert said is None or said in detail


def test_an_empty_cache_on_the_decode_side_speaks_against_waits_for_space(con: Store) -> None:
    split(con)
    con.append(
        "phases",
        [at(i, "kv_wait", "kv_wait_upper_bound", 100, 200, "upper_bound") for i in range(20)],
    )
    con.append("steps", [
        {"worker": "q", "rank": "0", "seq": n, "start_ns": n, "elapsed_ns": 1, "kv_usage_ratio": 0.01 * n, "capture": "full"}
        for n in range(10)
    ])  # fmt: skip
    row = con.query("kv_transfer").to_dicts()[0]
    assert row["decode_usage_max_ratio"] == pytest.approx(0.09)
    assert (
        "more than 9.0 % full: nothing points to waits for KV space"
        in wording.finding("kv_transfer", row).detail
    )
    con.execute("UPDATE steps SET kv_usage_ratio = 0.99 WHERE seq = 3")
    row = con.query("kv_transfer").to_dicts()[0]
    assert "some of the wait may be for KV space" in wording.finding("kv_transfer", row).detail
    con.execute("UPDATE steps SET capture = 'sampled' WHERE seq = 3")
    assert con.query("kv_transfer")["decode_usage_max_ratio"].to_list() == [None]


def test_the_size_of_the_prompts_gives_the_rate_that_the_wait_would_need(con: Store) -> None:
    split(con)
    con.append(
        "phases",
        [at(i, "kv_wait", "kv_wait_upper_bound", 100, 200, "upper_bound") for i in range(20)],
    )
    con.append("facts", [{"worker": "p", "key": "kv_bytes_per_token", "value": "100000"}])
    run(con)
    said = wording.finding("kv_transfer", con.query("kv_transfer").to_dicts()[0])
    assert "The KV of all prompts is 2.00 GB: 1.00 GB/s for each request on average" in said.detail
    assert any("configuration states" in a for a in said.assumptions)


# -- stages as DistServe computes them --------------------------------------------------------------


def test_distserve_stages_follow_from_the_seven_instants(con: Store) -> None:
    split(con, 3)
    for i, (bridge, sent) in enumerate(((40, 70), (40, 70), (-20, 70))):
        con.append("phases", [
            at(i, "queue", "prefill_queue", 0, 50), at(i, "prefill", "prefill_exec", 50, 80),
            at(i, "prefill", "prefill_gap", 80, 90), at(i, "prefill", "prefill_exec", 90, 100),
            at(i, "decode", "decode_exec", 200, 300), at(i, "decode", "decode_stall", 300, 400),
            at(i, "decode", "decode_exec", 400, 1000),
        ])  # fmt: skip
        if i != 1:  # without its movement a request has no seven instants
            con.append("transfers", [move(i, 100 + bridge, 130 + bridge), move(i, 130, 100 + sent)])
    rows = con.sql("FROM distserve_stages ORDER BY request").to_dicts()
    assert [r["request"] for r in rows] == ["r0", "r2"]
    keys = ("prefill_queuing_ms", "prefill_execution_ms", "transmission_ms", "decoding_queuing_ms",
            "decoding_execution_ms", "bridge_ms")  # fmt: skip
    assert [rows[0][k] for k in keys] == [50, 50, 40, 60, 800, 30]
    assert [rows[1][k] for k in keys] == [50, 50, 90, 10, 800, -20]
    for row in rows:
        assert sum(row[k] for k in keys[:5]) == (row["decoding_end_ns"] - row["issued_ns"]) / MS
        assert row["placed"] is False
    shares = con.sql("FROM distserve_breakdown ORDER BY stage").to_dicts()
    assert [s["name"] for s in shares][2:4] == ["transmission", "decoding queuing"]
    assert sum(s["share_of_sum_ratio"] for s in shares) == pytest.approx(1)
    assert shares[2]["mean_of_shares_ratio"] == pytest.approx((0.04 + 0.09) / 2)


def test_a_wait_behind_a_busy_link_is_told_from_one_beside_an_idle_link(con: Store) -> None:
    """Ten waits of 400 ms each; the link p -> q moves other KV during 300 of them, or not at all."""
    split(con, 10)
    con.append("phases", [at(i, "kv_wait", "kv_space_wait", 100, 500) for i in range(10)]
               + [at(i, "kv_transfer", "kv_transfer", 500, 600) for i in range(10)])  # fmt: skip
    con.append("transfers", [move(i, 500, 600, bytes=10**6) for i in range(10)])
    sides(con)
    rows = con.query("transfer_waits").to_dicts()
    assert [(r["wait_ms"], r["busy_ms"]) for r in rows] == [(400, 0)] * 10
    said = wording.finding("kv_transfer", con.query("kv_transfer").to_dicts()[0])
    assert said.suggestions[0].startswith("KV space")
    con.append("transfers", [
        move(i, start, end, leg=None, source_worker="p", destination_worker="other")
        for i in range(10) for start, end in ((0, 300), (250, 350), (400, 450))
    ])  # fmt: skip
    sides(con)
    rows = con.query("transfer_waits").to_dicts()
    assert [(r["wait_ms"], r["busy_ms"]) for r in rows] == [(400, 250 + 50)] * 10
    con.append(
        "transfers",
        [move(i, 300, 490, leg=None, source_worker="p", destination_worker="q") for i in range(10)],
    )
    sides(con)
    row = con.query("kv_transfer").to_dicts()[0]
    assert row["link_busy_s"] == pytest.approx(10 * 0.39)
    said = wording.finding("kv_transfer", row)
    assert "for 98 % of those waits the link was moving other KV" in said.detail
    assert said.suggestions[0].startswith("the link")


def test_cover_is_that_of_the_union() -> None:
    starts, stops = np.array([10, 0, 5, 30]), np.array([12, 4, 20, 40])
    begin, end = np.array([0, 4, 3, -5, 35, 50, 0]), np.array([5, 5, 35, 60, 36, 60, 0])
    assert list(transfer_waits.covered(starts, stops, begin, end)) == [
        4,
        0,
        1 + 15 + 5,
        4 + 15 + 10,
        1,
        0,
        0,
    ]


def test_failures_count_where_only_the_request_is_known(con: Store) -> None:
    split(con, 3)
    con.append("transfers", [
        move(0, 0, 10), move(1, 0, 20, outcome="failed"), move(2, 0, 10, outcome="expired", direction="load"),
    ])  # fmt: skip
    (row,) = con.query("transfer_failures").to_dicts()
    assert (row["transfers"], row["failed"], row["expired"], row["requests"]) == (3, 1, 1, 2)
    assert row["workers"] == ["q"]  # of a load nobody says where to
    assert [c["request"] for c in row["culprits"]] == ["r1", "r2"]
    assert row["cost_s"] == pytest.approx(0.03)
