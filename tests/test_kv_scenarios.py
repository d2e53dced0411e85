"""KV transfer and placement on simulated runs, from their dumps to the findings: the truth is known."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
import pytest

from pdtrace import wording
from pdtrace.ingest import ingest
from pdtrace.simulator import Run, simulate, write
from pdtrace.store import Store


@cache
def seen(name: str) -> tuple[Run, Store]:
    """A run of 40 s and what its pdtrace spans say."""
    run = simulate(name, seed=3, duration_s=40)
    store = Store()
    with TemporaryDirectory() as folder:
        write(run, Path(folder), "pdtrace")
        ingest([folder], store)
    return run, store


def moved(run: Run) -> pl.DataFrame:
    return run.requests.filter(pl.col("transfer_end_ns").is_not_null())


@pytest.mark.parametrize("name", ["transfer_bound", "decode_memory_bound"])
def test_bytes_times_and_waits_are_those_of_the_run(name: str) -> None:
    run, store = seen(name)
    truth = moved(run)
    row = store.query("kv_transfer").row(0, named=True)
    assert (row["transfers"], row["transferred_bytes"]) == (
        truth.height,
        truth["transfer_bytes"].sum(),
    )
    assert row["moved_s"] == pytest.approx(
        (truth["transfer_end_ns"] - truth["transfer_start_ns"]).sum() / 1e9
    )
    waited = (truth["transfer_start_ns"] - truth["prefill_end_ns"]).sum() / 1e9
    assert row["bridge_s"] + row["space_s"] == pytest.approx(waited, rel=0.02)
    assert row["share"] > 0.9


def test_the_link_is_told_from_the_lack_of_space() -> None:
    link = seen("transfer_bound")[1].query("kv_transfer").row(0, named=True)
    space = seen("decode_memory_bound")[1].query("kv_transfer").row(0, named=True)
    assert link["link_busy_s"] / (link["bridge_s"] + link["space_s"]) > 0.95
    assert space["link_busy_s"] / (space["bridge_s"] + space["space_s"]) < 0.2
    assert wording.finding("kv_transfer", link).suggestions[0].startswith("the link")
    assert wording.finding("kv_transfer", space).suggestions[0].startswith("KV space")


def test_the_fit_finds_the_links_speed() -> None:
    run, store = seen("transfer_bound")
    truth = moved(run)
    row = store.query("transfer_links").row(0, named=True)
    took = (truth["transfer_end_ns"] - truth["transfer_start_ns"]).sum() / 1e9
    assert row["most_at_once"] == 1  # first come, first served
    assert row["link_bytes_per_second"] == pytest.approx(
        truth["transfer_bytes"].sum() / took, rel=0.001
    )
    predicted = (
        row["setup_ms"] / 1e3 * truth.height
        + truth["transfer_bytes"].sum() / row["bytes_per_second"]
    )
    assert predicted == pytest.approx(took, rel=0.005)


def test_what_is_hidden_behind_the_prompt_is_no_wait() -> None:
    run, store = seen("transfer_layerwise")
    truth = moved(run).select(
        "request",
        true_hidden_ms=(pl.min_horizontal("transfer_end_ns", "prefill_end_ns") - pl.max_horizontal("transfer_start_ns", "prefill_start_ns")).clip(0) / 1e6,
        true_exposed_ms=(pl.col("transfer_end_ns") - pl.max_horizontal("transfer_start_ns", "prefill_end_ns")) / 1e6,
    )  # fmt: skip
    assert truth["true_hidden_ms"].sum() > truth["true_exposed_ms"].sum() > 0
    rows = store.sql("FROM transfer_requests").join(truth, on="request")
    assert rows.height >= 0.98 * truth.height
    for part in ("hidden", "exposed"):
        assert (rows[f"{part}_ms"] - rows[f"true_{part}_ms"]).abs().max() < 0.001, part  # type: ignore[operator]


def test_where_the_prefill_is_known_as_wall_time_only_the_truth_lies_between_the_bounds(
    tmp_path: Path,
) -> None:
    run = simulate("transfer_layerwise", seed=2, duration_s=15)
    folder = write(run, tmp_path)
    for path in folder.glob("*.jsonl"):
        path.write_text(
            path.read_text("utf-8").replace('"prefill_exec"', '"prefill_wall"'), "utf-8"
        )
    store = Store()
    ingest([folder], store)
    row = store.query("kv_transfer").row(0, named=True)
    said = wording.finding("kv_transfer", row)
    truth = moved(run)
    waited = (
        truth["transfer_end_ns"] - truth["prefill_end_ns"]
    ).sum() / 1e9  # for link and transfer
    whole = (truth["transfer_end_ns"] - truth["transfer_start_ns"]).sum() / 1e9
    assert row["interval_low"] == pytest.approx(waited, rel=0.02)
    assert row["interval_high"] == row["value"] == pytest.approx(waited + row["wall_s"], rel=0.02)
    assert row["transfer_s"] + row["wall_s"] == pytest.approx(whole, rel=0.02)
    assert "at most" in said.title
    assert row["hidden_s"] is None


def test_distserve_stages_are_those_of_the_run() -> None:
    run, store = seen("transfer_bound")
    rows = store.sql("FROM distserve_stages ORDER BY issued_ns").join(
        run.requests.select("request", "arrival_ns", "prefill_start_ns", "prefill_end_ns", "transfer_start_ns",
                            "transfer_end_ns"),
        on="request",
    )  # fmt: skip
    assert rows.height >= 0.98 * moved(run).height
    off = {
        "transmission_ms": rows["transfer_end_ns"] - rows["transfer_start_ns"],
        "bridge_ms": rows["transfer_start_ns"] - rows["prefill_end_ns"],
        "prefill_execution_ms": rows["prefill_end_ns"] - rows["prefill_start_ns"],
    }
    for stage, true_ns in off.items():
        assert (rows[stage] - true_ns / 1e6).abs().max() < 0.001, stage  # type: ignore[operator]
    whole = (rows["decoding_end_ns"] - rows["issued_ns"]) / 1e6
    parts = sum(rows[s] for s in ("prefill_queuing_ms", "prefill_execution_ms", "transmission_ms",
                                  "decoding_queuing_ms", "decoding_execution_ms"))  # fmt: skip
    assert (whole - parts).abs().max() < 1e-3  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("name", ["router_blind", "router_affinity"])
def test_sessions_that_stay_are_counted_as_the_run_placed_them(name: str) -> None:
    run, store = seen(name)
    worker = pl.coalesce("prefill_worker", "decode_worker")
    turns = run.requests.filter(pl.col("session").is_not_null()).sort("session", "turn")
    before = worker.shift(1).over("session")
    later = turns.select(same=worker == before).drop_nulls()["same"]
    row = store.query("routing").row(0, named=True)
    assert row["later_turns"] == later.len()
    assert row["kept_ratio"] == pytest.approx(later.mean())
    assert row["kept_low_ratio"] < later.mean() < row["kept_high_ratio"]  # type: ignore[operator]
    belief = store.query("router_belief").row(0, named=True)
    assert (belief["value"], belief["cached_basis"]) == (0, "engine")
    assert belief["believed_tokens"] == run.requests["believed_tokens"].sum()


def test_affinity_leaves_less_that_another_placement_could_save() -> None:
    blind = seen("router_blind")[1].query("routing").row(0, named=True)
    affine = seen("router_affinity")[1].query("routing").row(0, named=True)
    assert blind["share"] > 0.15
    assert affine["share"] < 0.1
    assert (
        blind["kept_low_ratio"] <= blind["chance_ratio"] <= blind["kept_high_ratio"]
    )  # round robin
    assert affine["kept_low_ratio"] > affine["chance_ratio"]
    reuse = {
        n: seen(n)[1].sql("SELECT reuse_ratio FROM cache_reuse WHERE \"by\" = 'all'").item()
        for n in ("router_blind", "router_affinity")
    }
    truth = {
        n: seen(n)[0].requests["cached_tokens"].sum() / seen(n)[0].requests["prompt_tokens"].sum()
        for n in reuse
    }
    assert reuse == pytest.approx(truth)
