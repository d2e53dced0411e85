"""Files of systems that have no collector here: named, with what pdtrace can read of the same run instead.

They are told from words that only their writers use; a file that a collector claims exactly (vLLM's
log with LMCache's lines in it) is left to it. Sources: llm-d-inference-sim and
kubernetes-sigs/gateway-api-inference-extension (zap logs), kvcache-ai/Mooncake (glog), LMCache,
ai-dynamo/nixl, vllm-project/guidellm, kubernetes-sigs/inference-perf, ai-dynamo/aiperf.
"""

from __future__ import annotations

import re

from pdtrace.errors import UnknownFormat
from pdtrace.model import Head, Match, Sink, Source

TITLE = "Recognised, not read yet (logs of Mooncake, LMCache, NIXL; totals of benchmarks)"

AT_MOST = "dialect"  # the strength of every match: not asked of a file that a reader knows exactly
_METRICS = "its /metrics and its OTLP spans are read"
_TOTALS = "totals over requests: the file with the single requests is read instead, where a collector knows it"
_NAMED: tuple[tuple[str, str, re.Pattern[bytes]], ...] = (
    ("SGLang router log", "its /metrics and its OTLP spans are read", re.compile(
        rb"\b(?:INFO|DEBUG|WARN|ERROR)\s*(?:\x1b\[[0-9;]*m)*\s*(?:http_request\{[^\n]{0,2000}?\}: )?(?:sglang_router(?:_rs)?|smg|sgl_model_gateway|model_gateway)::")),
    ("vLLM router log (Rust)", "its OTLP spans are read: --enable-trace", re.compile(rb"\bvllm_router(?:_rs)?::\w+")),
    ("Ray Serve log", "its engines' own lines, /metrics and traces are read", re.compile(
        rb"\((?:ProxyActor|ServeController) pid=\d|-- (?:CALL|GET|POST) \S+ (?:OK|ERROR|\d{3}) [\d.]+ms", re.MULTILINE)),
    ("trtllm-bench report", "totals over requests: run with --request_json for the single requests", re.compile(
        rb'"request_info"[\s\S]{0,2000}?"request_throughput_req_s"')),
    ("trtllm-bench's printed report", "totals over requests: run with --request_json for the single requests", re.compile(
        rb"^= (?:PERFORMANCE OVERVIEW|WORLD \+ RUNTIME INFORMATION)", re.MULTILINE)),
    ("llm-d inference simulator log", _METRICS, re.compile(
        rb'^[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ (?:simulator|vllm-sim|server|helpers)\.go:\d+\] "(?:Configuration:|Server starting|vLLM simulator)', re.MULTILINE)),
    ("Mooncake log", "its transfers name no request", re.compile(
        rb"\[Metrics\] Transfer Engine Stats|^[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ (?:transfer_engine|master_service|rdma_|tcp_transport|client_service)\w*\.cpp:\d+\]", re.MULTILINE)),
    ("LMCache log", "inside a vLLM log its lookups, loads and stores are read", re.compile(
        rb"\] LMCache (?:DEBUG|INFO|WARNING|ERROR) ?:|^(?:DEBUG|INFO|WARNING|ERROR) LMCache: ", re.MULTILINE)),
    ("GuideLLM's table of benchmarks", "totals: benchmarks.json of the same run has the single requests", re.compile(
        rb"\A(?:\xef\xbb\xbf)?Run Info,|Benchmarks (?:Metadata|Info|Stats):")),
    ("inference-perf summary", _TOTALS, re.compile(rb'\A\s*\{\s*"load_summary"\s*:|"successes"\s*:\s*\{\s*"count"[\s\S]{0,400}?"request_latency"\s*:\s*\{')),
    ("llmperf summary", _TOTALS, re.compile(rb'"results_ttft_s_(?:mean|quantiles_p25)"')),
    ("GenAI-Perf or AIPerf table of totals", _TOTALS, re.compile(rb"\A\xef?\xbb?\xbf?Metric,(?:Unit,)?(?:avg|Avg)\b")),
    ("GenAI-Perf's or AIPerf's printed table", "totals over requests: profile_export.jsonl of the same run has the single requests", re.compile(
        rb"NVIDIA (?:AIPerf|GenAI-Perf) \| LLM Metrics")),
    ("GenAI-Perf's or AIPerf's totals", "totals over requests: profile_export.jsonl (GenAI-Perf: profile_export.json) of the same run has the single requests", re.compile(
        rb'"(?:request_latency|time_to_first_token)"\s*:\s*\{\s*"unit"\s*:')),
    ("llama-benchy's printed table", "means over requests: its server's log, traces or metrics are read", re.compile(rb"\Allama-benchy \(")),
    ("Triton's log of TensorRT-LLM", "Triton's /metrics are read; so are trtllm-serve's log and request metrics", re.compile(
        rb'"(?:Active Request Count|Iteration Counter)\\?" ?: ?\d')),
    ("AIPerf time slices", _TOTALS, re.compile(rb"\A(?:\xef\xbb\xbf)?Timeslice,(?:Start_NS,End_NS,)?Metric,Unit,Stat,Value")),
    ("Locust's statistics", _TOTALS, re.compile(rb'\A(?:\xef\xbb\xbf)?"?Type"?,"?Name"?,"?Request Count|\A"?Timestamp"?,"?User Count')),
    ("k6 result", "one value of one metric a line: log the requests in the script instead", re.compile(
        rb'\A\s*\{"(?:type|metric)": ?"(?:Metric|Point|http_\w+)"|\Ametric_name,timestamp,metric_value|\A\s*\{[\s\S]{0,4000}?"http_req_duration"\s*:\s*\{')),
    ("EvalScope summary", _TOTALS, re.compile(rb'"Average time to first token \(s\)"')),
    ("oha summary", _TOTALS, re.compile(rb'"latencyPercentiles"\s*:')),
    ("OpenTelemetry Collector's debug output", "write them with the Collector's file exporter instead", re.compile(
        rb"ResourceSpans #\d+[\s\S]{0,4000}?Span #\d+\s+Trace ID")),
    ("NIXL telemetry shared memory", "switch its Prometheus exporter on instead", re.compile(rb"\Anixl_telemetry")),
)  # fmt: skip


# Words without which a pattern above cannot match: to look for them takes a fiftieth of the time.
_WORDS: dict[str, tuple[bytes, ...]] = {
    "SGLang router log": (b"sglang_router", b"smg::", b"model_gateway::"),
    "vLLM router log (Rust)": (b"vllm_router",),
    "Ray Serve log": (b"Actor pid=", b"Controller pid=", b"-- CALL ", b"-- GET ", b"-- POST "),
    "trtllm-bench report": (b"request_throughput_req_s",),
    "trtllm-bench's printed report": (b"PERFORMANCE OVERVIEW", b"RUNTIME INFORMATION"),
    "GuideLLM's table of benchmarks": (b"Run Info,", b"Benchmarks "),
    "llm-d inference simulator log": (b".go:",),
    "Mooncake log": (b"Transfer Engine Stats", b".cpp:"),
    "LMCache log": (b"LMCache",),
    "GenAI-Perf's or AIPerf's totals": (b'"unit"',),
    "llama-benchy's printed table": (b"llama-benchy (",),
    "Triton's log of TensorRT-LLM": (b"Active Request Count", b"Iteration Counter"),
    "inference-perf summary": (b'"load_summary"', b'"successes"'),
    "OpenTelemetry Collector's debug output": (b"ResourceSpans #",),
}


def sniff(head: Head) -> Match | None:
    """Named by what only that system writes; never a claim over a file that a reader knows."""
    for name, instead, pattern in _NAMED:
        words = _WORDS.get(name, (b"",))
        if any(word in head.data for word in words) and pattern.search(head.data):
            return Match("dialect", ignore=f"{name}: recognised, not read yet ({instead})")
    return None


def read(source: Source, out: Sink) -> None:
    """Never called: nothing here is read."""
    raise UnknownFormat(f"{source.path}: nothing to read", "this file is recognised and not read")
