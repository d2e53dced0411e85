"""Placement: load, affinity, the router's belief, reuse of caches; rows made by hand, answers known."""

from __future__ import annotations

from typing import Any

import pytest

from pdtrace import _identity_names, wording
from pdtrace.store import Store

MS = 1_000_000
Row = dict[str, Any]


def request(n: int, **more: Any) -> Row:
    return {
        "request": f"r{n:03d}", "deployment": "d", "outcome": "completed", "mode": "aggregated",
        "start_ns": n * 100 * MS, "end_ns": (n * 100 + 1000) * MS, "first_token_ns": (n * 100 + 500) * MS,
        "ttft_ms": 500.0, "prefill_worker": "ab"[n % 2], "decode_worker": "ab"[n % 2],
        "prompt_tokens": 1000, "output_tokens": 100,
    } | more  # fmt: skip


def workers(con: Store, *names: str, role: str = "aggregated") -> None:
    con.append("workers", [{"worker": n, "deployment": "d", "role": role} for n in names])


def decide(con: Store, n: int, believed: int | None, found: int | None, **more: Any) -> None:
    """A choice of a worker with what was believed, and what its engine then found."""
    worker = "ab"[n % 2]
    con.append("legs", [
        {"leg": f"f{n}", "deployment": "d", "request": f"r{n:03d}", "observer": "frontend"},
        {"leg": f"e{n}", "deployment": "d", "request": f"r{n:03d}", "observer": "engine", "worker": worker,
         "cached_tokens": found},
    ])  # fmt: skip
    con.append("decisions", [{"leg": f"f{n}", "worker": worker, "overlap_tokens": believed, "duration_ms": 0.5,
                              "phase": "aggregated", "policy": "kv", "router": "x"} | more])  # fmt: skip


# -- whose count of cached tokens ------------------------------------------------------------------


def test_cached_tokens_of_a_split_request_are_those_of_its_prefill_side_only(con: Store) -> None:
    con.append("requests", [
        request(0, cached_tokens=64),
        request(1, mode="disaggregated", cached_tokens=0),  # the decode side's answer
        request(2, mode="disaggregated", cached_tokens=0), request(3, mode="disaggregated", cached_tokens=900),
    ])  # fmt: skip
    con.append("legs", [
        {"leg": "p", "request": "r002", "observer": "engine", "role": "prefill", "cached_tokens": 480},
        {"leg": "d", "request": "r002", "observer": "engine", "role": "decode", "cached_tokens": 1000},
        {"leg": "x", "request": "r003", "observer": "router", "cached_tokens": 128},
    ])  # fmt: skip
    rows = con.sql(
        "SELECT request, cached_tokens, cached_basis FROM prompt_reuse ORDER BY ALL"
    ).rows()
    assert rows == [
        ("r000", 64, "answer"),
        ("r001", None, None),
        ("r002", 480, "engine"),
        ("r003", 128, "answer"),
    ]


def test_reuse_is_told_by_worker_and_by_turn(con: Store) -> None:
    con.append("requests", [
        request(n, session=f"s{n // 4}", turn=n % 4, prompt_tokens=1000 * (1 + n % 4), cached_tokens=500 * (n % 4))
        for n in range(40)
    ] + [request(99, cached_tokens=None)])  # fmt: skip
    rows = {(r["by"], r["key"]): r for r in con.query("cache_reuse").to_dicts()}
    assert rows["all", ""]["reuse_ratio"] == pytest.approx(0.3)
    assert (rows["all", ""]["requests"], rows["all", ""]["unknown"]) == (40, 1)
    assert rows["all", ""]["low_ratio"] < 0.3 < rows["all", ""]["high_ratio"]
    assert [rows["turn", str(t)]["reuse_ratio"] for t in (1, 2, 3, 4)] == pytest.approx(
        [0, 1 / 4, 1 / 3, 3 / 8]
    )
    assert rows["turn", "2"]["low_ratio"] == rows["turn", "2"]["high_ratio"]  # all alike
    assert rows["worker", "a"]["reuse_ratio"] == pytest.approx(0.25)
    assert rows["worker", "b"]["reuse_ratio"] == pytest.approx(1 / 3)


def test_a_moved_turn_loses_at_most_what_the_worker_before_had(con: Store) -> None:
    con.append("requests", [
        request(0, session="s", turn=0, prefill_worker="a", cached_tokens=0),
        request(1, session="s", turn=1, prefill_worker="b", prompt_tokens=3000, cached_tokens=100),
        request(2, session="s", turn=2, prefill_worker="b", prompt_tokens=4000, cached_tokens=200),
        request(3, session="s", turn=3, prefill_worker=None, prompt_tokens=5000, cached_tokens=None),
        request(4, session="t", turn=0, mode="disaggregated"),
        request(5, session="t", turn=1, mode="disaggregated", prompt_tokens=3000),
    ])  # fmt: skip
    con.append(
        "legs",
        [
            {
                "leg": "e",
                "request": "r005",
                "observer": "engine",
                "role": "prefill",
                "cached_tokens": 1000,
            }
        ],
    )
    rows = con.sql(
        "SELECT request, moved, reusable_tokens, reused_tokens, elsewhere_tokens FROM session_turns ORDER BY ALL"
    ).rows()
    assert rows == [
        ("r001", True, 1100, 100, 1000),  # prompt 1000 and answer 100 of the turn before
        ("r002", False, 3100, 200, 0),  # stayed: placement did not lose it
        ("r003", None, 4100, None, None),
        ("r005", True, 1000, 1000, 0),  # behind a split the answer was made elsewhere
    ]


# -- load ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cached", "total"), [((None, None), 2000), ((200, 0), 1800), ((200, None), None)]
)
def test_prompt_tokens_to_compute_are_summed_where_known_of_all_or_of_none(
    con: Store, cached: tuple[int | None, int | None], total: float | None
) -> None:
    workers(con, "a", "b")
    con.append("requests", [request(n, cached_tokens=found) for n, found in enumerate(cached)])
    rows = {r["measure"]: r["total"] for r in con.query("load_spread").to_dicts()}
    assert rows.get("tokens") == total


@pytest.mark.parametrize(("second_begins", "judged"), [(60, False), (40, True)])
def test_a_restarted_worker_was_not_there_to_be_chosen_all_along(
    con: Store, second_begins: int, judged: bool
) -> None:
    """`a` dies at 50 s; `a2` of the same name follows it, or was there before. `b` is there throughout."""
    s = 10**9
    con.append("workers", [
        {"worker": "a", "name": "x", "deployment": "d", "role": "aggregated", "start_ns": 0, "end_ns": 50 * s},
        {"worker": "a2", "name": "x", "deployment": "d", "role": "aggregated", "start_ns": second_begins * s, "end_ns": 99 * s},
        {"worker": "b", "name": "y", "deployment": "d", "role": "aggregated", "start_ns": 0, "end_ns": 99 * s},
    ])  # fmt: skip
    got = ["a"] * 10 + ["a2"] * 10 + ["b"] * 30
    con.append(
        "requests", [request(n, prefill_worker=w, decode_worker=w) for n, w in enumerate(got)]
    )
    assert bool(con.query("load_spread").height) is judged
    assert bool(con.query("worker_imbalance").height) is judged


def test_the_load_is_compared_by_requests_tokens_and_seconds(con: Store) -> None:
    workers(con, "a", "b", "c")
    con.append("requests", [request(n, prefill_worker="a" if n < 30 else "b", decode_worker="a" if n < 30 else "b",
                                    prompt_tokens=1000 if n < 30 else 3000) for n in range(40)])  # fmt: skip
    con.append("phases", [{"request": f"r{n:03d}", "phase": "prefill", "detail": "prefill_exec", "basis": "measured",
                           "start_ns": 0, "end_ns": 100 * MS} for n in range(40)])  # fmt: skip
    rows = {r["measure"]: r for r in con.query("load_spread").to_dicts()}
    assert set(rows) == {"requests", "tokens", "seconds"}
    assert (
        rows["requests"]["workers"],
        rows["requests"]["idle_workers"],
        rows["requests"]["unsplit"],
    ) == (3, 1, True)
    assert rows["requests"]["over_mean"] == pytest.approx(3 * 0.75)
    half = 3 * 1.96 * (0.75 * 0.25 / 40) ** 0.5  # of a share of 40 equal requests
    assert rows["requests"]["over_mean_high"] == pytest.approx(3 * 0.75 + half)
    assert rows["tokens"]["greatest_ratio"] == pytest.approx(0.5)
    assert rows["seconds"]["greatest"] == "a"
    found = con.query("worker_imbalance").to_dicts()[0]
    assert (found["value"], found["interval_high"]) == (
        pytest.approx(2.25),
        pytest.approx(2.25 + half),
    )
    assert (found["side"], found["seconds_over_mean"]) == ("both", pytest.approx(2.25))


def test_decode_workers_are_a_side_of_their_own(con: Store) -> None:
    workers(con, "p", role="prefill")
    workers(con, "q1", "q2", "q3", role="decode")
    con.append("requests", [request(n, mode="disaggregated", prefill_worker="p", decode_worker="q1" if n % 4 else "q2")
                            for n in range(40)])  # fmt: skip
    con.append(
        "decisions",
        [{"leg": None, "router": "x", "request_id": f"i{n}", "worker": "q1"} for n in range(40)],
    )
    workers(con, "x", role="router")
    row = con.query("routing").to_dicts()[0]
    assert (row["workers_seen"], row["decode_workers"], row["decode_idle_workers"]) == (None, 3, 1)
    assert row["decode_over_mean"] == pytest.approx(2.25)
    assert "1 worker got nothing" in wording.finding("routing", row).detail


# -- belief ----------------------------------------------------------------------------------------


def test_a_belief_is_held_against_the_engine_that_got_the_request(con: Store) -> None:
    con.append("requests", [request(n) for n in range(40)])
    for n in range(40):
        decide(con, n, believed=800 if n < 20 else 0, found=160 if n < 10 else 800 if n < 30 else 0)
    row = con.query("router_belief").to_dicts()[0]
    assert (row["believed_tokens"], row["found_tokens"]) == (20 * 800, 10 * 160 + 20 * 800)
    assert (row["value"], row["share"]) == (6400, pytest.approx(0.4))
    assert (row["too_high"], row["too_low"], row["missed_tokens"]) == (10, 10, 8000)
    assert row["interval_low"] < 6400 < row["interval_high"]
    assert (row["severity"], row["cached_basis"], row["requests"]) == ("warning", "engine", 40)
    assert row["culprits"][0] == {"request": "r000", "value": 640}
    assert wording.finding("router_belief", row).title.startswith(
        "40 % of what the router believed"
    )


def test_answers_that_repeat_the_belief_confirm_nothing(con: Store) -> None:
    workers(con, "a", "b")
    con.append("requests", [request(n, cached_tokens=480 if n % 4 == 0 else 0) for n in range(40)])
    for n in range(40):
        decide(con, n, believed=480 if n % 4 == 0 else 0, found=None)
    assert con.query("router_belief").is_empty()
    row = con.query("routing").to_dicts()[0]
    assert row["belief"] == "copy"
    assert "cannot be told" in wording.finding("routing", row).detail
    con.execute("UPDATE requests SET cached_tokens = 0 WHERE request = 'r004'")
    row = con.query("router_belief").to_dicts()[0]
    assert (row["cached_basis"], row["value"]) == ("answer", 480)
    assert wording.finding("router_belief", row).assumptions


# -- placement -------------------------------------------------------------------------------------


def chat(con: Store, stay: bool, cached: bool) -> None:
    """Ten sessions of four turns; a turn stays with its worker or goes to the other one."""
    workers(con, "a", "b")
    con.append("requests", [
        request(4 * s + t, session=f"s{s}", turn=t, prompt_tokens=1000 * (t + 1), output_tokens=0,
                prefill_worker="ab"[(s if stay else s + t) % 2], cached_tokens=1000 * t if cached else 0)
        for s in range(10) for t in range(4)
    ])  # fmt: skip


def test_turns_that_move_show_what_staying_could_have_saved_at_most(con: Store) -> None:
    chat(con, stay=False, cached=False)
    row = con.query("routing").to_dicts()[0]
    assert (row["later_turns"], row["kept_ratio"], row["chance_ratio"]) == (30, 0, 0.5)
    assert row["kept_low_ratio"] == pytest.approx(0, abs=1e-9)
    assert row["kept_high_ratio"] == pytest.approx(0.1135, abs=1e-3)  # Wilson, 0 of 30
    assert row["value"] == row["moved_saved_tokens"] == 10 * (1000 + 2000 + 3000)
    assert (row["interval_low"], row["interval_high"], row["severity"]) == (0, 60_000, "warning")
    assert row["share"] == pytest.approx(0.6)
    said = wording.finding("routing", row)
    assert said.title.startswith("at most 60 % of the prompt tokens")
    assert any("a bound" in a for a in said.assumptions)
    low = con.query("low_cache_reuse").to_dicts()[0]
    assert (low["elsewhere_tokens"], low["moved_ratio"], low["stayed_ratio"]) == (60_000, 0, None)


def test_turns_that_stay_and_find_nothing_are_no_matter_of_placement(con: Store) -> None:
    chat(con, stay=True, cached=False)
    row = con.query("routing").to_dicts()[0]
    assert (row["kept_ratio"], row["value"], row["severity"]) == (1, 0, "info")
    low = con.query("low_cache_reuse").to_dicts()[0]
    assert (low["value"], low["elsewhere_tokens"]) == (60_000, 0)
    said = wording.finding("low_cache_reuse", low)
    assert "placement is not the reason" in said.detail
    assert said.suggestions == ("cache size and eviction",)


def test_a_router_that_counts_better_matches_bounds_what_it_passed_over(con: Store) -> None:
    workers(con, "a", "b")
    workers(con, "x", role="router")
    con.append("requests", [request(n) for n in range(40)])
    for n in range(40):
        decide(con, n, believed=None, found=None, duration_ms=float(n))
    con.append("samples", [
        {"worker": "x", "metric": f"router_kv_{part}_cached_prefix_tokens_total", "labels": "{}", "value": v, "time_ns": t}
        for part, first, last in (("best_eligible", 100.0, 900.0), ("selected", 100.0, 400.0))
        for t, v in ((1, first), (2, last))
    ])  # fmt: skip
    row = con.query("routing").to_dicts()[0]
    assert (row["value"], row["index_saved_tokens"], row["level"]) == (500, 500, "D")
    assert row["share"] == pytest.approx(500 / 40_000)
    assert (row["decisions"], row["policies"], row["decide_p50_ms"]) == (40, "kv", 19.5)
    assert row["decide_ttft_ratio"] == pytest.approx(0.78 / 20)
    assert row["belief"] == "none"


def test_one_worker_of_a_kind_is_no_choice(con: Store) -> None:
    workers(con, "a")
    con.append("requests", [request(n, prefill_worker="a", decode_worker="a") for n in range(40)])
    for n in range(40):
        decide(con, n, believed=None, found=None, worker="a")
    assert con.query("routing").is_empty()


def test_choices_without_a_leg_are_found_by_the_routers_own_id(con: Store) -> None:
    con.append("requests", [request(n) for n in range(2)])
    con.append(
        "legs",
        [{"leg": "l", "deployment": "d", "request": "r001", "worker": "x", "request_id": "i1"}],
    )
    con.append(
        "decisions",
        [
            {"router": "x", "request_id": "i1", "worker": "b"},
            {"router": "y", "request_id": "i1", "worker": "b"},
        ],
    )
    assert con.sql("SELECT router, request, deployment FROM decision_outcomes ORDER BY ALL").rows() == [
        ("x", "r001", "d"), ("y", None, None),
    ]  # fmt: skip


def test_bare_names_become_the_worker_of_that_deployment_that_has_them(con: Store) -> None:
    con.append("workers", [
        {"worker": w, "deployment": d} for w, d in (("instance:a", "d"), ("instance:b", "d"), ("instance:c", "e"))
    ])  # fmt: skip
    con.append("worker_aliases", [
        {"worker": "instance:a", "kind": "instance", "value": "one"}, {"worker": "instance:c", "kind": "pod", "value": "one"},
        {"worker": "instance:a", "kind": "service", "value": "engine"}, {"worker": "instance:b", "kind": "service", "value": "engine"},
    ])  # fmt: skip
    con.append("legs", [{"leg": "l", "deployment": "d"}, {"leg": "m", "deployment": "e"}])
    con.append(
        "decisions",
        [
            {"leg": leg, "worker": w}
            for leg, w in (("l", "one"), ("m", "one"), ("l", "engine"), ("l", "instance:b"))
        ],
    )
    con.append("transfers", [{"leg": "l", "source_worker": "one", "destination_worker": "two"}])
    _identity_names.resolve(con)
    assert sorted(con.sql("SELECT worker FROM decisions")["worker"]) == [
        "engine",
        "instance:a",
        "instance:b",
        "instance:c",
    ]
    assert con.sql("SELECT source_worker, destination_worker FROM transfers").rows() == [
        ("instance:a", "two")
    ]
