"""GuideLLM's reports and trtllm-bench's requests: what a request is, what is none, what is not said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pdtrace
from pdtrace.collectors import guidellm, tensorrt_llm_bench
from pdtrace.model import Head

FIXTURES = Path(__file__).parent / "fixtures"
Collect = Callable[..., Any]


@pytest.fixture
def requests_of() -> Callable[[Path], dict[str, tuple[float, float | None]]]:
    """(TTFT, time per token) of every request of a file, by the id that travels."""

    def read(path: Path) -> dict[str, tuple[float, float | None]]:
        with pdtrace.open(path) as trace:
            rows = trace.sql(
                "SELECT external_id, round(ttft_ms, 1), round(tpot_ms, 1) FROM requests"
            ).rows()
        return {name: (ttft, pace) for name, ttft, pace in rows}

    return read


def legs(collected: Any) -> list[dict[str, Any]]:
    return list(collected["legs"].sort("record").iter_rows(named=True))


def skipped(collected: Any) -> dict[str, int]:
    return dict(collected.account.reasons)


def test_a_real_report_agrees_with_its_own_figures(collect: Collect) -> None:
    path = FIXTURES / "guidellm" / "mock_server.json"
    theirs = json.loads(path.read_text())["benchmarks"][0]["requests"]["successful"]
    ours = legs(collect(guidellm, path))
    assert len(ours) == len(theirs) == 4
    for row, said in zip(ours, theirs, strict=True):
        assert row["ttft_ms"] == pytest.approx(said["time_to_first_token_ms"], abs=1e-3)
        assert row["tpot_ms"] == pytest.approx(said["inter_token_latency_ms"], abs=1e-3)
        assert row["e2e_ms"] == pytest.approx(said["request_latency"] * 1e3, abs=1e-3)
        assert row["external_id"] == said["response_id"].removeprefix("chatcmpl-")


def test_a_report_gives_every_listed_request_and_counts_those_it_left_out(collect: Collect) -> None:
    got = collect(guidellm, FIXTURES / "guidellm" / "two_rates.json")
    rows = legs(got)
    assert [row["status"] for row in rows] == ["completed", "completed", "failed", "aborted", "completed"]  # fmt: skip
    assert [row["error"] for row in rows] == [None, None, "HTTP 503", None, None]
    assert [row["ttft_ms"] and round(row["ttft_ms"], 3) for row in rows] == [100, 500, None, 250, 500]  # fmt: skip
    assert [row["output_tokens"] for row in rows] == [11, 6, None, 4, 9]
    assert (got.account.read, skipped(got)) == (7, {guidellm.NOT_LISTED: 2})


def test_each_load_of_a_report_is_a_client_of_its_own(collect: Collect) -> None:
    got = collect(guidellm, FIXTURES / "guidellm" / "two_rates.json")
    assert [row["worker"].rsplit("json", 1)[1] for row in legs(got)] == ["", "", "", "", "#1"]
    rates = [row["value"] for row in got["facts"].iter_rows(named=True) if row["key"] == "request_rate"]  # fmt: skip
    assert rates == ["2.0", "4.0"]


def test_an_answer_in_one_chunk_shows_no_pace(collect: Collect) -> None:
    rows = legs(collect(guidellm, FIXTURES / "guidellm" / "two_rates.json"))
    assert [row["tpot_ms"] and round(row["tpot_ms"], 3) for row in rows] == [50, 100, None, 50, None]  # fmt: skip


def test_nor_does_it_in_the_diagnosis(requests_of: Callable[[Path], Any]) -> None:
    found = requests_of(FIXTURES / "guidellm" / "two_rates.json")
    assert found["5a"] == (500, None) and found["2a"] == (500, 100)


def test_the_clients_own_delay_and_the_wait_behind_reasoning_are_reported(collect: Collect) -> None:
    got = collect(guidellm, FIXTURES / "guidellm" / "two_rates.json")["reported"]
    said = {(row["leg"][-1], row["quantity"]): round(row["value"], 3) for row in got.iter_rows(named=True)}  # fmt: skip
    assert said["1", "target_to_start"] == 250  # due at 1.25 s, sent at 1.5 s
    assert said["1", "time_to_first_output_token"] == 700 and said["0", "target_to_start"] == 2


def test_reports_of_0_3_have_their_own_layout(collect: Collect) -> None:
    done, failed = legs(collect(guidellm, FIXTURES / "guidellm" / "version_0_3.json"))
    assert (done["ttft_ms"], round(done["tpot_ms"], 3), done["prompt_tokens"]) == (1250, 183.333, 8)
    assert (done["ttft_definition"], done["model"]) == (guidellm.TTFT_TEXT, "tiny")
    assert (failed["status"], failed["error"], failed["ttft_ms"]) == ("failed", "ReadTimeout", None)


@pytest.mark.parametrize("content", ['{"benchmarks": []}', "[]", '{"benchmarks": [{"requests": null}]}', '{"guidellm_version": "0.8", "benchmarks": [{'])  # fmt: skip
def test_reports_without_requests_give_none(collect: Collect, tmp_path: Path, content: str) -> None:
    (tmp_path / "benchmarks.json").write_text(content)
    got = collect(guidellm, tmp_path / "benchmarks.json")
    assert got["legs"].height == 0 and got.account.read == sum(skipped(got).values())


def test_ugly_values_are_unknown(collect: Collect, tmp_path: Path) -> None:
    times = {"request_start": 1e300, "first_token_iteration": "soon", "request_end": True}
    request = {"request_id": 5, "info": {"timings": times, "turn_index": "x"}, "output_metrics": []}
    report = {"benchmarks": [{"requests": {"successful": [request, 3, {}], "errored": None}}]}
    (tmp_path / "benchmarks.json").write_text(json.dumps(report))
    got = collect(guidellm, tmp_path / "benchmarks.json")
    (row,) = legs(got)
    assert (row["start_ns"], row["ttft_ms"], row["e2e_ms"], row["output_tokens"]) == (None,) * 4
    assert skipped(got) == {guidellm.NO_START: 1} and got.account.read == 2


def test_trtllm_bench_counts_nanoseconds_on_its_own_clock(collect: Collect) -> None:
    got = collect(tensorrt_llm_bench, FIXTURES / "tensorrt_llm_bench" / "requests.json")
    rows = legs(got)
    assert [row["ttft_ms"] for row in rows] == [250, 499, None]  # the third was not streamed
    assert [row["e2e_ms"] for row in rows] == [1250, 1000, 300]
    assert [row["tpot_ms"] for row in rows] == [100, 100.2, None]
    assert {row["clock"].split(":")[0] for row in rows} == {"perf"} and rows[0]["start_ns"] is None
    assert (got.account.read, skipped(got)) == (4, {tensorrt_llm_bench.NO_TIMES: 1})


def test_lists_of_others_are_left_alone() -> None:
    text = b'[{"ttft_s": 0.1, "end_timestamp": 3, "num_input_tokens": 4}]'
    assert tensorrt_llm_bench.sniff(Head("a.json", "a.json", text, complete=True)) is None
    text = b'{"benchmarks": [{"name": "fib", "duration": 3}]}'
    assert guidellm.sniff(Head("benchmarks.json", "benchmarks.json", text, complete=True)) is None


@pytest.mark.parametrize("group", [5, "many", {"a": 1}])
def test_a_group_of_requests_that_is_no_list_leaves_the_others(
    collect: Collect, tmp_path: Path, group: object
) -> None:
    report = json.loads((FIXTURES / "guidellm" / "mock_server.json").read_text())
    report["benchmarks"][0]["requests"]["errored"] = group
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert len(legs(collect(guidellm, tmp_path / "report.json"))) == 4


@pytest.mark.parametrize("odd", [[], [1], {"a": 1}, True])
def test_an_id_that_is_none_leaves_its_request(
    collect: Collect, tmp_path: Path, odd: object
) -> None:
    report = json.loads((FIXTURES / "guidellm" / "mock_server.json").read_text())
    first = report["benchmarks"][0]["requests"]["successful"][0]
    first["response_id"] = first["request_id"] = first["info"]["conversation_id"] = odd
    (tmp_path / "report.json").write_text(json.dumps(report))
    rows = legs(collect(guidellm, tmp_path / "report.json"))
    assert [row["request_id"] is None for row in rows] == [True, False, False, False]
