"""vLLM's scheduler as a recorded subclass: steps, members and phases of requests, for three versions' shapes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm as fake
import pytest
from recorded import PARENT, SPAN, TRACE, Kept, attributes

import pdtrace
from pdtrace import instrumentation as pdt
from pdtrace.api import Trace
from pdtrace.instrumentation import _doors, api, asgi, engine_steps, requests
from pdtrace.instrumentation import vllm as door
from pdtrace.instrumentation.files import OtlpFiles
from pdtrace.instrumentation.request_ids import of_answer, of_vllm_engine
from pdtrace.instrumentation.vllm import book, frontend, scheduler

MS = 1_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> fake.Clock:
    made = fake.Clock()
    for room in (book, scheduler, requests, engine_steps):
        monkeypatch.setattr(room, "perf_counter_ns", made)
    for room in (requests, engine_steps):
        monkeypatch.setattr(room, "time_ns", lambda: 1_796_000_000 * 1000 * MS + made.now)
    return made


@pytest.fixture(params=["0.8", "0.10", "0.33"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    fake.install(monkeypatch, request.param)
    return str(request.param)


def made(**given: Any) -> Any:
    """The scheduler as vLLM makes it: by keyword, from a class that it found by name."""
    return door.PdtraceScheduler(vllm_config=fake.config(**given), log_stats=True)


def internal(external: str, version: str) -> str:
    return f"{external}-0badcafe" if version == "0.33" else external


def phases(kept: Kept, request_id: str) -> list[tuple[str, float, float]]:
    """(detail, start, end) of a request's phases in ms since its start, in order."""
    pdt.flush()
    (found,) = [r for r in kept.requests if r.attributes.get("request_id") == request_id]
    return sorted(
        ((name, (a - found.start_ns) / MS, (b - found.start_ns) / MS) for name, a, b, *_ in found.phases),
        key=lambda phase: (phase[1], phase[2]),
    )  # fmt: skip


def span(kept: Kept, request_id: str) -> dict[str, Any]:
    pdt.flush()
    spans = [s for s in kept.named("pdtrace.request") if attributes(s).get("pdtrace.request.id") == request_id]  # fmt: skip
    assert len(spans) == 1
    return attributes(spans[0])


def steps(kept: Kept) -> list[dict[str, Any]]:
    pdt.flush()
    return [attributes(run) for run in kept.named("pdtrace.steps")]


def test_a_request_from_queue_to_last_token(kept: Kept, clock: fake.Clock, version: str) -> None:
    mine = made()
    engine = fake.Engine(mine, clock)
    name = internal("chatcmpl-abc", version)
    mine.add_request(fake.Request(name, 600, 3, trace_headers={"traceparent": PARENT}))
    clock.pass_ms(5)  # the loop was elsewhere
    engine.run()
    # chunks of 512 and 88 tokens, each after 1 ms of scheduling; then two more tokens
    assert phases(kept, "abc") == [
        ("prefill_queue", 0.0, 5.0),
        ("prefill_exec", 5.0, 67.2),
        ("prefill_gap", 5.0, 87.0),
        ("prefill_exec", 67.2, 87.0),
        ("decode", 87.0, 109.0),
    ]
    told = span(kept, "abc")
    assert told["pdtrace.request.engine_id"] == name
    assert told["pdtrace.worker.role"] == "aggregated"
    assert told["gen_ai.request.model"] == "tiny"
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == ("600", "3")
    assert told["gen_ai.usage.cache_read.input_tokens"] == "0"
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["pdtrace.token.times_us"] == ["0", "11000", "22000"]
    (request,) = kept.named("pdtrace.request")
    assert (request["traceId"], request["parentSpanId"]) == (TRACE, SPAN)
    chunks = [attributes(s).get("pdtrace.phase.tokens") for s in kept.named("pdtrace.prefill")]
    assert [c for c in chunks if c] == ["512", "88"]
    assert not mine._pdtrace.decoding


def test_steps_say_what_was_in_them(kept: Kept, clock: fake.Clock, version: str) -> None:
    mine = made()
    engine = fake.Engine(mine, clock)
    a, b = internal("cmpl-a-0", version), internal("cmpl-b-0", version)
    mine.add_request(fake.Request(a, 100, 4))
    engine.step()
    engine.step()
    mine.add_request(fake.Request(b, 200, 1))
    engine.run()
    (run,) = steps(kept)
    assert run["pdtrace.step.prefill_requests"] == ["1", "0", "1", "0"]
    assert run["pdtrace.step.prefill_tokens"] == ["100", "0", "200", "0"]
    assert run["pdtrace.step.decode_requests"] == ["0", "1", "1", "1"]
    assert run["pdtrace.step.decode_tokens"] == ["0", "1", "1", "1"]
    assert run["pdtrace.step.decode_kv_tokens"] == ["0", "100", "101", "102"]
    assert run["pdtrace.step.running"] == ["1", "1", "2", "1"]
    assert run["pdtrace.step.kv_usage_ratio"] == [0.25] * 4
    assert [int(n) / MS for n in run["pdtrace.step.elapsed_ns"]] == [21, 11, 31, 11]
    # who decoded is told where a prompt was beside them
    ids = [run["pdtrace.step.member.ids"][int(i)] for i in run["pdtrace.step.member.request"]]
    rows = list(zip(run["pdtrace.step.member.step"], ids, run["pdtrace.step.member.prefill_tokens"],
                    run["pdtrace.step.member.decode_tokens"], run["pdtrace.step.member.context_tokens"],
                    strict=True))  # fmt: skip
    assert rows == [("0", a, "100", "0", "0"), ("2", b, "200", "0", "0"), ("2", a, "0", "1", "101")]


def test_batches_in_flight_come_back_in_order(kept: Kept, clock: fake.Clock, version: str) -> None:
    mine = made(scheduler_config=SimpleNamespace(async_scheduling=True))
    assert isinstance(mine, fake.AsyncScheduler)
    engine = fake.Engine(mine, clock, in_flight=2)
    mine.add_request(fake.Request(internal("chatcmpl-x", version), 100, 5))
    engine.run()
    assert phases(kept, "x") == [
        ("prefill_queue", 0.0, 0.0),
        ("prefill_exec", 0.0, 21.0),
        ("decode", 21.0, 61.0),
    ]
    elapsed = [int(n) / MS for run in steps(kept) for n in run["pdtrace.step.elapsed_ns"]]
    assert elapsed[:5] == [21, 10, 10, 10, 10]  # scheduling is hidden behind the step before


def test_a_preempted_request_is_put_off_and_computed_again(
    kept: Kept, clock: fake.Clock, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake.Scheduler, "kv_tokens", 203)
    mine = made()
    engine = fake.Engine(mine, clock)
    mine.add_request(fake.Request(internal("chatcmpl-a", version), 100, 6))
    mine.add_request(fake.Request(internal("chatcmpl-b", version), 100, 6))
    engine.run()
    names = [name for name, *_ in phases(kept, "b")]
    assert "preempted" in names
    assert "prefill_recompute" in names
    told = span(kept, "b")
    assert told["pdtrace.request.preemptions"] == "1"
    assert told["gen_ai.usage.output_tokens"] == "6"
    put_off = {name: (a, b) for name, a, b in phases(kept, "b")}
    assert put_off["preempted"][1] == put_off["prefill_recompute"][0]
    recomputed = sum(int(n) for run in steps(kept) for n in run["pdtrace.step.prefill_tokens"])
    assert recomputed == 200 + 103  # the prompt and three tokens once more
    assert "pdtrace.request.preemptions" not in span(kept, "a")


def test_kv_from_a_prefill_worker(kept: Kept, clock: fake.Clock, version: str) -> None:
    transfer = SimpleNamespace(kv_role="kv_consumer", kv_connector="NixlConnector")
    mine = made(kv_transfer_config=transfer, connector=lambda request: True)
    engine = fake.Engine(mine, clock)
    name = internal("cmpl-q-0", version)
    wanted = {"do_remote_prefill": True, "remote_request_id": "cmpl-q-0-feedbeef", "remote_engine_id": "p0"}  # fmt: skip
    mine.add_request(fake.Request(name, 400, 2, kv_transfer_params=wanted))
    clock.pass_ms(2)
    engine.arrivals[name] = clock.now + 3 * MS
    engine.run()
    assert phases(kept, "q") == [
        ("bridge_wait", 0.0, 2.0),
        ("kv_transfer", 2.0, 5.0),
        ("decode_queue", 5.0, 5.0),
        ("decode_exec", 5.0, 16.1),
        ("decode", 16.1, 27.1),
    ]
    told = span(kept, "q")
    assert told["pdtrace.worker.role"] == "decode"
    assert told["pdtrace.request.remote_id"] == "cmpl-q-0-feedbeef"
    assert (
        "gen_ai.usage.cache_read.input_tokens" not in told
    )  # KV of a prefill worker is no cache hit
    (run,) = steps(kept)
    assert run["pdtrace.step.prefill_tokens"] == ["0", "0"]  # taking over KV is no prefill
    assert run["pdtrace.step.decode_requests"] == ["1", "1"]
    moved = [attributes(s) for s in kept.named("pdtrace.kv_transfer")]
    assert [m.get("pdtrace.kv.source") for m in moved] == [None, "p0"]
    assert moved[1]["pdtrace.kv.backend"] == "NixlConnector"


def test_kv_that_does_not_arrive_is_a_failed_transfer(kept: Kept, clock: fake.Clock, version: str) -> None:  # fmt: skip
    transfer = SimpleNamespace(kv_role="kv_consumer", kv_connector="NixlConnector")
    tried: set[str] = set()

    def once(request: fake.Request) -> bool:
        first = request.request_id not in tried
        tried.add(request.request_id)
        return first

    mine = made(kv_transfer_config=transfer, connector=once)
    engine = fake.Engine(mine, clock)
    name = internal("chatcmpl-f", version)
    mine.add_request(fake.Request(name, 100, 2))
    engine.arrivals[name], engine.failures = clock.now, {name}
    engine.run()
    names = [phase for phase, *_ in phases(kept, "f")]
    assert names == ["bridge_wait", "kv_transfer", "prefill_queue", "prefill_exec", "decode"]
    moved = [attributes(s).get("error.type") for s in kept.named("pdtrace.kv_transfer")]
    assert moved == [None, "kv_load_failed"]


@pytest.mark.parametrize(
    ("stop", "aborted", "reason"), [(None, True, "abort"), (["\n"], None, "abort_or_stop")]
)
def test_what_is_ended_from_outside(
    kept: Kept, clock: fake.Clock, version: str, stop: Any, aborted: Any, reason: str
) -> None:
    mine = made()
    engine = fake.Engine(mine, clock)
    name = internal("chatcmpl-gone", version)
    mine.add_request(fake.Request(name, 100, 50, stop=stop))
    engine.step()
    mine.finish_requests((i for i in [name, "unknown"]), fake.RequestStatus.FINISHED_ABORTED)
    told = span(kept, "gone")
    assert told.get("pdtrace.aborted") is aborted  # a stop string and a client that left look alike
    assert told["gen_ai.response.finish_reasons"] == [reason]
    assert not mine.requests
    assert mine.shutdown() is None
    assert mine.is_down is (version != "0.8")  # which has no such method


def test_several_tokens_at_once(
    kept: Kept, clock: fake.Clock, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake.Scheduler, "drafts", 2)
    mine = made()
    mine.add_request(fake.Request(internal("chatcmpl-s", version), 100, 7))
    fake.Engine(mine, clock).run()
    told = span(kept, "s")
    assert told["pdtrace.token.counts"] == ["1", "3", "3"]
    assert told["gen_ai.usage.output_tokens"] == "7"
    (run,) = steps(kept)
    assert run["pdtrace.step.decode_tokens"] == ["0", "3", "3"]


def test_a_version_that_is_not_understood_runs_on_unrecorded(
    kept: Kept, clock: fake.Clock, version: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(_doors, "_told", set())
    mine = made()
    engine = fake.Engine(mine, clock)
    mine.add_request(fake.Request("chatcmpl-a", 100, 3))
    monkeypatch.setattr(book, "Contexts", lambda output: output.no_such_thing)
    with caplog.at_level(logging.WARNING):
        engine.run()
    assert [r.message for r in caplog.records] == [
        "pdtrace: this vLLM is not understood; it is no longer recorded"
    ]
    assert mine._pdtrace is None
    pdt.flush()
    assert not kept.requests  # not told rather than told wrongly


@pytest.mark.parametrize("method", ["schedule", "finish_requests"])
def test_what_breaks_inside_a_call_does_not_reach_the_engine(
    kept: Kept, clock: fake.Clock, version: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = made()
    mine.add_request(fake.Request("chatcmpl-a", 100, 3))
    theirs = getattr(type(mine).__mro__[2], method)

    def breaking(self: Any, *args: Any) -> Any:
        self._pdtrace = None  # as after a call of its own that was not understood
        return theirs(self, *args)

    monkeypatch.setattr(type(mine).__mro__[2], method, breaking)
    if method == "schedule":
        assert mine.schedule() is not None
    else:
        mine.finish_requests(["chatcmpl-a"], fake.RequestStatus.FINISHED_ABORTED)


def test_what_vllm_forgets_without_telling_takes_no_memory(
    kept: Kept, clock: fake.Clock, version: str
) -> None:
    mine = made()
    engine = fake.Engine(mine, clock)
    mine.add_request(fake.Request(internal("chatcmpl-lost", version), 100, 50))
    mine.add_request(fake.Request(internal("chatcmpl-here", version), 100, 3))
    engine.step()
    mine._free(mine.requests[internal("chatcmpl-lost", version)])
    clock.pass_ms(11_000)
    engine.run()
    assert span(kept, "lost")["gen_ai.response.finish_reasons"] == ["unknown"]
    assert not mine._pdtrace.decoding


def test_inert_unless_switched_on(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for name in ("PDTRACE_FOLDER", "PDTRACE_RUN", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_doors, "_told", {"pdtrace: nothing is recorded; set PDTRACE_FOLDER or OTEL_EXPORTER_OTLP_ENDPOINT"})  # fmt: skip
    mine = made()
    mine.add_request(fake.Request("chatcmpl-a", 100, 3))
    fake.Engine(mine, fake.Clock()).run()
    assert mine._pdtrace is None
    assert not api.instrumented()


def test_the_scheduler_of_somebody_else_is_wrapped_on_request(monkeypatch: pytest.MonkeyPatch, version: str) -> None:  # fmt: skip
    monkeypatch.setenv(
        "PDTRACE_VLLM_SCHEDULER", "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
    )
    assert issubclass(type(made()), fake.AsyncScheduler)
    assert type(made()) is type(made())


@pytest.mark.parametrize(
    ("engine_id", "randomised", "expected"),
    [
        ("chatcmpl-abc-0badcafe", True, ("abc", None)),
        ("cmpl-mixed-0-0-0badcafe", True, ("mixed-0", None)),
        ("cmpl-abc-1-0badcafe", True, ("abc-1", None)),
        ("1_chatcmpl-abc-0badcafe", True, ("abc", 1)),
        ("chatcmpl-abc-0badcafe", False, ("abc-0badcafe", None)),
        ("my-own", True, ("my-own", None)),
        ("2_own", True, ("2_own", None)),
    ],
)
def test_the_id_that_travels(engine_id: str, randomised: bool, expected: tuple[str, Any]) -> None:
    assert of_vllm_engine(engine_id, randomised=randomised) == expected


def test_answers_bear_the_same_id() -> None:
    assert [of_answer(i) for i in ("chatcmpl-abc", "cmpl-mixed-0", "resp_1", "x", "cmpl-")] == [
        "abc", "mixed-0", "1", "x", "cmpl-",
    ]  # fmt: skip


def test_two_workers_and_their_router_are_one_request(
    clock: fake.Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """P and D keep their own internal ids; the travelling id and D's reference to P's join them."""
    fake.install(monkeypatch)
    ids = {"prefill": "cmpl-abc-0-11111111", "decode": "cmpl-abc-0-22222222"}
    for role, transfer in (
        ("prefill", {"do_remote_decode": True}),
        ("decode", {"do_remote_prefill": True, "remote_request_id": ids["prefill"]}),
    ):
        exporter = OtlpFiles(tmp_path, api.resource(role, role))
        pdtrace.instrument(exporter=exporter)
        both = SimpleNamespace(kv_role="kv_both", kv_connector="NixlConnector")
        mine = made(
            kv_transfer_config=both, connector=(lambda request: True) if role == "decode" else None
        )
        engine = fake.Engine(mine, clock)
        mine.add_request(fake.Request(ids[role], 300, 1 if role == "prefill" else 5, kv_transfer_params=transfer))  # fmt: skip
        if role == "decode":
            engine.arrivals[ids[role]] = clock.now + 4 * MS
        engine.run()
        pdtrace.uninstrument()
    with Trace.read([tmp_path]) as trace:
        rows = trace.store.rows("SELECT request, role, remote_id FROM legs ORDER BY role")
        assert [row[1:] for row in rows] == [("decode", ids["prefill"]), ("prefill", None)]
        assert rows[0][0] == rows[1][0]
        details = dict(trace.store.rows("SELECT detail, round(sum(end_ns - start_ns) / 1e6, 1) FROM phases GROUP BY detail"))  # fmt: skip
        assert {"prefill_exec", "kv_transfer", "decode_exec", "decode_wall"} <= set(details)
        assert (
            details["decode_exec"] == 11.1
        )  # the step that took the KV over and made the first token
        members = trace.store.rows(
            "SELECT request_id, prefill_tokens, decode_tokens FROM step_members ORDER BY ALL"
        )
        assert members == [(ids["prefill"], 300, 0), (ids["decode"], 0, 1)]


async def ask(app: Any, headers: list[tuple[bytes, bytes]], answer: bytes) -> dict[str, Any]:
    """One call through vLLM's middleware; the scope that vLLM's application got."""
    seen: dict[str, Any] = {}

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)
        await receive()
        kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        await send({"type": "http.response.body", "body": answer})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"model": "tiny"}'}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    await app(vllm)(scope, receive, send)
    assert sent[-1]["body"] == answer
    return seen


@pytest.mark.parametrize("named", [True, False])
def test_the_api_server_and_its_engine_are_one_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool
) -> None:
    """Without X-Request-Id vLLM makes an id of its own: the answer tells it."""
    fake.install(monkeypatch)
    middleware = door.PdtraceMiddleware
    pdtrace.instrument(exporter=OtlpFiles(tmp_path, api.resource("api")))
    headers = [(b"x-request-id", b"abc")] if named else []
    seen = asyncio.run(ask(middleware, headers, b'{"id": "chatcmpl-abc", "choices": []}'))
    assert seen["headers"] == headers  # vLLM warns of trace contexts where it does not trace
    pdtrace.uninstrument()
    pdtrace.instrument(exporter=OtlpFiles(tmp_path, api.resource("engine")))
    mine = made()
    mine.add_request(fake.Request("chatcmpl-abc-0badcafe", 300, 5))
    fake.Engine(mine, fake.Clock()).run()
    pdtrace.uninstrument()
    with Trace.read([tmp_path]) as trace:
        rows = trace.store.rows("SELECT request, observer, role FROM legs ORDER BY role")
        assert [row[1:] for row in rows] == [("engine", "aggregated"), ("frontend", "frontend")]
        assert rows[0][0] == rows[1][0]
        assert trace.store.rows("SELECT DISTINCT rule FROM identity_edges") == [
            ("engine_request_id",)
        ]


def test_the_engine_hangs_below_the_api_server_where_vllm_passes_trace_headers_on(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    middleware = door.PdtraceMiddleware
    answer = b'{"id": "chatcmpl-abc"}'
    seen = asyncio.run(ask(middleware, [(b"traceparent", PARENT.encode())], answer))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
    root = asyncio.run(ask(middleware, [], answer))
    pdt.flush()
    for span, scope in zip(kept.named("pdtrace.request"), (seen, root), strict=True):
        told = dict(scope["headers"])[b"traceparent"].decode()
        assert told.split("-")[1:3] == [span["traceId"], span["spanId"]]
    assert kept.requests[0].trace_id == TRACE


@pytest.mark.parametrize("told_by", ["plugin", "--middleware", "both"])
def test_under_a_second_middleware_the_engine_hangs_below_the_one_span(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, told_by: str
) -> None:
    """Where pdtrace is installed beside vLLM its plugin wraps the server too, around `--middleware`."""
    monkeypatch.setattr(asgi, "_handed_on", [])
    if told_by != "--middleware":
        asgi.hand_on(frontend.handed_on)

    def both(app: asgi.App) -> asgi.App:
        return asgi.PdtraceMiddleware(app if told_by == "plugin" else door.PdtraceMiddleware(app))

    seen = asyncio.run(ask(both, [(b"traceparent", PARENT.encode())], b'{"id": "chatcmpl-abc"}'))
    pdt.flush()
    (span,) = kept.named("pdtrace.request")
    headers = [value.decode() for name, value in seen["headers"] if name == b"traceparent"]
    assert headers == [f"00-{TRACE}-{span['spanId']}-01"]
