"""When things changed: planted changes are found where they are, steady traffic gives none."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from pdtrace import methods, wording
from pdtrace.methods import _segments
from pdtrace.methods._change_levels import turns
from pdtrace.methods.changes import RESULT_SCHEMA, changes, restarts
from pdtrace.store import Store

T0 = 1_790_000_000_000_000_000
S = 10**9
Floats = np.ndarray[Any, np.dtype[np.float64]]


def run(seed: int = 1, count: int = 600, rate: float = 2.0, sigma: float = 0.5) -> pl.DataFrame:
    """Poisson arrivals, log-normal first tokens around 100 ms, 20 ms a token, 3 % failures."""
    random = np.random.default_rng(seed)
    start = np.cumsum(random.exponential(1 / rate, count))
    ttft = 100 * random.lognormal(0, sigma, count)
    return pl.DataFrame(
        {
            "worker": (worker := random.choice(["a", "b"], count)),
            "line": worker,
            "start_ns": T0 + (start * S).astype(np.int64),
            "ttft_ms": ttft,
            "tpot_ms": 20 * random.lognormal(0, 0.1, count),
            "e2e_ms": ttft + 2000,
            "prompt_tokens": random.integers(100, 900, count),
            "failed": (random.random(count) < 0.03).astype(float),
        }
    )


def scaled(frame: pl.DataFrame, column: str, factor: float, begin: int, end: int) -> pl.DataFrame:
    place = pl.int_range(pl.len())
    inside = (place >= begin) & (place < end)
    return frame.with_columns(pl.when(inside).then(pl.col(column) * factor).otherwise(column))


def found(frame: pl.DataFrame) -> list[tuple[str, str]]:
    return [(r["kind"], r["metric"]) for r in changes(frame, "d").iter_rows(named=True)]


def test_a_change_of_first_tokens_is_dated_with_both_levels() -> None:
    frame = scaled(run(), "ttft_ms", 3, 360, 600)
    table = changes(frame, "d")
    row = table.row(0, named=True)
    assert (table.height, row["kind"], row["metric"], row["worker"]) == (1, "change", "ttft", None)
    truth = frame["start_ns"][360]
    assert row["at_low_ns"] <= truth <= row["at_high_ns"]
    assert abs(row["at_ns"] - truth) < 5 * S
    assert row["before_low"] < 100 < row["before_high"]
    assert row["after_low"] < 300 < row["after_high"]
    assert row["requests_before"] + row["requests_after"] == 600
    assert row["cost_s"] == pytest.approx(240 * 200 * 1.133 / 1e3, rel=0.15)
    assert row["arrival_rate_after"] == pytest.approx(2, rel=0.2)


def test_a_slow_stretch_has_a_beginning_and_an_end() -> None:
    frame = scaled(run(), "ttft_ms", 3, 200, 300)
    begin, end = changes(frame, "d").sort("at_ns")["at_ns"].to_list()
    assert abs(begin - frame["start_ns"][200]) < 5 * S
    assert abs(end - frame["start_ns"][300]) < 5 * S


def test_drift_is_no_staircase() -> None:
    frame = run(count=1000).with_columns(
        pl.col("ttft_ms") * (1 + 2 * pl.int_range(pl.len()) / pl.len())
    )
    row = changes(frame, "d").row(0, named=True)
    assert (row["kind"], row["metric"]) == ("drift", "ttft")
    assert row["level_before"] < 140 < 240 < row["level_after"]


def test_arrivals_and_failures_change_too() -> None:
    slow, fast = run(seed=2, count=400, rate=1), run(seed=3, count=400, rate=4)
    later = slow["start_ns"].max() - T0  # type: ignore[operator]
    both = pl.concat([slow, fast.with_columns(pl.col("start_ns") + later)])
    row = changes(both, "d").row(0, named=True)
    assert (row["metric"], row["unit"]) == ("arrival_rate", "requests/s")
    assert row["before_low"] < 1 < row["before_high"]
    assert row["after_low"] < 4 < row["after_high"]
    broken = run().with_columns(failed=pl.when(pl.int_range(pl.len()) > 450).then(0.4).otherwise(0))
    chance = pl.Series(np.random.default_rng(5).random(600))
    failing = broken.with_columns(failed=(pl.col("failed") > chance).cast(pl.Float64))
    assert found(failing) == [("change", "failures")]


def test_warm_up_is_told_apart_with_the_figures_without_it() -> None:
    frame = scaled(run(), "ttft_ms", 40, 0, 8)
    table = changes(frame, "d")
    row = table.row(0, named=True)
    assert (table.height, row["kind"], row["requests_before"]) == (1, "warm_up", 8)
    assert row["at_ns"] == frame["start_ns"][8]
    assert row["p99_ms"] > 5 * row["p99_without_ms"]


def test_the_first_requests_are_no_warm_up_where_a_stretch_of_another_size_was_as_slow() -> None:
    """Three of the first five have long prompts, and so have three of four in the middle."""
    ttft = 20 + 0.01 * np.arange(400) % 1
    ttft[[0, 2, 3, 4, 200, 201, 203]] = 400, 400, 400, 300, 400, 400, 400
    same = {"tpot_ms": pl.lit(20.0), "worker": pl.lit("a"), "line": pl.lit("a")}
    frame = run(count=400).with_columns(ttft_ms=pl.Series(ttft), **same)
    assert "warm_up" not in [kind for kind, _ in found(frame)]
    ttft[:5] = 4000.0
    assert ("warm_up", "ttft") in found(frame.with_columns(ttft_ms=pl.Series(ttft)))


def test_one_slow_request_at_the_start_is_a_warm_up_only_if_nothing_is_like_it() -> None:
    compiled = run().with_columns(
        ttft_ms=pl.when(pl.int_range(pl.len()) == 0).then(30_000.0).otherwise("ttft_ms")
    )
    assert found(compiled) == [("warm_up", "ttft")]
    again = compiled.with_columns(
        ttft_ms=pl.when(pl.int_range(pl.len()) == 300).then(30_000.0).otherwise("ttft_ms")
    )
    assert found(again) == []


def test_a_worker_that_changes_by_itself_is_named() -> None:
    frame = run(count=1200)
    late = (pl.col("worker") == "b") & (pl.int_range(pl.len()) > 600)
    slowed = frame.with_columns(pl.when(late).then(pl.col("tpot_ms") * 1.5).otherwise("tpot_ms"))
    table = changes(slowed, "d").filter(metric="tpot")
    assert set(table["worker"].to_list()) <= {None, "b"}
    assert table.height >= 1


def waiting(seed: int, count: int, load: float) -> Floats:
    """Waits in front of one server (Lindley): a queue has memory."""
    random = np.random.default_rng(seed)
    gaps, work = random.exponential(1, count), random.exponential(load, count)
    steps = np.concatenate([[0.0], np.cumsum(work[:-1] - gaps[1:])])
    found: Floats = steps - np.minimum.accumulate(steps) + work
    return found


@pytest.mark.parametrize("count", [150, 600])
@pytest.mark.parametrize("kind", ["log-normal", "pareto", "queue"])
def test_steady_traffic_gives_no_alarm(kind: str, count: int) -> None:
    seeds, alarms = 40, 0
    for seed in range(seeds):
        frame = run(seed, count)
        random = np.random.default_rng([seed, 7])
        values = {
            "log-normal": lambda random=random: random.lognormal(4, 1.0, count),
            "pareto": lambda random=random: 50 * (1 + random.pareto(1.3, count)),
            "queue": lambda seed=seed: 100 * waiting(seed, count, 0.5),
        }[kind]()
        alarms += bool(found(frame.with_columns(ttft_ms=pl.Series(values))))
    assert alarms <= (4 if kind == "queue" else 2)


def test_an_episode_of_a_waiting_line_is_no_change_unless_something_else_changed() -> None:
    alarms = 0
    for seed in range(20):
        values = pl.Series(100 * waiting(seed, 600, 0.95))
        alarms += ("change", "ttft") in found(run(seed, 600).with_columns(ttft_ms=values))
    assert alarms <= 3
    # The load rises from a half to nine tenths of what is carried, and arrivals show it.
    told = 0
    for seed in range(10):
        random = np.random.default_rng(seed)
        gaps = random.exponential(1, 800) / np.where(np.arange(800) < 400, 0.5, 0.9)
        work = random.exponential(1, 800)
        steps = np.concatenate([[0.0], np.cumsum(work[:-1] - gaps[1:])])
        waits = steps - np.minimum.accumulate(steps) + work
        frame = run(seed, 800).with_columns(
            ttft_ms=pl.Series(100 * waits),
            start_ns=pl.Series(T0 + (np.cumsum(gaps) * S).astype(int)),
        )
        told += ("change", "ttft") in found(frame) or ("change", "arrival_rate") in found(frame)
    assert told >= 9


def test_equal_values_and_missing_ones_are_no_change() -> None:
    frame = run()
    still = frame.with_columns(ttft_ms=100.0, tpot_ms=20.0, failed=0.0)
    assert not [f for f in found(still) if f[1] != "arrival_rate"]
    nothing = [
        pl.lit(None, pl.Float64).alias(n) for n in ("ttft_ms", "tpot_ms", "failed", "e2e_ms")
    ]
    assert found(frame.with_columns(*nothing)) == []
    assert found(frame.head(20)) == []
    assert found(frame.with_columns(start_ns=pl.lit(T0))) == []
    assert found(frame.clear()) == []


def test_many_requests_are_thinned_and_rates_stay_right() -> None:
    slow, fast = run(seed=2, count=80_000, rate=100), run(seed=3, count=80_000, rate=200)
    later = slow["start_ns"].max() - T0  # type: ignore[operator]
    both = pl.concat([slow, fast.with_columns(pl.col("start_ns") + later)])
    row = changes(both, "d").filter(metric="arrival_rate").row(0, named=True)
    assert row["level_before"] == pytest.approx(100, rel=0.02)
    assert row["level_after"] == pytest.approx(200, rel=0.02)


def test_signs_close_together_are_one_restart() -> None:
    signs = pl.DataFrame(
        {
            "deployment": ["d"] * 3,
            "worker": ["w"] * 3,
            "from_ns": [T0, T0 + 5 * S, T0 + 500 * S],
            "time_ns": [T0 + 10 * S, T0 + 12 * S, T0 + 500 * S],
            "sign": ["counters fell", "it said so", "it said so"],
        }
    )
    table = restarts(signs)
    assert table["kind"].to_list() == ["restart", "restart"]
    assert table["at_low_ns"].to_list() == [T0, T0 + 500 * S]
    assert table["note"][0] == "counters fell, it said so"
    assert dict(table.schema) == dict(pl.Schema(RESULT_SCHEMA))


def test_blocks_widen_until_they_do_not_depend_on_each_other() -> None:
    random = np.random.default_rng(1)
    free = _segments.course(random.random(1000))
    assert (free.cuts, free.per_block) == ((), 10.0)
    bound = _segments.course(waiting(1, 1000, 0.9))
    assert bound.per_block == 0.0 or bound.per_block > 10.0


def test_a_turn_begins_at_the_first_token_before_it_or_at_the_arrival() -> None:
    #        alone   waits   waits   other line   two of one step
    start = np.array([0.0, 10, 20, 5, 500, 510]) * 1e6
    first = np.array([100.0, 250, 300, 60, 600, 600]) * 1e6
    line = np.array([1.0, 1, 1, 2, 1, 1])
    took = turns(start, (first - start) / 1e6, line)
    assert took.tolist() == pytest.approx([100, 150, 50, 55, 50, 50])


def served(seed: int, count: int, before: float, after: float) -> pl.DataFrame:
    """One server, first come first served, 100 ms apart in the mean; busy `before`, from the middle on `after`."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(1, count)
    work = random.exponential(1, count) * np.where(np.arange(count) < count // 2, before, after)
    steps = np.concatenate([[0.0], np.cumsum(work[:-1] - gaps[1:])])
    waits = steps - np.minimum.accumulate(steps) + work
    return run(seed, count).with_columns(
        worker=pl.lit("a"), line=pl.lit("a"), ttft_ms=pl.Series(100 * waits),
        start_ns=pl.Series(T0 + (np.cumsum(gaps) * S / 10).astype(int)),
    )  # fmt: skip


def test_a_slower_server_near_saturation_is_found_by_what_requests_take_at_their_turn() -> None:
    told, alarms = 0, 0
    for seed in range(10):
        kinds = {metric for kind, metric in found(served(seed, 600, 0.5, 0.9)) if kind == "change"}
        told += bool(kinds & {"ttft", "turn"})
        assert "arrival_rate" not in kinds
        alarms += bool({"ttft", "turn"} & {m for _, m in found(served(seed, 600, 0.9, 0.9))})
    assert told >= 7  # of first tokens alone 3
    assert alarms <= 1


# -- through the store ---------------------------------------------------------------------------------


def served_by(servers: int, seed: int, count: int, before: float, after: float) -> Floats:
    """(arrivals s, first tokens s) of servers that share a line, served first come, first served; loads as shares."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1, count))
    work = random.exponential(1, count) * np.where(np.arange(count) < count // 2, before, after)
    free, first = np.zeros(servers), np.zeros(count)
    for i in range(count):
        k = int(free.argmin())
        first[i] = free[k] = max(arrivals[i], free[k]) + work[i] * servers
    return np.stack([arrivals, first, work * servers])


@pytest.mark.parametrize("servers", [2, 4, 8])
def test_the_turn_of_a_request_is_its_service_where_several_servers_share_a_line(
    servers: int,
) -> None:
    arrivals, first, work = served_by(servers, 3, 600, 0.9, 0.9)
    took = turns(arrivals * S, (first - arrivals) * 1e3, np.zeros(600))
    assert took == pytest.approx(work * 1e3, rel=1e-6)


def test_a_slowdown_of_several_servers_under_one_name_is_found() -> None:
    """Nine in ten of such runs; before what is served at once was known, one in three."""
    seen = 0
    for seed in range(8):
        arrivals, first, _ = served_by(4, seed, 600, 0.5, 0.9)
        frame = run(seed).with_columns(
            start_ns=T0 + (arrivals * S / 10).astype(np.int64), ttft_ms=(first - arrivals) * 100,
            worker=pl.lit("a"), line=pl.lit("a"), failed=pl.lit(0.0), tpot_ms=pl.lit(20.0), prompt_tokens=pl.lit(500),
        )  # fmt: skip
        seen += any(metric in {"ttft", "turn"} for _, metric in found(frame))
    assert seen >= 6


def filled(con: Store, frame: pl.DataFrame) -> Store:
    rows = frame.with_row_index("n").select(
        request=pl.format("r{}", "n"), deployment=pl.lit("d"), outcome=pl.lit("completed"),
        start_ns="start_ns", ttft_ms="ttft_ms", tpot_ms="tpot_ms", e2e_ms="e2e_ms",
        end_ns=pl.col("start_ns") + (pl.col("e2e_ms") * 1e6).cast(pl.Int64),
        prompt_tokens="prompt_tokens", output_tokens=pl.lit(100), decode_worker="worker",
    )  # fmt: skip
    con.append("requests", rows)
    methods.run(con, methods.making(["changes"]))
    return con


def test_regime_change_and_warm_up_say_when(con: Store) -> None:
    frame = scaled(scaled(run(), "ttft_ms", 3, 360, 600), "ttft_ms", 60, 0, 8)
    filled(con, frame)
    row = con.query("regime_change").row(0, named=True)
    assert (row["severity"], row["level"], row["unit"]) == ("warning", "C", "times")
    assert row["interval_low"] < 3 < row["interval_high"]
    words = wording.finding("regime_change", row)
    assert "median TTFT" in words.title
    assert "UTC" in words.title
    warm = con.query("warm_up").row(0, named=True)
    assert (warm["requests"], warm["metric"]) == (8, "ttft")
    assert "--since" in wording.finding("warm_up", warm).suggestions[0]


def test_restarts_in_use_come_from_events_and_counters_that_fall(con: Store) -> None:
    con.append("workers", [{"worker": "w", "deployment": "d"}])
    con.append("legs", [{"leg": "l", "worker": "w", "start_ns": T0}])
    con.append(
        "events",
        [
            {"worker": "w", "kind": "started", "time_ns": T0 - S},
            {"worker": "w", "kind": "restart", "time_ns": T0 + 100 * S},
        ],
    )
    con.append(
        "samples",
        [
            {"worker": "w", "metric": "m", "kind": "counter", "time_ns": T0 + n * S, "value": v}
            for n, v in ((0, 5.0), (500, 9.0), (510, 1.0), (520, 2.0))
        ],
    )
    methods.run(con, methods.making(["changes"]))
    table = con.sql("FROM changes ORDER BY at_ns")
    assert table["at_ns"].to_list() == [T0 + 100 * S, T0 + 510 * S]
    row = con.query("regime_change").row(0, named=True)
    assert (row["level"], row["value"], row["workers"]) == ("D", None, ["w"])
    assert "2 restarts" in wording.finding("regime_change", row).title


def test_trouble_in_a_part_of_the_time_is_said_to_be_there(con: Store) -> None:
    frame = scaled(run(sigma=0.1), "ttft_ms", 10, 300, 330)
    filled(con, frame)
    row = con.sql("FROM finding_windows() WHERE finding = 'slow_first_token'").row(0, named=True)
    assert row["concentrated"] is True
    assert frame["start_ns"][300] <= row["start_ns"] < row["end_ns"] <= frame["start_ns"][329]
    assert row["weight_ratio"] >= 0.9
    assert row["request_ratio"] == pytest.approx(0.045, abs=0.01)
    slow = con.query("slow_first_token").row(0, named=True)
    told = wording.finding("slow_first_token", slow, row)
    assert " of it came between " in told.detail
    assert told.when == (row["start_ns"], row["end_ns"], row["weight_ratio"])


def test_trouble_all_along_is_not_concentrated(con: Store) -> None:
    place = pl.int_range(pl.len())
    frame = run(sigma=0.1).with_columns(
        pl.when(place % 20 == 0).then(pl.col("ttft_ms") * 10).otherwise("ttft_ms")
    )
    filled(con, frame)
    row = con.sql("FROM finding_windows() WHERE finding = 'slow_first_token'").row(0, named=True)
    assert row["concentrated"] is False


def test_time_series_counts_every_request_once_for_the_whole_and_once_for_its_worker(
    con: Store,
) -> None:
    filled(con, run())
    rows = con.sql("FROM time_series(bins := 10)")
    whole = rows.filter(pl.col("worker").is_null())
    assert whole.height == 10
    assert whole["arrivals"].sum() == rows.filter(pl.col("worker").is_not_null())["arrivals"].sum()
    assert whole["arrivals"].sum() == 600
    assert whole["in_flight"].mean() == pytest.approx(2 * 2.1, rel=0.2)


def test_waits_and_kv_troubles_say_when_they_came(con: Store) -> None:
    con.append("workers", [{"worker": "w", "deployment": "d"}])
    con.append("requests", [
        {"request": f"r{n:03d}", "deployment": "d", "outcome": "completed", "mode": "aggregated",
         "start_ns": T0 + n * S, "end_ns": T0 + (n + 3) * S, "first_token_ns": T0 + (n + 2) * S,
         "ttft_ms": 2000.0, "e2e_ms": 3000.0, "decode_worker": "w", "prefill_worker": "w"}
        for n in range(200)
    ])  # fmt: skip
    details = {"router": "router_queue", "queue": "prefill_queue", "kv_transfer": "kv_transfer"}
    con.append("phases", [
        {"request": f"r{n:03d}", "phase": phase, "detail": detail, "basis": "measured",
         # a second each in a tenth of the run, a few ms all along: too short to be felt
         "start_ns": T0 + n * S, "end_ns": T0 + n * S + (S if 100 <= n < 120 else 10_000_000)}
        for n in range(200) for phase, detail in details.items()
    ])  # fmt: skip
    con.append("transfers", [
        {"source": 0, "record": n, "source_worker": "w", "destination_worker": "w", "outcome": "failed",
         "start_ns": T0 + (100 + n) * S, "end_ns": T0 + (100 + n) * S + 5} for n in range(10)
    ])  # fmt: skip
    con.append("steps", [
        {"worker": "w", "seq": n, "start_ns": T0 + n * S, "elapsed_ns": S // 2, "capture": "full",
         "kv_usage_ratio": 0.95 if 150 <= n < 160 else 0.5} for n in range(200)
    ])  # fmt: skip
    rows = {r["finding"]: r for r in con.sql("FROM finding_windows()").to_dicts()}
    for finding in ("router_queue", "engine_queue", "kv_transfer"):
        row = rows[finding]
        assert row["concentrated"] is True, finding
        assert T0 + 100 * S <= row["start_ns"] < row["end_ns"] <= T0 + 119 * S
        assert row["pieces"] == pytest.approx(20)
    assert rows["transfer_failures"]["concentrated"] is True
    assert rows["transfer_failures"]["start_ns"] >= T0 + 100 * S
    pressed = rows["kv_pressure"]
    assert pressed["concentrated"] is True
    assert T0 + 150 * S <= pressed["start_ns"] < pressed["end_ns"] <= T0 + 159 * S
