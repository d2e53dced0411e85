"""Captures of vLLM servers, of one server and of a split pair: what the run is known to be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from captures_read import CUTS, DEMO, FULL, VLLM, balanced, exact_partition, full, read, server_side


@pytest.fixture(scope="session", autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    read.cache_clear()


def agg_runs() -> list[Any]:
    return [pytest.param((DEMO,), id="demo"), pytest.param((VLLM / "agg",), id="full", marks=full)]


@pytest.mark.parametrize("paths", agg_runs())
def test_vllm_agg_counts_requests_and_nothing_else(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    one = run.one()
    assert (one.mode, one.requests["count"], one.requests["completed"]) == ("aggregated", 362, 362)
    assert run.value("SELECT count(*) FROM spans WHERE name <> 'llm_request'") == 12
    engine, client = "observer = 'engine'", "observer = 'client'"
    traced = "trace_id IS NOT NULL"
    assert run.value(f"SELECT count(DISTINCT request) FROM legs WHERE {engine} AND {traced}") == 362
    assert run.value(f"SELECT count(*) FROM legs WHERE {client} AND request IS NOT NULL") == 358
    # Spans, log and bench rows are the same requests.
    assert (
        run.value(f"SELECT count(DISTINCT request) FROM legs WHERE {engine} AND NOT {traced}")
        == 362
    )
    assert run.value("SELECT count(*) FROM requests WHERE request LIKE '%tokenize%'") == 0
    assert run.value("SELECT count(*) FROM identity_edges WHERE rule = 'prefix_index'") == 358
    lengths = run.value(
        """SELECT count(*) FROM legs c JOIN legs e USING (request)
           WHERE c.observer = 'client' AND e.trace_id IS NOT NULL
             AND (abs(c.prompt_tokens - e.prompt_tokens) > 1 OR abs(c.output_tokens - e.output_tokens) > 1)"""
    )
    assert lengths == 0
    exact_partition(run)
    balanced(run)


@pytest.mark.parametrize("paths", agg_runs())
def test_vllm_agg_says_the_latencies_of_the_run(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    ttft = run.latency("ttft_ms", "engine")
    assert (ttft["count"], ttft["p50"]) == (362, pytest.approx(92.5, abs=0.1))
    assert ttft["p99"] == pytest.approx(1148, abs=1)
    before = run.phase("before_queue")
    assert before["p50_ms"] == pytest.approx(11.2, abs=0.1)
    assert before["p99_ms"] == pytest.approx(237, abs=1)
    headline = run.latency("ttft_ms", "client")
    assert headline["headline"]
    assert headline["count"] == 358


@pytest.mark.parametrize("paths", agg_runs())
def test_vllm_agg_steps_show_interference(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    step = run.store.sql("FROM interference_steps").row(0, named=True)
    assert step["steps"] == 13_844
    assert (step["decode_only_steps"], step["mixed_steps"], step["prefill_only_steps"]) == (
        13_456,
        263,
        125,
    )
    assert step["decode_only_p50_ms"] == pytest.approx(1.90, abs=0.01)
    assert step["mixed_p50_ms"] == pytest.approx(65.3, abs=0.1)
    found = run.finding("prefill_interference")
    assert (found.level, found.unit) == ("A", "s")
    assert found.value == pytest.approx(49.9, rel=0.02)
    assert found.share == pytest.approx(1 / 3, abs=0.01)
    assert found.interval[0] <= found.value <= found.interval[1]
    assert "step-counted decode time, 147.9 s" in found.detail
    assert "50.3 s" in found.detail


def pd_runs() -> list[Any]:
    whole = server_side(VLLM / "pd_nixl") if FULL.is_dir() else ()
    return [
        pytest.param((CUTS / "pd_nixl",), id="cut"),
        pytest.param(whole, id="full", marks=full),
    ]


@pytest.mark.parametrize("paths", pd_runs())
def test_pd_nixl_is_one_split_deployment(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    one = run.one()
    assert (one.mode, one.requests["count"]) == ("disaggregated", 307)
    joined = run.store.sql(
        """SELECT request, bool_or(observer = 'router') AS proxy, bool_or(role = 'prefill') AS p, bool_or(role = 'decode') AS d
           FROM legs WHERE request IS NOT NULL AND container IS NOT TRUE GROUP BY request"""
    )
    assert joined.filter(pl.col("proxy") & pl.col("p") & pl.col("d")).height == 306
    assert joined.filter(~pl.col("proxy")).height == 1
    assert {w["role"] for w in one.workers} == {"router", "prefill", "decode"}
    assert len(one.workers) == 3
    exact_partition(run)
    balanced(run)


@pytest.mark.parametrize("paths", pd_runs())
def test_pd_nixl_headline_is_the_proxys(paths: tuple[Path, ...]) -> None:
    ttft = read(*paths).latency("ttft_ms", "router")
    assert ttft["headline"]
    assert ttft["count"] == 306
    assert ttft["p50"] == pytest.approx(651.6, abs=1)
    assert ttft["p90"] == pytest.approx(1793.8, rel=0.02)


@pytest.mark.parametrize("paths", pd_runs())
def test_pd_nixl_decode_side_wait_is_an_upper_bound_on_kv(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    wait = run.phase("kv_wait_upper_bound")
    assert (wait["phase"], wait["basis"], wait["count"]) == ("kv_wait", "upper_bound", 307)
    queued = run.value(
        """SELECT count(*) FROM phases p JOIN workers w USING (worker)
           WHERE w.role = 'decode' AND p.detail IN ('prefill_queue', 'decode_queue')"""
    )
    assert queued == 0
    moved = run.finding("kv_transfer")
    assert moved.interval[0] < moved.interval[1]
    assert any("only the whole wait on the decode side" in line for line in run.said.not_supported)


@pytest.mark.parametrize("folder", [pytest.param(VLLM / "pd_nixl", id="full", marks=full)])
def test_pd_nixl_counters_bound_the_transfer_inside_that_wait(folder: Path) -> None:
    """The mover's own totals: 306 transfers of 1.882 s and 758.9 MB in the bench runs, one before them."""
    run = read(*server_side(folder))
    row = run.store.query("kv_transfer").row(0, named=True)
    assert row["counter_transfers"] == 307
    assert row["counter_s"] == pytest.approx(1.882, abs=0.001)
    assert row["counter_bytes"] == pytest.approx(758_906_880, rel=0.001)
    assert row["at_most_transfer_s"] / row["value"] == pytest.approx(0.22, abs=0.02)
    assert row["decode_usage_max_ratio"] == pytest.approx(0.038)  # no wait for KV space
    assert (row["expected_bytes"], row["transfers"]) == (None, None)  # a random model; no records


@pytest.mark.parametrize("paths", pd_runs())
def test_pd_nixl_pulled_requests_are_no_prefills_on_the_decode_worker(
    paths: tuple[Path, ...],
) -> None:
    run = read(*paths)
    decode = run.store.sql(
        "SELECT s.* FROM interference_steps s JOIN workers w USING (worker) WHERE w.role = 'decode'"
    ).row(0, named=True)
    held = run.store.sql(
        """SELECT count(*) AS steps, bool_and(pulled_requests = prefill_requests) AS pulled
           FROM steps JOIN workers USING (worker)
           WHERE role = 'decode' AND prefill_requests > 0 AND decode_requests > 0"""
    ).row(0)
    assert held == (210, True)
    assert decode["mixed_steps"] == 0
    assert not decode["lost_s"]
    found = run.finding("prefill_interference")
    worker = run.value("SELECT worker FROM workers WHERE role = 'decode'")
    assert found is None or worker not in found.workers


def edge_runs() -> list[Any]:
    return [
        pytest.param((CUTS / "pd_nixl", CUTS / "edge"), id="cut"),
        pytest.param((VLLM / "pd_nixl", VLLM / "edge"), id="full", marks=full),
    ]


@pytest.mark.parametrize("paths", edge_runs())
def test_edge_is_a_later_window_of_the_prefill_server(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    one = run.one()
    assert one.requests["count"] == 313
    prefill = run.value("SELECT worker FROM workers WHERE role = 'prefill'")
    late = run.store.sql(
        """SELECT DISTINCT l.worker FROM legs l JOIN sources s USING (source)
           WHERE s.path LIKE '%edge%' AND l.observer = 'engine'"""
    )
    assert late["worker"].to_list() == [prefill]


@pytest.mark.parametrize("paths", edge_runs())
def test_edge_finds_what_has_no_span(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    one = run.one()
    assert (one.requests["failed"], one.requests["aborted"]) == (1, 1)
    late = "WHERE r.start_ns > (SELECT max(start_ns) FROM legs WHERE observer = 'router')"
    lost = run.store.sql(
        f"""SELECT r.outcome, r.error, bool_or(s.span_id IS NOT NULL) AS traced
            FROM requests r JOIN legs l USING (request) LEFT JOIN spans s ON s.trace_id = l.trace_id {late}
            GROUP BY r.request, r.outcome, r.error"""
    ).filter(~pl.col("traced"))
    assert sorted(lost["outcome"]) == [
        "aborted",
        "failed",
        "unknown",
    ]  # nothing says how the unsampled one ended
    assert run.value("SELECT count(*) FROM events WHERE kind = 'http_error'") >= 1
    assert run.finding("failed_requests").requests == 2


@pytest.mark.parametrize("paths", edge_runs())
def test_edge_counts_batched_prompts_and_streams(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    assert run.value("SELECT count(*) FROM requests WHERE streams = 2") == 1
    batch = run.store.sql(
        """SELECT DISTINCT request FROM legs WHERE request_id SIMILAR TO '.*-[01](-[0-9a-f]{8})?' AND source IN
           (SELECT source FROM sources WHERE path LIKE '%edge%')"""
    )
    assert batch.height >= 2
