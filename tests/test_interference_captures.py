"""Prefill interference at level B on real captures, against what the engine steps say (level A)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from pdtrace.diagnose import diagnose
from pdtrace.ingest import ingest
from pdtrace.store import Store

FULL = Path(__file__).resolve().parents[2] / "shared" / "data"
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not FULL.is_dir(), reason="the full captures are not beside this checkout"),
]


@cache
def read(name: str) -> Store:
    """A capture, read once."""
    store = Store()
    ingest([str(FULL / name)], store)
    return store


def test_vllm_agg_loses_by_its_tokens_what_it_loses_by_its_steps() -> None:
    row = read("vllm/agg").sql("FROM interference_gaps").row(0, named=True)
    assert row["flagged"] is True
    assert row["lost_s"] == pytest.approx(49.9, rel=0.05)
    assert row["lost_low_s"] < 49.9 < row["lost_high_s"]
    assert abs(row["best_shift_ms"]) < 10


def test_dynamo_agg_loses_by_its_clients_chunks_what_it_loses_by_its_steps() -> None:
    store = read("dynamo/agg")
    rows = store.sql("FROM interference_gaps ORDER BY lost_s").rows(named=True)
    assert [row["flagged"] for row in rows] == [True, True]
    assert [row["observer"] for row in rows] == ["client", "client"]
    assert rows[0]["lost_s"] == pytest.approx(1.07, rel=0.10)
    assert rows[1]["lost_s"] == pytest.approx(1.25, rel=0.10)


def test_without_steps_the_finding_rests_on_token_times() -> None:
    """Spans and bench results of vllm/agg alone: the engine's log is not at hand."""
    folder = FULL / "vllm/agg"
    paths = [str(p) for p in folder.iterdir() if "log" not in p.name and p.is_file()]
    store = Store()
    ingest(paths, store)
    assert store.count("steps") == 0
    (found,) = [
        finding
        for deployment in diagnose(store).deployments
        for finding in deployment.findings
        if finding.id == "prefill_interference"
    ]
    assert found.level == "B"
    assert found.value == pytest.approx(49.9, rel=0.15)
    assert found.interval is not None
    assert found.interval[0] < 49.9 < found.interval[1]
    # one of the eight long prompts that were sent to disturb
    assert found.culprits[0][0].startswith("long-")
    assert "token times" in found.detail


@pytest.mark.parametrize(
    "name", ["vllm/pd_nixl", "dynamo/disagg_bootstrap", "dynamo/aiperf_disagg"]
)
def test_no_decode_worker_of_a_pair_is_flagged(name: str) -> None:
    store = read(name)
    assert store.count("interference_gaps") > 0
    for table in ("interference_steps", "interference_gaps"):
        flagged = store.sql(
            f"SELECT t.worker FROM {table} t JOIN workers w USING (worker) WHERE w.role = 'decode' AND t.flagged"
        )
        assert flagged.height == 0
