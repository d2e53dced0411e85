"""Identity: hand-made legs with known answers, one trap a test."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from pdtrace import _aside, clocks, identity, workers
from pdtrace.store import Store

T0 = 1_790_000_000_000_000_000
MS = 1_000_000
S = 1_000_000_000


@pytest.fixture(autouse=True, params=["table", "aside"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule holds for legs in a table and for those that lie aside until they are named."""
    if request.param == "aside":
        monkeypatch.setattr(_aside, "LEAST_ROWS", 1)


class Fleet:
    """Builds a store of hand-made legs."""

    def __init__(self) -> None:
        self.store = Store()
        self.legs: list[dict[str, Any]] = []
        self.spans: list[dict[str, Any]] = []
        self.paths: dict[str, int] = {}

    def source(self, path: str) -> int:
        if path not in self.paths:
            self.paths[path] = len(self.paths) + 1
            self.store.append("sources", [{"source": self.paths[path], "path": path}])
        return self.paths[path]

    def worker(self, worker: str, path: str = "run/traces.json", **row: Any) -> str:
        kind, _, value = worker.partition(":")
        self.store.append("workers", [{"worker": worker, **row}])
        self.store.append(
            "worker_aliases",
            [{"source": self.source(path), "worker": worker, "kind": kind, "value": value}],
        )
        return worker

    def leg(
        self,
        name: str,
        observer: str,
        worker: str | None,
        start: float | None,
        end: float | None = None,
        *,
        path: str = "run/traces.json",
        **row: Any,
    ) -> str:
        """Times in seconds after T0; `first` too."""
        first = row.pop("first", None)
        base = {
            "leg": name, "source": self.source(path), "observer": observer, "worker": worker, "container": False,
            "clock": "wall", "resolution_ns": 1, "status": "completed",
            "start_ns": None if start is None else T0 + round(start * S),
            "end_ns": None if end is None else T0 + round(end * S),
            "first_token_ns": None if first is None else T0 + round(first * S),
        }  # fmt: skip
        self.legs.append({**base, **row})
        return name

    def span(self, trace: str, span: str, parent: str | None) -> None:
        self.spans.append(
            {
                "trace_id": trace,
                "span_id": span,
                "parent_span_id": parent,
                "start_ns": T0,
                "end_ns": T0 + S,
                "name": "inner",
            }
        )

    def run(self, times: int = 1) -> Store:
        self.store.append("legs", self.legs)
        self.store.append("spans", self.spans)
        named = {leg["worker"] for leg in self.legs if leg["worker"]}
        known = set(self.store.sql("SELECT worker FROM workers")["worker"])
        for worker in sorted(named - known):
            self.store.append("workers", [{"worker": worker}])
        workers.resolve(self.store)
        for _ in range(times):
            identity.link(self.store)
            clocks.align(self.store)
            identity.build_requests(self.store)
        return self.store


def requests_of(store: Store) -> dict[str, str | None]:
    return dict(store.sql("SELECT leg, request FROM legs").iter_rows())


def deployments_of(store: Store) -> dict[str, str | None]:
    return dict(store.sql("SELECT leg, deployment FROM legs").iter_rows())


def only(store: Store, table: str = "requests") -> dict[str, Any]:
    rows = store.sql(f"FROM {table}")
    assert rows.height == 1, rows
    return rows.row(0, named=True)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def router_pd(
    fleet: Fleet, run: str, at: float, trace: str, ident: str, path: str, found: int | None = 7
) -> None:
    """One request through router, hops, P and D; span ids are the run's own, trace and request id are not."""
    r, p, d = f"instance:r{run}", f"instance:p{run}", f"instance:d{run}"
    kw: dict[str, Any] = {"trace_id": trace, "path": path}
    key = f"{run}{ident}"
    fleet.leg(
        f"R{key}",
        "router",
        r,
        at,
        at + 2,
        first=at + 0.6,
        span_id=f"r{key}",
        parent_span_id="client",
        external_id=ident,
        **kw,
    )
    fleet.leg(
        f"HP{key}",
        "router",
        r,
        at + 0.01,
        at + 0.5,
        span_id=f"hp{key}",
        parent_span_id=f"r{key}",
        container=True,
        **kw,
    )
    fleet.leg(
        f"HD{key}",
        "router",
        r,
        at + 0.51,
        at + 2,
        span_id=f"hd{key}",
        parent_span_id=f"r{key}",
        container=True,
        **kw,
    )
    fleet.leg(
        f"P{key}",
        "engine",
        p,
        at + 0.02,
        at + 0.49,
        first=at + 0.48,
        span_id=f"p{key}",
        parent_span_id=f"hp{key}",
        request_id=f"cmpl-{ident}-0",
        external_id=ident,
        output_tokens=1,
        prompt_tokens=100,
        cached_tokens=found,
        **kw,
    )
    fleet.leg(
        f"D{key}",
        "engine",
        d,
        at + 0.52,
        at + 1.9,
        first=at + 0.55,
        span_id=f"d{key}",
        parent_span_id=f"hd{key}",
        request_id=f"cmpl-{ident}-0",
        external_id=ident,
        output_tokens=51,
        prompt_tokens=100,
        cached_tokens=96,
        **kw,
    )


def test_the_answer_behind_a_split_does_not_tell_what_the_prompt_found_in_a_cache(
    fleet: Fleet,
) -> None:
    router_pd(fleet, "1", 0, "t", "x-1", "run/a.json", found=None)
    fleet.leg(
        "C1", "client", "instance:c", -0.01, 2.01, first=0.61, span_id="client", trace_id="t",
        path="run/a.json", external_id="x-1", cached_tokens=96,
    )  # fmt: skip
    row = only(fleet.run())
    assert (row["mode"], row["cached_tokens"]) == ("disaggregated", None)


def test_router_prefill_and_decode_are_one_disaggregated_request(fleet: Fleet) -> None:
    router_pd(fleet, "1", 0, "t", "x-1", "run/a.json")
    store = fleet.run(times=2)
    row = only(store)
    assert set(requests_of(store).values()) == {"x-1"}
    assert (row["mode"], row["prefill_worker"], row["decode_worker"]) == (
        "disaggregated",
        "instance:p1",
        "instance:d1",
    )
    assert (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]) == (100, 7, 51)
    assert (row["start_ns"], row["end_ns"]) == (T0, T0 + 2 * S)
    assert row["ttft_ms"] == pytest.approx(600)
    assert row["first_token_origin"] == "decode"
    assert row["tpot_ms"] == pytest.approx(28)
    seen = store.sql("FROM observations WHERE observer = 'engine'").row(0, named=True)
    assert seen["ttft_ms"] is None
    assert seen["tpot_ms"] == pytest.approx((1900 - 550) / 50)
    deployment = only(store, "deployments")
    assert (deployment["mode"], deployment["headline_observer"], deployment["name"]) == (
        "disaggregated",
        "router",
        "run",
    )
    roles = dict(store.sql("SELECT worker, role FROM workers").iter_rows())
    assert roles == {"instance:r1": "router", "instance:p1": "prefill", "instance:d1": "decode"}
    assert store.sql("SELECT role FROM legs WHERE leg = 'D1x-1'").item() == "decode"
    rules = set(store.sql("SELECT rule FROM identity_edges")["rule"])
    assert rules <= {"direct_parent", "router_parent", "engine_request_id"}
    assert "direct_parent" in rules


@pytest.mark.parametrize(
    ("seen", "end", "d_end", "made", "origin"),
    [
        (0.50, 2.0, 1.9, 0.55, "prefill"),  # P's token was seen before D made one
        (0.61, 2.0, 1.9, 0.55, "decode"),
        # D ends after its answer was seen to end: its clock is 0.2 s ahead, which turns the answer
        (0.61, 2.0, 2.2, 0.75, None),
        (0.10, 2.0, 2.2, 0.75, "prefill"),  # not even that explains it
    ],
)
def test_clocks_that_contradict_each_other_do_not_tell_who_made_the_first_token(
    fleet: Fleet, seen: float, end: float, d_end: float, made: float, origin: str | None
) -> None:
    ids: dict[str, Any] = {"request_id": "cmpl-x-0", "external_id": "x"}
    fleet.leg("R", "router", "instance:r", 0, end, first=seen, **ids)
    fleet.leg("P", "engine", "instance:p", 0.02, 0.49, first=0.48, role="prefill", **ids)
    fleet.leg("D", "engine", "instance:d", 0.52, d_end, first=made, role="decode", **ids)
    row = only(fleet.run())
    assert (row["mode"], row["first_token_origin"]) == ("disaggregated", origin)


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


def test_toy_proxy_without_trace_headers_joins_by_id(fleet: Fleet) -> None:
    for n in range(2):
        at = 3.0 * n
        fleet.leg(
            f"P{n}",
            "engine",
            "instance:p",
            at,
            at + 0.5,
            first=at + 0.5,
            trace_id=f"a{n}",
            span_id=f"a{n}",
            request_id=f"cmpl-u{n}-0",
            external_id=f"u{n}",
            max_tokens=1,
            output_tokens=1,
        )
        fleet.leg(
            f"D{n}",
            "engine",
            "instance:d",
            at + 0.6,
            at + 2,
            first=at + 0.7,
            trace_id=f"b{n}",
            span_id=f"b{n}",
            request_id=f"cmpl-u{n}-0",
            external_id=f"u{n}",
            output_tokens=20,
        )
    store = fleet.run()
    assert requests_of(store) == {"P0": "u0", "D0": "u0", "P1": "u1", "D1": "u1"}
    assert store.count("deployments") == 1
    rows = store.sql("FROM requests")
    assert set(rows["mode"]) == {"disaggregated"}
    assert rows["ttft_ms"].null_count() == 2  # no engine leg saw start and delivered token
    assert set(rows["window_observer"]) == {"engine"}
    assert only(store, "deployments")["headline_observer"] is None


def test_agent_trace_with_many_calls_is_many_requests(fleet: Fleet) -> None:
    fleet.leg("agent", "gateway", "instance:agent", 0, 9, trace_id="t", span_id="agent")
    for n in range(3):
        fleet.span("t", f"tool{n}", "agent")
        fleet.leg(
            f"call{n}",
            "engine",
            "instance:e",
            1 + 2 * n,
            2 + 2 * n,
            first=1.5 + 2 * n,
            trace_id="t",
            span_id=f"c{n}",
            parent_span_id=f"tool{n}",
            request_id=f"cmpl-r{n}-0",
            external_id=f"r{n}",
            output_tokens=5,
        )
    store = fleet.run()
    assert requests_of(store) == {"agent": None, "call0": "r0", "call1": "r1", "call2": "r2"}


def test_agent_that_sends_one_id_with_all_calls(fleet: Fleet) -> None:
    fleet.leg("agent", "gateway", "instance:agent", 0, 9, trace_id="t", span_id="agent")
    for n in range(3):
        fleet.leg(
            f"call{n}",
            "engine",
            "instance:e",
            1 + 2 * n,
            2 + 2 * n,
            trace_id="t",
            span_id=f"c{n}",
            parent_span_id="agent",
            external_id="session-1",
            output_tokens=5,
        )
    store = fleet.run()
    assert store.count("requests") == 3
    assert len(set(requests_of(store).values())) == 4


def test_one_trace_without_common_parent_leg_joins_nothing(fleet: Fleet) -> None:
    for n in range(2):
        fleet.leg(
            f"c{n}",
            "engine",
            "instance:e",
            n * 0.1,
            1,
            trace_id="t",
            span_id=f"c{n}",
            parent_span_id="gone",
            external_id=f"r{n}",
        )
    assert fleet.run().count("requests") == 2


def test_batched_prompts_are_two_requests_of_one_call(fleet: Fleet) -> None:
    fleet.leg("R", "router", "instance:r", 0, 2, trace_id="t", span_id="r", external_id="b")
    fleet.leg(
        "H",
        "router",
        "instance:r",
        0,
        2,
        trace_id="t",
        span_id="h",
        parent_span_id="r",
        container=True,
    )
    for n in range(2):
        fleet.leg(
            f"E{n}",
            "engine",
            "instance:e",
            0.1,
            1 + n * 0.1,
            trace_id="t",
            span_id=f"e{n}",
            parent_span_id="h",
            request_id=f"cmpl-b-{n}",
            external_id=f"b-{n}",
            output_tokens=9,
        )
    store = fleet.run()
    found = requests_of(store)
    assert store.count("requests") == 2
    assert found["E0"] == found["R"] == found["H"]
    assert found["E1"] != found["E0"]
    assert store.sql("SELECT leg_a, leg_b FROM identity_edges WHERE rule = 'same_call'").rows() == [
        ("R", "E1")
    ]


def test_batched_prompts_without_a_router(fleet: Fleet) -> None:
    for n in range(2):
        fleet.leg(
            f"E{n}",
            "engine",
            "instance:e",
            0.1,
            1,
            trace_id="t",
            span_id=f"e{n}",
            request_id=f"cmpl-b-{n}",
            external_id=f"b-{n}",
        )
    assert set(requests_of(fleet.run()).values()) == {"b-0", "b-1"}


def test_n_2_is_one_request_with_two_streams(fleet: Fleet) -> None:
    for n in range(2):
        fleet.leg(
            f"E{n}",
            "engine",
            "instance:e",
            0,
            1 + n,
            first=0.4 - n * 0.1,
            trace_id="t",
            span_id=f"e{n}",
            external_id="c",
            request_id="chatcmpl-c",
            stream=n,
            output_tokens=10 + n,
            prompt_tokens=8,
        )
    row = only(fleet.run())
    assert (row["streams"], row["output_tokens"], row["prompt_tokens"]) == (2, 21, 8)
    assert row["ttft_ms"] == pytest.approx(300)
    assert row["end_ns"] == T0 + 2 * S
    assert row["mode"] == "aggregated"


def test_router_retry_is_one_request_with_two_attempts(fleet: Fleet) -> None:
    fleet.leg(
        "R", "router", "instance:r", 0, 3, first=2.2, trace_id="t", span_id="r", external_id="x"
    )
    for n, worker in enumerate(("instance:a", "instance:b")):
        fleet.leg(
            f"H{n}",
            "router",
            "instance:r",
            n,
            n + 0.9,
            trace_id="t",
            span_id=f"h{n}",
            parent_span_id="r",
            container=True,
            attempt=n,
        )
        fleet.leg(
            f"E{n}",
            "engine",
            worker,
            n + 0.1,
            n + 0.8,
            trace_id="t",
            span_id=f"e{n}",
            parent_span_id=f"h{n}",
            request_id=f"id-{n}",
            status="failed" if n == 0 else "completed",
            output_tokens=0 if n == 0 else 30,
            first=None if n == 0 else 1.5,
        )
    row = only(fleet.run())
    assert (row["attempts"], row["outcome"], row["mode"], row["decode_worker"]) == (
        2,
        "completed",
        "aggregated",
        "instance:b",
    )
    assert row["ttft_ms"] == pytest.approx(2200)


def test_span_log_and_request_trace_of_one_request(fleet: Fleet) -> None:
    fleet.leg(
        "span",
        "engine",
        "instance:e",
        0.7,
        1.5,
        first=0.9,
        trace_id="t",
        span_id="e",
        request_id="cmpl-a-0",
        external_id="a",
        output_tokens=10,
    )
    fleet.leg(
        "log",
        "engine",
        "instance:e",
        0,
        1,
        path="run/server.log",
        request_id="cmpl-a-0",
        external_id="a",
        resolution_ns=S,
        clock="wall",
    )
    fleet.leg(
        "aborted",
        "engine",
        "instance:e",
        5,
        6,
        path="run/server.log",
        request_id="cmpl-z-0",
        external_id="z",
        resolution_ns=S,
        status="aborted",
    )
    store = fleet.run()
    assert requests_of(store) == {"span": "a", "log": "a", "aborted": "z"}
    rows = {r["request"]: r for r in store.sql("FROM requests").iter_rows(named=True)}
    assert rows["a"]["start_ns"] == T0 + 700 * MS
    assert rows["a"]["ttft_ms"] == pytest.approx(200)
    assert rows["z"]["outcome"] == "aborted"


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


def test_two_log_records_of_one_request_are_no_streams(fleet: Fleet) -> None:
    for n in range(2):
        fleet.leg(
            f"F{n}",
            "frontend",
            "instance:f",
            0.001 * n,
            1,
            first=0.2,
            path="run/f.log",
            trace_id="t",
            span_id="f",
            request_id="u",
            external_id="x",
            output_tokens=5,
        )
    store = fleet.run()
    row = only(store)
    assert (row["streams"], row["output_tokens"]) == (1, 5)


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


def test_migration_keeps_one_request(fleet: Fleet) -> None:
    fleet.leg(
        "F", "frontend", "instance:f", 0, 3, first=0.3, trace_id="t", span_id="f", request_id="u"
    )
    for n in range(2):
        fleet.leg(
            f"E{n}",
            "engine",
            f"instance:e{n}",
            n + 0.1,
            n + 1.05,
            trace_id="t",
            span_id=f"e{n}",
            parent_span_id="f",
            request_id="u",
            attempt=n,
            output_tokens=20,
            status="failed" if n == 0 else "completed",
        )
    row = only(fleet.run())
    assert (row["attempts"], row["outcome"], row["mode"], row["decode_worker"]) == (
        2,
        "completed",
        "aggregated",
        "instance:e1",
    )


def test_coarse_outer_log_gives_neither_window_nor_headline(fleet: Fleet) -> None:
    fleet.leg(
        "L",
        "router",
        "file:run/router.log",
        0,
        2,
        first=1,
        path="run/router.log",
        external_id="x",
        resolution_ns=S,
    )
    fleet.leg("E", "engine", "instance:e", 0.4, 1.4, first=0.6, external_id="x", output_tokens=5)
    store = fleet.run()
    row = only(store)
    assert (row["window_observer"], row["ttft_ms"]) == ("engine", pytest.approx(200))
    assert only(store, "deployments")["headline_observer"] == "engine"


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


def test_remote_reference_and_bootstrap_room(fleet: Fleet) -> None:
    fleet.leg("P", "engine", "instance:p", 0, 0.5, request_id="own-p", output_tokens=1)
    fleet.leg(
        "D",
        "engine",
        "instance:d",
        0.6,
        2,
        request_id="own-d",
        remote_id="own-p-0a1b2c3d",
        output_tokens=9,
    )
    fleet.leg(
        "P2",
        "engine",
        "instance:p",
        3,
        3.5,
        request_id="q1",
        bootstrap_room="77",
        role="prefill",
        role_basis="log",
    )
    fleet.leg(
        "D2",
        "engine",
        "instance:d",
        3,
        5,
        request_id="q2",
        bootstrap_room="77",
        role="decode",
        role_basis="log",
        first=3.7,
    )
    store = fleet.run()
    found = requests_of(store)
    assert found["P"] == found["D"] != found["P2"] == found["D2"]
    assert {"remote_reference", "bootstrap_room"} <= set(
        store.sql("SELECT rule FROM identity_edges")["rule"]
    )
    row = store.sql("FROM observations WHERE request = $r", r=found["D2"]).row(0, named=True)
    assert row["ttft_ms"] == pytest.approx(700)  # D was there from the start


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


def test_skewed_clocks_still_join_by_id(fleet: Fleet) -> None:
    for n in range(3):
        at = 100.0 * n
        fleet.leg(f"R{n}", "router", "instance:r", at, at + 1, first=at + 0.5, external_id=f"x{n}")
        fleet.leg(
            f"E{n}",
            "engine",
            "instance:e",
            at + 20,
            at + 20.8,
            external_id=f"x{n}",
            output_tokens=4,
        )
    assert fleet.run().count("requests") == 3


def test_an_id_that_everybody_bears_joins_nobody(fleet: Fleet) -> None:
    for n in range(100):
        fleet.leg(f"E{n}", "engine", "instance:e", n * 0.01, n * 0.01 + 1, external_id="test")
    store = fleet.run()
    assert store.count("requests") == 100


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


def test_a_request_is_named_as_its_caller_named_it() -> None:
    """Dynamo's frontend leaves a span, log lines and a request trace; the last knows only the id it made itself."""
    legs = pl.DataFrame(
        {
            "n": [0, 1, 2, 3], "leg": ["trace", "span", "log", "engine"], "obs": [1, 1, 1, 4], "lo": [0, 4, 9, 2],
            "container": [False] * 4, "trace_id": [None, "t", "t", "t"], "request_id": ["8f3a"] * 4,
            "external_id": ["8f3a", "drv-1", "drv-1", "drv-1"],
        }
    )  # fmt: skip
    names = identity.request_names(legs, np.zeros(4, dtype=np.int64))
    assert names.to_list() == ["drv-1"] * 4


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


def test_log_lines_beside_the_span_of_a_bare_name_are_still_one_sighting(fleet: Fleet) -> None:
    same: dict[str, Any] = {"external_id": "load-3", "role": "router"}
    fleet.leg("span", "router", "service:gw", 0, 0.4, span_id="r", trace_id="t", **same)
    fleet.leg("log/gw", "router", "service:gw", 0.001, 0.4, path="run/gw.log", **same)
    found = requests_of(fleet.run())
    assert found["span"] == found["log/gw"]


def test_how_a_request_ended_is_told_by_its_finest_record(fleet: Fleet) -> None:
    """Dynamo's request trace (milliseconds) has the same row for a request that its client left; the span knows."""
    own: dict[str, Any] = {"request_id": "8f3a"}
    fleet.leg("span", "frontend", "instance:f", 0.0004, 0.3, first=0.1, external_id="drv-1", trace_id="t", span_id="s", status="aborted", **own)  # fmt: skip
    fleet.leg("engine", "engine", "instance:e", 0.01, 0.3, external_id="drv-1", trace_id="t", span_id="e", parent_span_id="s", role="aggregated", status="aborted", **own)  # fmt: skip
    fleet.leg("record/1", "frontend", None, 0, 0.3, external_id="8f3a", resolution_ns=MS, path="run/records.json", **own)  # fmt: skip
    fleet.leg("record/1/aggregated", "engine", "instance:e", 0.01, 0.3, external_id="8f3a", resolution_ns=MS, path="run/records.json", role="aggregated", status="unknown", **own)  # fmt: skip
    request = only(fleet.run())
    assert (request["outcome"], request["external_id"]) == ("aborted", "drv-1")
    assert request["first_token_ns"] == T0 + 100 * MS


def test_an_attempt_that_failed_before_one_that_did_not_is_no_failure(fleet: Fleet) -> None:
    same: dict[str, Any] = {"request_id": "8f3a", "external_id": "drv-1", "trace_id": "t"}
    fleet.leg("try", "frontend", "instance:f", 0, 0.1, span_id="a", status="failed", attempt=0, **same)  # fmt: skip
    fleet.leg("again", "frontend", "instance:f", 0.2, 0.3, span_id="b", attempt=1, **same)
    assert only(fleet.run())["outcome"] == "completed"


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
