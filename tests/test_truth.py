"""Dumps whose truth is known, through the whole pipeline: what it says must be what happened."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest
from truth_check import Seen, agrees, column, exact, external, joined_pairs
from truth_fleet import hop, pair, pd_folder, pd_name, routed, rust_pd, stack_spans, two_workers
from truth_otlp import MS, T0, S, trace_id, uuid, write
from truth_vllm import Engine, Log, Request, load, resource, scrape, v0_span, v1_span


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


def wait_of_decode(
    seen: Seen, detail: str, legs: Sequence[Request], tolerance: float = 1.5
) -> None:
    agrees(seen, legs, seen.phase(detail), lambda r: (r.scheduled - r.queued) / MS, tolerance)


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
