"""Dumps of known truth of other systems' spans and our own: read as what they mean, never as vLLM's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from truth_check import Seen, column, exact, external
from truth_fleet import pair
from truth_otlp import CLIENT, INTERNAL, MS, SERVER, T0, S, Span, span_id, trace_id, uuid, write
from truth_vllm import Engine, load, resource, v1_span


def test_openai_client_spans_are_client_requests(tmp_path: Path) -> None:
    dice = random.Random(4)
    res = {"service.name": "my-app", "telemetry.sdk.language": "python"}
    spans, truth = [], []
    for i in range(50):
        start, ttft = T0 + i * S // 5, dice.uniform(0.1, 0.6)
        tokens = dice.randint(20, 80)
        e2e = ttft + tokens * 0.02
        truth.append((ttft * 1e3, e2e * 1e3, tokens))
        attributes = {
            "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "gpt-x",
            "gen_ai.response.model": "gpt-x-2024", "gen_ai.response.id": f"chatcmpl-{i}", "gen_ai.request.stream": True,
            "gen_ai.usage.input_tokens": 100 + i, "gen_ai.usage.output_tokens": tokens, "server.address": "api.example.com",
            "gen_ai.response.time_to_first_chunk": ttft, "gen_ai.response.finish_reasons": ["stop"],
        }  # fmt: skip
        spans.append(
            Span(res, "opentelemetry.instrumentation.openai_v2", "chat gpt-x", trace_id("oai", i), span_id("oai", i),
                 start, start + int(e2e * S), None, CLIENT, attributes)
        )  # fmt: skip
        if i % 5 == 0:  # the HTTP client is instrumented, too
            spans.append(
                Span(res, "opentelemetry.instrumentation.httpx", "POST", trace_id("oai", i), span_id("http", i), start + MS,
                     start + int(ttft * S), span_id("oai", i), CLIENT, {"http.request.method": "POST", "http.response.status_code": 200})
            )  # fmt: skip
    spans.append(
        Span(res, "opentelemetry.instrumentation.openai_v2", "chat gpt-x", trace_id("oai", 99), span_id("oai", 99), T0, T0 + S,
             None, CLIENT, {"gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-x", "error.type": "RateLimitError"}, error=True)
    )  # fmt: skip
    write(tmp_path / "t.jsonl", spans)
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.only.requests == {
        "count": 51,
        "completed": 50,
        "failed": 1,
        "aborted": 0,
        "unknown": 0,
    }
    assert seen.latency()["observer"] == "client"
    done = seen.requests.filter(pl.col("outcome") == "completed")
    assert done["ttft_ms"].sort().to_list() == pytest.approx(sorted(t[0] for t in truth), abs=0.01)
    assert done["e2e_ms"].sort().to_list() == pytest.approx(sorted(t[1] for t in truth), abs=0.01)
    assert done["output_tokens"].sum() == sum(t[2] for t in truth)
    assert seen.only.mode == "unknown"
    assert not any("prefill" in f.id for f in seen.only.findings)


def test_own_spans_across_router_and_workers_give_full_phases(tmp_path: Path) -> None:
    from pdtrace import semconv as s

    dice = random.Random(5)
    spans, truth = [], []
    for i in range(30):
        t = T0 + i * S // 2
        trace = trace_id("own", i)
        at = [t]
        for low, high in ((1, 3), (0.2, 0.5), (4, 20), (30, 90), (5, 25), (1, 6)):
            at.append(at[-1] + int(dice.uniform(low, high) * MS))
        decide, sent, queue_end, prefill_end, moved, waited = at[1:]
        gaps = [int(dice.uniform(8, 14) * 1000) for _ in range(dice.randint(20, 40))]
        first = waited + 9 * MS
        end = first + sum(gaps) * 1000
        rid = f"req-{i}"
        ids = {k: span_id("own", k, i) for k in ("router", "dp", "dd", "p", "d")}

        def add(
            where: str, name: str, start: int, stop: int, key: str, parent: str | None,
            kind: int = INTERNAL, trace: str = trace, n: int = i, **attributes: Any,
        ) -> None:  # fmt: skip
            res = {"service.name": where, "service.instance.id": uuid("own", where)}
            spans.append(
                Span(res, s.SCOPE, name, trace, span_id("own", key, n), start, stop, parent, kind,
                     {k.replace("__", "."): v for k, v in attributes.items()})
            )  # fmt: skip

        role = s.WORKER_ROLE
        add("router", s.SPAN_REQUEST, t, end + MS, "router", None, SERVER, **{s.REQUEST_ID: rid, role: "router",
            s.FIRST_TOKEN_NS: first + MS, s.TOKEN_TIMES_US: str([0, *[sum(gaps[: k + 1]) for k in range(len(gaps))]]), s.OUTPUT_TOKENS: len(gaps) + 1,
            s.INPUT_TOKENS: 500})  # fmt: skip
        add(
            "router",
            s.SPAN_ROUTER,
            t,
            decide,
            "r1",
            ids["router"],
            **{s.ROUTER_POLICY: "kv", s.ROUTER_WORKER: "p0"},
        )
        add(
            "router",
            s.SPAN_DISPATCH,
            decide,
            prefill_end + MS // 2,
            "dp",
            ids["router"],
            CLIENT,
            **{role: "prefill"},
        )
        add(
            "p",
            s.SPAN_REQUEST,
            sent,
            prefill_end,
            "p",
            ids["dp"],
            SERVER,
            **{
                s.REQUEST_ID: rid,
                role: "prefill",
                s.FIRST_TOKEN_NS: prefill_end,
                s.OUTPUT_TOKENS: 1,
                s.INPUT_TOKENS: 500,
            },
        )
        phases = {v: k for k, v in s.PHASE_SPANS.items()}
        add("p", phases["prefill_queue"], sent, queue_end, "q", ids["p"])
        add(
            "p",
            phases.get("prefill_exec") or phases["prefill_wall"],
            queue_end,
            prefill_end,
            "pe",
            ids["p"],
        )
        add(
            "router",
            s.SPAN_DISPATCH,
            prefill_end,
            end + MS // 2,
            "dd",
            ids["router"],
            CLIENT,
            **{role: "decode"},
        )
        add(
            "d",
            s.SPAN_REQUEST,
            prefill_end,
            end,
            "d",
            ids["dd"],
            SERVER,
            **{
                s.REQUEST_ID: rid,
                role: "decode",
                s.FIRST_TOKEN_NS: first,
                s.OUTPUT_TOKENS: len(gaps) + 1,
            },
        )
        add(
            "d",
            s.SPAN_KV_TRANSFER,
            prefill_end,
            moved,
            "kv",
            ids["d"],
            **{s.KV_BYTES: 1_000_000, s.KV_BACKEND: "nixl"},
        )
        add("d", phases["prefill_queue"], moved, waited, "dq", ids["d"])
        add("d", phases.get("decode_exec") or phases["decode_wall"], waited, end, "de", ids["d"])
        truth.append((rid, (first + MS - t) / MS, (decide - t) / MS, (queue_end - sent) / MS, (prefill_end - queue_end) / MS,
                      (moved - prefill_end) / MS, (waited - moved) / MS))  # fmt: skip
    write(tmp_path / "t.jsonl", spans)
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.only.requests["count"] == 30
    assert seen.only.mode == "disaggregated"
    assert seen.latency()["observer"] == "router"
    prefill = [r["detail"] for r in seen.only.phases if r["phase"] == "prefill"]
    assert len(prefill) == 1
    details = ("router_decide", "prefill_queue", prefill[0], "kv_transfer", "decode_queue")
    names = dict(seen.requests.select("external_id", "request").iter_rows())
    ttft = column(seen, "ttft_ms")
    parts = [seen.phase(d) for d in details]
    for rid, *values in truth:
        found = [ttft[names[rid]], *(p.get(names[rid], 0) for p in parts)]
        assert found == pytest.approx(values, abs=0.6), rid
    assert {r["basis"] for r in seen.only.phases if r["detail"] in details} == {"measured"}
    assert seen.sql("SELECT count(*) FROM streams").item() == 30
    assert seen.latency("itl_ms", "router")["p50"] == pytest.approx(11, abs=1)
    assert seen.sql("SELECT count(*), sum(bytes)::BIGINT FROM transfers").row(0) == (30, 30_000_000)


def test_tensorrt_llm_spans_are_not_taken_for_vllms(tmp_path: Path) -> None:
    requests = load(30, T0, name=lambda i: str(2048 + i))
    Engine().run(requests)
    spans = []
    for r in requests:
        attributes = {
            "gen_ai.usage.prompt_tokens": r.prompt, "gen_ai.usage.completion_tokens": r.output, "gen_ai.request.id": r.id,
            "gen_ai.request.max_tokens": r.output, "gen_ai.response.finish_reasons": ["stop"],
            "gen_ai.latency.time_to_first_token": r.ttft_ms / 1e3, "gen_ai.latency.e2e": r.e2e_ms / 1e3,
            "gen_ai.latency.time_in_queue": (r.scheduled - r.arrival) / S, "gen_ai.latency.kv_cache_transfer_time": -1.0,
        }  # fmt: skip
        spans.append(
            Span(
                {"service.name": "trtllm"},
                "trt.llm",
                "llm_request",
                r.trace,
                r.span,
                r.arrival,
                r.last_seen + MS,
                None,
                SERVER,
                attributes,
            )
        )
    write(tmp_path / "t.jsonl", spans)
    seen = Seen(tmp_path)
    exact(seen)
    assert {w["engine"] for w in seen.only.workers} == {"TensorRT-LLM"}
    assert seen.only.requests["count"] == 30
    told = dict(seen.requests.select("trace_id", "ttft_ms").iter_rows())  # ids are counters
    assert told == {r.trace: pytest.approx(r.ttft_ms, abs=0.01) for r in requests}
    assert seen.sql("SELECT count(*) FROM reported WHERE value < 0").item() == 0
    assert not any(
        "vLLM" in str(v) for v in seen.sql("SELECT DISTINCT definition FROM reported")["definition"]
    )


def test_llm_d_spans_give_no_nonsense(tmp_path: Path) -> None:
    """The decode span hangs under the prefill span, which has ended: no phase may swallow the other."""
    legs = pair()
    prefill, decode, _, _ = legs
    sidecar, epp = {"service.name": "llm-d-disagg-sidecar"}, {"service.name": "llm-d-epp"}
    spans = []
    for p, d in zip(prefill, decode, strict=True):
        p.trace = d.trace = trace_id("llm-d", p.id)
        ids = {k: span_id("llm-d", k, p.id) for k in ("gw", "entry", "fwd", "p", "d")}
        start = p.arrival - 8 * MS
        key = "llm_d.pd_proxy."
        end = d.last_seen + 2 * MS
        p.parent, d.parent = ids["p"], ids["d"]
        common = {key + "connector": "nixlv2", key + "request_id": external(p.id)}
        spans += [
            Span(epp, "llm-d-router/epp", "gateway.request", p.trace, ids["gw"], start - 5 * MS, end, None, SERVER, {"llm_d.epp.disagg.reason": "x"}),
            Span(sidecar, "llm-d-pd-proxy", "forward_request", p.trace, ids["entry"], start, end, ids["gw"], SERVER, common),
            Span(sidecar, "llm-d-pd-proxy", "prefill", p.trace, ids["p"], p.arrival - MS, p.last_seen + MS, ids["entry"], INTERNAL,
                 {**common, key + "prefill.duration_ms": 30.0}),
            Span(sidecar, "llm-d-pd-proxy", "decode", p.trace, ids["d"], d.arrival - MS, end - MS, ids["p"], INTERNAL,
                 {**common, key + "true_ttft_ms": 50.0, key + "decode.duration_ms": 900.0}),
            v1_span(p, resource("vllm-prefill")), v1_span(d, resource("vllm-decode")),
        ]  # fmt: skip
    write(tmp_path / "t.jsonl", spans)
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.only.requests["count"] == 40
    assert seen.only.mode == "disaggregated"
    by_trace = dict(seen.requests.select("trace_id", "request").iter_rows())
    wall, prefilled = seen.phase("decode_wall"), seen.phase("prefill_wall")
    for p, d in zip(prefill, decode, strict=True):
        name = by_trace[p.trace]
        assert prefilled[name] == pytest.approx((p.first - p.scheduled) / MS, abs=4)
        assert wall[name] == pytest.approx((d.last - d.first) / MS, abs=4)
    assert seen.sql("SELECT headline_observer FROM deployments").item() is None


def test_sglang_captures_are_kept_and_not_misread(shared: Path) -> None:
    seen = Seen(shared / "data" / "sglang")
    exact(seen)
    assert not any(w["engine"] == "vLLM" for d in seen.diagnosis.deployments for w in d.workers)
    for name in ("ttft_ms", "e2e_ms"):
        assert (seen.requests[name].drop_nulls() >= 0).all()
    modes = [row[0] for row in seen.sql("SELECT mode FROM requests WHERE mode <> 'unknown'").rows()]
    assert modes.count("disaggregated") >= 3  # its own spans: three pairs, met by their rooms
