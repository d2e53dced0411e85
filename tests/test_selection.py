"""A selection is a store over a subset: hand-made requests in, counts that can be checked in the head out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import polars as pl
import pytest

from pdtrace import library
from pdtrace._selection_tables import GIVEN, WHOLE, Cut, cut_of
from pdtrace.diagnose import diagnose
from pdtrace.model import Slo
from pdtrace.selection import Band, Filter, Selections, Stop, Superseded
from pdtrace.slo import one_class
from pdtrace.store import Store

MS = 1_000_000
S = 1_000 * MS
LIMITS = one_class(Slo(ttft_ms=100))

# request, deployment, start s, model, tenant, prompt, P, D, TTFT ms
REQUESTS = [
    ("a", "d", 0, "llama", "red", 100, "p0", "d0", 50.0),
    ("b", "d", 1, "llama", "blue", 5_000, "p1", "d0", 400.0),
    ("c", "d", 2, "qwen", None, None, "p1", "d1", None),
    ("e", "d", 3, None, "red", 900, None, "d1", 90.0),
    ("f", "d", None, "llama", "", 10, None, None, 120.0),
    ("x", "other", 2, "llama", "red", 100, "q0", "q0", 60.0),
]


def fill(store: Store) -> None:
    """Two deployments; each request has a leg, a stream, phases, a transfer; each worker steps and samples."""
    store.append("deployments", [{"deployment": d, "name": d, "mode": "unknown", "headline_observer": "client"} for d in ("d", "other")])  # fmt: skip
    store.append("workers", [{"worker": w, "deployment": "other" if w == "q0" else "d", "name": w, "role": "aggregated"}
                             for w in ("p0", "p1", "d0", "d1", "q0")])  # fmt: skip
    for name, deployment, start, model, tenant, prompt, prefill, decode, ttft in REQUESTS:
        at = None if start is None else start * S
        ends = {"start_ns": at, "end_ns": None if at is None else at + S}
        store.append("requests", [{
            "request": name, "deployment": deployment, **ends, "model": model, "tenant": tenant, "prompt_tokens": prompt,
            "output_tokens": 10, "prefill_worker": prefill, "decode_worker": decode, "ttft_ms": ttft, "e2e_ms": 1000.0,
            "outcome": "failed" if ttft is None else "completed",
        }])  # fmt: skip
        store.append("legs", [{"leg": f"{name}/c", "request": name, "deployment": deployment, "worker": decode, "observer": "client",
                               "status": "completed", **ends}])  # fmt: skip
        store.append("observations", [{"request": name, "deployment": deployment, "observer": "client", "leg": f"{name}/c",
                                       "ttft_ms": ttft, "e2e_ms": 1000.0, "basis": "measured", "level": "B"}])  # fmt: skip
        store.append("streams", [{"leg": f"{name}/c", "stream": 0, "first_ns": at, "gaps_us": [1000, 2000], "emission": "token", "observer": "client"}])  # fmt: skip
        store.append("reported", [{"leg": f"{name}/c", "quantity": "q", "value": 1.0, "unit": "1"}])
        store.append("transfers", [{"leg": f"{name}/c", "source_worker": prefill, "destination_worker": decode, "start_ns": at}])  # fmt: skip
        if at is not None:
            store.append("phases", [{"request": name, "phase": "prefill", "detail": "prefill_exec", "start_ns": at, "end_ns": at + S,
                                     "worker": prefill, "basis": "measured"}])  # fmt: skip
            store.append("phase_sums", [{"request": name, "deployment": deployment, "mode": "unknown", "counted": ttft is not None, "phase": "prefill", "detail": "prefill_exec", "duration_ns": S,
                                         "ttft_part_ns": S, "basis": "measured", "placed_ns": 0, "bound_ns": 0}])  # fmt: skip
    for worker in ("p0", "p1", "d0", "d1", "q0"):
        for second in range(4):
            place = {"worker": worker, "rank": "0", "seq": second}
            store.append(
                "steps",
                [{**place, "start_ns": second * S, "elapsed_ns": 5 * MS, "decode_requests": 1}],
            )
            store.append("step_members", [{**place, "request_id": "any", "decode_tokens": 1}])
            store.append(
                "samples",
                [{"worker": worker, "time_ns": second * S, "metric": "running", "value": 1.0}],
            )
    store.append("samples", [{"worker": "p0", "time_ns": None, "metric": "total", "value": 1.0}])
    store.append(
        "transfers",
        [{"leg": None, "source_worker": "p1", "destination_worker": "d1", "start_ns": 2 * S}],
    )


@pytest.fixture(params=["memory", "read-only"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Selections]:
    """The hand-made run, however its store is kept."""
    path = None if request.param == "memory" else tmp_path / "it's.duckdb"
    store = Store(path, scratch=request.param == "file")
    fill(store)
    if request.param == "read-only":
        store.close()
        store = Store(path, read_only=True)
    with Selections(store) as selections:
        yield selections
    store.close()


@pytest.fixture
def memory() -> Iterator[Selections]:
    store = Store()
    fill(store)
    store.install()
    with Selections(store) as selections:
        yield selections


def chosen(selections: Selections, wanted: Filter) -> str:
    with selections.open(wanted) as subset:
        return "".join(sorted(subset.query("requests")["request"].to_list()))


def test_every_table_is_cut_or_known_to_stay_whole() -> None:
    uncut = {name for name in library.tables() if cut_of(name) is None}
    assert uncut == WHOLE | GIVEN
    assert cut_of("streams") == Cut("leg") and cut_of("phases") == Cut("request")


@pytest.mark.parametrize(
    ("wanted", "requests"),
    [
        (Filter(), "abcefx"),
        (Filter(deployment="d"), "abcef"),
        (Filter(deployment="no such"), ""),
        (Filter(workers=("p1",)), "bc"),
        (Filter(workers=("d1", "p0")), "ace"),
        (Filter(workers=(None,)), "f"),
        (Filter(workers=("p1", None)), "bcf"),
        (Filter(models=("llama",), deployment="d"), "abf"),
        (Filter(models=(None, "qwen")), "ce"),
        (Filter(tenants=(None,)), "cf"),
        (Filter(from_ns=1 * S), "bcex"),
        (Filter(from_ns=1 * S, until_ns=3 * S, deployment="d"), "bc"),
        (Filter(prompt=Band(100, 5_000)), "aex"),
        (Filter(prompt=Band(high=100)), "f"),
        (Filter(prompt=Band(unknown=True)), "c"),
        (Filter(prompt=Band()), "abefx"),
        (Filter(output=Band(11)), ""),
        (Filter(models=("llama",), workers=("d0",), tenants=("blue",)), "b"),
        (Filter(models=("no such",)), ""),
        (Filter(limits=LIMITS, states=("met",)), "aex"),
        (Filter(limits=LIMITS, states=("missed",)), "bcf"),
        (Filter(limits=LIMITS, states=("met", "missed"), deployment="d", workers=("p1",)), "bc"),
        (Filter(states=("met",)), ""),
        (Filter(states=("open",)), "abcefx"),
    ],
)
def test_conditions_choose_requests(memory: Selections, wanted: Filter, requests: str) -> None:
    assert chosen(memory, wanted) == requests


def test_what_is_unknown_is_counted_not_guessed(memory: Selections) -> None:
    def counts(wanted: Filter) -> tuple[int, ...]:
        with memory.open(wanted) as subset:
            return tuple(subset.counts().values())

    assert counts(Filter()) == (6, 6, 0)
    assert counts(Filter(deployment="d")) == (5, 5, 0)
    assert counts(Filter(deployment="d", from_ns=0)) == (5, 4, 1)  # f has no time of day
    assert counts(Filter(deployment="d", workers=("p0",))) == (
        5,
        1,
        2,
    )  # who computed e's and f's prompt?
    assert counts(Filter(deployment="d", prompt=Band(0, 10**9))) == (5, 4, 1)
    assert counts(Filter(deployment="d", tenants=("red",))) == (5, 2, 2)
    # known to be another tenant's: no doubt that it is out, whatever its time
    assert counts(Filter(deployment="d", tenants=("green",), from_ns=0)) == (5, 0, 2)


def test_tables_follow_the_requests_and_workers(run: Selections) -> None:
    with run.open(Filter(deployment="d", workers=("p1",))) as subset:
        count = {name: subset.count(name) for name in library.tables()}
    assert count["requests"] == count["observations"] == count["phase_sums"] == count["phases"] == 2
    assert count["legs"] == count["streams"] == count["reported"] == 2
    assert count["transfers"] == 3  # b, c, and the one of no request that left p1
    assert count["steps"] == count["step_members"] == count["samples"] == 4  # p1's own
    assert count["workers"] == 4  # names stay, of this deployment
    assert count["deployments"] == 1


def test_worker_tables_are_cut_by_time_and_not_by_what_a_request_is(run: Selections) -> None:
    with run.open(Filter(deployment="d", from_ns=1 * S, until_ns=3 * S)) as subset:
        assert subset.count("steps") == subset.count("step_members") == 4 * 2
        assert subset.count("samples") == 4 * 2  # the one without a time is not told to be inside
        assert subset.count("transfers") == 3
    with run.open(Filter(deployment="d", tenants=("blue",))) as subset:
        assert (subset.count("steps"), subset.count("samples")) == (16, 17)
        assert subset.count("transfers") == 1  # whose the loose one is nobody says


def test_queries_run_unchanged_on_the_subset(memory: Selections) -> None:
    with memory.open(Filter(deployment="d", workers=("p1", "p0"))) as subset:
        assert subset.query("phase_summary").select("deployment", "requests").rows() == [
            ("d", 2)
        ]  # c failed
        assert set(subset.query("request_latency")["request"]) == {"a", "b", "c"}
        assert subset.query("time_series", bins=2).height > 0  # a macro
        assert {d.id for d in diagnose(subset).deployments} == {"d"}
    with memory.open() as subset:
        assert subset.query("phase_summary").height == 2


def test_which_requests_count_is_decided_by_the_whole_run(memory: Selections) -> None:
    # c failed; alone it must not become "none is known to have completed"
    with memory.open(Filter(models=("qwen",))) as subset:
        assert subset.query("request_values")["counted"].to_list() == [False]
        assert subset.query("counted_requests").is_empty()
    # two models in the deployment: b keeps its own even where only that one is chosen
    with memory.open(Filter(workers=("p0",))) as subset:
        assert subset.query("request_values")["model"].to_list() == ["llama"]


def test_who_else_was_in_flight_is_known_in_a_subset_too(memory: Selections) -> None:
    with memory.open(Filter(deployment="d")) as whole:
        before = whole.query("request_attributes").filter(pl.col("request") == "b")
    with memory.open(Filter(tenants=("blue",))) as subset:
        assert subset.query("request_attributes").equals(before)


def test_an_empty_selection_has_no_rows_and_no_errors(memory: Selections) -> None:
    wanted = Filter(
        "d",
        from_ns=0,
        until_ns=S,
        models=("no such",),
        workers=("p0",),
        limits=LIMITS,
        states=("met",),
    )
    with memory.open(wanted) as subset:
        for name in library.queries():
            subset.query(name)
        assert subset.query("phase_summary").is_empty()


def test_an_empty_selection_is_diagnosed(memory: Selections) -> None:
    with memory.open(Filter(deployment="d", models=("no such",))) as subset:
        (deployment,) = diagnose(subset).deployments
    assert deployment.requests["count"] == 0


def test_limits_are_part_of_a_selection(memory: Selections) -> None:
    with memory.open(Filter(deployment="d", limits=LIMITS, workers=("d0",))) as subset:
        rows = subset.query("slo_requests").sort("request").select("request", "good").rows()
        assert rows == [("a", True), ("b", False)]
        (judged,) = diagnose(subset, LIMITS).deployments
        assert [(row["metric"], row["good"], row["arrivals"]) for row in judged.slo] == [
            ("ttft_ms", 1, 2),
            ("all", 1, 2),
        ]
    with memory.open(Filter(deployment="d", workers=("d0",))) as subset:
        assert subset.query("slo_requests").is_empty()


def test_fluidity_is_judged_when_somebody_asks(memory: Selections) -> None:
    limits = one_class(Slo(ttft_ms=100, tpot_ms=5))
    with memory.open(Filter(deployment="d", limits=limits, workers=("d0",))) as subset:
        assert subset.query("slo_fluidity")["request"].sort().to_list() == ["a", "b"]
        assert subset.query("fluidity_summary").height == 1


def test_scope_says_what_the_numbers_are_of() -> None:
    by_tenant, by_time, by_worker = (
        Filter(tenants=("a",)),
        Filter(from_ns=1),
        Filter(workers=("w",)),
    )
    assert by_tenant.scope("phase_summary") == by_time.scope("phase_summary") == ("selection",)
    assert by_tenant.scope("step_classes") == ("workers",)
    assert by_time.scope("step_classes") == by_worker.scope("step_classes") == ("selection",)
    assert by_time.scope("interference_by_worker") == ("run",)
    assert by_worker.scope("interference_by_worker") == ("selection",)
    assert by_worker.scope("warm_up") == ("run",)
    # who is named as source does not make a finding one of steps and samples
    assert by_tenant.scope("engine_queue") == ("selection",)
    assert Filter(deployment="d").scope("warm_up") == ("selection",)


def test_several_threads_have_one_selection(run: Selections) -> None:
    found: list[int] = []
    wanted = Filter(deployment="d", workers=("d0", "d1"))

    def ask() -> None:
        with run.open(wanted) as subset:
            found.append(subset.query("request_latency").height)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [4] * 6


def test_old_selections_go_and_come_back(memory: Selections) -> None:
    for n in range(40):
        assert chosen(memory, Filter(deployment="d", until_ns=2 * S + n)) == (
            "ab" if n == 0 else "abc"
        )
    assert len(memory.connection.sql("SELECT 1 FROM duckdb_databases() WHERE starts_with(database_name, 'selection')").fetchall()) < 20  # fmt: skip
    assert chosen(memory, Filter(deployment="d", until_ns=2 * S)) == "ab"


def test_what_is_superseded_stops_and_hurts_nobody(memory: Selections) -> None:
    stop = Stop()
    timer = threading.Timer(0.2, stop.now)
    begun = time.monotonic()
    timer.start()
    with (
        memory.open(Filter(deployment="d")) as other,
        memory.open(Filter(deployment="d"), stop) as subset,
    ):
        with pytest.raises((Superseded, duckdb.InterruptException)):
            subset.sql(
                "SELECT count(*) FROM range(1000000) a, range(10000000) b WHERE a.range * b.range % 7 = 1"
            )
        with pytest.raises(Superseded):
            subset.query("requests")
        assert other.query("requests").height == 5
    timer.join()
    assert time.monotonic() - begun < 5
    with pytest.raises(Superseded), memory.open(Filter(deployment="d"), stop) as subset:
        subset.query("requests")


def test_values_from_outside_are_parameters(memory: Selections) -> None:
    nasty = "'; DROP TABLE requests; --"
    assert chosen(memory, Filter(deployment=nasty)) == ""
    assert chosen(memory, Filter(models=(nasty,), workers=(nasty,), tenants=(nasty,))) == ""
    assert chosen(memory, Filter()) == "abcefx"


def test_choices_count_the_requests_of_each_value(memory: Selections) -> None:
    with memory.open(Filter(deployment="d", limits=LIMITS)) as subset:
        rows = subset.query("request_choices").sort("attribute", "value", nulls_last=True)
    found = {
        attribute: dict(
            rows.filter(pl.col("attribute") == attribute).select("value", "requests").rows()
        )
        for attribute in ("model", "worker", "tenant", "prompt", "output", "slo")
    }
    assert found == {
        "model": {"llama": 3, "qwen": 1, None: 1},
        "worker": {"d0": 2, "d1": 2, "p0": 1, "p1": 2, None: 1},
        "tenant": {"blue": 1, "red": 2, None: 2},
        "prompt": {"0-128": 2, "512-2048": 1, "2048-8192": 1, None: 1},
        "output": {"0-128": 5},
        "slo": {"met": 2, "missed": 3},
    }


def test_arrivals_are_counted_in_the_same_stretches_for_any_subset(memory: Selections) -> None:
    with memory.open(Filter(deployment="d")) as subset:
        rows = subset.query("arrivals", bins=3).sort("bin")
    assert rows.select("bin", "requests", "failed").rows() == [(0, 2, 0), (1, 1, 1), (2, 1, 0)]
    ends = {"from_ns": rows["start_ns"].min(), "until_ns": rows["end_ns"].max()}
    with memory.open(Filter(deployment="d", workers=("p1",))) as subset:
        assert subset.query("arrivals", bins=3, **ends).select("bin", "requests").sort(
            "bin"
        ).rows() == [(0, 1), (1, 1)]
