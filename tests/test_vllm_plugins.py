"""What vLLM loads of pdtrace by entry point: inert unless asked for."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm as fake
import pytest
from recorded import Kept, attributes

import pdtrace
from pdtrace import instrumentation as pdt
from pdtrace.instrumentation import api, asgi, auto, uvicorn_server
from pdtrace.instrumentation.vllm import frontend, plugin


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PDTRACE_FOLDER", "PDTRACE_RUN", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    fake.install(monkeypatch)
    monkeypatch.setattr(asgi, "_served_as", [])
    monkeypatch.setattr(asgi, "_handed_on", [])
    yield
    uvicorn_server.uninstrument()
    pdtrace.uninstrument()


def stat_logger(**given: Any) -> Any:
    module = importlib.import_module("pdtrace.instrumentation.vllm.stats")
    return importlib.reload(module).PdtraceStatLogger(fake.config(**given), 0)


def stats(**details: Any) -> SimpleNamespace:
    known = {
        "iteration_index": 7, "num_ctx_requests": 1, "num_ctx_tokens": 500,
        "num_generation_requests": 3, "num_generation_tokens": 3, "elapsed_ms": 40.0, "is_dummy": False,
    }  # fmt: skip
    made = SimpleNamespace(**{**known, **details})
    return SimpleNamespace(
        iteration_details=made, num_running_reqs=4, num_waiting_reqs=1, num_skipped_waiting_reqs=2, kv_cache_usage=0.5,
    )  # fmt: skip


def test_the_general_plugin_does_nothing_until_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")  # meant for others
    plugin.load()
    assert not api.instrumented()
    monkeypatch.setenv("PDTRACE_FOLDER", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["vllm", "--scheduler-cls", "pdtrace.instrumentation.vllm.PdtraceScheduler"])  # fmt: skip
    plugin.load()
    plugin.load()  # vLLM may call it again
    assert api.instrumented()
    assert hasattr(uvicorn_server.uvicorn.Config.load, "__wrapped__")
    assert asgi._served_as == ["frontend"]
    assert asgi._handed_on == [frontend.handed_on]


def test_iteration_details_become_steps() -> None:
    kept = Kept()
    pdtrace.instrument(exporter=kept)
    logger = stat_logger()
    logger.record(stats(), None, mm_cache_stats=None, engine_idx=0)
    logger.record(stats(is_dummy=True), None)
    logger.record(None, None)
    logger.log()
    pdt.flush()
    (run,) = kept.named("pdtrace.steps")
    told = attributes(run)
    assert told["pdtrace.step.elapsed_ns"] == ["40000000"]
    assert told["pdtrace.step.prefill_tokens"] == ["500"]
    assert told["pdtrace.step.waiting"] == ["3"]
    assert "pdtrace.step.member.ids" not in told


def test_a_stat_logger_beside_our_scheduler_records_nothing_twice() -> None:
    kept = Kept()
    pdtrace.instrument(exporter=kept)
    ours = SimpleNamespace(scheduler_cls="pdtrace.instrumentation.vllm.PdtraceScheduler")
    logger = stat_logger(scheduler_config=ours)
    logger.record(stats(), None)
    logger.log()
    pdt.flush()
    assert not kept.requests
    assert asgi._served_as == ["frontend"]


def test_details_of_another_shape_are_told_once_and_left(caplog: pytest.LogCaptureFixture) -> None:
    pdtrace.instrument(exporter=Kept())
    logger = stat_logger()
    logger.record(SimpleNamespace(iteration_details=object()), None)
    logger.record(SimpleNamespace(iteration_details=object()), None)
    assert [r.message for r in caplog.records] == ["pdtrace: vLLM's iterations are not understood"]


def test_the_stat_logger_is_registered_under_pdtrace_run_only(tmp_path: Path) -> None:
    """vLLM keeps statistics for a custom stat logger even under --disable-log-stats."""
    assert "pdtrace" not in {e.name for e in entry_points(group="vllm.stat_logger_plugins")}
    code = "from importlib.metadata import entry_points as e; print([p.value for p in e(group='vllm.stat_logger_plugins')])"
    env = auto.environment(os.environ, str(tmp_path))
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)  # fmt: skip
    assert run.stdout.strip() == "['pdtrace.instrumentation.vllm:PdtraceStatLogger']"
