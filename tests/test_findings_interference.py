"""Prefill interference from several evidence levels: each worker is judged once, at its best level."""

from __future__ import annotations

from typing import Any

import pytest
from finding_rows import Row, none, one, request, worker

from pdtrace import wording
from pdtrace.store import Store


def judged(worker: str, lost: float | None, flagged: bool | None) -> Row:
    return {
        "worker": worker, "rank": "0", "deployment": "d", "role": "aggregated", "steps": 1000,
        "decode_only_steps": 900, "mixed_steps": 100, "prefill_only_steps": 0, "affected_steps": 100,
        "lost_s": lost, "lost_low_s": lost and lost - 0.1, "lost_high_s": lost and lost + 0.1,
        "decode_s": 40.0 if lost is not None else None, "flagged": flagged, "lost_ratio_low": 0.05,
        "note": None if lost is not None else "sampled",
    }  # fmt: skip


def test_prefill_interference_sums_flagged_workers_only(con: Store) -> None:
    con.append(
        "interference_steps",
        [
            judged("a", 4.0, True),
            judged("b", 2.0, True),
            judged("c", 0.1, False),
            judged("x", None, None),
        ],
    )
    con.append("workers", [worker(w) for w in "abcx"])
    con.append("requests", [request(n, decode_worker="abcx"[n % 4]) for n in range(20)])
    con.append(
        "interference_step_losses",
        [
            {
                "worker": "a",
                "rank": "0",
                "seq": 7,
                "elapsed_ms": 90.0,
                "prefill_tokens": 100,
                "lost_s": 1.0,
            }
        ],
    )
    con.append("step_members", [
        {"worker": "a", "rank": "0", "seq": 7, "request_id": "x-1", "prefill_tokens": 75},
        {"worker": "a", "rank": "0", "seq": 7, "request_id": "x-2", "prefill_tokens": 25},
    ])  # fmt: skip
    con.append(
        "legs",
        [{"leg": "l", "worker": "a", "request_id": "x-1", "request": "r0", "deployment": "d"}],
    )
    row = one(con, "prefill_interference")
    assert (row["value"], row["interval_low"], row["interval_high"]) == (
        6.0,
        pytest.approx(5.8),
        pytest.approx(6.2),
    )
    assert (row["decode_s"], row["share"], row["severity"]) == (80.0, 0.075, "warning")
    assert (row["workers"], row["requests"]) == (["a", "b"], 10)
    assert row["culprits"] == [{"request": "r0", "value": 0.75}, {"request": "x-2", "value": 0.25}]
    assert (row["workers_judged"], row["workers_unknown"], row["longest_step_ms"]) == (3, 1, 90.0)


def test_no_flag_no_interference(con: Store) -> None:
    con.append("interference_steps", [judged("c", 0.1, False), judged("x", None, None)])
    none(con, "prefill_interference")


def by_gaps(name: str, lost: float | None, flagged: bool | None, **more: Any) -> dict[str, Any]:
    return {
        "worker": name, "deployment": "d", "role": "aggregated", "lost_s": lost,
        "lost_low_s": lost and lost - 0.2, "lost_high_s": lost and lost + 0.2,
        "decode_s": 50.0 if lost is not None else None, "lost_ratio_low": 0.04, "flagged": flagged,
        "note": None if flagged is not None else "no token times", **more,
    }  # fmt: skip


def test_each_worker_is_judged_at_its_best_level(con: Store) -> None:
    con.append("workers", [worker(w) for w in "abcde"])
    con.append("interference_steps", [judged("a", 4.0, True), judged("b", None, None)])
    con.append(
        "interference_gaps",
        [
            by_gaps("a", 4.2, True, tail_explained_ratio=0.9, events=12, event_ms=8.0),
            by_gaps("b", 3.0, True, tail_explained_ratio=0.5, events=5, event_ms=9.0),
            by_gaps("c", 0.1, False),
            by_gaps("d", None, None),
        ],
    )
    con.append(
        "interference_requests",
        [by_gaps(w, 9.0, True) for w in "ab"] + [by_gaps("e", None, None)],
    )
    con.append(
        "interference_gap_losses",
        [
            {"worker": "a", "culprit": "p1", "victim": "v1", "lost_s": 3.0, "pairs": 1},
            {"worker": "b", "culprit": "p2", "victim": "v2", "lost_s": 2.0, "pairs": 1},
            {"worker": "b", "culprit": "p1", "victim": "v2", "lost_s": 0.5, "pairs": 1},
            {"worker": "b", "culprit": None, "victim": None, "lost_s": 0.5, "pairs": 9},
            {"worker": "c", "culprit": "p9", "victim": "v9", "lost_s": 0.1, "pairs": 1},
        ],
    )
    rows = {r["worker"]: r for r in con.query("interference_by_worker").iter_rows(named=True)}
    assert {w: (r["level"], r["flagged"]) for w, r in rows.items()} == {
        "a": ("A", True),
        "b": ("B", True),
        "c": ("B", False),
        "d": (None, None),
        "e": (None, None),
    }
    assert (rows["a"]["steps_lost_s"], rows["a"]["gaps_lost_s"]) == (4.0, 4.2)
    assert rows["d"]["notes"] == ["no token times"]
    row = one(con, "prefill_interference")
    assert (row["level"], row["levels"], row["value"]) == ("B", ["A", "B"], 7.0)
    assert (row["decode_s"], row["share"]) == (90.0, pytest.approx(7 / 90))
    assert row["workers"] == ["a", "b"]
    assert row["culprits"] == [{"request": "p1", "value": 3.5}, {"request": "p2", "value": 2.0}]
    assert row["victims"] == [{"request": "v1", "value": 3.0}, {"request": "v2", "value": 2.5}]
    assert (row["named_by"], row["gaps_lost_s"]) == ("token times", 4.2)
    assert (row["events"], row["event_ms"], row["tail_explained_ratio"]) == (17, 8.0, 0.9)
    assert (row["workers_judged"], row["workers_unknown"]) == (3, 2)


def test_token_times_of_a_sample_do_not_check_the_steps(con: Store) -> None:
    """Of every tenth request token times are there: they know a tenth of prompts and streams."""
    con.append("workers", [worker("a")])
    con.append("interference_steps", [judged("a", 4.0, True)])
    sample = by_gaps("a", 0.1, False, tail_explained_ratio=0.0, best_shift_ms=315.0)
    con.append("interference_gaps", [sample | {"decode_s": 4.0}])
    row = one(con, "prefill_interference")
    assert (row["value"], row["gaps_lost_s"], row["tail_explained_ratio"]) == (4.0, None, None)
    assert row["best_shift_ms"] is None
    said = wording.finding("prefill_interference", row).detail
    assert "token times of the same workers" not in said
    assert "disagree" not in said


def test_no_level_judges_several_engines_under_one_name(con: Store) -> None:
    """Prompts of one engine, laid over the tokens of the other, gave half of the loss with a narrow interval."""
    con.append("workers", [worker("a")])
    note = (
        "step numbers of several engines alternate under one name: their steps cannot be told apart"
    )
    con.append("interference_steps", [judged("a", None, None) | {"note": note}])
    con.append("interference_gaps", [by_gaps("a", 4.2, True)])
    con.append("interference_requests", [by_gaps("a", 4.2, True)])
    none(con, "prefill_interference")
    (row,) = con.query("interference_by_worker").to_dicts()
    assert (row["level"], row["flagged"], row["notes"]) == (None, None, [note])


def test_a_server_under_two_names_is_counted_once(con: Store) -> None:
    """Its log has the steps under a pid, its spans the requests under an instance: one loss, not two."""
    con.append("workers", [worker("pid"), worker("instance"), worker("both")])
    con.append("legs", [{"leg": w, "worker": w, "deployment": "d"} for w in ("instance", "both")])
    con.append("interference_steps", [judged("pid", 4.0, True), judged("both", 1.0, True)])
    con.append("interference_requests", [by_gaps("instance", 3.5, True), by_gaps("both", 2.0, True)])  # fmt: skip
    row = one(con, "prefill_interference")
    assert (row["value"], row["levels"], row["workers"]) == (5.0, ["A"], ["pid", "both"])
    rows = {r["worker"]: r for r in con.query("interference_by_worker").iter_rows(named=True)}
    left = rows["instance"]
    assert (left["level"], left["requests_lost_s"]) == (None, 3.5)
    assert left["notes"] == ["its steps and its requests may stand under two names: counted under the other"]  # fmt: skip


def test_of_one_log_and_several_servers_the_servers_are_counted(con: Store) -> None:
    con.append("workers", [worker(w) for w in ("pid", "i1", "i2")])
    con.append("legs", [{"leg": w, "worker": w, "deployment": "d"} for w in ("i1", "i2")])
    con.append("interference_steps", [judged("pid", 4.0, True)])
    con.append("interference_requests", [by_gaps("i1", 3.5, True), by_gaps("i2", 3.0, True)])
    row = one(con, "prefill_interference")
    assert (row["value"], row["levels"], row["workers"]) == (6.5, ["C"], ["i1", "i2"])


def test_steps_that_name_members_also_name_victims(con: Store) -> None:
    con.append("workers", [worker("a")])
    con.append("interference_steps", [judged("a", 4.0, True)])
    con.append(
        "interference_step_losses",
        [
            {
                "worker": "a",
                "rank": "0",
                "seq": 7,
                "residents": 2,
                "prefill_tokens": 100,
                "lost_s": 1.0,
            }
        ],
    )
    con.append("step_members", [
        {"worker": "a", "rank": "0", "seq": 7, "request_id": "p", "prefill_tokens": 100},
        {"worker": "a", "rank": "0", "seq": 7, "request_id": "v", "decode_tokens": 1},
        {"worker": "a", "rank": "0", "seq": 7, "request_id": "w", "decode_tokens": 1},
    ])  # fmt: skip
    row = one(con, "prefill_interference")
    assert row["culprits"] == [{"request": "p", "value": 1.0}]
    assert row["victims"] == [{"request": "v", "value": 0.5}, {"request": "w", "value": 0.5}]
    assert row["named_by"] == "steps"


def test_a_lone_level_c_worker_without_a_name_is_a_lower_value(con: Store) -> None:
    con.append("interference_requests", [by_gaps("c", 3.0, True)])
    row = one(con, "prefill_interference")
    assert (row["level"], row["value"], row["named_by"]) == ("C", 3.0, None)
    assert (row["culprits"], row["victims"]) == ([], [])
