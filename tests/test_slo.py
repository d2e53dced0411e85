"""Limits by class: reading them, and what they make of hand-made requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from door import pdtrace

from pdtrace import goodput
from pdtrace.diagnose import diagnose
from pdtrace.diagnosis import evaluate
from pdtrace.errors import BadOption
from pdtrace.methods.fluidity import counted, fluidity
from pdtrace.methods.statistics import wilson_interval
from pdtrace.model import Slo, SloClass, SloPolicy
from pdtrace.options import parse_check
from pdtrace.slo import one_class, policy
from pdtrace.store import Store


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "limits.toml"
    path.write_text(text, "utf-8")
    return str(path)


def test_a_file_has_classes_in_order_and_a_default(tmp_path: Path) -> None:
    found = policy(toml(tmp_path, """
        [[class]]
        name = "long"
        prompt_tokens = { from = 8000 }
        ttft = "3s"
        [[class]]
        name = "chat"
        model = ["llama*", "qwen"]
        streaming = true
        itl_max = "0.1s"
        [default]
        e2e = "1m"
    """))  # fmt: skip
    assert [c.name for c in found.classes] == ["long", "chat", "default"]
    assert found.classes[0].prompt_tokens == (8000, None)
    assert found.classes[1].limits == Slo(itl_ms=100, itl_quantile=1.0)
    assert found.classes[1].model == ("llama*", "qwen")
    assert found.classes[2].limits == Slo(e2e_ms=60_000) and found.classes[2].takes_all()
    assert found.single() == Slo()  # no limit holds for every request


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft = ", "is not TOML"),
        ("", "has no class"),
        ('ttft = "1s"', "'ttft' is not known at the top"),
        ("[class]\nttft = '1s'", "no list of tables"),
        ("[[class]]\nname = 'a'", "class 1 (a) has no limit"),
        ("[[class]]\nttft = 500", "has no unit"),
        ("[[class]]\nttft = '500x'", "is no duration"),
        ("[[class]]\nttft = '0ms'", "can never be met"),
        ("[[class]]\nttft = '1s'\nttff = '2s'", "'ttff' is not known"),
        ("[[class]]\nitl = '1s'\nitl_p50 = '2s'", "two limits for itl"),
        ("[[class]]\nttft = '1s'\nmodel = 3", "model is no text"),
        ("[[class]]\nttft = '1s'\nstreaming = 'yes'", "streaming = 'yes'"),
        ("[[class]]\nttft = '1s'\nprompt_tokens = 100", "prompt_tokens is not understood"),
        ("[[class]]\nttft = '1s'\nprompt_tokens = { from = 9, below = 9 }", "from 9 and below 9"),
        ("[[class]]\nttft = '1s'\nname = ''", "the name is no text"),
        ("[[class]]\nttft = '1s'\n[[class]]\nttft = '2s'\nmodel = 'a'", "takes every request"),
        ("[[class]]\nttft='1s'\nname='a'\nmodel='m'\n[[class]]\nttft='2s'\nname='a'", "two classes are named 'a'"),
        ("[default]\nttft = '1s'\nmodel = 'a'", "has a condition"),
    ],
)  # fmt: skip
def test_each_mistake_in_a_file_is_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadOption) as error:
        policy(toml(tmp_path, text))
    assert says in error.value.message and error.value.hint


def test_a_missing_file_is_named() -> None:
    with pytest.raises(BadOption, match=r"none\.toml"):
        policy("none.toml")


def test_the_quantile_of_gaps_is_named() -> None:
    assert policy("itl_p95=100ms").single() == Slo(itl_ms=100, itl_quantile=0.95)
    assert policy("itl=100ms").single() == Slo(itl_ms=100, itl_quantile=0.99)
    with pytest.raises(BadOption, match="two limits for ttft"):
        policy("ttft=1s,ttft=2s")


def requests(con: Store, *rows: dict[str, Any]) -> Store:
    """Requests of one deployment, one second apart, each a second long unless said."""
    base = {"deployment": "d", "outcome": "completed", "ttft_ms": 100.0, "tpot_ms": 10.0, "e2e_ms": 1000.0,
            "output_tokens": 91, "prompt_tokens": 100, "model": "m"}  # fmt: skip
    made = []
    for n, row in enumerate(rows):
        start = n * 10**9
        made.append({**base, "request": f"r{n}", "start_ns": start, "end_ns": start + 10**9, **row})
    con.append("requests", made)
    con.append("deployments", [{"deployment": "d", "name": "d", "headline_observer": "client"}])
    return con


def attained(con: Store, limits: Slo | SloPolicy) -> dict[str, dict[str, Any]]:
    goodput.give(con, goodput.as_policy(limits))
    return {row["metric"]: row for row in goodput.attainment(con, "d")}


def test_both_denominators_and_unknown_values(con: Store) -> None:
    slow, unknown = {"ttft_ms": 900.0}, {"ttft_ms": None}
    failed = {"outcome": "failed", "error": "503"}
    left = {"outcome": "aborted"}
    timed_out = {"outcome": "aborted", "error": "TimeoutError"}
    requests(con, {}, {}, {}, slow, unknown, failed, left, timed_out, {"outcome": "unknown"}, {"outcome": "unknown", **slow})  # fmt: skip
    row = attained(con, Slo(ttft_ms=500))["all"]
    assert (row["good"], row["arrivals"], row["completed"]) == (3, 10, 5)
    assert (row["failed"], row["client_aborts"], row["unknown"]) == (2, 1, 2)
    assert (row["attainment"], row["attainment_of_completed"]) == (0.3, 0.6)
    assert row["attainment_if_unknown_good"] == 0.5
    assert row["attainment_without_client_aborts"] == pytest.approx(3 / 9)
    assert row["interval"] == pytest.approx(list(wilson_interval(3, 10)))
    assert row["interval_of_completed"] == pytest.approx(list(wilson_interval(3, 5)))
    # 10 requests, one a second, the last one a second long
    assert (row["window_s"], row["good_per_s"]) == (10.0, 0.3)


def test_a_known_miss_outweighs_an_unknown_value(con: Store) -> None:
    requests(con, {"ttft_ms": None, "tpot_ms": 90.0}, {"ttft_ms": None}, {"tpot_ms": 90.0})
    rows = attained(con, Slo(ttft_ms=500, tpot_ms=50))
    assert (rows["ttft_ms"]["good"], rows["ttft_ms"]["unknown"]) == (1, 2)
    assert (rows["all"]["good"], rows["all"]["unknown"]) == (0, 1)


def test_joint_is_not_the_product(con: Store) -> None:
    requests(con, *[{}] * 6, *[{"ttft_ms": 900.0, "tpot_ms": 90.0}] * 4)
    rows = attained(con, Slo(ttft_ms=500, tpot_ms=50))
    assert rows["all"]["attainment"] == 0.6
    assert rows["all"]["product_of_parts"] == pytest.approx(0.36)


def test_one_token_meets_any_pace_and_is_counted(con: Store) -> None:
    requests(con, {}, {"output_tokens": 1, "tpot_ms": None}, {"tpot_ms": 90.0})
    rows = attained(con, Slo(ttft_ms=500, tpot_ms=50))
    assert [(rows[m]["good"], rows[m]["single"]) for m in ("ttft_ms", "tpot_ms", "all")] == [(3, 0), (2, 1), (2, 1)]  # fmt: skip


def test_classes_take_requests_in_order(con: Store) -> None:
    con_ = requests(
        con, {"prompt_tokens": 9000, "ttft_ms": 2000.0}, {"prompt_tokens": None}, {"model": "big-1"},
        {"model": "other"}, {"tenant": "a b", "streaming": True},
    )  # fmt: skip
    classes = SloPolicy((
        SloClass("long", Slo(ttft_ms=3000), prompt_tokens=(8000, None)),
        SloClass("tenant", Slo(ttft_ms=50), tenant=("a b",), streaming=True),
        SloClass("big", Slo(ttft_ms=50), model=("big-*",)),
        SloClass("m", Slo(ttft_ms=500), model=("m",)),
    ))  # fmt: skip
    goodput.give(con_, classes)
    rows = con.sql(
        "SELECT request, class, undecided, good FROM slo_requests ORDER BY request"
    ).rows()
    assert rows == [
        ("r0", "long", False, True), ("r1", "m", True, True), ("r2", "big", True, False),
        ("r3", None, True, None), ("r4", "tenant", False, False),
    ]  # fmt: skip
    assert goodput.unmatched(con, "d") == 1
    diagnosis = diagnose(con, classes)
    (deployment,) = diagnosis.deployments
    assert (
        deployment.unmatched == 1 and len([r for r in deployment.slo if r["metric"] == "all"]) == 4
    )
    checks = evaluate(diagnosis, parse_check("attainment>=100%"))
    assert [(name, value, holds) for name, value, holds in checks] == [
        ("d, long", 1.0, True), ("d, tenant", 0.0, False), ("d, big", 0.0, False), ("d, m", 1.0, True),
    ]  # fmt: skip


def with_gaps(con: Store, gaps: dict[str, list[int]]) -> None:
    legs = [{"leg": f"l{r}", "request": r, "deployment": "d", "observer": "client"} for r in gaps]
    con.append("legs", legs)
    con.append("streams", [{"leg": f"l{r}", "stream": 0, "gaps_us": g, "emission": "token", "observer": "client"}
                           for r, g in gaps.items()])  # fmt: skip
    con.append("observations", [{"request": r, "deployment": "d", "observer": "client", "ttft_ms": 100.0} for r in gaps])  # fmt: skip


def test_a_limit_on_gaps_judges_the_quantile_of_the_request(con: Store) -> None:
    requests(con, {}, {}, {}, {"output_tokens": 1})
    with_gaps(con, {"r0": [10_000] * 99 + [500_000], "r1": [500_000] * 100})
    longest = attained(con, Slo(itl_ms=100, itl_quantile=1.0))["itl_ms"]
    assert (longest["good"], longest["unknown"], longest["single"]) == (1, 1, 1)
    p90 = attained(con, Slo(itl_ms=100, itl_quantile=0.9))["itl_ms"]
    assert (p90["good"], p90["unknown"]) == (2, 1)
    goodput.give(con, one_class(Slo(itl_ms=100, itl_quantile=0.5)))
    value = con.scalar("SELECT itl_ms FROM slo_requests WHERE request = 'r0'")
    assert value == 10.0


def test_the_surface_counts_the_same_requests_under_other_limits(con: Store) -> None:
    requests(con, {"ttft_ms": 100.0}, {"ttft_ms": 400.0, "tpot_ms": 30.0}, {"ttft_ms": 700.0}, {"tpot_ms": None, "output_tokens": None}, {"outcome": "failed"})  # fmt: skip
    goodput.give(con, one_class(Slo(ttft_ms=500, tpot_ms=20)))
    rows = {(r["ttft_limit_ms"], r["tpot_limit_ms"]): r for r in goodput.surface(con, "d")}
    assert len(rows) == 36
    assert [(rows[k]["good"], rows[k]["unknown"]) for k in ((500, 20), (500, 40), (1000, 40), (None, None), (125, 10))] == [
        (1, 1), (2, 1), (3, 1), (4, 0), (1, 1),
    ]  # fmt: skip
    assert [k for k, r in rows.items() if r["given"]] == [(500, 20)]
    assert rows[500, 20]["attainment"] == 0.2 and rows[500, 20]["good_per_s"] == 0.2
    # the cell of the given limits says what the attainment says
    assert attained(con, Slo(ttft_ms=500, tpot_ms=20))["all"]["good"] == rows[500, 20]["good"]


def slow_fluidity(ttft: int, first: int, deadline: int, gaps: list[int]) -> tuple[int, int]:
    """On time and missed deadlines, token by token as the sources say it."""
    slack, on_time, missed = 0, 0, 0
    for n, gap in enumerate([ttft, *gaps]):
        limit = first if n == 0 else deadline
        if gap <= limit + slack:
            on_time, slack = on_time + 1, slack + limit - gap
        else:
            missed += 1 + (gap - slack - limit) // deadline
            slack = 0
    return on_time, missed


def test_a_stall_of_ten_deadlines_is_one_late_token_and_ten_misses() -> None:
    on_time, missed = counted(np.array([0]), np.array([50]), np.array([500, 50]), np.array([2]), np.ones(3, np.int64))  # fmt: skip
    assert (on_time.tolist(), missed.tolist()) == ([2], [10])


def test_fluidity_agrees_with_the_definition_token_by_token() -> None:
    random = np.random.default_rng(7)
    rows, expected = [], []
    for n in range(200):
        gaps = random.choice([5, 20, 50, 51, 400], size=random.integers(1, 30)).tolist()
        ttft = int(random.choice([100, 500, 501, 3000]))
        rows.append({"request": f"r{n}", "ttft_us": float(ttft), "first_deadline_us": 500.0, "deadline_us": 50,
                     "gaps_us": gaps, "emission_tokens": None})  # fmt: skip
        expected.append(slow_fluidity(ttft, 500, 50, gaps))
    schema = {"gaps_us": pl.List(pl.Int32), "emission_tokens": pl.List(pl.Int32)}
    found = fluidity(pl.DataFrame(rows, schema_overrides=schema))
    assert list(zip(found["on_time"], found["missed_deadlines"], strict=True)) == expected


def test_tokens_of_one_chunk_leave_their_time_to_the_next() -> None:
    frame = pl.DataFrame({"request": ["a"], "ttft_us": [100.0], "first_deadline_us": [100.0], "deadline_us": [50],
                          "gaps_us": [[200, 60]], "emission_tokens": [[4, 1, 1]]},
                         schema_overrides={"gaps_us": pl.List(pl.Int32), "emission_tokens": pl.List(pl.Int32)})  # fmt: skip
    row = fluidity(frame).row(0, named=True)
    # 4 tokens at once cover 200 us; the last token is 10 us late
    assert (row["emissions"], row["on_time"], row["missed_deadlines"]) == (6, 5, 1)
    assert row["fluidity_doc"] == pytest.approx(5 / 6) and row["fluidity_code"] == pytest.approx(
        5 / 6
    )


def test_fluidity_stands_by_class(con: Store) -> None:
    requests(con, {}, {})
    with_gaps(con, {"r0": [10_000, 500_000]})
    goodput.give(con, one_class(Slo(ttft_ms=500, tpot_ms=50)))
    goodput.judge_streams(con)
    (row,) = goodput.fluid(con, "d")
    assert (row["requests"], row["without"], row["emission"]) == (1, 1, "token")
    # 400 ms of slack from the first token and 40 from the second cover the stall but for 10 ms
    assert row["doc_mean"] == pytest.approx(2 / 3)
    assert goodput.fluid(con, "other") == []


def test_limits_of_a_file_are_not_written_into_it(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    rows = "\n".join(f"{n},100,20,{100 * n},{100 * n + 400}" for n in range(1, 11))
    table.write_text(f"id,input_tokens,output_tokens,ttft_ms,total_ms\n{rows}\n")
    stored = tmp_path / "t.duckdb"
    pdtrace("ingest", str(table), "-o", str(stored))
    before = stored.read_bytes()
    done = pdtrace("query", "slo_attainment", str(stored), "--slo", "ttft=500ms", "--format", "csv")
    assert done.returncode == 0 and ",all,,5,10,10," in done.stdout
    shown = pdtrace("diagnose", str(stored), "--slo", "ttft=500ms", "--check", "attainment>=60%")
    assert shown.returncode == 3 and "capacity" in shown.stdout
    assert "met by 5 of 10 arrivals" in shown.stdout
    assert stored.read_bytes() == before


def test_without_limits_there_is_nothing(con: Store) -> None:
    requests(con, {})
    (deployment,) = diagnose(con).deployments
    assert (deployment.slo, deployment.surface, deployment.unmatched) == ((), (), 0)
