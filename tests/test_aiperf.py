"""AIPerf's files: requests as client legs, scrapes as samples, everything else named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdtrace.collectors import aiperf
from pdtrace.inputs import expand
from pdtrace.model import Head

FIXTURE = Path(__file__).parent / "fixtures" / "aiperf" / "profile_export.jsonl"
Collect = Callable[..., Any]


def test_requests_are_client_legs(collect: Collect) -> None:
    found = collect(aiperf, FIXTURE)
    legs = found["legs"].sort("record")
    leg = legs.row(0, named=True)
    assert legs.height == 6 and found.account.unit == "request"
    assert (
        leg["external_id"] == "69aeee8a-c94b-483c-8914-ed9b327a45c5"
        and leg["session"] == "session_000000"
    )
    assert leg["start_ns"] == 1795993357207704403 and leg["ttft_ms"] == pytest.approx(43.627115)
    assert (
        leg["first_token_ns"] == leg["start_ns"] + 43627115
        and leg["end_ns"] == leg["start_ns"] + 297796570
    )
    assert (leg["prompt_tokens"], leg["output_tokens"], leg["cached_tokens"]) == (
        193,
        44,
        0,
    )  # the server's usage
    assert leg["tpot_ms"] == pytest.approx((297.79657 - 43.627115) / 43)
    stream = found["streams"].filter(leg=leg["leg"]).row(0, named=True)
    assert (
        len(stream["gaps_us"]) == 43
        and stream["gaps_us"][0] == 5696
        and stream["emission"] == "chunk"
    )


def test_both_token_counts_are_kept_as_reported(collect: Collect) -> None:
    found = collect(aiperf, FIXTURE)
    rows = found["reported"].filter(leg=found["legs"].sort("record")["leg"][0])
    values = dict(rows.select("quantity", "value").iter_rows())
    assert values["usage_completion_tokens"] == 44 and values["output_sequence_length"] == 49
    assert values["credit_to_start"] == pytest.approx(1.324353)
    assert "one mean per request" in rows.filter(quantity="inter_token_latency")["definition"][0]


def test_warm_up_is_marked_and_a_cancelled_request_is_aborted(collect: Collect) -> None:
    legs = collect(aiperf, FIXTURE)["legs"].sort("record")
    assert legs["note"].to_list() == [None, None, None, None, "warmup", None]
    last = legs.row(5, named=True)
    assert (last["status"], last["error"], last["ttft_ms"]) == (
        "aborted",
        "499 RequestCancellationError",
        None,
    )
    assert last["output_tokens"] is None and last["e2e_ms"] > 0


def test_units_are_per_value(collect: Collect, tmp_path: Path) -> None:
    record = {
        "metadata": {"x_request_id": "a", "request_start_ns": 10**18, "request_end_ns": 10**18 + 2 * 10**9},
        "metrics": {
            "time_to_first_token": {"value": 0.5, "unit": "s"}, "request_latency": {"value": 1_500_000, "unit": "us"},
            "inter_chunk_latency": {"value": [0.25, 0.75], "unit": "s"},
        },
    }  # fmt: skip
    path = tmp_path / "profile_export.jsonl"
    path.write_text(json.dumps(record, separators=(",", ":")) + '\n{"metadata":{}}\n')
    found = collect(aiperf, path)
    assert (
        found["legs"].row(0, named=True)["ttft_ms"] == 500
        and found["legs"].row(0, named=True)["e2e_ms"] == 1500
    )
    assert found["streams"]["gaps_us"].to_list() == [[250_000, 750_000]]
    assert found.account.reasons == {"no request_start_ns": 1}


def test_scrapes_are_samples_of_the_endpoint(collect: Collect, tmp_path: Path) -> None:
    scrape = {
        "endpoint_url": "http://10.0.0.1:8000/metrics", "timestamp_ns": 10**18,
        "metrics": {"running": [{"labels": {"m": "x"}, "value": 3.0}], "ttft": [{"buckets": {"1": 2}, "sum": 0.5, "count": 2}]},
    }  # fmt: skip
    path = tmp_path / "server_metrics_export.jsonl"
    path.write_text(json.dumps(scrape, separators=(",", ":")) + "\n")
    rows = collect(aiperf, path)["samples"].sort("metric")
    assert rows["metric"].to_list() == ["running", "ttft_count", "ttft_sum"] and rows[
        "value"
    ].to_list() == [3, 2, 0.5]
    assert rows["worker"].unique().to_list() == ["address:10.0.0.1:8000"]


def test_raw_records_are_recognised_and_not_used() -> None:
    data = b'{"metadata":{"session_num":0,"x_request_id":"a"},"start_perf_ns":1,"payload":{}}\n'
    match = aiperf.sniff(Head("profile_export_raw.jsonl", "profile_export_raw.jsonl", data))
    assert match is not None and "prompts" in match.ignore


@pytest.mark.shared
def test_every_file_of_a_run_is_known(shared: Path) -> None:
    folder = shared / "data/dynamo/aiperf_disagg"
    for item in expand([str(folder / "aiperf"), str(folder / "aiperf.stdout")]):
        assert aiperf.sniff(item.head()) is not None, item.path


@pytest.mark.shared
def test_full_run(collect: Collect, shared: Path) -> None:
    found = collect(aiperf, shared / "data/dynamo/aiperf_disagg/aiperf/profile_export.jsonl.gz")
    assert found["legs"].height == 200 and found["legs"]["external_id"].n_unique() == 200
    assert found["legs"]["ttft_ms"].mean() == pytest.approx(
        67.591183855
    )  # as profile_export_aiperf.json says
