"""Engine steps that serving code marks become rows of the tables steps and step_members."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recorded import Kept, attributes

import pdtrace
from pdtrace import instrumentation as pdt
from pdtrace.api import Trace
from pdtrace.instrumentation import api
from pdtrace.instrumentation import engine_steps as room
from pdtrace.instrumentation.files import OtlpFiles


def test_steps_are_written_in_runs(kept: Kept) -> None:
    steps = pdt.steps(rank="1")
    for number in range(300):
        with steps.step() as step:
            step.set(decode_requests=number, running=number + 1)
    steps.flush()
    pdt.flush()
    runs = [attributes(span) for span in kept.named("pdtrace.steps")]
    assert [run["pdtrace.step.first_seq"] for run in runs] == ["0", str(room.RUN_STEPS)]
    assert sum(len(run["pdtrace.step.elapsed_ns"]) for run in runs) == 300
    assert runs[0]["pdtrace.step.rank"] == "1"
    assert runs[0]["pdtrace.step.decode_requests"][:3] == ["0", "1", "2"]
    assert "pdtrace.step.prefill_tokens" not in runs[0]  # nobody said


def test_a_run_holds_few_ids(kept: Kept) -> None:
    steps = pdt.steps()
    for number in range(200):
        with steps.step() as step:
            step.member(f"{number:0100d}", decode_tokens=1)
    steps.flush()
    pdt.flush()
    runs = [attributes(span)["pdtrace.step.member.ids"] for span in kept.named("pdtrace.steps")]
    assert sum(map(len, runs)) == 200
    assert max(sum(map(len, ids)) for ids in runs) <= room.RUN_ID_BYTES


def test_off_and_broken_values_cost_nothing(kept: Kept) -> None:
    steps = pdt.steps()
    with steps.step() as step:
        step.set(running="many")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="theirs"), steps.step():
        raise ValueError("theirs")
    pdtrace.uninstrument()
    with steps.step() as step:
        step.set(running=1)


def test_sampling_never_thins_steps(kept: Kept) -> None:
    pdtrace.uninstrument()
    pdtrace.instrument(exporter=kept, ratio=0.0)
    steps = pdt.steps()
    with steps.step():
        pass
    steps.flush()
    pdt.flush()
    assert len(kept.named("pdtrace.steps")) == 1


def rows(trace: Trace, query: str) -> list[tuple[Any, ...]]:
    return trace.sql(query).rows()


def test_what_is_written_is_read_as_steps_and_members(tmp_path: Path) -> None:
    pdtrace.instrument(exporter=OtlpFiles(tmp_path, api.resource("engine", "aggregated")))
    steps = pdt.steps()
    with pdt.request(request_id="a", role="aggregated", prompt_tokens=7), steps.step() as step:
        step.set(prefill_requests=1, prefill_tokens=7, running=2, kv_usage_ratio=0.5)
        step.member("a", prefill_tokens=7, context_tokens=0)
    with steps.step() as step:
        step.set(decode_requests=2, decode_tokens=2, running=2)
        step.member("a", decode_tokens=1)
        step.member("b", decode_tokens=1)
    steps.flush()
    pdtrace.uninstrument()
    with Trace.read([tmp_path]) as trace:
        assert rows(trace, "SELECT seq, prefill_tokens, decode_requests, running, kv_usage_ratio, capture FROM steps ORDER BY seq") == [
            (0, 7, None, 2, 0.5, "full"), (1, None, 2, 2, None, "full"),
        ]  # fmt: skip
        assert rows(trace, "SELECT seq, request_id, prefill_tokens, decode_tokens, context_tokens FROM step_members ORDER BY seq, request_id") == [
            (0, "a", 7, 0, 0), (1, "a", 0, 1, None), (1, "b", 0, 1, None),
        ]  # fmt: skip
        # of the worker that served the request, between its instants
        assert rows(trace, "SELECT DISTINCT worker = (SELECT worker FROM legs) FROM steps") == [
            (True,)
        ]
        assert rows(trace, "SELECT bool_and(elapsed_ns > 0), bool_and(s.start_ns >= r.start_ns) FROM steps s, requests r") == [(True, True)]  # fmt: skip
        assert rows(trace, "SELECT count(*) FROM requests") == [(1,)]
