"""Dumps of known truth on clocks that are off: found where they can be, and no wrong latency where not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from truth_check import Seen, agrees, column, exact, joined_pairs
from truth_fleet import pair, pd_name, rust_pd
from truth_otlp import CLIENT, MS, T0, S, write
from truth_vllm import Engine, Log, Request, load, resource, v1_span


def test_a_decode_host_ahead_is_found_and_taken_out(tmp_path: Path) -> None:
    legs = pair(name=pd_name)
    spans = rust_pd(legs, skew_ns=200 * MS)
    # Calls that end with their server bound the offset from below, too.
    ends = {s.span: s.end for s in spans if s.scope != "vllm-router"}
    below = {s.parent: ends[s.span] for s in spans if s.scope != "vllm-router"}
    for s in spans:
        if s.kind == CLIENT and s.span in below:
            skew = 200 * MS if s.attributes["vllm.request_phase"] == "decode" else 0
            s.end = below[s.span] - skew + MS
    write(tmp_path / "all.jsonl", spans)
    seen = Seen(tmp_path)
    exact(seen)
    clock = seen.sql("SELECT * FROM clocks WHERE offset_ns > 50e6").row(0, named=True)
    assert abs(clock["offset_ns"] - 200 * MS) <= clock["half_width_ns"] + MS
    assert seen.finding("clock_skew") is not None
    by_trace = dict(seen.requests.select("trace_id", "request").iter_rows())
    wait, decode = seen.phase("kv_wait_upper_bound"), seen.phase("decode_wall")
    for d in legs[1]:
        assert wait[by_trace[d.trace]] == pytest.approx((d.first - d.queued) / MS, abs=3)
        assert decode[by_trace[d.trace]] == pytest.approx((d.last - d.first) / MS, abs=3)


def test_a_skewed_decode_host_without_hops_gives_no_wrong_latency(tmp_path: Path) -> None:
    """Separate root traces: nothing bounds the offset. Negative or not, no TTFT may be claimed."""
    prefill, decode, _, _ = pair()
    for name, skew in (("ahead", 200), ("behind", -200)):
        folder = tmp_path / name
        write(folder / "p.jsonl", [v1_span(r, resource("vllm-p", key=name)) for r in prefill])
        write(
            folder / "d.jsonl",
            [v1_span(r, resource("vllm-d", key=name), skew_ns=skew * MS) for r in decode],
        )
        seen = Seen(folder)
        exact(seen)
        joined_pairs(seen, 40)
        assert seen.sql("SELECT headline_observer FROM deployments").item() is None
        assert seen.requests["ttft_ms"].null_count() == 40
        said = " ".join([*seen.diagnosis.unknown, *seen.diagnosis.not_supported])
        assert "clock" in said


def bench_file(
    path: Path, requests: Sequence[Request], origin: int, prefix: str, date: str
) -> None:
    import json

    rows = sorted(requests, key=lambda r: int(r.id.split("-")[-2]))
    first = [(r.first_seen - r.arrival + 2 * MS) / S for r in rows]
    value = {
        "date": date, "backend": "vllm", "endpoint_type": "vllm", "model_id": "m", "tokenizer_id": "m",
        "num_prompts": len(rows), "request_rate": 10.0, "burstiness": 1.0, "max_concurrency": None,
        "duration": (max(r.last_seen for r in rows) - origin) / S, "completed": len(rows),
        "request_id_prefix": prefix,
        "input_lens": [r.prompt for r in rows], "output_lens": [r.output for r in rows],
        "ttfts": first, "errors": [""] * len(rows),
        "itls": [[(r.last_seen - r.first_seen) / S / (r.output - 1)] * (r.output - 1) for r in rows],
        "start_times": [5000.0 + (r.arrival - MS - origin) / S for r in rows],
    }  # fmt: skip
    path.write_text(json.dumps(value))


def test_bench_on_perf_counter_finds_its_requests(tmp_path: Path) -> None:
    requests = load(40, T0, name=lambda i: f"cmpl-bench-ab12cd34-{i}-0")
    Engine().run(requests)
    write(tmp_path / "t.jsonl", [v1_span(r, resource("vllm")) for r in requests])
    bench_file(tmp_path / "bench.json", requests, T0, "bench-ab12cd34-", "20231114-221326")
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.only.requests["count"] == 40
    assert seen.sql("SELECT headline_observer FROM deployments").item() == "client"
    agrees(seen, requests, column(seen, "ttft_ms"), lambda r: r.ttft_ms + 2, 0.01)
    clock = seen.sql("SELECT * FROM clocks").row(0, named=True)
    assert clock["pairs"] == 40
    assert clock["residual_p95_ns"] < MS


def test_a_log_in_another_zone_gives_no_latency_of_nine_hours(tmp_path: Path) -> None:
    requests = load(30, T0)
    engine = Engine()
    engine.run(requests)
    write(tmp_path / "t.jsonl", [v1_span(r, resource("vllm")) for r in requests])
    log = Log(zone_h=9)
    log.started(T0 - 60 * S)
    for r in requests:
        log.request(r)
    log.steps(engine.steps)
    log.write(tmp_path / "server.log", mtime=T0 + 60 * S)
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.requests.height == 30, seen.requests.select("request", "start_ns", "outcome")
    agrees(seen, requests, column(seen, "ttft_ms"), lambda r: r.ttft_ms, 0.01)
    assert (seen.requests["end_ns"] - seen.requests["start_ns"]).max() < 60 * S
    said = dict(seen.only.conditions)["log_time_zone"]
    assert "+9" in said or "+09" in said, said


def test_garbage_stamps_and_missing_values_make_no_nonsense(tmp_path: Path) -> None:
    requests = load(40, T0)
    Engine().run(requests)
    res = resource("vllm")
    spans = [v1_span(r, res) for r in requests]
    odd = {
        "never scheduled": {"time_in_queue": -86_412.5, "time_in_model_prefill": 86_412.7, "time_in_model_decode": 0.0,
                            "time_in_model_inference": 86_412.7, "time_to_first_token": 0.0},
        "never queued": {"time_in_queue": 86_413.1},
        "clock stepped": {"time_to_first_token": -3.2, "e2e": -3.1},
    }  # fmt: skip
    for n, values in enumerate(odd.values()):
        span = spans[n]
        span.attributes = {
            **span.attributes,
            **{f"gen_ai.latency.{k}": v for k, v in values.items()},
        }
        if n == 0:
            span.attributes["gen_ai.usage.completion_tokens"] = 0
    for n, drop in enumerate([("time_to_first_token",), ("e2e",), ("time_to_first_token", "e2e"),
                              ("time_in_queue", "time_in_model_prefill", "time_in_model_decode", "time_in_model_inference")], 3):  # fmt: skip
        spans[n] = v1_span(requests[n], res, drop=drop)
    write(tmp_path / "t.jsonl", spans)
    log = Log()
    gone = Request("cmpl-gone-0", T0 + S, 50, 500)
    bad = Request("cmpl-bad-0", T0 + S, 50, 500)
    for r in [*requests, gone, bad]:
        log.request(r)
    log.api(T0 + 3 * S, "async_llm.py:700", "Request cmpl-gone-0 aborted.")
    log.api(T0 + 2 * S, "async_llm.py:709", "Request cmpl-bad-0 failed due to ValueError.")
    log.write(tmp_path / "server.log")
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.only.requests == {
        "count": 42,
        "completed": 39,
        "failed": 1,
        "aborted": 1,
        "unknown": 1,
    }
    for name in ("ttft_ms", "e2e_ms", "tpot_ms"):
        values = seen.requests[name].drop_nulls()
        assert values.min() >= 0
        assert values.max() < 20_000
    for detail in ("prefill_queue", "prefill_wall", "before_queue", "decode_wall"):
        assert max(seen.phase(detail).values(), default=0) < 5_000
    whole = requests[7:]
    agrees(seen, whole, column(seen, "ttft_ms"), lambda r: r.ttft_ms, 0.01)
    agrees(seen, whole, seen.phase("prefill_queue"), lambda r: (r.scheduled - r.queued) / MS, 1)
