"""A request that vLLM's span and pdtrace's scheduler both tell is one request at one engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdtrace import twins
from pdtrace.api import Trace
from pdtrace.ingest import ingest
from pdtrace.store import Store

EPOCH, MS = 1_796_000_000 * 1_000_000_000, 1_000_000


def pairs(values: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue"}
    return [{"key": k, "value": {kinds[type(v)]: str(v) if isinstance(v, int) else v}} for k, v in values.items()]  # fmt: skip


def line(scope: str, instance: str, name: str, ids: tuple[int, int, int], times: tuple[float, float], **given: Any) -> str:  # fmt: skip
    trace, span, parent = ids
    made = {
        "traceId": f"{trace:032x}", "spanId": f"{span:016x}", "name": name, "kind": 2,
        "startTimeUnixNano": str(EPOCH + int(times[0] * MS)), "endTimeUnixNano": str(EPOCH + int(times[1] * MS)),
        "attributes": pairs({k.replace("__", "."): v for k, v in given.items()}),
    }  # fmt: skip
    if parent:
        made["parentSpanId"] = f"{parent:016x}"
    resource = {"attributes": pairs({"service.name": instance, "service.instance.id": instance})}
    scopes = [{"scope": {"name": scope}, "spans": [made]}]
    return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]})


def told(number: int, traced: bool, fronted: bool, output: int = 9) -> list[str]:
    """The spans of one request: vLLM's, the scheduler's with its prefill, the API server's if it has one."""
    t, at = number + 1, number * 1000.0
    usage = {"gen_ai__usage__input_tokens": 100, "gen_ai__usage__output_tokens": output}
    vllm = {
        "gen_ai__request__id": f"chatcmpl-q{number}", "gen_ai__usage__prompt_tokens": 100, "gen_ai__usage__completion_tokens": 9,
        "gen_ai__latency__time_in_queue": 0.010, "gen_ai__latency__time_to_first_token": 0.065, "gen_ai__latency__e2e": 0.198,
        "gen_ai__latency__time_in_model_prefill": 0.050, "gen_ai__latency__time_in_model_decode": 0.130,
    }  # fmt: skip
    front = 10 * t if traced and fronted else 0
    lines = [
        line("vllm.tracing.otel", "api", "llm_request", (t, 10 * t + 1, front), (at + 2, at + 200), **vllm),
        line("pdtrace", "engine", "pdtrace.request", (t if traced else t + 500, 10 * t + 2, front), (at + 5, at + 195),
             pdtrace__request__id=f"q{number}", pdtrace__request__engine_id=f"chatcmpl-q{number}-0badcafe",
             pdtrace__worker__role="aggregated", **usage),
        line("pdtrace", "engine", "pdtrace.prefill", (t if traced else t + 500, 10 * t + 3, 10 * t + 2), (at + 15, at + 65),
             pdtrace__phase__detail="prefill_exec"),
    ]  # fmt: skip
    if fronted:
        lines.append(line("pdtrace", "front", "pdtrace.request", (t if traced else t + 900, 10 * t, 0), (at, at + 201),
                          pdtrace__request__id=f"q{number}", pdtrace__worker__role="frontend"))  # fmt: skip
    return lines


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("fronted", [True, False])
def test_one_request_one_engine(tmp_path: Path, traced: bool, fronted: bool) -> None:
    lines = [one for number in range(3) for one in told(number, traced, fronted)]
    (tmp_path / "all.otlp.jsonl").write_text("\n".join(lines) + "\n")
    with Trace.read([tmp_path]) as trace:
        assert trace.store.rows("SELECT count(DISTINCT request), count(*) FROM legs") == [(3, 6)]
        observers = trace.store.rows("SELECT DISTINCT observer FROM legs ORDER BY observer")
        assert observers == [("engine",), ("frontend",)]
        prefill = trace.store.rows(
            "SELECT DISTINCT detail, (end_ns - start_ns) / 1000000 FROM phases WHERE phase = 'prefill'"
        )
        assert prefill == [("prefill_exec", 50.0)]
        ((window,),) = trace.store.rows("SELECT DISTINCT (end_ns - start_ns) / 1000000 FROM requests")  # fmt: skip
        assert window == (201.0 if fronted else 198.0)
        assert trace.store.rows("SELECT count(DISTINCT leg) FROM reported WHERE leg NOT IN (SELECT leg FROM legs)") == [(0,)]  # fmt: skip


def test_what_is_not_the_same_work_stays_two_records(tmp_path: Path) -> None:
    lines = [one for number in range(3) for one in told(number, traced=True, fronted=True, output=1)]  # fmt: skip
    (tmp_path / "all.otlp.jsonl").write_text("\n".join(lines) + "\n")
    with Trace.read([tmp_path]) as trace:
        assert trace.store.rows("SELECT count(*) FROM legs WHERE observer = 'engine'") == [(6,)]


def test_steps_that_a_log_and_the_scheduler_tell_are_counted_once() -> None:
    """A log of whole seconds beside recorded steps would double the work; steps outside of the recording stay."""
    store = Store()
    common = {"worker": "instance:e", "capture": "full", "decode_requests": 2, "elapsed_ns": 5 * MS}
    spans = [{"seq": n, "start_ns": EPOCH + n * 5 * MS} for n in range(400)]
    logged = [{"seq": n, "start_lower_ns": EPOCH - 10**9 + (n // 200) * 10**9, "start_upper_ns": EPOCH + (n // 200 + 1) * 10**9} for n in range(400)]  # fmt: skip
    before = [
        {"seq": 900, "start_lower_ns": EPOCH - 9 * 10**9, "start_upper_ns": EPOCH - 8 * 10**9}
    ]
    other = [{"seq": 0, "worker": "instance:other", "start_lower_ns": EPOCH, "start_upper_ns": EPOCH + 10**9}]  # fmt: skip
    store.append("steps", [{**common, **row} for row in (*spans, *logged, *before, *other)])
    twins.unite(store)
    left = store.sql("SELECT worker, start_ns IS NULL AS logged, count(*) AS n FROM steps GROUP BY ALL ORDER BY ALL").rows()  # fmt: skip
    assert left == [
        ("instance:e", False, 400),
        ("instance:e", True, 1),
        ("instance:other", True, 1),
    ]


REAL = Path(__file__).parent / "fixtures" / "captures" / "pd_doors"


@pytest.fixture(scope="module")
def pair() -> Store:
    """A real P/D pair of vLLM that was recorded by itself and by pdtrace, all at once."""
    store = Store()
    ingest([str(REAL)], store)
    return store


def test_a_real_pair_recorded_twice_is_two_requests_and_three_workers(pair: Store) -> None:
    requests = pair.sql("SELECT external_id, mode, prompt_tokens, output_tokens, outcome FROM requests ORDER BY 1").rows()  # fmt: skip
    assert requests == [
        ("load-0", "disaggregated", 311, 25, "completed"),
        ("load-3", "disaggregated", 525, 12, "completed"),
    ]
    assert pair.sql("SELECT role FROM workers ORDER BY 1").rows() == [("decode",), ("prefill",), ("router",)]  # fmt: skip
    assert pair.sql("SELECT count(DISTINCT deployment) FROM deployments").item() == 1
    served = pair.sql(
        "SELECT DISTINCT p.role, d.role FROM requests r JOIN workers p ON p.worker = r.prefill_worker JOIN workers d ON d.worker = r.decode_worker"
    ).rows()
    assert served == [("prefill", "decode")]


def test_its_steps_count_once_and_as_measured(pair: Store) -> None:
    steps = pair.sql(
        "SELECT role, count(*), count(steps.start_ns), sum(prefill_tokens), sum(decode_tokens) FROM steps JOIN workers USING (worker) GROUP BY ALL ORDER BY 1"
    ).rows()
    # 3,598 prompt tokens were computed and 240 tokens decoded for all twelve requests of the run.
    assert steps == [("decode", 81, 81, 0, 240), ("prefill", 3, 3, 3598, 0)]


def test_its_phases_are_those_that_the_scheduler_measured(pair: Store) -> None:
    details = pair.sql("SELECT detail, count(DISTINCT request) FROM phases WHERE basis = 'measured' GROUP BY ALL").rows()  # fmt: skip
    assert {"prefill_queue", "prefill_exec", "kv_transfer", "decode_queue"} <= {d for d, n in details if n == 2}  # fmt: skip
    # Of vLLM's own span the whole decode-side wait was placed; the measured parts stand in its stead.
    assert "kv_wait_upper_bound" not in dict(pair.sql("SELECT detail, 1 FROM phases").rows())


def test_a_request_that_the_log_greets_long_before_the_scheduler_sees_it_is_one() -> None:
    """vLLM's engine looks at new requests between two steps only; a step of ten seconds lies between the records."""
    store = Store()
    scheduler = {"trace_id": "t", "span_id": "s", "request_id": "chatcmpl-q-0badcafe", "start_ns": EPOCH + 12_000 * MS, "end_ns": EPOCH + 15_000 * MS, "status": "completed"}  # fmt: skip
    greeted = {"request_id": "chatcmpl-q", "resolution_ns": 10**9, "status": "unknown"}
    common = {"observer": "engine", "worker": "instance:e", "external_id": "q"}
    rows = [
        {"leg": "scheduler", **scheduler}, {"leg": "log", "start_ns": EPOCH, **greeted},
        {"leg": "left", "start_ns": EPOCH, **greeted, "status": "aborted"},
        {"leg": "earlier run", "start_ns": EPOCH - 3600 * 10**9, **greeted},
        {"leg": "another engine", "start_ns": EPOCH, **greeted, "worker": "instance:other"},
    ]  # fmt: skip
    store.append("legs", [{**common, **row} for row in rows])
    store.append("spans", [{"trace_id": "t", "span_id": "s", "start_ns": EPOCH, "name": "pdtrace.request"}])  # fmt: skip
    store.append("reported", [{"leg": "log", "quantity": "max_tokens", "value": 9.0}])
    twins.unite(store)
    assert set(store.sql("SELECT leg FROM legs")["leg"]) == {"scheduler", "left", "earlier run", "another engine"}  # fmt: skip
    assert store.sql("SELECT leg FROM reported").item() == "scheduler"


def test_steps_that_two_recorders_tell_count_once() -> None:
    """Dynamo's forward-pass metrics beside pdtrace's scheduler: those that name their requests stay; what only one tells too."""
    store = Store()
    store.append("sources", [{"source": 1, "collector": "otlp"}, {"source": 2, "collector": "dynamo_fpm"}])  # fmt: skip
    step = {"capture": "full", "elapsed_ns": 10 * MS}
    store.append("steps", [
        *({**step, "source": 1, "worker": "w", "seq": n, "start_ns": EPOCH + n * 10 * MS} for n in range(100, 200)),
        *({**step, "source": 2, "worker": "w", "rank": "0", "seq": n, "start_ns": EPOCH + n * 10 * MS + MS} for n in range(300)),
        *({**step, "source": 2, "worker": "alone", "rank": "0", "seq": n, "start_ns": EPOCH + n * 10 * MS} for n in range(50)),
        # two ranks of one recorder are two engines; nobody says which of them the other recorder tells of
        *({**step, "source": 2, "worker": "two", "rank": str(n % 2), "seq": n, "start_ns": EPOCH + n * 10 * MS} for n in range(50)),
        *({**step, "source": 1, "worker": "two", "seq": n, "start_ns": EPOCH + n * 10 * MS} for n in range(50)),
    ])  # fmt: skip
    store.append("step_members", [{"source": 1, "worker": "w", "seq": 100, "request_id": "r"}])
    twins.unite(store)
    counted = store.sql(
        "SELECT worker, source, count(*) FROM steps GROUP BY ALL ORDER BY ALL"
    ).rows()
    # 0 to 99 and those after the last step of the other recorder are told by one alone
    assert counted == [
        ("alone", 2, 50),
        ("two", 1, 50),
        ("two", 2, 50),
        ("w", 1, 100),
        ("w", 2, 200),
    ]


def worker_around_an_engine(store: Store, *, frontend: bool, tokens: int | None = None) -> None:
    """Two requests as a worker of Dynamo tells them around a recorded engine: span, request trace and scheduler."""
    legs = []
    for number, name in enumerate(("aaaa", "bbbb")):
        start = EPOCH + number * 1000 * MS
        common = {"status": "completed", "start_ns": start}
        around = {
            **common,
            "observer": "engine",
            "worker": "worker_id:7",
            "role": "aggregated",
            "request_id": name,
        }
        legs += [
            {**around, "leg": f"span {name}", "external_id": f"load-{number}", "trace_id": name, "span_id": "w", "end_ns": start + 500 * MS, "output_tokens": tokens},
            {**around, "leg": f"trace {name}", "external_id": name, "end_ns": start + 501 * MS},
            {**common, "leg": f"scheduler {name}", "observer": "engine", "worker": "instance:e", "role": "aggregated", "request_id": f"{name}-0badcafe", "external_id": name,
             "trace_id": f"own {name}", "span_id": "s", "start_ns": start + 9 * MS, "end_ns": start + 490 * MS, "prompt_tokens": 100, "output_tokens": 9},
        ]  # fmt: skip
        if frontend:
            legs.append({**common, "leg": f"front {name}", "observer": "frontend", "worker": "instance:f", "request_id": name, "external_id": f"load-{number}", "end_ns": start + 510 * MS})  # fmt: skip
        store.append("spans", [
            {"trace_id": name, "span_id": "w", "start_ns": start, "name": "handle_payload"},
            {"trace_id": f"own {name}", "span_id": "s", "start_ns": start, "name": "pdtrace.request"},
        ])  # fmt: skip
    store.append("legs", legs)
    store.append("workers", [{"worker": w} for w in ("worker_id:7", "instance:e", "instance:f")])
    store.append("reported", [{"leg": "trace aaaa", "quantity": "ttft_ms", "value": 9.0}])


def test_a_worker_and_the_recorded_engine_inside_it_are_one() -> None:
    store = Store()
    worker_around_an_engine(store, frontend=True)
    twins.unite(store)
    engines = store.sql("SELECT leg, worker FROM legs WHERE observer = 'engine' ORDER BY leg").rows()  # fmt: skip
    assert [leg for leg, _ in engines] == ["scheduler aaaa", "scheduler bbbb"]
    assert len({worker for _, worker in engines}) == 1
    assert store.count("workers") == 2
    assert store.sql("SELECT leg FROM reported").item() == "scheduler aaaa"


def test_without_a_front_end_the_workers_span_keeps_its_window() -> None:
    store = Store()
    worker_around_an_engine(store, frontend=False)
    twins.unite(store)
    seen = store.sql("SELECT leg, observer FROM legs WHERE leg LIKE '%aaaa' ORDER BY leg").rows()
    assert seen == [("scheduler aaaa", "engine"), ("span aaaa", "frontend"), ("trace aaaa", "engine")]  # fmt: skip


def test_two_engines_under_one_name_are_not_guessed_between() -> None:
    """The same ids at the same time in two deployments, and nothing counted on the outside."""
    store = Store()
    worker_around_an_engine(store, frontend=True)
    again = store.sql("SELECT * REPLACE ('other ' || leg AS leg, 'instance:e2' AS worker, 'other ' || trace_id AS trace_id) FROM legs WHERE leg LIKE 'scheduler%'")  # fmt: skip
    store.append("legs", again)
    store.append("spans", [{"trace_id": f"other own {n}", "span_id": "s", "start_ns": EPOCH, "name": "pdtrace.request"} for n in ("aaaa", "bbbb")])  # fmt: skip
    twins.unite(store)
    assert store.sql("SELECT count(*) FROM legs WHERE observer = 'engine'").item() == 8


def test_tokens_that_differ_are_another_request() -> None:
    store = Store()
    worker_around_an_engine(store, frontend=True, tokens=8)
    twins.unite(store)
    assert "span aaaa" in set(store.sql("SELECT leg FROM legs")["leg"])


def test_a_real_worker_of_dynamo_with_a_recorded_vllm_inside() -> None:
    """Dynamo, its request trace, vLLM and pdtrace tell the same two requests of one engine."""
    store = Store()
    ingest([str(REAL.parents[1] / "dynamo_vllm")], store)
    requests = store.sql("SELECT external_id, mode, prompt_tokens, output_tokens, outcome FROM requests ORDER BY 1").rows()  # fmt: skip
    assert requests == [
        ("load-0", "aggregated", 311, 25, "completed"),
        ("load-3", "aggregated", 525, 12, "completed"),
    ]
    assert store.sql("SELECT role FROM workers ORDER BY 1").rows() == [("aggregated",), ("frontend",)]  # fmt: skip
    assert store.sql("SELECT count(DISTINCT deployment) FROM deployments").item() == 1
    engines = store.sql("SELECT count(*), count(DISTINCT request) FROM legs WHERE observer = 'engine' AND container IS NOT TRUE").rows()  # fmt: skip
    assert engines == [(2, 2)]
    # All 16 requests of the run are in the steps.
    assert store.sql("SELECT sum(prefill_tokens), sum(decode_tokens) FROM steps").rows() == [(5232, 315)]  # fmt: skip
    details = set(store.sql("SELECT DISTINCT detail FROM phases WHERE basis = 'measured'")["detail"])  # fmt: skip
    assert {"prefill_queue", "prefill_exec", "decode_wall"} <= details


def legs_of(store: Store, name: str, span: str, rows: list[dict[str, Any]]) -> None:
    """Legs, each made of a span of that name, at the worker instance:NAME."""
    legs = [{"leg": f"{name}{n}", "worker": row.pop("worker", f"instance:{name}"), "observer": "engine", "clock": "wall",
             "status": "completed", "trace_id": f"{name}{n}", "span_id": "1", **row} for n, row in enumerate(rows)]  # fmt: skip
    store.append("legs", legs)
    store.append("spans", [{"trace_id": x["trace_id"], "span_id": "1", "name": span, "start_ns": x["start_ns"]} for x in legs])  # fmt: skip
    known = {r[0] for r in store.rows("SELECT worker FROM workers")}
    store.append("workers", [{"worker": w} for w in sorted({x["worker"] for x in legs} - known)])


def sides(start: int, end: int, output: int = 9) -> list[dict[str, Any]]:
    """Three P/D decode legs under SGLang's own ids, which also travel: nothing else names them."""
    return [
        {"request_id": f"rid{n}", "external_id": f"rid{n}", "bootstrap_room": f"{n}", "role": "decode", "prompt_tokens": 100,
         "output_tokens": output, "start_ns": EPOCH + (n * 1_000 + start) * MS, "end_ns": EPOCH + (n * 1_000 + end) * MS}
        for n in range(3)
    ]  # fmt: skip


def test_an_engine_whose_own_id_travels_is_recorded_twice_and_counts_once() -> None:
    """SGLang's spans stay, with their room and phases; the plugin's token times go to them."""
    store = Store()
    legs_of(store, "own", "decode Req rid", sides(0, 500))
    legs_of(store, "plugin", "pdtrace.request", sides(2, 498))
    store.append("intervals", [{"leg": f"{w}1", "detail": "decode_queue", "start_ns": EPOCH, "end_ns": EPOCH + MS} for w in ("own", "plugin")])  # fmt: skip
    store.append("streams", [{"leg": f"plugin{n}", "first_ns": EPOCH + n * 1_000 * MS, "gaps_us": [8_000]} for n in range(3)])  # fmt: skip
    twins.unite(store)
    assert store.rows("SELECT leg, observer, bootstrap_room FROM legs ORDER BY 1") == [
        ("own0", "engine", "0"), ("own1", "engine", "1"), ("own2", "engine", "2"),
    ]  # fmt: skip
    assert store.rows("SELECT leg FROM intervals") == [("own1",)]
    assert store.rows("SELECT leg FROM streams ORDER BY 1") == [("own0",), ("own1",), ("own2",)]
    assert store.rows("SELECT count(*) FROM workers") == [(1,)]


@pytest.mark.parametrize("other", ["tokens", "workers"])
def test_the_same_id_at_different_work_stays_two_records(other: str) -> None:
    """Other token counts; or a hedge: one id at two workers, of which the recorded one shares ids with several."""
    store = Store()
    told = sides(2, 498, output=8 if other == "tokens" else 9)
    own = sides(0, 500)
    if other == "workers":
        for n, row in enumerate(own):
            row["worker"] = f"instance:w{n}"
    legs_of(store, "own", "decode Req rid", own)
    legs_of(store, "plugin", "pdtrace.request", told)
    twins.unite(store)
    assert store.rows("SELECT count(*) FROM legs") == [(6,)]
