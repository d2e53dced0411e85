"""Captures of Dynamo: its spans, logs and clients agree on the run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from captures_read import CUTS, DYNAMO, Run, balanced, exact_partition, full, read, server_side


@pytest.fixture(scope="session", autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    read.cache_clear()


@pytest.mark.parametrize("folder", [pytest.param(DYNAMO / "agg", id="full", marks=full)])
def test_dynamo_agg_answers_repeat_the_routers_belief(folder: Path) -> None:
    """Cached tokens in the answers equal the router's overlap in 200 of 200: no check of it."""
    run = read(*server_side(folder))
    assert run.finding("router_belief") is None
    row = run.store.query("routing").row(0, named=True)
    assert (row["decisions"], row["belief"], row["workers_seen"]) == (200, "copy", 2)
    assert row["index_saved_tokens"] == 46_160 - 44_240  # best eligible less selected
    assert row["requests_over_mean"] == pytest.approx(1.02)


DYNAMO_RUNS = {"disagg_bootstrap": ("disaggregated", 98.1), "agg": ("aggregated", 30.8)}


def client_truth(folder: Path) -> list[float]:
    """TTFT of each request as the load generator measured it, in ms."""
    with gzip.open(folder / "client.jsonl.gz", "rt") as stream:
        rows = [json.loads(line) for line in stream]
    return [(row["chunk_unix_ns"][0] - row["start_unix_ns"]) / 1e6 for row in rows]


def dynamo_runs() -> list[Any]:
    return [
        pytest.param(base / name, count, id=f"{name}-{kind}", marks=marks)
        for name in DYNAMO_RUNS
        for base, count, kind, marks in ((CUTS, 30, "cut", []), (DYNAMO, 200, "full", full))
    ]


@pytest.mark.parametrize(("folder", "count"), dynamo_runs())
def test_dynamo_tells_the_clients_ttft_from_the_servers_alone(folder: Path, count: int) -> None:
    run = read(*server_side(folder))
    one = run.one()
    mode, figure = DYNAMO_RUNS[folder.name]
    assert (one.mode, one.requests["count"], one.requests["completed"]) == (mode, count, count)
    ttft = run.latency("ttft_ms", "frontend")
    assert ttft["headline"]
    assert ttft["count"] == count
    assert ttft["definition"] == "frontend: start of the HTTP request to the first streamed token"
    truth = pl.Series(client_truth(folder)).median()
    assert ttft["p50"] == pytest.approx(truth, abs=5)
    if count == 200:
        assert truth == pytest.approx(figure, abs=0.1)
    said = run.value(
        "SELECT median(value) FROM reported WHERE quantity = 'ttft_ms' AND definition LIKE '%prefill worker%'"
    )
    assert said is not None
    if mode == "disaggregated":  # what the request trace calls ttft_ms is another quantity
        assert said < truth / 2
    exact_partition(run)
    balanced(run)


@pytest.mark.parametrize(("folder", "count"), dynamo_runs())
def test_dynamo_has_one_frontend_and_its_workers(folder: Path, count: int) -> None:
    roles = sorted(w["role"] or "?" for w in read(*server_side(folder)).one().workers)
    engines = (
        ["aggregated", "aggregated"]
        if folder.name == "agg"
        else ["decode", "decode", "prefill", "prefill"]
    )
    assert roles == sorted([*engines, "frontend"])


@pytest.mark.parametrize(("folder", "count"), dynamo_runs())
def test_dynamo_logs_alone_tell_the_same_structure(folder: Path, count: int) -> None:
    traces = [p for p in folder.iterdir() if p.name == "otlp_traces.jsonl.gz"]
    logs = sorted(folder.glob("*.log.jsonl.gz"))
    exported, logged = read(*traces), read(*logs)
    legs = """SELECT request, observer, role, container, status FROM legs
              WHERE span_id IS NOT NULL AND request IS NOT NULL ORDER BY ALL"""
    told = exported.store.sql(legs)
    assert told.height >= 2 * count
    assert logged.store.sql(legs).unique().sort(pl.all()).equals(told.unique().sort(pl.all()))
    a, b = (
        run.store.sql("SELECT request, ttft_ms, e2e_ms FROM requests ORDER BY request")
        for run in (exported, logged)
    )
    assert a["request"].equals(b["request"])
    for column in ("ttft_ms", "e2e_ms"):
        off = (a[column] - b[column]).abs()
        assert off.quantile(0.95) < 3
        assert off.max() < 30
    # The copies count once, and the finer one stays.
    both = Run([*traces, *logs])
    assert both.store.count("spans") == exported.store.count("spans")
    assert both.value("SELECT max(coalesce(resolution_ns, 1)) FROM spans") == 1
    assert both.value("SELECT count(*) FROM decisions") == exported.value(
        "SELECT count(*) FROM decisions"
    )
    assert both.value("SELECT count(cost) FROM decisions") == both.value(
        "SELECT count(*) FROM decisions"
    )


@pytest.mark.parametrize(
    ("folder", "losses"),
    [pytest.param(DYNAMO / "agg", ((1.07, 23.7), (1.26, 23.4)), id="full", marks=full)],
)
def test_dynamo_agg_interference_on_each_worker(
    folder: Path, losses: tuple[tuple[float, float], ...]
) -> None:
    run = read(*server_side(folder))
    found = run.finding("prefill_interference")
    assert found.level == "A"
    rows = run.store.sql("SELECT lost_s, decode_s FROM interference_steps WHERE lost_s > 0").rows()
    for lost, whole in losses:
        assert any(
            row[0] == pytest.approx(lost, rel=0.1) and row[1] == pytest.approx(whole, rel=0.1)
            for row in rows
        ), rows


def aiperf_runs() -> list[Any]:
    return [
        pytest.param(CUTS / "aiperf_disagg", 30, id="cut"),
        pytest.param(DYNAMO / "aiperf_disagg", 200, id="full", marks=full),
    ]


@pytest.mark.parametrize(("folder", "count"), aiperf_runs())
def test_aiperf_records_join_spans(folder: Path, count: int) -> None:
    run = read(folder)
    assert run.one().requests["count"] == count
    joined = run.value(
        """SELECT count(DISTINCT c.request) FROM legs c JOIN legs f USING (request)
           WHERE c.observer = 'client' AND f.observer = 'frontend' AND f.span_id IS NOT NULL"""
    )
    assert joined == count
    assert run.latency("ttft_ms", "client")["headline"]
    exact_partition(run)
    balanced(run)


@pytest.mark.parametrize(
    "path",
    [pytest.param(DYNAMO / "disagg_bootstrap" / "otlp_logs.jsonl.gz", id="full", marks=full)],
)
def test_otlp_logs_alone_are_one_deployment(path: Path) -> None:
    run = read(path)
    one = run.one()
    assert (one.mode, one.requests["count"], one.requests["completed"]) == (
        "disaggregated",
        200,
        200,
    )
    assert run.value("SELECT count(*) FROM decisions") == 400
    assert run.value("SELECT count(*) FROM legs WHERE leg LIKE 'dynamo_request_trace/%'") == 600
    balanced(run)
