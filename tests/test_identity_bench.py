"""Identity of client files: rows of benchmarks and tables join the requests of servers, or stay alone."""

from __future__ import annotations

import pytest
from identity_fleet import MS, T0, Fleet, S, deployments_of, only, requests_of

from pdtrace import _aside


@pytest.fixture(autouse=True, params=["table", "aside"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule holds for legs in a table and for those that lie aside until they are named."""
    if request.param == "aside":
        monkeypatch.setattr(_aside, "LEAST_ROWS", 1)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_client_file_joins_by_request_id_in_time(fleet: Fleet) -> None:
    for run, at in (("one", 0.0), ("two", 1000.0)):
        for n in range(3):
            fleet.leg(
                f"F{run}{n}",
                "frontend",
                f"instance:f{run}",
                at + n,
                at + n + 0.9,
                first=at + n + 0.3,
                path=f"{run}/t.json",
                request_id=f"u{run}{n}",
                external_id=f"x{n}",
            )
    for n in range(3):
        fleet.leg(
            f"C{n}",
            "client",
            "file:two/c.jsonl",
            999.999 + n,
            1000.95 + n,
            first=1000.35 + n,
            path="two/c.jsonl",
            external_id=f"x{n}",
            output_tokens=3,
        )
    store = fleet.run()
    found, legs = requests_of(store), deployments_of(store)
    assert found["C0"] == found["Ftwo0"] != found["Fone0"]
    assert legs["C0"] == legs["Ftwo1"]
    heads = dict(store.sql("SELECT deployment, headline_observer FROM deployments").iter_rows())
    assert heads == {legs["C0"]: "client", legs["Fone0"]: "frontend"}
    assert ("http_request_id",) in store.sql("SELECT DISTINCT rule FROM identity_edges").rows()


def test_lone_csv_is_a_deployment_of_its_own(fleet: Fleet) -> None:
    for n in range(20):
        fleet.leg(
            f"c#{n}",
            "client",
            "file:c.csv",
            None,
            path="c.csv",
            clock=None,
            external_id=f"r{n}",
            ttft_ms=100.0 + n,
            e2e_ms=900.0,
            output_tokens=11,
        )
    store = fleet.run()
    assert store.count("requests") == 20
    deployment = only(store, "deployments")
    assert (deployment["mode"], deployment["headline_observer"], deployment["name_basis"]) == (
        "unknown",
        "client",
        "file",
    )
    row = store.sql("FROM requests WHERE request = 'r0'").row(0, named=True)
    assert (row["start_ns"], row["ttft_ms"], row["e2e_ms"]) == (None, 100.0, 900.0)
    assert row["tpot_ms"] == pytest.approx(80)
    seen = store.sql("FROM observations WHERE request = 'r0'").row(0, named=True)
    assert (seen["basis"], seen["level"]) == ("reported", "C")


def bench(
    fleet: Fleet, rows: int, *, window: tuple[float, float] | None, prefix: str | None = None
) -> None:
    worker = "file:bench.json"
    if window:
        fleet.store.append("facts", [
            {"source": fleet.source("bench.json"), "worker": worker, "key": "window_start_ns", "value": str(T0 + round(window[0] * S))},
            {"source": fleet.source("bench.json"), "worker": worker, "key": "window_end_ns", "value": str(T0 + round(window[1] * S))},
        ])  # fmt: skip
    for n in range(rows):
        fleet.leg(
            f"B{n}",
            "client",
            worker,
            None,
            path="bench.json",
            clock="perf:bench.json",
            clock_start_ns=77 * S + n * S,
            row_index=n,
            id_prefix=prefix,
            prompt_tokens=100 + n,
            output_tokens=10 + n,
            ttft_ms=250.0,
            e2e_ms=800.0,
        )
        fleet.store.append(
            "streams",
            [
                {
                    "leg": f"B{n}",
                    "stream": 0,
                    "gaps_us": [1000],
                    "clock": "perf:bench.json",
                    "observer": "client",
                }
            ],
        )


def server(fleet: Fleet, name: str, at: float, rows: int) -> None:
    for n in range(rows):
        fleet.leg(
            f"{name}{n}",
            "engine",
            f"instance:{name}",
            at + n + 0.01,
            at + n + 0.7,
            first=at + n + 0.2,
            path=f"{name}/t.json",
            request_id=f"cmpl-bench-{n}-0",
            external_id=f"bench-{n}",
            prompt_tokens=100 + n,
            output_tokens=10 + n,
        )


def test_bench_rows_join_the_run_in_their_window_although_lengths_fit_two(fleet: Fleet) -> None:
    server(fleet, "agg", 0, 10)
    server(fleet, "pd", 5000, 10)
    bench(fleet, 10, window=(4990, 5015))
    store = fleet.run(times=2)
    found = requests_of(store)
    assert all(found[f"B{n}"] == found[f"pd{n}"] for n in range(10))
    assert store.count("requests") == 20
    clock = only(store, "clocks")
    assert (clock["domain"], clock["pairs"]) == ("perf:bench.json", 10)
    assert -clock["offset_ns"] == T0 + 5000 * S + 10 * MS - 77 * S
    leg = store.sql("FROM legs WHERE leg = 'B3'").row(0, named=True)
    assert leg["start_ns"] == T0 + 5003 * S + 10 * MS
    assert leg["first_token_ns"] == leg["start_ns"] + 250 * MS
    assert (
        store.sql("SELECT first_ns FROM streams WHERE leg = 'B3'").item() == leg["first_token_ns"]
    )
    row = store.sql("FROM requests WHERE request = $r", r=found["B3"]).row(0, named=True)
    assert (row["ttft_ms"], row["window_observer"]) == (250.0, "client")


def test_bench_rows_without_a_window_that_fit_two_runs_join_none(fleet: Fleet) -> None:
    server(fleet, "agg", 0, 10)
    server(fleet, "pd", 5000, 10)
    bench(fleet, 10, window=None)
    store = fleet.run()
    assert store.count("requests") == 30
    assert store.count("deployments") == 3


def test_bench_file_in_another_time_zone(fleet: Fleet) -> None:
    server(fleet, "agg", 0, 10)
    bench(fleet, 10, window=(9 * 3600 - 5, 9 * 3600 + 20))
    store = fleet.run()
    assert store.count("requests") == 10
    assert (
        "h from UTC"
        in store.sql("SELECT key FROM identity_edges WHERE rule = 'prefix_index'")["key"][0]
    )


def test_servers_that_share_out_the_rows_of_a_bench_file_are_one_deployment(fleet: Fleet) -> None:
    server(fleet, "a", 0, 30)
    server(fleet, "b", 0, 30)
    server(fleet, "old", -9000, 6)
    fleet.legs = [
        leg for leg in fleet.legs
        if leg["leg"][0] not in "ab" or (int(leg["leg"][1:]) % 2 == 0) == (leg["leg"][0] == "a")
        or leg["leg"] == "b4"
    ]  # fmt: skip
    bench(fleet, 30, window=(-5, 40))
    store = fleet.run(times=2)
    found, homes = requests_of(store), deployments_of(store)
    # b4 is another attempt of row 4, which the balancer sent on
    owners = {n: "a" if n % 2 == 0 else "b" for n in range(30)}
    assert all(found[f"B{n}"] == found[f"{w}{n}"] for n, w in owners.items())
    assert found["b4"] == found["a4"]
    assert homes["B0"] == homes["a0"] == homes["b1"] != homes["old0"]
    assert store.count("requests") == 30 + 6


def test_a_bench_row_counts_the_tokens_of_all_answers_to_it(fleet: Fleet) -> None:
    """n > 1: the engine tells each stream's tokens, the client their sum."""
    server(fleet, "a", 0, 10)
    for leg in list(fleet.legs):
        fleet.legs += [leg | {"leg": f"{leg['leg']}-{k}", "stream": k} for k in (1, 2)]
    bench(fleet, 10, window=(-5, 20))
    for leg in fleet.legs:
        if leg["observer"] == "client":
            leg["output_tokens"] *= 3
            leg["tpot_ms"] = 550 / (leg["output_tokens"] - 1)
    store = fleet.run()
    assert (store.count("requests"), store.count("deployments")) == (10, 1)
    paces = dict(
        store.sql("SELECT request, tpot_ms FROM observations WHERE observer = 'client'").iter_rows()
    )
    assert paces["bench-3"] == pytest.approx(
        (800 - 250) / (13 - 1)
    )  # each stream's, not all tokens in one


def test_a_bench_row_that_two_servers_saw_throughout_joins_neither(fleet: Fleet) -> None:
    server(fleet, "a", 0, 6)
    server(fleet, "b", 0, 6)
    bench(fleet, 10, window=(-5, 20))
    store = fleet.run()
    assert (store.count("requests"), store.count("deployments")) == (22, 3)


@pytest.mark.parametrize(("late", "joined"), [(0.0, True), (4.0, False)])
def test_bench_rows_join_log_lines_without_lengths_by_their_arrivals(
    fleet: Fleet, late: float, joined: bool
) -> None:
    """`late`: every third line comes so much later: another run."""
    for n in range(40):
        at = n + 0.031 * n + (late if n % 3 == 0 else 0)
        fleet.leg(
            f"s{n}", "engine", "pid:7@agg", int(at), None, path="agg/server.log", resolution_ns=S,
            request_id=f"cmpl-bench-{n}-0", external_id=f"bench-{n}",
        )  # fmt: skip
    bench(fleet, 40, window=(-5, 60))
    for n, leg in enumerate(fleet.legs[40:]):
        leg["clock_start_ns"] = 77 * S + n * 1_031_000_000
    store = fleet.run()
    assert (store.count("requests"), store.count("deployments")) == ((40, 1) if joined else (80, 2))
    if joined:
        clock = only(store, "clocks")
        assert clock["lower_ns"] <= 77 * S - T0 <= clock["upper_ns"]
        assert clock["half_width_ns"] < 100 * MS
        assert only(store, "deployments")["headline_observer"] == "client"


@pytest.mark.parametrize("rows", [1, 10])
def test_the_first_row_of_a_bench_joins_where_its_prefix_ends_in_digits(
    fleet: Fleet, rows: int
) -> None:
    """`bench-20bb4b98-0` as it was sent is row 0, not row 98 with vLLM's -0 behind."""
    for n in range(rows):
        fleet.leg(
            f"s{n}", "engine", "instance:agg", n + 0.01, n + 0.7, first=n + 0.2, path="t.json",
            request_id=f"bench-20bb4b98-{n}", prompt_tokens=100 + n, output_tokens=10 + n,
        )  # fmt: skip
    bench(fleet, rows, window=(-5, 20))
    store = fleet.run()
    assert (store.count("requests"), store.count("deployments")) == (rows, 1)


def test_bench_rows_with_other_lengths_join_nothing(fleet: Fleet) -> None:
    server(fleet, "agg", 0, 10)
    bench(fleet, 10, window=(-5, 20))
    for leg in fleet.legs:
        if leg["observer"] == "client":
            leg["prompt_tokens"] += 55
    assert fleet.run().count("requests") == 20
