"""vLLM spans: what they mean as legs, intervals and reported values; hand-made spans in round numbers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pdtrace.collectors import _vllm_ids, vllm
from pdtrace.model import PHASE_DETAILS, Head
from pdtrace.sink import RowSink
from pdtrace.store import Store

FIXTURES = Path(__file__).parent / "fixtures" / "vllm"
MS = 1_000_000
T0 = 1_700_000_000_000 * MS
KINDS = {1: "internal", 2: "server", 3: "client"}
TYPES = {str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean}
EVENTS = pl.List(pl.Struct({"time_ns": pl.Int64, "name": pl.String, "attributes": pl.String}))
BASE = {
    "source": pl.Int32, "trace_id": pl.String, "span_id": pl.String, "parent_span_id": pl.String,
    "start_ns": pl.Int64, "end_ns": pl.Int64, "name": pl.String, "kind": pl.String, "status_code": pl.String,
    "status_message": pl.String, "scope_name": pl.String, "resource": pl.String, "service_name": pl.String,
    "worker": pl.String, "resolution_ns": pl.Int64, "events": EVENTS, "mine": pl.Boolean,
    "resource.vllm.process_kind": pl.String,
    **{key: TYPES[kind] for key, kind in vllm.CLAIMS.attributes.items()},
}  # fmt: skip


def interpreted(
    spans: Iterable[Mapping[str, Any]], facts: Iterable[tuple[str, str, str]] = ()
) -> Store:
    """The tables after interpret() saw these spans."""
    defaults = {
        "source": 0,
        "trace_id": "t",
        "kind": "server",
        "resolution_ns": 1,
        "events": [],
        "mine": True,
    }
    frame = pl.DataFrame([{**defaults, **span} for span in spans], schema=BASE)
    said = pl.DataFrame(
        list(facts),
        schema={"worker": pl.String, "key": pl.String, "value": pl.String},
        orient="row",
    )
    store = Store()
    sink = RowSink(store)
    vllm.interpret(frame, said, sink)
    sink.close()
    return store


def otlp(path: Path) -> list[dict[str, Any]]:
    """The spans of an OTLP/JSON-lines dump as interpret() is given them."""
    raw = path.read_bytes()
    found = []
    for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines():
        for group in json.loads(line)["resourceSpans"]:
            resource = _attributes(group["resource"])
            for scope in group["scopeSpans"]:
                found += [_span(span, resource, scope["scope"]["name"]) for span in scope["spans"]]
    return found


def _attributes(holder: Mapping[str, Any]) -> dict[str, Any]:
    pairs = ((a["key"], *a["value"].items()) for a in holder.get("attributes", []))
    return {key: int(value) if kind == "intValue" else value for key, (kind, value) in pairs}


def _span(span: Mapping[str, Any], resource: Mapping[str, Any], scope: str) -> dict[str, Any]:
    wanted = {k: v for k, v in _attributes(span).items() if k in vllm.CLAIMS.attributes}
    return {
        "trace_id": span["traceId"], "span_id": span["spanId"], "parent_span_id": span.get("parentSpanId"),
        "start_ns": int(span["startTimeUnixNano"]), "end_ns": int(span["endTimeUnixNano"]),
        "name": span["name"], "kind": KINDS[span["kind"]], "scope_name": scope,
        "service_name": resource["service.name"], "worker": "instance:" + resource["service.instance.id"],
        "resource.vllm.process_kind": resource.get("vllm.process_kind"),
        "events": [{"time_ns": int(e["timeUnixNano"]), "name": e["name"]} for e in span.get("events", [])],
        **wanted,
    }  # fmt: skip


def latencies(**seconds: float) -> dict[str, float]:
    return {f"gen_ai.latency.{name}": value for name, value in seconds.items()}


def v1(span_id: str = "s", **changes: Any) -> dict[str, Any]:
    """A V1 request: 30 ms before the queue, 20 queue, 50 prefill, 200 decode, seen for 310 ms."""
    return {
        "span_id": span_id, "name": "llm_request", "scope_name": "vllm.tracing.otel", "worker": "instance:w",
        "start_ns": T0, "end_ns": T0 + 312 * MS, "gen_ai.request.id": "cmpl-a-0",
        "gen_ai.usage.prompt_tokens": 1000, "gen_ai.usage.completion_tokens": 11, "gen_ai.request.max_tokens": 16,
        **latencies(
            e2e=0.31, time_to_first_token=0.1, time_in_queue=0.02, time_in_model_prefill=0.05,
            time_in_model_decode=0.2, time_in_model_inference=0.25,
        ),
        **changes,
    }  # fmt: skip


def v0(**changes: Any) -> dict[str, Any]:
    """A V0 request: scheduled after 40 ms, first token at 100, finished at 300."""
    return {
        "span_id": "s", "name": "llm_request", "scope_name": "vllm.llm_engine", "worker": "instance:w",
        "start_ns": T0, "end_ns": T0 + 301 * MS, "gen_ai.request.id": "chatcmpl-a",
        "gen_ai.response.model": "m", "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": 1000, "gen_ai.usage.completion_tokens": 11,
        **latencies(e2e=0.3, time_to_first_token=0.1, time_in_queue=0.04, time_in_scheduler=0.001),
        **changes,
    }  # fmt: skip


def placed(store: Store) -> dict[str, tuple[float, float]]:
    """detail -> (start, end) in ms after T0."""
    rows = store.sql(
        "SELECT detail, start_ns, end_ns FROM intervals WHERE start_ns IS NOT NULL"
    ).iter_rows()
    return {detail: ((start - T0) / MS, (end - T0) / MS) for detail, start, end in rows}


def meanings(store: Store) -> dict[str, str | None]:
    return dict(store.sql("SELECT detail, decode_detail FROM intervals").iter_rows())


def only(store: Store, table: str) -> dict[str, Any]:
    rows = store.sql(f"FROM {table}")
    assert rows.height == 1
    return rows.row(0, named=True)


def test_no_file_is_its_own() -> None:
    assert vllm.sniff(Head("x", "x", b'{"resourceSpans": []}')) is None


def test_v1_durations_are_laid_out_around_the_first_token() -> None:
    store = interpreted([v1()])
    assert placed(store) == {
        "before_queue": (0, 30), "prefill_queue": (30, 50), "prefill_wall": (50, 100), "decode_wall": (100, 300),
    }  # fmt: skip
    assert store.sql("SELECT DISTINCT basis, clock FROM intervals").rows() == [("placed", "wall")]


def test_a_leg_is_the_engines_view_of_the_request() -> None:
    leg = only(interpreted([v1()]), "legs")
    assert leg["leg"] == "t/s" and leg["observer"] == "engine" and leg["worker"] == "instance:w"
    assert leg["role"] is None and leg["status"] == "completed" and leg["container"] is False
    assert (leg["request_id"], leg["external_id"]) == ("cmpl-a-0", "a")
    assert leg["end_ns"] == T0 + 310 * MS  # the attribute, not the moment of span.end()
    assert leg["first_token_ns"] == T0 + 100 * MS and leg["ttft_ms"] == 100 and leg["e2e_ms"] == 310
    assert leg["tpot_ms"] == pytest.approx(21)
    assert (leg["prompt_tokens"], leg["output_tokens"], leg["max_tokens"]) == (1000, 11, 16)
    assert leg["model"] is None and leg["first_token_delivered"] is None


def test_one_token_has_no_time_per_token() -> None:
    assert (
        only(interpreted([v1(**{"gen_ai.usage.completion_tokens": 1})]), "legs")["tpot_ms"] is None
    )


def test_v0_counts_its_queue_from_arrival() -> None:
    store = interpreted([v0()])
    assert placed(store) == {
        "prefill_queue": (0, 40),
        "prefill_wall": (40, 100),
        "decode_wall": (100, 300),
    }
    assert only(store, "legs")["model"] == "m"
    assert only(store, "facts")["value"] == "m"


def test_v0_with_several_sequences_has_no_time_per_token_of_one() -> None:
    assert only(interpreted([v0(**{"gen_ai.usage.num_sequences": 2})]), "legs")["tpot_ms"] is None


def test_the_same_name_has_its_own_definition_in_each_generation() -> None:
    spans = [v1(), v0(trace_id="u")]
    rows = interpreted(spans).sql(
        "SELECT value, unit, definition FROM reported WHERE quantity = 'time_in_queue'"
    )
    told = {value: definition for value, _, definition in rows.iter_rows()}
    assert "V1" in told[0.02] and "scheduled - queued" in told[0.02]
    assert "V0" in told[0.04] and "arrival" in told[0.04]
    assert rows["unit"].unique().to_list() == ["s"]


def test_without_either_generations_marks_the_queue_has_no_place() -> None:
    span = {k: v for k, v in v1().items() if "time_in_model" not in k}
    store = interpreted([span])
    assert placed(store) == {"decode_wall": (100, 310)}
    queue = store.sql("FROM intervals WHERE detail = 'prefill_queue'").row(0, named=True)
    assert (
        queue["duration_ns"] == 20 * MS
        and queue["start_ns"] is None
        and "unknown" in queue["semantics"]
    )


def test_missing_parts_follow_from_the_others() -> None:
    span = v1()
    del span["gen_ai.latency.time_in_model_prefill"]
    assert placed(interpreted([span]))["prefill_wall"] == (50, 100)
    del span["gen_ai.latency.time_to_first_token"]
    store = interpreted([{**span, **latencies(e2e=0.3)}])
    assert placed(store)["decode_wall"] == (100, 300)  # anchored at the end
    assert only(store, "legs")["first_token_ns"] is None


def test_a_negative_remainder_is_kept_and_counted() -> None:
    store = interpreted([v1(**latencies(time_in_queue=0.06))])
    assert placed(store)["prefill_queue"] == (-10, 50)
    assert "before_queue" not in placed(store)
    row = store.sql("FROM reported WHERE quantity = 'negative_remainder_ms'").row(0, named=True)
    assert row["value"] == pytest.approx(-10) and row["unit"] == "ms"


def test_stamps_that_were_never_set_are_flagged_and_not_used() -> None:
    up = 86_400.0  # the host's uptime
    garbage = latencies(time_in_queue=-up, time_in_model_prefill=0.0, time_in_model_decode=up)
    store = interpreted([v1(**garbage, **{"gen_ai.usage.completion_tokens": 0})])
    bad = store.sql(
        "SELECT value FROM reported WHERE quantity = 'implausible_latency' ORDER BY value"
    )
    assert bad["value"].to_list() == [-up, up]
    assert store.sql("FROM reported WHERE quantity = 'time_in_queue'")["value"].to_list() == [-up]
    assert "prefill_queue" not in placed(store) and placed(store)["decode_wall"][0] == 100
    assert only(store, "legs")["status"] == "unknown"


def test_a_stepped_clock_leaves_times_unknown() -> None:
    store = interpreted([v1(**latencies(e2e=-5.0, time_to_first_token=-5.2))])
    leg = only(store, "legs")
    assert leg["ttft_ms"] is None and leg["e2e_ms"] == 312  # the span's own length is left
    assert store.sql("FROM reported WHERE quantity = 'implausible_latency'").height == 2


@pytest.mark.parametrize(
    ("connector", "queue", "prefill"),
    [
        ("NixlConnector", "kv_wait_upper_bound", "decode_exec"),
        ("NixlPullConnector", "kv_wait_upper_bound", "decode_exec"),
        ("MooncakeConnector", "kv_wait_upper_bound", "decode_exec"),
        ("MoRIIOConnector", "kv_wait_upper_bound", "decode_exec"),
        ("ExampleConnector", "decode_queue", "kv_wait_upper_bound"),
        ("SharedStorageConnector", "decode_queue", "kv_wait_upper_bound"),
        ("P2pNcclConnector", "decode_queue", "kv_wait_upper_bound"),
        ("SomethingElse", "kv_wait_upper_bound", "kv_wait_upper_bound"),
        (None, "kv_wait_upper_bound", "kv_wait_upper_bound"),
    ],
)
def test_the_connector_says_where_a_decode_leg_waits_for_kv(
    connector: str | None, queue: str, prefill: str
) -> None:
    facts = [("instance:w", "kv_connector", connector)] if connector else []
    store = interpreted([v1()], facts)
    found = meanings(store)
    assert found["prefill_queue"] == queue and found["prefill_wall"] == prefill
    assert found["before_queue"] is None and found["decode_wall"] is None
    unknown = "connector unknown" in "".join(
        store.sql("SELECT semantics FROM intervals")["semantics"]
    )
    assert unknown == (connector in (None, "SomethingElse"))


def test_a_start_up_log_without_connector_means_that_there_is_none() -> None:
    store = interpreted([v1()], [("instance:w", "max_num_batched_tokens", "2048")])
    assert "connector" not in "".join(store.sql("SELECT semantics FROM intervals")["semantics"])


def test_connectors_that_disagree_leave_it_unknown() -> None:
    facts = [("instance:w", "kv_connector", name) for name in ("NixlConnector", "ExampleConnector")]
    assert meanings(interpreted([v1()], facts))["prefill_wall"] == "kv_wait_upper_bound"


@pytest.mark.parametrize(
    ("request_id", "external", "stream"),
    [
        ("cmpl-mixed-5-0", "mixed-5", None),
        ("cmpl-edge-batch-1", "edge-batch-1", None),
        ("chatcmpl-edge-chat", "edge-chat", None),
        ("chatcmpl-run-0", "run-0", None),
        ("1_chatcmpl-abc", "abc", 1),
        ("0_cmpl-abc-0", "abc", 0),
        ("cmpl-cmpl-0123-0", "cmpl-0123", None),
        ("bench-7", "bench-7", None),
        ("3_7", "3_7", None),
        (
            "cmpl-___prefill_addr_10.0.0.1:8001___decode_addr_10.0.0.2:8002_" + "0a" * 16 + "-0",
            "___prefill_addr_10.0.0.1:8001___decode_addr_10.0.0.2:8002_" + "0a" * 16,
            None,
        ),
    ],
)
def test_ids_lose_one_servers_decoration(
    request_id: str, external: str, stream: int | None
) -> None:
    frame = pl.DataFrame({"id": [request_id]})
    row = frame.select(
        e=_vllm_ids.external_id(pl.col("id")), s=_vllm_ids.stream_index(pl.col("id"))
    )
    assert row.row(0) == (external, stream)


@pytest.mark.parametrize(
    "ids",
    [
        ["cmpl-a-0", "cmpl-b-1", None],
        ["chatcmpl-a-0", "chatcmpl-x_cmpl-b-0"],
        ["chatcmpl-a", "0_chatcmpl-b", "cmpl-c-0", "none-0"],
        [None, "cmpl-a-0"],
        [],
    ],
)
def test_ids_of_one_prefix_are_read_as_those_of_several(ids: list[str | None]) -> None:
    column = pl.Series("id", ids, pl.String)
    one_by_one = column.to_frame().select(_vllm_ids.external_id(pl.col("id"))).to_series()
    assert _vllm_ids.external_ids(column).to_list() == one_by_one.to_list()


def test_addresses_in_ids_become_facts() -> None:
    request_id = "cmpl-___prefill_addr_h1:8001___decode_addr_h2:8002_" + "0a" * 16 + "-0"
    facts = interpreted([v1(**{"gen_ai.request.id": request_id})]).sql(
        "SELECT key, value FROM facts"
    )
    assert set(facts.iter_rows()) == {
        ("prefill_address_in_ids", "h1:8001"), ("decode_address_in_ids", "h2:8002"),
    }  # fmt: skip


def test_two_answers_of_one_request_are_two_streams() -> None:
    chat = {"gen_ai.request.id": "chatcmpl-x"}
    store = interpreted(
        [v1("b", **chat), v1("a", **chat), v1("c", **{"gen_ai.request.id": "chatcmpl-y"})]
    )
    rows = store.sql("SELECT span_id, external_id, stream FROM legs ORDER BY span_id").rows()
    assert rows == [("a", "x", 0), ("b", "x", 1), ("c", "y", None)]


def test_start_up_spans_are_claimed_and_no_requests() -> None:
    store = interpreted(otlp(FIXTURES / "agg.otlp.jsonl"))
    assert store.count("legs") == 18
    assert store.sql("SELECT DISTINCT worker FROM legs").height == 1


def test_engine_processes_belong_to_their_api_server() -> None:
    aliases = interpreted(otlp(FIXTURES / "agg.otlp.jsonl")).sql(
        "SELECT worker, kind, value FROM worker_aliases"
    )
    assert aliases.height == 2 and aliases["kind"].unique().to_list() == ["instance"]
    api = (
        interpreted(otlp(FIXTURES / "agg.otlp.jsonl"))
        .sql("SELECT DISTINCT worker FROM legs")
        .item()
    )
    assert api in aliases["worker"].to_list()


def test_spans_of_others_in_the_same_trace_are_context() -> None:
    store = interpreted([v1(), v1("x", mine=False)])
    assert store.count("legs") == 1


def proxied() -> list[dict[str, Any]]:
    """A proxy that calls P at 1 ms, has its answer at 101, calls D at 103 and sees a chunk at 150."""
    proxy = {"scope_name": "pd_proxy", "worker": "instance:proxy"}
    first = [{"time_ns": T0 + 150 * MS, "name": "first_chunk"}]
    return [
        {**proxy, "span_id": "r", "name": "proxy.request", "start_ns": T0, "end_ns": T0 + 400 * MS, "request.id": "a"},
        {
            **proxy, "span_id": "p", "parent_span_id": "r", "name": "proxy.prefill", "kind": "client",
            "start_ns": T0 + 1 * MS, "end_ns": T0 + 101 * MS,
        },
        {
            **proxy, "span_id": "d", "parent_span_id": "r", "name": "proxy.decode", "kind": "client",
            "start_ns": T0 + 103 * MS, "end_ns": T0 + 399 * MS, "events": first,
        },
        v1("P", parent_span_id="p", worker="instance:P", start_ns=T0 + 3 * MS),
        v1("D", parent_span_id="d", worker="instance:D", start_ns=T0 + 105 * MS),
    ]  # fmt: skip


def test_a_proxy_sees_the_users_first_token() -> None:
    store = interpreted(proxied())
    leg = store.sql("FROM legs WHERE observer = 'router' AND NOT container").row(0, named=True)
    assert (
        leg["ttft_ms"] == 150
        and leg["first_token_delivered"] is True
        and leg["status"] == "completed"
    )
    assert leg["external_id"] == "a" and leg["e2e_ms"] == 400 and leg["role"] == "router"


def test_calls_are_containers_and_prove_the_role_of_the_leg_below() -> None:
    store = interpreted(proxied())
    rows = store.sql(
        "SELECT span_id, role, role_basis, container, first_token_delivered FROM legs ORDER BY span_id"
    )
    assert rows.rows() == [
        ("D", "decode", "span", False, None),
        ("P", "prefill", "span", False, False),
        ("d", "decode", "span", True, None),
        ("p", "prefill", "span", True, None),
        ("r", "router", "span", False, True),
    ]


def test_a_proxys_own_time_is_before_and_between_its_calls() -> None:
    store = interpreted(proxied())
    rows = store.sql(
        "SELECT detail, start_ns, end_ns, basis FROM intervals WHERE leg = 't/r' ORDER BY start_ns"
    )
    assert rows.rows() == [
        ("router_decide", T0, T0 + MS, "measured"),
        ("dispatch", T0 + 101 * MS, T0 + 103 * MS, "measured"),
    ]


def test_each_call_is_a_decision_for_the_worker_below() -> None:
    rows = interpreted(proxied()).sql(
        "SELECT phase, worker, duration_ms, router FROM decisions ORDER BY time_ns"
    )
    assert rows.rows() == [
        ("prefill", "instance:P", 1.0, "instance:proxy"),
        ("decode", "instance:D", None, "instance:proxy"),
    ]


def routed(**changes: Any) -> list[dict[str, Any]]:
    """vllm-router: P from 5 to 315 ms, D called at 320; both CLIENT spans end seconds late."""
    rust = {"scope_name": "vllm-router", "service_name": "vllm-router", "worker": "instance:router"}
    late = {
        "kind": "client",
        "parent_span_id": "r",
        "name": "POST /v1/completions",
        "end_ns": T0 + 9_000 * MS,
    }
    return [
        {
            **rust, "span_id": "r", "name": "POST /v1/completions", "start_ns": T0, "end_ns": T0 + 700 * MS,
            "http.route": "/v1/completions", "http.response.status_code": 200, "request_id": "client-1",
            "latency_ms": 318.0, **changes,
        },
        {
            **rust, **late, "span_id": "p", "start_ns": T0 + 2 * MS, "vllm.request_phase": "prefill",
            "url.full": "http://10.0.0.1:8001/v1/completions", "http.response.status_code": 200,
        },
        {
            **rust, **late, "span_id": "d", "start_ns": T0 + 320 * MS, "vllm.request_phase": "decode",
            "server.address": "10.0.0.2", "server.port": 8002, "http.response.status_code": 200,
        },
        v1("P", parent_span_id="p", worker="instance:P", start_ns=T0 + 5 * MS),
    ]  # fmt: skip


def test_vllm_routers_late_call_ends_are_not_used() -> None:
    store = interpreted(routed())
    rows = store.sql(
        "SELECT detail, start_ns, end_ns FROM intervals WHERE leg = 't/r' ORDER BY start_ns"
    )
    assert rows.rows() == [
        ("router_decide", T0, T0 + 2 * MS),
        ("bridge_wait", T0 + 315 * MS, T0 + 320 * MS),
    ]


def test_vllm_routers_latency_is_no_first_token() -> None:
    store = interpreted(routed())
    leg = store.sql("FROM legs WHERE leg = 't/r'").row(0, named=True)
    assert leg["ttft_ms"] is None and leg["status"] == "completed"
    assert (leg["request_id"], leg["external_id"]) == ("client-1", "client-1")
    told = store.sql("FROM reported WHERE quantity = 'latency_ms'").row(0, named=True)
    assert told["value"] == 318 and "headers" in told["definition"]


@pytest.mark.parametrize(("engine_off_ms", "end_ms"), [(0, None), (-900, None), (900, None)])
def test_a_routers_span_that_is_left_with_the_head_ends_no_request(
    engine_off_ms: int, end_ms: int | None
) -> None:
    """700 ms in the router, 900 on the decode worker: the durations tell it, whatever the clocks say."""
    below = v1(
        "D", parent_span_id="d", worker="instance:D", start_ns=T0 + (322 + engine_off_ms) * MS
    )
    below |= {"gen_ai.latency.e2e": 0.9, "end_ns": below["start_ns"] + 900 * MS}
    leg = interpreted([*routed(), below]).sql("FROM legs WHERE leg = 't/r'").row(0, named=True)
    assert (leg["start_ns"], leg["end_ns"], leg["e2e_ms"]) == (T0, end_ms, None)
    kept = interpreted(routed()).sql("FROM legs WHERE leg = 't/r'").row(0, named=True)
    assert kept["end_ns"] == T0 + 700 * MS  # nothing below it lasted longer


def test_a_worker_is_known_by_its_span_and_else_by_its_address() -> None:
    store = interpreted(routed())
    chosen = dict(store.sql("SELECT phase, worker FROM decisions").iter_rows())
    assert chosen == {"prefill": "instance:P", "decode": "address:10.0.0.2:8002"}
    alias = only(store, "worker_aliases")
    assert (alias["worker"], alias["kind"], alias["value"]) == (
        "instance:P",
        "address",
        "10.0.0.1:8001",
    )


@pytest.mark.parametrize(
    ("changes", "status", "error"),
    [
        ({"http.response.status_code": 503}, "failed", "HTTP 503"),
        ({"http.response.status_code": 499}, "aborted", "HTTP 499"),
        ({"http.response.status_code": None}, "unknown", None),
        ({"http.response.status_code": None, "status_code": "error"}, "failed", "error"),
    ],
)
def test_a_routers_answer_is_the_outcome(
    changes: dict[str, Any], status: str, error: str | None
) -> None:
    leg = interpreted(routed(**changes)).sql("FROM legs WHERE leg = 't/r'").row(0, named=True)
    assert (leg["status"], leg["error"]) == (status, error)


def test_a_routers_own_polls_are_no_requests() -> None:
    rust = {
        "scope_name": "vllm-router",
        "worker": "instance:router",
        "start_ns": T0,
        "end_ns": T0 + MS,
    }
    store = interpreted(
        [
            {**rust, "span_id": "a", "name": "GET /metrics", "kind": "client"},
            {**rust, "span_id": "b", "name": "POST /flush_cache", "http.route": "/flush_cache"},
        ]
    )
    assert store.count("legs") == 0


def test_calls_without_the_routers_span_still_prove_roles() -> None:
    store = interpreted(routed()[1:])
    assert store.sql("SELECT role FROM legs WHERE span_id = 'P'").item() == "prefill"
    assert store.sql("SELECT count(*) FROM legs WHERE container").item() == 2


def test_production_stacks_router_names_its_choice() -> None:
    stack = {"scope_name": None, "worker": "service:vllm-router", "vllm.request_id": "abc"}
    spans = [
        {
            **stack, "span_id": "r", "name": "router /v1/chat/completions", "start_ns": T0, "end_ns": T0 + 400 * MS,
            "http.target": "/v1/chat/completions", "http.status_code": 200, "vllm.model": "m", "vllm.is_streaming": True,
        },
        {
            **stack, "span_id": "c", "parent_span_id": "r", "name": "process_request", "kind": "client",
            "start_ns": T0 + 4 * MS, "end_ns": T0 + 399 * MS, "vllm.backend_url": "http://h:8000",
            "vllm.routing_logic": "session",
        },
    ]  # fmt: skip
    store = interpreted(spans)
    leg = store.sql("FROM legs WHERE NOT container").row(0, named=True)
    assert (leg["external_id"], leg["model"], leg["streaming"], leg["status"]) == (
        "abc",
        "m",
        True,
        "completed",
    )
    choice = only(store, "decisions")
    assert (choice["policy"], choice["worker"], choice["duration_ms"]) == (
        "session",
        "address:h:8000",
        4,
    )


def child(name: str, start: int, end: int) -> dict[str, Any]:
    return {
        "span_id": f"{name}{start}", "parent_span_id": "s", "name": name, "kind": "internal", "worker": "instance:w",
        "start_ns": T0 + start * MS, "end_ns": T0 + end * MS, "gen_ai.request.id": "cmpl-a-0",
    }  # fmt: skip


def test_child_spans_replace_what_would_be_placed() -> None:
    spans = [
        v1(),
        child("vllm_queue", 25, 45),
        child("vllm_prefill", 45, 98),
        child("vllm_decode", 98, 305),
    ]
    store = interpreted(spans)
    assert placed(store) == {
        "before_queue": (0, 25), "prefill_queue": (25, 45), "prefill_wall": (45, 98), "decode_wall": (98, 305),
    }  # fmt: skip
    assert store.sql("SELECT DISTINCT basis FROM intervals").item() == "measured"
    assert store.count("legs") == 1


def test_a_transfer_of_its_own_leaves_none_in_the_queue() -> None:
    spans = [
        v1(),
        child("vllm_queue", 25, 45),
        child("vllm_async_kv_transfer", 30, 44),
        child("vllm_prefill", 45, 98),
    ]
    found = meanings(interpreted(spans))
    assert found["kv_load"] == "kv_transfer" and found["prefill_queue"] == "decode_queue"
    assert found["prefill_wall"] == "decode_exec"
    assert "decode_wall" in found  # still placed: no span tells it


def journey(*events: tuple[str, int]) -> dict[str, Any]:
    stamped = [{"time_ns": T0 + at * MS, "name": f"journey.{name}"} for name, at in events]
    core = child("llm_core", 24, 306)
    return {**core, "events": stamped}


def test_journey_events_become_measured_intervals_and_preemptions() -> None:
    steps = ("QUEUED", 25), ("SCHEDULED", 45), ("FIRST_TOKEN", 98), ("PREEMPTED", 150), ("SCHEDULED", 200), ("FINISHED", 305)  # fmt: skip
    store = interpreted([v1(), journey(*steps)])
    rows = store.sql(
        "SELECT detail, (start_ns - $t) / 1000000, (end_ns - $t) / 1000000 FROM intervals ORDER BY 2",
        t=T0,
    )
    assert rows.rows() == [
        ("before_queue", 0, 25), ("prefill_queue", 25, 45), ("prefill_wall", 45, 98), ("decode_wall", 98, 150),
        ("preempted", 150, 200), ("decode_wall", 200, 305),
    ]  # fmt: skip
    event = only(store, "events")
    assert (
        event["kind"] == "preemption"
        and event["time_ns"] == T0 + 150 * MS
        and event["worker"] == "instance:w"
    )
    assert store.count("legs") == 1


def test_journey_events_stamp_a_first_token_that_no_attribute_tells() -> None:
    bare = {k: v for k, v in v1().items() if not k.startswith("gen_ai.latency")}
    leg = only(
        interpreted([bare, journey(("SCHEDULED", 45), ("FIRST_TOKEN", 98), ("FINISHED", 305))]),
        "legs",
    )
    assert leg["ttft_ms"] == 98 and leg["e2e_ms"] == 312


def test_every_detail_is_one_of_the_phases() -> None:
    stores = [interpreted(otlp(path)) for path in sorted(FIXTURES.glob("*.jsonl"))]
    stores += [interpreted(proxied()), interpreted(routed()), interpreted([v0()])]
    for store in stores:
        rows = store.sql("SELECT detail, decode_detail FROM intervals")
        assert set(rows["detail"]) <= set(PHASE_DETAILS)
        assert set(rows["decode_detail"].drop_nulls()) <= set(PHASE_DETAILS)


def test_nothing_of_mine_gives_nothing() -> None:
    store = interpreted([v1(mine=False)])
    assert store.count("legs") == store.count("intervals") == store.count("reported") == 0


def quantiles(store: Store, where: str, of: str = "ttft_ms", table: str = "legs") -> list[float]:
    row = store.sql(f"SELECT quantile_cont({of}, [0.5, 0.9, 0.99]) FROM {table} WHERE {where}")
    return list(row.item())


@pytest.mark.shared
def test_the_aggregated_capture(shared: Path) -> None:
    store = interpreted(otlp(shared / "data" / "vllm" / "agg" / "vllm.traces.otlp.jsonl.gz"))
    assert store.count("legs") == 362
    p50, _, p99 = quantiles(store, "true")
    assert p50 == pytest.approx(92.5, abs=0.1) and p99 == pytest.approx(1148, abs=1)
    p50, _, p99 = quantiles(
        store, "detail = 'before_queue'", "(end_ns - start_ns) / 1e6", "intervals"
    )
    assert p50 == pytest.approx(11.2, abs=0.1) and p99 == pytest.approx(237, abs=1)


@pytest.mark.shared
def test_the_disaggregated_capture(shared: Path) -> None:
    store = interpreted(otlp(shared / "data" / "vllm" / "pd_nixl" / "pd.traces.otlp.jsonl.gz"))
    counted = store.sql("SELECT observer, container, count(*) AS n FROM legs GROUP BY ALL")
    assert set(counted.iter_rows()) == {
        ("router", False, 306),
        ("router", True, 612),
        ("engine", False, 614),
    }
    assert (
        store.sql("SELECT count(DISTINCT worker) FROM legs WHERE observer = 'engine'").item() == 2
    )
    p50, p90, _ = quantiles(store, "observer = 'router' AND NOT container")
    assert p50 == pytest.approx(651.6, abs=1) and p90 == pytest.approx(1793.8, rel=0.02)
    roles = store.sql("SELECT role, count(*) AS n FROM legs WHERE observer = 'engine' GROUP BY ALL")
    assert set(roles.iter_rows()) == {("prefill", 306), ("decode", 306), (None, 2)}


@pytest.mark.shared
def test_the_edge_cases(shared: Path) -> None:
    store = interpreted(otlp(shared / "data" / "vllm" / "edge" / "edge.traces.otlp.jsonl"))
    rows = store.sql("SELECT external_id, stream FROM legs ORDER BY ALL").rows()
    assert rows == [
        ("edge-batch", None),
        ("edge-batch-1", None),
        ("edge-chat", 0),
        ("edge-chat", 1),
    ]
