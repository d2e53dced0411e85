"""Dynamo's spans mean what formats and code say: legs, roles, the first token, phases, retries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pdtrace import interpret, registry, workers
from pdtrace.inputs import expand
from pdtrace.sink import Account, Reading, RowSink, SourceSink
from pdtrace.store import Store

FIXTURES = Path(__file__).parent / "fixtures"
MS = 1_000_000
FROM_SPANS = ~pl.col("leg").str.starts_with("dynamo_")  # not from request trace or log lines
P, D = "17172504481790508292", "12"  # a worker id beyond 2**63, and a small one

Ingest = Callable[..., Store]


def read(store: Store, *paths: Path | str) -> None:
    """Read files with the collectors that recognise them."""
    for item in expand([str(path) for path in paths]):
        for name in [name for name, match in registry.sniff(item.head()) if not match.ignore]:
            sink, reading = SourceSink(store, Account(item)), Reading(item, lambda _: None)
            registry.collectors()[name].read(reading, sink)
            sink.close()
            reading.fingerprint()
        store.append("sources", [{"source": item.number, "path": item.path}])


def interpret_all(store: Store) -> Store:
    """The stages between reading and identity."""
    interpret.name_resources(store)
    workers.resolve(store)
    interpret.run(store)
    workers.resolve(store)
    return store


@pytest.fixture
def ingest(store: Store) -> Ingest:
    """Read files and interpret them; the stages after that are not needed here."""

    def run(*paths: Path | str) -> Store:
        read(store, *paths)
        return interpret_all(store)

    return run


def span(
    name: str, start: float, end: float | None, span_id: str, parent: str | None = None, **more: Any
) -> dict[str, Any]:
    """One span of the trace of request r-1; times in ms after the HTTP request."""
    attributes = {key.replace("__", "."): value for key, value in more.items()}
    return {
        "source": 0, "trace_id": "t" * 32, "span_id": span_id, "parent_span_id": parent, "name": name,
        "start_ns": 10**18 + round(start * MS), "end_ns": None if end is None else 10**18 + round(end * MS),
        "kind": "internal", "status_code": "error", "service_name": "svc", "worker": "service:svc",
        "resolution_ns": 1, "mine": True, "request_id": "r-1", **attributes,
    }  # fmt: skip


def interpreted(
    store: Store, *spans: dict[str, Any], facts: list[dict[str, Any]] | None = None
) -> Store:
    """Run interpret() over hand-made spans."""
    module = registry.collectors()["dynamo"]
    types = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}
    event = pl.Struct({"time_ns": pl.Int64, "name": pl.String, "attributes": pl.String})
    link = pl.Struct({"trace_id": pl.String, "span_id": pl.String, "attributes": pl.String})
    schema: dict[str, Any] = {
        "source": pl.Int32, "trace_id": pl.String, "span_id": pl.String, "parent_span_id": pl.String,
        "start_ns": pl.Int64, "end_ns": pl.Int64, "name": pl.String, "kind": pl.String, "status_code": pl.String,
        "status_message": pl.String, "scope_name": pl.String, "resource": pl.String, "service_name": pl.String,
        "worker": pl.String, "resolution_ns": pl.Int64, "events": pl.List(event), "links": pl.List(link),
        "mine": pl.Boolean,
    }  # fmt: skip
    schema |= {key: types[kind] for key, kind in module.CLAIMS.attributes.items()}
    frame = pl.DataFrame([{key: row.get(key) for key in schema} for row in spans], schema=schema)
    known = pl.DataFrame(
        facts or [], schema={"worker": pl.String, "key": pl.String, "value": pl.String}
    )
    sink = RowSink(store)
    module.interpret(frame, known, sink)
    sink.close()
    return store


def legs(store: Store, **where: object) -> pl.DataFrame:
    frame = store.sql("FROM legs ORDER BY start_ns, leg")
    for column, value in where.items():
        frame = frame.filter(pl.col(column).eq_missing(pl.lit(value)))
    return frame


def spent(store: Store) -> dict[str, list[float]]:
    """Milliseconds of each interval by detail."""
    rows = store.sql(
        "SELECT detail, (end_ns - start_ns) / 1e6 AS ms FROM intervals ORDER BY start_ns, ms"
    )
    result: dict[str, list[float]] = {}
    for detail, ms in rows.iter_rows():
        result.setdefault(detail, []).append(round(ms, 3))
    return result


def pair(*, side_by_side: bool = False, http: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """A request with prefill and decode apart: prefill hop 3-43 ms, first token at 60, end at 100."""
    decode = 6 if side_by_side else 44
    return [
        span("http-request", 0, 100, "h", method="POST", uri="/v1/chat/completions", x_request_id="x-1",
             input_tokens=700, output_tokens=5, ttft_ms=59.5, **(http or {})),
        span("request.lifecycle", 0.1, 100, "l", "h", dynamo__request__terminal__outcome="success",
             dynamo__process__epoch="7:e", dynamo__session__id="s", dynamo__session__source="request_id_fallback"),
        span("kv_router.select_worker", 1, 2, "s1", "l", request_id=None),
        span("kv_router.route_request", 2, 43, "p", "l", phase="Prefill", worker_id=P, overlap_blocks=4.0,
             **{"request.outcome": "success", "request.attempt": 0}),
        span("handle_payload", 3, 42.5, "hp", "p", component="prefill", endpoint="generate", instance_id=P),
        span("kv_router.select_worker", decode - 0.8, decode - 0.3, "s2", "l", request_id=None),
        span("kv_router.route_request", decode, 100, "d", "l", phase="Decode", worker_id=D,
             **{"request.outcome": "success", "request.attempt": 0}),
        span("handle_payload", decode + 1, 99.5, "hd", "d", component="backend", endpoint="generate", instance_id=D),
        span("response.streaming", 60, 99.9, "r", "l"),
    ]  # fmt: skip


def covered_by_request_trace() -> list[dict[str, Any]]:
    value = f'{{"worker_id":"{P}","from_ns":{10**18},"to_ns":{10**18 + MS}}}'
    return [{"worker": f"worker_id:{P}", "key": "_request_trace_coverage", "value": value}]


def test_a_successful_request_is_completed_though_its_span_says_error(store: Store) -> None:
    leg = legs(interpreted(store, *pair()), observer="frontend").row(0, named=True)
    assert leg["status"] == "completed"
    assert leg["error"] is None


def test_the_first_token_is_the_streamed_one_and_durations_follow(store: Store) -> None:
    leg = legs(interpreted(store, *pair()), observer="frontend").row(0, named=True)
    assert (leg["ttft_ms"], leg["e2e_ms"], leg["tpot_ms"]) == (60.0, 100.0, pytest.approx(39.9 / 4))
    assert (leg["request_id"], leg["external_id"], leg["prompt_tokens"]) == ("r-1", "x-1", 700)
    assert leg["first_token_delivered"] is True
    assert leg["session"] is None  # a fallback is no session


def test_without_a_streaming_span_the_reported_ttft_places_the_first_token(store: Store) -> None:
    leg = legs(interpreted(store, *pair()[:-1]), observer="frontend").row(0, named=True)
    assert leg["ttft_ms"] == 59.5
    assert "ttft_ms" in leg["ttft_definition"]


def test_workers_have_roles_and_ids_beyond_two_to_the_63(store: Store) -> None:
    rows = legs(interpreted(store, *pair()), observer="engine")
    assert rows.select("worker", "role", "role_basis", "container").rows() == [
        (f"worker_id:{P}", "prefill", "span", False),
        (f"worker_id:{D}", "decode", "span", False),
    ]
    assert rows["first_token_delivered"].to_list() == [False, None]


def test_hops_are_containers_of_the_frontend_and_chain_to_the_request(store: Store) -> None:
    interpreted(store, *pair())
    hops = legs(store, container=True)
    assert hops["parent_span_id"].to_list() == ["h", "h"]
    assert hops["worker"].unique().to_list() == ["instance:7:e"]
    assert legs(store, observer="engine")["parent_span_id"].to_list() == ["p", "d"]


def test_one_after_the_other_the_hop_bounds_the_prefill_and_the_rest_is_hand_over(
    store: Store,
) -> None:
    interpreted(store, *pair())
    assert spent(store) == {
        "frontend": [1.0],
        "router_decide": [1.0, 0.5],
        "dispatch": [1.0, 1.3],
        "prefill_wall": [41.0],
        "kv_wait_upper_bound": [17.0],
        "decode_wall": [39.9],
    }
    assert store.sql("SELECT basis FROM intervals WHERE detail = 'prefill_wall'")[
        "basis"
    ].to_list() == ["upper_bound"]


def test_side_by_side_the_hop_is_no_prefill_and_only_what_follows_it_is_hand_over(
    store: Store,
) -> None:
    interpreted(store, *pair(side_by_side=True))
    found = spent(store)
    assert "prefill_wall" not in found
    assert found["kv_wait_upper_bound"] == [17.0]


@pytest.mark.parametrize(("side_by_side", "waited"), [(True, 54.0), (False, 17.0)])
def test_where_the_request_trace_places_the_prefill_the_whole_decode_wait_is_given(
    store: Store, side_by_side: bool, waited: float
) -> None:
    interpreted(store, *pair(side_by_side=side_by_side), facts=covered_by_request_trace())
    found = spent(store)
    assert "prefill_wall" not in found
    assert found["kv_wait_upper_bound"] == [waited]


def test_aggregated_the_prefill_runs_from_the_hop_to_the_first_token(store: Store) -> None:
    interpreted(
        store,
        span("http-request", 0, 100, "h", method="POST", output_tokens=5),
        span("kv_router.route_request", 2, 100, "a", "h", phase="Aggregated", worker_id=D),
        span(
            "handle_payload",
            3,
            99,
            "w",
            "a",
            component="backend",
            endpoint="generate",
            instance_id=D,
        ),
        span("response.streaming", 30, 99, "r", "h"),
    )
    assert legs(store, observer="engine")["role"].to_list() == ["aggregated"]
    assert spent(store) == {
        "frontend": [2.0],
        "dispatch": [1.0],
        "prefill_wall": [28.0],
        "decode_wall": [69.0],
    }
    assert legs(store, observer="frontend")["status"].to_list() == ["completed"]


def test_round_robin_hops_have_no_phase_and_take_it_from_the_worker(store: Store) -> None:
    interpreted(
        store,
        span("http-request", 0, 100, "h", method="POST"),
        span("router.route_request", 2, 40, "p", "h", router_mode="RoundRobin"),
        span(
            "handle_payload",
            3,
            39,
            "hp",
            "p",
            component="prefill",
            endpoint="generate",
            instance_id=P,
        ),
        span("router.route_request", 41, 100, "d", "h", router_mode="RoundRobin"),
        span(
            "handle_payload",
            42,
            99,
            "hd",
            "d",
            component="backend",
            endpoint="generate",
            instance_id=D,
        ),
    )
    assert legs(store, observer="engine")["role"].to_list() == ["prefill", "decode"]
    choices = store.sql("SELECT phase, policy, worker FROM decisions ORDER BY time_ns").rows()
    assert choices == [
        ("prefill", "roundrobin", f"worker_id:{P}"),
        ("decode", "roundrobin", f"worker_id:{D}"),
    ]


def test_the_oldest_vocabulary_has_a_request_and_two_workers(store: Store) -> None:
    interpreted(
        store,
        span("http-request", 0, 100, "h", method="POST", request_id=None),
        span(
            "handle_payload",
            3,
            39,
            "hp",
            "h",
            component="prefill",
            endpoint="generate",
            instance_id=P,
        ),
        span(
            "handle_payload",
            42,
            99,
            "hd",
            "h",
            component="backend",
            endpoint="generate",
            instance_id=D,
        ),
    )
    assert legs(store)["request_id"].to_list() == ["r-1"] * 3
    assert legs(store, observer="engine")["role"].to_list() == ["prefill", "decode"]
    assert legs(store, observer="frontend")["status"].to_list() == ["unknown"]


def test_control_plane_and_health_give_no_legs(store: Store) -> None:
    interpreted(
        store,
        span(
            "handle_payload",
            0,
            5,
            "c",
            component="prefill",
            endpoint="worker_kv_query_source_1",
            instance_id=P,
        ),
        span("http-request", 0, 5, "g", method="GET", uri="/metrics"),
        span("http-request", 0, 5, "m", method="POST", uri="/clear_kv_blocks"),
    )
    assert legs(store).height == 0


def test_a_failed_attempt_is_told_and_healed_by_the_next(store: Store) -> None:
    interpreted(
        store,
        span("http-request", 0, 200, "h", method="POST", output_tokens=5),
        span("kv_router.route_request", 2, 50, "a0", "h", phase="Aggregated", worker_id=P,
             **{"request.attempt": 0, "request.outcome": "worker_disconnected"}),
        span("kv_router.route_request", 60, 200, "a1", "h", phase="Aggregated", worker_id=D,
             **{"request.attempt": 1, "request.outcome": "success"}),
        span("handle_payload", 61, 199, "w", "a1", endpoint="generate", instance_id=D),
        span("response.streaming", 90, 200, "r", "h"),
    )  # fmt: skip
    assert legs(store, observer="frontend")["status"].to_list() == ["completed"]
    hops = legs(store, observer="router").select("attempt", "status", "error").rows()
    assert hops == [(0, "failed", "worker_disconnected"), (1, "completed", None)]
    # The killed worker exported nothing: the hop names it.
    lost = legs(store, observer="engine", container=True).row(0, named=True)
    assert (lost["worker"], lost["role"], lost["status"], lost["attempt"]) == (
        f"worker_id:{P}",
        "aggregated",
        "failed",
        0,
    )
    assert store.sql("SELECT kind, worker, request_id FROM events").rows() == [
        ("failure", f"worker_id:{P}", "r-1")
    ]


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ("cancelled", "aborted"),
        ("rejected", "failed"),
        ("timed_out", "failed"),
        ("unknown", "unknown"),
    ],
)
def test_the_terminal_outcome_decides(store: Store, outcome: str, status: str) -> None:
    interpreted(
        store,
        span("http-request", 0, 10, "h", method="POST"),
        span("request.lifecycle", 0, 10, "l", "h", dynamo__request__terminal__outcome=outcome),
    )
    assert legs(store)["status"].to_list() == [status]


def test_an_unfinished_request_has_no_end_and_no_decode(store: Store) -> None:
    interpreted(
        store,
        span("http-request", 0, None, "h", method="POST"),
        span("response.streaming", 5, None, "r", "h"),
    )
    leg = legs(store).row(0, named=True)
    assert (leg["end_ns"], leg["e2e_ms"], leg["ttft_ms"], leg["status"]) == (
        None,
        None,
        5.0,
        "unknown",
    )
    assert spent(store) == {}


def test_the_unified_backend_tells_prefill_and_admission(ingest: Ingest) -> None:
    store = ingest(FIXTURES / "dynamo" / "unified_backend.otlp.jsonl")
    engine = legs(store, observer="engine")
    assert engine["role"].to_list() == ["prefill", "decode"]
    assert engine["output_tokens"].to_list() == [1, 5]
    assert engine["model"].to_list() == [None, None]  # a folder is no model name
    found = spent(store)
    assert found["prefill_wall"] == [pytest.approx(51.1, abs=0.5)]
    assert len(found["prefill_queue"]) == len(found["decode_queue"]) == 1
    quantities = set(store.sql("SELECT quantity FROM reported")["quantity"])
    assert {"ttft_ms", "avg_itl_ms", "itl_p99_ms"} <= quantities


def test_real_bootstrap_spans_with_the_request_trace(ingest: Ingest) -> None:
    store = ingest(
        FIXTURES / "dynamo" / "disagg_bootstrap.otlp.jsonl",
        FIXTURES / "dynamo_request_trace" / "disagg_bootstrap.jsonl",
    )
    frontend = legs(store, observer="frontend").filter(FROM_SPANS)
    assert frontend.height == 3
    assert frontend["status"].to_list() == ["completed"] * 3
    # The trace's ttft_ms is the prefill worker's: no TTFT of the frontend's leg.
    traced = legs(store, observer="frontend").filter(~FROM_SPANS)
    assert traced["ttft_ms"].to_list() == [None] * 3
    found = spent(store)
    assert len(found["prefill_wall"]) == len(found["kv_wait_upper_bound"]) == 3
    assert max(found["prefill_wall"]) > 60  # the long prompt
    assert set(legs(store, observer="engine")["role"]) == {"prefill", "decode"}


def test_log_lines_and_otlp_give_the_same_tree(ingest: Ingest) -> None:
    logs = [
        FIXTURES / "dynamo_log" / f"{name}.log.jsonl" for name in ("frontend", "prefill", "decode")
    ]
    store = ingest(*logs)
    columns = "trace_id, span_id, parent_span_id, name, kind"
    told = set(store.sql(f"SELECT {columns} FROM spans WHERE name <> 'response.streaming'").rows())
    assert len(told) == 34
    starts = dict(store.sql("SELECT span_id, start_ns FROM spans").rows())
    other = Store()
    read(other, FIXTURES / "dynamo" / "disagg_bootstrap.otlp.jsonl")
    exported = set(other.sql(f"SELECT {columns} FROM spans").rows())
    assert told <= exported
    for span_id, start in other.sql("SELECT span_id, start_ns FROM spans").iter_rows():
        if span_id in starts:
            assert abs(starts[span_id] - start) < MS
    streams = store.sql(
        "SELECT trace_id, parent_span_id, extra, resolution_ns FROM spans WHERE name = 'response.streaming'"
    )
    assert streams.height == 2
    assert streams["extra"].null_count() == 0
    assert streams["resolution_ns"].min() == MS
    ttft = legs(store, observer="frontend").filter(FROM_SPANS)["ttft_ms"].to_list()
    truth = dict(interpreted_truth())
    for request, value in zip(
        legs(store, observer="frontend").filter(FROM_SPANS)["request_id"],
        ttft,
        strict=True,
    ):
        assert value == pytest.approx(truth[request], abs=2)


def interpreted_truth() -> list[tuple[str, float]]:
    """TTFT of the same requests from OTLP."""
    store = Store()
    read(store, FIXTURES / "dynamo" / "disagg_bootstrap.otlp.jsonl")
    interpret_all(store)
    return store.sql("SELECT request_id, ttft_ms FROM legs WHERE observer = 'frontend'").rows()


@pytest.mark.shared
@pytest.mark.parametrize(
    ("folder", "frontend_p50", "trace_p50"),
    [("agg", 28.05, 27.5), ("disagg_bootstrap", 95.86, 24.7)],
)
def test_full_captures_give_200_requests_and_the_delivered_first_token(
    ingest: Ingest, shared: Path, folder: str, frontend_p50: float, trace_p50: float
) -> None:
    data = shared / "data" / "dynamo" / folder
    store = ingest(data / "otlp_traces.jsonl.gz", data / "request_trace.jsonl.gz")
    seen = legs(store, observer="frontend", status="completed").filter(FROM_SPANS)
    assert seen.height == 200
    assert seen["ttft_ms"].median() == pytest.approx(frontend_p50, abs=0.1)
    said = store.sql(
        "SELECT value FROM reported WHERE quantity = 'ttft_ms' AND definition LIKE '%request trace%'"
    )
    assert said["value"].median() == pytest.approx(trace_p50, abs=0.5)


@pytest.mark.shared
def test_full_logs_give_the_tree_of_the_full_export(ingest: Ingest, shared: Path) -> None:
    data = shared / "data" / "dynamo" / "disagg_bootstrap"
    store = ingest(*sorted(data.glob("*.log.jsonl.gz")))
    told = set(
        store.sql(
            "SELECT trace_id, span_id, parent_span_id, name FROM spans WHERE extra IS NULL"
        ).rows()
    )
    made = store.sql("SELECT name FROM spans WHERE extra IS NOT NULL")
    assert (len(told), made.height, set(made["name"])) == (3402, 200, {"response.streaming"})
    other = Store()
    read(other, data / "otlp_traces.jsonl.gz")
    assert told <= set(
        other.sql("SELECT trace_id, span_id, parent_span_id, name FROM spans").rows()
    )
    frontend = legs(store, observer="frontend", status="completed").filter(FROM_SPANS)
    assert frontend.height == 200
    assert frontend["ttft_ms"].median() == pytest.approx(95.86, abs=1)
