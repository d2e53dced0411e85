"""TensorRT-LLM's spans: which half of a request a server did, and where its stamps lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdtrace.api import Trace

MS = 1_000_000
T0 = 1_796_000_000_000 * MS


def span(
    name: str, trace: int, number: int, parent: int | None, start: float, end: float,
    attributes: dict[str, Any] | None = None, events: tuple[tuple[str, float, dict[str, Any]], ...] = (),
) -> dict[str, Any]:  # fmt: skip
    """One span; times in milliseconds after T0."""
    return {
        "traceId": f"{trace:032x}", "spanId": f"{number:016x}", **({"parentSpanId": f"{parent:016x}"} if parent else {}),
        "name": name, "kind": 2, "startTimeUnixNano": str(T0 + round(start * MS)), "endTimeUnixNano": str(T0 + round(end * MS)),
        "attributes": pairs(attributes or {}), "status": {"code": 1},
        "events": [{"name": n, "timeUnixNano": str(T0 + round(at * MS)), "attributes": pairs(a)} for n, at, a in events],
    }  # fmt: skip


def pairs(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue"}
    return [{"key": k, "value": {kinds[type(v)]: str(v) if isinstance(v, int) else v}} for k, v in attributes.items()]  # fmt: skip


def write(path: Path, spans: list[dict[str, Any]], service: str = "unknown_service") -> None:
    resource = {"attributes": pairs({"service.name": service})}
    scopes = [{"scope": {"name": "trt.llm"}, "spans": spans}]
    path.write_text(json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}))


def engine(
    number: int, queue: float, first: float, last: float, tokens: int, kv: float
) -> dict[str, Any]:
    """Attributes of a request's span; milliseconds from its start."""
    return {
        "gen_ai.request.id": number, "gen_ai.request.max_tokens": 5, "gen_ai.usage.prompt_tokens": 900,
        "gen_ai.usage.completion_tokens": tokens, "gen_ai.response.finish_reasons": '["length"]',
        "gen_ai.latency.time_in_queue": queue / 1e3, "gen_ai.latency.time_to_first_token": first / 1e3,
        "gen_ai.latency.e2e": last / 1e3, "gen_ai.latency.kv_cache_transfer_time": kv / 1e3,
    }  # fmt: skip


def pair(n: int, *, stamps: bool = True, streamed: bool = True) -> list[dict[str, Any]]:
    """A request: chosen after 1 ms, at the context server after 3; 10 wait, 50 prompt; 20 ms pull at the generation server."""
    at, trace, spans = 200.0 * n, n + 1, 10 * (n + 1)
    pull = (
        ("kv_cache_transfer_start", at + 75, {}),
        ("kv_cache_transfer_end", at + 95, {"kv_cache_size": 4000}),
    )
    chosen = (
        ("ctx_server.selected", at + 1, {"server": "http://ctx:8001"}),
        ("gen_server.selected", at + 65, {"server": "gen:8002"}),
    )
    return [
        span("disaggregated_request", trace, spans, None, at, at + (68 if streamed else 152), events=chosen),
        span("llm_request", trace, spans + 1, spans, at + 3, at + 64, engine(n, 10, 60, 60, 1, 0.0)),
        span("llm_request", trace, spans + 2, spans, at + 70, at + 151, engine(n, 30, 40, 80, 5, 20.0 if stamps else 0.0), pull if stamps else ()),
    ]  # fmt: skip


def test_a_split_request_is_cut_by_the_stamps_of_both_servers(tmp_path: Path) -> None:
    write(tmp_path / "t.json", [s for n in range(30) for s in pair(n)])
    trace = Trace.read([tmp_path])
    assert trace.store.sql("SELECT mode FROM deployments").rows() == [("disaggregated",)]
    found = dict(
        trace.store.sql(
            "SELECT detail, sum(end_ns - start_ns) / 30e6 FROM phases GROUP BY detail"
        ).iter_rows()
    )
    # the router's span ends with its handler: the window is the engines'
    expected = {
        "prefill_queue": 10, "prefill_wall": 50, "bridge_wait": 5, "kv_transfer": 20, "decode_queue": 5, "decode_exec": 10,
        "decode_wall": 40, "dispatch": 5, "unattributed": 2,
    }  # fmt: skip
    assert found == pytest.approx(expected, abs=0.01)
    moved = trace.store.sql("SELECT count(*), min(bytes) FROM transfers").row(0)
    assert moved == (30, 4000)
    chosen = trace.store.sql("SELECT DISTINCT phase, worker FROM decisions ORDER BY phase").rows()
    assert chosen == [("decode", "address:gen:8002"), ("prefill", "address:ctx:8001")]
    assert not trace.store.sql("SELECT * FROM reported WHERE value <= 0").height


def test_without_stamps_the_wait_of_the_generation_server_is_an_upper_bound(tmp_path: Path) -> None:
    write(tmp_path / "t.json", [s for n in range(30) for s in pair(n, stamps=False, streamed=False)])  # fmt: skip
    trace = Trace.read([tmp_path])
    rows = trace.store.sql("SELECT DISTINCT basis, round((end_ns - start_ns) / 1e6) FROM phases WHERE detail = 'kv_wait_upper_bound'")  # fmt: skip
    assert rows.rows() == [("upper_bound", 30.0)]
    whole = trace.store.sql("SELECT DISTINCT e2e_ms, mode FROM requests").rows()
    assert whole == [(pytest.approx(152), "disaggregated")]


def test_numbers_of_two_servers_are_two_requests(tmp_path: Path) -> None:
    """Servers without a name, each counting from the same number, in the same second."""
    for server in (1, 2):
        spans = [
            span("llm_request", 100 * server + n, 100 * server + n, None, 50.0 * n, 50.0 * n + 40, engine(n, 1, 10, 39, 5, 0.0))
            for n in range(10)
        ]  # fmt: skip
        write(tmp_path / f"{server}.json", spans)
    trace = Trace.read([tmp_path])
    assert trace.store.sql("SELECT count(*) FROM requests").item() == 20
    assert trace.store.sql("SELECT DISTINCT round(tpot_ms, 2) FROM requests").rows() == [(7.25,)]
