"""llm-d's logs: what the picker stamped and chose, beside its spans and the pods' own records; no words of users."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_llm_d import EPP, PODS, T0, split, write

from pdtrace import registry
from pdtrace.api import Trace
from pdtrace.model import Head

FIXTURES = Path(__file__).parent / "fixtures" / "llm_d_log"
LOG = registry.collectors()["llm_d_log"]
Collect = Callable[..., Any]


def epp(n: int, *, pod: str = "pod-b", scores: tuple[float, float] = (4.0, 7.0), name: str = "") -> list[str]:  # fmt: skip
    """Received, 30 ms of waiting, 1 ms of choice, 300 ms until the answer has passed."""
    at, request = T0 / 1e9 + n, name or f"r{n}"

    def line(after: float, msg: str, **more: object) -> str:
        return json.dumps({"level": "info", "ts": round(at + after / 1e3, 6), "caller": "handlers/server.go:1", "msg": msg, "x-request-id": request, **more})  # fmt: skip

    return [
        line(0, "EPP received request"),
        line(30, "Selecting endpoints from candidates sorted by max score", **{
            "num-of-candidates": 2,
            "scored-endpoints": [{"Endpoint": {"Name": f"{p}-rank-0"}, "Score": s} for p, s in zip(("pod-a", "pod-b"), scores, strict=True)],
        }),
        line(30.5, "Request handled", endpoint=f"{{NamespacedName:ns/{pod}-rank-0 Address:10.0.0.1 Labels:map[]}}", targetModel="org/m"),
        line(31, "EPP sent request body response(s) to proxy", modelName="org/m", targetModelName="org/m"),
        line(200, "EPP sent response body back to proxy"),
        line(331, "EPP sent response body back to proxy"),
    ]  # fmt: skip


def test_its_stamps_alone_give_wait_choice_and_duration(tmp_path: Path) -> None:
    (tmp_path / "epp.log").write_text("\n".join(x for n in range(30) for x in epp(n)) + "\n")
    trace = Trace.read([tmp_path])
    found = dict(trace.store.sql("SELECT detail, sum(end_ns - start_ns) / 30e6 FROM phases GROUP BY detail").iter_rows())  # fmt: skip
    assert found == pytest.approx(
        {"router_queue": 30, "router_decide": 1, "unattributed": 300}, abs=0.01
    )
    chosen = trace.store.sql("SELECT DISTINCT worker, candidates FROM decisions").rows()
    assert chosen == [("pod:pod-b", 2)]


def test_the_list_of_candidates_is_not_sorted_and_equals_name_nobody(collect: Collect, tmp_path: Path) -> None:  # fmt: skip
    lines = [x for x in epp(0) + epp(1, scores=(7.0, 7.0)) if "Request handled" not in x]
    (tmp_path / "epp.log").write_text("\n".join(lines) + "\n")
    got = collect(LOG, tmp_path / "epp.log")["decisions"].sort("time_ns")
    assert got["worker"].to_list() == ["pod:pod-b", None]


def test_log_and_spans_of_one_picker_tell_one_choice_once(tmp_path: Path) -> None:
    spans = [s for n in range(20) for s in split(n)]
    for service, one in spans:
        if service == EPP:  # the caller's id, which the log has, too
            for pair in one["attributes"]:
                if pair["key"] == "gen_ai.request.id":
                    pair["value"] = {"stringValue": f"r{int(one['traceId'], 16) - 1}"}
    write(tmp_path / "t.json", spans, PODS)
    lines = [x for n in range(20) for x in epp(n, pod="decode-abc12") if "Selecting" not in x]
    (tmp_path / "epp.log").write_text("\n".join(lines) + "\n")
    trace = Trace.read([tmp_path])
    assert trace.store.sql("SELECT mode, count(*) FROM requests GROUP BY mode").rows() == [("disaggregated", 20)]  # fmt: skip
    roles = trace.store.sql("SELECT role FROM workers ORDER BY role")["role"].to_list()
    assert roles == ["decode", "gateway", "prefill", "router"]
    assert trace.store.sql("SELECT phase, count(*) FROM decisions GROUP BY phase ORDER BY phase").rows() == [("decode", 20), ("prefill", 20)]  # fmt: skip


def test_whole_second_stamps_make_no_phases(collect: Collect) -> None:
    got = collect(LOG, FIXTURES / "synthetic-epp.log")
    legs = dict(got["legs"].select("request_id", "resolution_ns").iter_rows())
    assert legs == {"r-1": 1_000, "r-2": 1_000, "r-3": 1_000_000_000, "r-4": 1_000_000}
    told = {leg.rpartition("/")[2] for leg in got["intervals"]["leg"]}
    assert told == {"r-1", "r-2", "r-4"}


@pytest.mark.parametrize("file", ["synthetic-epp.log", "synthetic-sidecar.log"])
def test_what_errors_quote_is_not_kept(collect: Collect, file: str) -> None:
    kept = collect(LOG, FIXTURES / file)["events"]["detail"].to_list()
    assert kept
    assert not any("secret" in detail for detail in kept)


@pytest.mark.parametrize(
    "text",
    [
        b'{"level":"info","ts":1.0,"msg":"hello"}\n',
        b"helm install llm-d-routing-sidecar\n",
        b'{"logger":"scheduling/queue","msg":"pod added"}\n',
    ],
)
def test_strangers_are_left_alone(text: bytes) -> None:
    assert LOG.sniff(Head("x.log", "x.log", text, complete=True)) is None
