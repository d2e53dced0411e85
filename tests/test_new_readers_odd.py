"""Readers of TensorRT-LLM, llm-d and SGLang where ids repeat, numbers cannot be, or somebody quotes their lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_llm_d_log import epp
from test_tensorrt_llm import pairs
from test_tensorrt_llm_log import lines

from pdtrace import registry
from pdtrace.ingest import ingest
from pdtrace.model import Head
from pdtrace.store import Store


def read(path: Path, name: str, text: str) -> Store:
    (path / name).write_text(text, "utf-8")
    store = Store()
    ingest([str(path)], store)
    assert store.rows("SELECT rows_read - rows_kept - rows_skipped FROM sources") == [(0,)]
    return store


def test_generation_servers_that_call_every_request_one_have_their_router_to_tell_them_apart(
    tmp_path: Path,
) -> None:
    told = pairs(6)
    for pair in told:
        pair["ctx_perf_metrics"]["ctx_request_id"] = pair["gen_perf_metrics"]["ctx_request_id"] = 1
    store = read(tmp_path, "perf_metrics.json", json.dumps(told))
    assert store.rows("SELECT count(DISTINCT external_id), count(*) FROM legs") == [(6, 18)]


def test_a_step_of_a_time_that_cannot_be_takes_no_other_with_it(tmp_path: Path) -> None:
    odd = lines(20).replace("host_step_time = 60.00ms", f"host_step_time = {'9' * 40}ms", 1)
    assert read(tmp_path, "serve.log", odd).count("steps") == 19


def test_a_pickers_id_that_is_used_again_is_another_request(tmp_path: Path) -> None:
    store = read(tmp_path, "epp.log", "\n".join(epp(0, name="a") + epp(50, name="a")) + "\n")
    assert store.rows("SELECT round(e2e_ms, 3) FROM legs") == [(331.0,), (331.0,)]


def test_a_picker_that_only_failed_is_no_sidecar(tmp_path: Path) -> None:
    line = {"level": "error", "ts": 1793520000.5, "caller": "requestcontrol/director.go:9", "msg": "boom"}  # fmt: skip
    assert read(tmp_path, "epp.log", json.dumps(line) + "\n").rows("SELECT role FROM workers") == [("gateway",)]  # fmt: skip


TRT, SGL = (
    "[08/19/2026-14:11:49] [TRT-LLM] [I] up",
    "[2026-11-01 08:00:01 TP0] Prefill batch, #new-seq: 1",
)


@pytest.mark.parametrize("collector", ["tensorrt_llm_log", "sglang_log"])
@pytest.mark.parametrize(
    "text",
    [
        f'{{"request_id": "a", "start": 1.5, "prompt": "why? {TRT} and {SGL}"}}\n',
        f'a,1.5,"{TRT} and {SGL}"\n',
        f"INFO 11-01 08:00:01 [logger.py:39] Received request c1: prompt: '{TRT} {SGL}', params: x\n",
    ],
)  # fmt: skip
def test_who_quotes_a_log_in_a_prompt_does_not_become_one(collector: str, text: str) -> None:
    head = Head("x.log", "x.log", text.encode(), complete=True)
    assert registry.collectors()[collector].sniff(head) is None


@pytest.mark.parametrize("carrier", ["", "2026-11-01 08:00:01,123 INFO ", "worker-1  | ", "(worker pid=12, ip=1.2.3.4) "])  # fmt: skip
def test_a_carrier_before_a_line_is_none_of_its_business(carrier: str) -> None:
    event = '[2026-11-01 08:00:05] {"timestamp": "2026-11-01T08:00:05.1", "event": "request.finished", "rid": "a"}'  # fmt: skip
    for collector, line in (("tensorrt_llm_log", TRT), ("sglang_log", SGL), ("sglang_log", event)):
        head = Head("x.log", "x.log", f"{carrier}{line}\n".encode(), complete=True)
        assert registry.collectors()[collector].sniff(head) is not None
