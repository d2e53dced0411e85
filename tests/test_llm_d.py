"""llm-d: endpoint picker, sidecar and vLLM pods are one deployment; what each took stands in its own phase."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdtrace import diagnose
from pdtrace.api import Trace

MS = 1_000_000
T0 = 1_796_000_000_000 * MS
EPP, SIDECAR = "llm-d-epp", "llm-d-disagg-sidecar"
SCOPES = {
    EPP: "llm-d-router/pkg/epp/requestcontrol",
    SIDECAR: "llm-d-router/pkg/sidecar/proxy",
}


def value(v: Any) -> dict[str, Any]:
    if isinstance(v, list):
        return {"arrayValue": {"values": [value(x) for x in v]}}
    kinds = {str: "stringValue", bool: "boolValue", int: "intValue", float: "doubleValue"}
    return {kinds[type(v)]: str(v) if type(v) is int else v}


def span(
    service: str, name: str, trace: int, number: int, parent: int | None, start: float, end: float,
    attributes: dict[str, Any] | None = None, kind: int = 1,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """A span of a service; times in milliseconds after T0."""
    return service, {
        "traceId": f"{trace:032x}", "spanId": f"{number:016x}", **({"parentSpanId": f"{parent:016x}"} if parent else {}),
        "name": name, "kind": kind, "startTimeUnixNano": str(T0 + round(start * MS)), "endTimeUnixNano": str(T0 + round(end * MS)),
        "attributes": [{"key": k, "value": value(v)} for k, v in (attributes or {}).items()],
    }  # fmt: skip


def write(path: Path, spans: list[tuple[str, dict[str, Any]]], pods: dict[str, str]) -> None:
    found = []
    for service in dict.fromkeys(service for service, _ in spans):
        resource = {"service.name": service, "service.instance.id": f"{service}-1"}
        if service in pods:
            resource["k8s.pod.name"] = pods[service]
        mine = [s for of, s in spans if of == service]
        found.append({
            "resource": {"attributes": [{"key": k, "value": value(v)} for k, v in resource.items()]},
            "scopeSpans": [{"scope": {"name": SCOPES.get(service, "vllm.llm_engine")}, "spans": mine}],
        })  # fmt: skip
    path.write_text(json.dumps({"resourceSpans": found}))


def engine(request: str, queue: float, prefill: float, first: float, last: float, tokens: int) -> dict[str, Any]:  # fmt: skip
    """vLLM V1's attributes; milliseconds."""
    return {
        "gen_ai.request.id": request, "gen_ai.usage.prompt_tokens": 800, "gen_ai.usage.completion_tokens": tokens,
        "gen_ai.request.max_tokens": tokens, "gen_ai.latency.time_in_queue": queue / 1e3,
        "gen_ai.latency.time_to_first_token": first / 1e3, "gen_ai.latency.e2e": last / 1e3,
        "gen_ai.latency.time_in_model_prefill": prefill / 1e3, "gen_ai.latency.time_in_model_decode": (last - first) / 1e3,
        "gen_ai.latency.time_in_model_inference": (last - first + prefill) / 1e3,
    }  # fmt: skip


def picks(profile: str, at: float, trace: int, number: int, parent: int, pod: str) -> list[Any]:
    """A scheduler profile of 0.5 ms with its pick between two endpoints."""
    return [
        span(EPP, "run_scheduler_profile", trace, number, parent, at, at + 0.5, {"llm_d.epp.scheduling.profile.name": profile}),
        span(EPP, "pick_endpoints", trace, number + 1, number, at + 0.3, at + 0.5, {
            "gen_ai.request.id": f"r{trace}", "llm_d.epp.picker.candidate_endpoints": 2,
            "llm_d.epp.picker.top_endpoints": [f"llm-d/{pod}-rank-0", "llm-d/other-rank-0"],
            "llm_d.epp.picker.top_scores": [7.0, 4.0],
        }),
    ]  # fmt: skip


def split(n: int) -> list[Any]:
    """A request: 20 ms body, 30 ms flow control, 1 ms choice, 4 ms to the sidecar, prefill called after 1 ms, decode 2 ms after it."""
    at, t, i = 1000.0 * n, n + 1, 100 * (n + 1)
    proxy = {"llm_d.pd_proxy.request_id": f"u{n}", "llm_d.pd_proxy.connector": "nixlv2"}
    return [
        span(EPP, "gateway.request", t, i, None, at, at + 600, kind=2),
        span(EPP, "gateway.request_orchestration", t, i + 1, i, at + 20, at + 51, {"target_model": "org/m", "request_prio": "0"}, kind=2),
        *picks("decode", at + 50, t, i + 2, i + 1, "decode-abc12"),
        *picks("prefill", at + 50.5, t, i + 4, i + 1, "prefill-abc12"),
        span(SIDECAR, "forward_request", t, i + 10, i, at + 55, at + 598, {"llm_d.pd_proxy.disaggregation_used": True}, kind=2),
        span(SIDECAR, "prefill", t, i + 11, i + 10, at + 56, at + 126, {**proxy, "llm_d.pd_proxy.prefill_target": "10.0.0.1:8000"}),
        # below the prefill span, which has ended
        span(SIDECAR, "decode", t, i + 12, i + 11, at + 128, at + 597, {
            **proxy, "llm_d.pd_proxy.decode.streaming": True, "llm_d.pd_proxy.true_ttft_ms": 73.0,
            "llm_d.pd_proxy.coordinator_overhead_ms": 2.0,
        }),
        span("vllm-prefill", "llm_request", t, i + 20, i + 11, at + 58, at + 125, engine(f"cmpl-u{n}-0", 5, 55, 60, 66, 1), kind=2),
        span("vllm-decode", "llm_request", t, i + 21, i + 12, at + 130, at + 596, engine(f"cmpl-u{n}-0", 40, 8, 50, 450, 9), kind=2),
    ]  # fmt: skip


PODS = {"vllm-prefill": "prefill-abc12", "vllm-decode": "decode-abc12"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Thirty split requests."""
    path = tmp_path_factory.mktemp("llm_d")
    write(path / "t.json", [s for n in range(30) for s in split(n)], PODS)
    return Trace.read([path])


def test_picker_sidecar_and_pods_are_one_request_cut_at_each_hand_over(trace: Trace) -> None:
    (mine,) = diagnose.diagnose(trace.store).deployments
    assert (mine.mode, mine.requests["count"]) == ("disaggregated", 30)
    assert sorted(w["role"] for w in mine.workers) == ["decode", "gateway", "prefill", "router"]
    found = dict(
        trace.store.sql(
            "SELECT detail, sum(end_ns - start_ns) / 30e6 FROM phases GROUP BY detail"
        ).iter_rows()
    )
    # ways: 4 to the sidecar, 1 in it, 2 to prefill, 2 back in it, 2 to decode
    assert {k: found[k] for k in ("frontend", "router_queue", "router_decide", "dispatch")} == pytest.approx(
        {"frontend": 20, "router_queue": 30, "router_decide": 1, "dispatch": 11}, abs=0.01
    )  # fmt: skip
    assert found["prefill_wall"] == pytest.approx(55, abs=0.1)
    assert "gateway" in {o for (o,) in trace.store.rows("SELECT DISTINCT window_observer FROM requests")}  # fmt: skip
    assert (
        trace.store.sql("SELECT count(ttft_ms) FROM requests").item() == 0
    )  # nobody saw a first token


def test_choices_name_pods_their_candidates_and_scores(trace: Trace) -> None:
    rows = trace.store.sql(
        "SELECT DISTINCT phase, candidates, round(duration_ms, 3), w.role FROM decisions d LEFT JOIN workers w ON w.worker = d.worker ORDER BY phase"
    ).rows()
    assert rows == [("decode", 2, 0.5, "decode"), ("prefill", 2, 0.5, "prefill")]
    told = dict(trace.store.sql("SELECT DISTINCT quantity, value FROM reported WHERE quantity IN ('best_score', 'true_ttft_ms')").iter_rows())  # fmt: skip
    assert told == {"best_score": 7.0, "true_ttft_ms": 73.0}


def test_a_choice_of_which_only_scores_are_known_names_nobody(tmp_path: Path) -> None:
    """A weighted random picker need not take the best: only whom the request reached, or a lone candidate, is sure."""
    spans = [(service, one) for service, one in split(0) if service == EPP]
    write(tmp_path / "t.json", spans, PODS)
    trace = Trace.read([tmp_path])
    assert trace.store.sql("SELECT count(*), count(worker) FROM decisions").row(0) == (2, 0)


def test_without_a_sidecar_the_way_to_the_pod_is_the_routers(tmp_path: Path) -> None:
    """A real trace of 0.10 looked so: 0.3 ms of choice, 46 ms until the pod had the request."""
    spans = []
    for n in range(30):
        at, t, i = 5000.0 * n, n + 1, 100 * (n + 1)
        spans += [
            span(EPP, "gateway.request", t, i, None, at, at + 2893.5, kind=2),
            span(EPP, "gateway.request_orchestration", t, i + 1, i, at + 0.1, at + 0.7, kind=2),
            *picks("default", at + 0.2, t, i + 2, i + 1, "decode-abc12"),
            span("vllm-decode", "llm_request", t, i + 20, i, at + 46.7, at + 2888.7, engine(f"cmpl-r{t}-0", 1, 100, 102, 2842, 200), kind=2),
        ]  # fmt: skip
    write(tmp_path / "t.json", spans, PODS)
    trace = Trace.read([tmp_path])
    assert trace.store.sql("SELECT mode FROM deployments").rows() == [("aggregated",)]
    found = dict(trace.store.sql("SELECT detail, sum(end_ns - start_ns) / 30e6 FROM phases GROUP BY detail").iter_rows())  # fmt: skip
    assert found["dispatch"] == pytest.approx(46.0, abs=0.01)


def test_old_names_mean_the_same(tmp_path: Path) -> None:
    """0.8: no spans of the scheduler, prefixes everywhere; the choice holds the wait."""
    old = {"forward_request": "llm_d.pd_proxy.request", "prefill": "llm_d.pd_proxy.prefill", "decode": "llm_d.pd_proxy.decode"}  # fmt: skip
    spans = [
        (service, one | {"name": old.get(one["name"], one["name"])})
        for n in range(5)
        for service, one in split(n)
        if one["name"] not in ("run_scheduler_profile", "pick_endpoints")
    ]
    write(tmp_path / "t.json", spans, PODS)
    trace = Trace.read([tmp_path])
    found = dict(trace.store.sql("SELECT detail, sum(end_ns - start_ns) / 5e6 FROM phases GROUP BY detail").iter_rows())  # fmt: skip
    assert (found["router_decide"], found["dispatch"]) == pytest.approx((31, 11), abs=0.01)
    chosen = trace.store.sql("SELECT DISTINCT phase, worker FROM decisions ORDER BY phase").rows()
    assert chosen == [("decode", "instance:vllm-decode-1"), ("prefill", "instance:vllm-prefill-1")]
