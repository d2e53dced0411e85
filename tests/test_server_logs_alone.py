"""A vLLM log as most people have it: no request lines, only periodic lines and access lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from pdtrace.api import Trace
from pdtrace.collectors import vllm_log
from pdtrace.coverage import calls
from pdtrace.diagnosis import Deployment
from pdtrace.phrases import facts_line

STATS = (
    "(APIServer pid=7) INFO 06-01 12:00:{} [loggers.py:271] Engine 000: Avg prompt throughput: {}.0 tokens/s, "
    "Avg generation throughput: {}.0 tokens/s, Running: {} reqs, Waiting: {} reqs, GPU KV cache usage: {}%, Prefix cache hit rate: 40.0%"
)
DRAFTS = (
    "(APIServer pid=7) INFO 06-01 12:00:20 [metrics.py:96] SpecDecoding metrics: Mean acceptance length: 3.00, Accepted throughput: 20.00 tokens/s, "
    "Drafted throughput: 40.00 tokens/s, Accepted: 200 tokens, Drafted: 400 tokens, Per-position acceptance rate: 0.700, 0.300, Avg Draft acceptance rate: 50.0%"
)
WELL = '(APIServer pid=7) INFO:     10.0.0.7:4123 - "POST /v1/completions HTTP/1.1" 200 OK'
REFUSED = WELL.replace("200 OK", "400 Bad Request")
QUIET = [STATS.format(10, 100, 50, 2, 0, 5.0), STATS.format(20, 300, 150, 4, 0, 7.0)]


def only(tmp_path: Path, *lines: str) -> Deployment:
    """The one deployment that these lines tell of; what it lacks, and the switch for it, is said."""
    (tmp_path / "vllm.log").write_text("\n".join(lines) + "\n", "utf-8")
    said = Trace.read([tmp_path / "vllm.log"]).diagnose()
    schema = json.loads((files("pdtrace.schemas") / "diagnosis.schema.json").read_text("utf-8"))
    jsonschema.validate(json.loads(json.dumps(said.to_dict())), schema)
    (deployment,) = said.deployments
    told = [line for line in said.unknown if line.startswith("single requests: none. To add: ")]
    assert len(told) == (deployment.requests["count"] == 0)
    return deployment


def figure(deployment: Deployment, name: str) -> tuple[float, float, str]:
    row = next(row for row in deployment.figures if row["name"].endswith(name))
    return row["mean"], row["high"], row["unit"]


def test_throughputs_drafts_and_an_empty_queue_stand_with_the_gauges(tmp_path: Path) -> None:
    said = only(tmp_path, *QUIET, DRAFTS, WELL, WELL)
    assert figure(said, "avg_prompt_throughput_toks_per_s") == (200, 300, "tokens/s")
    assert figure(said, "avg_generation_throughput_toks_per_s") == (100, 150, "tokens/s")
    assert figure(said, "num_requests_waiting") == (0, 0, "")  # that none waited is an answer
    assert figure(said, "prefix_cache_hit_rate") == (0.4, 0.4, "1")
    assert figure(said, "mean_acceptance_length") == (3, 3, "")
    assert figure(said, "avg_draft_acceptance_rate") == (0.5, 0.5, "1")
    assert said.calls == {"answered": 2, "failed": 0, "whole_log": False}
    assert said.verdict.startswith("No single request is known, only gauges")
    assert "2 calls in the access lines, 0 with an error" in facts_line(said)


def test_refused_requests_alone_do_not_read_as_if_all_had_failed(tmp_path: Path) -> None:
    said = only(tmp_path, *QUIET, *[WELL] * 8, REFUSED, REFUSED)
    assert said.requests["count"] == said.requests["failed"] == 2
    assert said.verdict.startswith("2 failed of 10 calls (HTTP 400: 2).")
    assert "names no request that went well" in said.verdict and said.figures
    assert "10 calls in the access lines, 2 with an error" in facts_line(said)


def test_calls_are_told_only_where_they_are_more_than_the_requests() -> None:
    told = [{"key": "http_calls", "value": "3"}, {"key": "http_calls_failed", "value": "1"}]
    assert calls(told, {"count": 3}) is None and calls([], {"count": 0}) is None
    assert calls(told, {"count": 2}) == {"answered": 3, "failed": 1, "whole_log": False}


STOP = "(APIServer pid=7) INFO 06-01 12:00:30 [launcher.py:100] [shutdown] API server: shutdown triggered"
OLD_STOP = (
    "(APIServer pid=7) INFO 06-01 12:00:30 [launcher.py:110] Shutting down FastAPI HTTP server."
)
GONE = "(APIServer pid=7) ERROR 06-01 12:00:31 [async_llm.py:704] {}"
ENDED = [
    GONE.format("AsyncLLM output_handler failed."),
    GONE.format("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."),
]


@pytest.fixture
def events(collect, tmp_path: Path) -> Callable[..., list[str]]:
    """What the events of these lines say."""

    def read(*lines: str) -> list[str]:
        (tmp_path / "vllm.log").write_text("\n".join(lines) + "\n", "utf-8")
        return collect(vllm_log, tmp_path / "vllm.log")["events"]["detail"].to_list()

    return read


LOST = GONE.format("torch.OutOfMemoryError: CUDA out of memory.")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([STOP, *ENDED], []), ([OLD_STOP, *ENDED], []), ([STOP, LOST], ["out of memory"]),
        ([ENDED[0], STOP, ENDED[1]], ["engine died"]),  # what is logged before the stop is why it stopped
    ],
)  # fmt: skip
def test_a_server_told_to_stop_did_not_fail(events, lines: list[str], said: list[str]) -> None:
    assert events(*QUIET, *lines) == said


TRACE = "(EngineCore pid=9) ERROR 06-01 12:00:31 [core.py:1233] {}"


def test_the_exception_behind_a_dead_engine_is_named_with_its_line(events) -> None:
    told = [
        "EngineCore encountered a fatal error.", "Traceback (most recent call last):", '  File "core.py", line 1224, in run',
        "pkg.mod.PlanError: a user's own words", "RuntimeError: see above",
    ]  # fmt: skip
    lines = [QUIET[0], *map(TRACE.format, told), *ENDED]
    assert events(*lines) == ["engine died: PlanError in line 5"]


def test_an_exception_of_another_time_is_no_cause(events) -> None:
    early = GONE.format("ValueError: the prompt is too long").replace("12:00:31", "12:00:11")
    assert events(QUIET[0], early, *ENDED) == ["engine died"]  # of another time
