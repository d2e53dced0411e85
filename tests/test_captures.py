"""The diagnosis is true on real captures: cut ones everywhere, the full ones where they lie beside the checkout.

Figures are those that other tools or the client itself measured; tolerances are the issue's. A capture is read
once a session, its tables and its diagnosis are shared.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pdtrace.diagnose import diagnose
from pdtrace.diagnosis import Diagnosis
from pdtrace.ingest import ingest
from pdtrace.store import Store

CUTS = Path(__file__).parent / "fixtures" / "captures"
DEMO = Path(str(files("pdtrace") / "demo"))
FULL = Path(__file__).resolve().parents[2] / "shared" / "data"

full = [
    pytest.mark.shared,
    pytest.mark.skipif(not FULL.is_dir(), reason="the full captures are not beside this checkout"),
]
VLLM, DYNAMO = FULL / "vllm", FULL / "dynamo"


class Run:
    """One reading: the store and what is said of it."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.store = Store()
        ingest([str(path) for path in paths], self.store)
        self._said: Diagnosis | None = None

    @property
    def said(self) -> Diagnosis:
        if self._said is None:
            self._said = diagnose(self.store)
        return self._said

    def one(self, name: str | None = None) -> Any:
        """The deployment of that name, or the only one."""
        found = [d for d in self.said.deployments if name is None or d.name == name]
        assert len(found) == 1, [d.name for d in self.said.deployments]
        return found[0]

    def latency(self, metric: str, observer: str, name: str | None = None) -> Mapping[str, Any]:
        rows = [
            r for r in self.one(name).latency if (r["metric"], r["observer"]) == (metric, observer)
        ]
        assert len(rows) == 1
        return rows[0]

    def phase(self, detail: str, name: str | None = None) -> Mapping[str, Any]:
        return next(p for p in self.one(name).phases if p["detail"] == detail)

    def finding(self, name_of: str, name: str | None = None) -> Any:
        return next((f for f in self.one(name).findings if f.id == name_of), None)

    def value(self, query: str) -> Any:
        return self.store.sql(query).item()

    def skipped(self, path: str) -> dict[str, int]:
        return next(s["skipped_reasons"] for s in self.said.sources if s["path"].endswith(path))


@cache
def read(*paths: Path) -> Run:
    """A capture, read once a session."""
    return Run(paths)


@pytest.fixture(scope="session", autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    read.cache_clear()


def server_side(folder: Path) -> tuple[Path, ...]:
    """The files of a capture without what clients and the proxy's own book-keeping say."""
    own = re.compile(r"client\.jsonl|bench_|proxy_requests|cmd|ORIGIN|profile_export|aiperf")
    return tuple(sorted(p for p in folder.iterdir() if p.is_file() and not own.match(p.name)))


def exact_partition(run: Run) -> None:
    """Phases cover each request's window exactly: nothing twice, nothing left out."""
    wrong = run.value(
        """SELECT count(*) FROM (
             SELECT r.request, r.end_ns - r.start_ns AS whole, sum(p.end_ns - p.start_ns) AS parts,
                    min(p.start_ns) AS low, max(p.end_ns) AS high, r.start_ns, r.end_ns
             FROM requests r LEFT JOIN phases p USING (request)
             WHERE r.start_ns IS NOT NULL AND r.end_ns IS NOT NULL GROUP BY ALL)
           WHERE whole <> parts OR low <> start_ns OR high <> end_ns"""
    )
    assert wrong == 0
    twice = run.value(
        """SELECT count(*) FROM (SELECT start_ns, lag(end_ns) OVER (PARTITION BY request ORDER BY start_ns, end_ns) AS before
                                 FROM phases) WHERE start_ns < before"""
    )
    assert twice == 0


def balanced(run: Run) -> None:
    """Every source is accounted for: read = kept + skipped, skipped = the sum of its reasons."""
    for source in run.said.sources:
        assert source["rows_read"] == source["rows_kept"] + source["rows_skipped"], source
        assert source["rows_skipped"] == sum(source["skipped_reasons"].values()), source
        assert source["why"], source
        assert "gave no row" not in source["skipped_reasons"], source


def comparable(run: Run) -> dict[str, pl.DataFrame]:
    """Requests, phases and legs without what names files."""
    by_path = {"source", "record", "leg", "worker", "deployment", "prefill_worker", "decode_worker"}
    tables = {}
    for name in ("requests", "phases", "legs", "intervals", "steps", "decisions", "events"):
        frame = run.store.sql(f"FROM {name}")
        # Ids made of a path change with the path; all others must not.
        frame = frame.drop(list(by_path & set(frame.columns))).drop(
            [c for c in ("router", "clock") if c in frame.columns]
        )
        if "request" in frame.columns:  # a line without any id is named by its file
            frame = frame.with_columns(pl.col("request").str.replace("^.*#", "#"))
        tables[name] = frame.sort(frame.columns, nulls_last=True)
    return tables


def same_tables(a: Run, b: Run) -> None:
    left, right = comparable(a), comparable(b)
    for name, frame in left.items():
        assert frame.equals(right[name]), name


# ---- vllm/agg: the demo is the whole run --------------------------------------------------------------


def agg_runs() -> list[Any]:
    return [pytest.param((DEMO,), id="demo"), pytest.param((VLLM / "agg",), id="full", marks=full)]


@pytest.mark.parametrize("paths", agg_runs())
def test_vllm_agg_counts_requests_and_nothing_else(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    one = run.one()
    assert (one.mode, one.requests["count"], one.requests["completed"]) == ("aggregated", 362, 362)
    assert run.value("SELECT count(*) FROM spans WHERE name <> 'llm_request'") == 12
    engine, client = "observer = 'engine'", "observer = 'client'"
    traced = "trace_id IS NOT NULL"
    assert run.value(f"SELECT count(DISTINCT request) FROM legs WHERE {engine} AND {traced}") == 362
    assert run.value(f"SELECT count(*) FROM legs WHERE {client} AND request IS NOT NULL") == 358
    # Spans, log and bench rows are the same requests.
    assert (
        run.value(f"SELECT count(DISTINCT request) FROM legs WHERE {engine} AND NOT {traced}")
        == 362
    )
    assert run.value("SELECT count(*) FROM requests WHERE request LIKE '%tokenize%'") == 0
    assert run.value("SELECT count(*) FROM identity_edges WHERE rule = 'prefix_index'") == 358
    lengths = run.value(
        """SELECT count(*) FROM legs c JOIN legs e USING (request)
           WHERE c.observer = 'client' AND e.trace_id IS NOT NULL
             AND (abs(c.prompt_tokens - e.prompt_tokens) > 1 OR abs(c.output_tokens - e.output_tokens) > 1)"""
    )
    assert lengths == 0
    exact_partition(run)
    balanced(run)


@pytest.mark.parametrize("paths", agg_runs())
def test_vllm_agg_says_the_latencies_of_the_run(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    ttft = run.latency("ttft_ms", "engine")
    assert (ttft["count"], ttft["p50"]) == (362, pytest.approx(92.5, abs=0.1))
    assert ttft["p99"] == pytest.approx(1148, abs=1)
    before = run.phase("before_queue")
    assert before["p50_ms"] == pytest.approx(11.2, abs=0.1)
    assert before["p99_ms"] == pytest.approx(237, abs=1)
    headline = run.latency("ttft_ms", "client")
    assert headline["headline"]
    assert headline["count"] == 358


@pytest.mark.parametrize("paths", agg_runs())
def test_vllm_agg_steps_show_interference(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    step = run.store.sql("FROM interference_steps").row(0, named=True)
    assert step["steps"] == 13_844
    assert (step["decode_only_steps"], step["mixed_steps"], step["prefill_only_steps"]) == (
        13_456,
        263,
        125,
    )
    assert step["decode_only_p50_ms"] == pytest.approx(1.90, abs=0.01)
    assert step["mixed_p50_ms"] == pytest.approx(65.3, abs=0.1)
    found = run.finding("prefill_interference")
    assert (found.level, found.unit) == ("A", "s")
    assert found.value == pytest.approx(49.9, rel=0.02)
    assert found.share == pytest.approx(1 / 3, abs=0.01)
    assert found.interval[0] <= found.value <= found.interval[1]
    assert "step-counted decode time, 147.9 s" in found.detail
    assert "50.3 s" in found.detail


# ---- vllm/pd_nixl: the server-side files alone --------------------------------------------------------


def pd_runs() -> list[Any]:
    whole = server_side(VLLM / "pd_nixl") if FULL.is_dir() else ()
    return [
        pytest.param((CUTS / "pd_nixl",), id="cut"),
        pytest.param(whole, id="full", marks=full),
    ]


@pytest.mark.parametrize("paths", pd_runs())
def test_pd_nixl_is_one_split_deployment(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    one = run.one()
    assert (one.mode, one.requests["count"]) == ("disaggregated", 307)
    joined = run.store.sql(
        """SELECT request, bool_or(observer = 'router') AS proxy, bool_or(role = 'prefill') AS p, bool_or(role = 'decode') AS d
           FROM legs WHERE request IS NOT NULL AND container IS NOT TRUE GROUP BY request"""
    )
    assert joined.filter(pl.col("proxy") & pl.col("p") & pl.col("d")).height == 306
    assert joined.filter(~pl.col("proxy")).height == 1
    assert {w["role"] for w in one.workers} == {"router", "prefill", "decode"}
    assert len(one.workers) == 3
    exact_partition(run)
    balanced(run)


@pytest.mark.parametrize("paths", pd_runs())
def test_pd_nixl_headline_is_the_proxys(paths: tuple[Path, ...]) -> None:
    ttft = read(*paths).latency("ttft_ms", "router")
    assert ttft["headline"]
    assert ttft["count"] == 306
    assert ttft["p50"] == pytest.approx(651.6, abs=1)
    assert ttft["p90"] == pytest.approx(1793.8, rel=0.02)


@pytest.mark.parametrize("paths", pd_runs())
def test_pd_nixl_decode_side_wait_is_an_upper_bound_on_kv(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    wait = run.phase("kv_wait_upper_bound")
    assert (wait["phase"], wait["basis"], wait["count"]) == ("kv_wait", "upper_bound", 307)
    queued = run.value(
        """SELECT count(*) FROM phases p JOIN workers w USING (worker)
           WHERE w.role = 'decode' AND p.detail IN ('prefill_queue', 'decode_queue')"""
    )
    assert queued == 0
    moved = run.finding("kv_transfer")
    assert moved.interval[0] < moved.interval[1]
    assert any("only the whole wait on the decode side" in line for line in run.said.not_supported)


@pytest.mark.parametrize("folder", [pytest.param(VLLM / "pd_nixl", id="full", marks=full)])
def test_pd_nixl_counters_bound_the_transfer_inside_that_wait(folder: Path) -> None:
    """The mover's own totals: 306 transfers of 1.882 s and 758.9 MB in the bench runs, one before them."""
    run = read(*server_side(folder))
    row = run.store.query("kv_transfer").row(0, named=True)
    assert row["counter_transfers"] == 307
    assert row["counter_s"] == pytest.approx(1.882, abs=0.001)
    assert row["counter_bytes"] == pytest.approx(758_906_880, rel=0.001)
    assert row["at_most_transfer_s"] / row["value"] == pytest.approx(0.22, abs=0.02)
    assert row["decode_usage_max_ratio"] == pytest.approx(0.038)  # no wait for KV space
    assert (row["expected_bytes"], row["transfers"]) == (None, None)  # a random model; no records


@pytest.mark.parametrize("folder", [pytest.param(DYNAMO / "agg", id="full", marks=full)])
def test_dynamo_agg_answers_repeat_the_routers_belief(folder: Path) -> None:
    """Cached tokens in the answers equal the router's overlap in 200 of 200: no check of it."""
    run = read(*server_side(folder))
    assert run.finding("router_belief") is None
    row = run.store.query("routing").row(0, named=True)
    assert (row["decisions"], row["belief"], row["workers_seen"]) == (200, "copy", 2)
    assert row["index_saved_tokens"] == 46_160 - 44_240  # best eligible less selected
    assert row["requests_over_mean"] == pytest.approx(1.02)


@pytest.mark.parametrize("paths", pd_runs())
def test_pd_nixl_pulled_requests_are_no_prefills_on_the_decode_worker(
    paths: tuple[Path, ...],
) -> None:
    run = read(*paths)
    decode = run.store.sql(
        "SELECT s.* FROM interference_steps s JOIN workers w USING (worker) WHERE w.role = 'decode'"
    ).row(0, named=True)
    held = run.store.sql(
        """SELECT count(*) AS steps, bool_and(pulled_requests = prefill_requests) AS pulled
           FROM steps JOIN workers USING (worker)
           WHERE role = 'decode' AND prefill_requests > 0 AND decode_requests > 0"""
    ).row(0)
    assert held == (210, True)
    assert decode["mixed_steps"] == 0
    assert not decode["lost_s"]
    found = run.finding("prefill_interference")
    worker = run.value("SELECT worker FROM workers WHERE role = 'decode'")
    assert found is None or worker not in found.workers


# ---- vllm/edge ----------------------------------------------------------------------------------------


def edge_runs() -> list[Any]:
    return [
        pytest.param((CUTS / "pd_nixl", CUTS / "edge"), id="cut"),
        pytest.param((VLLM / "pd_nixl", VLLM / "edge"), id="full", marks=full),
    ]


@pytest.mark.parametrize("paths", edge_runs())
def test_edge_is_a_later_window_of_the_prefill_server(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    one = run.one()
    assert one.requests["count"] == 313
    prefill = run.value("SELECT worker FROM workers WHERE role = 'prefill'")
    late = run.store.sql(
        """SELECT DISTINCT l.worker FROM legs l JOIN sources s USING (source)
           WHERE s.path LIKE '%edge%' AND l.observer = 'engine'"""
    )
    assert late["worker"].to_list() == [prefill]


@pytest.mark.parametrize("paths", edge_runs())
def test_edge_finds_what_has_no_span(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    one = run.one()
    assert (one.requests["failed"], one.requests["aborted"]) == (1, 1)
    late = "WHERE r.start_ns > (SELECT max(start_ns) FROM legs WHERE observer = 'router')"
    lost = run.store.sql(
        f"""SELECT r.outcome, r.error, bool_or(s.span_id IS NOT NULL) AS traced
            FROM requests r JOIN legs l USING (request) LEFT JOIN spans s ON s.trace_id = l.trace_id {late}
            GROUP BY r.request, r.outcome, r.error"""
    ).filter(~pl.col("traced"))
    assert sorted(lost["outcome"]) == [
        "aborted",
        "failed",
        "unknown",
    ]  # nothing says how the unsampled one ended
    assert run.value("SELECT count(*) FROM events WHERE kind = 'http_error'") >= 1
    assert run.finding("failed_requests").requests == 2


@pytest.mark.parametrize("paths", edge_runs())
def test_edge_counts_batched_prompts_and_streams(paths: tuple[Path, ...]) -> None:
    run = read(*paths)
    assert run.value("SELECT count(*) FROM requests WHERE streams = 2") == 1
    batch = run.store.sql(
        """SELECT DISTINCT request FROM legs WHERE request_id SIMILAR TO '.*-[01](-[0-9a-f]{8})?' AND source IN
           (SELECT source FROM sources WHERE path LIKE '%edge%')"""
    )
    assert batch.height >= 2


# ---- dynamo -------------------------------------------------------------------------------------------

DYNAMO_RUNS = {"disagg_bootstrap": ("disaggregated", 98.1), "agg": ("aggregated", 30.8)}


def client_truth(folder: Path) -> list[float]:
    """TTFT of each request as the load generator measured it, in ms."""
    with gzip.open(folder / "client.jsonl.gz", "rt") as stream:
        rows = [json.loads(line) for line in stream]
    return [(row["chunk_unix_ns"][0] - row["start_unix_ns"]) / 1e6 for row in rows]


def dynamo_runs() -> list[Any]:
    return [
        pytest.param(base / name, count, id=f"{name}-{kind}", marks=marks)
        for name in DYNAMO_RUNS
        for base, count, kind, marks in ((CUTS, 30, "cut", []), (DYNAMO, 200, "full", full))
    ]


@pytest.mark.parametrize(("folder", "count"), dynamo_runs())
def test_dynamo_tells_the_clients_ttft_from_the_servers_alone(folder: Path, count: int) -> None:
    run = read(*server_side(folder))
    one = run.one()
    mode, figure = DYNAMO_RUNS[folder.name]
    assert (one.mode, one.requests["count"], one.requests["completed"]) == (mode, count, count)
    ttft = run.latency("ttft_ms", "frontend")
    assert ttft["headline"]
    assert ttft["count"] == count
    assert ttft["definition"] == "frontend: start of the HTTP request to the first streamed token"
    truth = pl.Series(client_truth(folder)).median()
    assert ttft["p50"] == pytest.approx(truth, abs=5)
    if count == 200:
        assert truth == pytest.approx(figure, abs=0.1)
    said = run.value(
        "SELECT median(value) FROM reported WHERE quantity = 'ttft_ms' AND definition LIKE '%prefill worker%'"
    )
    assert said is not None
    if mode == "disaggregated":  # what the request trace calls ttft_ms is another quantity
        assert said < truth / 2
    exact_partition(run)
    balanced(run)


@pytest.mark.parametrize(("folder", "count"), dynamo_runs())
def test_dynamo_has_one_frontend_and_its_workers(folder: Path, count: int) -> None:
    roles = sorted(w["role"] or "?" for w in read(*server_side(folder)).one().workers)
    engines = (
        ["aggregated", "aggregated"]
        if folder.name == "agg"
        else ["decode", "decode", "prefill", "prefill"]
    )
    assert roles == sorted([*engines, "frontend"])


@pytest.mark.parametrize(("folder", "count"), dynamo_runs())
def test_dynamo_logs_alone_tell_the_same_structure(folder: Path, count: int) -> None:
    traces = [p for p in folder.iterdir() if p.name == "otlp_traces.jsonl.gz"]
    logs = sorted(folder.glob("*.log.jsonl.gz"))
    exported, logged = read(*traces), read(*logs)
    legs = """SELECT request, observer, role, container, status FROM legs
              WHERE span_id IS NOT NULL AND request IS NOT NULL ORDER BY ALL"""
    told = exported.store.sql(legs)
    assert told.height >= 2 * count
    assert logged.store.sql(legs).unique().sort(pl.all()).equals(told.unique().sort(pl.all()))
    a, b = (
        run.store.sql("SELECT request, ttft_ms, e2e_ms FROM requests ORDER BY request")
        for run in (exported, logged)
    )
    assert a["request"].equals(b["request"])
    for column in ("ttft_ms", "e2e_ms"):
        off = (a[column] - b[column]).abs()
        assert off.quantile(0.95) < 3
        assert off.max() < 30
    # The copies count once, and the finer one stays.
    both = Run([*traces, *logs])
    assert both.store.count("spans") == exported.store.count("spans")
    assert both.value("SELECT max(coalesce(resolution_ns, 1)) FROM spans") == 1
    assert both.value("SELECT count(*) FROM decisions") == exported.value(
        "SELECT count(*) FROM decisions"
    )
    assert both.value("SELECT count(cost) FROM decisions") == both.value(
        "SELECT count(*) FROM decisions"
    )


@pytest.mark.parametrize(
    ("folder", "losses"),
    [pytest.param(DYNAMO / "agg", ((1.07, 23.7), (1.26, 23.4)), id="full", marks=full)],
)
def test_dynamo_agg_interference_on_each_worker(
    folder: Path, losses: tuple[tuple[float, float], ...]
) -> None:
    run = read(*server_side(folder))
    found = run.finding("prefill_interference")
    assert found.level == "A"
    rows = run.store.sql("SELECT lost_s, decode_s FROM interference_steps WHERE lost_s > 0").rows()
    for lost, whole in losses:
        assert any(
            row[0] == pytest.approx(lost, rel=0.1) and row[1] == pytest.approx(whole, rel=0.1)
            for row in rows
        ), rows


def aiperf_runs() -> list[Any]:
    return [
        pytest.param(CUTS / "aiperf_disagg", 30, id="cut"),
        pytest.param(DYNAMO / "aiperf_disagg", 200, id="full", marks=full),
    ]


@pytest.mark.parametrize(("folder", "count"), aiperf_runs())
def test_aiperf_records_join_spans(folder: Path, count: int) -> None:
    run = read(folder)
    assert run.one().requests["count"] == count
    joined = run.value(
        """SELECT count(DISTINCT c.request) FROM legs c JOIN legs f USING (request)
           WHERE c.observer = 'client' AND f.observer = 'frontend' AND f.span_id IS NOT NULL"""
    )
    assert joined == count
    assert run.latency("ttft_ms", "client")["headline"]
    exact_partition(run)
    balanced(run)


# ---- all in one call ----------------------------------------------------------------------------------


def all_runs() -> list[Any]:
    cuts = tuple(sorted(p for p in CUTS.iterdir() if p.is_dir()))
    return [
        pytest.param((*cuts, DEMO), 6, id="cut"),
        pytest.param((VLLM, DYNAMO), 6, id="full", marks=full),
    ]


def _home(path: str) -> str:
    """Which run a file belongs to."""
    name = next(
        (
            n
            for n in (
                "pd_nixl",
                "pd_doors",
                "edge",
                "disagg_bootstrap",
                "aiperf_disagg",
                "unified_backend",
            )
            if f"/{n}/" in path
        ),
        None,
    )
    if name is None:
        name = "vllm" if "/demo/" in path or "/vllm/agg/" in path else "dynamo_agg"
    return "pd_nixl" if name == "edge" else name


@pytest.mark.parametrize(("paths", "deployments"), all_runs())
def test_all_captures_in_one_call_do_not_mix(paths: tuple[Path, ...], deployments: int) -> None:
    run = read(*paths)
    assert len(run.said.deployments) == deployments
    homes: dict[str, set[str]] = {}
    for deployment, path in run.store.rows(
        "SELECT DISTINCT l.deployment, s.path FROM legs l JOIN sources s USING (source) WHERE l.request IS NOT NULL"
    ):
        homes.setdefault(deployment, set()).add(_home(path))
    assert all(len(names) == 1 for names in homes.values()), homes
    assert len({next(iter(names)) for names in homes.values()}) == deployments
    # No request is in two deployments, nor made of files of two runs.
    assert run.value("SELECT count(*) FROM (SELECT request FROM legs WHERE request IS NOT NULL GROUP BY request HAVING count(DISTINCT deployment) > 1)") == 0  # fmt: skip
    exact_partition(run)
    balanced(run)


@pytest.mark.parametrize(("paths", "deployments"), all_runs())
def test_no_prompt_and_no_answer_enters_the_store(
    paths: tuple[Path, ...], deployments: int
) -> None:
    del deployments
    run = read(*paths)
    words = secrets(paths)
    assert words or FULL not in (path.parent for path in paths)
    text = re.compile("|".join(re.escape(word) for word in words)) if words else None
    for table, column, kind in run.store.rows(
        "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal AND data_type LIKE '%VARCHAR%'"
    ):
        del kind
        if text is None:
            break
        rows = run.store.sql(
            f"SELECT DISTINCT CAST({column} AS VARCHAR) AS v FROM {table} WHERE regexp_matches(CAST({column} AS VARCHAR), $p)",
            p=text.pattern,
        )
        assert rows.height == 0, (table, column, rows["v"][0][:80])


def secrets(paths: tuple[Path, ...]) -> list[str]:
    """Fragments of prompts and answers that stand in the files that were read."""
    found: set[str] = set()
    for path in (
        p for folder in paths for p in ([folder] if folder.is_file() else sorted(folder.rglob("*")))
    ):
        if path.is_file() and re.search(
            r"bench_.*json|\.sse|inputs\.json|raw\.jsonl|batch\.json|unsampled", path.name
        ):
            opener = gzip.open if path.suffix == ".gz" else open
            with opener(path, "rt", errors="replace") as stream:
                for n, (_, said) in enumerate(_SAID.findall(stream.read())):
                    middle = said[len(said) // 3 : len(said) // 3 + 24]
                    if len(middle) == 24 and "\\" not in middle:
                        found.add(middle)
                    if n > 400:
                        break
    return sorted(found)[:400]


_SAID = re.compile(r'"(generated_texts|text|content|prompt)": ?\[?\s*"((?:[^"\\]|\\.){40,})"')


# ---- the same inputs in other clothes -----------------------------------------------------------------


def twice_runs() -> list[Any]:
    return [
        pytest.param(CUTS / "edge", id="edge"),
        pytest.param(CUTS / "disagg_bootstrap", id="disagg_bootstrap"),
        pytest.param(CUTS / "aiperf_disagg", id="aiperf_disagg"),
        pytest.param(CUTS / "pd_nixl", id="pd_nixl"),
    ]


@pytest.mark.parametrize("folder", twice_runs())
def test_reading_twice_or_in_another_order_changes_nothing(folder: Path, tmp_path: Path) -> None:
    once = read(folder)
    copy = tmp_path / "copy" / folder.name
    shutil.copytree(folder, copy)
    doubled = Run([folder, folder, copy])
    same_tables(once, doubled)
    balanced(doubled)
    # Names that turn the order of the paths round.
    turned = tmp_path / "turned" / folder.name
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "ORIGIN")
    for n, path in enumerate(reversed(files)):
        target = turned / f"{n:02d}-{path.name}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    same_tables(once, Run([turned]))


@pytest.mark.parametrize(
    ("folder", "json_lines", "protobuf"),
    [
        pytest.param(
            VLLM / "pd_nixl",
            "pd.traces.otlp.jsonl.gz",
            "pd.traces.otlp.bin.gz",
            id="vllm",
            marks=full,
        ),
        pytest.param(
            DYNAMO / "agg", "otlp_traces.jsonl.gz", "otlp_traces.pb.gz", id="dynamo", marks=full
        ),
    ],
)
def test_protobuf_and_json_copies_count_once(folder: Path, json_lines: str, protobuf: str) -> None:
    left, right, both = (
        Run([folder / json_lines]),
        Run([folder / protobuf]),
        Run([folder / json_lines, folder / protobuf]),
    )
    same_tables(left, right)
    same_tables(left, both)
    assert both.store.count("spans") == left.store.count("spans")
    used = [s["used"] for s in both.said.sources]
    assert sorted(used) == [False, True]
    balanced(both)


# ---- OTLP logs of Dynamo ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [pytest.param(DYNAMO / "disagg_bootstrap" / "otlp_logs.jsonl.gz", id="full", marks=full)],
)
def test_otlp_logs_alone_are_one_deployment(path: Path) -> None:
    run = read(path)
    one = run.one()
    assert (one.mode, one.requests["count"], one.requests["completed"]) == (
        "disaggregated",
        200,
        200,
    )
    assert run.value("SELECT count(*) FROM decisions") == 400
    assert run.value("SELECT count(*) FROM legs WHERE leg LIKE 'dynamo_request_trace/%'") == 600
    balanced(run)
