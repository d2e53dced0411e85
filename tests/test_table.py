"""Tables of requests: every spelling of a table gives the same legs, and what is guessed is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pdtrace.api import Trace
from pdtrace.collectors import table
from pdtrace.collectors._table_headers import is_request_table, understand
from pdtrace.inputs import expand
from pdtrace.model import Head

FIXTURES = Path(__file__).parent / "fixtures" / "table"
Collect = Callable[..., Any]


def written(tmp_path: Path, text: str | bytes, name: str = "requests.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def facts(collected: Any) -> dict[str, str]:
    return dict(collected["facts"].select("key", "value").iter_rows())


@pytest.mark.parametrize(
    ("header", "meaning", "unit"),
    [
        ("ttft", "ttft", None), ("TTFT (s)", "ttft", "s"), ("time_to_first_token_ms", "ttft", "ms"),
        ("first_token_latency", "ttft", None), ("FirstToken[ms]", "ttft", "ms"), ("E2E Latency(s)", "e2e", "s"),
        ("latency", "e2e", None), ("total_latency", "e2e", None), ("tokens/sec", "tps", None),
        ("throughput (tok/s)", "tps", None), ("ContextTokens", "prompt_tokens", None),
        ("GeneratedTokens", "output_tokens", None), ("n_out", "output_tokens", None),
        ("usage.prompt_tokens_details.cached_tokens", "cached_tokens", None),
        ("첫 토큰 지연 (ms)", "ttft", "ms"), ("首token延迟", "ttft", None), ("入力", None, None),
        ("p99 TTFT (ms)", None, None), ("Mean TTFT (ms)", None, None), ("avg_itl_ms", "tpot", "ms"),
        ("nvext.timing.ttft_ms", None, None), ("prefill_usage.completion_tokens", None, None),
        ("prompt", "prompt_tokens", None), ("max_tokens", "max_tokens", None), ("hash_ids", None, None),
        ("client_start_time", "start", None),
    ],
)  # fmt: skip
def test_a_header_means(header: str, meaning: str | None, unit: str | None) -> None:
    column = understand(header)
    assert (column.meaning if column else None, column.unit if column else None) == (meaning, unit)


@pytest.mark.parametrize("name", ["smallest.csv", "decimal-comma.csv", "pasted.md"])
def test_the_same_twenty_requests_in_every_spelling(collect: Collect, name: str) -> None:
    found = collect(table, FIXTURES / name)
    legs = found["legs"].sort("request_id")
    assert legs.height == 20
    third = legs.row(2, named=True)
    assert (third["request_id"], third["prompt_tokens"], third["output_tokens"]) == (
        "r03",
        6840,
        142,
    )
    assert third["ttft_ms"] == pytest.approx(3420) and third["e2e_ms"] == pytest.approx(6540)
    assert third["tpot_ms"] == pytest.approx(3120 / 141)
    assert (
        third["note"] == "RAG: 12 passages"
        and third["status"] == "completed"
        and third["observer"] == "client"
    )
    assert third["start_ns"] is None and third["clock"] is None
    rate = found["reported"]
    assert rate["definition"].unique().to_list() == [
        "(output tokens - 1) / (whole duration - TTFT)"
    ]


def test_guessed_units_are_said_and_given_ones_are_not(collect: Collect) -> None:
    guessed = facts(collect(table, FIXTURES / "smallest.csv"))
    assert guessed["unit_guess:TTFT"].startswith("seconds, because")
    assert guessed["unit_guess:total_latency"].startswith("seconds, because")


def test_given_units_need_no_guess(collect: Collect) -> None:
    assert not any(
        key.startswith("unit_guess")
        for key in facts(collect(table, FIXTURES / "decimal-comma.csv"))
    )


def test_cells_with_units_missing_values_failures_and_a_summary_row(collect: Collect) -> None:
    found = collect(table, FIXTURES / "units-in-cells.tsv")
    legs = found["legs"].sort("request_id")
    assert legs.height == 20 and found.account.reasons == {"summary row": 1}
    assert legs["ttft_ms"][0] == pytest.approx(210) and legs["ttft_ms"][2] == pytest.approx(3420)
    assert (
        legs.row(4, named=True)["status"] == "failed" and legs.row(4, named=True)["error"] == "503"
    )
    assert legs.row(4, named=True)["ttft_ms"] is None and legs.row(4, named=True)["e2e_ms"] is None
    assert (
        legs.row(7, named=True)["status"] == "aborted"
        and legs.row(7, named=True)["ttft_ms"] is None
    )
    assert facts(found)["zero_ttft"].startswith("1 ")


@pytest.mark.parametrize(
    ("ttft", "latency", "ttft_ms", "e2e_ms"),
    [
        ("0.4", "3.1", 400, 3100),
        ("400", "3100", 400, 3100),
        ("400", "3.1", 400, 3100),
        ("400000", "3100000", 400, 3100),
    ],
)
def test_units_come_from_what_fits_together(
    collect: Collect, tmp_path: Path, ttft: str, latency: str, ttft_ms: float, e2e_ms: float
) -> None:
    rows = "\n".join(f"{i},500,101,{ttft},{latency}" for i in range(5))
    legs = collect(table, written(tmp_path, f"id,input,output,ttft,latency\n{rows}\n"))["legs"]
    assert legs["ttft_ms"][0] == pytest.approx(ttft_ms) and legs["e2e_ms"][0] == pytest.approx(
        e2e_ms
    )


def test_utf16_with_bom_and_semicolons(collect: Collect, tmp_path: Path) -> None:
    text = "Request;TTFT (ms);Output Tokens\nä1;350,5;10\nä2;1.350,5;20\n".encode("utf-16")
    legs = collect(table, written(tmp_path, text))["legs"].sort("record")
    assert legs["request_id"].to_list() == ["ä1", "ä2"] and legs["ttft_ms"].to_list() == [
        350.5,
        1350.5,
    ]


def test_parquet_gives_the_same_rows_as_csv(collect: Collect, tmp_path: Path) -> None:
    frame = pl.read_csv(FIXTURES / "smallest.csv")
    frame.write_parquet(tmp_path / "r.parquet")
    legs = collect(table, tmp_path / "r.parquet")["legs"]
    assert legs.height == 20 and legs["ttft_ms"].median() == pytest.approx(235)


def test_running_numbers_do_not_travel_between_files(collect: Collect, tmp_path: Path) -> None:
    legs = collect(table, written(tmp_path, "request,ttft_ms\n1,300\nreq-2,400\n"))["legs"].sort(
        "record"
    )
    assert legs["request_id"].to_list() == ["1", "req-2"] and legs["external_id"].to_list() == [
        None,
        "req-2",
    ]


def test_prompt_text_is_never_stored(collect: Collect, tmp_path: Path) -> None:
    long = "x" * 300
    text = f"prompt,response,ttft_ms,output_tokens,note\nsecret words,secret answer,300,10,{long}\n"
    found = collect(table, written(tmp_path, text))
    leg = found["legs"].row(0, named=True)
    assert leg["prompt_tokens"] is None and leg["output_tokens"] == 10 and leg["note"] is None
    for name in ("legs", "facts", "reported", "skipped"):
        assert "secret" not in str(found[name].to_dicts())
    assert facts(found)["columns_not_used"] == "prompt, response"


def test_a_client_log_with_chunk_times(collect: Collect) -> None:
    found = collect(table, FIXTURES / "client.jsonl")
    leg = found["legs"].sort("record").row(0, named=True)
    assert (leg["external_id"], leg["observer"], leg["clock"]) == ("drv-1-0000", "client", "wall")
    assert leg["start_ns"] == 1795993230574199213 and leg["first_token_ns"] == 1795993230652350114
    assert leg["ttft_ms"] == pytest.approx(78.150901) and leg["span_id"] == "e1453a1cbc002d0f"
    assert (leg["prompt_tokens"], leg["cached_tokens"], leg["output_tokens"]) == (730, 0, 51)
    stream = found["streams"].sort("leg").row(0, named=True)
    assert (
        len(stream["gaps_us"]) == 50
        and stream["gaps_us"][0] == 4464
        and stream["emission"] == "chunk"
    )
    assert "nvext.timing.ttft_ms" in found["reported"]["quantity"].to_list()


def test_an_instant_that_is_none_leaves_the_tokens_of_its_answer_unknown(
    collect: Collect, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (FIXTURES / "client.jsonl").read_text().splitlines()]
    (name,) = (
        key for key, value in rows[0].items() if isinstance(value, list) and len(value) == 51
    )
    rows[0][name][20] = -1
    path = tmp_path / "client.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = collect(table, path)
    assert found["legs"].height == len(rows)
    assert found["streams"].height == len(rows) - 1
    assert found["streams"]["first_ns"].min() > 10**18


def test_a_proxy_log_is_a_router_and_the_prefill_call_gives_no_output_tokens(
    collect: Collect,
) -> None:
    leg = (
        collect(table, FIXTURES / "proxy_requests.jsonl")["legs"].sort("record").row(0, named=True)
    )
    assert leg["observer"] == "router" and leg["external_id"] == "pdmixed-2"
    assert leg["ttft_ms"] == pytest.approx(1025.77, abs=0.01) and leg["prompt_tokens"] == 2228
    assert leg["output_tokens"] is None and leg["remote_id"] == "cmpl-pdmixed-2-0-91b767a6"


def test_litellm_fills_a_missing_first_token_with_the_end(collect: Collect) -> None:
    found = collect(table, FIXTURES / "synthetic-litellm.jsonl")
    legs = found["legs"].sort("record")
    assert legs["ttft_ms"].to_list() == [pytest.approx(500), None, None]
    assert legs["e2e_ms"].to_list() == [
        pytest.approx(2500),
        pytest.approx(1000),
        pytest.approx(100),
    ]
    assert legs["status"].to_list() == ["completed", "completed", "failed"]
    assert legs["cached_tokens"][0] == 1024 and legs["observer"][0] == "gateway"
    assert legs["error"][2] == "RateLimitError"
    assert "secret" not in str(legs.to_dicts()) and "secret" not in str(found["facts"].to_dicts())


def test_llmperf_tpot_contains_the_first_token_and_is_not_taken(collect: Collect) -> None:
    found = collect(table, FIXTURES / "synthetic-llmperf_individual_responses.json")
    legs = found["legs"].sort("record")
    assert legs["tpot_ms"].to_list() == [pytest.approx(3500 / 99), None]
    assert legs["ttft_ms"].to_list() == [500, None] and legs["status"].to_list() == [
        "completed",
        "failed",
    ]


def test_burstgpt_elapsed_is_the_whole_response_and_zero_tokens_a_failure(collect: Collect) -> None:
    legs = collect(table, FIXTURES / "synthetic-burstgpt.csv")["legs"].sort("record")
    assert legs["e2e_ms"].to_list() == [3200, 400, 12500] and legs["ttft_ms"].null_count() == 3
    assert legs["status"].to_list() == ["completed", "failed", "completed"]
    assert legs["start_ns"].null_count() == 3 and legs["clock_start_ns"].to_list() == [
        5 * 10**9,
        45 * 10**9,
        118 * 10**9,
    ]


def test_azure_and_mooncake_traces_have_no_latency(collect: Collect, tmp_path: Path) -> None:
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
    leg = collect(table, written(tmp_path, azure))["legs"].row(0, named=True)
    assert leg["start_ns"] == 1700158623979960000 and (
        leg["prompt_tokens"],
        leg["output_tokens"],
    ) == (4808, 10)
    assert leg["ttft_ms"] is None and leg["e2e_ms"] is None


def test_a_worker_column_names_who_served(collect: Collect, tmp_path: Path) -> None:
    found = collect(table, written(tmp_path, "id,worker,ttft_ms\nreq-a,w1,300\nreq-b,w2,400\n"))
    served = found["legs"].filter(pl.col("observer") == "engine").sort("leg")
    assert (
        served["worker"].to_list() == ["service:w1", "service:w2"]
        and served["start_ns"].null_count() == 2
    )
    assert served["external_id"].to_list() == ["req-a", "req-b"]


@pytest.mark.parametrize(
    "text",
    [
        "name,age\nx,3\n", "Metric,avg,min\nTTFT (ms),3,4\n", "TTFT p50,TTFT p99,qps\n1,2,3\n",
        '{"resourceSpans":[{"scopeSpans":[]}]}\n', '{"level":"INFO","time":1,"msg":"x","duration":3}\n',
        "# HELP x y\nx 1\n", '{"ttfts":[1,2],"itls":[[1]],"input_lens":[1,2]}\n', "just a sentence, with a comma\n",
        "0.3,4.2,100\n0.2,3.1,80\n",
    ],
)  # fmt: skip
def test_what_is_no_table_of_requests_is_not_claimed(text: str) -> None:
    assert table.sniff(Head("x", "x", text.encode(), complete=True)) is None


def test_names_alone_decide() -> None:
    assert is_request_table(["request", "total_latency", "note"])
    assert not is_request_table(["id", "model", "status"])


def test_an_array_that_was_cut_off_keeps_its_whole_records(
    collect: Collect, tmp_path: Path
) -> None:
    path = written(
        tmp_path,
        '[{"id":"a","ttft_ms":3,"n_out":2},{"id":"b","ttft_ms":4,"n_out":2},{"id":"c","tt',
        "r.json",
    )
    assert collect(table, path)["legs"]["request_id"].sort().to_list() == ["a", "b"]


def test_a_first_record_longer_than_the_head_is_recognised_by_its_outer_keys(
    collect: Collect, tmp_path: Path
) -> None:
    line = '{"id":"call-%d","messages":[{"content":"%s"}],"ttft_ms":5,"n_out":3}\n'
    late = '{"id":"call-9","ttft_ms":5,"n_out":3,"messages":[{"content":"%s"}]}\n' % ("x" * 90_000)
    path = written(tmp_path, late + line % (1, "y"), "log.jsonl")
    assert table.sniff(expand([str(path)])[0].head()) is not None
    assert collect(table, path)["legs"].height == 2


def test_litellm_is_claimed_although_it_holds_lists_of_objects() -> None:
    match = table.sniff(expand([str(FIXTURES / "synthetic-litellm.jsonl")])[0].head())
    assert match is not None and match.what == "JSON lines of requests"


def test_an_error_column_that_is_empty_at_first_still_counts(
    collect: Collect, tmp_path: Path
) -> None:
    good = "".join(f"a{i},300,10,\n" for i in range(70_000))
    found = collect(
        table, written(tmp_path, f"id,ttft_ms,n_out,error\n{good}bad,0,0,TimeoutError\n")
    )
    assert found["legs"].filter(status="failed")["request_id"].to_list() == ["bad"]


@pytest.mark.shared
def test_full_client_logs(collect: Collect, shared: Path) -> None:
    legs = collect(table, shared / "data/dynamo/disagg_bootstrap/client.jsonl.gz")["legs"]
    assert legs.height == 200 and legs["ttft_ms"].median() == pytest.approx(98.1, abs=0.1)


@pytest.mark.shared
def test_full_proxy_log(collect: Collect, shared: Path) -> None:
    path = shared / "data/vllm/pd_nixl/proxy_requests.jsonl.gz"
    assert table.sniff(expand([str(path)])[0].head()) is not None
    legs = collect(table, path)["legs"]
    assert legs.height == 306 and legs["ttft_ms"].median() == pytest.approx(651.6, abs=0.1)


@pytest.mark.parametrize(
    ("header", "meaning", "unit"),
    [
        ("Zeit bis erstes Token (s)", "ttft", "s"), ("Zeit bis zum ersten Token", "ttft", None),
        ("Eingabe-Tokens", "prompt_tokens", None), ("Ausgabetokens", "output_tokens", None), ("Gesamtzeit (s)", "e2e", "s"),
        ("Bemerkung", "note", None), ("入力トークン数", "prompt_tokens", None), ("出力トークン", "output_tokens", None),
        ("最初のトークンまでの時間(ミリ秒)", "ttft", "ms"), ("合計時間(秒)", "e2e", "s"), ("備考", "note", None),
        ("tokens de entrada", "prompt_tokens", None), ("latencia total (ms)", "e2e", "ms"),
    ],
)  # fmt: skip
def test_headers_of_other_languages(header: str, meaning: str, unit: str | None) -> None:
    column = understand(header)
    assert column is not None and (column.meaning, column.unit) == (meaning, unit)


def test_a_leading_zero_makes_the_comma_a_decimal_one(collect: Collect, tmp_path: Path) -> None:
    text = "id;tokens out;ttft (s);total (s)\n1;1.020;0,247;4,845\n2;268;0,236;81,345\n"
    legs = collect(table, written(tmp_path, text))["legs"].sort("record")
    assert legs["ttft_ms"].to_list() == [247, 236] and legs["e2e_ms"].to_list() == [4845, 81345]
    assert legs["output_tokens"].to_list() == [1020, 268]


def test_semicolons_tell_of_decimal_commas_and_counts_are_never_fractions(
    collect: Collect, tmp_path: Path
) -> None:
    text = "id;input tokens;total (s)\n1;10,337;4,845\n2;11,568;7,480\n"
    legs = collect(table, written(tmp_path, text))["legs"].sort("record")
    assert legs["e2e_ms"].to_list() == [4845, 7480]
    assert legs["prompt_tokens"].to_list() == [10337, 11568]


def test_tokens_per_second_alone_give_the_time_per_token_and_it_is_said(
    collect: Collect, tmp_path: Path
) -> None:
    found = collect(
        table, written(tmp_path, "id,output_tokens,tokens_per_second\n1,100,50\n2,80,25\n")
    )
    assert found["legs"].sort("record")["tpot_ms"].to_list() == [20, 40]
    assert facts(found)["pace_from_rate"].startswith("2 rows state only tokens per second")


def test_the_time_per_token_is_not_taken_from_a_rate_over_the_whole_request(
    collect: Collect, tmp_path: Path
) -> None:
    found = collect(
        table, written(tmp_path, "id,output_tokens,latency_s,tps\n1,100,2.0,50\n2,80,3.2,25\n")
    )
    assert found["legs"]["tpot_ms"].null_count() == 2


def test_nanoseconds_of_a_duration_are_no_instants(collect: Collect, tmp_path: Path) -> None:
    """1.2 s are as many nanoseconds as an epoch of 2008 has seconds (Vegeta writes them)."""
    rows = [
        {
            "seq": n,
            "code": 200,
            "timestamp": f"2025-06-01T12:00:0{n}.5Z",
            "latency": 1_200_000_000 + n * 7_000_000,
        }
        for n in range(6)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    legs = collect(table, written(tmp_path, text, "vegeta.jsonl"))["legs"].sort("start_ns")
    assert ((legs["end_ns"] - legs["start_ns"]) / 1e6).to_list() == [1200 + 7 * n for n in range(6)]


@pytest.mark.parametrize(
    ("header", "stamp"),
    [("timeStamp", "1748779200000"), ("TimeGenerated [UTC]", '"6/1/2025, 12:00:00.000 PM"')],
)
def test_jmeters_and_azures_stamps_are_starts(
    collect: Collect, tmp_path: Path, header: str, stamp: str
) -> None:
    text = f"{header},elapsed,success,output_tokens\n{stamp},1200,true,11\n{stamp},900,false,0\n"
    legs = collect(table, written(tmp_path, text))["legs"].sort("record")
    assert legs["start_ns"].unique().to_list() == [1_748_779_200_000_000_000]
    assert legs["status"].to_list() == ["completed", "failed"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("Cancelled by user", "aborted"), ("client disconnected", "aborted"), ("ServerDisconnectedError: Server disconnected", "failed"),
        ("RemoteProtocolError: peer closed connection", "failed"), ("('Connection aborted.', RemoteDisconnected('Remote end closed'))", "failed"),
    ],
)  # fmt: skip
def test_a_server_that_hangs_up_failed_and_a_client_that_does_aborted(
    collect: Collect, tmp_path: Path, error: str, status: str
) -> None:
    rows = [{"ttft_s": 0.1, "latency_s": 1.0, "error": None}, {"ttft_s": None, "latency_s": 9.0, "error": error}]  # fmt: skip
    path = written(tmp_path, "\n".join(map(json.dumps, rows)) + "\n", "run.jsonl")
    assert collect(table, path)["legs"]["status"].to_list() == ["completed", status]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        # instants on a clock that counts from the machine's start (TensorRT-LLM behind Triton)
        ("arrival_time_ns,first_token_time_ns,last_token_time_ns\n76735247746000,76735374300000,76736545324000\n", [(126.554, 1297.578)]),
        # instants from the start of the run
        ("arrival_time,first_token_time,finish_time\n0,0.25,0.9\n1.5,1.8,2.5\n30,30.3,31\n", [(250, 900), (300, 1000), (300, 1000)]),
        # durations beside such an arrival
        ("arrival_time,first_token_time,last_token_time\n0,0.25,0.9\n1.5,0.3,1\n30,0.3,1\n", [(250, 900), (300, 1000), (300, 1000)]),
    ],
)  # fmt: skip
def test_times_that_follow_an_undated_start_are_instants(tmp_path: Path, text: str, found: list[tuple[float, float]]) -> None:  # fmt: skip
    (tmp_path / "a.csv").write_text(text.replace("\n", ",5\n").replace(",5", ",output_tokens", 1))
    rows = Trace.read([tmp_path]).sql("SELECT ttft_ms, e2e_ms FROM requests ORDER BY request").rows()  # fmt: skip
    assert [pytest.approx(pair) for pair in found] == rows
