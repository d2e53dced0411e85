"""Clocks: offsets with known answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from pdtrace import clocks, explain
from pdtrace._clock_windows import Offsets, offsets
from pdtrace.store import Store

MS = 10**6
T0 = 1_790_000_000_000_000_000


def hops(
    theta_ns: float, *, count: int = 200, drift: float = 0.0, back_ms: float = 0.15
) -> pl.DataFrame:
    """Hops of 100 ms every 1.5 s; the server's clock is theta (plus drift) ahead; delays of 0.1 ms and more."""
    rng = np.random.default_rng(1)
    sent = T0 + np.arange(count) * 1_500 * MS
    out = (0.1 + rng.exponential(0.1, count)) * MS
    home = (back_ms + rng.exponential(0.1, count)) * MS
    ahead = theta_ns + drift * (sent - sent.mean())
    received = sent + out + ahead
    answered = received + 100 * MS
    back = answered - ahead + home
    return pl.DataFrame(
        {
            n: v.astype(np.int64)
            for n, v in {
                "sent": sent,
                "received": received,
                "answered": answered,
                "back": back,
            }.items()
        }
    )


def completed(n: int) -> dict[str, Any]:
    """What all legs of a completed request on wall clocks have in common."""
    return {
        "deployment": "d", "request": f"q{n}", "clock": "wall", "resolution_ns": 1, "status": "completed",
    }  # fmt: skip


def test_no_offset_is_not_shifted() -> None:
    found, _ = clocks.hop_bounds(hops(0))
    assert abs(found["offset_ns"]) < 0.1 * MS  # type: ignore[arg-type]
    assert "nothing shifted" in str(found["method"])


@pytest.mark.parametrize("theta", [50 * MS, -50 * MS])
def test_clear_offset_is_found_within_its_half_width(theta: int) -> None:
    found, _ = clocks.hop_bounds(hops(theta))
    assert found["method"] == clocks.SHIFTED
    assert abs(found["offset_ns"] - theta) <= found["half_width_ns"] < 0.3 * MS  # type: ignore[operator]


def test_drift_is_taken_out() -> None:
    found, _ = clocks.hop_bounds(hops(20 * MS, drift=50e-6))
    assert found["drift_ppm"] == pytest.approx(50, abs=2)
    assert abs(found["offset_ns"] - 20 * MS) <= found["half_width_ns"] < 1 * MS  # type: ignore[operator]


def test_hops_that_end_before_their_server_give_an_upper_bound_only() -> None:
    found, _ = clocks.hop_bounds(hops(0, back_ms=-80))
    assert found["half_width_ns"] is None
    assert "cross" in str(found["method"])


@pytest.mark.parametrize("theta", [50 * MS, -50 * MS])
def test_ends_that_are_stamped_a_little_late_only_widen_a_large_offset(theta: int) -> None:
    found, _ = clocks.hop_bounds(hops(theta, back_ms=-1.2))
    assert found["method"] == clocks.SHIFTED
    assert abs(found["offset_ns"] - theta) <= found["half_width_ns"] < 2 * MS  # type: ignore[operator]


def two_way(seed: int, pairs: int = 200) -> tuple[pl.DataFrame, Any]:
    """300 s of hops: offset N(0, 50 ms), drift +-50 ppm, one-way delay of 0.15 ms in the median."""
    rng = np.random.default_rng(seed)
    theta, drift = rng.normal(0, 50 * MS), rng.uniform(-50e-6, 50e-6)
    sent = np.sort(rng.uniform(0, 300e9, pairs))
    there = sent + 0.15 * MS * rng.lognormal(0, 0.5, pairs)
    home = there + rng.exponential(2e9, pairs)
    back = home + 0.15 * MS * rng.lognormal(0, 0.5, pairs)

    def ahead(at: Any) -> Any:
        return theta + drift * (at - 150e9)

    columns = (sent, there + ahead(there), home + ahead(home), back)
    frame = pl.DataFrame(
        {
            n: np.round(v).astype(np.int64) + T0
            for n, v in zip(("sent", "received", "answered", "back"), columns, strict=True)
        }
    )
    return frame, ahead


def corrected(instants: Any, found: Offsets) -> Any:
    since = instants - found.origin
    stretch = np.maximum(np.searchsorted(found.edges, since, "right") - 1, 0)
    return instants - (
        found.offsets[stretch] + found.drift * (since - found.middles[stretch])
    ).round().astype(np.int64)


def bounded(frame: pl.DataFrame) -> Offsets:
    return offsets(*(frame[n].to_numpy() for n in ("sent", "received", "answered", "back")))


def test_two_hundred_messages_tell_an_offset_to_a_tenth_of_a_millisecond() -> None:
    errors, negative, messages = [], 0, 0
    for seed in range(40):
        frame, ahead = two_way(seed)
        found = bounded(frame)
        assert found.feasible.all()
        truth = ahead(found.middles + found.origin - T0)
        errors += list(np.abs(found.offsets - truth))
        assert (np.abs(found.offsets - truth) <= (found.high - found.low) / 2 + 0.05 * MS).all()
        received, answered = (
            corrected(frame[n].to_numpy(), found) for n in ("received", "answered")
        )
        negative += int((received < frame["sent"].to_numpy()).sum())
        negative += int((frame["back"].to_numpy() < answered).sum())
        messages += 2 * frame.height
    assert np.quantile(errors, 0.95) <= 0.1 * MS
    assert negative <= 0.001 * messages


def test_few_messages_show_their_width() -> None:
    widths = [bounded(two_way(seed, 20)[0]) for seed in range(10)]
    many = [bounded(two_way(seed, 200)[0]) for seed in range(10)]

    def width(found: list[Offsets]) -> float:
        return float(
            np.median([(f.high - f.low)[f.feasible].max() for f in found if f.feasible.any()])
        )

    assert width(widths) > 1.2 * width(many)


def test_a_clock_step_marks_its_minute_and_is_not_clamped() -> None:
    frame, _ = two_way(3)
    late = pl.col("sent") > T0 + 150_000_000_000
    stepped = frame.with_columns(
        pl.when(late).then(pl.col(n) + 40 * MS).otherwise(n) for n in ("received", "answered")
    )
    found = bounded(stepped)
    assert (~found.feasible).any()
    row, _ = clocks.hop_bounds(stepped)
    assert row["half_width_ns"] is None or row["infeasible_windows"]


def test_one_way_messages_give_an_upper_bound_only() -> None:
    frame = two_way(1)[0].with_columns(pl.lit(None, pl.Int64).alias("back"))
    row, moving = clocks.hop_bounds(frame)
    assert (row["half_width_ns"], moving) == (None, None)
    assert "upper bound" in str(row["method"])
    least = (frame["received"] - frame["sent"]).min()
    assert (row["offset_ns"], row["lower_ns"], row["upper_ns"]) == (None, None, least)


def test_domain_offset_is_the_least_delayed_request() -> None:
    row = clocks.domain_offset("perf:x", "d", np.arange(0, 101) * MS + 1_000 * MS)
    assert row["offset_ns"] == -1_005 * MS
    assert row["residual_p50_ns"] == 45 * MS


@pytest.mark.parametrize("late", [0.0, 0.05, 0.3, 0.6, 2.0])
def test_an_offset_by_arrivals_of_whole_seconds_holds_the_truth(late: float) -> None:
    """Requests reach the server up to `late` seconds after their start, as behind a client's own queue."""
    inside = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        start = random.uniform(0, 120, 200)
        arrival = np.floor(1000.37 + start + random.uniform(0, 1, 200) * late)
        row = clocks.domain_offset(
            "perf:x", "d", ((arrival - start) * 1e9).astype(np.int64), coarse=10**9
        )
        inside += row["lower_ns"] <= -1_000_370_000_000 <= row["upper_ns"]  # type: ignore[operator]
    assert inside >= 19


def test_arrivals_of_whole_seconds_do_not_pull_a_clock_that_others_tell(store: Store) -> None:
    legs: list[dict[str, Any]] = []
    for n in range(40):
        start = n * 170 * MS
        arrival = start + 5_000 * MS + (1 + n % 3) * MS
        log = n % 5 == 0  # aborted requests leave a log line only
        legs += [
            {"leg": f"c{n}", "request": f"q{n}", "observer": "client", "clock": "perf:x",
             "clock_start_ns": start, "ttft_ms": 30.0},
            {"leg": f"s{n}", "request": f"q{n}", "observer": "engine", "clock": "wall",
             "start_ns": arrival // (1_000 * MS) * 1_000 * MS if log else arrival,
             "resolution_ns": 1_000 * MS if log else 1},
        ]  # fmt: skip
    store.append("legs", legs)
    clocks.align(store)
    row = store.sql("FROM clocks").row(0, named=True)
    assert (row["offset_ns"], row["half_width_ns"], row["pairs"]) == (-5_001 * MS, MS, 32)


def pairs_under_a_router(store: Store, *, p: int, d: int, late: int = 0) -> None:
    """P/D requests of 20 (n even) or 200 ms of prefill; `p` and `d` are the clocks of P and D, whose roles nobody states."""
    legs: list[dict[str, Any]] = []
    for n in range(30):
        t, prefill = n * 300 * MS, (20 if n % 2 == 0 else 200) * MS
        base = completed(n)
        made = t + 2 * MS + prefill
        first = made + 8 * MS
        legs += [
            {**base, "leg": f"r{n}", "worker": "instance:r", "observer": "router",
             "start_ns": t, "first_token_ns": first + MS, "end_ns": t + 600 * MS},
            {**base, "leg": f"p{n}", "worker": "instance:p", "observer": "engine", "output_tokens": 1,
             "start_ns": t + 2 * MS + p, "first_token_ns": made + p, "end_ns": made + p},
            {**base, "leg": f"e{n}", "worker": "instance:e", "observer": "engine", "output_tokens": 50,
             "start_ns": made + 2 * MS + d, "first_token_ns": first + d, "end_ns": t + 599 * MS + d + late},
        ]  # fmt: skip
    store.append("legs", legs)
    store.append("workers", [{"worker": f"instance:{w}"} for w in "rpe"])


def test_halves_under_a_router_tell_clocks_that_are_far_off(store: Store) -> None:
    pairs_under_a_router(store, p=-120 * MS, d=45 * MS)
    clocks.align(store)
    found = {r["domain"]: r for r in store.sql("FROM clocks").iter_rows(named=True)}
    for worker, theta in (("instance:p", -120 * MS), ("instance:e", 45 * MS)):
        row = found[worker]
        assert row["lower_ns"] <= theta <= row["upper_ns"]
        assert row["half_width_ns"] < 15 * MS
    moved = "SELECT start_ns FROM legs WHERE leg = 'p0'"
    assert abs(store.scalar(moved) - 2 * MS) <= found["instance:p"]["half_width_ns"]


@pytest.mark.parametrize(
    "clock", [{"p": 0, "d": 0}, {"p": 3 * MS, "d": -2 * MS}, {"p": 0, "d": 0, "late": 30 * MS}]
)
def test_halves_that_may_fit_are_not_moved(store: Store, clock: dict[str, int]) -> None:
    pairs_under_a_router(store, **clock)
    clocks.align(store)
    assert store.count("clocks") == 0


@pytest.mark.parametrize(
    ("theta", "late"), [(310 * MS, 0), (-40 * MS, 0), (2 * MS, 0), (0, 40 * MS)]
)
def test_each_client_is_moved_to_the_servers_clock_if_it_is_surely_off(
    store: Store, theta: int, late: int
) -> None:
    """Two clients of one router; `late`: the router stamps its ends after the client has the answer."""
    legs: list[dict[str, Any]] = []
    for n in range(40):
        t, own = n * 100 * MS, theta if n % 2 else 0
        base = completed(n)
        legs += [
            {**base, "leg": f"c{n}", "worker": f"instance:c{n % 2}", "observer": "client",
             "start_ns": t + own, "first_token_ns": t + 33 * MS + own, "end_ns": t + 90 * MS + own},
            {**base, "leg": f"r{n}", "worker": "instance:r", "observer": "router",
             "start_ns": t + MS, "first_token_ns": t + 32 * MS, "end_ns": t + 89 * MS + late},
        ]  # fmt: skip
    store.append("legs", legs)
    store.append("workers", [{"worker": f"instance:{w}"} for w in ("c0", "c1", "r")])
    clocks.align(store)
    if abs(theta) > 3 * MS:
        row = store.sql("FROM clocks").row(0, named=True)
        assert store.count("clocks") == 1
        assert (row["domain"], row["reference"], row["offset_ns"]) == (
            "instance:c1",
            "instance:r",
            theta,
        )
        theta = 0
    assert store.count("clocks") <= 1
    start = dict(store.rows("SELECT leg, start_ns FROM legs"))
    for leg, at in (("c0", 0), ("c1", 100 * MS + theta), ("r1", 101 * MS)):
        assert abs(start[leg] - at) <= 1


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("queue", "late"), [(100 * MS, 60 * MS), (3_000 * MS, 2_500 * MS)])
def test_a_gateway_that_ends_its_record_late_moves_no_client(
    store: Store, first: bool, queue: int, late: int
) -> None:
    """It begins its record `queue` after the client's request, and ends it `late` after the answer; the clocks agree."""
    legs: list[dict[str, Any]] = []
    for n in range(40):
        t, wait = n * 100 * MS, queue + n % 7 * MS
        base = completed(n)
        legs += [
            {**base, "leg": f"c{n}", "worker": "instance:c", "observer": "client", "start_ns": t,
             "first_token_ns": t + wait + 33 * MS if first else None, "end_ns": t + wait + 900 * MS},
            {**base, "leg": f"g{n}", "worker": "instance:g", "observer": "frontend", "start_ns": t + wait,
             "first_token_ns": t + wait + 32 * MS if first else None, "end_ns": t + wait + 900 * MS + late},
        ]  # fmt: skip
    store.append("legs", legs)
    store.append("workers", [{"worker": f"instance:{w}"} for w in "cg"])
    clocks.align(store)
    assert store.count("clocks") == 0
    assert store.scalar("SELECT start_ns FROM legs WHERE leg = 'c0'") == 0


@pytest.mark.parametrize("first", [4 * MS, None])
def test_a_router_that_ends_its_record_with_the_headers_tells_nothing_of_decode_workers(
    store: Store, first: int | None
) -> None:
    """Prompts of 1.5 s, answers of 1 s: D's end behind the record's would look like a clock that is ahead."""
    legs: list[dict[str, Any]] = []
    for n in range(40):
        t, made = n * 5_000 * MS, n * 5_000 * MS + 1_500 * MS
        base = completed(n)
        legs += [
            {**base, "leg": f"r{n}", "worker": "instance:r", "observer": "router", "start_ns": t,
             "first_token_ns": None if first is None else made + first, "end_ns": made + 5 * MS},
            {**base, "leg": f"p{n}", "worker": "instance:p", "observer": "engine", "role": "prefill",
             "start_ns": t + MS, "first_token_ns": made, "end_ns": made},
            {**base, "leg": f"e{n}", "worker": "instance:e", "observer": "engine", "role": "decode",
             "start_ns": made + 2 * MS, "first_token_ns": made + 4 * MS, "end_ns": made + 1_000 * MS},
        ]  # fmt: skip
    store.append("legs", legs)
    store.append("workers", [{"worker": f"instance:{w}"} for w in "rpe"])
    clocks.align(store)
    assert store.count("clocks") == 0


def skewed_fleet(store: Store, theta: int) -> None:
    legs: list[dict[str, Any]] = []
    rows = hops(theta, count=20)
    for n, (sent, received, answered, back) in enumerate(rows.iter_rows()):
        base = {
            "deployment": "d",
            "request": f"q{n}",
            "trace_id": f"t{n}",
            "clock": "wall",
            "resolution_ns": 1,
        }
        legs.append(
            {
                **base,
                "leg": f"h{n}",
                "worker": "instance:r",
                "observer": "router",
                "container": True,
                "span_id": "h",
                "start_ns": sent,
                "end_ns": back,
            }
        )
        legs.append(
            {
                **base,
                "leg": f"e{n}",
                "worker": "instance:e",
                "observer": "engine",
                "container": False,
                "span_id": "e",
                "parent_span_id": "h",
                "start_ns": received,
                "end_ns": answered,
                "first_token_ns": received + MS,
            }
        )
    store.append("legs", legs)
    store.append("workers", [{"worker": "instance:r"}, {"worker": "instance:e"}])
    store.append(
        "intervals",
        [
            {
                "leg": "e3",
                "detail": "prefill_exec",
                "start_ns": legs[7]["start_ns"],
                "end_ns": legs[7]["end_ns"],
            }
        ],
    )
    at = {"leg": "e3", "start_ns": legs[7]["start_ns"], "end_ns": legs[7]["end_ns"]}
    store.append("transfers", [at])
    store.append("decisions", [{"leg": "e3", "time_ns": at["start_ns"]}])
    store.append("steps", [{"worker": "instance:e", "seq": 1, "start_ns": legs[7]["start_ns"]}])


def test_skewed_worker_is_moved_with_all_that_it_stamped_and_only_once(store: Store) -> None:
    skewed_fleet(store, -30 * MS)
    assert (
        store.sql(
            "SELECT count(*) FROM legs WHERE leg LIKE 'e%' AND start_ns < 1790000000000000000 + 1500000000 * CAST(leg[2:] AS BIGINT)"
        ).item()
        == 20
    )
    clocks.align(store)
    clocks.align(store)
    row = store.sql("FROM clocks").row(0, named=True)
    assert (row["domain"], row["reference"], row["method"]) == (
        "instance:e",
        "instance:r",
        clocks.SHIFTED,
    )
    assert abs(row["offset_ns"] + 30 * MS) <= row["half_width_ns"]
    late = store.sql(
        "SELECT min(e.start_ns - h.start_ns) AS d, min(h.end_ns - e.end_ns) AS b FROM legs e JOIN legs h USING (trace_id) WHERE e.leg LIKE 'e%' AND h.leg LIKE 'h%'"
    ).row(0)
    assert late[0] > 0
    assert late[1] > 0
    start = store.sql("SELECT start_ns FROM legs WHERE leg = 'e3'").item()
    assert store.sql("SELECT start_ns FROM intervals").item() == start
    assert store.sql("SELECT start_ns FROM steps").item() == start
    assert store.sql("SELECT start_ns FROM transfers").item() == start
    assert store.sql("SELECT time_ns FROM decisions").item() == start


def test_a_drifting_worker_is_moved_minute_by_minute_and_explain_says_so(store: Store) -> None:
    frame, _ = two_way(5)
    legs: list[dict[str, Any]] = []
    for n, (sent, received, answered, back) in enumerate(frame.iter_rows()):
        shared = {"deployment": "d", "request": f"q{n}", "trace_id": f"t{n}", "resolution_ns": 1}
        hop = {"leg": f"h{n}", "worker": "instance:r", "observer": "router", "container": True}
        served = {"leg": f"e{n}", "worker": "instance:{e}", "observer": "engine"}
        legs.append({**shared, **hop, "span_id": "h", "start_ns": sent, "end_ns": back})
        legs.append({**shared, **served, "span_id": "e", "parent_span_id": "h",
                     "container": False, "start_ns": received, "end_ns": answered})  # fmt: skip
    store.append("legs", legs)
    store.append("workers", [{"worker": "instance:r"}, {"worker": "instance:{e}"}])
    store.append("requests", [{"request": "q7", "deployment": "d"}])
    step = {"worker": "instance:{e}", "seq": 1, "start_ns": frame["received"][100]}
    store.append("steps", [step])
    clocks.align(store)
    early = store.sql(
        """SELECT count(*) FILTER (e.start_ns < h.start_ns OR e.end_ns > h.end_ns) AS n
           FROM legs e JOIN legs h USING (trace_id) WHERE e.leg LIKE 'e%' AND h.leg LIKE 'h%'"""
    ).item()
    assert early == 0
    assert (
        store.sql("SELECT start_ns FROM steps").item()
        == store.sql("SELECT start_ns FROM legs WHERE leg = 'e100'").item()
    )
    row = store.sql("FROM clocks").row(0, named=True)
    assert row["half_width_ns"] < 0.2 * MS
    assert (row["windows"], row["infeasible_windows"]) == (store.count("clock_windows"), 0)
    told = {s["title"]: s["rows"] for s in explain.explain(store, "q7")["sections"]}
    assert told["Clocks that were moved"][0]["±"].endswith("ms")


def test_workers_of_one_host_have_one_clock(store: Store) -> None:
    skewed_fleet(store, -30 * MS)
    store.execute("UPDATE workers SET host = 'same'")
    clocks.align(store)
    assert store.count("clocks") == 0


def test_nothing_to_align(store: Store) -> None:
    clocks.align(store)
    assert store.count("clocks") == 0
