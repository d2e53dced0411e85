"""Marks in serving code become the right spans, whatever the code does; nothing of ours reaches the code."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from recorded import PARENT, SPAN, TRACE, Kept, attributes

import pdtrace
from pdtrace import instrumentation as pdt
from pdtrace.instrumentation import _context, api, encode
from pdtrace.instrumentation.recorder import Recorder, Sampling
from pdtrace.instrumentation.requests import Request


@pytest.fixture
def kept() -> Iterator[Kept]:
    exporter = Kept()
    pdtrace.instrument(service="test", role="aggregated", exporter=exporter)
    yield exporter
    pdtrace.uninstrument()


def test_a_request_is_a_server_span_with_its_phases_below_it(kept: Kept) -> None:
    with pdt.request({"TraceParent": PARENT}, model="m", prompt_tokens=3) as request:
        with request.phase("queue"):
            pass
        with request.phase("kv_space_wait", bytes=7):
            pass
        request.token()
        request.token(2)
    assert pdt.flush()
    (span,) = kept.named("pdtrace.request")
    assert (span["traceId"], span["parentSpanId"], span["kind"]) == (TRACE, SPAN, 2)
    said = attributes(span)
    assert said["gen_ai.request.model"] == "m"
    assert said["gen_ai.usage.input_tokens"] == "3"
    assert said["gen_ai.usage.output_tokens"] == "3"
    assert said["pdtrace.worker.role"] == "aggregated"
    assert said["pdtrace.token.counts"] == ["1", "2"]
    assert said["pdtrace.token.times_us"][0] == "0"
    assert len(said["pdtrace.token.times_us"]) == 2
    (queue,) = kept.named("pdtrace.queue")
    assert queue["parentSpanId"] == span["spanId"]
    (wait,) = kept.named("pdtrace.kv_transfer")
    assert attributes(wait) == {"pdtrace.kv.bytes": "7", "pdtrace.phase.detail": "kv_space_wait"}
    assert int(span["startTimeUnixNano"]) <= int(queue["startTimeUnixNano"])
    assert int(wait["endTimeUnixNano"]) <= int(span["endTimeUnixNano"])


def test_hops_carry_the_trace_on(kept: Kept) -> None:
    with pdt.request() as request, request.dispatch(attempt=1) as hop:
        headers = hop.inject({})
    pdt.flush()
    (dispatch,) = kept.named("pdtrace.dispatch")
    assert headers["traceparent"] == f"00-{request.trace_id}-{dispatch['spanId']}-01"
    assert dispatch["kind"] == 3
    assert attributes(dispatch) == {"pdtrace.attempt": "1"}


def test_links_choices_and_errors(kept: Kept) -> None:
    request = pdt.request()
    request.link(PARENT)
    request.link("nonsense")
    request.choice(0).token()
    request.choice(1).token()
    request.choice(1).token()
    request.end(ValueError("secret prompt"))
    request.end()
    pdt.flush()
    first, second = kept.named("pdtrace.request")
    assert first["links"] == [{"traceId": TRACE, "spanId": SPAN}]
    assert first["status"] == {"code": 2}
    assert attributes(first)["error.type"] == "ValueError"
    assert "secret" not in json.dumps(kept.spans, default=str)
    assert attributes(first)["gen_ai.usage.output_tokens"] == "1"
    assert attributes(second)["gen_ai.usage.output_tokens"] == "2"
    assert attributes(second)["pdtrace.stream.index"] == "1"


@pytest.mark.parametrize(
    ("kind", "aborted"), [(asyncio.CancelledError, True), (GeneratorExit, True), (OSError, False)]
)
def test_what_ends_a_request_is_told_and_goes_on(
    kept: Kept, kind: type[BaseException], aborted: bool
) -> None:
    with pytest.raises(kind), pdt.request():
        raise kind
    pdt.flush()
    (span,) = kept.named("pdtrace.request")
    said = attributes(span)
    assert said.get("pdtrace.aborted", False) is aborted
    assert said.get("error.type") == (None if aborted else "OSError")


def test_a_stream_that_nobody_finishes_is_an_abort(kept: Kept) -> None:
    def answer() -> Iterator[int]:
        with pdt.request() as request:
            for number in range(9):
                request.token()
                yield number

    stream = answer()
    next(stream)
    del stream
    dropped = pdt.request()
    del dropped
    gc.collect()
    pdt.flush()
    assert [attributes(s)["pdtrace.aborted"] for s in kept.named("pdtrace.request")] == [True] * 2


def test_phases_as_decorators_for_all_kinds_of_functions(kept: Kept) -> None:
    @pdt.phase("queue")
    def plain() -> int:
        return 1

    @pdt.phase("prefill", tokens=5)
    async def coroutine() -> int:
        await asyncio.sleep(0)
        return 2

    @pdt.phase("decode")
    def generator() -> Iterator[int]:
        yield 3

    @pdt.phase("decode")
    async def stream() -> Any:
        pdt.token()
        yield 4

    async def all_of_them() -> list[int]:
        async with pdt.request():
            return [plain(), await coroutine(), *generator(), *[n async for n in stream()]]

    assert asyncio.run(all_of_them()) == [1, 2, 3, 4]
    assert plain() == 1  # without a request: nothing
    pdt.flush()
    names = [span["name"] for span in kept.spans]
    assert sorted(names) == sorted(
        ["pdtrace.request", "pdtrace.queue", "pdtrace.prefill", "pdtrace.decode", "pdtrace.decode"]
    )
    assert attributes(kept.named("pdtrace.request")[0])["gen_ai.usage.output_tokens"] == "1"


def test_requests_of_concurrent_tasks_do_not_mix(kept: Kept) -> None:
    async def one(number: int) -> None:
        async with pdt.request(number=number):
            await asyncio.sleep(0)
            async with pdt.phase("queue", number=number):
                await asyncio.sleep(0)

    async def many() -> None:
        await asyncio.gather(*(one(number) for number in range(50)))

    asyncio.run(many())
    pdt.flush()
    owner = {s["spanId"]: attributes(s)["pdtrace.number"] for s in kept.named("pdtrace.request")}
    queues = kept.named("pdtrace.queue")
    assert len(owner) == len(queues) == 50
    assert all(owner[q["parentSpanId"]] == attributes(q)["pdtrace.number"] for q in queues)


@pytest.mark.parametrize(
    "header",
    ["", "00", "00-0-0-0", PARENT.replace(TRACE, "0" * 32), PARENT.replace(SPAN, "0" * 16), "ff" + PARENT[2:]],
)  # fmt: skip
def test_a_malformed_parent_is_no_parent(header: str) -> None:
    assert _context.parse(header) is None


def test_seeding_random_does_not_repeat_trace_ids() -> None:
    import random

    random.seed(1)
    first = _context.new_trace_id()
    random.seed(1)
    assert _context.new_trace_id() != first


def test_off_it_does_nothing_and_changes_no_headers() -> None:
    assert not pdt.instrumented()
    with pdt.request(model="m") as request:
        with request.phase("queue"), request.dispatch() as hop:
            assert hop.inject({}) == {}
        request.token()
    assert request.inject({"a": "b"}) == {"a": "b"}
    assert pdt.flush()
    assert pdt.dropped_requests() == 0


def test_a_second_instrument_warns_and_changes_nothing(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        pdtrace.instrument(exporter=Kept())
    assert "already instrumented" in caplog.text
    with pdt.request():
        pass
    pdt.flush()
    assert len(kept.requests) == 1


def finished(recorder: Recorder, **values: Any) -> Request:
    request = Request(recorder, values.pop("parent", None), values)
    request.end(values.get("failed"))
    return request


def test_slow_and_failed_requests_are_kept_whatever_the_ratio() -> None:
    recorder = Recorder(Kept)
    sampling = Sampling(ratio=0.0, slow_ms=100, slow_ttft_ms=50)
    fast, failed = finished(recorder), finished(recorder, failed="Boom")
    aborted = finished(recorder, aborted=True)
    slow, late = finished(recorder), finished(recorder)
    slow.end_ns = slow.start_ns + 100_000_000
    late.stream.times.append(late.start_ns + 50_000_000)
    assert [sampling.keeps(r) for r in (fast, failed, aborted, slow, late)] == [
        False, True, True, True, True,
    ]  # fmt: skip
    recorder.close()


def test_the_ratio_is_that_of_the_trace_id_so_all_processes_choose_alike() -> None:
    recorder = Recorder(Kept)
    half = Sampling(ratio=0.5)
    low = _context.Parent("f" * 16 + "7" + "f" * 15, SPAN, sampled=True)
    high = _context.Parent("0" * 16 + "8" + "0" * 15, SPAN, sampled=True)
    assert half.keeps(finished(recorder, parent=low))
    assert not half.keeps(finished(recorder, parent=high))
    assert not half.keeps(finished(recorder, parent=low._replace(sampled=False)))
    recorder.close()


def test_an_exporter_that_hangs_costs_requests_not_time() -> None:
    hold = threading.Event()

    class Hangs(Kept):
        def export(self, requests: Sequence[Request], dropped: int) -> None:
            hold.wait()
            super().export(requests, dropped)

    exporter = Hangs()
    recorder = Recorder(lambda: exporter, queue_requests=10, interval_s=0.001)
    for _ in range(300):
        finished(recorder)
    assert not recorder.flush(0.05)
    assert recorder.dropped > 0
    hold.set()
    recorder.close()
    assert len(exporter.requests) + recorder.dropped == 300


def test_an_exporter_that_breaks_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(Kept):
        def export(self, requests: Sequence[Request], dropped: int) -> None:
            raise OSError("disk full")

    recorder = Recorder(Breaks)
    for _ in range(3):
        finished(recorder)
        recorder.flush()
    recorder.close()
    assert recorder.dropped == 3
    assert caplog.text.count("disk full") == 1


def test_values_that_otlp_does_not_know_are_text(kept: Kept) -> None:
    with pdt.request(big=2**70, bad=float("nan"), many=(1, "a"), thing={"a": 1}, nothing=None):
        pass
    pdt.flush()
    (span,) = kept.spans
    said = attributes(span)
    assert said["pdtrace.big"] == str(2**70)
    assert said["pdtrace.bad"] == "NaN"
    assert said["pdtrace.thing"] == "{'a': 1}"
    assert "pdtrace.nothing" not in said
    json.dumps(span, allow_nan=False, default=str)


def test_token_times_are_bounded(kept: Kept) -> None:
    with pdt.request() as request:
        request.stream.times.extend(range(encode.MAX_EMISSIONS + 5))
    pdt.flush()
    (span,) = kept.named("pdtrace.request")
    said = attributes(span)
    assert len(said["pdtrace.token.times_us"]) == encode.MAX_EMISSIONS
    assert said["gen_ai.usage.output_tokens"] == str(encode.MAX_EMISSIONS + 5)


def test_what_is_no_number_of_tokens_counts_as_one(kept: Kept) -> None:
    with pdt.request() as request:
        request.token()
        request.token("many")  # type: ignore[arg-type]
        request.token(3)
    pdt.flush()
    (span,) = kept.named("pdtrace.request")
    assert attributes(span)["pdtrace.token.counts"] == ["1", "1", "3"]


def test_instrument_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    pdtrace.instrument(object())  # type: ignore[arg-type]
    assert not pdt.instrumented()
    assert "not instrumented" in caplog.text


def files(folder: Path) -> list[dict[str, Any]]:
    """All messages below a folder."""
    paths = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_files_are_rotated_and_old_ones_removed(tmp_path: Path) -> None:
    from pdtrace.instrumentation.files import OtlpFiles

    exporter = OtlpFiles(tmp_path, {"service.name": "a/b c"}, rotate_bytes=1, keep_files=3)
    recorder = Recorder(lambda: exporter)
    for _ in range(5):
        finished(recorder)
        recorder.flush()
    recorder.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3
    assert all(name.startswith("a_b_c-") for name in names)
    assert names[-1].endswith("0004.otlp.jsonl")


PROGRAM = """
import os, sys
import pdtrace
from pdtrace import instrumentation as pdt
pdtrace.instrument({folder!r}, service="forks", role="decode")
with pdt.request(number=0):
    pass
child = os.fork()
with pdt.request(number=1 if child else 2):
    pass
if child:
    os.waitpid(child, 0)
loaded = {{"duckdb", "polars", "altair", "pyarrow"}} & set(sys.modules)
assert not loaded, loaded
"""


def test_a_forked_worker_writes_its_own_file_and_nothing_twice(tmp_path: Path) -> None:
    folder = str(tmp_path / "traces")
    code = PROGRAM.format(folder=folder)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.stderr == ""
    messages = files(Path(folder))
    numbers = [
        attributes(span)["pdtrace.number"]
        for message in messages
        for span in message["resourceSpans"][0]["scopeSpans"][0]["spans"]
    ]
    assert sorted(numbers) == ["0", "1", "2"]
    pids = {
        attributes(message["resourceSpans"][0]["resource"])["process.pid"] for message in messages
    }
    assert len(pids) == 2


def test_what_is_written_is_diagnosed(tmp_path: Path) -> None:
    from pdtrace.api import Trace

    exporter = pdt_files(tmp_path)
    pdtrace.instrument(role="aggregated", exporter=exporter)
    for number in range(3):
        with pdt.request(request_id=f"r{number}", model="m", prompt_tokens=10) as request:
            with request.phase("queue"):
                pass
            with request.phase("prefill"):
                pass
            with request.phase("decode"):
                for _ in range(2000):  # a long stream: its times are no prompt text
                    request.token()
    pdtrace.uninstrument()
    with Trace.read([tmp_path]) as trace:
        rows = trace.sql("SELECT output_tokens, model, outcome FROM requests").rows()
        assert rows == [(2000, "m", "completed")] * 3
        assert trace.sql("SELECT max(len(gaps_us)) FROM streams").item() == 1999
        assert set(trace.phases()["phase"]) >= {"queue", "prefill", "decode"}
        uneven = "SELECT count(*) FROM (SELECT request FROM phases JOIN requests r USING (request) GROUP BY request, r.start_ns, r.end_ns HAVING sum(phases.end_ns - phases.start_ns) <> r.end_ns - r.start_ns)"
        assert trace.sql(uneven).item() == 0


def pdt_files(folder: Path) -> Any:
    from pdtrace.instrumentation.files import OtlpFiles

    return OtlpFiles(folder, api.resource("test", "aggregated"))


@pytest.mark.parametrize("ratio", ["many", "nan"])
def test_the_environment_sets_what_the_call_leaves_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ratio: str
) -> None:
    monkeypatch.setenv("PDTRACE_FOLDER", str(tmp_path / "there"))
    monkeypatch.setenv("PDTRACE_ROLE", "prefill")
    monkeypatch.setenv("PDTRACE_RATIO", ratio)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=p0,broken")
    pdtrace.instrument()
    with pdt.request():
        pass
    pdtrace.uninstrument()
    (message,) = files(tmp_path / "there")
    said = attributes(message["resourceSpans"][0]["resource"])
    assert said["service.name"] == "mine"
    assert said["k8s.pod.name"] == "p0"
    assert said["pdtrace.worker.role"] == "prefill"
    assert said["process.pid"] == str(os.getpid())


@pytest.mark.parametrize("fast", [True, False], ids=["orjson", "standard library"])
def test_lines_are_the_same_with_and_without_orjson(
    fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdtrace.instrumentation import files as room

    if not fast:
        monkeypatch.setattr(room, "_fast", None)
    exporter = room.OtlpFiles(tmp_path, {})
    recorder = Recorder(lambda: exporter)
    request = Request(recorder, None, {})
    request.stream.times.extend([10_000, 13_000])
    request.end()
    recorder.close()
    (message,) = files(tmp_path)
    (span,) = message["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert attributes(span)["pdtrace.token.times_us"] == ["0", "3"]
