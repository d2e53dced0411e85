"""Dumps of known truth whose workers or runs share names: told apart as far as they can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from truth_check import Seen, agrees, column, exact
from truth_fleet import pair
from truth_otlp import CLIENT, INTERNAL, MS, T0, S, Span, span_id, trace_id, uuid, write
from truth_vllm import Engine, Log, Request, load, resource, v1_span


def seeded_run(folder: Path, start: int, key: str, name: str, seeded: bool) -> list[Request]:
    """A run of a seeded client; with `seeded` the server's span ids repeat as well."""
    requests = load(30, start, name=lambda i: f"cmpl-bench-{i}-0")
    for i, r in enumerate(requests):
        r.trace, r.span = trace_id("seeded", i), span_id("seeded", "" if seeded else (key, name), i)
        r.parent = span_id("client", i)
    Engine().run(requests)
    write(folder / f"{name}.jsonl", [v1_span(r, resource("vllm", key=key)) for r in requests])
    return requests


@pytest.mark.parametrize(
    ("together", "same_server", "later_s", "seeded"),
    [
        (True, True, 3600, False),
        (False, False, 3600, False),
        (True, False, 3600, True),
        (False, True, 3600, True),
        (True, True, 20, True),
        (False, False, 20, True),
    ],
)
def test_two_seeded_runs_are_never_merged(
    tmp_path: Path, together: bool, same_server: bool, later_s: int, seeded: bool
) -> None:
    folders = [tmp_path / "x", tmp_path / ("x" if together else "y")]
    runs = [
        seeded_run(
            folder, T0 + n * later_s * S, "one" if same_server else str(n), f"run{n}", seeded
        )
        for n, folder in enumerate(folders)
    ]
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.requests.height == 60
    assert len(seen.diagnosis.deployments) == (1 if same_server else 2)
    truth = sorted(r.ttft_ms for run in runs for r in run)
    assert seen.requests["ttft_ms"].sort().to_list() == pytest.approx(truth, abs=0.01)
    assert seen.requests["streams"].unique().to_list() == [1]


@pytest.mark.parametrize("hops", [True, False])
def test_an_agents_calls_are_requests_each(tmp_path: Path, hops: bool) -> None:
    spans = []
    agent = {"service.name": "agent", "service.instance.id": uuid("agent")}
    requests = []
    for session in range(6):
        trace, root = trace_id("agent", session), span_id("agent", session)
        at = T0 + session * S
        for call in range(5):
            r = Request(
                f"chatcmpl-{uuid(session, call).replace('-', '')}",
                at,
                300 + 100 * call,
                20,
                trace=trace,
                parent=root,
            )
            Engine(seed=call).run([r])
            if hops:
                r.parent = span_id("post", session, call)
                spans.append(
                    Span(agent, "opentelemetry.instrumentation.httpx", "POST", trace, r.parent, at - MS, r.last_seen + MS,
                         root, CLIENT, {"http.request.method": "POST", "url.full": "http://w:8000/v1/chat/completions"})
                )  # fmt: skip
            requests.append(r)
            spans.append(v1_span(r, resource("vllm")))
            at = r.last_seen + 50 * MS
        spans.append(Span(agent, "my.agent", "invoke_agent planner", trace, root, T0 + session * S - 2 * MS, at, None, INTERNAL,
                          {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "planner"}))  # fmt: skip
    write(tmp_path / "t.jsonl", spans)
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.requests.height == 30
    agrees(seen, requests, column(seen, "ttft_ms"), lambda r: r.ttft_ms, 0.01)
    assert seen.only.mode == "aggregated"


@pytest.mark.parametrize("names", ["nothing", "pid", "pod", "instance"])
def test_workers_of_one_service_name_are_told_apart_as_far_as_they_can(
    tmp_path: Path, names: str
) -> None:
    requests = load(60, T0, rate=20)
    parts = [requests[i::3] for i in range(3)]
    spans = []
    for i, part in enumerate(parts):
        Engine(seed=i).run(part)
        res: dict[str, Any] = {
            "nothing": {},
            "pid": {"service.name": "unknown_service", "vllm.process_id": str(7000 + i)},
            "pod": {"service.name": "vllm", "k8s.pod.name": f"vllm-{i}", "vllm.process_id": "1"},
            "instance": resource("vllm", key=i, pid=1),
        }[names]
        spans += [v1_span(r, res) for r in part]
    write(tmp_path / "t.jsonl", spans)
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.requests.height == 60
    agrees_all = seen.requests["ttft_ms"].sort().to_list()
    assert agrees_all == pytest.approx(sorted(r.ttft_ms for r in requests), abs=0.01)
    workers = seen.requests["decode_worker"].n_unique()
    assert workers == (1 if names == "nothing" else 3)
    if names == "nothing":
        assert seen.finding("worker_imbalance") is None


@pytest.mark.parametrize("names", ["nothing", "unknown_service", "pid"])
def test_pairs_of_nameless_workers_are_never_called_aggregated(tmp_path: Path, names: str) -> None:
    """P and D without instance ids: the roles follow from the legs, or nothing is said."""
    prefill, decode, _, _ = pair()
    for role, part in (("p", prefill), ("d", decode)):
        res: dict[str, Any] = {"unknown_service": {"service.name": "unknown_service"}, "nothing": {},
                               "pid": {"service.name": "unknown_service", "vllm.process_id": "7" + str(ord(role))}}[names]  # fmt: skip
        write(tmp_path / f"{role}.jsonl", [v1_span(r, res) for r in part])
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.requests.height == 40, seen.requests.height
    assert len(seen.diagnosis.deployments) == 1
    assert seen.only.mode == "disaggregated"
    by_id = {r.id: r for r in prefill}
    agrees(
        seen,
        decode,
        seen.phase("prefill_wall"),
        lambda r: (by_id[r.id].first - by_id[r.id].scheduled) / MS,
        1,
    )
    assert seen.sql("SELECT headline_observer FROM deployments").item() is None
    assert seen.requests["output_tokens"].sum() == sum(r.output for r in decode)


@pytest.mark.parametrize("era", ["0.18", "0.32"])
def test_data_parallel_ranks_are_kept_apart(tmp_path: Path, era: str) -> None:
    requests = load(60, T0, rate=20, prompt=lambda d: d.choice([60, 60, 60, 3000]))
    engines = [Engine(seed=i, rank=i, per_token_ms=0.02 * (i + 1)) for i in (0, 1)]
    for i, engine in enumerate(engines):
        engine.run(requests[i::2])
    write(tmp_path / "t.jsonl", [v1_span(r, resource("vllm")) for r in requests])
    log = Log(core="EngineCore_DP0")
    log.started(T0 - 60 * S)
    log.engine(
        T0 - 50 * S,
        "core.py:97",
        "Initializing a V1 LLM engine (v0.18.1) with config: model='m'",
        rank=1,
    )
    log.steps(sorted(engines[0].steps + engines[1].steps, key=lambda s: s.end), era, ranks=True)
    log.write(tmp_path / "server.log")
    seen = Seen(tmp_path)
    exact(seen)
    assert seen.only.requests["count"] == 60
    steps = seen.sql("SELECT worker, rank, count(*) AS n FROM steps GROUP BY ALL ORDER BY rank")
    assert steps["rank"].to_list() == ["0", "1"]
    assert steps["n"].to_list() == [len(e.steps) for e in engines]
    assert steps["worker"].n_unique() == 1
    lost = seen.sql("SELECT lost_s FROM interference_steps ORDER BY rank")["lost_s"].to_list()
    # Prefill-only steps with nobody decoding cost nobody anything; both ranks by themselves.
    assert lost == pytest.approx([e.lost_s for e in engines], rel=0.03)


def test_a_rotated_file_of_a_nameless_worker_is_one_deployment(tmp_path: Path) -> None:
    requests = load(60, T0)
    Engine().run(requests)
    requests.sort(key=lambda r: r.last_seen)
    res = {"service.name": "unknown_service"}
    write(
        tmp_path / "traces-2023-11-14T22-13-23.000.jsonl", [v1_span(r, res) for r in requests[:30]]
    )
    write(tmp_path / "traces.jsonl", [v1_span(r, res) for r in requests[30:]])
    seen = Seen(tmp_path)
    assert seen.only.requests["count"] == 60


def test_two_nameless_workers_beside_each_other_are_two_deployments(tmp_path: Path) -> None:
    for n in (1, 2):
        requests = load(30, T0 + n * MS, seed=n, name=lambda i, n=n: f"cmpl-{n}-{i}-0")
        Engine().run(requests)
        write(
            tmp_path / f"server{n}.jsonl", [v1_span(r, {"service.name": "vllm"}) for r in requests]
        )
    seen = Seen(tmp_path)
    assert [d.requests["count"] for d in seen.diagnosis.deployments] == [30, 30]
