"""Dynamo's log without DYN_LOGGING_JSONL: Rust's compact text gives what the JSON lines give."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdtrace import registry
from pdtrace.collectors import dynamo_log
from pdtrace.collectors._dynamo_log_text import parse
from pdtrace.model import Head

SECOND = 1_000_000_000
HTTP = "http-request: dynamo_llm::http::service::metrics: request"
SPAN = 'method=POST uri=/v1/chat/completions x_request_id="client-{0}" request_id=frontends-own-{0} model="m"'
ASKED = "request_id={0} model=m endpoint=chat_completions request_type=stream"
WORKER = (
    "handle_payload: dynamo_runtime::pipeline::network::ingress::push_handler: request {1} request_id={0} "
    'component="prefill" endpoint="generate" namespace="dynamo" instance_id=7042397870009110691'
)


def stamped(second: float, said: str, level: str = " INFO") -> str:
    return f"2026-07-24T02:20:{second:09.6f}Z {level} {said}"


LINES = [
    stamped(20, f"{HTTP} received {ASKED.format('a')} {SPAN.format('a')}"),
    stamped(20.1, WORKER.format("a", "received")),
    "INFO 07-24 02:20:20 [loggers.py:271] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs",
    stamped(20.9, WORKER.format("a", "completed")),
    stamped(
        23, f'{HTTP} completed {ASKED.format("a")} status=success elapsed_ms=3000 {SPAN.format("a")} '
        'input_tokens=3650 output_tokens=9 ttft_ms="2400.00" avg_itl_ms="75.00"',
    ),
    stamped(30, f"{HTTP} received {ASKED.format('b')} {SPAN.format('b')}"),
    stamped(
        30.05, f"{HTTP} completed {ASKED.format('b')} status=error error_type=internal error_detail=no worker answered elapsed_ms=50 "
        f"{SPAN.format('b')} input_tokens=0 output_tokens=0", "ERROR",
    ),
    stamped(30.1, "handle_payload: request_span: SPAN_CLOSED time.duration_us=900000 request_id=r"),
    stamped(31, "mm_routing: model not supported", " WARN"),
]  # fmt: skip


def coloured(line: str) -> str:
    """As tracing writes it with colours; the engine's own lines have none."""
    if not line.startswith("2026-"):
        return line
    return f"\x1b[2m{line[:27]}\x1b[0m \x1b[32m{line[28:33]}\x1b[0m {line[34:]}".replace(
        "=", "\x1b[0m\x1b[2m=\x1b[0m"
    )


@pytest.fixture(params=["plain", "coloured", "carried"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The lines as they are, with colours, and behind a pod's name."""
    dress = {"plain": str, "coloured": coloured, "carried": "[pod/fe-1/main] {}".format}[
        request.param
    ]
    path = tmp_path / "dynamo.log"
    path.write_text("\n".join(map(dress, LINES)) + "\n", "utf-8")
    return path


def test_requests_of_the_frontend_and_of_a_worker(collect, log: Path) -> None:
    found = collect(dynamo_log, log)
    legs = {(leg["role"], leg["request_id"]): leg for leg in found["legs"].to_dicts()}
    assert set(legs) == {("frontend", "a"), ("prefill", "a"), ("frontend", "b")}
    whole = legs["frontend", "a"]
    assert (whole["external_id"], whole["e2e_ms"], whole["status"]) == ("client-a", 3000, "completed")  # fmt: skip
    assert (whole["prompt_tokens"], whole["output_tokens"]) == (3650, 9)
    assert (whole["ttft_ms"], whole["tpot_ms"], whole["streaming"]) == (2400, 75, True)
    assert whole["first_token_ns"] - whole["start_ns"] == 2.4 * SECOND
    worker = legs["prefill", "a"]
    assert worker["worker"] == "worker_id:7042397870009110691"
    assert worker["end_ns"] - worker["start_ns"] == 0.8 * SECOND
    assert (worker["remote_id"], worker["ttft_ms"]) == ("a", None)  # the id that the frontend uses
    refused = legs["frontend", "b"]
    assert (refused["status"], refused["error"], refused["ttft_ms"]) == ("failed", "internal", None)
    assert refused["prompt_tokens"] is None  # 0 stands for unknown there
    assert "no worker answered" not in str(found["events"].to_dicts())
    kept = (
        sum(found.account.reasons.values()) + 5
    )  # records of three legs, the failure, the warning
    assert found.account.read == kept == len(LINES)
    assert found.account.reasons["line of another writer"] == 1  # the engine's


def test_engine_lines_between_are_read_too(log: Path) -> None:
    claims = registry.sniff(Head(str(log), log.name, log.read_bytes(), complete=True))
    assert [name for name, _ in claims] == ["dynamo_log", "vllm_log"]


@pytest.mark.parametrize(
    ("line", "target", "message", "span"),
    [
        (stamped(1, "dynamo_runtime::a: Binding TCP server to 10.0.0.1:0"), "dynamo_runtime::a", "Binding TCP server to 10.0.0.1:0", None),
        (stamped(1, "main.init: VllmWorker for m is up"), "main.init", "VllmWorker for m is up", None),
        (stamped(1, "http-request:kv_router.route_request: dynamo_kv_router::s: Selected worker worker_id=17172504481790508292"), "dynamo_kv_router::s", "Selected worker", "kv_router.route_request"),
    ],
)  # fmt: skip
def test_targets_spans_and_messages(line: str, target: str, message: str, span: str | None) -> None:
    _, fields = parse(line.encode())
    assert (fields["target"], fields["message"], fields.get("span_name")) == (target, message, span)


@pytest.mark.parametrize(
    "line", ["", "INFO 07-24 02:20:20 [core.py:1] x: y", "2026-07-24T02:20:20Z no level: x", "\x1b[2m"]
)  # fmt: skip
def test_other_lines_are_none_of_it(line: str) -> None:
    assert parse(line.encode()) is None


@pytest.mark.parametrize(
    ("front", "carried"),
    [
        ("worker-1  | ", True),
        ("[pod/info-0/main] 2026-07-24T02:20:21.1Z stdout F ", True),
        ("Jul 24 02:20:20 host dynamo.service[7]: ", True),
        ('2026-07-24T02:20:21Z {app="dynamo", pod="d-0"} ', True),
        ("INFO 07-24 02:20:20 [logger.py:42] Received request cmpl-x: prompt: 'say ", False),
        ("(EngineCore_0 pid=7) INFO 07-24 02:20:20 [core.py:1] say ", False),
        ("what would you say of a log that has this in it: ", False),
    ],
)
def test_a_line_that_another_writer_quotes_is_no_line(front: str, carried: bool) -> None:
    """A prompt that a vLLM log shows would be a request else."""
    told = parse(
        (front + stamped(20, f"{HTTP} completed {ASKED.format('a')} status=error")).encode()
    )
    assert (told is not None) == carried


def test_other_rust_programs_are_left_alone(tmp_path: Path) -> None:
    text = (
        "2025-11-04T10:05:37Z  INFO sglang_router_rs::server: src/server.rs:830: Starting router\n"
    )
    assert dynamo_log.sniff(Head("x", "x", text.encode(), complete=True)) is None
