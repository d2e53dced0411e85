"""Dumps whose truth is known, through the whole pipeline: what it says must be what happened."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from truth_check import Seen, agrees, column, exact, external
from truth_fleet import hop, pair, pd_folder, pd_name, routed, rust_pd, stack_spans, two_workers
from truth_otlp import CLIENT, INTERNAL, MS, SERVER, T0, S, Span, span_id, trace_id, uuid, write
from truth_vllm import Engine, Log, Request, load, resource, scrape, v0_span, v1_span

# 1. vLLM V1, one server


def single_server(folder: Path, era: str) -> tuple[Engine, list[Request]]:
    """Chat and completions, two prompts in one call, n = 2, and long prompts that interfere."""
    requests = load(60, T0, prompt=lambda d: d.randint(40, 120), output=lambda d: d.randint(40, 80))
    for i, r in enumerate(requests):
        if i % 3 == 0:
            r.id = f"chatcmpl-{uuid(i).replace('-', '')}"
        if i % 10 == 9:
            r.prompt = 4000
    requests += [Request("cmpl-batch-0", T0 + S, 50, 30), Request("cmpl-batch-1", T0 + S, 70, 30)]
    requests[-1].trace = requests[-2].trace
    twin = [Request("chatcmpl-twin", T0 + 2 * S, 60, 40, span=f"{i:016x}") for i in (1, 2)]
    requests += twin
    engine = Engine()
    engine.run(requests)
    res = resource("vllm-a")
    write(folder / "traces.jsonl", [v1_span(r, res) for r in requests])
    log = Log(core="EngineCore" if era == "0.32" else "EngineCore_DP0")
    log.started(T0 - 60 * S)
    for r in requests:
        if r is not twin[1]:
            log.request(r, n=2 if r is twin[0] else 1)
    log.steps(engine.steps, era)
    log.write(folder / "server.log")
    times = [T0 + i * S for i in range(12)]
    rows = {"vllm:num_requests_running": 3.0, "vllm:num_requests_waiting": 0.0}
    label = '{engine="0",model_name="m"}'
    text = scrape(times, lambda _: {k + label: v for k, v in rows.items()})
    (folder / "metrics.prom").write_text(text)
    return engine, requests


@pytest.mark.parametrize("era", ["0.18", "0.32"])
def test_one_v1_server_gives_back_its_truth(tmp_path: Path, era: str) -> None:
    engine, requests = single_server(tmp_path, era)
    seen = Seen(tmp_path)
    exact(seen)
    truth = [r for r in requests if r.id != "chatcmpl-twin"]
    assert seen.only.mode == "aggregated"
    assert seen.only.requests["count"] == len(truth) + 1
    assert seen.only.requests["completed"] == len(truth) + 1
    twin = seen.requests.filter(pl.col("external_id") == "twin").row(0, named=True)
    assert (twin["streams"], twin["output_tokens"]) == (2, 80)
    assert seen.requests.filter(pl.col("external_id").is_in(["batch", "batch-1"])).height == 2
    agrees(seen, truth, column(seen, "ttft_ms"), lambda r: r.ttft_ms, 0.01)
    agrees(seen, truth, column(seen, "e2e_ms"), lambda r: r.e2e_ms, 0.01)
    ipc = engine.ipc_ms + 0.01
    agrees(seen, truth, seen.phase("prefill_wall"), lambda r: (r.first - r.scheduled) / MS, ipc)
    agrees(seen, truth, seen.phase("prefill_queue"), lambda r: (r.scheduled - r.queued) / MS, ipc)
    agrees(seen, truth, seen.phase("before_queue"), lambda r: (r.queued - r.arrival) / MS, ipc)
    agrees(seen, truth, seen.phase("decode_wall"), lambda r: (r.last - r.first) / MS, ipc)
    steps = seen.sql("SELECT count(*) AS n, count(DISTINCT worker) AS w FROM steps").row(0)
    assert steps == (len(engine.steps), 1)
    assert seen.sql("SELECT worker FROM legs UNION SELECT worker FROM steps").height == 1
    found = seen.finding("prefill_interference")
    assert found.level == "A"
    assert found.value == pytest.approx(engine.lost_s, rel=0.02)


# 2. vLLM V0


def test_v0_queue_counts_from_arrival_and_nothing_twice(tmp_path: Path) -> None:
    requests = load(30, T0, name=lambda i: f"chatcmpl-{uuid(i).replace('-', '')}")
    Engine().run(requests)
    res = {"service.name": "vllm-v0"}
    write(
        tmp_path / "t.jsonl", [v0_span(r, res, detailed=i % 2 == 0) for i, r in enumerate(requests)]
    )
    seen = Seen(tmp_path)
    exact(seen)
    agrees(seen, requests, column(seen, "ttft_ms"), lambda r: r.ttft_ms, 0.01)
    agrees(
        seen, requests, seen.phase("prefill_queue"), lambda r: (r.scheduled - r.arrival) / MS, 0.01
    )
    agrees(
        seen,
        requests,
        seen.phase("prefill_wall"),
        lambda r: (r.first_seen - r.scheduled) / MS,
        0.01,
    )
    agrees(
        seen, requests, seen.phase("decode_wall"), lambda r: (r.last_seen - r.first_seen) / MS, 0.01
    )
    assert not seen.phase("before_queue")
    assert not seen.phase("unattributed")
    assert seen.only.mode == "aggregated"


# 3. P/D behind a toy proxy without spans of its own


def wait_of_decode(
    seen: Seen, detail: str, legs: Sequence[Request], tolerance: float = 1.5
) -> None:
    agrees(seen, legs, seen.phase(detail), lambda r: (r.scheduled - r.queued) / MS, tolerance)


def joined_pairs(seen: Seen, n: int) -> None:
    assert seen.only.mode == "disaggregated"
    assert seen.only.requests["count"] == n
    roles = {w["role"] for w in seen.only.workers}
    assert roles == {"prefill", "decode"}
    halves = seen.requests.select("prefill_worker", "decode_worker").unique()
    assert halves.height == 1
    assert halves.row(0)[0] != halves.row(0)[1]


@pytest.mark.parametrize(
    ("connector", "log", "detail"),
    [
        ("NixlConnector", True, "kv_wait_upper_bound"),
        (None, False, "kv_wait_upper_bound"),
        ("ExampleConnector", True, "decode_queue"),
        ("SomethingNewConnector", True, "kv_wait_upper_bound"),
    ],
)
def test_toy_proxy_pairs_join_by_id_and_no_composite_is_the_headline(
    tmp_path: Path, connector: str | None, log: bool, detail: str
) -> None:
    sync = connector == "ExampleConnector"
    legs = pair(sync=sync)
    pd_folder(tmp_path, legs, connector, log)
    seen = Seen(tmp_path)
    exact(seen)
    joined_pairs(seen, 40)
    prefill, decode, _, _ = legs
    if sync:
        wait_of_decode(seen, "decode_queue", decode)
        load_ms = {r.id: (r.first - r.scheduled) / MS for r in decode}
        agrees(seen, decode, seen.phase("kv_wait_upper_bound"), lambda r: load_ms[r.id], 1.5)
    elif connector == "NixlConnector":
        wait_of_decode(seen, detail, decode)
    else:  # unknown connector: queue and first step may both hold the transfer
        agrees(seen, decode, seen.phase(detail), lambda r: (r.first - r.queued) / MS, 1.5)
    agrees(seen, prefill, seen.phase("prefill_queue"), lambda r: (r.scheduled - r.queued) / MS, 1.5)
    assert not {"engine_queue"} & seen.warnings()
    assert seen.sql("SELECT headline_observer FROM deployments").item() is None
    assert seen.requests["ttft_ms"].null_count() == 40
    assert seen.latency() is None
    assert "no TTFT to tell" in seen.only.verdict
    missing = next(line for line in seen.diagnosis.unknown if "times to first token" in line)
    assert "router or proxy" in missing
    interference = seen.finding("prefill_interference")
    decoder = seen.requests["decode_worker"][0]
    assert sync or interference is None or decoder not in interference.workers


def test_mooncake_decode_queue_holds_the_prefill_and_counts_it_once(tmp_path: Path) -> None:
    legs = pair(concurrent=True, gap_ms=1)
    pd_folder(tmp_path, legs, "MooncakeConnector")
    seen = Seen(tmp_path)
    exact(seen)
    joined_pairs(seen, 40)
    prefill, decode, _, _ = legs
    # D's wait covers P's queue and prefill: those keep their names, the rest is the wait.
    agrees(seen, prefill, seen.phase("prefill_wall"), lambda r: (r.first - r.scheduled) / MS, 1.5)
    by_p = {r.id: r for r in prefill}

    def rest(r: Request) -> float:
        p = by_p[r.id]
        return (max(p.queued - r.queued, 0) + r.scheduled - p.first_seen) / MS

    agrees(seen, decode, seen.phase("kv_wait_upper_bound"), rest, 2.5)
    agrees(seen, decode, column(seen, "ttft_ms"), lambda r: r.ttft_ms, 0.01)
    assert seen.sql("SELECT headline_observer FROM deployments").item() == "engine"


# 4. routers


def test_rust_router_joins_pairs_and_late_calls_distort_nothing(tmp_path: Path) -> None:
    legs = pair(name=pd_name)
    spans = rust_pd(legs)
    dead = Request(pd_name(99), T0 + S, 100, 10, trace=trace_id("dead"))
    server = routed(dead, T0 + S, T0 + S + 40 * MS, 502)
    failed = hop(dead, "prefill", T0 + S + MS, T0 + S + 39 * MS, "10.0.0.1:8100", server.span, 500)
    write(tmp_path / "all.jsonl", [*spans, server, failed])
    seen = Seen(tmp_path)
    exact(seen)
    prefill, decode, _, _ = legs
    assert seen.only.requests["count"] == 41
    assert seen.only.requests["failed"] == 1
    assert seen.only.requests["completed"] == 40
    assert seen.only.mode == "disaggregated"
    done = seen.requests.filter(pl.col("outcome") == "completed")
    assert done["attempts"].sort().to_list() == [1] * 39 + [2]
    assert done.select("prefill_worker", "decode_worker").unique().height == 1
    by_trace = dict(seen.requests.select("trace_id", "request").iter_rows())
    windows = dict(
        seen.requests.select("request", pl.col("end_ns") - pl.col("start_ns")).iter_rows()
    )
    bridge, wait = seen.phase("bridge_wait"), seen.phase("kv_wait_upper_bound")
    for p, d in zip(prefill, decode, strict=True):
        name = by_trace[p.trace]
        assert windows[name] == d.last_seen + 2 * MS - (p.arrival - 3 * MS)
        assert bridge[name] == pytest.approx((d.arrival - MS - p.last_seen) / MS, abs=0.3)
        assert wait[name] == pytest.approx((d.first - d.queued) / MS, abs=1.5)
    assert seen.sql("SELECT headline_observer FROM deployments").item() is None
    assert not {"clock_skew", "unattributed_time"} & seen.warnings()


def test_production_stack_router_two_workers_imbalance_and_interference_on_one(
    tmp_path: Path,
) -> None:
    truth = two_workers(tmp_path, stack_spans)
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.only.mode == "aggregated"
    assert seen.only.requests["count"] == 80
    requests = [r for _, part in truth.values() for r in part]
    assert seen.sql("SELECT headline_observer FROM deployments").item() == "engine"
    agrees(seen, requests, column(seen, "ttft_ms"), lambda r: r.ttft_ms, 0.01)
    worker = dict(seen.requests.select("external_id", "decode_worker").iter_rows())
    names = {k: {worker[external(r.id)] for r in part} for k, (_, part) in truth.items()}
    assert all(len(n) == 1 for n in names.values())
    assert names["a"] != names["b"]
    found = seen.finding("prefill_interference")
    assert found.value == pytest.approx(sum(e.lost_s for e, _ in truth.values()), rel=0.02)
    assert list(found.workers) == list(names["b"])
    # Three of four requests on a, nearly all tokens on b.
    uneven = seen.finding("worker_imbalance")
    tokens = {k: sum(r.prompt for r in part) for k, (_, part) in truth.items()}
    assert uneven.value == pytest.approx(2 * tokens["b"] / sum(tokens.values()), rel=0.03)
    assert uneven.workers[:1] == tuple(names["b"])
    decided = seen.sql("SELECT worker, count(*) AS n FROM decisions GROUP BY worker ORDER BY n")
    assert decided["n"].to_list() == [20, 60]
    assert set(decided["worker"]) == names["a"] | names["b"]


# 6. the same seeded load twice


def seeded_run(folder: Path, start: int, key: str, name: str, seeded: bool) -> list[Request]:
    """A run of a seeded client; with `seeded` the server's span ids repeat as well."""
    requests = load(30, start, name=lambda i: f"cmpl-bench-{i}-0")
    for i, r in enumerate(requests):
        r.trace, r.span = trace_id("seeded", i), span_id("seeded", "" if seeded else (key, name), i)
        r.parent = span_id("client", i)
    Engine().run(requests)
    write(folder / f"{name}.jsonl", [v1_span(r, resource("vllm", key=key)) for r in requests])
    return requests


@pytest.mark.parametrize(
    ("together", "same_server", "later_s", "seeded"),
    [
        (True, True, 3600, False),
        (False, False, 3600, False),
        (True, False, 3600, True),
        (False, True, 3600, True),
        (True, True, 20, True),
        (False, False, 20, True),
    ],
)
def test_two_seeded_runs_are_never_merged(
    tmp_path: Path, together: bool, same_server: bool, later_s: int, seeded: bool
) -> None:
    folders = [tmp_path / "x", tmp_path / ("x" if together else "y")]
    runs = [
        seeded_run(
            folder, T0 + n * later_s * S, "one" if same_server else str(n), f"run{n}", seeded
        )
        for n, folder in enumerate(folders)
    ]
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.requests.height == 60
    assert len(seen.diagnosis.deployments) == (1 if same_server else 2)
    truth = sorted(r.ttft_ms for run in runs for r in run)
    assert seen.requests["ttft_ms"].sort().to_list() == pytest.approx(truth, abs=0.01)
    assert seen.requests["streams"].unique().to_list() == [1]


# 7. an agent


@pytest.mark.parametrize("hops", [True, False])
def test_an_agents_calls_are_requests_each(tmp_path: Path, hops: bool) -> None:
    spans = []
    agent = {"service.name": "agent", "service.instance.id": uuid("agent")}
    requests = []
    for session in range(6):
        trace, root = trace_id("agent", session), span_id("agent", session)
        at = T0 + session * S
        for call in range(5):
            r = Request(
                f"chatcmpl-{uuid(session, call).replace('-', '')}",
                at,
                300 + 100 * call,
                20,
                trace=trace,
                parent=root,
            )
            Engine(seed=call).run([r])
            if hops:
                r.parent = span_id("post", session, call)
                spans.append(
                    Span(agent, "opentelemetry.instrumentation.httpx", "POST", trace, r.parent, at - MS, r.last_seen + MS,
                         root, CLIENT, {"http.request.method": "POST", "url.full": "http://w:8000/v1/chat/completions"})
                )  # fmt: skip
            requests.append(r)
            spans.append(v1_span(r, resource("vllm")))
            at = r.last_seen + 50 * MS
        spans.append(Span(agent, "my.agent", "invoke_agent planner", trace, root, T0 + session * S - 2 * MS, at, None, INTERNAL,
                          {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "planner"}))  # fmt: skip
    write(tmp_path / "t.jsonl", spans)
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.requests.height == 30
    agrees(seen, requests, column(seen, "ttft_ms"), lambda r: r.ttft_ms, 0.01)
    assert seen.only.mode == "aggregated"


# 8. clocks


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


# 9. garbage and missing names


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


@pytest.mark.parametrize("names", ["nothing", "pid", "pod", "instance"])
def test_workers_of_one_service_name_are_told_apart_as_far_as_they_can(
    tmp_path: Path, names: str
) -> None:
    requests = load(60, T0, rate=20)
    parts = [requests[i::3] for i in range(3)]
    spans = []
    for i, part in enumerate(parts):
        Engine(seed=i).run(part)
        res: dict[str, Any] = {
            "nothing": {},
            "pid": {"service.name": "unknown_service", "vllm.process_id": str(7000 + i)},
            "pod": {"service.name": "vllm", "k8s.pod.name": f"vllm-{i}", "vllm.process_id": "1"},
            "instance": resource("vllm", key=i, pid=1),
        }[names]
        spans += [v1_span(r, res) for r in part]
    write(tmp_path / "t.jsonl", spans)
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.requests.height == 60
    agrees_all = seen.requests["ttft_ms"].sort().to_list()
    assert agrees_all == pytest.approx(sorted(r.ttft_ms for r in requests), abs=0.01)
    workers = seen.requests["decode_worker"].n_unique()
    assert workers == (1 if names == "nothing" else 3)
    if names == "nothing":
        assert seen.finding("worker_imbalance") is None


@pytest.mark.parametrize("names", ["nothing", "unknown_service", "pid"])
def test_pairs_of_nameless_workers_are_never_called_aggregated(tmp_path: Path, names: str) -> None:
    """P and D without instance ids: the roles follow from the legs, or nothing is said."""
    prefill, decode, _, _ = pair()
    for role, part in (("p", prefill), ("d", decode)):
        res: dict[str, Any] = {"unknown_service": {"service.name": "unknown_service"}, "nothing": {},
                               "pid": {"service.name": "unknown_service", "vllm.process_id": "7" + str(ord(role))}}[names]  # fmt: skip
        write(tmp_path / f"{role}.jsonl", [v1_span(r, res) for r in part])
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.requests.height == 40, seen.requests.height
    assert len(seen.diagnosis.deployments) == 1
    assert seen.only.mode == "disaggregated"
    by_id = {r.id: r for r in prefill}
    agrees(
        seen,
        decode,
        seen.phase("prefill_wall"),
        lambda r: (by_id[r.id].first - by_id[r.id].scheduled) / MS,
        1,
    )
    assert seen.sql("SELECT headline_observer FROM deployments").item() is None
    assert seen.requests["output_tokens"].sum() == sum(r.output for r in decode)


# 10. GenAI client spans alone


def test_openai_client_spans_are_client_requests(tmp_path: Path) -> None:
    dice = random.Random(4)
    res = {"service.name": "my-app", "telemetry.sdk.language": "python"}
    spans, truth = [], []
    for i in range(50):
        start, ttft = T0 + i * S // 5, dice.uniform(0.1, 0.6)
        tokens = dice.randint(20, 80)
        e2e = ttft + tokens * 0.02
        truth.append((ttft * 1e3, e2e * 1e3, tokens))
        attributes = {
            "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "gpt-x",
            "gen_ai.response.model": "gpt-x-2024", "gen_ai.response.id": f"chatcmpl-{i}", "gen_ai.request.stream": True,
            "gen_ai.usage.input_tokens": 100 + i, "gen_ai.usage.output_tokens": tokens, "server.address": "api.example.com",
            "gen_ai.response.time_to_first_chunk": ttft, "gen_ai.response.finish_reasons": ["stop"],
        }  # fmt: skip
        spans.append(
            Span(res, "opentelemetry.instrumentation.openai_v2", "chat gpt-x", trace_id("oai", i), span_id("oai", i),
                 start, start + int(e2e * S), None, CLIENT, attributes)
        )  # fmt: skip
        if i % 5 == 0:  # the HTTP client is instrumented, too
            spans.append(
                Span(res, "opentelemetry.instrumentation.httpx", "POST", trace_id("oai", i), span_id("http", i), start + MS,
                     start + int(ttft * S), span_id("oai", i), CLIENT, {"http.request.method": "POST", "http.response.status_code": 200})
            )  # fmt: skip
    spans.append(
        Span(res, "opentelemetry.instrumentation.openai_v2", "chat gpt-x", trace_id("oai", 99), span_id("oai", 99), T0, T0 + S,
             None, CLIENT, {"gen_ai.operation.name": "chat", "gen_ai.request.model": "gpt-x", "error.type": "RateLimitError"}, error=True)
    )  # fmt: skip
    write(tmp_path / "t.jsonl", spans)
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.only.requests == {
        "count": 51,
        "completed": 50,
        "failed": 1,
        "aborted": 0,
        "unknown": 0,
    }
    assert seen.latency()["observer"] == "client"
    done = seen.requests.filter(pl.col("outcome") == "completed")
    assert done["ttft_ms"].sort().to_list() == pytest.approx(sorted(t[0] for t in truth), abs=0.01)
    assert done["e2e_ms"].sort().to_list() == pytest.approx(sorted(t[1] for t in truth), abs=0.01)
    assert done["output_tokens"].sum() == sum(t[2] for t in truth)
    assert seen.only.mode == "unknown"
    assert not any("prefill" in f.id for f in seen.only.findings)


# 11. pdtrace's own spans


def test_own_spans_across_router_and_workers_give_full_phases(tmp_path: Path) -> None:
    from pdtrace import semconv as s

    dice = random.Random(5)
    spans, truth = [], []
    for i in range(30):
        t = T0 + i * S // 2
        trace = trace_id("own", i)
        at = [t]
        for low, high in ((1, 3), (0.2, 0.5), (4, 20), (30, 90), (5, 25), (1, 6)):
            at.append(at[-1] + int(dice.uniform(low, high) * MS))
        decide, sent, queue_end, prefill_end, moved, waited = at[1:]
        gaps = [int(dice.uniform(8, 14) * 1000) for _ in range(dice.randint(20, 40))]
        first = waited + 9 * MS
        end = first + sum(gaps) * 1000
        rid = f"req-{i}"
        ids = {k: span_id("own", k, i) for k in ("router", "dp", "dd", "p", "d")}

        def add(
            where: str, name: str, start: int, stop: int, key: str, parent: str | None,
            kind: int = INTERNAL, trace: str = trace, n: int = i, **attributes: Any,
        ) -> None:  # fmt: skip
            res = {"service.name": where, "service.instance.id": uuid("own", where)}
            spans.append(
                Span(res, s.SCOPE, name, trace, span_id("own", key, n), start, stop, parent, kind,
                     {k.replace("__", "."): v for k, v in attributes.items()})
            )  # fmt: skip

        role = s.WORKER_ROLE
        add("router", s.SPAN_REQUEST, t, end + MS, "router", None, SERVER, **{s.REQUEST_ID: rid, role: "router",
            s.FIRST_TOKEN_NS: first + MS, s.TOKEN_TIMES_US: str([0, *[sum(gaps[: k + 1]) for k in range(len(gaps))]]), s.OUTPUT_TOKENS: len(gaps) + 1,
            s.INPUT_TOKENS: 500})  # fmt: skip
        add(
            "router",
            s.SPAN_ROUTER,
            t,
            decide,
            "r1",
            ids["router"],
            **{s.ROUTER_POLICY: "kv", s.ROUTER_WORKER: "p0"},
        )
        add(
            "router",
            s.SPAN_DISPATCH,
            decide,
            prefill_end + MS // 2,
            "dp",
            ids["router"],
            CLIENT,
            **{role: "prefill"},
        )
        add(
            "p",
            s.SPAN_REQUEST,
            sent,
            prefill_end,
            "p",
            ids["dp"],
            SERVER,
            **{
                s.REQUEST_ID: rid,
                role: "prefill",
                s.FIRST_TOKEN_NS: prefill_end,
                s.OUTPUT_TOKENS: 1,
                s.INPUT_TOKENS: 500,
            },
        )
        phases = {v: k for k, v in s.PHASE_SPANS.items()}
        add("p", phases["prefill_queue"], sent, queue_end, "q", ids["p"])
        add(
            "p",
            phases.get("prefill_exec") or phases["prefill_wall"],
            queue_end,
            prefill_end,
            "pe",
            ids["p"],
        )
        add(
            "router",
            s.SPAN_DISPATCH,
            prefill_end,
            end + MS // 2,
            "dd",
            ids["router"],
            CLIENT,
            **{role: "decode"},
        )
        add(
            "d",
            s.SPAN_REQUEST,
            prefill_end,
            end,
            "d",
            ids["dd"],
            SERVER,
            **{
                s.REQUEST_ID: rid,
                role: "decode",
                s.FIRST_TOKEN_NS: first,
                s.OUTPUT_TOKENS: len(gaps) + 1,
            },
        )
        add(
            "d",
            s.SPAN_KV_TRANSFER,
            prefill_end,
            moved,
            "kv",
            ids["d"],
            **{s.KV_BYTES: 1_000_000, s.KV_BACKEND: "nixl"},
        )
        add("d", phases["prefill_queue"], moved, waited, "dq", ids["d"])
        add("d", phases.get("decode_exec") or phases["decode_wall"], waited, end, "de", ids["d"])
        truth.append((rid, (first + MS - t) / MS, (decide - t) / MS, (queue_end - sent) / MS, (prefill_end - queue_end) / MS,
                      (moved - prefill_end) / MS, (waited - moved) / MS))  # fmt: skip
    write(tmp_path / "t.jsonl", spans)
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.only.requests["count"] == 30
    assert seen.only.mode == "disaggregated"
    assert seen.latency()["observer"] == "router"
    prefill = [r["detail"] for r in seen.only.phases if r["phase"] == "prefill"]
    assert len(prefill) == 1
    details = ("router_decide", "prefill_queue", prefill[0], "kv_transfer", "decode_queue")
    names = dict(seen.requests.select("external_id", "request").iter_rows())
    ttft = column(seen, "ttft_ms")
    parts = [seen.phase(d) for d in details]
    for rid, *values in truth:
        found = [ttft[names[rid]], *(p.get(names[rid], 0) for p in parts)]
        assert found == pytest.approx(values, abs=0.6), rid
    assert {r["basis"] for r in seen.only.phases if r["detail"] in details} == {"measured"}
    assert seen.sql("SELECT count(*) FROM streams").item() == 30
    assert seen.latency("itl_ms", "router")["p50"] == pytest.approx(11, abs=1)
    assert seen.sql("SELECT count(*), sum(bytes)::BIGINT FROM transfers").row(0) == (30, 30_000_000)


# 12. several engines in one server


@pytest.mark.parametrize("era", ["0.18", "0.32"])
def test_data_parallel_ranks_are_kept_apart(tmp_path: Path, era: str) -> None:
    requests = load(60, T0, rate=20, prompt=lambda d: d.choice([60, 60, 60, 3000]))
    engines = [Engine(seed=i, rank=i, per_token_ms=0.02 * (i + 1)) for i in (0, 1)]
    for i, engine in enumerate(engines):
        engine.run(requests[i::2])
    write(tmp_path / "t.jsonl", [v1_span(r, resource("vllm")) for r in requests])
    log = Log(core="EngineCore_DP0")
    log.started(T0 - 60 * S)
    log.engine(
        T0 - 50 * S,
        "core.py:97",
        "Initializing a V1 LLM engine (v0.18.1) with config: model='m'",
        rank=1,
    )
    log.steps(sorted(engines[0].steps + engines[1].steps, key=lambda s: s.end), era, ranks=True)
    log.write(tmp_path / "server.log")
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.only.requests["count"] == 60
    steps = seen.sql("SELECT worker, rank, count(*) AS n FROM steps GROUP BY ALL ORDER BY rank")
    assert steps["rank"].to_list() == ["0", "1"]
    assert steps["n"].to_list() == [len(e.steps) for e in engines]
    assert steps["worker"].n_unique() == 1
    lost = seen.sql("SELECT lost_s FROM interference_steps ORDER BY rank")["lost_s"].to_list()
    # Prefill-only steps with nobody decoding cost nobody anything; both ranks by themselves.
    assert lost == pytest.approx([e.lost_s for e in engines], rel=0.03)


# 13. nothing is wrong


def healthy(folder: Path, seed: int) -> Seen:
    """Even load far below capacity: prompts and answers alike, no queue."""
    dice = random.Random(seed)
    requests = [
        Request(f"cmpl-{uuid('healthy', seed, i)}-0", T0 + i * S // 4 + int(dice.uniform(0, 20) * MS), dice.randint(90, 110), dice.randint(45, 55))
        for i in range(60)
    ]  # fmt: skip
    engine = Engine(seed=seed, base_ms=6, per_token_ms=0.01, noise=0.05)
    engine.run(requests)
    write(folder / "t.jsonl", [v1_span(r, resource("vllm")) for r in requests])
    log = Log()
    log.started(T0 - 60 * S)
    log.steps(engine.steps)
    log.write(folder / "server.log")
    return Seen(folder)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_healthy_run_raises_no_warning(tmp_path: Path, seed: int) -> None:
    seen = healthy(tmp_path, seed)
    exact(seen)
    assert not seen.warnings(), [(f.id, f.title) for f in seen.only.findings]


# 14. P/D, healthy and short of KV space on D


@pytest.mark.parametrize("short", [False, True])
def test_kv_space_on_the_decode_worker(tmp_path: Path, short: bool) -> None:
    legs = pair(transfer_ms=15)
    _, decode, _, _ = legs
    if short:  # D admits few: the others wait for KV space, which its queue holds
        for r in decode:
            r.done = 0
        Engine(seed=3, per_token_ms=0.0, seats=3).run(decode)
    pd_folder(tmp_path, legs, "NixlConnector")
    label = '{engine="0",model_name="m"}'
    reason = '{engine="0",model_name="m",reason="deferred"}'
    times = [T0 + i * S for i in range(15)]
    rows = {
        "vllm:kv_cache_usage_perc" + label: 0.97 if short else 0.2,
        "vllm:num_requests_waiting" + label: 8.0 if short else 0.0,
        "vllm:num_requests_waiting_by_reason" + reason: 8.0 if short else 0.0,
    }
    (tmp_path / "metrics_d.prom").write_text(scrape(times, lambda _: rows))
    seen = Seen(tmp_path)
    exact(seen)
    joined = {w["role"] for w in seen.only.workers}
    assert {"prefill", "decode"} <= joined
    wait_of_decode(seen, "kv_wait_upper_bound", decode)
    pressure = seen.finding("kv_pressure")
    assert (pressure is not None) == short
    transfer = seen.finding("kv_transfer")
    assert transfer.interval[0] == 0  # no part of the wait is known to be transfer
    if short:
        assert pressure.severity == "warning"
        assert transfer.severity == "warning"
        assert any(
            "upper bound" in text
            for text in (transfer.title, transfer.detail, *transfer.assumptions)
        )
    else:
        assert not {"kv_pressure", "engine_queue", "decode_idle"} & seen.warnings()


# 15. systems without a collector


def test_tensorrt_llm_spans_are_not_taken_for_vllms(tmp_path: Path) -> None:
    requests = load(30, T0, name=lambda i: str(2048 + i))
    Engine().run(requests)
    spans = []
    for r in requests:
        attributes = {
            "gen_ai.usage.prompt_tokens": r.prompt, "gen_ai.usage.completion_tokens": r.output, "gen_ai.request.id": r.id,
            "gen_ai.request.max_tokens": r.output, "gen_ai.response.finish_reasons": ["stop"],
            "gen_ai.latency.time_to_first_token": r.ttft_ms / 1e3, "gen_ai.latency.e2e": r.e2e_ms / 1e3,
            "gen_ai.latency.time_in_queue": (r.scheduled - r.arrival) / S, "gen_ai.latency.kv_cache_transfer_time": -1.0,
        }  # fmt: skip
        spans.append(
            Span(
                {"service.name": "trtllm"},
                "trt.llm",
                "llm_request",
                r.trace,
                r.span,
                r.arrival,
                r.last_seen + MS,
                None,
                SERVER,
                attributes,
            )
        )
    write(tmp_path / "t.jsonl", spans)
    seen = Seen(tmp_path)
    exact(seen)
    assert {w["engine"] for w in seen.only.workers} == {"TensorRT-LLM"}
    assert seen.only.requests["count"] == 30
    told = dict(seen.requests.select("trace_id", "ttft_ms").iter_rows())  # ids are counters
    assert told == {r.trace: pytest.approx(r.ttft_ms, abs=0.01) for r in requests}
    assert seen.sql("SELECT count(*) FROM reported WHERE value < 0").item() == 0
    assert not any(
        "vLLM" in str(v) for v in seen.sql("SELECT DISTINCT definition FROM reported")["definition"]
    )


def test_llm_d_spans_give_no_nonsense(tmp_path: Path) -> None:
    """The decode span hangs under the prefill span, which has ended: no phase may swallow the other."""
    legs = pair()
    prefill, decode, _, _ = legs
    sidecar, epp = {"service.name": "llm-d-disagg-sidecar"}, {"service.name": "llm-d-epp"}
    spans = []
    for p, d in zip(prefill, decode, strict=True):
        p.trace = d.trace = trace_id("llm-d", p.id)
        ids = {k: span_id("llm-d", k, p.id) for k in ("gw", "entry", "fwd", "p", "d")}
        start = p.arrival - 8 * MS
        key = "llm_d.pd_proxy."
        end = d.last_seen + 2 * MS
        p.parent, d.parent = ids["p"], ids["d"]
        common = {key + "connector": "nixlv2", key + "request_id": external(p.id)}
        spans += [
            Span(epp, "llm-d-router/epp", "gateway.request", p.trace, ids["gw"], start - 5 * MS, end, None, SERVER, {"llm_d.epp.disagg.reason": "x"}),
            Span(sidecar, "llm-d-pd-proxy", "forward_request", p.trace, ids["entry"], start, end, ids["gw"], SERVER, common),
            Span(sidecar, "llm-d-pd-proxy", "prefill", p.trace, ids["p"], p.arrival - MS, p.last_seen + MS, ids["entry"], INTERNAL,
                 {**common, key + "prefill.duration_ms": 30.0}),
            Span(sidecar, "llm-d-pd-proxy", "decode", p.trace, ids["d"], d.arrival - MS, end - MS, ids["p"], INTERNAL,
                 {**common, key + "true_ttft_ms": 50.0, key + "decode.duration_ms": 900.0}),
            v1_span(p, resource("vllm-prefill")), v1_span(d, resource("vllm-decode")),
        ]  # fmt: skip
    write(tmp_path / "t.jsonl", spans)
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.only.requests["count"] == 40
    assert seen.only.mode == "disaggregated"
    by_trace = dict(seen.requests.select("trace_id", "request").iter_rows())
    wall, prefilled = seen.phase("decode_wall"), seen.phase("prefill_wall")
    for p, d in zip(prefill, decode, strict=True):
        name = by_trace[p.trace]
        assert prefilled[name] == pytest.approx((p.first - p.scheduled) / MS, abs=4)
        assert wall[name] == pytest.approx((d.last - d.first) / MS, abs=4)
    assert seen.sql("SELECT headline_observer FROM deployments").item() is None


def test_sglang_captures_are_kept_and_not_misread(shared: Path) -> None:
    seen = Seen(shared / "data" / "sglang")
    exact(seen)
    assert not any(w["engine"] == "vLLM" for d in seen.diagnosis.deployments for w in d.workers)
    for name in ("ttft_ms", "e2e_ms"):
        assert (seen.requests[name].drop_nulls() >= 0).all()
    modes = [row[0] for row in seen.sql("SELECT mode FROM requests WHERE mode <> 'unknown'").rows()]
    assert modes.count("disaggregated") >= 3  # its own spans: three pairs, met by their rooms


def test_a_rotated_file_of_a_nameless_worker_is_one_deployment(tmp_path: Path) -> None:
    requests = load(60, T0)
    Engine().run(requests)
    requests.sort(key=lambda r: r.last_seen)
    res = {"service.name": "unknown_service"}
    write(
        tmp_path / "traces-2023-11-14T22-13-23.000.jsonl", [v1_span(r, res) for r in requests[:30]]
    )
    write(tmp_path / "traces.jsonl", [v1_span(r, res) for r in requests[30:]])
    seen = Seen(tmp_path)
    assert seen.only.requests["count"] == 60


def test_two_nameless_workers_beside_each_other_are_two_deployments(tmp_path: Path) -> None:
    for n in (1, 2):
        requests = load(30, T0 + n * MS, seed=n, name=lambda i, n=n: f"cmpl-{n}-{i}-0")
        Engine().run(requests)
        write(
            tmp_path / f"server{n}.jsonl", [v1_span(r, {"service.name": "vllm"}) for r in requests]
        )
    seen = Seen(tmp_path)
    assert [d.requests["count"] for d in seen.diagnosis.deployments] == [30, 30]


def test_lone_decode_legs_claim_no_ttft_and_no_engine_queue(tmp_path: Path) -> None:
    """Half of the prefill legs are not on record: D's own first-token time is nobody's TTFT."""
    prefill, decode, _, _ = pair()
    spans = [v1_span(r, resource("p")) for r in prefill[::2]]
    write(tmp_path / "t.jsonl", spans + [v1_span(r, resource("d")) for r in decode])
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.requests.group_by("mode").len().sort("mode").rows() == [
        ("disaggregated", 20),
        ("unknown", 20),
    ]
    assert seen.latency("ttft_ms", "engine") is None
    assert seen.latency("e2e_ms", "engine") is None
    assert "no TTFT to tell" in seen.only.verdict
    lone = {r["request"] for r in seen.requests.filter(pl.col("mode") == "unknown").to_dicts()}
    assert not lone & set(seen.phase("prefill_queue"))
    assert lone <= set(seen.phase("kv_wait_upper_bound"))
