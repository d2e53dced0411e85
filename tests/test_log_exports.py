"""A log is the same log, whatever store or tool gave it out: nothing lost, times, order and servers right."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import pdtrace
from pdtrace import registry
from pdtrace.collectors import dynamo_log, vllm_log
from pdtrace.model import Head

Collect = Callable[..., Any]

FIXTURES = Path(__file__).parent / "fixtures" / "dynamo_log"
START = datetime(
    2025, 6, 1, 12, 0, 0, 500_000, tzinfo=UTC
)  # a year that no file's last change tells
LINES = [
    "INFO 06-01 12:00:00 [api_server.py:1287] vLLM API server version 0.9.1",
    *(
        f"INFO 06-01 12:00:{n}0 [loggers.py:118] Engine 000: Avg prompt throughput: 100.0 tokens/s, Avg generation "
        f"throughput: 200.0 tokens/s, Running: {n} reqs, Waiting: 0 reqs, GPU KV cache usage: {n}.0%"
        for n in (1, 2, 3)
    ),
    'INFO:     10.0.0.7:4123 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error',
]
AT = [START + timedelta(seconds=s) for s in (0, 10, 20, 30, 30)]
LOG = list(zip(AT, LINES, strict=True))


def iso(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def table(header: list[str], rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    return text.getvalue()


def each(make: Callable[[datetime, str], Any]) -> list[Any]:
    return [make(at, line) for at, line in LOG]


def lines(items: list[Any]) -> str:
    return "".join(f"{item if isinstance(item, str) else json.dumps(item)}\n" for item in items)


NS = [[f"{ms(at)}000000", line] for at, line in LOG]
FORMS = {
    "loki": json.dumps({"status": "success", "data": {"resultType": "streams", "result": [{"stream": {"pod": "a"}, "values": NS[::-1]}]}}),
    "grafana": json.dumps([{"line": line, "timestamp": ns, "date": "x", "fields": {"pod": "a"}} for ns, line in NS][::-1], indent=2),
    "grafana text": lines(each(lambda at, line: f"{ms(at)}\t{iso(at)}\t{line}")[::-1]),
    "logcli": lines(each(lambda at, line: f'{iso(at)} {{pod="a", level="info"}} {line}')),
    "cloudwatch": json.dumps({"events": each(lambda at, line: {"timestamp": ms(at), "message": line, "ingestionTime": 1}), "nextForwardToken": "f"}, indent=4),
    "insights": json.dumps({"results": each(lambda at, line: [{"field": "@timestamp", "value": iso(at)}, {"field": "@message", "value": line}])[::-1]}),
    "insights table": table(["@timestamp", "@message"], each(lambda at, line: [at.strftime("%Y-%m-%d %H:%M:%S.500"), line])[::-1]),
    "aws logs tail": lines(each(lambda at, line: f"{at.isoformat()} vllm/vllm/0a1b {line}")),
    "cloud logging": json.dumps(each(lambda at, line: {"textPayload": line, "timestamp": iso(at), "resource": {"labels": {"pod_name": "a"}}})[::-1]),
    "elasticsearch": json.dumps({"took": 1, "hits": {"total": 5, "hits": each(lambda at, line: {"_source": {"@timestamp": iso(at), "message": line}})}}),
    "elasticdump": lines(each(lambda at, line: {"_index": "i", "_source": {"@timestamp": iso(at), "log": line + "\n"}})),
    "filebeat": lines(each(lambda at, line: {"@timestamp": iso(at), "message": line, "log": {"offset": 1}, "kubernetes": {"pod": {"name": "a"}}})),
    "fluent bit": lines(each(lambda at, line: {"date": at.timestamp(), "log": line + "\n"})),
    "fluentd": lines(each(lambda at, line: f"{iso(at)}\tkube.a\t{json.dumps({'log': line})}")),
    "datadog": json.dumps({"data": each(lambda at, line: {"id": "x", "type": "log", "attributes": {"timestamp": iso(at), "message": line, "host": "a"}})[::-1]}),
    "datadog table": table(["Date", "Host", "Message"], each(lambda at, line: [iso(at), "a", line])[::-1]),
    "azure table": table(["TimeGenerated [UTC]", "LogEntry"], each(lambda at, line: [at.strftime("%m/%d/%Y, %I:%M:%S.500 %p"), line])[::-1]),
    "splunk": lines(each(lambda at, line: {"preview": False, "result": {"_raw": line, "_time": at.isoformat(), "host": "a"}})[::-1]),
    "journal bytes": lines(each(lambda at, line: {"__REALTIME_TIMESTAMP": f"{ms(at)}000", "_HOSTNAME": "a", "MESSAGE": list(f"\x1b[1m{line}\x1b[0m".encode())})),
    "journal with unix time": lines(each(lambda at, line: f"{at.timestamp():.6f} a vllm[1]: {line}")),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_log_that_a_store_gave_out_is_read_whole(
    collect: Collect, tmp_path: Path, form: str
) -> None:
    path = tmp_path / "dump"
    path.write_text(FORMS[form])
    claims = registry.sniff(Head("dump", "dump", FORMS[form].encode(), complete=True))
    assert claims[0][0] == "vllm_log"
    found = collect(vllm_log, path)
    running = found["samples"].filter(pl.col("metric") == "vllm:num_requests_running")
    assert running["value"].to_list() == [1, 2, 3]
    assert [at / 1e9 for at in running["time_ns"]] == [at.timestamp() for at in AT[1:4]]
    kinds = found["events"].sort("record")["kind"].to_list()
    assert kinds == ["started", "http_error"], "the newest line comes last"
    assert found.account.read == 5


@pytest.mark.parametrize("form", ["journal full", "stamped in brackets"])
def test_a_stamp_in_local_time_tells_the_year(collect: Collect, tmp_path: Path, form: str) -> None:
    stamps = {
        "journal full": "%a %Y-%m-%d %H:%M:%S CEST a vllm[1]: ",
        "stamped in brackets": "[%Y-%m-%d %H:%M:%S] ",
    }
    path = tmp_path / "vllm.log"
    path.write_text(lines(each(lambda at, line: at.strftime(stamps[form]) + line)))
    at = collect(vllm_log, path)["samples"]["time_ns"].min()
    assert datetime.fromtimestamp(at / 1e9, UTC) == START.replace(second=10, microsecond=0)


def test_a_download_that_breaks_off_gives_the_lines_that_it_has(
    collect: Collect, tmp_path: Path
) -> None:
    path = tmp_path / "dump.json"
    path.write_text(FORMS["cloudwatch"].rpartition("500 Internal")[0])
    found = collect(vllm_log, path)
    assert found["samples"].filter(pl.col("metric") == "vllm:num_requests_running").height == 3


def test_a_stamp_that_no_column_holds_costs_no_other_line(collect: Collect, tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    path.write_text(FORMS["loki"].replace(NS[-1][0], "9" * 19))
    found = collect(vllm_log, path)
    assert found["samples"].filter(pl.col("metric") == "vllm:num_requests_running").height == 3


@pytest.mark.parametrize("form", ["fluent bit", "elasticdump"])
def test_the_last_object_is_whole_without_a_newline_behind_it(
    collect: Collect, tmp_path: Path, form: str
) -> None:
    path = tmp_path / "dump.json"
    last = FORMS[form].splitlines()[:4]
    path.write_text("\n".join(last))
    found = collect(vllm_log, path)
    running = found["samples"].filter(pl.col("metric") == "vllm:num_requests_running")
    assert running["value"].to_list() == [1, 2, 3]


def test_carriage_returns_in_the_first_line_are_no_table(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_bytes(b"Loading, 0%\rLoading, 99%\rdone\n" + "\n".join(LINES).encode())
    claims = registry.sniff(Head("vllm.log", "vllm.log", path.read_bytes(), complete=True))
    assert [name for name, _ in claims] == ["vllm_log"]


@pytest.mark.parametrize("prefix", ["logs/vllm-{}.log:", "logs/vllm-{}.log:17:", "{}: ", "gpu{}: "])
def test_servers_in_one_file_are_told_apart_by_what_grep_and_srun_put_in_front(
    collect: Collect, tmp_path: Path, prefix: str
) -> None:
    path = tmp_path / "all.log"
    path.write_text("".join(prefix.format(n) + line + "\n" for line in LINES for n in (0, 1)))
    samples = collect(vllm_log, path)["samples"]
    samples = samples.filter(pl.col("metric") == "vllm:num_requests_running").sort("record")
    assert sorted(samples.group_by("worker").agg("value")["value"].to_list()) == [[1, 2, 3]] * 2


def dynamo() -> list[tuple[str, str]]:
    return [
        (name, line)
        for name in ("frontend", "prefill", "decode")
        for line in (FIXTURES / f"{name}.log.jsonl").read_text().splitlines()
    ]


def wrapped(form: str) -> str:
    told = [(name, line, json.loads(line)["time"]) for name, line in dynamo()]
    if form == "loki":
        result = [
            {
                "stream": {"pod": pod},
                "values": [
                    [f"{ms(datetime.fromisoformat(at))}000000", line]
                    for name, line, at in told
                    if name == pod
                ][::-1],
            }
            for pod in ("frontend", "prefill", "decode")
        ]
        return json.dumps(
            {"status": "success", "data": {"resultType": "streams", "result": result}}
        )
    if form == "filebeat":
        return lines(
            [
                {"@timestamp": at, "message": line, "kubernetes": {"pod": {"name": name}}}
                for name, line, at in told
            ]
        )
    return lines(
        [
            {"log": line + "\n", "time": at, "kubernetes": {"pod_name": name}}
            for name, line, at in told
        ]
    )


@pytest.mark.parametrize("form", ["loki", "filebeat", "fluent bit"])
def test_dynamos_logs_of_several_pods_in_one_dump_are_those_pods(
    collect: Collect, tmp_path: Path, form: str
) -> None:
    path = tmp_path / "dump"
    path.write_text(wrapped(form))
    claims = registry.sniff(Head("dump", "dump", path.read_bytes()[: 64 << 10]))
    assert claims[0][0] == "dynamo_log"
    found = collect(dynamo_log, path)
    assert (found["spans"].height, found["spans"]["resource"].n_unique()) == (36, 3)


def stats(second: int, running: int) -> str:
    return (
        f"INFO 06-01 12:00:{second:02} [loggers.py:248] Engine 000: Avg prompt throughput: 100.0 tokens/s, Avg generation "
        f"throughput: 200.0 tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%"
    )


CONNECTOR = "INFO 06-01 12:00:00 [factory.py:64] Creating v1 connector with name: NixlConnector and engine_id: abc"


@pytest.mark.parametrize("form", ["[{}] ", "{}-1  | ", None])
def test_two_logs_that_go_on_at_once_are_two_servers(tmp_path: Path, form: str | None) -> None:
    """Only one of them shows its start, with an engine id; the other is not taken for its metrics."""
    sides = {
        "decode": [CONNECTOR, *(stats(s, 9) for s in (10, 20, 30))],
        "prefill": [stats(s, 1) for s in (10, 20, 30)],
    }
    if form is None:
        for name, own in sides.items():
            (tmp_path / f"{name}.log").write_text("".join(line + "\n" for line in own))
    else:
        mixed = [form.format(name) + line + "\n" for name, own in sides.items() for line in own]
        (tmp_path / "all.log").write_text("".join(mixed))
    running = pdtrace.open(tmp_path).sql(
        "SELECT worker, avg(value) AS mean FROM samples WHERE metric LIKE '%running' GROUP BY worker"
    )
    assert sorted(running["mean"]) == [1, 9]


@pytest.mark.parametrize(
    ("seconds", "servers"), [((30, 20, 10), 1), ((10, 20, 30), 3), ((10, 20), 2), ((20, 10), 1)]
)
def test_pieces_of_a_rotated_log_are_one_server(
    tmp_path: Path, seconds: tuple[int, ...], servers: int
) -> None:
    """The higher its number, the older the piece; logs of ranks that are numbered the same way are no pieces."""
    for name, second in zip(("vllm.log", "vllm.log.1", "vllm.log.2.gz"), seconds, strict=False):
        text = "".join(stats(s, 1) + "\n" for s in (second, second + 5))
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    found = pdtrace.open(tmp_path).sql("SELECT DISTINCT worker FROM samples")
    assert found.height == servers


def test_an_engine_core_that_prints_through_its_parent_keeps_its_rank(
    collect: Collect, tmp_path: Path
) -> None:
    step = "(APIServer pid=1) (EngineCore_DP{0} pid=7{0}) INFO 12-07 22:14:00 [v1/engine/core.py:407] Iteration(1): 0 context requests, 0 context tokens, 1 generation requests, 1 generation tokens, iteration elapsed time: 1.00 ms"
    nixl = "(EngineCore_DP0 pid=70) 2024-12-07 22:14:00 NIXL INFO    _api.py:361 Backend UCX was instantiated"
    path = tmp_path / "vllm.log"
    path.write_text("\n".join([step.format(0), step.format(1), nixl]) + "\n")
    steps = collect(vllm_log, path)["steps"]
    assert sorted(steps["rank"]) == ["0", "1"]
    latest = datetime.fromtimestamp(steps["start_upper_ns"].max() / 1e9, UTC)
    assert latest.year == 2024, "NIXL's line behind the process tells the year"


def test_a_failed_handshake_is_an_alarm(collect: Collect, tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(
        "(Worker_DP0_EP0 pid=2) ERROR 10-16 17:22:56 [nixl_connector.py:815] RuntimeError: Remote NIXL agent engine ID mismatch. Expected 4\n"
        "(Worker_DP0_EP0 pid=2) ERROR 10-16 17:22:56 [nixl_connector.py:827] Handshake failed for request chatcmpl-a\n"
    )
    events = collect(vllm_log, path)["events"].sort("record")
    assert events.select("kind", "request_id").rows() == [
        ("kv_failure", None),
        ("kv_failure", "chatcmpl-a"),
    ]
