"""SGLang's plugin hooks: steps and phases of requests from what its scheduler processed; a stand-in of its objects.

Shapes as in sglang 0.5.23: ScheduleBatch and Req (managers/schedule_batch.py), ForwardMode
(model_executor/forward_batch_info.py), SchedulerReqTimeStats (observability/req_time_stats.py),
HookRegistry (plugins/hook_registry.py).
"""

from __future__ import annotations

import enum
import gc
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from recorded import Kept, attributes

import pdtrace
from pdtrace import instrumentation as pdt
from pdtrace.api import Trace
from pdtrace.instrumentation import _doors, api, asgi, engine_steps, requests, uvicorn_server
from pdtrace.instrumentation.files import OtlpFiles
from pdtrace.instrumentation.sglang import book, plugin

MS = 1_000_000


class Mode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    PREBUILT = 6

    def is_extend(self) -> bool:
        return self in (Mode.EXTEND, Mode.MIXED, Mode.TARGET_VERIFY)

    def is_decode(self) -> bool:
        return self == Mode.DECODE

    def is_idle(self) -> bool:
        return self == Mode.IDLE

    def is_target_verify(self) -> bool:
        return self == Mode.TARGET_VERIFY

    def is_prebuilt(self) -> bool:
        return self == Mode.PREBUILT


class Clock:
    def __init__(self) -> None:
        self.now = 5_000 * MS

    def __call__(self) -> int:
        return self.now

    @property
    def seconds(self) -> float:
        return self.now / 1e9


class Req:
    def __init__(self, rid: str, prompt: int, mode: str = "null", room: int | None = None, **stamps: float) -> None:  # fmt: skip
        self.rid, self.bootstrap_room = rid, room
        self.origin_input_ids = [1] * prompt
        self.output_ids: list[int] = []
        self.cached_tokens, self.retraction_count = 0, 0
        self.sampling_params = SimpleNamespace(max_new_tokens=8)
        self.finished_reason: Any = None
        self.time_stats = SimpleNamespace(disagg_mode=SimpleNamespace(value=mode), **stamps)

    def finished(self) -> bool:
        return self.finished_reason is not None

    def finish(self, kind: str) -> None:
        self.finished_reason = SimpleNamespace(to_json=lambda: {"type": kind})


def batch(mode: Mode, reqs: list[Req], launched: float, **given: Any) -> SimpleNamespace:
    return SimpleNamespace(forward_mode=mode, reqs=reqs, launch_ts=launched, **{"extend_lens": None, "prefix_lens": None, "decoding_reqs": None, **given})  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for room in (book, requests, engine_steps):
        monkeypatch.setattr(room, "perf_counter_ns", made)
    monkeypatch.setattr(book, "monotonic_ns", made)
    for room in (requests, engine_steps):
        monkeypatch.setattr(room, "time_ns", lambda: 1_796_000_000 * 1000 * MS + made.now)
    return made


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(plugin, "_books", {})
    monkeypatch.setattr(plugin, "_broken", [])
    return SimpleNamespace(tp_rank=0, server_args=SimpleNamespace(served_model_name="tiny"))


def step(
    scheduler: Any, clock: Clock, ms: float, mode: Mode, reqs: list[Req], **given: Any
) -> None:
    """A batch that is launched now and whose result is processed `ms` later."""
    launched = clock.seconds
    clock.now += int(ms * MS)
    assert plugin.processed(None, scheduler, batch(mode, reqs, launched, **given)) is None


def test_a_request_and_its_steps(kept: Kept, clock: Clock, scheduler: Any) -> None:
    a = Req("a", 600, wait_queue_entry_time=clock.seconds)
    clock.now += 5 * MS
    a.time_stats.forward_entry_time = clock.seconds
    step(scheduler, clock, 40, Mode.EXTEND, [a], extend_lens=[512], prefix_lens=[0])
    a.output_ids.append(7)
    step(scheduler, clock, 20, Mode.EXTEND, [a], extend_lens=[88], prefix_lens=[512])
    a.time_stats.prefill_finished_time = clock.seconds
    b = Req("b", 100, wait_queue_entry_time=clock.seconds, forward_entry_time=clock.seconds)
    a.output_ids.append(7)
    b.output_ids.append(7)
    b.finish("length")
    step(scheduler, clock, 30, Mode.MIXED, [b, a], extend_lens=[60, 1], prefix_lens=[40, 601], decoding_reqs=[a])  # fmt: skip
    a.output_ids += [7, 7]
    a.finish("stop")
    step(scheduler, clock, 10, Mode.TARGET_VERIFY, [a])
    step(scheduler, clock, 10, Mode.DECODE, [a])  # in flight when it ended
    pdt.flush()
    found = {r.attributes["request_id"]: r for r in kept.requests if r.attributes.get("request_id")}
    assert set(found) == {"a", "b"}
    one = found["a"]
    told = sorted((n, (s - one.start_ns) / MS, (e - one.start_ns) / MS) for n, s, e, *_ in one.phases)  # fmt: skip
    assert told == [
        ("decode", 65.0, 105.0),
        ("prefill_exec", 5.0, 45.0),
        ("prefill_exec", 45.0, 65.0),
        ("prefill_queue", 0.0, 5.0),
        ("prefill_wall", 5.0, 65.0),
    ]
    assert one.attributes["output_tokens"] == 4
    assert one.attributes["finish_reasons"] == ["stop"]
    run, late = (attributes(span) for span in kept.named("pdtrace.steps"))
    assert run["pdtrace.step.prefill_tokens"] == ["512", "88", "60", "0"]
    assert run["pdtrace.step.decode_tokens"] == ["0", "0", "1", "2"]
    assert [int(n) / MS for n in run["pdtrace.step.elapsed_ns"]] == [40, 20, 30, 10]
    assert late["pdtrace.step.decode_requests"] == ["0"]
    ids = [run["pdtrace.step.member.ids"][int(i)] for i in run["pdtrace.step.member.request"]]
    assert ids == ["a", "a", "b", "a"]


def test_prefill_and_decode_workers_meet_in_their_room(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # fmt: skip
    p = Req("p-uuid", 300, "prefill", 42, prefill_bootstrap_queue_entry_time=clock.seconds)
    d = Req("d-uuid", 300, "decode", 42, decode_prealloc_queue_entry_time=clock.seconds)
    for role in ("prefill", "decode"):
        monkeypatch.setattr(plugin, "_books", {})
        scheduler = SimpleNamespace(tp_rank=0)
        pdtrace.instrument(exporter=OtlpFiles(tmp_path, api.resource(role, role)))
        if role == "prefill":
            p.time_stats.wait_queue_entry_time = clock.seconds + 0.002
            p.time_stats.forward_entry_time = clock.seconds + 0.003
            clock.now += 3 * MS
            p.output_ids.append(7)
            step(scheduler, clock, 30, Mode.EXTEND, [p], extend_lens=[300], prefix_lens=[0])
            p.finish("length")
            p.time_stats.prefill_transfer_queue_entry_time = clock.seconds
            clock.now += 8 * MS
            p.time_stats.prefill_kv_transfer_finish_time = clock.seconds
            assert plugin.handed_over([p], scheduler) is None
        else:
            d.time_stats.decode_transfer_queue_entry_time = clock.seconds - 0.035
            d.time_stats.wait_queue_entry_time = clock.seconds
            d.time_stats.forward_entry_time = clock.seconds + 0.001
            d.output_ids.append(7)
            step(scheduler, clock, 1, Mode.PREBUILT, [d])
            for _ in range(3):
                d.output_ids.append(7)
                if len(d.output_ids) == 4:
                    d.finish("stop")
                step(scheduler, clock, 10, Mode.DECODE, [d])
        pdtrace.uninstrument()
    with Trace.read([tmp_path]) as trace:
        rows = trace.store.rows("SELECT request, role, bootstrap_room FROM legs ORDER BY role")
        assert [row[1:] for row in rows] == [("decode", "42"), ("prefill", "42")]
        assert rows[0][0] == rows[1][0]
        details = {row[0] for row in trace.store.rows("SELECT DISTINCT detail FROM phases")}
        assert {
            "kv_space_wait",
            "prefill_exec",
            "kv_transfer",
            "decode_queue",
            "decode_wall",
        } <= details
        assert trace.store.rows("SELECT sum(decode_tokens) FROM steps") == [(3,)]


def test_other_ranks_and_broken_shapes_cost_nothing(
    kept: Kept, scheduler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_doors, "_told", set())
    plugin.processed(None, SimpleNamespace(tp_rank=1), object())
    assert plugin.processed(None, scheduler, object()) is None
    plugin.processed(None, scheduler, object())
    plugin.handed_over([], scheduler)
    assert [r.message for r in caplog.records] == [
        "pdtrace: this SGLang is not understood; it is no longer recorded"
    ]


def test_recording_that_breaks_does_not_tell_of_aborts(
    kept: Kept, clock: Clock, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_doors, "_told", set())
    step(scheduler, clock, 5, Mode.EXTEND, [Req("a", 600)], extend_lens=[600])
    plugin.processed(None, scheduler, object())
    gc.collect()
    pdt.flush()
    assert not kept.named("pdtrace.request")


def test_hooks_are_registered_only_where_traces_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PDTRACE_FOLDER", "PDTRACE_RUN"):
        monkeypatch.delenv(name, raising=False)
    registered: list[tuple[str, str]] = []

    class HookRegistry:
        @classmethod
        def register(cls, target: str, hook: Any, hook_type: Any) -> None:
            registered.append((target.rpartition(".")[2], hook_type))

    monkeypatch.setattr(asgi, "_served_as", [])
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = sys.modules["sglang.srt.plugins.hook_registry"]
    module.HookRegistry, module.HookType = HookRegistry, SimpleNamespace(AFTER="after")
    plugin.load()
    assert registered == []
    monkeypatch.setenv("PDTRACE_FOLDER", str(tmp_path))
    plugin.load()
    uvicorn_server.uninstrument()
    pdtrace.uninstrument()
    assert registered == [
        ("process_batch_result", "after"),
        ("process_disagg_prefill_inflight_queue", "after"),
    ]
    assert asgi._served_as == ["frontend"]
