"""What is not read is named as what it is, what viewers of traces export is read, and totals are no requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import pdtrace
from pdtrace import registry
from pdtrace.collectors import otlp, table
from pdtrace.errors import PdtraceError
from pdtrace.model import Head

Collect = Callable[..., Any]

START = 1_765_000_000_000_000_000  # 2025-12-06 05:46:40 UTC
TRACE, SPAN, PARENT = "0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7", "00000000000000a1"
TAGS = {
    "gen_ai.request.id": "chatcmpl-1", "gen_ai.usage.prompt_tokens": 700, "gen_ai.usage.completion_tokens": 11,
    "gen_ai.latency.e2e": 1.25, "gen_ai.latency.time_to_first_token": 0.25, "gen_ai.latency.time_in_queue": 0.05,
    "gen_ai.latency.time_in_model_prefill": 0.18, "gen_ai.latency.time_in_model_decode": 1.0,
}  # fmt: skip


def matches(data: str, name: str = "x.log") -> list[tuple[str, Any]]:
    return registry.sniff(Head(name, name, data.encode(), complete=True))


def jaeger() -> Any:
    """One span of vLLM as Jaeger's UI and /api/traces give it: µs, tags with types, cut ids."""
    kinds = {int: "int64", float: "float64", str: "string"}
    tags = [{"key": k, "type": kinds[type(v)], "value": v} for k, v in TAGS.items()]
    tags += [
        {"key": "span.kind", "type": "string", "value": "server"},
        {"key": "otel.scope.name", "type": "string", "value": "vllm.llm_engine"},
        {"key": "otel.status_code", "type": "string", "value": "ERROR"},
    ]
    span = {
        "traceID": TRACE, "spanID": SPAN.lstrip("0"), "operationName": "llm_request", "processID": "p1",
        "references": [{"refType": "CHILD_OF", "traceID": TRACE, "spanID": "a1"}],
        "startTime": START // 1000, "duration": 1_260_000, "tags": tags,
        "logs": [{"timestamp": START // 1000 + 5, "fields": [{"key": "event", "type": "string", "value": "seen"}]}],
    }  # fmt: skip
    process = {
        "serviceName": "chat",
        "tags": [{"key": "service.instance.id", "type": "string", "value": "pod-a"}],
    }
    return {"data": [{"traceID": TRACE, "spans": [span], "processes": {"p1": process}}]}


def zipkin() -> Any:
    """The same from Zipkin: an array of spans, all tags text."""
    tags = {k: str(v) for k, v in TAGS.items()} | {
        "otel.scope.name": "vllm.llm_engine", "otel.status_code": "ERROR",
    }  # fmt: skip
    return [
        {
            "traceId": TRACE, "id": SPAN, "parentId": PARENT, "name": "llm_request", "kind": "SERVER",
            "timestamp": START // 1000, "duration": 1_260_000, "localEndpoint": {"serviceName": "chat"}, "tags": tags,
            "annotations": [{"timestamp": START // 1000 + 5, "value": "seen"}],
        }
    ]  # fmt: skip


def console() -> Any:
    """The same from OpenTelemetry's console exporter (Python)."""
    return {
        "name": "llm_request", "context": {"trace_id": f"0x{TRACE}", "span_id": f"0x{SPAN}", "trace_state": "[]"},
        "kind": "SpanKind.SERVER", "parent_id": f"0x{PARENT}",
        "start_time": "2025-12-06T05:46:40.000000Z", "end_time": "2025-12-06T05:46:41.260000Z",
        "status": {"status_code": "ERROR"}, "attributes": TAGS | {"otel.scope.name": "vllm.llm_engine"},
        "events": [{"name": "seen", "timestamp": "2025-12-06T05:46:40.000005Z", "attributes": {}}], "links": [],
        "resource": {"attributes": {"service.name": "chat"}, "schema_url": ""},
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(jaeger()), json.dumps(zipkin()), json.dumps(console(), indent=4) + "\n" + json.dumps(console() | {"name": "other"}),
        json.dumps([zipkin()]), json.dumps({"data": jaeger()["data"], "errors": None}, indent=2),
    ],
)  # fmt: skip
def test_a_span_is_the_same_in_every_viewers_json(
    collect: Collect, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "dump.json"
    path.write_text(text)
    span = collect(otlp, path)["spans"].filter(pl.col("name") == "llm_request").row(0, named=True)
    assert (span["trace_id"], span["span_id"], span["parent_span_id"]) == (TRACE, SPAN, PARENT)
    assert (span["start_ns"], span["end_ns"]) == (START, START + 1_260_000_000)
    told = (span["scope_name"], span["kind"], span["status_code"], span["events"][0]["name"])
    assert told == ("vllm.llm_engine", "server", "error", "seen")
    ints = dict(zip(span["int_keys"].split(chr(31)), span["int_values"], strict=True))
    assert ints["gen_ai.usage.prompt_tokens"] == 700
    doubles = dict(zip(span["double_keys"].split(chr(31)), span["double_values"], strict=True))
    assert doubles["gen_ai.latency.time_to_first_token"] == 0.25


@pytest.mark.parametrize("dump", [jaeger, zipkin, console])
def test_vllm_seen_through_a_viewer_gives_the_same_request(
    tmp_path: Path, dump: Callable[[], Any]
) -> None:
    (tmp_path / "dump.json").write_text(json.dumps(dump()).replace("ERROR", "OK"))
    request = pdtrace.open(tmp_path).requests().row(0, named=True)
    assert (request["ttft_ms"], request["prompt_tokens"], request["output_tokens"]) == (
        250,
        700,
        11,
    )


def test_a_span_in_otlp_and_in_jaeger_counts_once(tmp_path: Path) -> None:
    """Jaeger cuts instants to microseconds: the copies differ by less than one."""
    attributes = [
        {"key": k, "value": {"stringValue": v} if isinstance(v, str) else {"doubleValue": v}}
        for k, v in TAGS.items()
    ]
    span = {
        "traceId": TRACE, "spanId": SPAN, "parentSpanId": PARENT, "name": "llm_request", "kind": 2,
        "startTimeUnixNano": str(START + 777), "endTimeUnixNano": str(START + 1_260_000_777), "attributes": attributes,
    }  # fmt: skip
    scopes = [{"scope": {"name": "vllm.llm_engine"}, "spans": [span]}]
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "chat"}}]}
    document = {"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}
    (tmp_path / "otlp.jsonl").write_text(json.dumps(document) + "\n")
    (tmp_path / "jaeger.json").write_text(json.dumps(jaeger()))
    assert pdtrace.open(tmp_path).requests().height == 1


def test_tempos_older_spelling_is_read(collect: Collect, tmp_path: Path) -> None:
    span = {
        "traceId": TRACE, "spanId": SPAN, "name": "llm_request", "kind": "SPAN_KIND_SERVER",
        "startTimeUnixNano": str(START), "endTimeUnixNano": str(START + 1), "attributes": [],
    }  # fmt: skip
    scopes = [{"instrumentationLibrary": {"name": "vllm.llm_engine"}, "spans": [span]}]
    path = tmp_path / "tempo.json"
    path.write_text(
        json.dumps({"batches": [{"resource": {}, "instrumentationLibrarySpans": scopes}]})
    )
    assert matches(path.read_text())[0][0] == "otlp"
    assert collect(otlp, path)["spans"]["scope_name"].to_list() == ["vllm.llm_engine"]


FOREIGN = [
    ("GenAI-Perf's or AIPerf's printed table", "          NVIDIA AIPerf | LLM Metrics          \n| Metric | avg |\n"),
    ("vLLM router log (Rust)", "2026-01-15 02:30:17 DEBUG http_request{method=POST}: vllm_router_rs::routers::http::vllm_pd_router: src/x.rs:577: Prefill worker\n"),
    ("Ray Serve log", "(ServeReplica:default:LLM pid=42953) INFO 2025-07-18 09:58:20,002 default_LLM x d015 -- CALL llm_config OK 2.7ms\n"),
    ("SGLang router log", '2025-10-29 21:49:19 ERROR http_request{method=POST uri=/generate request_id="gnt-T1"}: sglang_router_rs::routers::http::pd_router: src/routers/http/pd_router.rs:142: Failed to select PD pair error=No available prefill workers\n'),
    ("SGLang router log", "2025-11-04 10:05:37  INFO sglang_router_rs::server: src/server.rs:928: Initializing data connector: Memory\n"),
    ("llm-d inference simulator log", 'I0213 16:51:54.131927       1 helpers.go:76] "Configuration:" =<\n'),
    ("Mooncake log", "I1129 23:01:07.201009 30941 transfer_engine_impl.cpp:1170] [Metrics] Transfer Engine Stats (over last 2s): Throughput: 4.0 MB/s\n"),
    ("LMCache log", "[2025-06-21 20:59:57,672] LMCache INFO: Reqid: c-1, Total tokens 263, LMCache hit tokens: 256, need to load: 256\n"),
    ("GuideLLM's table of benchmarks", "Run Info,Run Info,Benchmark\nRun ID,Run Index,Type\n5,0,generative_benchmark\n"),
    ("trtllm-bench report", '{"engine": {"version": "0.20.0"}, "request_info": {"num_requests": 3}, "performance": {"request_throughput_req_s": 2.0}}'),
    ("inference-perf summary", '{"load_summary": {"count": 9}, "successes": {"count": 9, "latency": {"request_latency": {"mean": 1.0}}}}'),
    ("GenAI-Perf or AIPerf table of totals", "Metric,avg,min,max,p99\nTime To First Token (ms),3,1,9,8\n"),
    ("Locust's statistics", "Type,Name,Request Count,Failure Count,Median Response Time\nPOST,/v1/completions,120,2,1200\n"),
    ("k6 result", "metric_name,timestamp,metric_value,status\nhttp_req_duration,1748779200,1200.5,200\n"),
    ("k6 result", '{"type": "Metric", "data": {"name": "http_req_duration"}, "metric": "http_req_duration"}\n'),
    ("EvalScope summary", '{"Total requests": 12, "Average time to first token (s)": 0.25}'),
    ("GenAI-Perf's or AIPerf's totals", '{"request_throughput": {"unit": "requests/sec", "avg": 0.15}, "request_latency": {"unit": "ms", "avg": 6655.5}}'),
    ("llama-benchy's printed table", "llama-benchy (0.4.0)\nDate: 2026-08-06 09:19:19\n| model | test | t/s | ttfr (ms) |\n"),
    ("Triton's log of TensorRT-LLM", 'I1218 03:35:37.688135 20559 libtensorrtllm.cc:1205] {"Active Request Count":1,"Context Requests":1,"Iteration Counter":0}\n'),
    ("AIPerf time slices", "Timeslice,Metric,Unit,Stat,Value\n0,Input Sequence Length,tokens,avg,550.00\n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), FOREIGN)
def test_a_file_without_a_collector_is_named_and_not_misread(name: str, text: str) -> None:
    """Lines of the shapes that these systems' sources print (versions: see docs/sources.md)."""
    found = matches(text)
    assert [collector for collector, _ in found] == ["not_read"]
    assert found[0][1].ignore.startswith(f"{name}: recognised, not read yet")


def test_vllms_log_with_lmcaches_lines_is_vllms() -> None:
    stats = "(APIServer pid=8) INFO 11-30 08:10:11 [loggers.py:248] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 6.2 tokens/s, Running: 4 reqs, Waiting: 6 reqs, GPU KV cache usage: 9.0%\n"
    assert matches(stats + dict(FOREIGN)["LMCache log"])[0][0] == "vllm_log"


RUNS = [
    "Concurrency,Requests,Mean TTFT (ms),P99 TTFT (ms),Mean TPOT (ms),Output tokens,tok/s\n1,8,650.5,662.0,30.5,128,24.69\n2,8,655.0,666.0,31.0,128,26.24\n",
    "| ISL | OSL | N | TTFT Avg (ms) | TTFT P99 (ms) | E2EL Avg (ms) | Tok/s |\n|---|---|---|---|---|---|---|\n| 128 | 128 | 8 | 650.5 | 662.0 | 4410.1 | 24.69 |\n",
    "Name,Start Time,End Time,Duration,Successful Requests,Time to First Token mean,Output Tokens mean\na,2026-01-01 10:00:00,2026-01-01 10:00:30,30,25,200.0,50\n",
    '{"backend": "tgi", "duration": 30.2, "completed": 30, "total_output_tokens": 900, "mean_ttft_ms": 140.0, "p99_ttft_ms": 300.0, "mean_tpot_ms": 10.0, "output_tokens": 9}\n',
    "Concurrency,Mean ITL (ms),P99 ITL (ms),Output tokens,tok/s\n1,12.1,15.2,1000,80\n",
    "model,avg_latency_ms,p99_latency_ms,output_tokens,tokens_per_s\na,12.1,15.2,1000,80\n",
    '[{"Percentiles": "10%", "TTFT (s)": 0.21, "Latency (s)": 0.81, "Output tokens": 31}]',
]  # fmt: skip


@pytest.mark.parametrize("text", RUNS)
def test_a_row_of_means_and_percentiles_is_a_run_and_no_request(text: str) -> None:
    assert [m.ignore for _, m in matches(text, "results.csv")] == [
        "a table of runs (means or percentiles over requests), not of requests"
    ]


@pytest.mark.parametrize(("loads", "requests"), [((1, 2, 4, 8), 0), ((1, 1, 2, 2), 4)])
def test_a_sweep_over_loads_is_runs_and_the_same_loads_again_are_requests(
    collect: Collect, tmp_path: Path, loads: tuple[int, ...], requests: int
) -> None:
    """A raw table of single requests may say at which load each was sent."""
    path = tmp_path / "results.csv"
    rows = [f"{c},1024,128,{100 + c}\n" for c in loads]
    path.write_text("concurrency,input_tokens,output_tokens,ttft_ms\n" + "".join(rows))
    found = collect(table, path)
    assert (found["legs"].height, sum(found.account.reasons.values())) == (requests, 4 - requests)


def test_a_folder_with_only_totals_says_so(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(RUNS[0])
    with pytest.raises(PdtraceError, match="table of runs"):
        pdtrace.open(tmp_path)


def test_statistics_of_one_requests_token_gaps_are_a_requests() -> None:
    text = (
        "request_id,ttft_ms,e2e_ms,output_tokens,mean_itl_ms,p99_itl_ms\na,100,900,80,10.1,15.2\n"
    )
    assert [(name, m.ignore) for name, m in matches(text, "r.csv")] == [("table", "")]


@pytest.mark.parametrize(
    "text",
    [
        '[{"request": "{\\"prompt\\": \\"a secret\\"}", "ttft_ms": 100, "output_tokens": 5}]',
        "conversation,user,ttft_ms,output_tokens\n\"Tell me a secret, will you\",\"what a secret it is\",100,5\n",
        "request_id,ttft_ms,output_tokens\n\"please tell me all about the secret of rice\",100,5\n",
        "request_id,ttft_ms,output_tokens\n\"[{\"\"role\"\": \"\"user\"\", \"\"content\"\": \"\"secret\"\"}]\",100,5\n",
    ],
)  # fmt: skip
def test_what_was_said_is_no_id(collect: Collect, tmp_path: Path, text: str) -> None:
    path = tmp_path / ("r.json" if text.startswith("[") else "r.csv")
    path.write_text(text)
    legs = collect(table, path)["legs"]
    assert legs["ttft_ms"].to_list() == [100]
    assert "secret" not in legs.write_json()


def test_names_with_a_blank_stay_names(collect: Collect, tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("request,session,ttft_ms,output_tokens\nreq 12,chat 7,100,5\n")
    leg = collect(table, path)["legs"].row(0, named=True)
    assert (leg["request_id"], leg["session"]) == ("req 12", "chat 7")


def test_instants_of_single_tokens_inside_a_record_give_first_tokens(
    collect: Collect, tmp_path: Path
) -> None:
    """The shape of inference-perf's per-request file (instants of its own clock, texts never stored)."""
    path = tmp_path / "per_request_lifecycle_metrics.json"
    info = {
        "input_tokens": 100,
        "output_tokens": 3,
        "output_token_times": [1000.25, 1000.5, 1001.0],
    }
    record = {"start_time": 1000.0, "end_time": 1001.0, "request": '{"prompt":"secret"}', "response": "x", "info": info, "error": None}  # fmt: skip
    path.write_text(json.dumps([record]))
    found = collect(table, path)
    leg = found["legs"].row(0, named=True)
    assert (leg["ttft_ms"], leg["e2e_ms"], leg["prompt_tokens"], leg["output_tokens"]) == (
        250,
        1000,
        100,
        3,
    )
    assert found["streams"]["gaps_us"].to_list() == [[250_000, 500_000]]
