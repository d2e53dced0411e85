"""Deployments: hand-made legs whose workers belong together or not, one trap a test."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from identity_fleet import T0, Fleet, deployments_of, only, requests_of, router_pd

from pdtrace import _aside


@pytest.fixture(autouse=True, params=["table", "aside"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule holds for legs in a table and for those that lie aside until they are named."""
    if request.param == "aside":
        monkeypatch.setattr(_aside, "LEAST_ROWS", 1)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_seeded_generator_repeats_ids_in_two_deployments(fleet: Fleet) -> None:
    for n in range(3):
        router_pd(fleet, "1", n, f"t{n}", f"x-{n}", "one/a.json")
        router_pd(fleet, "2", n + 40, f"t{n}", f"x-{n}", "two/a.json")
    store = fleet.run()
    assert store.count("requests") == 6
    assert store.count("deployments") == 2
    legs = deployments_of(store)
    assert legs["R1x-0"] == legs["D1x-2"] != legs["R2x-0"] == legs["P2x-1"]
    assert set(store.sql("SELECT request FROM requests")["request"]) == {
        "x-0",
        "x-1",
        "x-2",
        "x-0#2",
        "x-1#2",
        "x-2#2",
    }


def test_two_deployments_under_the_same_seeded_load_at_the_same_time(fleet: Fleet) -> None:
    for n in range(3):
        router_pd(fleet, "1", n, f"t{n}", f"x-{n}", "one/a.json")
        router_pd(fleet, "2", n + 0.001, f"t{n}", f"x-{n}", "two/a.json")
    store = fleet.run()
    assert store.count("requests") == 6
    assert store.count("deployments") == 2


def test_same_server_run_twice_in_one_folder(fleet: Fleet) -> None:
    for run in range(2):
        for n in range(3):
            at = 30.0 * run + n
            fleet.leg(
                f"E{run}{n}",
                "engine",
                f"instance:run{run}",
                at,
                at + 0.5,
                first=at + 0.1,
                trace_id=f"t{n}",
                span_id=f"{run}{n}",
                request_id=f"x-{n}",
                external_id=f"x-{n}",
                output_tokens=4,
            )
    store = fleet.run()
    assert store.count("requests") == 6
    assert store.count("deployments") == 2
    assert sorted(store.sql("SELECT name FROM deployments")["name"]) == ["run", "run #2"]


def test_same_folder_name_in_two_places_is_told_apart(fleet: Fleet) -> None:
    for place in ("vllm", "dynamo"):
        fleet.leg(
            place,
            "engine",
            f"instance:{place}",
            0,
            1,
            path=f"data/{place}/agg/t.json",
            external_id=place,
        )
    assert set(fleet.run().sql("SELECT name FROM deployments")["name"]) == {
        "vllm/agg",
        "dynamo/agg",
    }


def test_same_instance_in_a_later_file_is_one_deployment(fleet: Fleet) -> None:
    fleet.leg("a", "engine", "instance:e", 0, 1, path="pd/traces.json", external_id="a")
    fleet.leg("b", "engine", "instance:e", 5000, 5001, path="edge/traces.json", external_id="b")
    store = fleet.run()
    assert store.count("deployments") == 1


def test_weak_frontends_are_split_per_deployment(fleet: Fleet) -> None:
    for run in ("one", "two"):
        at = 0.0 if run == "one" else 500.0
        for n in range(4):
            w = f"worker_id:{run}{n % 2}"
            fleet.leg(
                f"F{run}{n}",
                "frontend",
                "service:dynamo",
                at + n,
                at + n + 0.9,
                first=at + n + 0.2,
                path=f"{run}/t.json",
                trace_id=f"t{n}",
                span_id=f"f{run}{n}",
                parent_span_id="seeded",
                request_id=f"uuid-{run}-{n}",
                external_id=f"x{n}",
            )
            fleet.leg(
                f"W{run}{n}",
                "engine",
                w,
                at + n + 0.1,
                at + n + 0.8,
                path=f"{run}/t.json",
                trace_id=f"t{n}",
                span_id=f"w{run}{n}",
                parent_span_id=f"f{run}{n}",
                request_id=f"uuid-{run}-{n}",
                output_tokens=4,
            )
        # a request that was refused before it reached a worker
        fleet.leg(
            f"X{run}",
            "frontend",
            "service:dynamo",
            at + 5,
            at + 5.1,
            path=f"{run}/t.json",
            trace_id="tx",
            span_id=f"x{run}",
            status="failed",
            external_id="bad",
        )
    store = fleet.run(times=2)
    assert store.count("deployments") == 2
    assert store.count("requests") == 10
    legs = deployments_of(store)
    assert legs["Fone0"] == legs["Fone1"] == legs["Xone"] != legs["Xtwo"] == legs["Wtwo0"]
    names = {
        w
        for w in store.sql("SELECT DISTINCT worker FROM legs")["worker"]
        if w.startswith("service:")
    }
    assert names == {f"service:dynamo@{legs['Fone0']}", f"service:dynamo@{legs['Ftwo0']}"}
    assert store.sql("SELECT count(*) FROM workers WHERE deployment IS NULL").item() == 0
    assert names <= set(store.sql("SELECT worker FROM workers")["worker"])


def test_files_without_requests_go_by_folder_and_time(fleet: Fleet) -> None:
    fleet.leg("a", "engine", "instance:a", 0, 1, path="runs/a/t.json", external_id="a")
    fleet.leg("b", "engine", "instance:b", 0, 1, path="runs/b/t.json", external_id="b")
    for path in ("runs/a/metrics.prom", "runs/b/deep/metrics.prom", "elsewhere/metrics.prom"):
        fleet.worker(f"file:{path}", path)
        fleet.store.append(
            "samples",
            [
                {
                    "source": fleet.source(path),
                    "worker": f"file:{path}",
                    "metric": "m",
                    "time_ns": T0,
                    "value": 1.0,
                }
            ],
        )
    store = fleet.run()
    of = dict(store.sql("SELECT worker, deployment FROM workers").iter_rows())
    assert of["file:runs/a/metrics.prom"] == of["instance:a"]
    assert of["file:runs/b/deep/metrics.prom"] == of["instance:b"]
    assert of["file:elsewhere/metrics.prom"] not in {of["instance:a"], of["instance:b"]}
    assert set(store.sql("SELECT name_basis FROM deployments")["name_basis"]) >= {"worker, folder"}


def test_only_metrics_are_a_deployment_too(fleet: Fleet) -> None:
    fleet.worker("file:m/metrics.prom", "m/metrics.prom")
    fleet.store.append(
        "samples",
        [
            {
                "source": fleet.source("m/metrics.prom"),
                "worker": "file:m/metrics.prom",
                "metric": "m",
                "time_ns": T0,
                "value": 1.0,
            }
        ],
    )
    store = fleet.run()
    row = only(store, "deployments")
    assert (row["name"], row["name_basis"], row["mode"]) == ("m", "folder", "unknown")


def test_result_does_not_depend_on_the_order_of_rows() -> None:
    tables = []
    for turn in range(2):
        fleet = Fleet()
        for path in ("one/a.json", "two/a.json"):
            fleet.source(path)
        for n in range(3):
            router_pd(fleet, "1", n, f"t{n}", f"x-{n}", "one/a.json")
            router_pd(fleet, "2", n + 40, f"t{n}", f"x-{n}", "two/a.json")
        if turn:
            fleet.legs.reverse()
        store = fleet.run()
        tables.append(
            [
                store.sql(f"FROM {t}").sort(pl.all())
                for t in ("requests", "observations", "deployments", "identity_edges", "workers")
            ]
        )
    for a, b in zip(*tables, strict=True):
        assert a.equals(b)


def test_nothing_at_all(fleet: Fleet) -> None:
    store = fleet.run()
    assert store.count("requests") == 0
    assert store.count("deployments") == 0


def test_gateways_without_an_instance_id_are_as_many_as_their_files(fleet: Fleet) -> None:
    """Two smg gateways under the same seeded load: trace, caller's span and request id are those of the other one."""
    for run, at in (("a", 0.0), ("b", 1.2)):
        same: dict[str, Any] = {
            "trace_id": "t",
            "external_id": "load-3",
            "path": f"{run}/gateway.pb",
        }
        fleet.leg(f"R{run}", "router", "service:smg", at, at + 0.4, span_id=f"r{run}", parent_span_id="caller", role="router", **same)  # fmt: skip
        for role in ("prefill", "decode"):
            fleet.leg(f"{role}{run}", "engine", f"instance:{role}{run}", at + 0.01, at + 0.3, span_id=f"{role}{run}", parent_span_id=f"r{run}", role=role, **{**same, "path": f"{run}/{role}.json"})  # fmt: skip
    store = fleet.run()
    found = requests_of(store)
    assert found["Ra"] == found["prefilla"] == found["decodea"]
    assert found["Rb"] == found["prefillb"] == found["decodeb"]
    assert found["Ra"] != found["Rb"]
    assert len(set(deployments_of(store).values())) == 2


def test_an_engine_that_is_its_own_front_end_is_an_engine(fleet: Fleet) -> None:
    """vLLM's API server and engine are one worker; each request has a leg of either."""
    for n in range(4):
        same: dict[str, Any] = {"external_id": f"q{n}", "trace_id": f"t{n}"}
        fleet.leg(f"F{n}", "frontend", "instance:v", n, n + 0.5, span_id="f", role="frontend", **same)  # fmt: skip
        fleet.leg(f"E{n}", "engine", "instance:v", n + 0.1, n + 0.4, span_id="e", parent_span_id="f", role="aggregated", output_tokens=9, **same)  # fmt: skip
    store = fleet.run()
    assert store.sql("SELECT role FROM workers").rows() == [("aggregated",)]
    assert {row["mode"] for row in store.sql("FROM requests").to_dicts()} == {"aggregated"}


def pd_behind_api_servers(fleet: Fleet, *, ids: tuple[str, str] = ("q", "q")) -> None:
    """A router calls two vLLM servers, each an API server above its engine, one after the other."""
    kw: dict[str, Any] = {"trace_id": "t"}
    fleet.leg("R", "router", "instance:r", 0, 2, first=1.2, span_id="r", parent_span_id="caller", external_id="q", role="router", **kw)  # fmt: skip
    for name, role, own, start, end, tokens in (("P", "prefill", ids[0], 0.1, 0.8, 1), ("D", "decode", ids[1], 0.9, 1.9, 9)):  # fmt: skip
        first = start + 0.3
        fleet.leg(f"H{name}", "router", "instance:r", start, end, span_id=f"h{name}", parent_span_id="r", container=True, **kw)  # fmt: skip
        fleet.leg(f"F{name}", "frontend", f"instance:{name}", start + 0.01, end, first=first + 0.01, span_id=f"f{name}", parent_span_id=f"h{name}", external_id=own, role="frontend", output_tokens=tokens, **kw)  # fmt: skip
        fleet.leg(f"E{name}", "engine", f"instance:{name}", start + 0.02, end, first=first, span_id=f"e{name}", parent_span_id=f"f{name}", external_id=own, request_id=f"chatcmpl-{own}", role=role, output_tokens=tokens, **kw)  # fmt: skip


def test_p_and_d_behind_their_own_front_ends_are_one_request(fleet: Fleet) -> None:
    pd_behind_api_servers(fleet)
    store = fleet.run()
    assert set(requests_of(store).values()) == {"q"}
    request = only(store)
    assert (request["mode"], request["ttft_ms"]) == ("disaggregated", pytest.approx(1200))
    assert (request["prefill_worker"], request["decode_worker"]) == ("instance:P", "instance:D")
    # Neither front end saw the whole request: no TTFT of "the frontend".
    seen = store.sql("SELECT observer, ttft_ms FROM observations WHERE observer = 'frontend'").rows()  # fmt: skip
    assert seen == [("frontend", None)]


def test_two_calls_of_an_agent_through_api_servers_stay_two(fleet: Fleet) -> None:
    kw: dict[str, Any] = {"trace_id": "t"}
    fleet.leg("A", "gateway", "instance:a", 0, 2, span_id="a", **kw)
    for name, start in (("1", 0.1), ("2", 1.1)):
        fleet.leg(f"F{name}", "frontend", "instance:v", start, start + 0.6, span_id=f"f{name}", parent_span_id="a", external_id=f"q{name}", role="frontend", **kw)  # fmt: skip
        fleet.leg(f"E{name}", "engine", "instance:v", start + 0.1, start + 0.5, span_id=f"e{name}", parent_span_id=f"f{name}", external_id=f"q{name}", role="aggregated", output_tokens=9, **kw)  # fmt: skip
    found = requests_of(fleet.run())
    assert (found["F1"], found["F2"]) == (found["E1"], found["E2"]) == ("q1", "q2")
