"""What nothing ties to a deployment is given to none, and that is said."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import pdtrace
from pdtrace.store import Store

START = 1_796_000_000  # 2026-11-30 00:53:20 UTC, in seconds


def spans(path: Path, host: str, ids: list[str]) -> None:
    """One vLLM server's spans, each of 1 s with a first token after 0.2 s."""
    listed = [
        {
            "traceId": f"{n:032x}", "spanId": f"{n:016x}", "name": "llm_request", "kind": 2,
            "startTimeUnixNano": str((START + n % 50) * 10**9), "endTimeUnixNano": str((START + n % 50 + 1) * 10**9),
            "attributes": [
                {"key": "gen_ai.request.id", "value": {"stringValue": name}},
                {"key": "gen_ai.latency.time_to_first_token", "value": {"doubleValue": 0.2}},
                {"key": "gen_ai.latency.e2e", "value": {"doubleValue": 1.0}},
            ],
        }
        for n, name in enumerate(ids, 1 + 100 * int(host[-1]))
    ]  # fmt: skip
    resource = {"attributes": [{"key": "service.instance.id", "value": {"stringValue": host}}]}
    scopes = [{"scope": {"name": "vllm.llm_engine"}, "spans": listed}]
    path.write_text(json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}))


def client(path: Path, rows: dict[str, str]) -> None:
    lines = [
        f"{name},{START + n % 50},{status},250,1100"
        for n, (name, status) in enumerate(rows.items())
    ]
    path.write_text("\n".join(["x_request_id,start_unix,status,ttft_ms,e2e_ms", *lines]) + "\n")


@pytest.mark.parametrize(("of_b", "where"), [(10, "apart"), (0, "with the rest")])
def test_a_clients_lost_requests_are_of_no_server_where_several_answered(
    tmp_path: Path, of_b: int, where: str
) -> None:
    """Ten requests of server 1 and ten or none of server 2 in one client file; two that nobody traced."""
    first, second = [f"chatcmpl-a{n}" for n in range(10)], [f"chatcmpl-b{n}" for n in range(of_b)]
    spans(tmp_path / "one.json", "node1", first)
    if second:
        spans(tmp_path / "two.json", "node2", second)
    client(tmp_path / "client.csv", dict.fromkeys([*first, *second], "ok") | {"lost1": "aborted", "lost2": "aborted"})  # fmt: skip
    with pdtrace.open(tmp_path) as trace:
        counts = trace.sql(
            """SELECT count(*) AS n, count(*) FILTER (outcome = 'aborted') AS aborted
               FROM requests GROUP BY deployment ORDER BY n DESC, aborted"""
        ).rows()
    assert counts == ([(10, 0), (10, 0), (2, 2)] if where == "apart" else [(12, 2)])


def test_steps_that_nothing_ties_to_a_server_are_told_and_rest_nowhere(tmp_path: Path) -> None:
    """Two servers in one folder, and a log of steps that names none of their requests."""
    spans(tmp_path / "one.json", "node1", ["chatcmpl-a"])
    spans(tmp_path / "two.json", "node2", ["chatcmpl-b"])
    (tmp_path / "server.log").write_text(
        "".join(
            f"2026-11-30T00:53:2{n}.5Z (EngineCore pid=9100) INFO 11-30 00:53:2{n} [core.py:357] Iteration({n}): 1 context requests, 20 context tokens, "
            "2 generation requests, 2 generation tokens, iteration elapsed time: 18.40 ms\n"
            for n in range(3)
        )
    )
    with pdtrace.open(tmp_path) as trace:
        said = trace.diagnose().not_supported
    assert any(line.startswith("what 3 engine steps of server.log tell: nothing says") for line in said)  # fmt: skip


def test_a_worker_known_by_its_log_alone_is_no_idle_worker(con: Store) -> None:
    """Spans name `instance:a` and `instance:b`; a log names an engine that may be one of them."""
    con.append("workers", [{"worker": w, "deployment": "d", "role": "decode"} for w in ("instance:a", "instance:b", "engine_id:x")])  # fmt: skip
    con.append("sources", [{"source": 1, "path": "server.log", "collector": "vllm_log"}])
    con.append("worker_aliases", [
        {"source": None, "worker": "instance:a", "kind": "instance", "value": "a"},
        {"source": None, "worker": "instance:b", "kind": "instance", "value": "b"},
        {"source": 1, "worker": "engine_id:x", "kind": "engine_id", "value": "x"},
    ])  # fmt: skip
    con.append("requests", [
        {"request": f"r{n}", "deployment": "d", "mode": "disaggregated", "outcome": "completed",
         "prefill_worker": "p", "decode_worker": f"instance:{'ab'[n % 2]}"}
        for n in range(40)
    ])  # fmt: skip
    decode = con.query("side_workers").filter(pl.col("side") == "decode")["worker"]
    assert decode.sort().to_list() == ["instance:a", "instance:b"]
    spread = con.query("load_spread").filter(
        (pl.col("side") == "decode") & (pl.col("measure") == "requests")
    )
    assert spread.row(0, named=True)["idle_workers"] == 0
    # once a log is known to be one of those with requests, another log without any is an idle worker
    con.append("worker_aliases", [{"source": 1, "worker": "instance:a", "kind": "engine_id", "value": "y"}])  # fmt: skip
    assert "engine_id:x" in con.query("side_workers")["worker"].to_list()
