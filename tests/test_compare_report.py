"""The page of a comparison: conditions above the pictures, both runs on the same axes, nothing pooled, no code from outside."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from pdtrace import compare, compare_report
from pdtrace.api import Trace
from pdtrace.cli import cli
from pdtrace.store import Store

NASTY = "<script>alert(1)</script>"
T0 = 1_790_000_000_000_000_000


def table(folder: Path, name: str, factor: float, note: str = "") -> Path:
    path = folder / f"{name}.csv"
    rows = [f"{note}r{n},{1_700_000_000 + n},{(50 + n % 10) * factor},{500 * factor + n},100,20" for n in range(120)]  # fmt: skip
    path.write_text("request_id,start,ttft_ms,e2e_ms,prompt_tokens,output_tokens\n" + "\n".join(rows))  # fmt: skip
    return path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[compare.Comparison, list[pl.DataFrame]]:  # fmt: skip
    folder = tmp_path_factory.mktemp("runs")
    with Trace.read([table(folder, "a", 1)]) as a, Trace.read([table(folder, "b", 2)]) as b:
        comparison = compare.compare(a.store, b.store, ("a.csv", "b.csv"))
        return comparison, [t.store.query("latency_quantiles") for t in (a, b)]


def test_curves_hold_both_runs_apart_and_say_what_most_requests_saw(
    found: tuple[compare.Comparison, list[pl.DataFrame]],
) -> None:
    comparison, quantiles = found
    drawn = {p.name: p for p in compare_report.pair_pictures(comparison.pairs[0], quantiles)}
    curves = drawn["curves"].rows
    half = curves.filter(pl.col("metric") == "ttft_ms", (pl.col("share_ratio") - 0.5).abs() < 1e-9)
    assert dict(half.select("run", "value_ms").iter_rows()) == {"A": 54.5, "B": 109.0}
    assert str(drawn["curves"].sentence).startswith("TTFT: half of the requests stay at or below 54.5 ms in A, 109 ms in B")  # fmt: skip
    ratios = drawn["differences"].rows
    ttft = ratios.filter(pl.col("figure") == "TTFT p50").row(0, named=True)
    assert ttft["ratio"] == pytest.approx(2.0)
    assert ttft["kind"] == "higher in B"
    assert not drawn["phases"].there or drawn["phases"].rows.height


def test_quantiles_end_where_no_request_lies_beyond(store: Store) -> None:
    store.append("requests", [
        {"request": f"r{n}", "deployment": "d", "outcome": "completed", "e2e_ms": float(n), "start_ns": T0 + n, "end_ns": T0 + n + 10} for n in range(10)
    ])  # fmt: skip
    rows = store.query("latency_quantiles").filter(pl.col("metric") == "e2e_ms")
    assert (rows["share_ratio"].min(), rows["share_ratio"].max()) == (0.1, 0.9)
    store.execute("DELETE FROM requests WHERE request > 'r3'")
    assert store.query("latency_quantiles").is_empty()


def test_the_command_writes_a_page_without_network_or_code_from_outside(tmp_path: Path) -> None:
    a, b = table(tmp_path, "a", 1, NASTY), table(tmp_path, "b", 2, NASTY)
    out = tmp_path / f"{NASTY.replace('/', '')}.html"
    result = CliRunner().invoke(cli, ["compare", str(a), str(b), "--report", str(out)])
    assert result.exit_code == 0, result.output
    page = out.read_text("utf-8")
    assert page.index("Conditions") < page.index('class="picture"')
    assert "<script>alert" not in page
    assert "connect-src 'none'" in page
    assert not re.search(r'(?:src|href)="https?:', page)
    blobs = re.findall(r'<script type="text/plain" class="data">([^<]+)<', page)
    payloads = [json.loads(zlib.decompress(base64.b64decode(blob))) for blob in blobs]
    assert len(payloads) >= 2
    assert all(payload["spec"] and payload["rows"]["length"] for payload in payloads)
    again = CliRunner().invoke(cli, ["compare", str(a), str(b), "--report", str(out)])
    assert again.exit_code != 0


def test_phases_of_neither_run_are_left_out(
    found: tuple[compare.Comparison, list[pl.DataFrame]],
) -> None:
    rows = pl.DataFrame(
        {"phase": ["prefill", "prefill", "queue", "queue"], "run": ["A", "B", "A", "B"], "mean_ms": [10.0, 30.0, 5.0, 4.0], "upper_bound": [False] * 4, "text": [""] * 4, "level": [None] * 4}
    )  # fmt: skip
    assert compare_report._phase_sentence(rows) == (
        "the greatest change is in prefill: 20.0 ms more per request in B (10.0 ms in A, 30.0 ms in B)."
    )
    bounded = rows.with_columns(upper_bound=pl.Series([True, False, False, False]))
    assert compare_report._phase_sentence(bounded) == (
        "the greatest change is in prefill, an upper bound in A: 20.0 ms more per request in B (≤ 10.0 ms in A, 30.0 ms in B)."
    )
    assert compare_report._phase_sentence(rows.head(0)) is None
    assert compare_report._phase_sentence(rows.filter(pl.col("run") == "A")) is None
